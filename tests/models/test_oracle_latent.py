"""DeepSeek-V2 and V3 against `transformers` in float32: the same greedy tokens, and log-probabilities within 1e-4.

The harness builds batches by hand over a pool whose free slots hold NaN; no engine takes part.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints_latent import LATENT_FAMILIES, make_latent_checkpoint
from helpers.effort import by_days
from helpers.forward import Harness, Sequence, check, load, prompts
from pagerunner.attention.mla import LatentBackend
from pagerunner.batch import LatentPages
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.models.configs.reader import read_model_config

pytest.importorskip("transformers")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LIMITED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 lite": ("deepseek_v2", {}),
    "v2 lite yarn": ("deepseek_v2", {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "v2 limited groups, compressed queries": ("deepseek_v2", {**LIMITED, "q_lora_rank": 20}),
    "v2 biases, all experts, tied": (
        "deepseek_v2",
        {"attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
    "v2 all dense, small latents": ("deepseek_v2", {"first_k_dense_replace": 3, "kv_lora_rank": 12, "v_head_dim": 24}),
    "v3": ("deepseek_v3", {}),
    "v3 yarn": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3 yarn, unequal magnitudes": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}),
    "v3 rotary halves, direct queries": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    "v3 one group, weights as they are": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "v3 biases, odd sizes": (
        "deepseek_v3",
        {
            "attention_bias": True,
            "vocab_size": 1013,
            "kv_lora_rank": 39,
            "num_attention_heads": 3,
            "qk_nope_head_dim": 7,
        }
        | {"num_key_value_heads": 3, "v_head_dim": 9},
    ),
}


class LatentHarness(Harness):
    """The harness over a pool of vectors: page -> layer -> token -> vector, every free slot NaN."""

    def __init__(
        self, model: Any, config: Any, *, page_tokens: int, num_pages: int, gap: int = 0, dtype: Any = torch.float32
    ) -> None:
        self.model, self.page_tokens = model, page_tokens
        self.backend: Any = LatentBackend()
        self.specs = list(config.layer_specs("float32")[:1])
        vector = config.latent_dim + config.rope_dim
        stride = config.num_layers * page_tokens * vector + gap
        self.pool = torch.full((num_pages * stride,), float("nan"), dtype=dtype)
        size, strides = (num_pages, page_tokens, vector), (stride, vector, 1)
        self.kv: Any = tuple(
            LatentPages(0, self.pool.as_strided(size, strides, i * page_tokens * vector))
            for i in range(config.num_layers)
        )
        self.free = list(range(num_pages))
        random.Random(0).shuffle(self.free)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a variant's name to its directory and reference model, each made once."""
    directory = tmp_path_factory.mktemp("models")

    @functools.cache
    def get(name: str) -> tuple[Path, Any]:
        family, overrides = VARIANTS[name]
        return make_latent_checkpoint(directory, family, seed=len(name), **overrides)

    return get


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_every_variant(checkpoints: Any, name: str) -> None:
    path, reference = checkpoints(name)
    model, config = load(path)
    texts = prompts([1, 33, 150])
    harness = LatentHarness(model, config, page_tokens=16, num_pages=40)
    for prompt, sequence in zip(texts, harness.generate(texts, 6, chunk=64), strict=True):
        check(reference, prompt, sequence)


