"""What adapters add beside a product, as far as it can be tested without a card. Gluon is run as Python; `tests/gpu` runs the kernels."""

from __future__ import annotations

import pytest
import torch

from helpers import gluon_programs
from pagerunner.ops import lora as ops
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels import linear_dense, lora_beside
from pagerunner.ops.lora import Adapters, Blocks, Fused


@pytest.fixture
def launched(monkeypatch):
    """The kernels' launches, run as Python."""
    pytest.importorskip("triton.experimental.gluon")
    from pagerunner.ops.kernels import lora_gluon

    def gated(gate, up, dtype):
        return torch.nn.functional.silu(gate.to(dtype).float()).to(dtype).float() * up.to(dtype).float()

    class Kernels:
        def __getattr__(self, name):
            known = {
                "mma_v2": gluon_programs.multiply,
                "silu_gate": gated,
                "_ranks_layout": int,
                "_outputs_layout": int,
            }
            return gluon_programs.Launched(lora_gluon, name, **known)

    monkeypatch.setattr(lora_beside, "_gluon", Kernels)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(5, 1152, [144, 144]), (40, 1024, [136, 136])])
def test_products_beside_which_a_x_is_computed(launched, tokens, inputs, outputs, rows, monkeypatch):
    """The layer's own product comes in sums of its parts. Ranks 16 and 40 mixed with rows that have no adapter, whose bits stay; an adapter without one of the products; tiles of
    more than 8 tokens and of fewer, small ones and large ones; inputs and outputs that fill no piece.
    """
    torch.manual_seed(tokens)
    monkeypatch.setattr(lora_beside, "FEW_TILES", 0 if tokens > 16 else 16)
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
        if gated:
            return adapters.gates(layer, x, weight, bias)
        return adapters.product(layer, x, weight, bias, old.clone(), add=True)

    want = [made(False), made(True)]
    config = linear_dense.config_of(tokens, 1, 5)  # the product's sums have up to five parts

    def run_dense(product, beside):
        beside(linear_dense.sums_twin(x, weight, config), config)
        return product.out_TO

    monkeypatch.setattr(linear_dense, "run_dense", run_dense)
    monkeypatch.setattr(ops, "adapted_product_", lora_beside.adapted_product_)
    monkeypatch.setattr(ops, "adapted_gates", lora_beside.adapted_gates)
    parts_POT = linear_dense.sums_twin(x, weight, config).nan_to_num(0)
    base = (sum(parts_POT[:, :features, :tokens]).T + bias.float()).bfloat16()
    for got, right, alone in zip([made(False), made(True)], want, (old + base, silu_and_mul(base)), strict=True):
        torch.testing.assert_close(got, right, atol=3e-2, rtol=2e-2)
        assert torch.equal(got[own < 0], alone[own < 0]) and not torch.equal(got, alone)


@pytest.mark.parametrize(("tokens", "outputs"), [(5, [136]), (40, [200]), (23, [136, 64])])
def test_products_whose_sums_are_added_with_what_adapters_add(launched, tokens, outputs, monkeypatch):
    """One product's outputs are added to a residual, and several products' stay in parts, the first of which has it all. As above, and a slot without an adapter among others."""
    torch.manual_seed(tokens)
    monkeypatch.setattr(lora_beside, "FEW_TILES", 0 if tokens > 16 else 16)
    inputs, slots, most, features = 1024, 4, 2, sum(outputs)
    size = 16 * (inputs + max(outputs))
    pool = (torch.randn(slots * len(outputs) * most * size) * 0.05).bfloat16()
    at = torch.arange(slots * len(outputs) * most).view(slots, len(outputs), most) * size
    places = torch.stack([at, at + 16 * inputs], 3)
    places[0, :, 1], places[3, 0], places[2] = -1, -1, -1
    own = torch.tensor([-1, 0, 1, 3])[torch.randint(0, 4, (tokens,))].int()
    own[: tokens // 2] = 1
    start = torch.arange(tokens + 1, dtype=torch.int32)
    x, weight = torch.randn(tokens, inputs).bfloat16(), (0.05 * torch.randn(features, inputs)).bfloat16()
    work, old = ops.work_list.twin(own, start, tokens, slots), torch.randn(tokens, features).bfloat16()
    adapters, layer = Adapters(own, None, slots, Blocks(pool, places), work), Fused.of(0, outputs)
    config = linear_dense.config_of(tokens, 1, 4)
    sums_PTO = linear_dense.sums_twin(x, weight, config)[:, :features].transpose(1, 2).contiguous()
    base = sums_PTO.sum(0)[:tokens].bfloat16()

    def made() -> torch.Tensor:
        adapters.known = True
        if len(outputs) == 1:
            return adapters.product(layer, x, weight, None, old.clone(), add=True) - old
        got = adapters.in_parts(layer, x, weight)
        return got if got.dim() == 2 else got.sum(0)[:tokens].bfloat16()

    def run_adapted(x, weight, work, blocks, layer, *, own=False):
        return sums_PTO, ops.shrink.twin(x, work, blocks, layer)

    monkeypatch.setattr(lora_beside, "run_adapted", run_adapted)
    want = made()
    monkeypatch.setattr(ops, "adapted_product_", lora_beside.adapted_product_)
    monkeypatch.setattr(ops, "adapted_parts", lora_beside.adapted_parts)
    got = made()
    torch.testing.assert_close(got, want, atol=5e-2, rtol=2e-2)
    alone = (old + base) - old if len(outputs) == 1 else base
    assert torch.equal(got[own < 0], alone[own < 0]) and not torch.equal(got, alone)
