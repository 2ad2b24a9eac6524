"""How host memory is cut: nearly all of what was asked for holds pages."""

from __future__ import annotations

import re

import pytest

from pagerunner.errors import CapacityError
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV
from pagerunner.tiers.host import HostTier, cut_host


def plan(page_bytes: int) -> MemoryPlan:
    specs = [FullKV(1, page_bytes // 64, "bfloat16")]
    limits = {"model_max_len": 400, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    return plan_memory(specs, page_tokens=16, budget_bytes=400 * page_bytes, **limits)


@pytest.mark.parametrize("page_bytes", [1_024, 81_920, 2_359_296, 50_000_064])
@pytest.mark.parametrize("asked", [60_000_000, 67_000_000, 100_000_000, 2**30 + 5, 80 * 2**30])
def test_of_what_was_asked_for_little_is_left_out(page_bytes: int, asked: int) -> None:
    made = plan(page_bytes)
    assert made.groups[0].page_bytes == page_bytes
    cut = cut_host(made, asked)
    slabs, lost = cut.num_slabs, asked - cut.num_bytes
    assert 0 <= lost < max(min(32 * 2**20, slabs * (page_bytes + 4_096)), page_bytes)
    assert lost < 0.02 * asked or page_bytes > 40e6
    assert cut.slab_bytes % 4_096 == 0 and cut.slab_bytes // page_bytes == cut.per_slab[0] > 0
    assert cut.slab_bytes < 2 * max(32 * 2**20, page_bytes + 4_096), "a part can be used while others are being locked"
    assert HostTier(made, asked).num_bytes == cut.num_bytes


def test_less_than_a_page_is_refused() -> None:
    sentence = r"has 2,359,295 bytes .* less than a slab of pages \(2,359,296 bytes\)\. Raise kv_offloading_size to at least (\S+) \(GiB\) .* cpu_bytes_to_use to 2359296 "
    with pytest.raises(CapacityError, match=sentence) as refused:
        cut_host(plan(2_359_296), 2_359_295)
    advised = re.search(sentence, str(refused.value))
    assert advised is not None
    cut_host(plan(2_359_296), int(float(advised[1]) * 2**30))
