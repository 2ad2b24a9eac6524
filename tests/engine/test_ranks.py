"""A rank is an ordinary worker: plans that travelled as bytes, and nothing else, make it compute what the first rank computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_drafters import make_module
from helpers.checkpoints_hybrid import make_hybrid_checkpoint, make_hybrid_directory
from helpers.checkpoints_window import make_window_checkpoint
from helpers.effort import TEST_DAY, by_days, effort, share_of_the_day
from helpers.engine_oracle import prompt
from helpers.families import MAKERS
from helpers.quantise import CONFIGS, PACKED, quantise
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.dist.gloo import STREAM, GlooComm, GlooStage
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors.base import Pending, Started
from pagerunner.engine.startup.build import build_on
from pagerunner.engine.startup.measure import MemoryFacts
from pagerunner.engine.startup.resolve import Resolved, resolve
from pagerunner.engine.worker.worker import LoadedWorker, load_worker
from pagerunner.errors import ConfigError
from pagerunner.ops.logprobs import gather_logprobs
from pagerunner.runner import scoring
from pagerunner.types import EngineRequest, SamplingParams, StepPlan, StepResult, StructuredOutputsParams
from pagerunner.types.request import Grammar


class SamePending:
    """A step on all ranks, which must have the same result."""

    def __init__(self, plan: StepPlan, pendings: Sequence[Pending]) -> None:
        self._plan, self._pendings = plan, pendings
        self.in_graph = pendings[0].in_graph

    def result(self) -> StepResult:
        first, *others = [pending.result() for pending in self._pendings]
        for other in others:
            assert other == first, self._plan
        return first


class Ranks:
    """Workers of one process. The first gets the core's plans, each of the others a copy from bytes."""

    facts: Sequence[MemoryFacts] = ()

    def __init__(self, loaded: Sequence[LoadedWorker]) -> None:
        self._loaded = loaded
        self.bytes_sent = 0
        self.plans = 0
        self.seen: set[str] = set()

    def take_pages(self, num_bytes: int) -> Started:
        started = [worker.take_pages(num_bytes) for worker in self._loaded]
        self._workers: list[Any] = [one.executor for one in started]
        return Started(self, started[0].startup)

    def run(self, plan: StepPlan) -> SamePending:
        data = msgspec.msgpack.encode(plan)
        self.plans += 1
        self.bytes_sent += len(data)
        self.seen |= {name for name in StepPlan.__struct_fields__ if getattr(plan, name)}
        first, *others = self._workers
        pendings = [first.run(plan)]
        pendings += [worker.run(msgspec.msgpack.decode(data, type=StepPlan)) for worker in others]
        return SamePending(plan, pendings)

    def prepare_sleep(self, level: int) -> None:
        for worker in self._workers:
            worker.prepare_sleep(level)

    def sleep(self, level: int) -> None:
        for worker in self._workers:
            worker.sleep(level)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        for worker in self._workers:
            worker.wake_up(tags)

    @property
    def sleep_level(self) -> int | None:
        first, *others = [worker.sleep_level for worker in self._workers]
        assert all(level == first for level in others)
        level: int | None = first
        return level

    failure_fd = None

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def busy_seconds(self) -> float:
        busy: float = self._workers[0].busy_seconds
        return busy