@pytest.mark.days(2)
@pytest.mark.parametrize(
    ("name", "chunk", "page_tokens"), by_days(["v2 lite", "v3 yarn"], [1, 7, 64, 10**9], [1, 16, 48])
)
@torch.inference_mode()
def test_tokens_do_not_depend_on_chunks_and_pages(checkpoints: Any, name: str, chunk: int, page_tokens: int) -> None:
    path, reference = checkpoints(name)
    model, config = load(path)
    texts = prompts([40] if chunk == 1 else [5, 70, 17, 16, 1, 130])
    pages = sum(-(-(len(t) + 8) // page_tokens) for t in texts)
    harness = LatentHarness(model, config, page_tokens=page_tokens, num_pages=pages, gap=page_tokens % 3)
    for prompt, sequence in zip(texts, harness.generate(texts, 8, chunk=chunk), strict=True):
        check(reference, prompt, sequence)


@torch.inference_mode()
def test_rows_share_pages_that_the_same_step_writes(checkpoints: Any) -> None:
    path, reference = checkpoints("v3")
    model, config = load(path)
    prefix, *tails = prompts([320, 9, 16, 1, 40, 3])
    harness = LatentHarness(model, config, page_tokens=16, num_pages=60)
    first = Sequence(prefix + tails[0])
    first.pages = [harness.free.pop() for _ in range(21)]
    rest = [Sequence(prefix + tail, computed=320, pages=first.pages[:20]) for tail in tails[1:]]
    sequences = [first, *rest]
    texts = [list(s.tokens) for s in sequences]
    for _ in range(5):
        rows = harness.step([(s, len(s.tokens) - s.computed) for s in sequences])
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.logprobs.append(row)
            sequence.tokens.append(int(row.argmax()))
    for text, sequence in zip(texts, sequences, strict=True):
        check(reference, text, sequence)


@torch.inference_mode()
def test_narrow_pages_do_not_make_results_depend_on_chunks(checkpoints: Any) -> None:
    path, _ = checkpoints("v3")
    model, config = load(path)
    (text,) = prompts([100])
    rows = []
    for chunks in ([100], [64, 36], [7] * 14 + [2], [99, 1]):
        harness = LatentHarness(model, config, page_tokens=16, num_pages=10, dtype=torch.bfloat16)
        sequence = Sequence(text)
        rows.append([harness.step([(sequence, count)])[0] for count in chunks][-1])
    for row in rows[1:]:
        torch.testing.assert_close(row, rows[0], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_fields_as_the_published_files_have_them(tmp_path: Path) -> None:
    fields = {
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "rope_parameters": None,
        "rope_scaling": {**YARN, "type": "yarn", "rope_type": None, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"rope_theta": None},
        "rope_theta": 10000,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
        "head_dim": None,
        "qk_head_dim": None,
    }
    rope = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    path, reference = make_latent_checkpoint(tmp_path, "deepseek_v3", fields=fields, rope_parameters=rope)
    model, config = load(path)
    texts = prompts([90])
    harness = LatentHarness(model, config, page_tokens=16, num_pages=10)
    check(reference, texts[0], harness.generate(texts, 4)[0])


def test_layers_for_multi_token_prediction_are_known_and_left_out(tmp_path: Path) -> None:
    path, _ = make_latent_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=3, first_k_dense_replace=3)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\."):
        load(path)
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
    load(path)


@pytest.mark.parametrize("family", LATENT_FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts_per_tok", 9),
        ("num_key_value_heads", 2),
        ("qk_rope_head_dim", 7),
        ("moe_layer_freq", 2),
        ("q_lora_rank", 0),
        ("topk_method", "best"),
        ("scoring_func", "tanh"),
        ("kv_lora_rank", 0),
        ("n_shared_experts", None),
        ("head_dim", 12),
    ],
)
def test_refuses_what_it_would_not_compute(tmp_path: Path, family: str, field: str, value: Any) -> None:
    path, _ = make_latent_checkpoint(tmp_path, family)
    config = json.loads((path / "config.json").read_text()) | {field: value}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="head_dim" if field == "qk_rope_head_dim" else field):
        read_model_config(path)


@pytest.mark.parametrize(
    ("field", "value"), [("n_group", 3), ("topk_group", 5), ("n_group", 8), ("n_routed_experts", 9)]
)
def test_refuses_groups_that_do_not_divide(tmp_path: Path, field: str, value: int) -> None:
    path, _ = make_latent_checkpoint(tmp_path, "deepseek_v3")
    config = json.loads((path / "config.json").read_text()) | {"num_experts_per_tok": 1, field: value}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"n_group|topk_group|n_routed_experts"):
        read_model_config(path)
