"""Planner: one capacity formula, exact counts, sentences with the numbers."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import OtherFull, one_group, two_groups
from pagerunner.errors import CapacityError, ConfigError
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV

LIMITS = {"model_max_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 2048}


def test_layers_of_one_lifetime_share_a_page_in_layer_order() -> None:
    specs = [FullKV(2, 8, "float32"), OtherFull(1, 8, "float16"), FullKV(1, 4, "bfloat16", head_dim_v=12)]
    plan = plan_memory(specs, page_tokens=16, budget_bytes=1 << 20, **LIMITS)
    full, other = plan.groups
    first, second = 16 * 2 * 16 * 4, 16 * (4 + 12) * 2
    assert [(part.layer, part.offset) for part in full.layers] == [(0, 0), (2, first)]
    assert full.page_bytes == first + second
    assert [(part.layer, part.offset) for part in other.layers] == [(1, 0)]
    assert (full.name, full.kind, other.name) == ("full", "full", "other")


@given(
    st.integers(1, 5), st.integers(1, 5), st.sampled_from(["float32", "bfloat16"]), st.sampled_from([1, 2, 8, 16, 48])
)
def test_every_page_and_layer_is_aligned_whatever_the_sizes(heads: int, dim: int, dtype: str, size: int) -> None:
    specs = [FullKV(heads, dim, dtype), OtherFull(dim, heads, "float32", head_dim_v=3), FullKV(1, dim, "float32")]
    plan = plan_memory(specs, page_tokens=size, budget_bytes=1 << 20, max_model_len="auto", **LIMITS)
    for number, group in enumerate(plan.groups):
        assert plan.slab_bytes % group.unit == 0 and group.page_bytes % group.unit == 0
        assert all(part.offset % 16 == 0 for part in group.layers) and group.unit % 16 == 0
        pages = list(range(plan.num_pages(number)))
        offsets = [plan.page_offset(number, page) for page in pages]
        assert all(b - a >= group.page_bytes for a, b in pairwise(offsets))
        assert offsets[-1] + group.page_bytes <= plan.kv_bytes
        assert [entry * group.unit for entry in plan.table_entries(number, pages)] == offsets
        assert group.table_width == group.pages_needed(plan.max_model_len)


@pytest.mark.parametrize("pages", [1, 2, 7, 49, 64, 313, 1009, 5000])
def test_an_override_gives_exactly_that_many_pages_and_replaces_the_budget(pages: int) -> None:
    plan = plan_memory(
        [FullKV(1, 4, "float32")],
        page_tokens=16,
        budget_bytes=10,
        num_pages_override=pages,
        max_model_len="auto",
        **LIMITS | {"model_max_len": 1 << 20},
    )
    assert plan.num_pages(0) == pages
    assert plan.tokens == pages * 16 == plan.max_model_len
    assert plan.kv_bytes == plan.budget_bytes == pages * 512


@given(st.integers(512, 1 << 22))
def test_a_single_group_loses_no_page_of_the_budget(budget: int) -> None:
    plan = plan_memory([FullKV(1, 4, "float32")], page_tokens=16, budget_bytes=budget, max_model_len="auto", **LIMITS)
    assert plan.num_pages(0) == budget // 512
    assert plan.waste == 0


@settings(deadline=None)
@given(st.integers(2, 4096), st.integers(1, 7))
def test_the_bytes_that_a_refusal_names_are_enough(tokens: int, heads: int) -> None:
    specs = [FullKV(1, 4, "float32"), OtherFull(heads, 4, "float32")]
    for layers in (specs[:1], specs):
        arguments = {"page_tokens": 16, "max_model_len": tokens, **LIMITS}
        with pytest.raises(CapacityError) as caught:
            plan_memory(layers, budget_bytes=100, **arguments)
        found = re.search(r"\(([\d,]+) bytes:", str(caught.value))
        assert found is not None
        assert plan_memory(layers, budget_bytes=int(found[1].replace(",", "")), **arguments).num_slabs


@pytest.mark.parametrize(
    "plan", [one_group(49), one_group(49, page_tokens=1), two_groups(20), two_groups(9, slab_bytes=6160)]
)
def test_auto_is_the_longest_that_the_one_formula_allows(plan: MemoryPlan) -> None:
    length = plan.max_model_len
    assert plan.slabs_needed(length) <= plan.num_slabs < plan.slabs_needed(length + 1) or length in (160, 4096)
    assert KVManager(plan).refusal(length) is None
    assert plan.max_concurrency >= 1


def test_auto_never_goes_beyond_the_model() -> None:
    assert one_group(1000).max_model_len == 4096
    assert one_group(1000, max_model_len=-1).max_model_len == 4096
    assert one_group(1000, max_model_len=None).max_model_len == 4096


def test_a_length_that_does_not_fit_is_refused_with_need_supply_longest_length_and_knobs() -> None:
    with pytest.raises(CapacityError) as caught:
        one_group(49, max_model_len=1000)
    text = str(caught.value)
    for part in ("1,000 tokens", "64,512 bytes", "63 full pages", "50,176 bytes", "784", "max_model_len", "auto"):
        assert part in text, (part, text)
    for knob in ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"):
        assert knob in text
    assert one_group(63, max_model_len=1000).num_pages(0) == 63
    assert one_group(49, max_model_len=784).max_model_len == 784


@pytest.mark.parametrize("budget", [-5, 0, 511])
@pytest.mark.parametrize("length", ["auto", 100])
def test_a_budget_below_one_page_is_refused_with_the_bytes_that_would_do(budget: int, length: int | str) -> None:
    with pytest.raises(CapacityError) as caught:
        plan_memory([FullKV(1, 4, "float32")], page_tokens=16, budget_bytes=budget, max_model_len=length, **LIMITS)
    found = re.search(r"there are (\d+) bytes\.", str(caught.value))
    assert found is not None
    plan = plan_memory(
        [FullKV(1, 4, "float32")], page_tokens=16, budget_bytes=int(found[1]), max_model_len=length, **LIMITS
    )
    assert plan.num_slabs >= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_model_len": 5000}, "4,096"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"max_model_len": "long"}, "max_model_len must be"),
        ({"page_tokens": 24}, "block_size must be"),
        ({"page_tokens": 0}, "block_size must be"),
        ({"num_pages_override": 0}, "num_gpu_blocks_override must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"budget_bytes": None}, "kv_cache_memory_bytes"),
        ({"specs": []}, "no layer"),
    ],
)
def test_impossible_limits_are_named(change: dict[str, object], words: str) -> None:
    arguments = {"specs": [FullKV(1, 4, "float32")], "page_tokens": 16, "budget_bytes": 1 << 20, **LIMITS} | change
    with pytest.raises(ConfigError, match=words):
        plan_memory(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0), (-1, 8)])
def test_a_spec_without_size_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        FullKV(*sizes, "float32")
    with pytest.raises(ConfigError, match="dtype"):
        FullKV(1, 8, "int3")


def test_several_groups_waste_little_of_a_realistic_budget() -> None:
    specs = [FullKV(8, 128, "bfloat16")] * 10 + [OtherFull(3, 192, "bfloat16")] * 31
    plan = plan_memory(specs, page_tokens=16, budget_bytes=8 << 30, max_model_len="auto", **LIMITS)
    assert plan.waste < 0.04
    assert plan.budget_bytes - plan.kv_bytes < 0.01 * plan.budget_bytes
