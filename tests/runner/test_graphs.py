"""Graphs see nothing of what a warm-up touched, take the right steps, and keep out of the arena."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.graphs import RecordedGraph, RecordedGraphs
from pagerunner import LLM, SamplingParams
from pagerunner.attention import select
from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import AttentionCall
from pagerunner.attention.paged import PagedBackend
from pagerunner.batch import KVPages
from pagerunner.config import EngineArgs
from pagerunner.dist.null import NullComm
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker import build
from pagerunner.errors import ConfigError
from pagerunner.ops.native import small
from pagerunner.ops.routing import counting_experts, touched_experts
from pagerunner.runner import runner as runner_module
from pagerunner.runner import scoring
from pagerunner.runner.arena import CpuArena
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.graphs import (
    Captured,
    GraphKey,
    GraphSettings,
    StepGraphs,
    decode_keys,
    decode_sizes,
    is_telling,
    mixed_sizes,
)
from pagerunner.runner.pages import Pages
from pagerunner.runner.sampling import sampler

PUBLISHED = Path(__file__).parents[1] / "models" / "published"
PROMPTS = [{"prompt_token_ids": [5 + i, 9, 30 + i, 4] * (1 + 4 * i)} for i in range(5)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("graphs"), "qwen3"))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    recorded = RecordedGraphs()
    monkeypatch.setattr(build, "graph_engine", lambda device: recorded)
    return recorded


def start(model: str, **settings: Any) -> LLM:
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "attention_backend": "triton", **settings}
    return LLM(model, **settings)


def generate(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


class Lazy:
    def __init__(self, shape: GraphShape | None) -> None:
        self.in_graph = shape is not None
        self.sharing = shape is None or shape.sharing
        self.lens_R: torch.Tensor | None = None


class LazyBackend(PagedBackend):
    """Computes something of the step when it is first asked, and keeps it: right only if a graph computes it again."""

    capabilities = replace(PagedBackend.capabilities, wanted=False)

    def new_state(self, shape: GraphShape | None) -> Lazy:
        return Lazy(shape)

    def plan(self, inputs: PlanInputs, state: Lazy) -> Any:
        if not state.in_graph:
            state.lens_R = None
        self.states = {**getattr(self, "states", {}), id(inputs.rows): (inputs.rows, state)}
        return super().plan(inputs, state)

    def run(self, call: AttentionCall) -> torch.Tensor:
        out_THD, rows = super().run(call), call.rows
        _, state = self.states[id(rows)]
        if state.lens_R is None:
            state.lens_R = rows.seq_lens_R.clone()
        right_R = state.lens_R.clamp(min=1) / rows.seq_lens_R.clamp(min=1)
        return out_THD * right_R[rows.row_T.long()][:, None, None].to(out_THD.dtype)


def test_state_that_is_made_at_first_use_is_part_of_the_graph(
    model: str, engine: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(start(model, enforce_eager=True))
    monkeypatch.setitem(select.BACKENDS, "triton", LazyBackend)
    llm = start(model)
    assert generate(llm) == expected
    assert sum(graph.replays for graph in engine.graphs) == 10, "three steps with prompts, and seven of one token a row"


def test_state_that_warm_up_and_capture_share_is_noticed(
    model: str, engine: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: with one state for both, what the warm-up made stays."""
    expected = generate(start(model, enforce_eager=True))
    fresh, shared = BatchBuilder.new_states, {}
    monkeypatch.setattr(
        BatchBuilder, "new_states", lambda self, shape: shared.setdefault((id(self), shape), fresh(self, shape))
    )
    monkeypatch.setitem(select.BACKENDS, "triton", LazyBackend)
    assert generate(start(model)) != expected


