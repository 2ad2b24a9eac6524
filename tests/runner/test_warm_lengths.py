"""No prompt asks for a kernel that the warm-up hasn't met, however long it is: compiling one takes seconds in which nobody is served."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.checkpoints_compressed import HEAVY, SPARSE, make_compressed_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.device import as_on_cuda
from helpers.effort import effort
from helpers.engine_oracle import engine
from helpers.families import MAKERS
from pagerunner.attention import paged_sparse
from pagerunner.attention.paged_mla import PagedLatentBackend
from pagerunner.attention.paged_vectors import PagedVectorsBackend
from pagerunner.engine.worker import build, worker
from pagerunner.models.configs.base import ModelConfig
from pagerunner.runner.runner import BETWEEN_TOKENS, ModelRunner
from pagerunner.types import StepRow

pytest.importorskip("transformers")
pytest.importorskip("triton")
from helpers import launches  # noqa: E402
from helpers.launches import noted_launches  # noqa: E402
from pagerunner.ops.kernels.latent import indexer, vectors_attention  # noqa: E402
from pagerunner.ops.kernels.paged import paged_attention, paged_dense, paged_prefill_wide  # noqa: E402

LONGEST = 1024
KINDS = ("SPLIT", "NEW", "CHOSEN", "C", "ONE", "RATIO", "num_ctas")
"""What the compiled kernels of DeepSeek-V4's attention in Gluon differ by."""


def _chosen(path: Path) -> Path:
    return make_latent_checkpoint(path, "deepseek_v32", index_topk=200)[0]


def _slots(path: Path) -> Path:
    return make_compressed_checkpoint(path, compress_rates={SPARSE: 4, HEAVY: 8}, index_topk=64)[0]


def _family(name: str, path: Path) -> Path:
    made = MAKERS[name](path)
    return made if isinstance(made, Path) else path


PLAIN = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_next", "bamba", "llama4_text")
CASES: dict[str, tuple[Any, str]] = {
    "chosen latents": (_chosen, "auto"),
    "slots": (_slots, "auto"),
    "chosen latents in fp8": (_chosen, "fp8_e4m3"),
    "slots in fp8": (_slots, "fp8_e4m3"),
    **{name: (functools.partial(_family, name), "auto") for name in PLAIN},
}


def _runner(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    longest: int = LONGEST,
    tokens: int | None = None,
    **own: Any,
) -> tuple[ModelRunner, ModelConfig]:
    make, pages = CASES[name]
    found: list[tuple[ModelRunner, ModelConfig]] = []

    def make_runner(resolved: Any, *args: Any) -> ModelRunner:
        found.append((build.make_runner(resolved, *args), resolved.model))
        return found[-1][0]

    monkeypatch.setattr(worker, "make_runner", make_runner)
    sizes = {"max_model_len": longest, "max_num_batched_tokens": tokens or longest, "kv_cache_memory_bytes": 20_000_000}
    options = {"max_num_seqs": 4, "cudagraph_capture_sizes": [1, 8], "poison_fresh_pages": False}
    with as_on_cuda(), monkeypatch.context() as start:
        start.setattr(ModelRunner, "warm_up", lambda *_, **__: None)  # it would compute long prompts on the CPU
        engine(make(directory), dtype="bfloat16", kv_cache_dtype=pages, **sizes, **(options | own))
    (made,) = found
    return made


@pytest.mark.days(6)
@pytest.mark.parametrize("name", CASES)
def test_prompts_of_any_length_find_their_kernels_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A prompt whole, its last tokens behind the others, two at once, and three rows that generate; in steps that don't run in graphs."""
    runner, config = _runner(tmp_path, monkeypatch, name)
    runner._kernels, runner._lengths = (
        build._kernels_of(runner._model, torch.device("cpu")),
        build._length_kernels_of(config),
    )  # as on a device
    assert bool(config.choices) == (name not in PLAIN)
    monkeypatch.setattr(indexer, "BLOCK_SCORES", 2**17)  # so that prompts are computed in parts, as long ones are
    monkeypatch.setattr(paged_sparse, "MOST_TOKENS", 128)
    draw = random.Random(7)
    with noted_launches() as launched:
        runner.warm_up()
        met = set(launched)
        for number in range(effort(12, 100)):
            length = 384 + number if number < 3 else draw.randrange(BETWEEN_TOKENS + 1, LONGEST)
            last, half = min(length, 300), length // 2
            for rows in (
                [(0, length)],
                [(length - last, last)],
                [(0, half), (0, length - half)],
                3 * [(length - 1, 1)],
            ):
                given = [(start, n, [0] * n if n > 1 else []) for start, n in rows]
                runner._run_first([StepRow(slot, *row, True) for slot, row in enumerate(given)])
            assert launched <= met, (length, launched - met)
    assert len(met) > 20


