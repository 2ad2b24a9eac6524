"""Parts of grouped rows, and a gate of one number a row, against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.activation import add_sigmoid_gated_
from pagerunner.ops.side_by_side import by_parts

pytest.importorskip("triton.runtime.interpreter")


@pytest.mark.parametrize(("groups", "key", "values", "rates"), [(4, 8, 16, 2), (3, 5, 7, 1), (16, 128, 256, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rows_are_ordered_by_parts(groups, key, values, rates, tokens):
    """Every number has its place, from rows that lie apart, too."""
    columns, own = groups * 2 * (key + values), groups * 2 * rates
    qkvz = torch.arange(tokens * (columns + 3), dtype=torch.float32).view(tokens, columns + 3)[:, :columns]
    ba = -1 - torch.arange(tokens * (own + 1), dtype=torch.float32).view(tokens, own + 1)[:, :own]
    want = by_parts.twin(qkvz, ba, groups, key)
    assert want.shape == (tokens, columns + own)
    assert torch.equal(by_parts.kernel(qkvz, ba, groups, key), want)
    if tokens:  # the second group's first key, and its last decay
        assert want[0, groups * key + key] == qkvz[0, 2 * (key + values) + key]
        assert want[0, columns + groups * rates + 2 * rates - 1] == ba[0, 4 * rates - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [40, 1500])
def test_a_gate_of_one_number_a_row(features, dtype):
    torch.manual_seed(features)
    x, gate, residual = (
        torch.randn(3, features + 5)[:, :features],
        torch.randn(3, 2)[:, :1] * 3,
        torch.randn(3, features),
    )
    x, gate, residual = x.to(dtype), gate.to(dtype), residual.to(dtype)
    want = residual.clone()
    add_sigmoid_gated_.twin(x.clone(), gate, want)
    add_sigmoid_gated_.kernel(x, gate, residual)
    torch.testing.assert_close(
        residual, want, atol=1e-6 if dtype == torch.float32 else 0.03, rtol=1e-6 if dtype == torch.float32 else 0.01
    )
    add_sigmoid_gated_.kernel(x[:0], gate[:0], residual[:0])
