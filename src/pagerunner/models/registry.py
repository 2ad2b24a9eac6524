"""The table of supported families. Torch-free: a model's own file is imported when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.decoder import read_llama, read_mistral, read_mistral3, read_qwen2, read_qwen3
from pagerunner.models.configs.deepseek import read_deepseek_v2, read_deepseek_v3, read_deepseek_v32
from pagerunner.models.configs.deepseek_v4 import read_deepseek_v4
from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.hybrid import read_bamba, read_qwen3_5, read_qwen3_5_moe, read_qwen3_next
from pagerunner.models.configs.llama4 import read_llama4_text
from pagerunner.models.configs.moe import read_qwen3_moe
from pagerunner.models.configs.window import GEMMA3_DEFAULTS, read_gemma3_text, read_gpt_oss


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type: how its config.json is read, and the module and class of its model.

    `read(fields, common)` takes the family's own fields; `common` holds what ModelConfig itself declares. `defaults` are
    fields that published files leave out. The config.json of a `nested` family describes a model of text and images, of
    which the text part, in text_config, is run; its model_type there is one of `text_types` (default: the family's with `_text`).
    `mtp` are module and class of the family's multi-token prediction module, and what the names of its tensors begin with.
    """

    read: Callable[[Fields, dict[str, Any]], ModelConfig]
    module: str
    model: str
    nested: bool = False
    text_types: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    mtp: tuple[str, str, str] | None = None


_QWEN_MTP = ("qwen3_next_mtp", "Qwen3NextMTP", "mtp.")
_DEEPSEEK_MTP = ("deepseek_mtp", "DeepseekMTP", "model.layers.{layers}.")
_DEEPSEEK_V4_MTP = ("deepseek_v4_mtp", "DeepseekV4MTP", "mtp.0.")
FAMILIES: dict[str, Family] = {
    "llama": Family(read_llama, "llama", "LlamaForCausalLM"),
    "mistral": Family(read_mistral, "llama", "LlamaForCausalLM"),
    "qwen2": Family(read_qwen2, "llama", "LlamaForCausalLM"),
    "qwen3": Family(read_qwen3, "qwen3", "Qwen3ForCausalLM"),
    "qwen3_next": Family(read_qwen3_next, "qwen3_next", "Qwen3NextForCausalLM", mtp=_QWEN_MTP),
    "qwen3_5_text": Family(read_qwen3_5, "qwen3_next", "Qwen35ForCausalLM", mtp=_QWEN_MTP),
    "qwen3_5_moe_text": Family(read_qwen3_5_moe, "qwen3_next", "Qwen35ForCausalLM", mtp=_QWEN_MTP),
    "qwen3_5": Family(read_qwen3_5, "qwen3_next", "Qwen35ForCausalLM", nested=True, mtp=_QWEN_MTP),
    "qwen3_5_moe": Family(read_qwen3_5_moe, "qwen3_next", "Qwen35ForCausalLM", nested=True, mtp=_QWEN_MTP),
    "bamba": Family(read_bamba, "bamba", "BambaForCausalLM"),
    "deepseek_v2": Family(read_deepseek_v2, "deepseek", "DeepseekForCausalLM"),
    "deepseek_v3": Family(read_deepseek_v3, "deepseek", "DeepseekForCausalLM", mtp=_DEEPSEEK_MTP),
    "kimi_k2": Family(read_deepseek_v3, "deepseek", "DeepseekForCausalLM", mtp=_DEEPSEEK_MTP),
    "kimi_k25": Family(
        read_deepseek_v3,
        "deepseek",
        "DeepseekForCausalLM",
        nested=True,
        text_types=("kimi_k2", "deepseek_v3"),
        mtp=_DEEPSEEK_MTP,
    ),
    "deepseek_v32": Family(read_deepseek_v32, "deepseek", "DeepseekForCausalLM", mtp=_DEEPSEEK_MTP),
    "deepseek_v4": Family(read_deepseek_v4, "deepseek_v4", "DeepseekV4ForCausalLM", mtp=_DEEPSEEK_V4_MTP),
    "qwen3_moe": Family(read_qwen3_moe, "qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3_text": Family(read_gemma3_text, "gemma3", "Gemma3ForCausalLM", defaults=GEMMA3_DEFAULTS),
    "gemma3": Family(read_gemma3_text, "gemma3", "Gemma3ForCausalLM", nested=True, defaults=GEMMA3_DEFAULTS),
    "mistral3": Family(read_mistral3, "llama", "LlamaForCausalLM", nested=True, text_types=("mistral",)),
    "llama4_text": Family(read_llama4_text, "llama4", "Llama4ForCausalLM"),
    "llama4": Family(read_llama4_text, "llama4", "Llama4ForCausalLM", nested=True),
    "gpt_oss": Family(read_gpt_oss, "gpt_oss", "GptOssForCausalLM"),
}
