"""Slabs: what page sizes of very different kinds lose beside each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV, LatentKV, RecurrentState, Spec, WindowKV

GIB = 1 << 30


def plan_for(specs: list[Spec], budget: int = 20 * GIB, **limits: object) -> MemoryPlan:
    arguments = {
        "page_tokens": 16,
        "max_model_len": "auto",
        "model_max_len": 131_072,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
    } | limits
    return plan_memory(specs, budget_bytes=budget, **arguments)  # type: ignore[arg-type]


def test_a_state_of_38_mb_and_a_page_of_16_tokens_share_the_arena_without_padding() -> None:
    state = RecurrentState(((8192, 3), (32, 128, 128)), ("bfloat16", "bfloat16"))
    plan = plan_for([state, state, state, FullKV(2, 256, "bfloat16")] * 12)
    small, large = sorted(plan.groups, key=lambda group: group.page_bytes)
    assert (small.page_bytes, large.page_bytes) == (393_216, 39_518_208)
    assert plan.waste < 0.01 and 1 - plan.kv_bytes / plan.budget_bytes < 0.01


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 3_000), min_size=2, max_size=6, unique=True),
    st.integers(1 << 30, 1 << 36),
)
def test_whatever_the_page_sizes_little_is_lost(sizes: list[int], budget: int) -> None:
    specs: list[Spec] = [WindowKV(1, size, "bfloat16", window=64 + at) for at, size in enumerate(sizes)]
    plan = plan_for(specs, budget)
    assert plan.waste < 0.04
    assert 1 - plan.kv_bytes / budget < 0.01
    assert all(group.pages_per_slab >= 1 for group in plan.groups)
    assert all(plan.slab_bytes % group.unit == group.page_bytes % group.unit == 0 for group in plan.groups)


@pytest.mark.parametrize("pages", [1, 7, 97, 313, 1024])
def test_an_override_gives_exactly_that_many_of_the_largest_pages_beside_other_groups(pages: int) -> None:
    state = RecurrentState(((1000, 3),), ("float32",))
    specs: list[Spec] = [state, FullKV(1, 8, "float32"), WindowKV(1, 40, "float32", window=32)]
    plan = plan_for(specs, 1, num_pages_override=pages + 8)
    assert plan.num_gpu_blocks == pages + 8
    assert plan.groups[plan.largest_group].name == "recurrent"
    assert plan.kv_bytes == plan.budget_bytes


def test_compressed_layers_get_pages_of_whole_slots_whatever_the_block_size() -> None:
    few, many = LatentKV(512, 64, "bfloat16", compression=4), LatentKV(292, 0, "bfloat16", compression=128)
    for block, expected in ((1, [1, 4, 128]), (16, [16, 64, 128]), (48, [48, 192, 384]), (128, [128, 128, 128])):
        plan = plan_for([FullKV(2, 64, "bfloat16"), few, many], page_tokens=block)
        assert [group.page_tokens for group in plan.groups] == expected
    assert plan_for([FullKV(2, 64, "bfloat16"), few]).groups[1].page_tokens == 16, "hits stay as fine as they can be"
    odd = LatentKV(9, 0, "bfloat16", compression=128)  # 18 bytes a slot: one slot a page would waste 44 %
    assert plan_for([odd]).groups[0].page_tokens == 1024


@pytest.mark.parametrize("window", [1, 17, 128, 1024])
def test_a_windows_table_is_as_wide_as_a_window_and_a_step_and_not_as_the_length(window: int) -> None:
    plan = plan_for([WindowKV(1, 8, "bfloat16", window=window), FullKV(1, 8, "bfloat16")])
    assert plan.groups[0].table_width == -(-(window + 8192 - 2) // 16) + 1
    assert plan.groups[1].table_width == 131_072 // 16


@pytest.mark.parametrize(
    "specs",
    [
        [FullKV(8, 128, "bfloat16")] * 20 + [WindowKV(8, 128, "bfloat16", window=1024)] * 30,
        [FullKV(8, 128, "bfloat16")] + [WindowKV(8, 128, "bfloat16", window=1024)] * 30,
        [FullKV(8, 128, "bfloat16"), FullKV(4, 192, "bfloat16", 128), FullKV(1, 96, "fp8_e4m3")] * 7,
    ],
)
@pytest.mark.parametrize("block", [16, 128])
def test_layer_mixes_leave_no_slot_empty(specs: list[Spec], block: int) -> None:
    plan = plan_for(specs, page_tokens=block)
    assert sum(len(group.layers) for group in plan.groups) == len(specs)
    assert all(group.useful_page_bytes >= 0.999 * group.page_bytes for group in plan.groups)
    assert plan.waste < 0.04
