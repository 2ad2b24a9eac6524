"""First runs go through one layer of each kind: none of what kernels are chosen by may be missing, nor much be there twice."""

from __future__ import annotations

import pytest

from helpers.borders import set_borders
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.effort import share_of_the_day
from helpers.families import MAKERS
from helpers.graphs import RecordedGraphs
from pagerunner.config import EngineArgs
from pagerunner.dist.null import NullComm
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.startup.build import build_from
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker import build as build_module
from pagerunner.ops import numerics
from pagerunner.ops.paged_attention import Scores
from pagerunner.runner import runner as runner_module
from pagerunner.runner.short_model import first_of_each_kind, one_layer_of_each_kind

ODD = {"kv_cache_dtype": "fp8"}  # a layer's scales move the next one's pages by 8 bytes


def build(folder: str, **settings) -> EngineCore:
    limits = {"max_num_seqs": 4, "max_model_len": 128, "kv_cache_memory_bytes": 2**24}
    return build_from(resolve(EngineArgs(model=folder, **limits | settings)))


def kept(core: EngineCore) -> list[int]:
    """Numbers of the layers that first runs go through."""
    runner = core._executor._runner
    layers = runner._model.model.layers
    return [layers.index(layer) for layer in first_of_each_kind(layers, runner._builder.layers)]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("deep"), "qwen3", num_hidden_layers=9))


def test_of_equal_layers_the_first_two_are_enough(deep: str) -> None:
    assert kept(build(deep)) == [0, 1]


def test_layers_whose_pages_are_aligned_otherwise_are_kept(deep: str) -> None:
    core = build(deep, **ODD)
    memory = core._executor._runner._builder.layers
    found = {kv.k.data_ptr() % 16 for kv in memory}
    assert {memory[index].k.data_ptr() % 16 for index in kept(core)} == found


@pytest.mark.parametrize("change", ["weight", "scale", "shape"])
def test_a_layer_that_differs_in_anything_is_kept(deep: str, change: str) -> None:
    core = build(deep)
    attention = core._executor._runner._model.model.layers[5].mixer
    if change == "scale":
        attention.attend.scores = Scores(1.0)
    else:
        weights = attention.o_proj.weights
        weights["weight"] = weights["weight"].double() if change == "weight" else weights["weight"][:-1]
    assert kept(core) == [0, 1, 5]


@pytest.mark.parametrize("family", ["gemma3_text", "bamba", "qwen3_next", "gpt_oss", "deepseek_v2"])
def test_every_kind_of_a_mixed_model_is_kept(tmp_path, family: str) -> None:
    core = build(str(MAKERS[family](tmp_path)))
    memory = core._executor._runner._builder.layers
    numbers = kept(core)
    assert {type(memory[index]) for index in numbers} == {type(kv) for kv in memory}
    assert {memory[index].group for index in numbers} == {kv.group for kv in memory}


def test_a_layer_behind_experts_is_kept(tmp_path) -> None:
    """Layer 0 is dense, others are mixtures. Behind a mixture, a layer's first kernels also add up the outputs of its experts."""
    core = build(str(make_latent_checkpoint(tmp_path, "deepseek_v2", num_hidden_layers=5)[0]))
    assert kept(core) == [0, 1, 2]


def test_the_model_is_whole_again_afterwards_whatever_happens(deep: str) -> None:
    runner = build(deep)._executor._runner
    layers = runner._model.model.layers
    with pytest.raises(RuntimeError), one_layer_of_each_kind(runner._model, runner._builder.layers):
        assert len(runner._model.model.layers) == 2
        raise RuntimeError
    assert runner._model.model.layers is layers


def test_first_runs_see_the_short_model(deep: str, monkeypatch) -> None:
    runner = build(deep)._executor._runner
    seen = []
    monkeypatch.setattr(
        runner_module.ModelRunner, "_first_runs", lambda self, *_: seen.append(len(self._model.model.layers))
    )
    runner.warm_up()
    assert seen == [2]


