"""Published config.json files: each is read as its maker wrote it, and its weights take what the maker's do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.published import Published, all_published, config_files
from pagerunner.models.configs.reader import read_model_config

PUBLISHED = all_published()


def test_every_file_has_its_facts_and_there_are_enough() -> None:
    assert {published.file for published in PUBLISHED.values()} == config_files()
    assert len(PUBLISHED) >= 45
    assert all(published.config and published.how for published in PUBLISHED.values())


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_read(published: Published) -> None:
    config = read_model_config(published.file, quantised=True)
    assert config.dtype in ("bfloat16", "float16")
    assert len({spec.lifetime for spec in config.layer_specs("bfloat16")}) >= 1
    assert (config.quantization is None) == ("quantization_config" not in published.file.read_text())


@pytest.mark.parametrize("size", ["1b", "4b", "12b", "27b"])
def test_what_gemma_leaves_out_is_what_its_config_class_says(size: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = PUBLISHED[f"google/gemma-3-{size}-it"].file
    values = json.loads(path.read_text())
    kind = transformers.Gemma3Config if "text_config" in values else transformers.Gemma3TextConfig
    want: Any = kind.from_dict(values).get_text_config()
    found: Any = read_model_config(path)
    assert (found.vocab_size, found.hidden_size, found.num_layers) == (
        want.vocab_size,
        want.hidden_size,
        want.num_hidden_layers,
    )
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (
        want.num_attention_heads,
        want.num_key_value_heads,
        want.head_dim,
    )
    assert (found.max_position_embeddings, found.window) == (want.max_position_embeddings, want.sliding_window)
    assert (found.query_scalar, found.rms_norm_eps) == (want.query_pre_attn_scalar, want.rms_norm_eps)
    assert found.tie_word_embeddings is want.tie_word_embeddings
    assert found.local_layers == tuple(kind == "sliding_attention" for kind in want.layer_types)
    ropes = want.rope_parameters
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    assert (found.rope.kind, found.rope.theta) == (full["rope_type"], full["rope_theta"])
    assert found.rope.factor == full.get("factor", 1.0)
    assert (found.local_rope.kind, found.local_rope.theta) == ("default", local["rope_theta"])
    assert set(found.eos_token_ids) == {1, 106}