@pytest.mark.parametrize("pages", ["auto", "fp8_e4m3"])
def test_steps_with_a_past_find_their_kernels_compiled_beside_that_of_long_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: str
) -> None:
    """Many short rows, and where pages are in fp8 long rows with so much past that there is no room for it, have another one than few short rows."""
    monkeypatch.setitem(CASES, "pages", (CASES["qwen3"][0], pages))
    monkeypatch.setattr(launches, "MULTIPROCESSORS", 24)
    monkeypatch.setattr(paged_dense, "MOST_ELEMENTS", 12 * 2 * 128 * 128)  # for 1,536 tokens of a head
    monkeypatch.setattr(paged_prefill_wide, "serves", lambda *_, **__: True)
    wide: list[bool] = []
    monkeypatch.setattr(paged_attention._Call, "run_wide", lambda self, _: wide.append(bool(self.plan.past)))
    runner, _ = _runner(tmp_path, monkeypatch, "pages", longest=2048, tokens=700)
    with noted_launches() as launched:
        runner.warm_up()
        met = set(launched)
        assert any(wide), "long rows with a past"
        for rows in (4 * [(1000, 170)], 2 * [(1000, 340)], [(1300, 690)], 2 * [(100, 300)], [(0, 600), (9, 100)]):
            runner._run_first([StepRow(i, start, n, [0] * n, True) for i, (start, n) in enumerate(rows)])
            assert launched <= met, (rows, launched - met)


def test_any_number_of_rows_with_all_settings_finds_its_kernels_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, log-probabilities and filters; alone, and with a mask for a row, behind which the others' logits are not gathered."""
    runner, _ = _runner(tmp_path, monkeypatch, "qwen3", longest=64, max_num_seqs=7)
    with noted_launches() as launched:
        runner.warm_up()
        met = set(launched)
        runner._init_slots()
        for count in range(1, 8):
            rows = [StepRow(slot, 9, 1, [], True) for slot in range(count)]
            for masks in (None, {0: [runner._sampler.whole_mask]}):
                runner._run_first(rows, masks)
                assert launched <= met, (count, masks, launched - met)


def test_many_long_rows_find_the_kernel_compiled_that_looks_for_pages_that_all_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs of few tokens long rows have another kernel, as their blocks are divided. Eager steps alone have so many tokens."""
    monkeypatch.setattr(launches, "MULTIPROCESSORS", 24)
    monkeypatch.setattr(paged_prefill_wide, "serves", lambda *_, **__: True)
    monkeypatch.setattr(paged_attention._Call, "run_wide", lambda *_: None)
    runner, _ = _runner(tmp_path, monkeypatch, "qwen3", longest=2048, tokens=8192, max_num_seqs=20)
    with noted_launches() as launched:
        runner.warm_up()
        met = set(launched)
        for rows in (18 * [(100, 400)], [*17 * [(900, 1)], *18 * [(0, 450)]][-20:], 16 * [(0, 500)]):
            runner._run_first(
                [StepRow(i, start, n, [0] * n if n > 1 else [], True) for i, (start, n) in enumerate(rows)]
            )
            assert launched <= met, (rows, launched - met)


def test_the_rows_of_steps_with_drafts_are_built_by_kernels_that_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That isn't part of the graphs, and each number of drafts has a kernel."""
    table = [[1, 1, 3], [2, 4, 1]]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": table}
    runner, _ = _runner(tmp_path, monkeypatch, "qwen3", longest=128, speculative_config=drafts)
    graphs = runner._graphs
    with noted_launches() as launched:
        with monkeypatch.context() as before:
            before.setattr(graphs, "_plain", type(graphs._plain)([]))  # a warm-up comes before the captures
            runner.warm_up()
        met = set(launched)
        for count in (0, 1, 3):
            runner._run_first([StepRow(0, 40, 1 + count, [], True)])
    built = {one for one in launched if one[0] == "_build_rows"}
    assert len(built) == 4 and built <= met  # prompts, and each number of drafts


