"""Adapters of experts as they lie in pages: products are packed many at a time, each has its own bits, and none crosses the end of a page."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.adapters import pair, write_adapter
from pagerunner.errors import CheckpointError
from pagerunner.layers.module import Module
from pagerunner.layers.moe import Experts, ExpertSizes
from pagerunner.lora import blocks, pauses
from pagerunner.lora.adapter import Adapter, Targets, read_adapter
from pagerunner.lora.blocks import AdapterTable, Packed, Products, lay
from pagerunner.ops.lora import TILE

EXPERTS, FEATURES, INNER, RANK = 3, 32, 24, 20
PAGE = 3 * TILE * FEATURES - 5 * TILE  # two of the larger blocks, and sometimes one of the smaller ones
NAMES = "gate_proj", "up_proj", "down_proj"


class Layer(Module):
    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.experts = Experts(ExpertSizes(experts, FEATURES, INNER), torch.float32)
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
    found, pages = lay(torch.tensor(sizes), 96)
    places = found.tolist()
    assert places == [288, 80, 0, 176, 336, 192, 256, 96] and pages == 4
    taken = [at for place, size in zip(places, sizes, strict=True) for at in range(place, place + size)]
    assert len(set(taken)) == sum(sizes)
    assert lay(torch.tensor([], dtype=torch.int64), 96)[1] == 0


def test_a_digest_is_of_each_product_by_its_name_however_many_threads_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(EXPERTS):
        for seed, part in enumerate(NAMES):
            sizes = (FEATURES, INNER) if part == "down_proj" else (INNER, FEATURES)
            tensors |= pair(f"experts.{expert}.{part}", *sizes, RANK, seed=3 * expert + seed)
    config = {"target_modules": list(NAMES), "r": RANK}
    variants = [tensors] + [tensors | {name: tensor + 1} for name, tensor in tensors.items()]
    first, second = "experts.0.up_proj", "experts.2.up_proj"
    ends = (".lora_A.weight", ".lora_B.weight")
    swapped = {one + end: tensors[other + end] for one, other in ((first, second), (second, first)) for end in ends}
    variants.append(tensors | swapped)
    found: list[list[str]] = []
    for threads in (1, 4, 16):
        monkeypatch.setattr("pagerunner.lora.adapter.HASHERS", threads)
        paths = (write_adapter(tmp_path / f"{threads} {n}", config, own) for n, own in enumerate(variants))
        found.append([read(path, torch.float32)[0].digest for path in paths])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(variants) and all(len(digest) == 32 for digest in found[0])


def test_readers_give_the_lock_up_after_a_few_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are calls of one line of the package that follow each other without a pause: there are a few for each of 1,200 tensors, and 64 between pauses."""
    experts, calls, most = 200, Counter[tuple[CodeType, int]](), Counter[tuple[CodeType, int]]()
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(experts):
        for part in NAMES:
            tensors |= pair(f"experts.{expert}.{part}", *((32, 24) if part == "down_proj" else (24, 32)), 1)
    path = write_adapter(tmp_path, {"target_modules": list(NAMES), "r": 1}, tensors)
    layer = Layer(experts)
    targets, products, pauses_made = Targets.of(layer), Products.of(layer), 0

    def pause() -> None:
        nonlocal most, pauses_made
        pauses_made += 1
        most |= calls
        calls.clear()

    for module in (pauses, sys.modules["pagerunner.lora.adapter"], sys.modules["pagerunner.lora.tensors"]):
        monkeypatch.setattr(module, "pause", pause)

    def called(frame: FrameType, event: str, what: Any) -> None:
        caller = frame if event == "c_call" else frame.f_back
        if event in ("call", "c_call") and caller is not None and "pagerunner/lora" in caller.f_code.co_filename:
            calls[caller.f_code, caller.f_lineno] += 1

    sys.setprofile(called)
    try:
        adapter = read_adapter(path, targets, torch.float32, 1)
        products.pack(adapter, 1, torch.float32, 40 * PAGE)
    finally:
        sys.setprofile(None)
    most |= calls
    [((where, line), count)] = most.most_common(1)
    assert count <= 8 * pauses.MOST_AT_ONCE and pauses_made > 60, (
        f"{where.co_filename}:{line} had {count} calls at once"
    )
    packed = products.pack(adapter, 1, torch.float32, PAGE)
    pages = range(len(packed.pages))
    memory = torch.zeros(len(pages) * PAGE * 4, dtype=torch.uint8)
    table = AdapterTable(products, memory, PAGE * 4, torch.float32, 1, 16)
    calls.clear()
    most.clear()
    sys.setprofile(called)
    try:
        table.fill(0, packed, [page * PAGE * 4 for page in pages], pages)
    finally:
        sys.setprofile(None)
    most |= calls
    assert torch.equal(table.blocks.pool.view(-1, PAGE), packed.pages)
    assert most.most_common(1)[0][1] <= 3 * pauses.MOST_AT_ONCE < len(pages), "copies of pages"


def test_no_copy_crosses_what_is_locked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two locked pieces are 1.5 pages: the second page comes in two copies."""
    piece = 3 * PAGE // 4
    monkeypatch.setattr(blocks, "LOCK_BYTES", piece * 4)
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(EXPERTS):
        tensors |= pair(f"experts.{expert}.down_proj", FEATURES, INNER, 16, seed=expert)
    _, packed, products = read(
        write_adapter(tmp_path, {"target_modules": ["down_proj"], "r": 16}, tensors), torch.float32
    )
    copied: list[tuple[int, int]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() == packed.pages.data_ptr():
                copied.append((args[1].storage_offset(), args[1].storage_offset() + args[1].numel()))
            return func(*args, **(kwargs or {}))

    number = len(packed.pages)
    table = AdapterTable(
        products, torch.zeros(2 * number * PAGE * 4, dtype=torch.uint8), PAGE * 4, torch.float32, 1, 64
    )
    with Copies():
        table.fill(0, packed, [2 * at * PAGE * 4 for at in range(number)], list(range(number)))
    assert number > 1 and len(copied) > number
    assert all(first // piece == (end - 1) // piece for first, end in copied)
    assert torch.equal(table.blocks.pool.view(-1, PAGE)[::2], packed.pages)
