"""Drafters written out in plain torch from the description of their checkpoints: whole sequences, no pages, float32. Nothing here comes from the package.

Each has `combined(taken)` for what the target left, `forward(hidden, ids)` over a whole sequence, `logits`, and `to_target`. Weights are those of a
checkpoint by their names there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.nn.functional import linear, silu, softmax

Weights = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(
    x_THd: torch.Tensor, theta: float, *, pairs: bool = False, size: int | None = None, back: bool = False
) -> torch.Tensor:
    """Rotate the first `size` elements of heads by their place in T, as halves or as adjacent pairs."""
    size = x_THd.shape[-1] if size is None else size
    part, rest = x_THd[..., :size], x_THd[..., size:]
    freqs = theta ** (-torch.arange(0, size, 2) / size)
    angle = torch.arange(len(x_THd))[:, None] * freqs * (-1 if back else 1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = (part[..., ::2], part[..., 1::2]) if pairs else part.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    part = torch.stack(turned, -1).flatten(-2) if pairs else torch.cat(turned, -1)
    return torch.cat((part, rest), -1)


def attend(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKe: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over a whole sequence, [T, H * e]."""
    count, heads = q_THd.shape[:2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_TKd, v_TKe))
    scores = torch.einsum("thd,shd->hts", q_THd, k) * scale
    back = torch.arange(count)[:, None] - torch.arange(count)
    hidden = (back < 0) | (back >= window) if window else back < 0
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(heads, count, 1)), -1)
    weights = softmax(scores, -1)[..., :count]
    return torch.einsum("hts,she->the", weights, v).flatten(1)


def gated(x: torch.Tensor, w: Weights, prefix: str) -> torch.Tensor:
    return linear(
        silu(linear(x, w[f"{prefix}gate_proj.weight"])) * linear(x, w[f"{prefix}up_proj.weight"]),
        w[f"{prefix}down_proj.weight"],
    )


