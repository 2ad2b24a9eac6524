"""A product's sums and `A x` in one launch, as far as it can be tested without a card: Gluon is run as Python, with a thread for each group of warps of each program."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.gluon_groups import Described, Groups
from pagerunner.ops import lora as ops
from pagerunner.ops.kernels import linear_dense, lora_dense
from pagerunner.ops.kernels.linear_dense import DenseConfig
from pagerunner.ops.kernels.lora_dense import Ranks
from pagerunner.ops.lora import Blocks, Fused


@pytest.fixture
def launched(monkeypatch):
    """The kernel's launches, run as Python."""
    pytest.importorskip("triton.experimental.gluon")
    from pagerunner.ops.kernels import lora_dense_gluon as kernel

    class Descriptor(Described):
        def __init__(self, tensor, shape, strides, block, layout):
            super().__init__(tensor, shape, strides, block)

        @classmethod
        def from_tensor(cls, tensor, block, layout):
            return cls(tensor, list(tensor.shape), list(tensor.stride()), block, layout)

    def stored(acc, place, num_tokens, by_token):
        rows, tokens = torch.arange(64), torch.arange(acc.shape[1])
        (place + (rows[:, None] + tokens * by_token)).store(acc, tokens < num_tokens)

    kernels = Groups(kernel, "adapted_kernel", _store_sums=stored)
    found = SimpleNamespace(TensorDescriptor=Descriptor, OPERANDS=None, gl=kernel.gl, adapted_kernel=kernels)
    monkeypatch.setattr(lora_dense, "_gluon", lambda: found)


@pytest.mark.parametrize(
    ("tokens", "groups", "steps", "outputs", "blocks", "stages"),
    [(33, 1, 3, [64, 256], 1, (3, 2)), (64, 2, 9, [512], 2, (4, 4)), (40, 3, 4, [384, 384], 1, (2, 2))],
)
def test_sums_and_a_x_in_one_launch(launched, monkeypatch, tokens, groups, steps, outputs, blocks, stages):
    """Blocks at the pool's end, adapters of few ranks and without one of the products; more tiles of weights than blocks in use; more and fewer steps than have room; inputs that fill no step."""
    torch.manual_seed(tokens)
    slots, features, inputs = 4, sum(outputs), 2 * steps * 64 - 8
    size = 16 * (inputs + max(outputs))
    places = torch.full((slots, len(outputs) + 1, blocks, 2), -1, dtype=torch.int64)
    at = 16 * 3
    for slot, count in ((0, 1), (1, blocks), (3, blocks)):
        for part in range(1 if slot == 3 and len(outputs) > 1 else 0, len(outputs)):
            for block in range(count):
                places[slot, 1 + part, block] = torch.tensor([at + 16 * max(outputs), at])
                at += size
    pool = (torch.randn(at) * 0.05).bfloat16()
    own = torch.tensor([-1, 0, 1, 3])[torch.randint(0, 4, (tokens,))].int()
    own[: -(-tokens // 2)], own[-1] = 1, -1
    start = torch.arange(tokens + 1, dtype=torch.int32)
    x, weight = torch.randn(tokens, inputs).bfloat16(), (0.05 * torch.randn(features, inputs)).bfloat16()
    config = DenseConfig(64, groups, steps, *stages)
    monkeypatch.setattr(linear_dense, "parts_config", lambda *_, own: config)
    tiles = ops.most_tiles(64, slots, 8)
    ranks = lora_dense.ranks_of(config, tiles * len(outputs) * blocks, features // config.rows)
    assert ranks is not None and 16 * (ranks.low + ranks.high) * (features // config.rows) >= 16 * tiles * blocks
    monkeypatch.setattr(lora_dense, "ranks_of", lambda *_: Ranks(ranks.low, ranks.high, *stages))
    work, layer = ops.work_list.twin(own, start, tokens, slots), Fused.of(1, outputs)
    found = lora_dense.run_adapted(x, weight, work, Blocks(pool, places), layer)
    assert found is not None
    want = linear_dense.sums_twin(x, weight, config)[:, :, :tokens].transpose(1, 2)
    torch.testing.assert_close(found[0][:, :tokens], want, atol=1e-3, rtol=1e-3)
    inner, right = found[1].sum(0), ops.shrink.twin(x, work, Blocks(pool, places), layer)[0]
    for tile, slot in enumerate(work.slots_W.tolist()):
        there = work.tokens_WX[tile] >= 0
        for part, block in ((p, b) for p in range(len(outputs)) for b in range(blocks)):
            if slot >= 0 and places[slot, 1 + part, block, 0] >= 0:
                mine = inner[tile, part, block][there], right[tile, part, block][there]
                torch.testing.assert_close(*mine, atol=1e-3, rtol=1e-3)
                assert mine[1].abs().mean() > 0.1


@pytest.mark.parametrize(
    ("units", "tiles", "ranks"),
    [(64, 32, (2, 0)), (192, 32, (4, 2)), (8, 32, (1, 0)), (96, 32, (2, 1)), (160, 32, (4, 1)), (193, 32, None)],
)  # fmt: skip
def test_blocks_beside_a_tile(units, tiles, ranks):
    """They stand in sums of a power of two. With 64 adapters, qkv of 8B has six beside 192 rows, and steps of both have room for what products alone have in flight."""
    config = linear_dense.config_of(64, 3, 16)
    found = lora_dense.ranks_of(config, units, tiles)
    assert (None if found is None else (found.low, found.high)) == ranks
    if found is not None:
        size = (192 + 16 * (found.low + found.high)) * 128
        assert found.w_stages >= found.x_stages >= 3 and found.w_stages * size >= 5 * 192 * 128
        assert found.w_stages * size + found.x_stages * 8192 + 2048 <= linear_dense.ROOM
