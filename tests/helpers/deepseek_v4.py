"""A small random DeepSeek-V4 as its maker publishes it: names without `model.`, fp4 experts, fp8 blocks, scales that are powers of two."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers import packers
from helpers.checkpoints_compressed import make_compressed_model

_FP8 = re.compile(
    r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|attn\.indexer\.wq_b|ffn\.shared_experts\.w[123])\.weight$"
    r"|\.self_attn\.(q_a_proj|q_b_proj|kv_proj|o_a_proj|o_b_proj|compressor\.indexer\.q_b_proj)\.weight$"
    r"|\.shared_experts\.(gate_proj|up_proj|down_proj)\.weight$"
)
_BLOCK = 128
_SAID = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [_BLOCK, _BLOCK],
}
SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "moe_intermediate_size": 32,
    "index_head_dim": 16,
}


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, e8m0 scales of blocks, and what they mean."""
    rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // _BLOCK), -(-columns // _BLOCK))
    meant = torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * _BLOCK, (i + 1) * _BLOCK), slice(j * _BLOCK, (j + 1) * _BLOCK)
            scales[i, j] = 2 ** (weight[place].abs().max() / 448).log2().ceil()
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[place] = codes[place].float() * scales[i, j]
    return codes, scales.to(torch.float8_e8m0fnu), meant


def make_published_checkpoint(directory: Path, *, expert_dtype: str = "fp4", **options: Any) -> tuple[Path, Any]:
    """Write the checkpoint under `directory`; its path, and transformers' model with the weights that it stands for."""
    model = make_compressed_model(**(SIZES | options))
    pack = packers.deepseek if expert_dtype == "fp4" else None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if _FP8.search(name):
                weight.copy_(fp8(weight)[2])
            elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                for matrix in weight:
                    halves = matrix.chunk(2) if "gate_up" in name else (matrix,)
                    for part in halves:
                        part.copy_(fp8(part)[2] if pack is None else pack(part)[1])
    path = directory / f"deepseek_v4-published-{len(list(directory.iterdir()))}"
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    published: dict[str, torch.Tensor] = {"mtp.0.e_proj.weight": torch.zeros(3, 5)}
    for name, weight in load_file(path / "model.safetensors").items():
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        name = name.replace(".attn.norm.", ".attn.kv_norm.")
        base = name.removesuffix(".weight")
        if ".ffn.experts." in name and pack is not None:
            published |= {f"{base}.{suffix}": tensor for suffix, tensor in pack(weight)[0].items()}
        elif ".ffn.experts." in name or _FP8.search(f".{name}"):
            published[name], scales, _ = fp8(weight)
            published[f"{base}.scale"] = scales.float() if ".experts." in name else scales
        else:
            published[name] = weight
    save_file(published, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    said = {"quantization_config": _SAID, "expert_dtype": expert_dtype}
    (path / "config.json").write_text(json.dumps({**config, **said}))
    return path, model


def make_published(directory: Path) -> Path:
    """The path alone."""
    return make_published_checkpoint(directory)[0]