class DividedRanks(Ranks):
    """Workers with a share of the model each. Each has a thread of its own, as they wait for each other in sums."""

    def __init__(self, resolved: Resolved, directory: Path) -> None:
        size, together = resolved.config.num_ranks, resolved.config.tensor_parallel_size
        directory.mkdir(mode=0o700)
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        worlds = self._each(lambda rank: GlooComm(directory, rank, size, seconds=60.0), range(size))
        comms, stages = worlds, [None] * size
        self.stages: Sequence[GlooStage] = []
        if size > together:
            self.stages = stages = [GlooStage(world, together, resolved.config.max_in_flight) for world in worlds]
            comms = self._each(
                lambda stage: GlooComm(directory, stage.world.rank % together, together, 60.0, f"stage {stage.number}"),
                stages,
            )
        super().__init__(
            self._each(lambda both: load_worker(resolved, comm=both[0], stage=both[1]), zip(comms, stages, strict=True))
        )
        self._answering = slice(size - together, size)
        for found in (worlds, comms):
            assert [comm.calls for comm in found] == [1] * size, "the watch would end a rank that loads more slowly"

    def _each(self, act: Callable[[Any], Any], given: Iterable[Any]) -> list[Any]:
        futures = [thread.submit(act, one) for thread, one in zip(self._threads, given, strict=True)]
        return [future.result() for future in futures]

    def run(self, plan: StepPlan) -> SamePending:
        self.plans += 1
        return SamePending(plan, self._each(lambda worker: worker.run(plan), self._workers)[self._answering])

    def digests(self) -> set[str]:
        """One, if all ranks have the same page tables and last tokens."""
        return set(self._each(lambda worker: worker.state_digest(), self._workers))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    def make(family: str) -> str:
        if family == "demo":
            return str(demo_path())
        made = tmp_path_factory.mktemp(family)
        if family == "qwen3_next":
            return str(
                make_hybrid_directory(
                    made, family, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
                )
            )
        if family == "gemma3_text":
            return str(make_window_checkpoint(made, family))
        return str(make_checkpoint(made, family, num_hidden_layers=2))

    return make


def start(model: str, **settings: Any) -> tuple[EngineCore, Ranks]:
    limits = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 8}
    args = EngineArgs(model=model, max_in_flight=2, poison_fresh_pages=True, **limits | settings)  # type: ignore[arg-type]
    resolved = resolve(args)
    ranks = Ranks([load_worker(resolved) for _ in range(2)])
    return build_on(resolved, ranks), ranks


def requests(seed: int, count: int) -> list[EngineRequest]:
    """Of all kinds, with prompts that begin alike."""
    choose = random.Random(seed)
    begin = [5 + choose.randrange(200) for _ in range(48)]
    found = []
    for number in range(count):
        shared = begin[: choose.choice((0, 16, 33, 48))]
        prompt = [*shared, *(5 + choose.randrange(200) for _ in range(choose.randint(1, 20)))]
        most = choose.randint(8, 28)
        params = choose.choice(
            (
                SamplingParams(temperature=0, max_tokens=most, ignore_eos=True),
                SamplingParams(temperature=1, seed=number, top_k=30, top_p=0.9, max_tokens=most, ignore_eos=True),
                SamplingParams(temperature=1, presence_penalty=0.7, min_p=0.01, logprobs=3, max_tokens=most),
                SamplingParams(temperature=0, prompt_logprobs=2, logit_bias={7: 3.0}, max_tokens=most, ignore_eos=True),
            )
        )
        found.append(
            EngineRequest(
                request_id=f"{seed}-{number}",
                prompt_token_ids=prompt,
                params=params,
                seed=seed * 1000 + number,
                max_tokens=most,
                bad_words_ids=((9, 10),) if number % 3 == 0 else (),
            )
        )
    return found


def run(core: EngineCore, asked: Sequence[EngineRequest]) -> dict[str, list[int]]:
    waiting = list(asked)
    tokens: dict[str, list[int]] = {}
    while waiting or core.has_work:
        for request in waiting[:4]:
            core.add(request)
        del waiting[:4]
        for update in core.step():
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
    return tokens


LATENT = ["deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"]
RECURRENT = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bamba"]


