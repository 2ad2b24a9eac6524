"""Attention by teams of ranks, experts over all of them: tokens are those of one device, whatever each team has to do."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helpers import faulty_ranks, graph_teams
from helpers.effort import TEST_DAY, effort
from helpers.families import MAKERS
from helpers.patience import patient
from pagerunner import LLM, limits
from pagerunner.config import EngineArgs
from pagerunner.dist.base import Comm
from pagerunner.dist.gloo import GlooComm
from pagerunner.dist.null import NullComm
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors.base import Started
from pagerunner.engine.core.executors.process import ProcessExecutor, RanksStep
from pagerunner.engine.startup import resolve as resolving
from pagerunner.engine.startup.build import build_on
from pagerunner.engine.startup.resolve import Resolved, resolve
from pagerunner.engine.worker.worker import load_worker
from pagerunner.errors import ConfigError, EngineDeadError, InvalidRequestError
from pagerunner.sched.teams import TeamsScheduler
from pagerunner.types import EngineRequest, SamplingParams, StepPlan, StepResult, TeamsPlan, TeamsResult

pytestmark = pytest.mark.usefixtures("forked")

LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 48, "device": "cpu"}


class Pending:
    """A step of all ranks. Those of a team must have the same result."""

    def __init__(self, plan: TeamsPlan, of_ranks: Sequence[Any]) -> None:
        self._plan, self._of_ranks = plan, of_ranks
        self.in_graph = all(pending.in_graph for pending in of_ranks)

    def result(self) -> TeamsResult:
        results: list[StepResult] = [pending.result() for pending in self._of_ranks]
        ranks = len(results) // len(self._plan.teams)
        for rank, result in enumerate(results):
            assert result == results[rank - rank % ranks]
        return TeamsResult(step_id=0, token_ids=[], teams=results[::ranks])


# Made once: threads that work out the fields of a type at the same time can end the process.
PLANS = msgspec.msgpack.Decoder(StepPlan)


class Teams:
    """Ranks of all teams in threads of this process. Plans travel as bytes."""

    facts = ()
    failure_fd = None
    busy_seconds = 0.0

    def __init__(self, resolved: Resolved, directory: Path) -> None:
        size, self.ranks = resolved.config.num_ranks, resolved.config.tensor_parallel_size
        directory.mkdir(mode=0o700)
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        self.plans: list[TeamsPlan] = []
        self.in_graph: list[bool] = []

        def load(rank: int) -> Any:
            world = GlooComm(directory, rank, size, 60.0)
            comm: Comm = NullComm()
            if self.ranks > 1:
                team = rank // self.ranks
                comm = GlooComm(directory, rank % self.ranks, self.ranks, 60.0, f"team {team}")
            return load_worker(resolved, comm=comm, teams=world)

        self._loaded = self._each(load, range(size))

    def _each(self, act: Callable[[Any], Any], given: Iterable[Any]) -> list[Any]:
        futures = [thread.submit(act, one) for thread, one in zip(self._threads, given, strict=True)]
        return [future.result() for future in futures]

    def take_pages(self, num_bytes: int) -> Started:
        self.workers = [loaded.map_pages(num_bytes) for loaded in self._loaded]
        return Started(self, self._loaded[0].meter.report())  # type: ignore[arg-type]

    def run(self, plan: StepPlan) -> Pending:
        assert isinstance(plan, TeamsPlan)
        self.plans.append(plan)
        data = [msgspec.msgpack.encode(own) for own in plan.teams]
        given = enumerate(self.workers)
        found = self._each(lambda one: one[1].run(PLANS.decode(data[one[0] // self.ranks])), given)
        pending = Pending(plan, found)
        self.in_graph.append(pending.in_graph)
        return pending

    def check_same(self) -> None:
        """All ranks of a team have the same page tables and last tokens."""
        found = self._each(lambda worker: worker.state_digest(), self.workers)
        assert all(digest == found[rank - rank % self.ranks] for rank, digest in enumerate(found))

    sleep_level = None

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


def args_of(model: Path, ranks: int = 1, teams: int = 1, **settings: Any) -> EngineArgs:
    return EngineArgs(
        model=str(model),
        tensor_parallel_size=ranks,
        data_parallel_size=teams,
        enable_expert_parallel=ranks * teams > 1,
        poison_fresh_pages=True,
        **LIMITS | settings,
    )


def start(model: Path, directory: Path, ranks: int, teams: int, **settings: Any) -> tuple[EngineCore, Teams]:
    resolved = resolve(args_of(model, ranks, teams, **settings))
    made = Teams(resolved, directory)
    return build_on(resolved, made), made


def alone(model: Path, **settings: Any) -> EngineCore:
    resolved = resolve(args_of(model, **settings))
    return build_on(resolved, load_worker(resolved))


def request(name: str, prompt: Sequence[int], tokens: int = 8, team: int | None = None, **params: Any) -> EngineRequest:
    asked = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True} | params)
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=asked,
        seed=7,
        max_tokens=tokens,
        data_parallel_rank=team,
    )


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1, "top_k": 30, "top_p": 0.9},
    {"temperature": 1},
    {"presence_penalty": 0.7, "logprobs": 3},
    {"prompt_logprobs": 2, "logit_bias": {7: 3.0}},
]


def some(seed: int, count: int) -> list[EngineRequest]:
    """Requests of all kinds, with prompts of which some begin alike."""
    choose = random.Random(seed)
    begin = [5 + choose.randrange(200) for _ in range(48)]
    found = []
    for number in range(count):
        more = [5 + choose.randrange(200) for _ in range(choose.randint(1, 20))]
        prompt = begin[: choose.choice((0, 16, 33, 48))] + more
        found.append(request(f"{seed}-{number}", prompt, choose.randint(4, 20), **KINDS[number % len(KINDS)]))
    return found


def run(core: EngineCore, asked: Sequence[EngineRequest], at_once: int = 4) -> dict[str, list[int]]:
    waiting = list(asked)
    tokens: dict[str, list[int]] = {}
    while waiting or core.has_work:
        for one in waiting[:at_once]:
            core.add(one)
        del waiting[:at_once]
        for update in core.step():
            assert update.error is None
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
    return tokens


def of_team(core: EngineCore) -> list[int]:
    """How many requests each team has."""
    assert isinstance(core._scheduler, TeamsScheduler)
    return [len(team.request_ids) for team in core._scheduler.teams]


FAMILIES = ["deepseek_v2", "deepseek_v3", "deepseek_v4", "gpt_oss", "llama4_text", "qwen3_5_moe_text", "qwen3_moe"]
SIZES = [(1, 3), (2, 2), (1, 2)]


@pytest.mark.parametrize("family", [FAMILIES[(TEST_DAY + place) % len(FAMILIES)] for place in (0, 3)])
def test_tokens_are_those_of_one_device(family: str, tmp_path: Path) -> None:
    """Experts may be unequally many on ranks. Latents, shared experts, windows and recurrences are those of each team."""
    model = MAKERS[family](tmp_path)
    ranks, teams = SIZES[(TEST_DAY // len(FAMILIES) + FAMILIES.index(family)) % len(SIZES)]
    settings = {"num_gpu_blocks_override": 24, "max_in_flight": 2}
    wanted = run(alone(model, **settings), some(3, 7))
    core, made = start(model, tmp_path / "ranks", ranks, teams, **settings)
    assert run(core, some(3, 7)) == wanted
    made.check_same()
    assert {sum(map(bool, (own.rows for own in plan.teams))) for plan in made.plans} > {teams}, "no team was ever idle"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(MAKERS["qwen3_moe"](tmp_path_factory.mktemp("model")))


def test_random_traffic_with_aborts_and_too_few_pages(model: Path, tmp_path: Path) -> None:
    """Tokens of requests that weren't aborted are one device's. Ranks of a team always have the same tables."""
    settings = {"num_gpu_blocks_override": 9, "max_in_flight": 2}
    one = alone(model, **settings)
    core, made = start(model, tmp_path / "ranks", *[(2, 2), (1, 3)][TEST_DAY % 2], **settings)
    choose, number, same = random.Random(TEST_DAY), 0, 0
    while len(made.plans) < effort(40, 3_000) or not core.stats().preemptions_total:
        asked = some(choose.randrange(10**9), choose.randint(1, 12))
        wanted, found = run(one, asked), {}
        waiting, gone = list(asked), {one.request_id for one in asked if choose.random() < 0.2}
        while waiting or core.has_work:
            while waiting and choose.random() < 0.7:
                core.add(waiting.pop(0))
            for update in core.step() if core.has_work else ():
                found.setdefault(update.request_id, []).extend(update.new_token_ids)
            if gone and choose.random() < 0.2:
                core.abort([name := choose.choice(sorted(gone))])
                waiting = [one for one in waiting if one.request_id != name]
                gone = gone - {name}
                wanted.pop(name)
        made.check_same()
        number += len(wanted)
        same += sum(found[name] == tokens for name, tokens in wanted.items())
    assert same >= number - max(1, number // 100), "more than near ties differ"
    assert core.stats().kv_usage == 0.0 and not any(of_team(core))


def test_each_team_has_what_it_has_to_do(model: Path, tmp_path: Path) -> None:
    """One team alone; a row against many; a prompt against decoding rows."""
    asked = [request(f"r{n}", [9 + n, 30, 31], 12) for n in range(4)] + [request("long", range(20, 86), 6)]
    wanted = run(alone(model), asked)
    core, made = start(model, tmp_path / "ranks", 1, 2)

    def with_teams(teams: Sequence[int]) -> list[EngineRequest]:
        both = zip(asked, teams, strict=True)
        return [msgspec.structs.replace(one, data_parallel_rank=team) for one, team in both]

    def shapes() -> set[tuple[int, ...]]:
        found = {tuple(len(own.rows) for own in plan.teams) for plan in made.plans}
        for plan in made.plans:
            assert {own.most_tokens for own in plan.teams} == {max(own.num_tokens for own in plan.teams)}
        made.plans.clear()
        return found

    assert run(core, with_teams([1] * 5)) == wanted
    assert {first for first, _ in shapes()} == {0}
    assert run(core, with_teams([0, 1, 1, 1, 1])) == wanted
    assert (1, 4) in shapes()
    assert run(core, with_teams([0, 0, 0, 0, 1]), at_once=5) == wanted
    assert (4, 1) in shapes()


def test_a_prompt_goes_where_its_beginning_is_and_else_to_the_emptier_team(model: Path, tmp_path: Path) -> None:
    core, _ = start(model, tmp_path / "ranks", 1, 2, max_num_batched_tokens=96)
    core.add(request("first", range(10, 90), 4, team=1))
    run(core, [])
    for n in range(3):
        core.add(request(f"same{n}", [*range(10, 74), 300 + n], 2))
        assert of_team(core) == [0, 1]
        run(core, [])
    teams = core.stats().teams
    assert [one.prefix_hits_total for one in teams] == [0, 3 * 64]
    assert core.stats().prefix_hits_total == 3 * 64
    for n in range(4):
        core.add(request(f"new{n}", [400 + n], 4))
    assert of_team(core) == [2, 2]
    with pytest.raises(InvalidRequestError, match=r"^request_id 'new3' is already in use\.$"):
        core.add(request("new3", [1], 4))
    assert len(core.abort(["new0", "new1"])) == 2
    siblings = msgspec.structs.replace(request("n_0", range(30), 4), parent_id="n").siblings([("n_1", 8), ("n_2", 9)])
    core.add(msgspec.structs.replace(request("n_0", range(30), 4), parent_id="n"))
    for one in siblings:
        core.add(one)
    assert sorted(of_team(core)) == [1, 4]
    run(core, [])


@pytest.mark.days(3)
def test_all_ranks_take_the_same_graphs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode graphs, mixed ones, and those of a team without rows. Steps with more tokens than any graph are eager on all ranks."""
    asked = [request(f"r{n}", [9 + n] * (1 + n), 8, presence_penalty=0.5 * (n == 1)) for n in range(5)]
    asked += [request("scored", range(20, 32), 4, prompt_logprobs=1), request("long", range(20, 60), 4)]
    wanted = run(alone(model), asked)
    core = graph_teams.build(args_of(model, 2, 2, cudagraph_capture_sizes=(1, 2, 4, 16)))
    plans: list[TeamsPlan] = []
    in_graph: list[bool] = []
    result, send = RanksStep.result, ProcessExecutor.run
    monkeypatch.setattr(RanksStep, "result", lambda step: (result(step), in_graph.append(step.in_graph))[0])
    monkeypatch.setattr(ProcessExecutor, "run", lambda own, plan: (send(own, plan), plans.append(plan))[0])
    assert run(core, asked) == wanted
    found = list(zip(plans, in_graph, strict=True))
    assert {plan.teams[0].graphs for plan, graph in found if graph} == {"decode", "mixed"}
    assert all(graph == (plan.teams[0].most_tokens <= 16) for plan, graph in found)
    assert any(graph and not all(own.rows for own in plan.teams) for plan, graph in found), "no team was ever idle"
    core._executor._compare()  # type: ignore[attr-defined]
    core._executor.close()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "qwen3",
            {"data_parallel_size": 2},
            r"^tensor_parallel_size=1, data_parallel_size=2: enable_expert_parallel divides whole experts .* none\. "
            r"Without it there are 2 whole engines\.$",
        ),
        (
            "qwen3_moe",
            {"data_parallel_size": 2, "tensor_parallel_size": 4},
            r"data_parallel_size=2: enable_expert_parallel: the model's \d experts can't be divided among 8 ranks",
        ),
        (
            "qwen3_moe",
            {"data_parallel_size": 2, "pipeline_parallel_size": 3, "tensor_parallel_size": 4},
            r"pipeline_parallel_size=3 must be 1\. As many ranks, 24, are tensor_parallel_size=12 or data_parallel_size=6 without stages, or "
            r"tensor_parallel_size=8 with data_parallel_size=1\. Without enable_expert_parallel there are 2 whole engines",
        ),
    ],
)
def test_what_can_not_be_divided_is_refused(family: str, settings: Any, message: str, tmp_path: Path) -> None:
    made = MAKERS[family](tmp_path)
    with pytest.raises(ConfigError, match=message):
        resolve(EngineArgs(model=str(made), enable_expert_parallel=True, device="cpu", **settings))


