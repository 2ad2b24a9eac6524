"""Random weights of drafters, with the names and shapes of published checkpoints, and the files that hold them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers.draft_references import Weights

EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 512,
    "draft_vocab_size": 96,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


class _Maker:
    def __init__(self, seed: int) -> None:
        self.weights: Weights = {}
        self.generator = torch.Generator().manual_seed(seed)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def norms(self, sizes: dict[str, int], around: float = 1.0) -> None:
        for name, size in sizes.items():
            self.weights[f"{name}.weight"] = around + 0.2 * self.rand(size)

    def linears(self, shapes: dict[str, tuple[int, int]], *, bias: bool = False) -> None:
        for name, shape in shapes.items():
            self.weights[f"{name}.weight"] = self.rand(*shape) / shape[1] ** 0.5
            if bias:
                self.weights[f"{name}.bias"] = 0.3 * self.rand(shape[0])

    def mlp(
        self, prefix: str, hidden: int, inner: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> None:
        gate, up, down = names
        self.linears(
            {f"{prefix}{gate}": (inner, hidden), f"{prefix}{up}": (inner, hidden), f"{prefix}{down}": (hidden, inner)}
        )


def eagle_weights(
    config: dict[str, Any], version: int = 3, *, parts: int = 3, fc_bias: bool = False, seed: int = 0
) -> Weights:
    """Of EAGLE's own format, without midlayer. Qwen3's layers have norms of heads."""
    make = _Maker(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    target = config.get("target_hidden_size", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        features = 2 * hidden if version == 3 and layer == 0 else hidden
        heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        own = f"{prefix}self_attn."
        make.linears(
            {
                f"{own}q_proj": (heads, features),
                f"{own}k_proj": (kv, features),
                f"{own}v_proj": (kv, features),
                f"{own}o_proj": (hidden, heads),
            }
        )
        if config["model_type"] == "qwen3":
            make.norms({f"{own}q_norm": dim, f"{own}k_norm": dim})
        make.norms({f"{prefix}post_attention_layernorm": hidden})
        if version == 3 or layer:
            make.norms({f"{prefix}input_layernorm": hidden})
        if version == 3 and layer == 0:
            make.norms({f"{prefix}hidden_norm": hidden})
        make.mlp(f"{prefix}mlp.", hidden, inner)
    if version == 1:
        make.linears({"fc": (hidden, 2 * hidden)}, bias=fc_bias)
        return make.weights
    if parts > 1 or target != hidden:
        make.linears({"fc": (hidden, parts * target)}, bias=fc_bias)
    make.norms({"norm": hidden})
    if config.get("norm_before_fc"):
        make.norms({"input_norm": parts * target})
    if config.get("fc_norm"):
        make.norms({f"fc_norm.{i}": target for i in range(parts)})
    vocab, draft = config["vocab_size"], config.get("draft_vocab_size", config["vocab_size"])
    make.linears({"lm_head": (draft, hidden)})
    if draft < vocab:
        ids = torch.randperm(vocab, generator=make.generator)[:draft].sort().values
        make.weights["d2t"] = ids - torch.arange(draft)
        make.weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter(0, ids, True)
    return make.weights


def write_drafter(
    directory: Path, config: dict[str, Any], weights: Weights, *, midlayer: bool = True, prefix: str = ""
) -> Path:
    """A directory with config.json and model.safetensors."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    named = {
        name.replace("layers.0.", "midlayer.") if midlayer else name: tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file({prefix + name: tensor for name, tensor in named.items()}, directory / "model.safetensors")
    return directory