def test_the_whole_model_runs_in_the_largest_steps_and_the_extreme_shapes(deep: str, monkeypatch) -> None:
    runner = build(deep)._executor._runner
    layers, tokens = [], []
    run = runner.run
    monkeypatch.setattr(runner, "_first_runs", lambda *_: None)
    monkeypatch.setattr(
        runner,
        "run",
        lambda plan: (
            layers.append(len(runner._model.model.layers))
            or tokens.append(sum(r.num_tokens for r in plan.rows))
            or run(plan)
        ),
    )
    monkeypatch.setattr(runner._graphs, "warm_up", lambda *_, **how: tokens.append(how))
    runner.warm_up()
    assert layers == [9, 9]
    assert tokens == [512, 512, {"extremes": True}]  # 4 sequences of 128 tokens
    tokens.clear()
    runner._unpacks = True
    set_borders(monkeypatch, "products", parted_tokens=200)
    runner.warm_up()
    assert tokens == [512, 512, 199, {"extremes": True}]


def test_first_runs_have_a_row_as_long_as_can_be(deep: str) -> None:
    """Attention of rows of more than 2,048 tokens has tiles of its own. With sequences of 4,096 and steps of 8,192, no other step of the
    warm-up needs them: four rows of 2,048, and two that begin their sequences, which cuDNN serves. A row that begins its sequence has
    another kernel than one with a past.
    """
    runner = build(deep, max_model_len=400, max_num_batched_tokens=800)._executor._runner
    steps = [
        [(row.start, row.num_tokens) for row in step] for step in (*runner._first_steps(), *runner._largest_steps())
    ]
    assert [(1, 399)] in steps and [(0, 399)] in steps and [(0, 400), (0, 400)] in steps


FEW = {"max_model_len": 400, "max_num_batched_tokens": 300}


FIRST_RUNS: list[tuple[bool, dict[str, int]]] = [
    (False, {}),
    (False, {"max_num_seqs": 600}),
    (False, FEW),
    (True, {}),
    (True, FEW),
]


@pytest.mark.parametrize(("graphs", "limits"), [FIRST_RUNS[number] for number in share_of_the_day(5, 2)])
def test_first_runs_meet_the_kernels_of_every_number_of_tokens_sampled_tokens_and_scored_tokens(
    deep: str, monkeypatch: pytest.MonkeyPatch, graphs: bool, limits: dict[str, int]
) -> None:
    """The kernels of this test change behind each power of two."""
    monkeypatch.setattr(build_module, "graph_engine", lambda device: RecordedGraphs() if graphs else None)
    backend = {"attention_backend": "triton"} if graphs else {}
    runner = build(deep, enforce_eager=not graphs, **backend, **limits)._executor._runner
    assert bool(runner.num_graphs) is graphs
    monkeypatch.setattr(runner._graphs, "find", lambda *_, **__: None)  # graphs are captured after the warm-up
    runner._kernels = [int.bit_length]
    tokens, logits = set(), set()
    model = runner._model

    class Noted:
        def __call__(self, batch):
            tokens.add(batch.rows.num_tokens)
            return model(batch)

        def compute_logits(self, hidden):
            logits.add(hidden.shape[0])
            return model.compute_logits(hidden)

    runner._model = Noted()
    runner._init_slots()
    runner._first_runs(runner._more_counts())
    rows = runner._builder.max_rows
    most = min(runner._builder.max_tokens, rows * runner._max_model_len)
    scored = min(256, runner._max_model_len, most)
    assert {n.bit_length() for n in tokens} == set(range(1, most.bit_length() + 1))
    assert {n.bit_length() for n in logits} == set(range(1, max(rows, scored).bit_length() + 1))
    assert max(logits) <= max(rows, scored)


def test_what_layers_add_up_by_is_the_same_in_all_of_them(deep: str) -> None:
    """It may refer to anything, itself included."""
    core = build(deep)
    comm = NullComm()
    comm.itself = comm
    for layer in core._executor._runner._model.model.layers:
        layer.mixer.comm = comm
    assert kept(core) == [0, 1]


@pytest.mark.parametrize("longest", [200, 257, 400, 512, 2000])
def test_the_largest_steps_have_rows_of_the_kernel_of_long_rows(deep: str, longest: int) -> None:
    """With a past, and so many that other kernels don't do. Rows of half of 400 tokens are too short for it, one of 399 may be too few, and four of 512 have no past."""
    runner = build(deep, max_model_len=longest, max_num_batched_tokens=2048)._executor._runner
    wide, room = numerics.FAST.attention.wide_queries, min(2048, 4 * (longest - 1))
    steps = [rows for rows in runner._largest_steps() if all(row.start > 0 and row.num_tokens >= wide for row in rows)]
    assert any(2 * sum(row.num_tokens for row in rows) >= room for rows in steps) == (longest > wide)