@pytest.mark.parametrize(
    "family", [kind[number] for kind in (LATENT, RECURRENT) for number in share_of_the_day(len(kind), 4)]
)
def test_ranks_with_a_share_each_have_the_tokens_of_the_whole_model(family: str, tmp_path: Path) -> None:
    """Latents and indexers are whole on every rank. Heads are divided, and states with them. On some days ranks have whole experts."""
    if family == "bamba":  # two ranks have the same group
        made = make_hybrid_checkpoint(tmp_path, family, num_attention_heads=4, num_key_value_heads=2, mamba_n_groups=1)[
            0
        ]
    else:
        made = MAKERS[family](tmp_path)
    limits = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 24}
    args = EngineArgs(model=str(made), poison_fresh_pages=True, device="cpu", **limits)  # type: ignore[arg-type]
    alone = resolve(args)
    wanted = run(build_on(alone, load_worker(alone)), requests(3, 5))
    whole = family not in ("qwen3_5_text", "bamba") and TEST_DAY // 4 % 2 == 0  # after each family has had its turn
    divided = resolve(msgspec.structs.replace(args, tensor_parallel_size=2, enable_expert_parallel=whole))
    core = build_on(divided, DividedRanks(divided, tmp_path / "ranks"))
    assert run(core, requests(3, 5)) == wanted


EDGES = {"deepseek_v32": (4, 17, 64, 128), "deepseek_v4": (4, 20, 28, 32, 64, 128)}
"""Slots, pages, and what is chosen or in a window."""


@pytest.mark.days(5)
@pytest.mark.parametrize(("family", "pages"), by_days(EDGES, ["auto", "fp8"]))
def test_chosen_latents_and_drafts_have_the_tokens_of_the_whole_model(family: str, pages: str, tmp_path: Path) -> None:
    """Prompts end around each edge, and each rank holds all latents. The model's own module drafts on both ranks."""
    limits = {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**23}
    made, given = str(make_module(tmp_path, family)), {"kv_cache_dtype": pages, "poison_fresh_pages": True}
    args = EngineArgs(model=made, device="cpu", **limits, **given)  # type: ignore[arg-type]
    lengths = sorted({edge + more for edge in EDGES[family] for more in (-1, 0, 1)})
    asked = [
        EngineRequest(
            request_id=f"{length}",
            prompt_token_ids=prompt(length, length),
            params=SamplingParams(temperature=0.8 * (length % 2), max_tokens=6, ignore_eos=True),
            seed=length,
            max_tokens=6,
        )
        for length in lengths
    ]
    alone = resolve(args)
    wanted = run(build_on(alone, load_worker(alone)), asked)
    drafts = {"method": "mtp", "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 4, 2]]}
    divided = resolve(msgspec.structs.replace(args, tensor_parallel_size=2, speculative_config=drafts))
    ranks = DividedRanks(divided, tmp_path / "ranks")
    core = build_on(divided, ranks)
    for _ in range(2):  # the second time prefixes are found
        assert run(core, asked) == wanted
    stats = core.stats()
    assert stats.prefix_hits_total and stats.spec is not None and stats.spec.num_draft_tokens > 50
    assert len(ranks.digests()) == 1


SAMPLED = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 1.4, "logprobs": 1},
    {"temperature": 1, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 400},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 1, "min_p": 0.02, "logit_bias": {7: 2.0, 500: 1.0}},
    {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.3},
]


