"""Train a drafter for a demo checkpoint from generated text, and save it as published drafters are.

    python scripts/train_drafter.py --model demo --out src/pagerunner/demo/demo-eagle3 --seconds 900
    python scripts/train_drafter.py --model demo-hybrid --out src/pagerunner/demo/demo-hybrid --seconds 900

For `demo` it is an EAGLE-3 head in a directory of its own. For `demo-hybrid` it is a multi-token prediction module, whose tensors are added to the
model's checkpoint.

A drafter learns the target's own probabilities of the token after next. It learns several passes at once, as it drafts: in pass i it gets its own hidden
states of pass i - 1, and attends to what the first pass left of all tokens but the last i, and to its own passes after that. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu, softmax

from gated_delta import fast_layers
from pagerunner.demo import demo_path
from train_demo import NO_PADDING, Batches, Bucket, Muon
from windowed import load_model

PASSES = 3
PASS_WEIGHT = 0.8
"""How much a pass counts of the one before."""
BUCKETS = (Bucket(96, 16), Bucket(320, 4))
AUX_LAYERS = [1, 3, 4]
HEADS, KV_HEADS, HEAD_DIM, INNER, DRAFT_VOCAB = 4, 2, 32, 256, 512
EPS, THETA = 1e-6, 10000.0


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """The root-mean-square norm."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotate(x: Tensor, place_T: Tensor, size: int) -> Tensor:
    """Rotate the first `size` elements of heads [B, T, H, d] by their places."""
    angle = place_T[:, None, None] * THETA ** (-torch.arange(0, size, 2, device=x.device) / size)
    first, second = x[..., :size].chunk(2, -1)
    turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.cat((*turned, x[..., size:]), -1)


