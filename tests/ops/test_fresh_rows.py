"""Rows without a past, of equal and of other lengths, against each row on its own."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.fresh_rows import attend_fresh_rows
from pagerunner.ops.latent_prefill import _expand


@pytest.mark.parametrize("lengths", [(7,), (5, 5), (5, 5, 3), (3, 5, 5, 5, 1)])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [(4, 4, 12, 8), (6, 2, 8, 8)])
def test_rows_attend_to_themselves(
    lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, value_size: int
) -> None:
    torch.manual_seed(0)
    tokens = sum(lengths)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :, :value_size]
    got = attend_fresh_rows(q, k, v, lengths, 0.3)
    first = 0
    for length in lengths:
        row = slice(first, first + length)
        keys, values = (x[row].repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q[row], keys) * 0.3
        scores.masked_fill_(torch.ones(length, length).triu(1).bool(), float("-inf"))
        torch.testing.assert_close(got[row], torch.einsum("hts,shv->thv", scores.softmax(-1), values))
        first += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rope", "offset"), [(4, 0), (6, 0), (4, 2)])
def test_rotary_parts_are_copied_beside_all_heads_keys(dtype: torch.dtype, rope: int, offset: int) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(5, 20 + offset)[:, offset : offset + 8 + rope].to(dtype)
    keys, values = torch.randn(3, 8, 8).to(dtype), torch.randn(3, 4, 8).to(dtype)
    k, v = _expand(vectors, keys, values)
    assert torch.equal(k[..., 8:], vectors[:, None, 8:].expand(-1, 3, -1))
    torch.testing.assert_close(k[..., :8], torch.einsum("tc,hnc->thn", vectors[:, :8], keys))
    torch.testing.assert_close(v, torch.einsum("tc,hvc->thv", vectors[:, :8], values))