@pytest.mark.days(2)
def test_random_traffic_has_the_same_tokens_on_three_ranks_as_on_one(tmp_path: Path) -> None:
    """Each step's results and tables are compared between ranks. Tokens are sampled in every way, from token ids in unequal parts."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 100}
    made = make_checkpoint(tmp_path, "llama", vocab_size=515, num_hidden_layers=2, **sizes)
    limits = {"max_model_len": 96, "max_num_seqs": 6, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 14}
    args = EngineArgs(model=str(made), poison_fresh_pages=True, device="cpu", **limits)  # type: ignore[arg-type]
    alone, divided = resolve(args), resolve(msgspec.structs.replace(args, tensor_parallel_size=3))
    workers = DividedRanks(divided, tmp_path / "ranks")
    one, three = build_on(alone, load_worker(alone)), build_on(divided, workers)
    choose, same, number = random.Random(TEST_DAY), 0, 0
    while workers.plans < effort(40, 5_000) or not three.stats().preemptions_total:
        asked = []
        for _ in range(choose.randint(1, 12)):
            prompt = [choose.randrange(515) for _ in range(choose.randint(1, 40))]
            params = SamplingParams(max_tokens=choose.randint(1, 24), ignore_eos=True, **choose.choice(SAMPLED))
            most = params.max_tokens or 1
            asked.append(
                EngineRequest(
                    request_id=f"{number}", prompt_token_ids=prompt, params=params, seed=number, max_tokens=most
                )
            )
            number += 1
        wanted, found = run(one, asked), run(three, asked)
        same += sum(found[name] == tokens for name, tokens in wanted.items())
        assert found.keys() == wanted.keys() and len(workers.digests()) == 1
    assert same >= number - max(1, number // 1000), "more than near ties differ"


@pytest.mark.days(5)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_seeds_have_the_same_tokens_on_one_to_four_ranks(family: str, tmp_path: Path) -> None:
    """Log-probabilities differ by the rounding of sums between numbers of ranks, and by no bit from run to run."""
    sizes: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 515}
    if family == "llama":
        made = make_checkpoint(tmp_path, family, num_hidden_layers=2, intermediate_size=100, **sizes)
    else:
        made = make_window_checkpoint(tmp_path, family, **sizes)
    limits = {"max_model_len": 96, "max_num_seqs": 5, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 30}
    args = EngineArgs(model=str(made), device="cpu", enable_prefix_caching=False, **limits)  # type: ignore[arg-type]
    choose = random.Random(TEST_DAY)
    asked = [
        EngineRequest(
            request_id=f"{number}",
            prompt_token_ids=[choose.randrange(515) for _ in range(choose.randint(1, 30))],
            params=SamplingParams(max_tokens=8, ignore_eos=True, **sampled | {"logprobs": 1}),
            seed=number,
            max_tokens=8,
        )
        for number, sampled in enumerate(SAMPLED)
    ]
    found: dict[int, dict[str, Any]] = {}
    for size in (1, 2, 3, 4):
        resolved = resolve(msgspec.structs.replace(args, tensor_parallel_size=size))
        ranks = DividedRanks(resolved, tmp_path / f"ranks-{size}")
        core = build_on(resolved, ranks)
        found[size], again = (updates(core, asked) for _ in range(2))
        assert again == found[size], "each bit is that of the run before"
        assert len(ranks.digests()) == 1
    for size in (2, 3, 4):
        for name, places in found[1].items():
            assert [token for token, _ in found[size][name]] == [token for token, _ in places], (size, name)
            scores = [score for _, score in found[size][name]]
            assert scores == pytest.approx([score for _, score in places], abs=1e-4)


def updates(core: EngineCore, asked: Sequence[EngineRequest]) -> dict[str, list[tuple[int, float]]]:
    """Of each request its tokens, and how likely they were."""
    for request in asked:
        core.add(request)
    made: dict[str, list[tuple[int, float]]] = {}
    while core.has_work:
        for update in core.step():
            told = [(one.token_id, one.logprob) for one in update.logprobs or ()]
            assert [token for token, _ in told] == update.new_token_ids
            made.setdefault(update.request_id, []).extend(told)
    return made


KINDS = sorted({*CONFIGS, *PACKED})
FAMILIES = sorted({*MAKERS} - {"qwen3_5", "qwen3_5_moe", "llama4", "kimi_k2", "kimi_k25", "mistral3"})
"""Others are the same models with other configs."""


@pytest.mark.parametrize("family", [FAMILIES[number] for number in share_of_the_day(len(FAMILIES), 6)])
def test_stages_have_the_tokens_of_the_whole_model(family: str, tmp_path: Path) -> None:
    """On one day each stage has as many layers as possible, on another one each has one. Ranks of a stage may divide its layers."""
    limits = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 24}
    made = str(MAKERS[family](tmp_path))
    args = EngineArgs(model=made, poison_fresh_pages=True, device="cpu", **limits)  # type: ignore[arg-type]
    alone = resolve(args)
    wanted = run(build_on(alone, load_worker(alone)), requests(4, 5))
    ranks, stages = [(1, 2), (1, alone.model.num_layers), (2 if family != "bamba" else 1, 2)][TEST_DAY // 6 % 3]
    divided = resolve(msgspec.structs.replace(args, tensor_parallel_size=ranks, pipeline_parallel_size=stages))
    assert divided.config.max_in_flight == stages + 1
    workers = DividedRanks(divided, tmp_path / "ranks")
    assert run(build_on(divided, workers), requests(4, 5)) == wanted
    assert len(workers.digests()) == 1


@pytest.mark.days(2)
@pytest.mark.parametrize("stages", [2, 3])
def test_the_plan_covers_what_stages_keep_of_what_they_have_sent(stages: int, tmp_path: Path) -> None:
    """Streams of full steps, as many as may be under way. A prompt of 600 tokens is 10 such steps."""
    made = make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    args = EngineArgs(
        model=str(made),
        device="cpu",
        pipeline_parallel_size=stages,
        max_model_len=640,
        max_num_seqs=4,
        max_num_batched_tokens=60,
        enable_sleep_mode=True,
    )
    resolved = resolve(args)
    planned = dict(resolved.plan.other)["streams to the next stage"]
    ranks = DividedRanks(resolved, tmp_path / "ranks")
    core = build_on(resolved, ranks)
    params = SamplingParams(max_tokens=2, temperature=0)
    asked = EngineRequest(request_id="long", prompt_token_ids=[7] * 600, params=params, seed=0, max_tokens=2)
    found = []
    for _ in range(2):  # again after a sleep, which gives all of it back
        core.add(asked)
        most, tokens = [0] * stages, []
        while core.has_work:
            tokens += [token for update in core.step() for token in update.new_token_ids]
            for number, stage in enumerate(ranks.stages):
                streams, told = [sum(x.nbytes for _, x in sent) for sent in stage._sent]
                most[number] = max(most[number], streams)
                assert told <= 1024
        assert most == [planned] * (stages - 1) + [0]
        found.append(tokens)
        core.sleep(1)
        assert not any(stage._sent[STREAM] for stage in ranks.stages)
        core.wake_up()
    assert found[0] == found[1]


def test_the_watch_sees_each_piece_of_a_prompt_that_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage may need longer for all logits of a long prompt than a rank may stand still."""
    made = make_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    limits = {"max_model_len": 640, "max_num_seqs": 4, "max_num_batched_tokens": 640}
    args = EngineArgs(model=str(made), device="cpu", pipeline_parallel_size=2, **limits)  # type: ignore[arg-type]
    resolved = resolve(args)
    ranks, seen = DividedRanks(resolved, tmp_path / "ranks"), []

    def gather(*given: Any) -> Any:
        seen.append(ranks.stages[-1].world.calls)
        return gather_logprobs(*given)

    core = build_on(resolved, ranks)
    monkeypatch.setattr(scoring, "gather_logprobs", gather)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    run(core, [EngineRequest(request_id="r", prompt_token_ids=[7] * 600, params=params, seed=0, max_tokens=1)])
    first = seen[0]
    assert seen == [first, first + 1, first + 2]


