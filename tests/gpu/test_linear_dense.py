"""Products whose weights come early, on the device, against float32."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.linear.linear_dense import config_of, dense_config, run_dense, run_parts, whole_gates
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_wide import has_gluon

pytestmark = pytest.mark.skipif(
    not has_gluon(torch.device("cuda", 0)), reason="another device or version of Triton than was measured"
)
CASES = [(3072, 4096), (4096, 1024), (1000, 200), (96, 72), (12_288, 4096)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The difference's norm as a share; NaN stays NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize(("outputs", "inputs"), CASES)
@pytest.mark.parametrize("tokens", [1, 8, 17, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products(outputs: int, inputs: int, tokens: int, dtype: torch.dtype) -> None:
    """With a bias, gated, and added; the same in every run."""
    made = {"device": "cuda", "dtype": dtype}
    x, weight, bias = (
        torch.randn(tokens, inputs, **made),
        torch.randn(outputs, inputs, **made),
        torch.randn(outputs, **made),
    )
    weight *= inputs**-0.5
    want = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    wider = torch.randn(tokens, outputs + 64, **made)
    old = wider.clone()
    run_dense(Product(x, weight, bias, wider[:, :outputs], add=True))
    assert error(wider[:, :outputs], want + old[:, :outputs].float()) < 4e-3
    assert torch.equal(wider[:, outputs:], old[:, outputs:]), "nothing beside the outputs is written"
    results = [
        run_dense(Product(x, weight, bias, torch.full((tokens, outputs // 2), torch.nan, **made), gated=True))
        for _ in range(3)
    ]
    assert error(results[0], silu_and_mul(want)) < 8e-3
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 5, 32, 64, 67])
@pytest.mark.parametrize("tokens", [8, 64, 100])
def test_divisions(groups: int, steps: int, tokens: int) -> None:
    """Parts of tiles, and several tiles of a program; what a graph replays is the same."""
    made = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight, out = torch.randn(tokens, 2048, **made), torch.randn(776, 2048, **made), torch.empty(tokens, 776, **made)
    config = config_of(tokens, groups, steps)
    run_dense(Product(x, weight, None, out), config)
    first = out.clone()
    assert error(first, x.float() @ weight.float().T) < 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run_dense(Product(x, weight, None, out.fill_(torch.nan)), config)
    graph.replay()
    assert torch.equal(out, first)


@pytest.mark.parametrize("tokens", [2, 17, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 3072), (2048, 6144)])
def test_parts_add_up_to_the_product(outputs: int, inputs: int, tokens: int) -> None:
    """To its bits, as they are the same parts, token by token."""
    made = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(tokens, inputs, **made), torch.randn(outputs, inputs, **made)
    sums = run_parts(x, weight)
    assert sums is not None and sums.shape[0] > 1 and sums.shape[2] == outputs
    total = sums[0, :tokens].clone()
    for part in sums[1:]:
        total += part[:tokens]
    assert torch.equal(total.bfloat16(), run_dense(Product(x, weight, None, torch.empty(tokens, outputs, **made))))


@pytest.mark.parametrize("tokens", [33, 64])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (12_288, 4096), (24_576, 4096), (8448, 1000), (4288, 512)]
)
def test_whole_gates_are_the_product_and_then_the_gate(outputs: int, inputs: int, tokens: int) -> None:
    made = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(tokens, inputs, **made), torch.randn(outputs, inputs, **made) * inputs**-0.5
    assert whole_gates(tokens, outputs, inputs, 132) is not None
    out = run_dense(Product(x, weight, None, torch.full((tokens, outputs // 2), torch.nan, **made), gated=True))
    assert error(out, silu_and_mul(x @ weight.T).float()) < 8e-3


def test_a_choice_is_made_for_all_tokens_of_a_tile() -> None:
    assert dense_config(33, 3072, 4096, 132) == dense_config(64, 3072, 4096, 132)
