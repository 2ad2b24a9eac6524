"""Specs: bytes, places inside a page, lifetimes, and sentences for impossible sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagerunner.config import KV_DTYPE_BYTES
from pagerunner.errors import ConfigError
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import ChunkedKV, FullKV, LatentKV, RecurrentState, Spec, WindowKV, with_journal

DTYPES = st.sampled_from(sorted(KV_DTYPE_BYTES))
LIMITS = {"model_max_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 2048}


def test_layers_are_grouped_by_what_they_keep_and_not_by_their_sizes() -> None:
    specs: list[Spec] = [
        FullKV(1, 8, "float32"),
        WindowKV(1, 8, "float32", window=64),
        WindowKV(2, 16, "bfloat16", window=64),
        WindowKV(1, 8, "float32", window=32),
        LatentKV(16, 4, "bfloat16", window=64),
        LatentKV(16, 4, "bfloat16"),
        LatentKV(16, 4, "bfloat16", compression=4),
        ChunkedKV(1, 8, "float32", chunk=64),
        RecurrentState(((2, 3),), ("float32",)),
        RecurrentState(((5,), (7,)), ("float32", "bfloat16")),
        FullKV(3, 8, "fp8_e4m3"),
    ]
    plan = plan_memory(specs, page_tokens=16, budget_bytes=1 << 20, max_model_len=256, **LIMITS)
    assert {group.name: [part.layer for part in group.layers] for group in plan.groups} == {
        "full": [0, 10],
        "window-64": [1, 2, 4],
        "window-32": [3],
        "latent-1": [5],
        "latent-4": [6],
        "chunked-64": [7],
        "recurrent": [8, 9],
    }


@given(DTYPES, st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 2, 16, 48]), st.booleans())
def test_keys_values_and_scales_follow_each_other(
    dtype: str, heads: int, dim: int, dim_v: int, tokens: int, static: bool
) -> None:
    spec = FullKV(heads, dim, dtype, dim_v, static_scales=static)
    size = KV_DTYPE_BYTES[dtype]
    assert spec.value_offset(tokens) == tokens * heads * dim * size
    end = spec.value_offset(tokens) + tokens * heads * dim_v * size
    if size == 1 and not static:
        assert spec.zero_fresh, "its scales are read before the first write"
        assert end <= spec.scales_offset(tokens) < end + 4 and spec.scales_offset(tokens) % 4 == 0
        spare = spec.page_bytes(tokens) - spec.scales_offset(tokens) - 8 * heads
        assert 0 <= spare < 16 and spec.page_bytes(tokens) % 16 == 0
    else:
        assert not spec.zero_fresh and spec.page_bytes(tokens) == end


@given(DTYPES, st.sampled_from([1, 4, 16]), st.sampled_from([0, 8, 12]), st.sampled_from([0, 2]))
def test_a_latent_page_has_a_slot_for_every_compression_tokens(
    dtype: str, compression: int, indexer: int, scales: int
) -> None:
    spec = LatentKV(10, 6, dtype, compression, indexer, scale_bytes=scales, indexer_scale_bytes=scales)
    slots = spec.slots(48)
    assert slots * compression == 48
    vectors = slots * (16 * KV_DTYPE_BYTES[dtype] + scales)
    end = vectors
    if indexer:
        assert vectors <= spec.indexer_offset(48) < vectors + 16
        end = spec.indexer_offset(48) + slots * (indexer * KV_DTYPE_BYTES[dtype] + scales)
    own_scales = KV_DTYPE_BYTES[dtype] == 1 and not scales
    assert spec.zero_fresh is own_scales
    slack = 3 + 8 + 16 if own_scales else 4 + 16 * (indexer * scales > 0)
    assert end + 8 * own_scales <= spec.page_bytes(48) < end + slack
    if indexer and scales:
        assert spec.indexer_scales_offset(48) % 4 == 0 and spec.page_bytes(48) % 16 == 0
    assert not own_scales or spec.page_bytes(48) % 16 == 0, (
        "the next layer's share begins where 16 bytes can be read at once"
    )


def test_recurrent_tensors_lie_in_order_and_aligned_whatever_the_page() -> None:
    spec = RecurrentState(((3, 5), (7,), (2, 2)), ("bfloat16", "float32", "float32"))
    assert spec.offsets == (0, 32, 64)
    assert spec.page_bytes(1) == spec.page_bytes(1024) == 64 + 16
    assert spec.zero_fresh, "a new request's first token reads the state"


def test_a_journal_follows_the_state_in_the_same_page() -> None:
    spec = RecurrentState(((3, 5), (2, 2)), ("bfloat16", "float32"), entry=((5,), (2,)))
    plain, three = (
        with_journal((spec, FullKV(1, 8, "float32")), 3, "float16")[0],
        with_journal((spec,), 3, "float16")[0],
    )
    assert plain == three == replace(spec, journal=3, entry_dtype="float16")
    assert three.offsets == (0, 32, 48, 48 + 32) and three.page_bytes(1) == 80 + 12
    assert three.lifetime == spec.lifetime and with_journal((spec,), 0, "float16") == (spec,)
    own = replace(spec, entry_dtype="float32")
    assert with_journal((own,), 2, "float16")[0].entry_dtype == "float32", "what a layer says goes before"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RecurrentState(((4,),), ("float32",), journal=2), "A journal of 2 drafts needs the shapes"),
        (lambda: RecurrentState(((4,),), ("float32",), journal=-1), "journal must be at least 0, got -1"),
        (lambda: WindowKV(1, 8, "float32", window=0), "window must be at least 1, got 0"),
        (lambda: ChunkedKV(1, 8, "float32", chunk=0), "chunk must be at least 1, got 0"),
        (lambda: WindowKV(0, 8, "float32", window=4), "num_kv_heads must be at least 1, got 0"),
        (lambda: FullKV(1, 8, "fp8"), "kv dtype must be one of float32, .*fp8_e5m2, got 'fp8'"),
        (lambda: FullKV(1, 8, "float32", 0), "head_dim_v must be at least 1, got 0"),
        (lambda: LatentKV(8, 4, "float32", compression=0), "compression must be at least 1, got 0"),
        (lambda: LatentKV(8, -4, "float32"), "rope_dim must be at least 0, got -4"),
        (lambda: LatentKV(8, 4, "float32", rope_dtype="int8"), "latent rope_dtype must be one of"),
        (lambda: LatentKV(8, 4, "float32", window=0), "window must be at least 1, got 0"),
        (lambda: LatentKV(8, 4, "float32", compression=4, window=8), "must have compression=1, got 4"),
        (lambda: LatentKV(8, 4, "float32", compression=128).page_bytes(16), "block_size of 128"),
        (lambda: LatentKV(8, 4, "float32", compression=24).page_bytes(64), "block_size of 72"),
        (lambda: RecurrentState((), ()), "one dtype for each"),
        (lambda: RecurrentState(((1,), (2,)), ("float32",)), "2 shapes and 1 dtypes"),
        (lambda: RecurrentState(((1, 0),), ("float32",)), "dimensions must be at least 1"),
        (lambda: RecurrentState(((4,),), ("fp8_e4m3",)), "take float32, bfloat16 or float16"),
    ],
)
def test_impossible_sizes_are_refused_with_the_value_and_the_limit(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
