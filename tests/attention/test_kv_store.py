"""Keys and values in the pages' dtype: what `store` returns is what the pages hold, now and after their scales grow."""

from __future__ import annotations

import pytest
import torch

from pagerunner.attention.kv_store import store
from pagerunner.attention.torch_ref import TorchPlan
from pagerunner.batch import GroupBatch, KVPages, WritePlaces

SIZE, HEADS, DIM, PAGES = 4, 2, 6, 5


def make_layer(dtype: torch.dtype) -> KVPages:
    """Pages of zeros: keys, then values, then the heads' scales of both."""
    block = SIZE * HEADS * DIM
    stride = 2 * block + 8 * HEADS
    memory = torch.zeros(PAGES * stride, dtype=torch.uint8)
    views = [
        memory.view(dtype).as_strided((PAGES, SIZE, HEADS, DIM), (stride, HEADS * DIM, DIM, 1), i * block)
        for i in range(2)
    ]
    scales = memory.view(torch.float32).as_strided((PAGES, 2, HEADS), (stride // 4, HEADS, 1), 2 * block // 4)
    return KVPages(0, views[0], views[1], scales)


def put(layer: KVPages, which: int, slots: list[int], values: torch.Tensor) -> torch.Tensor:
    """Store values in token slots (-1: none), counted over all pages."""
    where = torch.tensor(slots)
    entries = torch.where(where < 0, -1, where // SIZE)
    group = GroupBatch(torch.zeros(1, 1), WritePlaces(entries, where % SIZE), SIZE, None, None)
    return store(layer, which, values, group, TorchPlan((), unstored=True))


def held(layer: KVPages, which: int) -> torch.Tensor:
    """What all slots stand for, [slots, heads, dim]."""
    assert layer.scales is not None
    pages = (layer.k, layer.v)[which].float() * layer.scales[:, which].view(-1, 1, HEADS, 1)
    return pages.flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("which", [0, 1])
def test_a_page_holds_its_tokens_however_they_came(dtype: torch.dtype, which: int) -> None:
    values = torch.randn(10, HEADS, DIM) * torch.logspace(-1, 1, 10).view(-1, 1, 1)
    values[values.abs() < 0.01] = 0.5  # within fp8's normal numbers at every scale
    slots = [8, 9, 10, 11, 0, 1, 2, 3, 17, 18]
    whole, single = make_layer(dtype), make_layer(dtype)
    together = put(whole, which, slots, values)
    alone = torch.cat([put(single, which, [slot], value[None]) for slot, value in zip(slots, values, strict=True)])
    torch.testing.assert_close(together, values, atol=0, rtol=0.125)
    assert torch.equal(alone, together)
    assert torch.equal(held(whole, which)[slots], together)
    assert torch.equal(held(single, which)[slots], together)
    assert not held(whole, 1 - which).any()


def test_tokens_without_a_page_are_rounded_and_not_stored() -> None:
    values = torch.randn(3, HEADS, DIM)
    layer = make_layer(torch.float8_e4m3fn)
    returned = put(layer, 0, [-1, 5, -1], values)
    torch.testing.assert_close(returned, values, atol=0.02, rtol=0.0625)
    assert not torch.equal(returned[0], values[0])
    assert torch.equal(held(layer, 0)[5], returned[1])
    assert held(layer, 0).count_nonzero() == held(layer, 0)[5].count_nonzero()


def test_zeros_need_no_scale() -> None:
    layer = make_layer(torch.float8_e4m3fn)
    assert not put(layer, 0, [0], torch.zeros(1, HEADS, DIM)).any()
    small = torch.full((1, HEADS, DIM), 2.0**-20)
    assert torch.equal(put(layer, 0, [1], small), small)
    assert not held(layer, 0)[0].any() and torch.equal(held(layer, 0)[1], small[0])


def test_other_dtypes_round_without_scales() -> None:
    pages = torch.full((PAGES, SIZE, HEADS, DIM), float("nan"), dtype=torch.bfloat16)
    layer = KVPages(0, pages, pages.clone())
    values = torch.randn(2, HEADS, DIM)
    returned = put(layer, 1, [3, 4], values)
    assert torch.equal(returned, values.bfloat16().float())
    assert torch.equal(layer.v.flatten(0, 1)[[3, 4]].float(), returned)
