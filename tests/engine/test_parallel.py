"""An engine that is divided among ranks in processes: its tokens are those of one rank, and one rank's end is the engine's.

Where it makes no difference to a test, ranks divide every layer on one day, and are stages of a pipeline on another one.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from helpers import faulty_ranks, graph_stages
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.effort import TEST_DAY, effort
from helpers.patience import patient, until
from helpers.processes import is_alive
from pagerunner import LLM, SamplingParams, StructuredOutputsParams, limits
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors import process, watch
from pagerunner.engine.core.executors.places import LocalPlaces
from pagerunner.engine.core.executors.process import ProcessExecutor, RanksStep
from pagerunner.engine.rank import what_it_runs
from pagerunner.engine.startup import resolve as resolving
from pagerunner.engine.startup.build import build_core
from pagerunner.engine.startup.machine import DeviceMemory
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import CapacityError, ConfigError, EngineDeadError
from pagerunner.types import EngineRequest

pytestmark = [pytest.mark.days(6), pytest.mark.usefixtures("forked")]  # most of them start processes

LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 48, "device": "cpu"}
WAY = ("tensor_parallel_size", "pipeline_parallel_size")[TEST_DAY // 6 % 2]
SIX: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 100}


def rank_pids() -> list[int]:
    """Processes of ranks that this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"pagerunner.engine.rank" in stat.with_name("cmdline").read_bytes():
                found.append(int(stat.parent.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    until(lambda: not rank_pids())
    assert "pagerunner-ranks" not in [thread.name for thread in threading.enumerate()]


def pid_of(core: EngineCore, rank: int) -> int:
    """The process of a rank."""
    executor = core._executor
    assert isinstance(executor, ProcessExecutor)
    return executor._ranks.watch._processes[rank].pid


def outputs(llm: LLM) -> list[Any]:
    """Tokens and how likely they were, of all kinds of requests, with prefixes and more sequences than there are pages for."""
    begin = list(range(30, 62))
    prompts = [{"prompt_token_ids": begin[: 8 * n] + [90 + n, 7, 9 + n]} for n in range(4)]
    kinds = [
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=1),
        SamplingParams(temperature=1, seed=7, max_tokens=16, ignore_eos=True, n=2, logprobs=2),
        SamplingParams(temperature=1, seed=2, top_k=20, top_p=0.9, presence_penalty=0.5, max_tokens=12),
        SamplingParams(temperature=0, logit_bias={7: 2.0}, allowed_token_ids=list(range(5, 400)), max_tokens=8),
    ]
    found = []
    for params in kinds:
        for output in llm.generate(prompts, params, use_tqdm=False):
            assert output.error is None
            found.append([list(one.token_ids) for one in output.outputs])
            for steps in (*(one.logprobs for one in output.outputs), (output.prompt_logprobs or [])[1:]):
                found.append(
                    [
                        {token: pytest.approx(entry.logprob, abs=1e-3) for token, entry in step.items()}
                        for step in steps or ()
                    ]
                )
    return found


def checkpoint(family: str, path: Path) -> Path:
    if family == "qwen3_moe":
        return Path(make_window_checkpoint(path, family))
    fields: dict[str, dict[str, Any]] = {
        "llama": SIX,
        "qwen3": {"num_attention_heads": 8, "vocab_size": 513},
        "qwen2": {"num_hidden_layers": 5, "tie_word_embeddings": True},
    }
    return make_checkpoint(path, family, **fields[family])


@pytest.mark.parametrize(
    ("family", "ranks", "stages"),
    [
        ("qwen3_moe", 2, 1),
        ("llama", 3, 1),
        ("qwen3", 4, 1),
        ("qwen3_moe", 1, 2),
        ("qwen2", 1, 3),
        ("qwen2", 2, 2),
    ],
)
def test_tokens_are_those_of_one_rank(family: str, ranks: int, stages: int, tmp_path: Path) -> None:
    """Four ranks have two key/value heads, so two of them keep the same one. Vocabularies and inner features aren't multiples.

    With stages four steps are in flight, and tied embeddings are on two stages. On some days ranks have whole experts.
    """
    settings = {
        "model": str(checkpoint(family, tmp_path)),
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 9,
    } | LIMITS
    alone = outputs(LLM(**settings, use_tqdm=False))
    llm = LLM(
        **settings,
        use_tqdm=False,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        enable_expert_parallel=(family, ranks) == ("qwen3_moe", 2) and TEST_DAY // 6 % 2 == 0,
        enable_sleep_mode=True,
        poison_fresh_pages=True,
    )
    ranks *= stages
    assert len(rank_pids()) == ranks
    assert (
        list(llm.startup.seconds)[:3] == ["import", "ranks' processes and imports", "config"]
        and llm.startup.loaded_bytes
    )
    found = outputs(llm)
    assert found == alone
    assert llm.stats().preemptions_total > 0 and llm.stats().prefix_hits_total > 0
    for level in (1, 2)[: 2 if ranks == 2 else 0]:
        llm.sleep(level)
        llm.wake_up(["weights"])
        assert llm._core.sleep_level == level
        llm.wake_up()
        assert outputs(llm) == alone
    assert len(rank_pids()) == ranks
    del llm
    assert rank_pids() == []


def test_stages_run_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages take the graph of the same size, as the stream that they pass on is padded. Penalties are for the last stage alone."""
    args = EngineArgs(model=str(demo_path()), num_gpu_blocks_override=24, **LIMITS)
    asked = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, presence_penalty=0.5 * (n == 1)) for n in range(3)
    ]

    def tokens(core: EngineCore) -> tuple[list[Any], set[bool]]:
        for n, params in enumerate(asked):
            core.add(
                EngineRequest(request_id=f"r{n}", prompt_token_ids=[7, 8 + n], params=params, seed=0, max_tokens=12)
            )
        found: dict[str, list[int]] = {}
        while core.has_work:
            for update in core.step():
                found.setdefault(update.request_id, []).extend(update.new_token_ids)
        return sorted(found.items()), set(in_graph)

    in_graph: list[bool] = []
    alone, _ = tokens(build_core(args))
    result = RanksStep.result
    monkeypatch.setattr(RanksStep, "result", lambda step: (result(step), in_graph.append(step.in_graph))[0])
    core = graph_stages.build(msgspec.structs.replace(args, pipeline_parallel_size=3))
    assert tokens(core) == (alone, {True})
    core._executor._compare()  # type: ignore[attr-defined]
    core._executor.close()


def test_a_chat_with_a_grammar_and_text_is_that_of_one_rank() -> None:
    settings: dict[str, Any] = {"model": str(demo_path()), "use_tqdm": False} | LIMITS | {"max_model_len": 128}
    params = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(
            temperature=0.8, seed=4, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[0-9]{4}")
        ),
    ]
    prompts = ["Once upon a time", "A number: "]
    one, two = (
        [output.outputs[0].text for output in LLM(**settings | {WAY: ranks}).generate(prompts, params, use_tqdm=False)]
        for ranks in (1, 2)
    )
    assert one == two and one[1].isdigit() and len(one[1]) == 4


def test_embeddings_are_those_of_one_rank(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model": str(make_checkpoint(tmp_path, "qwen3")),
        "use_tqdm": False,
        "pooler_config": {"pooling_type": "MEAN"},
    } | LIMITS
    one, two = (LLM(**settings | {WAY: ranks}).embed(["some words", "others"]) for ranks in (1, 2))
    assert two == [pytest.approx(vector, abs=1e-4) for vector in one]


def test_dummy_weights_are_a_model_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)  # the program has set so many, by which the plan counts
    llm = LLM(str(make_checkpoint(tmp_path, "qwen3")), load_format="dummy", use_tqdm=False, **LIMITS | {WAY: 2})
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    first, second = (llm.generate("some words", params, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
    assert first == second and len(first) == 5


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((3, 1), r"tensor_parallel_size=3: The model's 4 heads can't be divided among 3 ranks\. .*: 1, 2, 4\.$"),
        ((0, 1), "tensor_parallel_size must be a whole number of at least 1, got 0"),
        (("two", 1), "tensor_parallel_size must be a whole number, got 'two'"),
        (
            (1, 3),
            r"pipeline_parallel_size=3: the model has 2 layers, of which each stage needs one\. Lower it to 2 or less\.",
        ),
        ((1, 0), "pipeline_parallel_size must be a whole number of at least 1, got 0"),
    ],
)
def test_sizes_that_can_not_be_cut_are_refused_with_those_that_can(asked: Any, message: str, tmp_path: Path) -> None:
    ranks, stages = asked
    with pytest.raises(ConfigError, match=message):
        LLM(
            model=str(make_checkpoint(tmp_path, "qwen3")),
            tensor_parallel_size=ranks,
            pipeline_parallel_size=stages,
            use_tqdm=False,
            **LIMITS,
        )
    assert rank_pids() == []


@pytest.mark.parametrize("asked", ["2,2", "5,0", "4", "3,1,1", "3;2", "-1,6"])
def test_layers_of_stages_that_do_not_add_up_are_refused(
    asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGERUNNER_PP_LAYER_PARTITION", asked)
    with pytest.raises(ConfigError, match=rf"^PAGERUNNER_PP_LAYER_PARTITION='{asked}' must be 2 numbers of at least 1"):
        resolve(EngineArgs(model=str(demo_path()), pipeline_parallel_size=2, device="cpu"))
    resolve(EngineArgs(model=str(demo_path()), device="cpu"))
    assert f"PAGERUNNER_PP_LAYER_PARTITION='{asked}' is passed over, as pipeline_parallel_size is 1." in caplog.text


@pytest.mark.parametrize(
    ("shared", "asked", "message"),
    [
        ("", {}, r"^tensor_parallel_size=2 takes 2 CUDA devices, and 1 can be seen \(CUDA_VISIBLE_DEVICES .*cpu"),
        ("0", {"pipeline_parallel_size": 3}, "^tensor_parallel_size=2 times pipeline_parallel_size=3 takes 6 CUDA dev"),
        ("yes", {}, "^PAGERUNNER_RANKS_SHARE_DEVICES must be 0 or 1, got 'yes'"),
        ("1", {"disable_custom_all_reduce": True}, "NCCL, which has no ranks that share .*_RANKS_SHARE_DEVICES is 1"),
    ],
)
def test_devices_that_are_not_there_are_missed(
    shared: str, asked: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGERUNNER_RANKS_SHARE_DEVICES", shared)
    monkeypatch.setattr(resolving, "resolve_device", lambda asked: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=message):
        resolve(EngineArgs(model=str(demo_path()), tensor_parallel_size=2, **asked))


def test_ranks_on_devices_plan_with_what_the_core_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may have less memory free. The final plan is made from what each of them has left."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(resolving, "resolve_device", lambda asked: "cuda")
    own = iter([DeviceMemory(2**32, 2**31), DeviceMemory(2**32, 2**30)])
    monkeypatch.setattr(resolving, "device_memory", lambda of_ranks: next(own) if of_ranks else None)
    args = EngineArgs(model=str(demo_path()), tensor_parallel_size=2, gpu_memory_utilization=0.9)
    core = resolve(args)
    line = msgspec.json.encode(core.card or core.available)
    rank = resolve(args, available=msgspec.json.decode(line, type=int | DeviceMemory | None))  # type: ignore[arg-type]
    assert (rank.plan, rank.config, rank.card) == (core.plan, core.config, DeviceMemory(2**32, 2**31))
    assert resolve(args).plan != core.plan


def test_ranks_share_a_machines_memory_and_halve_what_a_token_takes(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=4, vocab_size=2048)
    one, two, four = (
        resolve(
            EngineArgs(model=str(path), tensor_parallel_size=n, device="cpu", max_model_len=256), available=2**30 // n
        ).plan
        for n in (1, 2, 4)
    )
    assert one.groups[0].page_bytes == 2 * two.groups[0].page_bytes == 2 * four.groups[0].page_bytes, (
        "four ranks have two heads"
    )
    weights = [plan.other[0][1] for plan in (one, two, four)]
    assert weights[0] > weights[1] > weights[2] > weights[0] / 4
    assert two.kv_bytes + two.other_bytes <= 2**29
    assert {"sums of all ranks", "logits of all ranks"} <= {name for name, _ in two.other}


# Faults


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RANK_SECONDS", 3)


def faulty(ranks: int = 2, **settings: Any) -> EngineCore:
    asked = {
        "model": str(demo_path()),
        WAY: ranks,
        "enable_sleep_mode": True,
        "num_gpu_blocks_override": 32,
    }
    return faulty_ranks.build(EngineArgs(**asked | LIMITS | settings))


def ask(core: EngineCore, *prompt: int, tokens: int = 40) -> None:
    """Only prompts have tokens with which ranks fail."""
    bias = dict.fromkeys(faulty_ranks.FAULTS, -100.0)
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logit_bias=bias)
    core.add(
        EngineRequest(
            request_id=f"r{time.monotonic_ns()}",
            prompt_token_ids=list(prompt),
            params=params,
            seed=0,
            max_tokens=tokens,
        )
    )


def run(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def the_end(core: EngineCore, message: str, act: Callable[[EngineCore], object] = run) -> float:
    """Seconds until the core has ended with this sentence, which it says ever after. No rank is left."""
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=message) as found:
        act(core)
    assert rank_pids() == []
    with pytest.raises(EngineDeadError) as again:
        ask(core, 7)
    assert str(again.value) == str(found.value)
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (faulty_ranks.RAISE, r"Rank 1 of 2: ValueError: a planted error"),
        (faulty_ranks.NO_MEMORY, r"Rank 1 of 2: The device ran out of memory in a step \(.*CPUAlloc.*max_num_"),
        (faulty_ranks.EXIT, r"Rank 1 of 2 ended with exit status 3\."),
    ],
)
def test_a_rank_that_fails_in_a_step_ends_the_engine_with_its_own_sentence(token: int, message: str) -> None:
    core = faulty()
    ask(core, 7, 8, 9, tokens=4)
    run(core)
    ask(core, 7, token)
    assert the_end(core, message) < patient(4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_and_ended(rank: int, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stages the second one waits for the first one's stream, and the first one for the second one's tokens."""
    monkeypatch.setenv(faulty_ranks.VARIABLE, "" if rank else "first")
    core = faulty()
    ask(core, 7, faulty_ranks.HANG)
    message = rf"Rank {rank} of 2 hangs: no rank has come further for 3 seconds \(PAGERUNNER_LIMIT_RANK_SECONDS.*it is at step 1 of"
    assert 2 < the_end(core, message) < patient(8)


@pytest.mark.parametrize("fault", ["all", "all load hangs", "sleep hangs", "devices"])
def test_where_all_ranks_stand_the_engine_ends(fault: str, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is behind the others then: in a step, in a start, in a call, and as devices wait for each other for ever."""
    monkeypatch.setenv(faulty_ranks.VARIABLE, "all" if fault == "devices" else fault)
    monkeypatch.setattr(watch, "_CALL_FACTOR", 1)
    began, stands = time.monotonic(), r"^Rank 0 of 2 hangs: no rank has come further for 3 seconds .*, and it "
    if fault == "all load hangs":
        with pytest.raises(EngineDeadError, match=f"{stands}hasn't loaded"):
            faulty()
    else:
        core, given = faulty(), 3 if WAY == "pipeline_parallel_size" else 1  # steps that may be under way
        on_device = rf"^Rank 0 of 2: its device has worked for 3 seconds .* on step 1 of {given} .*, and hangs"
        ask(core, 7, faulty_ranks.LOSE if fault == "devices" else faulty_ranks.HANG)
        why = {"all": f"{stands}is at step 1 of", "devices": on_device}.get(fault, f"{stands}hasn't answered a call")
        the_end(core, why, run if fault != "sleep hangs" else lambda core: core.sleep(1))
    assert time.monotonic() - began < patient(12)


def test_ranks_that_wait_for_one_that_loads_slowly_have_no_limit(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the watch's, which sees that it moves, nor that of their sums, which is 3 seconds here as well."""
    monkeypatch.setenv(faulty_ranks.VARIABLE, "load slow")
    monkeypatch.setattr(watch, "_CALL_FACTOR", 1)
    monkeypatch.setattr(process, "_GROUP_FACTOR", 1)
    core = faulty()
    ask(core, 7, 8, 9, tokens=4)
    run(core)
    core._executor.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_killed_or_stopped_in_the_middle_of_steps(how: str, short: None) -> None:
    core = faulty(4 if how == "killed" else 2)
    victim = pid_of(core, TEST_DAY // 6 % 4 if how == "killed" else 1)
    number, message = {
        "killed": (
            signal.SIGKILL,
            r"Rank [0123] of 4 was ended by SIGKILL, perhaps by the kernel for want of memory",
        ),
        "stopped": (signal.SIGSTOP, r"Rank 1 of 2 (hangs|has given no sign of life)"),
    }[how]
    for _ in range(4):
        ask(core, 7, 8)
    threading.Timer(0.05, lambda: os.kill(victim, number)).start()
    assert the_end(core, message, lambda core: [run(core) or ask(core, 7, 8) for _ in range(100_000)]) < patient(8)


def test_a_rank_that_is_killed_while_nothing_runs_is_noticed_at_once() -> None:
    core = faulty()
    executor = core._executor
    assert isinstance(executor, ProcessExecutor)
    os.kill(pid_of(core, 1), signal.SIGKILL)
    until(lambda: executor._ranks.watch._error is not None)
    the_end(core, r"Rank 1 of 2 was ended by SIGKILL", lambda core: ask(core, 7))


def test_an_error_of_another_kind_that_a_rank_ends_with_is_the_engines_end_too() -> None:
    core = faulty()
    executor = core._executor
    assert isinstance(executor, ProcessExecutor)
    executor._ranks.watch._end(CapacityError("Rank 1 of 2: there is no memory for the step."))
    the_end(core, r"^Rank 1 of 2: there is no memory for the step\.$", lambda core: ask(core, 7))


@pytest.mark.parametrize("call", [run, lambda core: core.sleep(1)], ids=["step", "sleep"])
def test_a_rank_that_is_gone_before_anybody_has_said_so_is_named(
    call: Callable[[EngineCore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel closes a dead rank's sockets at once. The watch waits for its last words, so the core may meet the closed socket first."""
    monkeypatch.setattr(watch, "_KILLED_SECONDS", 1.0)
    core = faulty()
    executor = core._executor
    assert isinstance(executor, ProcessExecutor)
    ask(core, 7, 8)
    socket = executor._ranks._sockets._sockets[1]
    os.kill(pid_of(core, 1), signal.SIGKILL)
    until(lambda: not socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT)
    assert executor._ranks.watch._error is None
    the_end(core, r"^Rank 1 of 2 was ended by SIGKILL", call)


def test_random_traffic_leaves_the_same_tokens_and_tables_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "COMPARE_STEPS", 7)
    core = faulty(num_gpu_blocks_override=10)
    executor = core._executor
    assert isinstance(executor, ProcessExecutor)
    choose = random.Random(TEST_DAY)
    while executor._steps < effort(60, 100_000) or not core.stats().preemptions_total:
        for _ in range(choose.randrange(4)):
            ask(core, *(choose.randrange(5, 500) for _ in range(choose.randint(1, 60))), tokens=choose.randint(1, 30))
        for _ in range(choose.randint(1, 20)):
            if core.has_work:
                core.step()
    ask(core, 7, faulty_ranks.OTHER_TABLE)
    the_end(
        core, r"Rank 1 of 2 has other tokens or page tables than rank 0 after step [0-9,]+: ranks must compute the same"
    )


def test_an_interrupt_while_a_step_is_given_out_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    core = faulty()

    def interrupt(order: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(core._executor._ranks, "send", interrupt)  # type: ignore[attr-defined]
        ask(core, 7)
        with pytest.raises(KeyboardInterrupt):
            run(core)
    core.recover([])
    ask(core, 7, 8)
    the_end(core, "An interrupt came while a step was given to the ranks")


def test_an_interrupt_while_a_result_is_waited_for_costs_no_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    core = faulty(max_in_flight=2)

    def tokens() -> list[int]:
        ask(core, 7, 8, tokens=6)
        return [token for _ in range(100) if core.has_work for update in core.step() for token in update.new_token_ids]

    usual = tokens()

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(core._executor._ranks, "results", interrupt)  # type: ignore[attr-defined]
        ask(core, 9)
        with pytest.raises(KeyboardInterrupt):
            run(core)
    core.recover([])
    assert tokens() == usual
    core._executor.close()


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("load raises", CapacityError, r"^Rank 1 of 2: the weights don't fit\.$"),
        ("load ends", EngineDeadError, r"^Rank 1 of 2 ended with exit status 7\.$"),
        ("pages", CapacityError, r"^Rank 1 of 2: no room for pages\.$"),
    ],
)
def test_a_rank_that_can_not_come_up_is_named(
    fault: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faulty_ranks.VARIABLE, fault)
    with pytest.raises(kind, match=message):
        faulty()
    assert rank_pids() == []


def test_ranks_that_would_run_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalPlaces, "machines", ["10.0.0.1", "10.0.0.2"])
    for thing, said in (("memory plan", ""), ("version of pagerunner", r" \(\d.*, and not another\)")):
        another = {thing: "another"}
        monkeypatch.setattr(process, "what_it_runs", lambda resolved, other=another: what_it_runs(resolved) | other)
        with pytest.raises(
            ConfigError, match=rf"^Rank 0 of 2 on 10\.0\.0\.1 has another {thing} than .* core{said}\. All"
        ):
            faulty()


def test_a_rank_that_refuses_to_sleep_keeps_all_awake_and_one_that_can_not_wake_keeps_all_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(faulty_ranks.VARIABLE, "sleep")
    core = faulty()
    ask(core, 7, 8, 9)
    with pytest.raises(CapacityError, match=r"^Rank 1 of 2: there is no host memory for the weights\.$"):
        core.sleep(1)
    level: Any
    for level in (3, "1", None, 1.5):
        with pytest.raises(ConfigError, match=r"^sleep level must be 0, 1 or 2, got"):
            core.sleep(level)
    with pytest.raises(ConfigError, match=r"^wake_up tags must be among weights and kv_cache, got 7\.$"):
        core.wake_up([7])  # type: ignore[list-item]
    assert core.sleep_level is None
    run(core)
    core._executor.close()
    monkeypatch.setenv(faulty_ranks.VARIABLE, "wake once")
    core = faulty()
    core.sleep(1)
    with pytest.raises(CapacityError, match=r"^Rank 1 of 2: another process has taken the memory\.$"):
        core.wake_up()
    assert core.sleep_level == 1
    core.wake_up()
    ask(core, 7, 8, 9)
    run(core)
    core.sleep(1)
    os.kill(pid_of(core, 0), signal.SIGKILL)
    select.select([core.failure_fd], [], [], patient(5))
    with pytest.raises(EngineDeadError, match=r"^Rank 0 of 2 was ended by SIGKILL"):
        core.check_awake()


def test_ranks_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import time
from pagerunner import LLM
llm = LLM({str(demo_path())!r}, max_model_len=64, max_num_seqs=2, tensor_parallel_size=2, device="cpu", use_tqdm=False)
print(llm._core._executor._ranks.watch._processes[1].pid, llm._core._executor._ranks.directory, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as program_process:
        assert program_process.stdout is not None
        pid, directory = program_process.stdout.readline().split()
        program_process.kill()
    until(lambda: not is_alive(int(pid)) and not Path(directory).exists())
