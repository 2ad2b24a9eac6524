"""What adapters add beside a product, as far as it can be tested without a card. Gluon is run as Python; `tests/gpu` runs the kernels."""

from __future__ import annotations

import pytest
import torch

from helpers import gluon_programs
from pagerunner.ops import lora as ops
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.linear import linear_dense
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.lora import lora
from pagerunner.ops.lora import Adapters, Blocks, Fused


@pytest.fixture
def launched(monkeypatch):
    """The kernels' launches, run as Python."""
    pytest.importorskip("triton.experimental.gluon")
    from pagerunner.ops.kernels.lora import lora_gluon

    class Kernels:
        def __getattr__(self, name):
            known = {"mma_v2": gluon_programs.multiply, "_ranks_layout": int, "_outputs_layout": int}
            return gluon_programs.Launched(lora_gluon, name, **known)

    monkeypatch.setattr(lora, "_gluon", Kernels)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(5, 1152, [144, 144]), (40, 1024, [136, 136])])
def test_products_beside_which_a_x_is_computed(launched, tokens, inputs, outputs, rows, monkeypatch):
    """The layer's own product comes in sums of its parts. Ranks 16 and 40 mixed with rows that have no adapter, whose bits stay; an adapter without one of the products; tiles of
    more than 8 tokens and of fewer, small ones and large ones; inputs and outputs that fill no piece.
    """
    torch.manual_seed(tokens)
    monkeypatch.setattr(lora, "FEW_TILES", 0 if tokens > 16 else 16)
    slots, most, features = 4, 3, sum(outputs)
    size = 16 * (inputs + max(outputs))
    pool = (torch.randn(slots * len(outputs) * most * size) * 0.05).bfloat16()
    places = torch.full((slots, len(outputs), most, 2), -1, dtype=torch.int64)
    for slot, blocks in ((0, 1), (1, 3), (3, 1)):
        for part in range(1 if slot == 3 else 2):
            for block in range(blocks):
                at = ((slot * len(outputs) + part) * most + block) * size
                places[slot, part, block] = torch.tensor([at, at + 16 * inputs])
    own = torch.tensor([-1, 0, 1, 3])[torch.randint(0, 4, (tokens,))].int()
    own[: tokens // 2] = 1
    start = torch.arange(tokens + 1, dtype=torch.int32)
    x, weight, bias = torch.randn(tokens, inputs), 0.05 * torch.randn(features, inputs), torch.randn(features)
    x, weight, bias, old = x.bfloat16(), weight.bfloat16(), bias.bfloat16(), torch.randn(tokens, features).bfloat16()
    work, blocks = ops.work_list.twin(own, start, tokens, slots), Blocks(pool, places)
    adapters, layer = Adapters(own, start[:-1] if rows else None, slots, blocks, work), Fused.of(0, outputs)

    def made(gated: bool) -> torch.Tensor:
        return adapters.product(layer, x, weight, bias, old.clone(), gated=gated, add=not gated)

    want = [made(False), made(True)]
    config = linear_dense.config_of(tokens, 1, 5)  # the product's sums have up to five parts

    def beside(out, x, weight, bias, work, blocks, layer, *, add=False):
        product = Product(x, weight, bias, out, add=add)
        return lora.shrink_beside(product, work, blocks, layer, linear_dense.sums_twin(x, weight, config), config)

    monkeypatch.setattr(ops, "with_shrink_", beside)
    monkeypatch.setattr(ops, "expand_", lora.expand_)
    parts_POT = linear_dense.sums_twin(x, weight, config).nan_to_num(0)
    base = (sum(parts_POT[:, :features, :tokens]).T + bias.float()).bfloat16()
    for got, right, alone in zip([made(False), made(True)], want, (old + base, silu_and_mul(base)), strict=True):
        torch.testing.assert_close(got, right, atol=3e-2, rtol=2e-2)
        assert torch.equal(got[own < 0], alone[own < 0]) and not torch.equal(got, alone)