class HostBackend(PagedBackend):
    """Plans on the host: a replay is right only if the state holds this step's lengths."""

    capabilities = replace(PagedBackend.capabilities, plans_on_host=True, wanted=False)

    def new_state(self, shape: GraphShape | None) -> torch.Tensor:
        return torch.zeros(64)

    def plan(self, inputs: PlanInputs, state: torch.Tensor) -> Any:
        state[: len(inputs.seq_lens)] = torch.tensor(inputs.seq_lens, dtype=torch.float32)
        self.states = {**getattr(self, "states", {}), id(inputs.rows): (inputs.rows, state)}
        return super().plan(inputs, None)

    def run(self, call: AttentionCall) -> torch.Tensor:
        out_THD, rows = super().run(call), call.rows
        lens_R = self.states[id(rows)][1][: rows.num_rows]
        right_R = torch.where(rows.seq_lens_R > 0, lens_R / rows.seq_lens_R.clamp(min=1), 1.0)
        return out_THD * right_R[rows.row_T.long()][:, None, None].to(out_THD.dtype)


def test_a_backend_that_plans_on_the_host_does_so_before_each_replay(
    model: str, engine: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(start(model, enforce_eager=True))
    monkeypatch.setitem(select.BACKENDS, "triton", HostBackend)
    assert generate(start(model)) == expected
    monkeypatch.setattr(BatchBuilder, "plan_replay", lambda *args: None)
    assert generate(start(model)) != expected


def test_sizes_reach_the_limit_and_no_further() -> None:
    assert decode_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert decode_sizes(1) == (1,)
    assert decode_sizes(512)[:6] == (1, 2, 4, 8, 16, 24) and decode_sizes(512)[-2:] == (504, 512)
    assert decode_sizes(20, (4, 2, 64)) == (2, 4)
    assert mixed_sizes(100) == (16, 32, 64, 96)
    assert mixed_sizes(8192, (1, 40)) == (16, 32)
    assert mixed_sizes(8192, ()) == ()


def test_models_whose_layers_are_launched_slowly_have_graphs_of_more_tokens() -> None:
    of_4b, of_8b, of_70b = 101_000_000, 193_000_000, 856_000_000
    assert mixed_sizes(8192)[-1] == 256 and mixed_sizes(8192, None, of_70b)[-1] == 448
    assert mixed_sizes(8192, None, of_8b)[-3:] == (1792, 1920, 2048)
    assert mixed_sizes(8192, None, of_4b)[-1] == 3840
    assert mixed_sizes(16384, None, 1)[-1] == 8192
    assert mixed_sizes(2000, None, of_4b)[-1] == 1920
    sizes = mixed_sizes(8192, None, 1)
    assert all(more <= 1.25 * size for size, more in zip(sizes, sizes[1:], strict=False) if size >= 256)
    assert all(more <= 1.125 * size for size, more in zip(sizes, sizes[1:], strict=False) if size >= 1024)
    assert mixed_sizes(600, None, of_8b)[-1] == 512
    assert mixed_sizes(8192, (1, 400), of_8b)[-1] == 384


def test_mixtures_have_graphs_of_as_many_tokens_as_there_is_memory_for() -> None:
    of_30b = 57_000_000
    assert mixed_sizes(8192, None, of_30b, most_with_experts=2**20)[-3:] == (2048, 3072, 4096)
    assert mixed_sizes(8192, None, of_30b // 2, most_with_experts=2**20)[-1] == 8192
    assert mixed_sizes(8192, None, of_30b // 2, most_with_experts=3000)[-1] == 2048
    assert mixed_sizes(700, None, of_30b, most_with_experts=2**20)[-1] == 512
    assert mixed_sizes(8192, None, 10**10, most_with_experts=2**20)[-1] == 256
    assert mixed_sizes(8192, most_with_experts=2**20)[-1] == 256


def test_a_layers_weights_are_those_that_a_token_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = json.loads((PUBLISHED / "Qwen--Qwen3-30B-A3B.json").read_text())
    config = published.get("config", published) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, load_format="dummy", max_model_len=512)
    resolved = resolve(args, memory_bytes=2**36, plan_only=True)
    model = build.build_model(resolved.model, "bfloat16", "cpu")
    attention, expert = 2048 * (32 + 2 * 4 + 32) * 128, 3 * 2048 * 768
    assert build._layer_weights(model) == attention + 8 * expert
    stage = build.build_model(resolved.model, "bfloat16", "cpu")
    stage.keep(range(1))
    assert build._layer_weights(stage) == attention + 8 * expert
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (0, 128 * 8 * (2048 + 768) * 2 * 5000))
    device, config = torch.device("cuda"), msgspec.structs.replace(resolved.config, max_num_batched_tokens=8192)
    assert build._most_with_experts(config, model, resolved.plan, device) == 5000
    adapters = msgspec.structs.replace(config, enable_lora=True)
    products = 8 * (2 * 768 + 2048) * 2  # that experts with adapters hold besides
    assert build._most_with_experts(adapters, model, resolved.plan, device) == 8 * 2816 * 2 * 5000 // (
        8 * 2816 * 2 + products
    )
    assert build._mixed_sizes(config, model, resolved.plan, NullComm(), device)[-1] == 4096
    assert build._mixed_sizes(adapters, model, resolved.plan, NullComm(), device)[-1] == 2048
    for one in build._experts_of(model)[1]:
        one.method.teams = 2
    assert build._most_with_experts(config, model, resolved.plan, device) == 512


