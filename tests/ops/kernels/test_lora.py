"""Kernels of adapters against their twins, in Triton's interpreter; and what the twins stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagerunner.ops import lora
from pagerunner.ops.linear import Norm
from pagerunner.ops.lora import TILE, Adapters, Blocks, Fused, FusedExperts, WorkList


def placed(
    ranks: dict[int, int], outputs: list[int], inputs: int, slots: int = 4
) -> tuple[Blocks, dict[tuple[int, int], torch.Tensor]]:
    """Adapters of these ranks by slot, in blocks in random order, and what each adds to each product as one matrix."""
    most = max(-(-rank // TILE) for rank in ranks.values())
    places = torch.full((slots, len(outputs) + 1, most, 2), -1, dtype=torch.int64)
    pool, deltas = torch.full((900_000,), float("nan")), {}
    spare = [int(x) for x in torch.randperm(80)]
    for slot, rank in ranks.items():
        for part, size in enumerate(outputs):
            a, b = torch.randn(rank, inputs), torch.randn(size, rank)
            deltas[slot, part] = b @ a
            for block in range(-(-rank // TILE)):
                for side, whole in enumerate((a, b.T)):
                    own = whole[block * TILE : (block + 1) * TILE]
                    at = spare.pop() * 11_008
                    places[slot, part + 1, block, side] = at
                    pool[at : at + TILE * own.shape[1]] = 0
                    pool[at : at + own.numel()] = own.flatten()
    return Blocks(pool, places), deltas


CASES = {
    "one token": ([2], [1]),
    "one without": ([-1], [1]),
    "base rows between": ([1, -1, 1, 0], [1, 20, 1, 2]),
    "nobody": ([-1, -1], [3, 1]),
    "several tiles": ([3, 0, 3], [17, 1, 18]),
    "a large step": ([3, 0, 3], [33, 1, 31]),
}


@pytest.mark.parametrize("case", CASES)
def test_work_list(case: str) -> None:
    adapters, lens = CASES[case]
    start = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    own = torch.tensor(adapters, dtype=torch.int32)
    places = torch.arange(4 * 600 * 2).view(4, 600, 1, 2)  # a slot's are two programs'
    want = lora.work_list.twin(own, start, sum(lens), 4, places)
    got = lora.work_list.kernel(own, start, sum(lens), 4, places)
    assert torch.equal(got.tokens_WX, want.tokens_WX) and torch.equal(got.slots_W, want.slots_W)
    if case.startswith("one"):
        assert got.places is not None and torch.equal(got.places, want.places)
        assert torch.equal(got.places, places[adapters[0]] if adapters[0] >= 0 else torch.full_like(places[0], -1))
    else:
        assert got.places is None and want.places is None
    named = [int(t) for t in want.tokens_WX.flatten() if t >= 0]
    rows = [row for row, count in enumerate(lens) for _ in range(count)]
    assert sorted(named) == [token for token, row in enumerate(rows) if adapters[row] >= 0], "each token once"
    assert int((want.tokens_WX >= 0).sum(1).max()) <= (8 if len(rows) <= 64 else 16)


@pytest.mark.parametrize("way", [lora.work_list.twin, lora.work_list.kernel])
def test_no_token_has_no_tile(way: Callable[..., WorkList]) -> None:
    """The last layer of a step of prompts that all go on, and drafts behind it."""
    nobody, start = torch.tensor([], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    got = way(nobody, start, 0, 4, torch.zeros(4, 6, 1, 2, dtype=torch.int64))
    assert got.tokens_WX.shape == (0, TILE) and got.slots_W.shape == (0,) and got.places is None


def test_most_tiles_is_a_bound_that_is_reached() -> None:
    assert lora.most_tiles(64, 8) == 11 and lora.most_tiles(3, 8) == 3 and lora.most_tiles(2048, 1) == 128
    counts = [1] * 7 + [64 - 7]
    assert sum(-(-count // TILE) for count in counts) == lora.most_tiles(64, 8)


def step(
    blocks: Blocks,
    x: torch.Tensor,
    y: torch.Tensor,
    work: WorkList,
    layer: Fused,
    norm: Norm | None = None,
    *,
    kernel: bool,
) -> torch.Tensor:
    y = y.clone()
    if kernel:
        inner = lora.shrink.kernel(x, work, blocks, layer, norm)
        lora.expand_.kernel(y, inner, work, blocks, layer, norm)
    else:
        lora.expand_.twin(y, lora.shrink.twin(x, work, blocks, layer, norm), work, blocks, layer, norm)
    return y


@pytest.mark.parametrize("kernel", [False, True])
def test_products_of_several_adapters(kernel: bool) -> None:
    """Ranks 40 and 3 in one step, fused parts whose sizes suit no tile, and rows without an adapter that keep their bits."""
    outputs, inputs = [136, 24], 72
    blocks, deltas = placed({0: 40, 2: 3}, outputs, inputs)
    adapters, lens = [2, -1, 0, 2], [1, 2, 3, 1]
    start = torch.tensor([0, 1, 3, 6, 7], dtype=torch.int32)
    x, y = torch.randn(7, inputs), torch.randn(7, sum(outputs))
    work = lora.work_list.twin(torch.tensor(adapters, dtype=torch.int32), start, 7, 4)
    layer = Fused.of(1, outputs)
    got = step(blocks, x, y, work, layer, kernel=kernel)
    of_token = [row for row, count in zip(adapters, lens, strict=True) for _ in range(count)]
    for token, slot in enumerate(of_token):
        if slot < 0:
            assert torch.equal(got[token], y[token])
        else:
            added = torch.cat([deltas[slot, part] @ x[token] for part in range(2)])
            torch.testing.assert_close(got[token], y[token] + added, rtol=1e-4, atol=1e-3)
    alone = lora.work_list.twin(torch.tensor([0], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32), 3, 4)
    assert torch.equal(step(blocks, x[3:6], y[3:6], alone, layer, kernel=kernel), got[3:6]), "neighbours don't matter"


def test_pieces_are_summed_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread over programs or not, the bits are the same."""
    from pagerunner.ops.kernels.lora import lora as kernels

    blocks, _ = placed({0: 16}, [16], 300)
    work = lora.work_list.twin(torch.tensor([0], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32), 2, 1)
    x, y, layer = torch.randn(2, 300), torch.zeros(2, 16), Fused.of(1, [16])
    monkeypatch.setattr(kernels, "PIECE", 128)
    spread = step(blocks, x, y, work, layer, kernel=True)
    assert lora.shrink.kernel(x, work, blocks, layer).shape[0] == 3
    monkeypatch.setattr(kernels, "SPREAD_TILES", 0)
    assert torch.equal(step(blocks, x, y, work, layer, kernel=True), spread)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("most", [64, 0])