class Reference(ABC):
    """What all share. `embed` and `head` are the target's weights."""

    def __init__(self, weights: Weights, config: dict[str, Any], embed: torch.Tensor, head: torch.Tensor) -> None:
        self.w, self.config, self.embed, self.head = weights, config, embed, head
        self.eps = config["rms_norm_eps"]
        self.theta = config["rope_parameters"]["rope_theta"]

    def combined(self, taken: torch.Tensor) -> torch.Tensor:
        return taken

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.head)

    def to_target(self, token: int) -> int:
        return token

    def draft(self, taken: torch.Tensor, ids: list[int], count: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Greedy drafts, and what all positions leave: inputs of the output weights, and hidden states."""
        hidden, ids, found = self.combined(taken), list(ids), []
        for _ in range(count):
            x, left = self.forward(hidden, torch.tensor(ids))
            found.append(self.to_target(int(self.logits(x[-1]).argmax())))
            hidden, ids = torch.cat((hidden, left[-1:])), [*ids, found[-1]]
        return found, x, left

    @abstractmethod
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all positions: inputs of the output weights, and hidden states."""


class EagleLayers(Reference):
    """EAGLE-3, and with `version` 1 EAGLE-1. Names are those of EAGLE's own files, without midlayer."""

    def __init__(
        self, weights: Weights, config: dict[str, Any], embed: torch.Tensor, head: torch.Tensor, version: int = 3
    ) -> None:
        super().__init__(
            weights, config, weights.get("embed_tokens.weight", embed), weights.get("lm_head.weight", head)
        )
        self.version = version

    def combined(self, taken: torch.Tensor) -> torch.Tensor:
        w = self.w
        if self.version == 1:
            return taken
        if self.config.get("norm_before_fc"):
            taken = norm(taken, w["input_norm.weight"], self.eps)
        if self.config.get("fc_norm"):
            size = w["fc_norm.0.weight"].shape[0]
            taken = torch.cat(
                [norm(part, w[f"fc_norm.{i}.weight"], self.eps) for i, part in enumerate(taken.split(size, 1))], 1
            )
        return linear(taken, w["fc.weight"], w.get("fc.bias")) if "fc.weight" in w else taken

    def _attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        w, dim = self.w, self.config["head_dim"]
        q, k, v = (
            linear(x, w[f"{prefix}{n}_proj.weight"], w.get(f"{prefix}{n}_proj.bias")).unflatten(1, (-1, dim))
            for n in "qkv"
        )
        if f"{prefix}q_norm.weight" in w:
            q, k = norm(q, w[f"{prefix}q_norm.weight"], self.eps), norm(k, w[f"{prefix}k_norm.weight"], self.eps)
        out = attend(rotate(q, self.theta), rotate(k, self.theta), v, dim**-0.5)
        return linear(out, w[f"{prefix}o_proj.weight"], w.get(f"{prefix}o_proj.bias"))

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, eps, embedded = self.w, self.eps, self.embed[ids]
        if self.version == 1:
            residual = x = linear(torch.cat((embedded, hidden), 1), w["fc.weight"], w.get("fc.bias"))
        else:
            normed = norm(hidden, w["layers.0.hidden_norm.weight"], eps)
            residual = normed if self.config.get("norm_before_residual") else hidden
            x = torch.cat((norm(embedded, w["layers.0.input_layernorm.weight"], eps), normed), 1)
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            if layer:
                x = norm(residual, w[f"{prefix}input_layernorm.weight"], eps)
            residual = residual + self._attention(x, f"{prefix}self_attn.")
            residual = residual + gated(
                norm(residual, w[f"{prefix}post_attention_layernorm.weight"], eps), w, f"{prefix}mlp."
            )
        if self.version == 1:
            return residual, residual
        normed = norm(residual, w["norm.weight"], eps)
        return normed, normed if self.config.get("norm_output") else residual

    def to_target(self, token: int) -> int:
        return token + int(self.w["d2t"][token]) if "d2t" in self.w else token


class QwenMTP(Reference):
    """Qwen3-Next and Qwen3.5; names without `mtp.`."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, eps, dim = self.w, self.eps, self.config["head_dim"]
        plus = lambda x, name: norm(x, 1 + w[name], eps)  # noqa: E731
        x = torch.cat(
            (plus(self.embed[ids], "pre_fc_norm_embedding.weight"), plus(hidden, "pre_fc_norm_hidden.weight")), 1
        )
        residual = linear(x, w["fc.weight"])
        x = plus(residual, "layers.0.input_layernorm.weight")
        own = "layers.0.self_attn."
        q, gate = linear(x, w[f"{own}q_proj.weight"]).unflatten(1, (-1, 2 * dim)).split(dim, -1)
        k, v = (linear(x, w[f"{own}{n}_proj.weight"]).unflatten(1, (-1, dim)) for n in "kv")
        q, k = plus(q, f"{own}q_norm.weight"), plus(k, f"{own}k_norm.weight")
        size = dim // 4
        out = attend(rotate(q, self.theta, size=size), rotate(k, self.theta, size=size), v, dim**-0.5)
        residual = residual + linear(out * gate.flatten(1).sigmoid(), w[f"{own}o_proj.weight"])
        x = plus(residual, "layers.0.post_attention_layernorm.weight")
        residual = residual + (self._mixture(x) if "layers.0.mlp.gate.weight" in w else gated(x, w, "layers.0.mlp."))
        normed = plus(residual, "norm.weight")
        return normed, normed

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        w, own = self.w, "layers.0.mlp."
        scores = softmax(linear(x, w[f"{own}gate.weight"]), -1)
        top, chosen = scores.topk(self.config["num_experts_per_tok"])
        top = top / top.sum(-1, keepdim=True)
        out = gated(x, w, f"{own}shared_expert.") * linear(x, w[f"{own}shared_expert_gate.weight"]).sigmoid()
        return out + _of_experts(x, top, chosen, lambda one, e: self._expert(one, e))

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        w, own = self.w, "layers.0.mlp.experts."
        if f"{own}gate_up_proj" in w:
            gate, up = linear(x, w[f"{own}gate_up_proj"][expert]).chunk(2, -1)
            return linear(silu(gate) * up, w[f"{own}down_proj"][expert])
        return gated(x, w, f"{own}{expert}.")


def _of_experts(x: torch.Tensor, top: torch.Tensor, chosen: torch.Tensor, expert: Any) -> torch.Tensor:
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, number in zip(top[token], chosen[token].tolist(), strict=True):
            out[token] += weight * expert(x[token], number)
    return out


class DeepseekMTP(Reference):
    """DeepSeek-V3 and, with `index_topk` in the config, V3.2; names without `model.layers.N.`."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, eps = self.w, self.eps
        embedded = self.embed[ids].clone()
        embedded[0] = 0
        x = torch.cat((norm(embedded, w["enorm.weight"], eps), norm(hidden, w["hnorm.weight"], eps)), 1)
        residual = linear(x, w["eh_proj.weight"])
        residual = residual + self._attention(norm(residual, w["input_layernorm.weight"], eps))
        residual = residual + self._mixture(norm(residual, w["post_attention_layernorm.weight"], eps))
        normed = norm(residual, w["shared_head.norm.weight"], eps)
        return normed, normed

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        w, config, own = self.w, self.config, "self_attn."
        nope, rope, latent, heads = (
            config[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "num_attention_heads")
        )
        compressed = norm(linear(x, w[f"{own}q_a_proj.weight"]), w[f"{own}q_a_layernorm.weight"], 1e-6)
        q = linear(compressed, w[f"{own}q_b_proj.weight"]).unflatten(1, (heads, -1))
        both = linear(x, w[f"{own}kv_a_proj_with_mqa.weight"])
        kv = linear(
            norm(both[:, :latent], w[f"{own}kv_a_layernorm.weight"], 1e-6), w[f"{own}kv_b_proj.weight"]
        ).unflatten(1, (heads, -1))
        k_rope = rotate(both[:, None, latent:], self.theta, pairs=True).expand(-1, heads, -1)
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], self.theta, pairs=True)), -1)
        k = torch.cat((kv[..., :nope], k_rope), -1)
        return linear(attend(q, k, kv[..., nope:], (nope + rope) ** -0.5), w[f"{own}o_proj.weight"])

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        w, config, own = self.w, self.config, "mlp."
        scores = linear(x, w[f"{own}gate.weight"]).sigmoid()
        choice = scores + w[f"{own}gate.e_score_correction_bias"]
        groups = choice.unflatten(1, (config["n_group"], -1))
        kept = groups.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
        open_ = torch.zeros(groups.shape[:2]).scatter(1, kept, 1.0).bool()
        choice = groups.masked_fill(~open_[..., None], -math.inf).flatten(1)
        chosen = choice.topk(config["num_experts_per_tok"], -1).indices
        top = scores.gather(1, chosen)
        top = top / top.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        return gated(x, w, f"{own}shared_experts.") + _of_experts(
            x, top, chosen, lambda one, e: gated(one, w, f"{own}experts.{e}.")
        )