def qwen_mtp_weights(config: dict[str, Any], *, fused: bool = False, seed: int = 0) -> Weights:
    """Of Qwen3-Next and Qwen3.5, without `mtp.`. Experts are apart, or `fused`."""
    make = _Maker(seed)
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    make.norms(
        dict.fromkeys(
            (
                "pre_fc_norm_embedding",
                "pre_fc_norm_hidden",
                "norm",
                "layers.0.input_layernorm",
                "layers.0.post_attention_layernorm",
            ),
            hidden,
        ),
        0.0,
    )
    own = "layers.0.self_attn."
    make.norms({f"{own}q_norm": dim, f"{own}k_norm": dim}, 0.0)
    make.linears(
        {
            "fc": (hidden, 2 * hidden),
            f"{own}q_proj": (2 * heads, hidden),
            f"{own}k_proj": (kv, hidden),
            f"{own}v_proj": (kv, hidden),
            f"{own}o_proj": (hidden, heads),
        }
    )
    own, count = "layers.0.mlp.", config.get("num_experts", 0)
    if not count:
        make.mlp(own, hidden, config["intermediate_size"])
        return make.weights
    inner = config["moe_intermediate_size"]
    make.linears({f"{own}gate": (count, hidden), f"{own}shared_expert_gate": (1, hidden)})
    make.mlp(f"{own}shared_expert.", hidden, config["shared_expert_intermediate_size"])
    if fused:
        make.weights[f"{own}experts.gate_up_proj"] = make.rand(count, 2 * inner, hidden) / hidden**0.5
        make.weights[f"{own}experts.down_proj"] = make.rand(count, hidden, inner) / inner**0.5
    else:
        for expert in range(count):
            make.mlp(f"{own}experts.{expert}.", hidden, inner)
    return make.weights