def test_short_rows_find_their_kernels_compiled_where_no_graph_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper few keys have one program, some two, which are a cluster, and many have more."""
    rates = {SPARSE: 4, HEAVY: 128}
    made = functools.partial(make_compressed_checkpoint, compress_rates=rates, sliding_window=128, index_topk=64)
    monkeypatch.setitem(CASES, "whole windows", (lambda path: made(path)[0], "auto"))
    monkeypatch.setattr(vectors_attention, "by_gluon", lambda *_: True)
    monkeypatch.setattr(vectors_attention, "MANY_HEADS", 1)
    runner, _ = _runner(tmp_path, monkeypatch, "whole windows", longest=640, enforce_eager=True)
    with noted_launches() as launched:

        class Noted:
            def __getitem__(self, grid: Any) -> Any:
                return lambda *_, **how: launched.add(("gluon", *((name, how[name]) for name in KINDS)))

        monkeypatch.setattr(vectors_attention, "_gluon", lambda _: SimpleNamespace(vectors_kernel=Noted()))
        runner.warm_up()
        met = {one for one in launched if one[0] == "gluon"}
        for length in (10, 40, 63, 64, 70, 127, 130, 300, 640):
            for size in (1, 2, min(length, 32)):
                runner._run_first([StepRow(0, length - size, size, [0] * size if size > 1 else [], True)])
                found = {one for one in launched if one[0] == "gluon"}
                assert found <= met, (length, size, found - met)
    assert {("num_ctas", 1), ("num_ctas", 2), ("C", 0), ("C", 1024)} <= {kind for one in met for kind in one[1:]}


def test_numbers_of_tokens_with_kernels_of_their_own_are_met_with_adapters_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that has `A x` beside it is another kernel than the product alone."""
    options = {"enable_lora": True, "enforce_eager": True, "num_gpu_blocks_override": 100}
    runner, _ = _runner(tmp_path, monkeypatch, "qwen3", longest=128, **options)
    run, adapters, met = runner._run_first, runner._builder.adapters, set()
    assert adapters is not None

    def noting(rows: list[StepRow], *masks: Any) -> None:
        met.add((sum(row.num_tokens for row in rows), adapters.any([row.slot for row in rows])))
        run(rows, *masks)

    monkeypatch.setattr(runner, "_run_first", noting)
    monkeypatch.setattr(runner, "_more_counts", lambda: ([2], [], [41], []))
    with noted_launches():
        runner.warm_up()
    assert {(tokens, has) for tokens in (2, 41) for has in (False, True)} <= met


@pytest.mark.parametrize(
    ("name", "backend"), [("chosen latents in fp8", PagedLatentBackend), ("slots", PagedVectorsBackend)]
)
def test_a_graph_computes_all_that_its_layers_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: type[PagedLatentBackend | PagedVectorsBackend]
) -> None:
    """The first layer of a step computes it. A plan that kept it for the next graph would make that graph read what another step left."""
    runner, _ = _runner(tmp_path, monkeypatch, name, longest=160)  # so no row sees more slots than are chosen
    plan, graphs = backend.plan, runner._graphs

    def launches(launched: set[Any]) -> set[Any]:
        launched.clear()
        batch, _ = graphs._prepare(graphs.keys[-1])
        graphs._run(graphs.keys[-1], batch, runner._work)
        return set(launched)

    with noted_launches() as launched:
        first, second = launches(launched), launches(launched)
        kept: dict[Any, Any] = {}

        def keeping(*given: Any) -> Any:
            made = plan(*given)
            object.__setattr__(made, "scratch", kept)
            return made

        monkeypatch.setattr(backend, "plan", keeping)
        third, fourth = launches(launched), launches(launched)
    assert first == second == third
    assert {launch[0] for launch in third - fourth} == {"_best_kernel"}, "it is noticed"