def test_each_rank_of_each_team_takes_a_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "resolve_device", lambda asked: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    message = r"=1 times data_parallel_size=2 with enable_expert_parallel takes 2 CUDA devices, and 1 can be seen"
    with pytest.raises(ConfigError, match=message):
        resolve(args_of(model, 1, 2, device="auto"))


def test_a_plan_counts_experts_once_for_all_ranks(model: Path) -> None:
    """Each of four ranks has a quarter of the experts, and a team's ranks half of everything else."""
    weights = {
        (ranks, teams, whole): dict(
            resolve(
                msgspec.structs.replace(args_of(model, ranks, teams), enable_expert_parallel=whole),
                2**34,
                plan_only=True,
            ).plan.other
        )["weights"]
        for ranks, teams, whole in [(1, 1, False), (1, 2, True), (2, 2, True), (1, 4, True), (2, 1, True)]
    }
    unit = (
        weights[1, 2, True] - weights[1, 4, True]
    )  # of six experts two ranks have three, and of four the last has two
    assert weights[1, 1, False] - weights[1, 2, True] == 3 * unit
    assert weights[2, 1, True] - weights[2, 2, True] == unit


# Processes


@pytest.mark.days(3)
def test_teams_in_processes_sleep_wake_and_end_together(model: Path) -> None:
    """Tokens are those of one device before and after each sleep. The end of a rank is that of all teams, with its own sentence."""
    settings: dict[str, Any] = {"model": str(model), "use_tqdm": False, "skip_tokenizer_init": True} | LIMITS
    prompts = [{"prompt_token_ids": [30, 31, *range(40, 44 + 9 * n)]} for n in range(5)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=1)

    def tokens(llm: LLM) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    wanted = tokens(LLM(**settings))
    llm = LLM(**settings, data_parallel_size=2, enable_expert_parallel=True, enable_sleep_mode=True)
    assert tokens(llm) == wanted
    assert [one.prompt_tokens_total > 0 for one in llm.stats().teams] == [True, True]
    executor = llm._core._executor
    assert isinstance(executor, ProcessExecutor)
    for level in (1, 2):
        executor._compare()
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm) == wanted
    assert [one["requests"] for one in map(llm.memory_state, (0, 1))] == [[], []] and llm.get_world_size() == 2
    assert llm.get_world_size(include_dp=False) == 1
    for team in (2, -1):
        with pytest.raises(
            InvalidRequestError, match=rf"team must be in \[0, 2\), as data_parallel_size is 2; got {team}\."
        ):
            llm.memory_state(team)
    began = time.monotonic()
    threading.Timer(0.3, lambda: os.kill(executor._ranks.watch._processes[1].pid, signal.SIGKILL)).start()
    with pytest.raises(EngineDeadError, match=r"Rank 1 of 2 was ended by SIGKILL"):
        while True:
            tokens(llm)
    assert time.monotonic() - began < patient(5)
    assert all(process.poll() is not None for process in executor._ranks.watch._processes.values())


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("token", "message"),
    [
        (faulty_ranks.RAISE, r"Rank 1 of 2: ValueError: a planted error"),
        (faulty_ranks.HANG, r"Rank 1 of 2 hangs: no rank has come further for 3 seconds .*it is at step"),
    ],
)
def test_a_rank_that_fails_ends_the_other_team_too(
    token: int, message: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RANK_SECONDS", 3)
    core = faulty_ranks.build(args_of(model, 1, 2))
    core.add(request("other", range(20, 30), 80, team=0))
    for _ in range(3):
        core.step()
    core.add(request("faulty", [7, token], 8, team=1))
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=message):
        while True:
            core.step()
    assert time.monotonic() - began < patient(10)