def deepseek_mtp_weights(config: dict[str, Any], *, seed: int = 0) -> Weights:
    """Of DeepSeek-V3 and V3.2, without `model.layers.N.`."""
    make = _Maker(seed)
    hidden, heads, count = config["hidden_size"], config["num_attention_heads"], config["n_routed_experts"]
    rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    make.norms(
        dict.fromkeys(("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm"), hidden)
    )
    own = "self_attn."
    make.norms({f"{own}q_a_layernorm": rank, f"{own}kv_a_layernorm": latent})
    make.linears(
        {
            "eh_proj": (hidden, 2 * hidden),
            f"{own}q_a_proj": (rank, hidden),
            f"{own}q_b_proj": (heads * (nope + rope), rank),
            f"{own}kv_a_proj_with_mqa": (latent + rope, hidden),
            f"{own}kv_b_proj": (heads * (nope + value), latent),
            f"{own}o_proj": (hidden, heads * value),
            "mlp.gate": (count, hidden),
        }
    )
    make.weights["mlp.gate.e_score_correction_bias"] = 0.2 * make.rand(count)
    make.mlp("mlp.shared_experts.", hidden, config["moe_intermediate_size"] * config["n_shared_experts"])
    for expert in range(count):
        make.mlp(f"mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
    if "index_topk" in config:
        keys = config["index_head_dim"]
        make.linears(
            {
                f"{own}indexer.wq_b": (config["index_n_heads"] * keys, rank),
                f"{own}indexer.wk": (keys, hidden),
                f"{own}indexer.weights_proj": (config["index_n_heads"], hidden),
            }
        )
        make.norms({f"{own}indexer.k_norm": keys})
        make.weights[f"{own}indexer.k_norm.bias"] = 0.2 * make.rand(keys)
    return make.weights


def deepseek_v4_mtp_weights(config: dict[str, Any], *, seed: int = 0) -> Weights:
    """Of DeepSeek-V4, without `mtp.0.`, in floats."""
    make = _Maker(seed)
    hidden, heads, dim, streams = (
        config[name] for name in ("hidden_size", "num_attention_heads", "head_dim", "hc_mult")
    )
    rank, groups, low, inner = (
        config[name] for name in ("q_lora_rank", "o_groups", "o_lora_rank", "moe_intermediate_size")
    )
    make.norms(
        dict.fromkeys(("enorm", "hnorm", "norm", "attn_norm", "ffn_norm"), hidden)
        | {"attn.q_norm": rank, "attn.kv_norm": dim}
    )
    make.linears(
        {
            "e_proj": (hidden, hidden),
            "h_proj": (hidden, hidden),
            "attn.wq_a": (rank, hidden),
            "attn.wkv": (dim, hidden),
            "attn.wq_b": (heads * dim, rank),
            "attn.wo_a": (groups * low, heads * dim // groups),
            "attn.wo_b": (hidden, groups * low),
            "ffn.gate": (config["n_routed_experts"], hidden),
        }
    )
    names = ("w1", "w3", "w2")
    make.mlp("ffn.shared_experts.", hidden, inner, names)
    for expert in range(config["n_routed_experts"]):
        make.mlp(f"ffn.experts.{expert}.", hidden, inner, names)
    mixes = (2 + streams) * streams
    make.weights |= {"attn.attn_sink": make.rand(heads), "ffn.gate.bias": 0.2 * make.rand(config["n_routed_experts"])}
    for place, rows, scales in (("attn", mixes, 3), ("ffn", mixes, 3), ("head", streams, 1)):
        make.weights[f"hc_{place}_fn"] = make.rand(rows, streams * hidden) / (streams * hidden) ** 0.5
        make.weights[f"hc_{place}_base"] = make.rand(rows)
        make.weights[f"hc_{place}_scale"] = 1 + 0.2 * make.rand(scales)
    return make.weights


def add_tensors(path: Path, tensors: Weights, prefix: str, **fields: Any) -> Path:
    """Put tensors into a checkpoint of one file, and fields into its config.json."""
    file = path / "model.safetensors"
    save_file(load_file(file) | {f"{prefix}{name}": tensor.contiguous() for name, tensor in tensors.items()}, file)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    return path


_ADDS = re.compile(r"(o_proj|out_proj|down_proj|w2|wo_b)(\.weight)?$")
"""Products whose outputs are added to the residual stream."""


def make_module(directory: Path, family: str, *, strength: float = 0.1) -> Path:
    """A checkpoint with a multi-token prediction module, which knows what mostly follows a token, as the head of `make_followed` does; but DeepSeek-V4's is random."""
    from helpers.checkpoints_compressed import HEAVY, SPARSE, make_compressed_checkpoint
    from helpers.checkpoints_hybrid import make_hybrid_checkpoint
    from helpers.checkpoints_latent import make_latent_checkpoint

    if family == "deepseek_v4":
        path, _ = make_compressed_checkpoint(directory, compress_rates={SPARSE: 4, HEAVY: 8})
        weights = deepseek_v4_mtp_weights(json.loads((path / "config.json").read_text()))
        return add_tensors(path, weights, "mtp.0.", num_nextn_predict_layers=1)
    qwen = family.startswith("qwen")
    path, model = make_hybrid_checkpoint(directory, family) if qwen else make_latent_checkpoint(directory, family)
    file, fields = path / "model.safetensors", json.loads((path / "config.json").read_text())
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if _ADDS.search(name):
            tensor.mul_(strength)
        if name.endswith("embed_tokens.weight"):
            tensor.mul_(3)
        if name.endswith("model.norm.weight"):
            tensor.fill_(0.0 if qwen else 1.0)
    save_file(tensors, file)
    weights = qwen_mtp_weights(fields) if qwen else deepseek_mtp_weights(fields)
    hidden = fields["hidden_size"]
    for name in weights:
        if _ADDS.search(name):
            weights[name].zero_()
    weights["fc.weight" if qwen else "eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    for name in ("pre_fc_norm_embedding", "norm") if qwen else ("enorm", "shared_head.norm"):
        weights[f"{name}.weight"].fill_(0.0 if qwen else 1.0)
    prefix = "mtp." if qwen else f"model.layers.{fields['num_hidden_layers']}."
    return add_tensors(path, weights, prefix, **{"mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers": 1})


def make_followed(directory: Path, family: str = "llama", *, strength: float = 0.1, **sizes: Any) -> tuple[Path, Path]:
    """A target whose next token depends mostly on the last one, and an EAGLE-1 head that knows this much; both paths.

    Layers add `strength` times what they would. The head's first product hands the token's embedding through, and its layer adds nothing. For a sixth of the
    tokens its embedding is another one, so it is wrong there.
    """
    from helpers.checkpoints import make_checkpoint

    target = make_checkpoint(directory, family, tie_word_embeddings=False, **sizes)
    file = target / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(strength)
        if name == "model.embed_tokens.weight":
            tensor.mul_(3)
        if name == "model.norm.weight":
            tensor.fill_(1.0)
    save_file(tensors, file)
    config = json.loads((target / "config.json").read_text())
    fields = {name: value for name, value in EAGLE.items() if name != "draft_vocab_size"}
    fields |= {name: config[name] for name in ("hidden_size", "vocab_size", "max_position_embeddings")}
    weights = eagle_weights(fields, 1)
    hidden = fields["hidden_size"]
    weights["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"layers.0.{name}.weight"].zero_()
    embed = tensors["model.embed_tokens.weight"].clone()
    embed[::6] = embed[::6].roll(1, 0)
    weights["embed_tokens.weight"] = embed
    return target, write_drafter(directory / "head", fields, weights, midlayer=False)


def make_smaller(directory: Path, target: Path) -> Path:
    """The embedding, the first layer and the output weights of a target of `make_followed`, as a model of one layer."""
    path = directory / "smaller"
    path.mkdir()
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, path / "model.safetensors")
    return path
