"""Slots that an indexer chooses, and attention to them, at DeepSeek-V3.2's sizes: kernels against their twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import indexer_cases, sparse_cases
from pagerunner.batch import StepRows, WritePlaces
from pagerunner.ops.indexer import choose_slots
from pagerunner.ops.indexer_heads import MeanNorm, indexer_heads
from pagerunner.ops.kernels.latent import indexer, indexer_one, latent_wide
from pagerunner.ops.kernels.linear.linear_wide import has_gluon
from pagerunner.ops.latent_heads import LatentPrep
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles, rope_angles
from pagerunner.ops.sparse_latents import Latents, absorb_slots_, chosen_values, store_slots_

CHOICE = indexer_cases.Case((), top_k=2048, heads=64, size=128, slots=64)
LONG = ((2046, 1), (2047, 1), (2048, 1), (5000, 1), (127, 1), (20_000, 1), (8191, 1), (8192, 1))
CHOSEN = sparse_cases.Case((), top_k=2048, heads=16, latent=512, rope=64, value=128, slots=64)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}


def slots_in_fp8(memory: torch.Tensor) -> Latents:
    """Of 656 bytes each."""
    codes, scales, rope = memory.split((512, 16, 128), -1)
    return Latents(codes.view(torch.float8_e4m3fn), rope.view(torch.bfloat16), scales.view(torch.float32))


def check_choice(case: indexer_cases.Case) -> None:
    args, named = indexer_cases.made(case, "cuda")
    assert torch.equal(choose_slots(*args, **named), choose_slots.twin(*args, **named))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [8, 64])
def test_choice_of_rows_of_one_token(dtype: torch.dtype, heads: int) -> None:
    for most in (1, 3):
        check_choice(replace(CHOICE, rows=LONG, dtype=dtype, heads=heads, most=most, padding=3, longest=163_840))


@pytest.mark.parametrize("kind", indexer_cases.SCORES)
@pytest.mark.parametrize("top_k", [512, 2048])
def test_best_of_given_scores(kind: str, top_k: int) -> None:
    for longest in (1024, 4096, 8192, 20_000, 163_840):
        seen = [1, top_k, top_k + 1, longest // 2 + 1, longest - 1, longest, 3 * longest // 4, 8193]
        indexer_cases.check_best(kind, [min(one, longest) for one in seen], top_k, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("stride", [2, 3, 4, 6])
def test_choice_of_rows_with_drafts(dtype: torch.dtype, stride: int) -> None:
    rows = tuple((past, 1 + past % stride) for past in (2045, 2047, 3000, 0, 9001, 16_383))
    check_choice(replace(CHOICE, rows=rows, stride=stride, padding=2, dtype=dtype, longest=40_000))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("ratio", [1, 4])
def test_choice_of_prompts(dtype: torch.dtype, ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ((3000, 61), (0, 3), (2040, 20), (700, 1), (9000, 130))
    check_choice(replace(CHOICE, rows=rows, dtype=dtype, ratio=ratio, top_k=2048 // ratio))
    monkeypatch.setattr(indexer, "BLOCK_SCORES", 2**20)
    check_choice(replace(CHOICE, rows=rows, dtype=dtype, ratio=ratio, top_k=512))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [64, 20])
def test_scores_in_gluon_have_the_bits_of_tritons(dtype: torch.dtype, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Of real numbers, too. A step's later layers look pages up before their turn."""
    case = replace(CHOICE, rows=LONG, dtype=dtype, heads=heads, top_k=512, padding=3, slots=16)
    (q, weights, top_k, keys, table, rows, ratio, _), named = indexer_cases.made(case, "cuda")
    q, weights = torch.randn_like(q).bfloat16(), torch.rand_like(weights)
    held = torch.where(keys.float().isnan(), 1.0, torch.randn(keys.shape, device="cuda")).to(keys.dtype)
    scales = named["scales_ES"]
    given = q, weights, top_k, held, table, rows, ratio, None if scales is None else scales.nan_to_num(1.0)
    found = [indexer.run_scores(*given, early=early) for early in (0, 1, 2)]
    monkeypatch.setattr(indexer_one, "has_gluon", lambda device: False)
    want = indexer.run_scores(*given)
    for token, seen in enumerate((rows.positions_T + 1).tolist()):
        if rows.row_T[token] >= 0 and seen > top_k:
            assert all(torch.equal(one[token, :seen], want[token, :seen]) for one in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [LONG, ((3000, 1),) * 64, ((3000, 1),) * 3])