class Drafter(nn.Module):
    """What both have: a layer whose passes attend to each other. Names of parameters have `/` where a checkpoint's have dots."""

    rotary_dim = HEAD_DIM
    heads, kv_heads = HEADS, KV_HEADS

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.table = target.get_input_embeddings().weight.detach()  # type: ignore[operator]
        self.weights = nn.ParameterDict()

    def matrix(self, name: str, outputs: int, inputs: int) -> None:
        """A new matrix."""
        self.weights[name.replace(".", "/")] = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def ones(self, name: str, size: int) -> None:
        """A new norm's weight."""
        self.weights[name.replace(".", "/")] = nn.Parameter(torch.ones(size))

    def of(self, name: str) -> Tensor:
        """A parameter."""
        return self.weights[f"{name}.weight".replace(".", "/")]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of a pass, [B, T, H * d]. `earlier` are keys and values of the passes before; this one's are appended."""
        group, scale, count = self.heads // self.kv_heads, HEAD_DIM**-0.5, query.shape[1]
        place = torch.arange(count, device=query.device)
        number = len(earlier)
        # in pass i all but the first count from i places further on
        query, key = rotate(query, place + number, self.rotary_dim), rotate(key, place + number, self.rotary_dim)
        earlier.append((key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)))
        first_key, first_value = earlier[0]
        scores = torch.einsum("bthd,bshd->bhts", query, first_key) * scale
        scores = scores.masked_fill(place[None, :] > place[:, None], -math.inf)
        own = [torch.einsum("bthd,bthd->bht", query, one)[..., None] * scale for one, _ in earlier[1:]]
        weights = softmax(torch.cat((scores, *own), -1), -1)
        out = torch.einsum("bhts,bshd->bthd", weights[..., :count], first_value)
        for step, (_, values) in enumerate(earlier[1:]):
            out = out + weights[..., count + step].transpose(1, 2)[..., None] * values
        return out.flatten(2)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their names in a checkpoint."""
        return {
            name.replace("/", "."): value.detach().to(torch.bfloat16).contiguous()
            for name, value in self.weights.items()
        }


class Eagle3(Drafter):
    """For `demo`: hidden states after AUX_LAYERS, and a vocabulary of the tokens that are seen most."""

    def __init__(self, target: nn.Module, kept: Tensor) -> None:
        super().__init__(target)
        hidden, self.kept = self.table.shape[1], kept
        self.matrix("fc.weight", hidden, len(AUX_LAYERS) * hidden)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.ones(f"midlayer.{name}.weight", hidden)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.matrix(f"midlayer.self_attn.{name}_proj.weight", heads * HEAD_DIM, 2 * hidden)
        self.matrix("midlayer.self_attn.o_proj.weight", hidden, HEADS * HEAD_DIM)
        for name in ("gate", "up"):
            self.matrix(f"midlayer.mlp.{name}_proj.weight", INNER, hidden)
        self.matrix("midlayer.mlp.down_proj.weight", hidden, INNER)
        self.ones("norm.weight", hidden)
        self.matrix("lm_head.weight", len(kept), hidden)
        with torch.no_grad():
            self.of("lm_head").copy_(self.table[kept])

    def start(self, states: tuple[Tensor, ...], final: Tensor) -> Tensor:
        """What the first pass gets of the target."""
        return linear(torch.cat([states[layer] for layer in AUX_LAYERS], -1), self.of("fc"))

    def forward(self, hidden: Tensor, ids: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """A pass: logits of the own vocabulary, and hidden states."""
        own = "midlayer.self_attn."
        x = torch.cat(
            (
                norm(embedding(ids, self.table), self.of("midlayer.input_layernorm")),
                norm(hidden, self.of("midlayer.hidden_norm")),
            ),
            -1,
        )
        q, k, v = (linear(x, self.of(f"{own}{name}_proj")).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv")
        y = hidden + linear(self.attend(q, k, v, earlier), self.of(f"{own}o_proj"))
        x = norm(y, self.of("midlayer.post_attention_layernorm"))
        y = y + linear(
            silu(linear(x, self.of("midlayer.mlp.gate_proj"))) * linear(x, self.of("midlayer.mlp.up_proj")),
            self.of("midlayer.mlp.down_proj"),
        )
        return linear(norm(y, self.of("norm")), self.of("lm_head")), y

    def save(self, out: Path) -> None:
        """Write the directory."""
        out.mkdir(parents=True, exist_ok=True)
        vocab = self.table.shape[0]
        held = torch.zeros(vocab, dtype=torch.bool)
        held[self.kept] = True
        save_file(
            self.tensors() | {"d2t": self.kept - torch.arange(len(self.kept)), "t2d": held},
            out / "model.safetensors",
            metadata={"format": "pt"},
        )
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.table.shape[1],
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": INNER,
            "vocab_size": vocab,
            "draft_vocab_size": len(self.kept),
            "max_position_embeddings": 2048,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
            "dtype": "bfloat16",
        }
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class Module(Drafter):
    """For `demo-hybrid`: Qwen3.5's multi-token prediction, with the target's embedding and output weights."""

    heads, kv_heads, rotary_dim = 6, 2, HEAD_DIM // 2

    def __init__(self, target: nn.Module, kept: Tensor) -> None:
        super().__init__(target)
        hidden = self.table.shape[1]
        self.kept = torch.arange(self.table.shape[0])
        own = "layers.0.self_attn."
        self.matrix("fc.weight", hidden, 2 * hidden)
        self.matrix(f"{own}q_proj.weight", 2 * self.heads * HEAD_DIM, hidden)
        for name in "kv":
            self.matrix(f"{own}{name}_proj.weight", self.kv_heads * HEAD_DIM, hidden)
        self.matrix(f"{own}o_proj.weight", hidden, self.heads * HEAD_DIM)
        for name in ("q_norm", "k_norm"):
            self.ones(f"{own}{name}.weight", HEAD_DIM)
        for name in ("gate", "up"):
            self.matrix(f"layers.0.mlp.{name}_proj.weight", INNER, hidden)
        self.matrix("layers.0.mlp.down_proj.weight", hidden, INNER)
        for name in (
            "pre_fc_norm_embedding",
            "pre_fc_norm_hidden",
            "layers.0.input_layernorm",
            "layers.0.post_attention_layernorm",
            "norm",
        ):
            self.ones(f"{name}.weight", hidden)

    def start(self, states: tuple[Tensor, ...], final: Tensor) -> Tensor:
        """See Eagle3."""
        return final

    def forward(self, hidden: Tensor, ids: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """See Eagle3."""
        own = "layers.0.self_attn."
        embedded = norm(embedding(ids, self.table), self.of("pre_fc_norm_embedding"))
        y = linear(torch.cat((embedded, norm(hidden, self.of("pre_fc_norm_hidden"))), -1), self.of("fc"))
        x = norm(y, self.of("layers.0.input_layernorm"))
        q, gate = linear(x, self.of(f"{own}q_proj")).unflatten(-1, (-1, 2 * HEAD_DIM)).chunk(2, -1)
        k, v = (linear(x, self.of(f"{own}{name}_proj")).unflatten(-1, (-1, HEAD_DIM)) for name in "kv")
        q, k = norm(q, self.of(f"{own}q_norm")), norm(k, self.of(f"{own}k_norm"))
        y = y + linear(self.attend(q, k, v, earlier) * gate.flatten(2).sigmoid(), self.of(f"{own}o_proj"))
        x = norm(y, self.of("layers.0.post_attention_layernorm"))
        y = y + linear(
            silu(linear(x, self.of("layers.0.mlp.gate_proj"))) * linear(x, self.of("layers.0.mlp.up_proj")),
            self.of("layers.0.mlp.down_proj"),
        )
        x = norm(y, self.of("norm"))
        return linear(x, self.table), x

    def save(self, out: Path) -> None:
        """Add the tensors to the checkpoint. Norms are stored less one."""
        file = out / "model.safetensors"
        for value in self.weights.values():
            value.data -= float(value.dim() == 1)
        own = {f"mtp.{name}": value for name, value in self.tensors().items()}
        save_file({**load_file(file), **own}, file, metadata={"format": "pt"})
        config = json.loads((out / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
        (out / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")


def passes(drafter: Drafter, target: nn.Module, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Logits of each pass, and the target's for the same tokens: at place p for the token behind token p + 1."""
    with torch.no_grad(), fast_layers():
        found = target(input_ids=ids, attention_mask=NO_PADDING, use_cache=False, output_hidden_states=True)
    hidden = drafter.start(found.hidden_states, found.hidden_states[-1])[:, :-1]  # type: ignore[operator]
    wanted, tokens = found.logits[:, 1:].float(), ids[:, 1:]
    made: list[Tensor] = []
    earlier: list[tuple[Tensor, Tensor]] = []
    for number in range(PASSES):
        # pass i begins i places further on; its row t continues the first pass' row t
        logits, left = drafter(hidden, tokens[:, number:], earlier)
        made.append(logits)
        hidden = left[:, :-1]
        earlier[:] = [(key[:, :-1], value[:, :-1]) for key, value in earlier]
    return made, wanted