@pytest.mark.parametrize("kind", [KINDS[number] for number in share_of_the_day(len(KINDS), len(KINDS))])
def test_ranks_and_stages_have_weights_in_every_format(kind: str, tmp_path: Path) -> None:
    """Columns that are ordered by group can't be divided among ranks, but layers can be."""
    sizes = {"hidden_size": 192, "head_dim": 96, "intermediate_size": 384}
    made = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=3, **sizes)
    quantise(made, kind)
    args = EngineArgs(model=str(made), device="cpu", max_model_len=96, max_num_seqs=4)
    alone = resolve(args)
    wanted = run(build_on(alone, load_worker(alone)), requests(6, 3))
    for way in ({"pipeline_parallel_size": 3}, {"tensor_parallel_size": 2}):
        divided = resolve(msgspec.structs.replace(args, **way))
        if "permuted" in kind and "tensor_parallel_size" in way:
            with pytest.raises(ConfigError, match=r"columns that are ordered by group \(desc_act\) can't be divided"):
                DividedRanks(divided, tmp_path / "refused")
        else:
            core = build_on(divided, DividedRanks(divided, tmp_path / next(iter(way))))
            assert run(core, requests(6, 3)) == wanted


@pytest.mark.parametrize(
    ("way", "left"),
    [(("tensor_parallel_size", 1 / 2), ("pipeline_parallel_size", 3 / 5))[number] for number in share_of_the_day(2, 2)],
)
@pytest.mark.parametrize(
    "kv_cache_dtype", [("bfloat16", "fp8", "fp8_e5m2")[number] for number in share_of_the_day(3, 3)]
)
def test_ranks_have_pages_of_every_dtype(kv_cache_dtype: str, way: str, left: float, tmp_path: Path) -> None:
    """With half of the heads, or three of five layers."""
    args = EngineArgs(
        model=str(demo_path()), kv_cache_dtype=kv_cache_dtype, device="cpu", max_model_len=96, max_num_seqs=4
    )
    alone, divided = resolve(args), resolve(msgspec.structs.replace(args, **{way: 2}))
    assert [group.page_bytes for group in divided.plan.groups] == [
        left * group.page_bytes for group in alone.plan.groups
    ]
    wanted = run(build_on(alone, load_worker(alone)), requests(5, 4))
    assert run(build_on(divided, DividedRanks(divided, tmp_path / "ranks")), requests(5, 4)) == wanted