def test_the_norm_before_a_product(most: int, offset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for an adapter that has only the second part, and with more tiles than have pieces of their own."""
    from pagerunner.ops.kernels.lora import lora as kernels

    monkeypatch.setattr(kernels, "PIECE", 128)
    monkeypatch.setattr(kernels, "SPREAD_TILES", most)
    blocks, _ = placed({0: 40, 1: 5}, [32, 24], 300)
    blocks.places[1, 1] = -1
    work = lora.work_list.twin(
        torch.tensor([0, 1, -1], dtype=torch.int32), torch.tensor([0, 2, 3, 4], dtype=torch.int32), 4, 4
    )
    norm = Norm(torch.randn(300), 0.5, offset)
    x, y, layer = 3 * torch.randn(4, 300), torch.randn(4, 56), Fused.of(1, [32, 24])
    got = step(blocks, x, y, work, layer, norm, kernel=True)
    torch.testing.assert_close(got, step(blocks, norm(x), y, work, layer, kernel=False), rtol=1e-4, atol=1e-3)
    assert torch.equal(got[3], y[3]) and torch.equal(got[2, :32], y[2, :32]), "no adapter of it"


@pytest.mark.parametrize("alone", [False, True])
def test_a_norm_of_large_numbers_in_float16(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A massive activation times the norm's weight is beyond float16, and what the norm makes of it isn't."""
    outputs, inputs = [24, 16], 64
    blocks, _ = placed({0: 5}, outputs, inputs)
    blocks = Blocks(blocks.pool.half(), blocks.places)
    x, weight = torch.randn(1, inputs).half(), 0.1 * torch.randn(sum(outputs), inputs).half()
    x[0, 7] = 3e4
    norm = Norm(torch.full((inputs,), 4.0).half(), 1e-6)
    starts, layer = torch.tensor([0, 1], dtype=torch.int32), Fused.of(1, outputs)
    work = lora.work_list.kernel(torch.tensor([0], dtype=torch.int32), starts, 1, 4, blocks.places)
    adapters = Adapters(torch.tensor([0], dtype=torch.int32), None, 4, blocks, work)
    got, want = torch.zeros(1, 40).half(), torch.zeros(1, 40).half()
    lora.adapted_row_.twin(want, x, weight if alone else 0 * weight, None, want, 1, work, blocks, layer, norm)
    for one in ("shrink", "expand_", "adapted_row_"):
        monkeypatch.setattr(lora, one, getattr(lora, one).kernel)
    if alone:
        adapters.row(layer, x, weight, None, got, norm)
    else:
        adapters.add_(x, layer, got, norm)
    torch.testing.assert_close(got, want, rtol=5e-3, atol=0.1)
    assert got.isfinite().all() and want.abs().max() > 10


def test_wider_tiles_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many tiles a program has more outputs, here of two parts neither of which fills it."""
    from pagerunner.ops.kernels.lora import lora as kernels

    outputs = [560, 24]
    blocks, _ = placed({0: 3, 1: 20}, outputs, 40)
    work = lora.work_list.twin(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32), 3, 4
    )
    x, y, layer = torch.randn(3, 40), torch.randn(3, sum(outputs)), Fused.of(1, outputs)
    want = step(blocks, x, y, work, layer, kernel=True)
    monkeypatch.setattr(kernels, "FEW_TILES", 0)
    assert torch.equal(step(blocks, x, y, work, layer, kernel=True), want)


@pytest.mark.parametrize("rows", [None, [0, 0, 1, -1, 2, 2, 2, 1]])
def test_pairs_of_a_token_and_an_expert(rows: list[int] | None) -> None:
    """Slot 2 has all products of three experts, slot 0 those of the second one alone; slot 1 has others."""
    torch.manual_seed(0)
    outputs, experts = [16, 16, 24] * 3, 3
    blocks, deltas = placed({2: 20, 0: 3, 1: 5}, outputs, 16)
    blocks = blocks._replace(experts_S=torch.tensor([True, False, True, False]))
    blocks.places[1, 1:] = -1  # `placed` leaves the first product to others
    blocks.places[1, 0] = 0
    blocks.places[0, 1:4], blocks.places[0, 7:] = -1, -1
    slots = [0, 2, 1] if rows is not None else [2, -1, 0, 1, 2, 2, 0, 2]
    own = torch.tensor(slots, dtype=torch.int32)
    row_T = None if rows is None else torch.tensor(rows)
    adapters = Adapters(own, row_T, 4, blocks, WorkList(torch.empty(0, TILE), torch.empty(0)))
    layer = FusedExperts.of(1, experts, 24, 16)
    of_tokens = [slots[row] if row >= 0 else -1 for row in (range(8) if rows is None else rows)]
    slots_T, has_T1 = adapters.apart()
    assert slots_T.tolist() == [slot if slot in (0, 2) else -1 for slot in of_tokens]
    assert has_T1.flatten().tolist() == [slot in (0, 2) for slot in of_tokens] and adapters.apart()[0] is slots_T
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(8)]).to(torch.int32)
    chosen[5] = -1
    pairs, x_TI = adapters.of_pairs(chosen, layer), torch.randn(8, 16)
    assert torch.equal(pairs.lists.experts_TA, chosen.masked_fill(~has_T1, -1))
    x = x_TI.repeat_interleave(2, 0)
    for fused, part, width in ((layer.gate_up, 0, 32), (layer.down, 2, 24)):
        want = torch.zeros(16, width)
        for pair, (token, expert) in enumerate((t, int(e)) for t in range(8) for e in chosen[t]):
            slot = of_tokens[token]
            if expert >= 0 and (slot == 2 or (slot == 0 and expert == 1)):
                found = [deltas[slot, 3 * expert + p] @ x[pair] for p in ((0, 1) if part == 0 else (2,))]
                want[pair] = torch.cat(found)
        for own_x, work in ((x, pairs.lists.pairs), (x_TI, pairs.lists.tokens)):
            for shrink, expand_ in ((lora.shrink.twin, lora.expand_.twin), (lora.shrink.kernel, lora.expand_.kernel)):
                got = torch.zeros(16, width)
                expand_(got, shrink(own_x, work, pairs.blocks, fused), pairs.lists.pairs, pairs.blocks, fused)
                torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
            got = torch.zeros(16, width)
            pairs.add_(own_x, fused, got, known=False)
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("tokens", "active", "experts", "alone"),
    [(1, 8, 128, True), (1, 1, 4, False), (9, 4, 5, True), (40, 3, 3, False), (33, 2, 1, False)],
)
def test_lists_of_pairs(tokens: int, active: int, experts: int, alone: bool) -> None:
    """Tiles may stand anywhere. Each has a slot's pairs alone, in their order, and none has fewer than it could: (33, 2, 1) are 66 pairs of two slots."""
    torch.manual_seed(tokens)
    chosen = torch.stack([torch.randint(-1, experts, (active,)) for _ in range(tokens)]).to(torch.int32)
    slots_T, products = torch.randint(-1, 3, (tokens,), dtype=torch.int32), 3 * experts + 2
    given = chosen, slots_T, products, 3 * products, lora.most_tiles(tokens * active, 3 * experts), experts
    found = []
    for run in (lora.pair_lists.kernel, lora.pair_lists.twin):
        own_TA, of_tokens, of_pairs, order_P, starts_E1 = run(*given, alone=alone)
        assert torch.equal(own_TA, chosen.masked_fill(slots_T.unsqueeze(1) < 0, -1) if not alone else chosen)
        if order_P is not None:
            experts_P = own_TA.flatten().masked_fill(own_TA.flatten() < 0, experts)
            assert torch.equal(order_P, experts_P.argsort(stable=True).to(torch.int32))
            assert starts_E1.tolist() == [int((experts_P < expert).sum()) for expert in range(experts + 1)]
        assert torch.equal(of_tokens.slots_W, of_pairs.slots_W) and len(of_pairs.slots_W) <= tokens * active
        want_WX = of_pairs.tokens_WX // active
        assert torch.equal(of_tokens.tokens_WX, want_WX) and want_WX.dtype == of_tokens.tokens_WX.dtype
        tiles = zip(of_pairs.slots_W.tolist(), of_pairs.tokens_WX.tolist(), strict=True)
        found.append(sorted((slot, own) for slot, own in tiles if slot >= 0 or max(own) >= 0))
    assert found[0] == found[1]
    named = sorted(pair for _, own in found[0] for pair in own if pair >= 0)
    assert named == torch.nonzero(((chosen >= 0) & (slots_T.unsqueeze(1) >= 0)).flatten()).flatten().tolist()


@pytest.mark.parametrize("slot", [0, 1, -1])
@pytest.mark.parametrize("case", ["plain", "norm", "add", "gated"])
def test_one_row_has_the_adapter_in_its_own_product(case: str, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 40 and 5, the second of which has only the second part; and a row that has none."""
    twin = lora.adapted_row_.twin
    outputs, inputs = [40, 40] if case == "gated" else [40, 24], 300
    blocks, _ = placed({0: 40, 1: 5}, outputs, inputs)
    blocks.places[1, 1] = -1
    starts = torch.tensor([0, 1], dtype=torch.int32)
    work = lora.work_list.kernel(torch.tensor([slot], dtype=torch.int32), starts, 1, 4, blocks.places)
    layer, norm = Fused.of(1, outputs), None if case in ("plain", "add") else Norm(torch.randn(inputs), 0.5)
    x, weight, bias = torch.randn(1, inputs), 0.1 * torch.randn(sum(outputs), inputs), torch.randn(sum(outputs))
    flags = {"gated": case == "gated", "add": case == "add"}
    out = torch.randn(1, 40 if case == "gated" else 64)
    got, want = out.clone(), out.clone()
    monkeypatch.setattr(lora, "adapted_row_", lora.adapted_row_.kernel)
    adapters = Adapters(torch.tensor([slot], dtype=torch.int32), None, 4, blocks, work)
    adapters.row(layer, 2 * x, weight, bias, out.clone(), norm, **flags)  # its words are older
    adapters.row(layer, x, weight, bias, got, norm, **flags)
    twin(want, x, weight, bias, out, 1, work, blocks, layer, norm, **flags)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-3 if case != "gated" else 5e-2)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("few", [16, 0])
def test_the_gate_behind_adapters(few: int, rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 40 and 5, the second of which has only the second part; rows without an adapter, and a token of no row."""
    from pagerunner.ops.kernels.lora import lora as kernels

    monkeypatch.setattr(kernels, "FEW_TILES", few)
    blocks, _ = placed({0: 40, 1: 5}, [40, 40], 300)
    blocks.places[1, 1] = -1
    own = torch.tensor([0, -1, 1, 0], dtype=torch.int32)
    lens = [2, 20, 1, 1] if rows else [1, 1, 1, 1]
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    of_token = [row for row, count in enumerate(lens) for _ in range(count)]
    row_T = torch.tensor([*of_token, -1], dtype=torch.int32) if rows else None
    tokens = len(of_token) + rows
    work = lora.work_list.kernel(own, starts, tokens, 4)
    norm, layer = Norm(torch.randn(300), 0.5), Fused.of(1, [40, 40])
    x, y = torch.randn(tokens, 300), 0.5 * torch.randn(tokens, 80)
    want = Adapters(own, row_T, 4, blocks, work).gated(x, layer, y.clone(), norm)
    for one in ("shrink", "expand_silu"):
        monkeypatch.setattr(lora, one, getattr(lora, one).kernel)
    got = Adapters(own, row_T, 4, blocks, work).gated(x, layer, y.clone(), norm)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=5e-2)


@pytest.mark.parametrize("gated", [False, True])
def test_tiles_of_one_adapter_are_multiplied_together(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of prompts. Adapters that meet in a program, tiles of no adapter behind the last one, an adapter without one of the products and one without both."""
    from pagerunner.ops.kernels.lora import lora as kernels
    from pagerunner.ops.kernels.lora import lora_many

    monkeypatch.setattr(kernels, "SPREAD_TILES", 0)
    outputs = [140, 140] if gated else [140, 24, 40]
    blocks, _ = placed({0: 40, 1: 5, 2: 16}, outputs, 300)
    blocks.places[1, 2] = -1
    lens, own = [70, 20, 130, 1, 33, 9], torch.tensor([2, -1, 0, 1, 2, 3], dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    row_T = torch.tensor([row for row, count in enumerate(lens) for _ in range(count)] + [-1] * 7, dtype=torch.int32)
    work = lora.work_list.kernel(own, starts, len(row_T), 4)
    assert lora_many.serves(len(work.slots_W), blocks) and (work.slots_W < 0).any()
    layer, x, y = Fused.of(1, outputs), torch.randn(len(row_T), 300), 0.5 * torch.randn(len(row_T), sum(outputs))
    adapters, made = Adapters(own, row_T, 4, blocks, work), []
    for one in (None, "shrink", "expand_silu" if gated else "expand_"):
        if one is not None:
            monkeypatch.setattr(lora, one, getattr(lora, one).kernel)
        got = y.clone()
        if gated:
            got = adapters.gated(x, layer, got)
        else:
            adapters.add_(x, layer, got)
        made.append(got)
    torch.testing.assert_close(made[2], made[0], rtol=1e-4, atol=5e-2 if gated else 2e-3)
    assert torch.equal(made[2][70:90], made[0][70:90]) or gated