def most_seen(batches: Batches, count: int, size: int) -> Tensor:
    """The token ids that are seen most."""
    seen = torch.zeros(size, dtype=torch.long)
    for index in range(16):
        seen += torch.bincount(batches[index][0].long().flatten(), minlength=size)
    return seen.topk(count).indices.sort().values


def train(drafter: Drafter, target: nn.Module, batches: Batches, args: argparse.Namespace) -> None:
    """Train in place until the seconds have passed, printing how often a pass' best token is the target's."""
    matrices = [value for name, value in drafter.weights.items() if value.dim() == 2 and "lm_head" not in name]
    others = [value for name, value in drafter.weights.items() if value.dim() == 1 or "lm_head" in name]
    optimizers = [Muon(matrices, 0.02), torch.optim.AdamW(others, 2e-3, (0.9, 0.95), weight_decay=0.0)]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    started, agreed = time.monotonic(), torch.zeros(PASSES, 2)
    for index in range(len(batches)):
        progress = (time.monotonic() - started) / args.seconds
        if progress >= 1:
            break
        tokens, flags = batches[index]
        made, wanted = passes(drafter, target, tokens.long())
        loss = torch.zeros(())
        for number, logits in enumerate(made):
            goal = wanted[:, number:][..., drafter.kept]
            weight = torch.where(flags == 2, 1.0, torch.where(flags == 1, 0.1, 0.0))[:, 2 + number :]
            logits, goal = logits[:, :-1], goal[:, :-1]  # the last token's successor isn't there
            each = -(softmax(goal, -1) * logits.log_softmax(-1)).sum(-1)
            loss = loss + PASS_WEIGHT**number * (each * weight).sum() / weight.sum()
            best = drafter.kept[logits.argmax(-1)] == wanted[:, number:-1].argmax(-1)
            agreed[number] += torch.tensor([(best & (weight == 1)).sum(), (weight == 1).sum()])
        for value in drafter.weights.values():
            value.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        scale = min(1.0, progress / 0.02 + 0.01, 2.5 * (1 - progress))
        for optimizer, peak in zip((o for o in optimizers for _ in o.param_groups), peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
        for optimizer in optimizers:
            optimizer.step()
        if index % args.log_every == 0:
            shares = " ".join(f"{share:.3f}" for share in (agreed[:, 0] / agreed[:, 1].clamp(min=1)).tolist())
            print(
                f"batch {index} {time.monotonic() - started:.0f}s loss {loss.item():.3f} best token is the target's: {shares}",
                flush=True,
            )
            agreed.zero_()


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "demo-hybrid"), default="demo")
    parser.add_argument(
        "--out", type=Path, required=True, help="the head's directory, or that of the model's checkpoint"
    )
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    path = demo_path(args.model)
    target = load_model(path, dtype=torch.float32, attn_implementation="sdpa").eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    batches = Batches([BUCKETS[i % len(BUCKETS)] for i in range(1_000_000)], tokenizer, args.seed + 1000)
    kept = most_seen(batches, DRAFT_VOCAB, tokenizer.get_vocab_size())
    drafter = (Eagle3 if args.model == "demo" else Module)(target, kept)
    print(f"{sum(value.numel() for value in drafter.weights.values()) / 1e3:.0f} thousand parameters", flush=True)
    train(drafter, target, batches, args)
    drafter.save(args.out)


if __name__ == "__main__":
    main()
