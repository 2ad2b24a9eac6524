"""The torch backend against attention written out row by row, with NaN in every slot that nobody wrote."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from helpers.attention_cases import Case, cases, plain, run
from helpers.effort import effort
from pagerunner.attention.base import Reach
from pagerunner.attention.torch_plan import BandPart, NewPart, PaddedPart, SharedPart, make_plan
from pagerunner.attention.torch_ref import TorchBackend, attend
from pagerunner.memory.specs import ChunkedKV, FullKV, LatentKV, RecurrentState, WindowKV


@settings(max_examples=effort(66, 400), deadline=None)
@given(cases)
def test_equals_attention_row_by_row(case: Case) -> None:
    got, want = run(case, TorchBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@settings(max_examples=effort(50, 300), deadline=None)
@given(cases.filter(lambda case: case.reach is not None))
def test_windows_and_chunks_equal_attention_row_by_row(case: Case) -> None:
    got, want = run(case, TorchBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("reach", [Reach(20), Reach(300), Reach(100, chunked=True)])
def test_a_long_row_in_a_window_reads_a_band(reach: Reach) -> None:
    got, want = run(
        Case((plain(90, 600), plain(0, 700), plain(0, 20), plain(99, 1)), 16, 2, 2, 8, reach=reach), TorchBackend()
    )
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    parts = make_plan([600], [690], torch.arange(44)[None], 16, reach, [0])
    assert max(p.allowed_QL.shape[1] for p in parts if isinstance(p, BandPart)) < 256 + reach.size


@pytest.mark.parametrize("count", [1, 2, 33])
def test_decodes_of_many_lengths(count: int) -> None:
    lengths = [(i * 37) % 300 for i in range(count)]
    got, want = run(Case(tuple(plain(n, 1) for n in lengths), 16, 2, 3, 16), TorchBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_rows_read_pages_that_another_row_of_the_step_writes() -> None:
    case = Case((plain(0, 530), *[plain(512, 16, 32)] * 5, plain(512, 3, 32), plain(523, 1, 32)), 16, 2, 2, 16)
    got, want = run(case, TorchBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_stays_close(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    rows = (plain(0, 40), plain(600, 1), plain(600, 2, 37), plain(600, 1, 37), plain(100, 50))
    got, want = run(Case(rows, 16, 2, 2, 32, dtype=dtype, kv_dtype=kv_dtype), TorchBackend())
    torch.testing.assert_close(got, want, atol=0.03, rtol=0.03)


def test_a_prefix_shared_by_decodes_is_read_once() -> None:
    table = torch.tensor([[3, 4, 5, 6 + i] for i in range(8)])
    shared, own = 3 * 256, [40 + i for i in range(8)]
    parts = make_plan([1] * 8, [shared + n for n in own], table, 256)
    kinds = [type(part) for part in parts]
    assert kinds == [PaddedPart, SharedPart]
    assert isinstance(parts[0], PaddedPart) and isinstance(parts[1], SharedPart)
    assert parts[0].slots.entries_N.numel() == 8 * max(own)
    assert parts[1].slots.entries_N.numel() == shared


def test_new_rows_of_one_length_are_one_call_and_touch_no_pages() -> None:
    table = torch.arange(6).view(3, 2)
    parts = make_plan([20, 20, 7], [20, 20, 7], table, 16)
    assert [(p.rows, p.queries, p.more) for p in parts if isinstance(p, NewPart)] == [(2, 20, False), (1, 7, False)]
    assert len(parts) == 2


def test_padding_reads_only_slots_of_the_same_row() -> None:
    table = torch.tensor([[5, 9], [2, 0]])
    (part,) = make_plan([1, 1], [30, 12], table, 16)
    assert isinstance(part, PaddedPart)
    slots = list(zip(part.slots.entries_N.tolist(), part.slots.offsets_N.tolist(), strict=True))
    assert set(slots[30:]) == {(2, i) for i in range(12)}


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_form_agrees_with_the_flash_kernel(causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 10, 8) for _ in range(3))
    mask = None if causal else torch.zeros(2, 1, 10, 10).masked_fill_(torch.rand(2, 1, 10, 10) > 0.7, float("-inf"))
    got_out, got_lse = attend(q, k, v, 0.3, mask=mask, causal=causal)
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), float("-inf"))
    scores = scores if mask is None else scores + mask
    torch.testing.assert_close(got_out, scores.softmax(-1) @ v)
    torch.testing.assert_close(got_lse, scores.logsumexp(-1))


def test_says_what_it_does_not_serve() -> None:
    backend = TorchBackend()
    for spec in (
        FullKV(2, 16, "float32", 8),
        WindowKV(2, 16, "float32", window=9),
        ChunkedKV(2, 16, "float32", chunk=9),
        LatentKV(2, 16, "fp8_e4m3", window=9),
    ):
        assert backend.capabilities.refusal(spec, "cpu", torch.float32) is None
    for other in (LatentKV(2, 16, "float32"), RecurrentState(((2,),), ("float32",))):
        reason = backend.capabilities.refusal(other, "cpu", torch.float32)
        assert reason is not None and type(other).__name__ in reason


def test_one_call_gathers_a_bounded_number_of_slots() -> None:
    table = torch.arange(64 * 64).view(64, 64)
    parts = make_plan([1] * 64, [1024] * 64, table, 16)
    sizes = [part.slots.entries_N.numel() for part in parts if isinstance(part, PaddedPart)]
    assert sum(sizes) == 64 * 1024 and max(sizes) <= 32768


@torch.inference_mode()
def test_scratch_from_inference_mode_serves_outside_it() -> None:
    rows = (plain(40, 1), plain(70, 1))
    run(Case(rows, 16, 2, 2, 16), TorchBackend())
    backend = TorchBackend()
    like = torch.zeros(1)
    first = backend._scratch.take(0, 10, 4, like)
    assert not first.is_inference()
    assert backend._scratch.take(0, 5, 4, like).data_ptr() == first.data_ptr()
    assert backend._scratch.take(1, 5, 4, like).data_ptr() != first.data_ptr()