@pytest.mark.parametrize(
    "family", [("gemma3_text", "qwen3_next", "qwen3")[number] for number in share_of_the_day(3, 3)]
)
def test_a_worker_that_gets_plans_as_bytes_computes_what_the_first_does(
    directory: Callable[[str], str], family: str
) -> None:
    """With prefix hits, chunks, preemption, seeds, penalties, scores, and sleep between."""
    core, ranks = start(directory(family), enable_sleep_mode=True)
    for seed in range(effort(2, 12)):
        tokens = run(core, requests(seed, 10))
        assert len(tokens) == 10
        core.sleep((seed + 1) % 3)
        core.wake_up()
    stats = core.stats()
    assert stats.prefix_hits_total > 0 and stats.preemptions_total > 0
    assert {"admitted", "table_writes", "zero"} <= ranks.seen
    assert ("state_saves" in ranks.seen) == (family == "qwen3_next")
    assert ranks.bytes_sent / ranks.plans < 4_000


def test_masks_of_a_grammar_travel(directory: Callable[[str], str]) -> None:
    core, ranks = start(directory("demo"), num_gpu_blocks_override=24)
    asked = EngineRequest(
        request_id="guided",
        prompt_token_ids=[40, 41, 42],
        params=SamplingParams(
            temperature=1, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[0-9]{6}")
        ),
        seed=3,
        max_tokens=12,
        grammar=Grammar("start: /[0-9]{6}/"),
    )
    assert run(core, [asked])["guided"]
    assert "masks" in ranks.seen


def test_facts_travel() -> None:
    facts = MemoryFacts(rank=1, total=80 * 2**30, free=61 * 2**30, taken={"weights": 15 * 2**30, "pages": 2**21})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=MemoryFacts) == facts
    assert (facts.left, facts.other) == (61 * 2**30 - 2**25 + 2**21, (("weights", 15 * 2**30),))
    assert facts.room(0.5) == 25 * 2**30
