"""Adapters of experts as they lie in pages: products are packed many at a time, each has its own bits, and none crosses the end of a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.adapters import pair, write_adapter
from pagerunner.errors import CheckpointError
from pagerunner.layers.module import Module
from pagerunner.layers.moe import Experts, ExpertSizes
from pagerunner.lora.adapter import Adapter, Targets, read_adapter
from pagerunner.lora.blocks import Packed, Products, lay
from pagerunner.ops.lora import TILE

EXPERTS, FEATURES, INNER, RANK = 3, 32, 24, 20
PAGE = 3 * TILE * FEATURES - 5 * TILE  # two of the larger blocks, and sometimes one of the smaller ones
NAMES = "gate_proj", "up_proj", "down_proj"


class Layer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(ExpertSizes(EXPERTS, FEATURES, INNER), torch.float32)
        self.experts.takes_adapters = True


def read(path: Path, dtype: torch.dtype) -> tuple[Adapter, Packed, Products]:
    layer = Layer()
    products = Products.of(layer)
    adapter = read_adapter(path, Targets.of(layer), dtype, 64)
    return adapter, products.pack(adapter, 64, dtype, PAGE), products


def one_by_one(packed: Packed, products: Products) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each product's A [blocks * 16, inputs] and B [blocks * 16, outputs] of those that are there."""
    found = {}
    for (name, (outputs, inputs)), places in zip(products.sizes.items(), packed.places.tolist(), strict=True):
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for both in places:
            for side, at, size in zip(sides, both, (inputs, outputs), strict=True):
                if at >= 0:
                    page, first = divmod(at, PAGE)
                    side.append(packed.pages[page, first : first + TILE * size].view(TILE, size))
        if sides[0]:
            found[name] = torch.cat(sides[0]), torch.cat(sides[1])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_of_experts_are_packed_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Rank 20 has two blocks, of which zeros fill the second. One expert has another scale than the others."""
    together = pair("experts.base_layer", 2 * INNER, FEATURES, EXPERTS * RANK)
    together |= pair("experts", FEATURES, INNER, EXPERTS * RANK, seed=1)
    separate, want = {}, {}
    for matrix, parts in (("experts.base_layer", NAMES[:2]), ("experts", NAMES[2:])):
        a_ERI = together[f"{matrix}.lora_A.weight"].unflatten(0, (EXPERTS, RANK))
        b_ORE = together[f"{matrix}.lora_B.weight"].unflatten(1, (RANK, EXPERTS))
        b_ORE[..., 1] *= 4
        for expert in range(EXPERTS):
            for part, b_OR in zip(parts, b_ORE[..., expert].chunk(len(parts)), strict=True):
                name = f"experts.{expert}.{part}"
                separate[f"{name}.lora_A.weight"] = a_ERI[expert].clone()
                separate[f"{name}.lora_B.weight"] = b_OR / 4 if expert == 1 else b_OR
                want[name] = a_ERI[expert].to(dtype), (b_OR * 2).to(dtype).T
    one = {
        "target_modules": list(NAMES),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "alpha_pattern": {r"experts\.1\..*": 8 * RANK},
    }
    other = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": RANK, "lora_alpha": 2 * RANK}
    digests = set()
    for number, (config, tensors) in enumerate(((one, separate), (other, together))):
        adapter, packed, products = read(write_adapter(tmp_path / str(number), config, tensors), dtype)
        digests.add(adapter.digest)
        assert len(adapter.stacks) == 3, "a stack for each matrix of the experts"
        whole = sum(2 * TILE * sum(size) for size in products.sizes.values())
        assert whole <= packed.pages.numel() <= whole * 5 / 4 and len(packed.pages) == products.num_pages(RANK, PAGE)
        found = one_by_one(packed, products)
        assert found.keys() == want.keys()
        for name, sides in found.items():
            for got, expected in zip(sides, want[name], strict=True):
                assert torch.equal(got[:RANK], expected) and not got[RANK:].any()
    assert len(digests) == 1


def test_experts_with_ranks_of_their_own_are_no_stack(tmp_path: Path) -> None:
    """Expert 1 has rank 3 alone, and expert 2 has no product of its gate."""
    tensors = {}
    for expert in range(EXPERTS):
        for part in NAMES:
            outputs, inputs = (FEATURES, INNER) if part == "down_proj" else (INNER, FEATURES)
            if (expert, part) != (2, "gate_proj"):
                tensors |= pair(f"experts.{expert}.{part}", outputs, inputs, 3 if expert == 1 else 18, seed=expert)
    targets = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith("lora_A.weight")]
    config = {
        "target_modules": targets,
        "r": 18,
        "lora_alpha": 18,
        "rank_pattern": {r"experts\.1\..*": 3},
        "alpha_pattern": {r"experts\.1\..*": 3},
    }
    adapter, packed, products = read(write_adapter(tmp_path, config, tensors), torch.float32)
    assert sorted(len(stack.names) for stack in adapter.stacks) == [1, 1, 1, 1, 2, 2]
    found = one_by_one(packed, products)
    assert sorted(found) == sorted(targets)
    for name, (a_RI, b_RO) in found.items():
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"].T
        assert torch.equal(a_RI[: len(a)], a) and not a_RI[len(a) :].any() and len(a_RI) == -(-len(a) // TILE) * TILE
        assert torch.equal(b_RO[: len(b)], b) and not b_RO[len(b) :].any()


def test_the_expert_whose_numbers_are_none_is_named(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(EXPERTS):
        tensors |= pair(f"experts.{expert}.down_proj", FEATURES, INNER, 4, seed=expert)
    tensors["experts.1.down_proj.lora_B.weight"][3, 2] = 1e5
    config = {"target_modules": ["down_proj"], "alpha_pattern": {r"experts\.1\..*": 4}}
    with pytest.raises(
        CheckpointError, match=r"experts\.1\.down_proj\.lora_B\.weight holds 1e\+05, which times the scale 1 "
    ):
        read(write_adapter(tmp_path, config, tensors), torch.float16)


def test_blocks_lie_in_pages() -> None:
    """Each page has the largest blocks that fit. None overlaps another one, or the end of its page, and equal ones follow each other."""
    sizes = [48, 16, 80, 16, 48, 64, 16, 80]
    places, pages = lay(sizes, 96)
    assert places == [288, 80, 0, 176, 336, 192, 256, 96] and pages == 4
    taken = [at for place, size in zip(places, sizes, strict=True) for at in range(place, place + size)]
    assert len(set(taken)) == sum(sizes)
    assert lay([], 96) == ([], 0)
