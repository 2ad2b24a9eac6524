"""Products whose weights go straight into registers, on the device, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagerunner.ops.kernels.linear.linear_held import config_of, run_held
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_wide import has_gluon
from pagerunner.ops.linear import Norm

pytestmark = pytest.mark.skipif(
    not has_gluon(torch.device("cuda", 0)), reason="another device or version of Triton than was measured"
)
CASES = [(4096, 1024), (1000, 1000), (24, 5120), (776, 4104), (6144, 4096)]


@pytest.mark.parametrize(("outputs", "inputs"), CASES)
@pytest.mark.parametrize("tokens", [2, 5, 8])
@pytest.mark.parametrize("kind", ["norm", "offset", "gate", "norm and gate", "add"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products(outputs: int, inputs: int, tokens: int, kind: str, dtype: torch.dtype) -> None:
    """With a bias; nothing beside the outputs is written, and results are the same in every run."""
    made = {"device": "cuda", "dtype": dtype}
    x, weight = torch.randn(tokens, inputs, **made), torch.randn(outputs, inputs, **made) * inputs**-0.5
    bias, gated, add = torch.randn(outputs, **made), "gate" in kind, kind == "add"
    norm = Norm(torch.rand(inputs, **made), 1e-6, kind == "offset") if "norm" in kind or kind == "offset" else None
    features = outputs // 2 if gated else outputs
    old = torch.randn(tokens, features + 64, **made)
    wide = x.double()
    if norm is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (norm.weight_I.double() + norm.offset)
    want = wide @ weight.double().T + bias.double()
    want = F.silu(want[:, :features]) * want[:, features:] if gated else want
    want = want + old[:, :features].double() if add else want
    for blocks in (None, (4, 8, 128), (8, 16, 128)):
        config = None if blocks is None else config_of(inputs, gated, *blocks)
        runs = [old.clone() for _ in range(2)]
        for out in runs:
            run_held(Product(x, weight, bias, out[:, :features], norm, gated, add), config)
        error = (runs[0][:, :features].double() - want).norm() / want.norm()
        assert error < (8e-3 if dtype == torch.bfloat16 else 1.5e-3)
        assert torch.equal(runs[0][:, features:], old[:, features:]) and torch.equal(runs[0], runs[1])
