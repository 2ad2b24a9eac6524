"""DeepSeek-V4's kernels on the device against their twins on the CPU, in the sizes of V4-Flash and in small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.device import DEVICE
from helpers.recurrent_cases import Memory, Step
from helpers.vectors_cases import CASES, Case, in_fp8, in_published_pages, inputs, moved, with_choice
from pagerunner.batch import StatePages, WritePlaces
from pagerunner.ops.kernels.latent import vectors_attention as kernels
from pagerunner.ops.kernels.latent.vectors_attention import by_gluon
from pagerunner.ops.linear import Norm
from pagerunner.ops.slot_pooling import Pooling, pool_slots
from pagerunner.ops.streams import Gates, Left, StreamWeights, enter_sublayer
from pagerunner.ops.vectors_attention import Slots, prepare_vectors_, vectors_attention

HOPPER = DEVICE == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DECODE, PREFILL = ((300, 1), (3, 1), (4000, 1), (129, 1)), ((0, 300), (700, 37), (60, 1))
FLASH = {"heads": 64, "size": 512, "window": 128, "dtype": torch.bfloat16}
LARGE = {
    "window only, decode": Case(DECODE, ratio=0, **FLASH),
    "heavy, decode": Case(DECODE, ratio=128, **FLASH),
    "sparse, decode": Case(DECODE, top_k=512, **FLASH),
    "sparse, prefill": Case(PREFILL, top_k=100, padding=5, **FLASH),
    "heavy, prefill": Case(PREFILL, ratio=128, **FLASH),
    "sparse, drafts": Case(((100, 3), (500, 4), (18, 1)), stride=4, top_k=100, **FLASH),
    "sparse, decode, 16 heads": Case(DECODE, top_k=512, **FLASH | {"heads": 16}),
    "heavy, prefill, 32 heads": Case(PREFILL, ratio=128, **FLASH | {"heads": 32}),
    "heavy, prefill, 16 heads": Case(PREFILL, ratio=128, **FLASH | {"heads": 16}),
    "sparse, decode, float32": Case(DECODE, top_k=100, **FLASH | {"dtype": torch.float32, "heads": 16}),
}


@pytest.mark.parametrize("case", [*CASES.values(), *LARGE.values()], ids=[*CASES.keys(), *LARGE.keys()])
def test_attention(case: Case) -> None:
    torch.manual_seed(1)
    arguments, _ = inputs(case, 16, 4)
    tolerance = 1e-4 if case.dtype == torch.float32 else 2e-2
    want, given = vectors_attention.twin(*arguments), moved(arguments, DEVICE)
    full = case.heads >= 16 and case.size == 512 and case.dtype == torch.bfloat16 and not case.block
    assert by_gluon(*given[:3]) == (full and HOPPER), "the kernel in Gluon serves, whatever the version of Triton"
    for _ in range(3):
        got = vectors_attention(*given)
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("name", [name for name, case in LARGE.items() if case.heads == 64])
def test_pages_in_fp8(name: str, heads: int) -> None:
    torch.manual_seed(1)
    arguments, _ = inputs(replace(LARGE[name], heads=heads), 16, 4)
    want = vectors_attention.twin(*in_published_pages(arguments)[1])
    held, _ = in_published_pages(
        moved(arguments, DEVICE)
    )  # made where they stay: a copy of parts of pages has strides of its own
    assert by_gluon(*held[:3]) == HOPPER
    for _ in range(3):
        got = vectors_attention(*held).cpu()
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.abs().max()))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", [name for name, case in LARGE.items() if case.dtype == torch.bfloat16])
def test_two_parts_of_a_token_merge_themselves(monkeypatch: pytest.MonkeyPatch, name: str, fp8: bool) -> None:
    """As programs of a cluster on Hopper: always to the same bits."""
    torch.manual_seed(1)
    monkeypatch.setattr(kernels, "_parts", lambda *_: kernels.CLUSTER)
    arguments, _ = inputs(LARGE[name], 16, 4)
    want = vectors_attention.twin(*(in_published_pages(arguments)[1] if fp8 else arguments))
    given = moved(arguments, DEVICE)
    given = in_published_pages(given)[0] if fp8 else given
    found = [vectors_attention(*given) for _ in range(20)]
    tolerance = 3e-2 * float(want.abs().max()) if fp8 else 2e-2
    torch.testing.assert_close(found[0].cpu(), want, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("longest", [2100, 4095, 9000, 16_383])
def test_a_cluster_chooses_slots_itself(monkeypatch: pytest.MonkeyPatch, longest: int, fp8: bool) -> None:
    """Of sequences of up to 1,024, 2,048 and 4,096 slots: the same as other launches choose, many of them by place as scores are equal, and always to the same bits."""
    torch.manual_seed(1)
    monkeypatch.setattr(kernels, "_parts", lambda *_: kernels.CLUSTER)
    rows = tuple((past, 1) for past in (longest, 2051, 0, 2047, 700, longest - 130))
    arguments, _ = inputs(Case(rows, **FLASH), 16, 4)
    given = with_choice(moved(arguments, DEVICE), 512, fp8)
    given = in_published_pages(given)[0] if fp8 else given
    asked: list[int] = []
    choose = Slots.choose
    monkeypatch.setattr(Slots, "choose", lambda slots, rows: asked.append(1) or choose(slots, rows))
    found = [vectors_attention(*given) for _ in range(20)]
    assert len(asked) == (0 if HOPPER else 20)
    want = vectors_attention(given[0], given[1], choose(given[2], given[3]), *given[3:])
    torch.testing.assert_close(found[0], want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("fp8", [False, True])
def test_preparing(fp8: bool) -> None:
    torch.manual_seed(1)
    (q, window, _, _, _, _, angles), _ = inputs(replace(LARGE["heavy, prefill"], rows=((0, 70),)), 16, 4)
    norm, offsets = Norm(torch.rand(512).bfloat16(), 1e-6), torch.arange(70) % 16
    entries = torch.tensor([-1, 0, 1, -1, 2])[torch.arange(70) // 16]
    found = []
    for device, op in (("cpu", prepare_vectors_.twin), (DEVICE, prepare_vectors_)):
        pages = torch.zeros(3, 16, 512).bfloat16()
        own = in_fp8(pages, 8)[0] if fp8 else pages
        mine = moved((q.clone(), window.vectors_TD.clone(), norm, angles, own), device)
        op(*mine, WritePlaces(entries.to(device), offsets.to(device)))
        at = torch.arange(48, device=device) // 16, torch.arange(48, device=device) % 16
        held = mine[4] if isinstance(mine[4], torch.Tensor) else torch.cat(mine[4].read(*at), -1)
        found.append([part.cpu() for part in (mine[0], mine[1], held)])
    near = 0.13 if fp8 else 2e-2  # a number may round to its neighbour
    for want, got, most in zip(*found, (2e-2, near, near), strict=True):
        torch.testing.assert_close(got, want, rtol=most, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_streams(tokens: int) -> None:
    torch.manual_seed(1)
    streams, fn = torch.randn(tokens, 4, 4096).bfloat16(), torch.randn(24, 4 * 4096) / 128
    among = torch.rand(tokens, 4, 4).softmax(-1)
    left = Left(torch.randn(tokens, 4096).bfloat16(), Gates(torch.rand(tokens, 4), among))
    weights = StreamWeights(fn, torch.randn(24), torch.rand(3), 1e-6, 1e-6)
    arguments = (streams, left, weights, 20, Norm(torch.rand(4096).bfloat16(), 1e-6))
    want, got = enter_sublayer.twin(*arguments), enter_sublayer(*moved(arguments, DEVICE))
    for mine, other in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        exact = other.dtype == torch.float32
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-3 if exact else 2e-2, atol=1e-3 if exact else 2e-2)


@pytest.mark.parametrize(("ratio", "overlap", "sizes"), [(4, True, (512, 128)), (128, False, (512,))])
@pytest.mark.parametrize(
    "step",
    [
        Step((1,) * 9),
        Step((300, 1, 17), saves=((0, 64), (0, 256)), padding=(1, 5)),
        Step((4, 2), drafts=3, accepted=(2, 0), stride=4),
    ],
    ids=["decode", "prefill", "drafts"],
)
def test_pooling(step: Step, ratio: int, overlap: bool, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    strips, width = (4, 2 * ratio) if overlap else (2, ratio)
    shapes = [(width, strips * size) for size in sizes]
    journals = [(step.drafts, shape[1]) for shape in shapes] if step.drafts else []
    x = [torch.randn(step.tokens, shape[1]).bfloat16() for shape in shapes]
    biases = [torch.randn(ratio, shape[1] // 2) for shape in shapes]
    outs, memories = [], []
    for device, op in (("cpu", pool_slots.twin), (DEVICE, pool_slots)):
        memory = Memory(step, [*shapes, *journals], [torch.float32] * len(shapes + journals), device)
        rows, states = memory.rows, memory.states
        if not step.drafts:  # decode completes slots
            rows.step.positions_T.add_(ratio - 1)
            rows.step.seq_lens_R[: len(step.lengths)] += ratio - 1
            if rows.saves is not None:
                rows.saves.position_N.add_(ratio - 1)
        poolings = [Pooling(a.to(device), b.to(device)) for a, b in zip(x, biases, strict=True)]
        pages = StatePages(0, tuple(states[: len(shapes)]), tuple(states[len(shapes) :]))
        outs.append(op(rows.step.positions_T, poolings, pages, rows, overlap).cpu())
        memories.append([state.cpu() for state in states])
    done = (((rows.step.positions_T + 1) % ratio == 0) & (rows.step.row_T >= 0)).cpu()
    torch.testing.assert_close(outs[1][done], outs[0][done], rtol=1e-3, atol=1e-3)
    for want, got in zip(*memories, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