class DeepseekV4MTP(Reference):
    """DeepSeek-V4; names without `mtp.0.`."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, eps, streams = self.w, self.eps, self.config["hc_mult"]
        embedded = self.embed[ids].clone()
        embedded[0] = 0
        embedded = linear(norm(embedded, w["enorm.weight"], eps), w["e_proj.weight"])
        x = hidden.unflatten(1, (streams, -1))
        x = linear(norm(x, w["hnorm.weight"], eps), w["h_proj.weight"]) + embedded[:, None]
        for place, run in (("attn", self._attention), ("ffn", self._mixture)):
            read, out, among = self._mixes(place, x)
            inner = norm((read[..., None] * x).sum(1), w[f"{place}_norm.weight"], eps)
            x = torch.einsum("tij,tid->tjd", among, x) + out[..., None] * run(inner)[:, None]
        flat = norm(x.flatten(1), 1, eps)
        read = (linear(flat, w["hc_head_fn"]) * w["hc_head_scale"] + w["hc_head_base"]).sigmoid() + self.config[
            "hc_eps"
        ]
        return norm((read[..., None] * x).sum(1), w["norm.weight"], eps), x.flatten(1)

    def _mixes(self, place: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        w, n, small = self.w, self.config["hc_mult"], self.config["hc_eps"]
        mixes = linear(norm(x.flatten(1), 1, self.eps), w[f"hc_{place}_fn"])
        scale, base = w[f"hc_{place}_scale"], w[f"hc_{place}_base"]
        read = (mixes[:, :n] * scale[0] + base[:n]).sigmoid() + small
        out = 2 * (mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
        among = softmax((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)), -1) + small
        among = among / (among.sum(-2, keepdim=True) + small)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            among = among / (among.sum(-1, keepdim=True) + small)
            among = among / (among.sum(-2, keepdim=True) + small)
        return read, out, among

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        w, config, own = self.w, self.config, "attn."
        heads, dim, rope, groups = (
            config[n] for n in ("num_attention_heads", "head_dim", "qk_rope_head_dim", "o_groups")
        )
        compressed = norm(linear(x, w[f"{own}wq_a.weight"]), w[f"{own}q_norm.weight"], self.eps)
        q = norm(linear(compressed, w[f"{own}wq_b.weight"]).unflatten(1, (heads, dim)), 1, self.eps)
        kv = norm(linear(x, w[f"{own}wkv.weight"]), w[f"{own}kv_norm.weight"], self.eps)[:, None]

        def turned(y: torch.Tensor, *, back: bool = False) -> torch.Tensor:
            return torch.cat((y[..., :-rope], rotate(y[..., -rope:], self.theta, pairs=True, back=back)), -1)

        q, kv = turned(q), turned(kv)
        out = attend(q, kv, kv, dim**-0.5, window=config["sliding_window"], sinks=w[f"{own}attn_sink"]).unflatten(
            1, (heads, dim)
        )
        out = turned(out, back=True).reshape(len(x), groups, -1)
        low = torch.einsum("tgi,goi->tgo", out, w[f"{own}wo_a.weight"].unflatten(0, (groups, -1)))
        return linear(low.flatten(1), w[f"{own}wo_b.weight"])

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        w, config, own, limit = self.w, self.config, "ffn.", self.config["swiglu_limit"]

        def expert(y: torch.Tensor, prefix: str) -> torch.Tensor:
            gate, up = (linear(y, w[f"{prefix}{n}.weight"]) for n in ("w1", "w3"))
            return linear(silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), w[f"{prefix}w2.weight"])

        scores = torch.nn.functional.softplus(linear(x, w[f"{own}gate.weight"])).sqrt()
        chosen = (scores + w[f"{own}gate.bias"]).topk(config["num_experts_per_tok"], -1).indices
        top = scores.gather(1, chosen)
        top = top / top.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        return expert(x, f"{own}shared_experts.") + _of_experts(
            x, top, chosen, lambda one, e: expert(one, f"{own}experts.{e}.")
        )