OF_LATENTS = 15_000_000_000 // (16 * (2 * 512 + 64))


@pytest.mark.parametrize(
    ("name", "layers", "weights", "most", "pairs"),
    [
        ("Qwen--Qwen3-8B", 2, 192_937_984, 2048, (0, 60_000_000_000 // (32 * 256))),
        ("Qwen--Qwen3-8B-FP8", 2, 128_625_323, 3072, (0, 60_000_000_000 // (32 * 256))),  # rounded inputs: two thirds
        ("openai--gpt-oss-20b", 2, 126_074_880, 2048, (0, 60_000_000_000 // (64 * 128))),  # windows, heads of 64
        ("Qwen--Qwen3-Next-80B-A3B-Instruct", 4, 0, 4096, (0, 60_000_000_000 // (16 * 512))),  # states, heads of 256
        ("deepseek-ai--DeepSeek-V2-Lite-Chat", 2, 0, 3072, (OF_LATENTS, OF_LATENTS)),
        ("deepseek-ai--DeepSeek-V3.2", 8, 0, 512, (0, 0)),  # queries choose
        ("deepseek-ai--DeepSeek-V4-Flash", 4, 0, 1024, (0, 0)),  # windows and slots
    ],
)
def test_graphs_go_as_far_as_the_host_takes_longer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    layers: int,
    weights: int,
    most: int,
    pairs: tuple[int, int],
) -> None:
    published = json.loads((PUBLISHED / f"{name}.json").read_text())
    fields = published.get("config", published) | {"num_hidden_layers": layers}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (0, 2**37))
    found, args = [], EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, load_format="dummy", max_model_len=512)
    for pages in ("auto", "fp8"):
        resolved = resolve(msgspec.structs.replace(args, kv_cache_dtype=pages), memory_bytes=2**40, plan_only=True)
        model = build.build_model(resolved.model, "bfloat16", "cpu", keep_forms=True, of_files=False)
        assert not weights or build._layer_weights(model) == weights
        config, device = msgspec.structs.replace(resolved.config, max_num_batched_tokens=8192), torch.device("cuda")
        assert build._mixed_sizes(config, model, resolved.plan, NullComm(), device)[-1] == most
        found.append(build._most_pairs(model, resolved.plan))
    assert tuple(found) == pairs


def test_large_steps_run_in_a_graph_while_their_attention_takes_no_longer_there() -> None:
    def is_quick(new: list[int], past: list[int], most_pairs: int) -> bool:
        graphs = object.__new__(StepGraphs)
        graphs._settings = GraphSettings(None, most_pairs=most_pairs)
        lens: Any = {"query_lens": new, "seq_lens": [a + b for a, b in zip(new, past, strict=True)]}
        return graphs._is_quick(cast(Any, SimpleNamespace(where=SimpleNamespace(tokens=sum(new)), **lens)))

    assert is_quick([600, 100], [0, 0], 185_000) and not is_quick([600, 100], [0, 0], 184_999)
    assert is_quick([600], [0], 180_000) and not is_quick([600], [1], 180_000)
    assert is_quick([512], [100_000], 360_000), "few tokens always do"
    assert is_quick([600], [100_000], 0), "no attention is slower there"


def test_the_largest_graphs_of_a_mixture_with_adapters_serve_rows_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for experts in (True, False):
        adapters = SimpleNamespace(may_be_of_experts=experts)
        tensors = SimpleNamespace(slots_R=torch.empty(64))
        builder: Any = SimpleNamespace(
            tensors=tensors, graphs=True, min_sharing_rows=0, strided=False, adapters=adapters
        )
        builder.has_adapters = lambda slots: False
        settings = GraphSettings(cast(Any, object()), decode_sizes=(1,), mixed_sizes=(512, 1024))
        graphs = StepGraphs(settings, builder)
        kinds = {size: [key for key in graphs.keys if key.tokens == size] for size in (1, 512, 1024)}
        assert len(kinds[1]) == len(kinds[512]) == 2 + experts
        assert [key.experts for key in kinds[1024]] == ([True] if experts else [False, False])
        builder.clear = lambda: None
        monkeypatch.setattr(graphs, "_capture", lambda key, *_: Captured(key, cast(Any, None), cast(Any, None), []))
        graphs.capture(lambda batch, decode: ())
        where = SimpleNamespace(stride=0, one_token=False, tokens=700)
        found = graphs.find(cast(Any, SimpleNamespace(where=where, slots=[0])))
        assert found is not None and found.key.tokens == 1024 and found.key.experts == experts


def runner_of(llm: LLM) -> Any:
    return llm._core._executor._runner


def test_steps_take_the_smallest_graph_that_holds_them(model: str, engine: RecordedGraphs) -> None:
    llm = start(model)
    graphs = runner_of(llm)._graphs
    assert graphs.keys[0] == GraphKey(6, 64, False)
    assert [key.tokens for key in graphs.keys] == sorted((key.tokens for key in graphs.keys), reverse=True)
    ran: list[GraphKey] = []
    replay = graphs.replay

    def noted(captured: Any, step: Any, saves: Any) -> Any:
        fits = [key for key in graphs.keys if key.decode == captured.key.decode and key.tokens >= step.where.tokens]
        assert captured.key == fits[-1]
        ran.append(captured.key)
        return replay(captured, step, saves)

    graphs.replay = noted
    generate(llm)
    assert {key.decode for key in ran} == {True, False}
    assert GraphKey(6, 6, True) in ran, "five rows were never decoded together"
    llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
    assert ran[-1] == GraphKey(1, 1, True)
    count = len(ran)
    llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert [key.decode for key in ran[count:]] == [False], (
        "prompt log-probabilities need their own step's hidden states"
    )


def test_graphs_are_captured_in_inference_mode(
    model: str, engine: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of it, autograd notes every operation, and may refuse tensors that were made in it."""
    modes: list[bool] = []
    capture = engine.capture

    def noted(run: Callable[[], tuple[torch.Tensor, ...]]) -> RecordedGraph:
        modes.append(torch.is_inference_mode_enabled())
        return capture(run)

    monkeypatch.setattr(engine, "capture", noted)
    runner = runner_of(start(model))
    assert modes == [True] * runner.num_graphs and modes
    assert not torch.is_inference_mode_enabled()


def test_warm_up_takes_the_memory_of_the_largest_reports(
    model: str, engine: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pages get is measured afterwards, so what only some requests ask for must have been there once."""
    rows: dict[str, set[int]] = {"gather": set(), "penalize": set(), "prompt": set()}
    gather, penalize = sampler.gather_logprobs, sampler.penalized
    runner = runner_of(start(model))
    monkeypatch.setattr(
        sampler, "gather_logprobs", lambda x, at, *more: rows["gather"].add(len(at)) or gather(x, at, *more)
    )
    monkeypatch.setattr(
        sampler,
        "penalized",
        lambda x, at, *more: rows["penalize"].add(len(x if at is None else at)) or penalize(x, at, *more),
    )
    monkeypatch.setattr(scoring, "gather_logprobs", lambda x, *more: rows["prompt"].add(len(x)) or gather(x, *more))
    runner.warm_up()
    assert max(rows["penalize"]) == max(rows["gather"]) == runner._builder.max_rows
    assert max(rows["prompt"]) == min(scoring.CHUNK, runner._builder.max_tokens)
    assert not runner._scorer._requests


def test_the_user_may_choose_the_sizes(model: str, engine: RecordedGraphs) -> None:
    keys = runner_of(start(model, cudagraph_capture_sizes=[1, 4, 32]))._graphs.keys
    assert keys == (GraphKey(6, 32, False), GraphKey(6, 16, False), GraphKey(4, 4, True), GraphKey(1, 1, True))
    assert runner_of(start(model, cudagraph_capture_sizes=[]))._graphs.keys == ()
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes must be whole numbers of at least 1, got"):
        start(model, cudagraph_capture_sizes=[0])


def test_a_step_without_a_graph_samples_as_many_tokens_as_one_with(
    model: str, engine: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library chooses its kernels by that number, and a step would wait until those for another one are loaded."""
    llm = start(model, cudagraph_capture_sizes=[1, 4, 8], max_num_seqs=8, max_num_batched_tokens=256)
    assert all(key.decode for key in runner_of(llm)._graphs.keys)
    counts: list[int] = []
    run = type(runner_of(llm)._model).compute_logits
    monkeypatch.setattr(
        type(runner_of(llm)._model), "compute_logits", lambda self, x_SD: counts.append(len(x_SD)) or run(self, x_SD)
    )
    assert generate(llm) == generate(start(model, enforce_eager=True))
    assert counts[0] == 8, "five prompts in one step"
    for prompts, count in ((1, 1), (2, 4), (4, 4)):
        llm.generate([[7, 8, 9]] * prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        assert counts.pop() == count
    found: list[int] = []
    whole = type(runner_of(llm)._model).__call__
    monkeypatch.setattr(
        type(runner_of(llm)._model), "__call__", lambda self, batch: found.append(len(out := whole(self, batch))) or out
    )
    llm.generate([[7] * 300], SamplingParams(max_tokens=1), use_tqdm=False)
    assert found == [0, 1], "where nothing is sampled, the last layer has nothing to do"


def test_padding_of_a_graph_reads_no_experts(tmp_path, engine: RecordedGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows in a graph of four touch the experts that they touch without a graph, and get the same tokens."""
    monkeypatch.setattr(small, "serves", lambda *tensors: False)  # CPU kernels, which know no padding
    model, meter = str(make_window_checkpoint(tmp_path, "qwen3_moe")), touched_experts(torch.device("cpu"))
    seen = []
    with counting_experts():
        for eager in (True, False):
            llm, read = start(model, enforce_eager=eager), []
            for count in (1, 8):  # the prompts' step, and that with seven of one token a row
                before = meter.clone()
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                out = llm.generate([{"prompt_token_ids": [5 + i, 9]} for i in range(3)], params, use_tqdm=False)
                read.append(meter - before)
            seen.append(((read[1] - read[0]).tolist(), [one.outputs[0].token_ids for one in out]))
    assert sum(graph.replays for graph in engine.graphs) >= 7
    assert seen[0] == seen[1]


def test_without_graphs_nothing_is_captured(model: str, engine: RecordedGraphs) -> None:
    assert runner_of(start(model, enforce_eager=True)).num_graphs == 0
    assert runner_of(start(model, attention_backend="torch_ref")).num_graphs == 0
    assert engine.graphs == []


class NoRecord:
    """Keeps a graph's outputs only: what a recorded graph knows of pages is not the runner's."""

    def __init__(self, run: Any) -> None:
        self.outputs = run()
        self.replay = lambda: None


def tensors(value: Any, skip: tuple[type, ...], seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from a value, except through objects of `skip`."""
    if id(value) in seen or isinstance(value, (*skip, str, bytes, int, float, type, type(pytest))):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts += list(value)
    parts += list(getattr(value, "__dict__", {}).values())
    parts += [
        getattr(value, name)
        for cls in type(value).__mro__
        for name in getattr(cls, "__slots__", ())
        if hasattr(value, name)
    ]
    parts += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    parts.append(getattr(value, "__self__", None))
    for part in parts:
        yield from tensors(part, skip, seen)


def test_no_tensor_of_the_runner_lies_in_the_arena(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[torch.Tensor] = []
    reserve = CpuArena.reserve

    def noted(self: CpuArena, *args: Any, **kwargs: Any) -> torch.Tensor:
        regions.append(reserve(self, *args, **kwargs))
        return regions[-1]

    class Engine:
        def capture(self, run: Any) -> NoRecord:
            return NoRecord(run)

    monkeypatch.setattr(CpuArena, "reserve", noted)
    llm = start(model, enforce_eager=True)
    everything = SamplingParams(
        temperature=0.7, top_p=0.9, logprobs=2, repetition_penalty=1.1, logit_bias={3: 1.0}, min_tokens=2, max_tokens=4
    )
    llm.generate(PROMPTS, everything, use_tqdm=False)
    monkeypatch.setattr(build, "graph_engine", lambda device: Engine())
    with_graphs = start(model)

    def inside(runner: Any, skip: tuple[type, ...]) -> tuple[int, int]:
        found = list(tensors(runner, skip, set()))
        spans = [(region.data_ptr(), region.data_ptr() + region.nbytes) for region in regions]
        return sum(any(a <= t.data_ptr() < b for a, b in spans) for t in found if t.numel()), len(found)

    for each in (llm, with_graphs):
        runner = runner_of(each)
        in_arena, count = inside(runner, (Pages, KVPages, type(runner._model)))
        assert in_arena == 0
        assert count > 20
        assert inside(runner, ())[0] > 10, "the search doesn't find what it looks for"


def test_a_rehearsal_leaves_out_shapes_that_need_no_kernels_of_their_own() -> None:
    decode = [GraphKey(rows, rows, True) for rows in (1, 2, 16, 24, 32, 40, 64, 120, 256)]
    assert [key.rows for key in decode if is_telling(key)] == [1, 2, 16, 24, 32, 64, 256]
    assert is_telling(GraphKey(96, 96, False))


def test_a_start_is_rehearsed_under_the_name_of_its_kernels_and_nothing_remains_of_it(
    model: str, engine: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = generate(start(model))
    names: list[str] = []

    def compile_ahead(device: torch.device, name: str, rehearse: Any) -> int:
        names.append(name)
        rehearse()
        return 0

    monkeypatch.setattr(runner_module, "compile_ahead", compile_ahead)
    assert generate(start(model)) == want
    start(model)
    start(model, max_num_seqs=4)
    assert names[0] == names[1] != names[2]


def test_rows_that_begin_with_different_pages_have_graphs_that_do_not_look_for_shared_ones(
    model: str, engine: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the least number of rows one graph serves both; what the rows share decides, not what others had."""
    monkeypatch.setattr(PagedBackend, "capabilities", replace(PagedBackend.capabilities, min_sharing_rows=3))
    llm = start(model)
    graphs = runner_of(llm)._graphs
    decode = [(key.rows, key.no_shared_prefix) for key in graphs.keys if key.decode]
    assert decode == [(6, True), (6, False), (4, True), (4, False), (2, False), (1, False)]
    ran: list[GraphKey] = []
    replay = graphs.replay
    graphs.replay = lambda captured, *step: ran.append(captured.key) or replay(captured, *step)
    shared = [{"prompt_token_ids": [7, 8, 9, 3] * 12 + [10 + i, 5]} for i in range(5)]
    found = {}
    for name, prompts in (("apart", PROMPTS), ("shared", shared), ("apart again", PROMPTS), ("two", PROMPTS[:2])):
        ran.clear()
        llm.generate(prompts, PARAMS, use_tqdm=False)
        found[name] = {(key.rows, key.no_shared_prefix) for key in ran if key.decode}
    assert (6, True) in found["apart"] and (6, False) not in found["apart"]
    assert (6, False) in found["shared"]
    assert (6, False) not in found["apart again"]
    assert found["two"] <= {(2, False), (1, False)}
    states = {
        captured.key: captured.states[0].sharing
        for captured in graphs._plain.decode.graphs + graphs._plain.no_shared_prefix.graphs
    }
    assert all(sharing is not key.no_shared_prefix for key, sharing in states.items())


def test_graphs_for_shared_pages_are_few() -> None:
    keys = decode_keys(decode_sizes(72), 16)
    assert [key.rows for key in keys if not key.no_shared_prefix] == [1, 2, 4, 8, 16, 32, 64, 72]
    assert [key.rows for key in keys if key.no_shared_prefix] == [16, 24, 32, 40, 48, 56, 64, 72]
    assert not any(key.no_shared_prefix for key in decode_keys(decode_sizes(72), 0))