def test_scores_begin_beside_the_launch_that_stores_the_newest_keys(
    dtype: torch.dtype, rows: tuple[tuple[int, int], ...]
) -> None:
    """Which are zeros before it. Three rows have so many programs that each has one tile."""
    case = replace(CHOICE, rows=rows, dtype=dtype, top_k=512)
    (q, weights, top_k, keys, table, step, ratio, _), named = indexer_cases.made(case, "cuda")
    tokens, total, scales = step.num_tokens, keys.shape[0], named["scales_ES"]
    memory = torch.zeros(total, 64, 656 if scales is not None else 1152, dtype=torch.uint8, device="cuda")
    held = Latents(*memory.view(torch.bfloat16).split((512, 64), -1)) if scales is None else slots_in_fp8(memory)
    at = step.positions_T
    where = WritePlaces(table[step.slots_R[step.row_T.long()].long(), at // 64], at % 64)
    raw, vectors = (torch.randn(tokens, *size, device="cuda").bfloat16() for size in ((16, 192), (576,)))
    up = torch.randn(16, 128, 512, device="cuda").bfloat16()
    angles = RopeAngles(*(torch.rand(tokens, 1, 64, device="cuda").bfloat16() for _ in range(2)))
    prep = LatentPrep(Norm(torch.rand(512, device="cuda").bfloat16(), 1e-6), angles, True)
    for _ in range(5):
        keys.view(torch.uint8)[where] = 0
        own = torch.randint(-2, 3, (tokens, 128), device="cuda").bfloat16()
        given = q.bfloat16(), weights, top_k, keys, table, step, ratio
        absorb_slots_(raw, vectors, prep, up, own, held, keys, scales, where)
        found = choose_slots(*given, {}, scales, beside=True)
        assert torch.equal(found, choose_slots.twin(*given, {}, scales))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_prompts_scores_are_those_of_its_tokens_alone_to_the_bit(dtype: torch.dtype) -> None:
    """Of real numbers, whose sums depend on their order: near ties are chosen alike in decode and in prompts."""
    args, named = indexer_cases.made(replace(CHOICE, rows=((5000, 8),), dtype=dtype, top_k=512), "cuda")
    q, weights, top_k, keys, table, rows, ratio, _ = args
    q, weights = torch.randn_like(q), torch.rand_like(weights)
    held = torch.randn(keys.shape, device="cuda").to(keys.dtype)
    scales = named["scales_ES"]
    scales = None if scales is None else torch.ones_like(scales)
    alone = StepRows.of([1] * 8, range(5001, 5009), [int(rows.slots_R[0])] * 8, "cuda")
    both = [indexer.run_scores(q, weights, top_k, held, table, step, ratio, scales) for step in (rows, alone)]
    for token in range(8):
        seen = slice(5001 + token)
        assert torch.equal(both[0][token, seen], both[1][token, seen])
    chosen = [choose_slots(q, weights, top_k, held, table, step, ratio, {}, scales) for step in (rows, alone)]
    assert torch.equal(*chosen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mixed", [False, True])
def test_queries_keys_and_weights(dtype: torch.dtype, mixed: bool) -> None:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    for tokens in (1, 70):
        q, keys, weights = made(tokens, 64, 128), made(tokens, 128) + 2, made(tokens, 64)
        norm = MeanNorm(made(128), made(128), 1e-6)
        angles = rope_angles(torch.arange(tokens, device="cuda") * 900, torch.rand(32, device="cuda"), 1.0, dtype)
        found = indexer_heads(q, keys, weights, norm, angles, 0.01, mixed)
        want = indexer_heads.twin(q, keys, weights, norm, angles, 0.01, mixed)
        tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-4
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def check_attention(case: sparse_cases.Case) -> None:
    given = sparse_cases.made(case, "cuda")
    wide = case.dtype == torch.bfloat16 or (case.dtype == torch.float16 and not case.groups)
    assert latent_wide.serves(*given[:3]) == (wide and has_gluon(given[0].device))
    want = chosen_values.twin(*given)
    tolerance = TOLERANCE[case.dtype]
    largest = 2 ** max(case.groups - 1, 0)  # blocks of latents are so many times as large as the first
    for _ in range(2):
        found = chosen_values(*given)
        torch.testing.assert_close(found, want, atol=tolerance * largest, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        *((torch.bfloat16, heads) for heads in (5, 16, 32, 128)),
        (torch.float16, 16),
        (torch.float32, 16),
        (torch.float32, 128),
    ],
)
@pytest.mark.parametrize("groups", [0, 4])
def test_attention(dtype: torch.dtype, heads: int, groups: int) -> None:
    case = replace(CHOSEN, heads=heads, groups=groups, dtype=dtype)
    check_attention(replace(case, rows=LONG[:6], padding=3, longest=20_001))
    check_attention(replace(case, rows=((2047, 1),)))
    check_attention(replace(case, rows=tuple((3000 + i, 1) for i in range(40))))


@pytest.mark.parametrize("groups", [0, 4])
def test_attention_of_several_tokens(groups: int) -> None:
    case = replace(CHOSEN, groups=groups, dtype=torch.bfloat16)
    check_attention(replace(case, rows=((2045, 3), (100, 1), (2500, 4)), stride=4, padding=1))
    check_attention(replace(case, rows=((2000, 90), (0, 3), (2500, 40))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    """The words of PTX that make bfloat16 of e4m3 know no NaN, so the scale says it. Two rows see all of their tokens."""
    given = sparse_cases.made(replace(CHOSEN, rows=((63, 1), (40, 1)), groups=4, dtype=dtype), "cuda")
    held, table, rows = given[2:5]
    vectors = torch.randn(1, 576, device="cuda").to(dtype)
    vectors[0, 200] = float("nan")
    keys = torch.zeros(*held.latent_ESC.shape[:2], 128, device="cuda").to(torch.float8_e4m3fn)
    where = WritePlaces(table[rows.slots_R[:1].long(), 0], torch.tensor([63], device="cuda"))
    store_slots_(vectors, vectors[:, :128].contiguous(), held, keys, torch.zeros(keys.shape[:2], device="cuda"), where)
    found = chosen_values(*given)
    assert found[0].isnan().all() and found[1].isfinite().all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 100])
def test_a_launch_stores_slots_and_carries_queries(tokens: int, fp8: bool) -> None:
    """As several launches do. One token has no page."""
    torch.manual_seed(tokens)
    dtype, slots, size = torch.bfloat16, 16, 656 if fp8 else 1152
    memory = torch.zeros(8, slots, size, dtype=torch.uint8, device="cuda")
    if fp8:
        held = slots_in_fp8(memory)
        keys = torch.zeros(8, slots, 128, device="cuda").to(torch.float8_e4m3fn)
        key_scales = torch.zeros(8, slots, device="cuda")
    else:
        held = Latents(*memory.view(dtype).split((512, 64), -1))
        keys, key_scales = torch.zeros(8, slots, 128, dtype=dtype, device="cuda"), None
    places = torch.randperm(8 * slots, device="cuda")[:tokens]
    where = WritePlaces(
        torch.where(places == places[0], -1 if tokens > 1 else places // slots, places // slots), places % slots
    )
    q, vectors, own = (torch.randn(tokens, *size, device="cuda").to(dtype) for size in ((16, 192), (576,), (128,)))
    up = (torch.randn(16, 128, 512, device="cuda") / 12).to(dtype)
    angles = RopeAngles(*(torch.rand(tokens, 1, 64, device="cuda", dtype=dtype) for _ in range(2)))
    prep = LatentPrep(Norm(torch.rand(512, device="cuda", dtype=dtype), 1e-6), angles, True)
    found = []
    for op in (absorb_slots_.twin, absorb_slots_):
        for room in (memory, keys.view(torch.uint8)):
            room.zero_()
        queries = q.clone()
        carried = op(queries, vectors.clone(), prep, up, own, held, keys, key_scales, where)
        entries, offsets = places // slots, places % slots
        read = (*held.read(entries, offsets), keys.view(torch.uint8)[entries, offsets].view(keys.dtype).float())
        found.append([carried.float(), queries[..., 128:].float(), *(x.clone() for x in read)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 0.01 * one.norm()
