"""The kernels that pool, finish and store slots against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.drafted_states import DRAFTED, layers, run
from helpers.effort import TEST_DAY, effort
from helpers.interpreter_floats import install
from helpers.recurrent_cases import Memory, Step
from pagerunner.attention import compressed
from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.batch import StatePages, WritePlaces
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.slot_pooling import Pooling, pool_slots, store_slots_
from pagerunner.ops.sparse_latents import Latents

pytest.importorskip("triton")
install()
STEPS = {
    "decode": Step((1, 1, 1, 1)),
    "decode, padded, saves": Step((1, 1), saves=((1, 1),), padding=(2, 2)),
    "long, short and one, saves, padded": Step(
        (3, 45, 1, 9), saves=((1, 31), (1, 32), (1, 7), (0, 2), (1, 45), (3, 9)), padding=(1, 4)
    ),
    **{f"drafts, {name}": step for name, step in DRAFTED.items()},
}
SIZES = {"one": (5,), "two": (70, 6)}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(
    ("overlap", "ratio", "sizes"), [(True, 4, "two"), (False, 20, "one"), (False, 4, "one"), (True, 3, "one")]
)
def test_pooling(step: Step, overlap: bool, ratio: int, sizes: str) -> None:
    strips, width = (4, 2 * ratio) if overlap else (2, ratio)
    shapes = [(width, strips * size) for size in SIZES[sizes]]
    journals = [(step.drafts, shape[1]) for shape in shapes] if step.drafts else []
    inputs = torch.randn(step.tokens, sum(shape[1] for shape in shapes) + 5)[:, 5:]
    poolings = [
        Pooling(x, torch.randn(ratio, shape[1] // 2))
        for x, shape in zip(inputs.split([shape[1] for shape in shapes], -1), shapes, strict=True)
    ]
    outs, memories = (
        [],
        [Memory(step, [*shapes, *journals], [torch.float32] * len(shapes + journals), "cpu") for _ in range(2)],
    )
    past = [7 * row + 9 for row in range(len(step.lengths))]  # positions before each row, which slots may begin in
    for memory, op in zip(memories, (pool_slots.kernel, pool_slots.twin), strict=True):
        if not step.drafts:
            shift(memory, past)
        pages = StatePages(0, tuple(memory.states[: len(shapes)]), tuple(memory.states[len(shapes) :]))
        outs.append(op(memory.rows.step.positions_T, poolings, pages, memory.rows, overlap))
    rows = memories[0].rows.step
    done = ((rows.positions_T + 1) % ratio == 0) & (rows.row_T >= 0)
    torch.testing.assert_close(outs[0][done], outs[1][done])
    for found, want in zip(memories[0].states, memories[1].states, strict=True):
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found.nan_to_num(), want.nan_to_num())


def shift(memory: Memory, past: list[int]) -> None:
    """Let every row begin that many positions later."""
    step, saves = memory.rows.step, memory.rows.saves
    own = torch.tensor([*past, 0], dtype=torch.int32)
    step.positions_T.add_(own[step.row_T])
    step.seq_lens_R[: len(past)] += own[:-1]
    if saves is not None:
        saves.position_N.add_(own[saves.row_N])


def test_drafts_are_bit_by_bit_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """From step to step, whatever was accepted, with saves and pages that move."""

    def kernel(*args: object) -> torch.Tensor:
        return pool_slots.kernel(*args).nan_to_num(0, 0, 0)  # what completes no slot is anything

    monkeypatch.setattr(compressed, "pool_slots", kernel)
    run(
        *layers("float32", 2)["slot pooling"],
        PagedRecurrentBackend(),
        drafts=3,
        seed=TEST_DAY,
        steps=effort(8, 60),
        length=16,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("sizes", "rotary"), [((16, 12), 8), ((14,), 14), ((32,), 4)])
def test_storing(sizes: tuple[int, ...], rotary: int, dtype: torch.dtype) -> None:
    ratio, tokens, slots, count = 4, 11, 3, 5
    pooled = torch.randn(tokens, sum(sizes))
    norms = [Norm(torch.rand(size).to(dtype), 1e-6) for size in sizes]
    cos, sin = torch.randn(2, tokens, 1, rotary // 2).to(dtype)
    angles = RopeAngles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    positions = torch.arange(tokens) + 5
    write = WritePlaces(torch.tensor([2, 2, 2, 4, 4, 4, 1, -1, -1, 0, 0]), torch.arange(tokens) + 1)
    pages = [
        [torch.full((count, slots, 40), float("nan")).to(dtype)[:, :, 3 : 3 + size] for size in sizes] for _ in range(2)
    ]
    for op, held in zip((store_slots_.kernel, store_slots_.twin), pages, strict=True):
        op(pooled, norms, held, angles, positions, write, ratio)
    for found, want in zip(*pages, strict=True):
        assert 0 < int(want.isfinite().all(-1).sum()) < count * slots
        torch.testing.assert_close(
            found, want, equal_nan=True, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=2e-3
        )


@pytest.mark.parametrize(("key", "mixed"), [(16, False), (16, True), (12, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_storing_in_fp8(dtype: torch.dtype, key: int, mixed: bool) -> None:
    """Slots of 24 elements and 8 rotary ones, three blocks with a byte each; indexer keys with one scale."""
    ratio, tokens, count, slots = 4, 11, 5, 3
    norms = [Norm(torch.rand(size).to(dtype), 1e-6) for size in (32, key)]
    cos, sin = torch.randn(2, tokens, 1, 4).to(dtype)
    angles = RopeAngles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    where = (
        torch.arange(tokens) + 5,
        WritePlaces(torch.tensor([2, 2, 2, 4, 4, 4, 1, -1, -1, 0, 0]), torch.arange(tokens) + 1),
    )
    pooled, found = torch.randn(tokens, 32 + key), []
    for op in (store_slots_.kernel, store_slots_.twin):
        pages = []
        for size, blocks, rotary, held in ((24, 3, 8, torch.uint8), (key, 1, 0, torch.float32)):
            codes = torch.zeros(count, slots, size, dtype=torch.float8_e4m3fn)
            scales = torch.zeros(count, slots, blocks, dtype=held)
            pages.append(Latents(codes, torch.zeros(count, slots, rotary, dtype=torch.bfloat16), scales))
        op(pooled, norms, pages, angles, *where, ratio, mixed)
        found.append(pages)
    for got, want in zip(*found, strict=True):
        assert 0 < int((want.scales_ESG > 0).all(-1).sum()) < count * slots
        for mine, other in zip(got, want, strict=True):
            torch.testing.assert_close(
                mine.float(), other.float(), rtol=0.13, atol=1e-2
            )  # a number may round to its neighbour


def test_a_step_without_tokens_stores_nothing() -> None:
    nothing = torch.empty(0, 8)
    pages = [torch.zeros(2, 3, 8)]
    where = torch.empty(0, dtype=torch.int64)
    store_slots_.kernel(
        nothing,
        [Norm(torch.ones(8), 1e-6)],
        pages,
        RopeAngles(nothing[:, None], nothing[:, None]),
        where,
        WritePlaces(where, where),
        4,
    )
    assert not pages[0].any()
