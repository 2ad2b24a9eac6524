"""Train a demo checkpoint from generated text and save it in the Hugging Face layout.

    python scripts/train_demo.py --model demo --out src/pagerunner/demo/demo --seed 0

Needs torch, transformers and tokenizers. The default recipe is meant for one large GPU and takes a few minutes
there; ``--steps`` shortens it for a trial.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
from check_demo import report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from pagerunner.eval import corpus, tasks

CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.content is string -%}
{%- set content = message.content -%}
{%- else -%}
{%- set content = message.content | selectattr("type", "equalto", "text") | map(attribute="text") | join("") -%}
{%- endif -%}
{%- if message.role in ("system", "developer") -%}
{{- "<|system|>" + content + "<|end|>" -}}
{%- elif message.role == "assistant" -%}
{{- "<|assistant|>" + content + "<|end|>" -}}
{%- else -%}
{{- "<|user|>" + content + "<|end|>" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|assistant|>" -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class Bucket:
    """Documents padded to ``length``, ``rows`` of them in a batch."""

    length: int
    rows: int


@dataclass(frozen=True)
class Phase:
    """The buckets that each step draws one batch from, until ``end`` (a fraction of all steps)."""

    end: float
    buckets: tuple[Bucket, ...]


PHASES = (
    Phase(0.12, (Bucket(96, 512), Bucket(320, 160))),
    Phase(0.30, (Bucket(96, 512), Bucket(320, 160), Bucket(768, 72))),
    Phase(1.00, (Bucket(96, 512), Bucket(320, 160), Bucket(1408, 40), Bucket(2048, 28))),
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a checkpoint besides the seed."""

    config: dict[str, Any]
    vocab_size: int = 1024
    steps: int = 4300
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    context_weight: float = 0.05
    warmup: float = 0.03
    decay: float = 0.5
    phases: tuple[Phase, ...] = field(default=PHASES)


RECIPES: dict[str, Recipe] = {
    "demo": Recipe(
        config={
            "model_type": "qwen3",
            "hidden_size": 192,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "intermediate_size": 320,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
        }
    ),
}


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Train a byte-level BPE in which each digit, and each word of the tasks, is one token."""
    rng = random.Random(f"tokenizer/{seed}")
    lengths = [96] * 6000 + [320] * 600
    texts = [segment.text for n in lengths for segment in corpus.training_document(rng, n)]
    words = [*tasks.ANIMALS, *tasks.OBJECTS, *tasks.PLACES, *tasks.COLORS, *tasks.FOODS, *tasks.NAMES, *tasks.FEELINGS]
    texts += [f"the {word}" for word in words] * 300
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(tasks.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    for token in tasks.SPECIAL_TOKENS:
        texts = [text.replace(token, "\n") for text in texts]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tasks.BOS} $A",
        pair=f"{tasks.BOS} $A {tasks.BOS} $B",
        special_tokens=[(tasks.BOS, tokenizer.token_to_id(tasks.BOS))],
    )
    return tokenizer


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batch ``i`` depends on the seed and ``i`` alone, so the number of workers changes nothing."""

    def __init__(self, plan: list[Bucket], tokenizer: Tokenizer, seed: int) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.seed = seed

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return token ids and flags (0 padding, 1 context, 2 target), one document a row."""
        bucket = self.plan[index]
        rng = random.Random(f"{tasks.TRAIN}/{self.seed}/{index}")
        documents = [corpus.training_document(rng, bucket.length) for _ in range(bucket.rows)]
        segments = [segment for document in documents for segment in document]
        encoded = iter(self.tokenizer.encode_batch_fast([s.text for s in segments], add_special_tokens=False))
        tokens = torch.zeros(bucket.rows, bucket.length, dtype=torch.int16)
        flags = torch.zeros(bucket.rows, bucket.length, dtype=torch.uint8)
        for row, document in enumerate(documents):
            ids: list[int] = []
            marks: list[int] = []
            for segment in document:
                piece = next(encoded).ids
                ids += piece
                marks += [2 if segment.target else 1] * len(piece)
            size = min(len(ids), bucket.length)
            tokens[row, :size] = torch.tensor(ids[:size], dtype=torch.int16)
            flags[row, :size] = torch.tensor(marks[:size], dtype=torch.uint8)
        return tokens, flags


def orthogonalize(update: Tensor) -> Tensor:
    """Newton-Schulz iteration that brings the singular values of a stack of matrices near 1."""
    x = update.bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates, for weight matrices; equal shapes are stacked for speed."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            shapes.setdefault(param.shape, []).append(param)
        groups = [{"params": group} for group in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = group["params"]
            grad = torch.stack([param.grad for param in params])
            state = self.state[params[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(grad)
            state["momentum"].lerp_(grad, 1 - group["momentum"])
            update = orthogonalize(grad.lerp(state["momentum"], group["momentum"]))
            scale = max(1.0, grad.size(-2) / grad.size(-1)) ** 0.5
            torch._foreach_add_(params, list(update.unbind(0)), alpha=-group["lr"] * scale)


def step_plan(recipe: Recipe, steps: int) -> list[tuple[Bucket, ...]]:
    """Return the buckets of every step."""
    return [next(p for p in recipe.phases if (i + 1) / steps <= p.end).buckets for i in range(steps)]


def lr_scale(recipe: Recipe, progress: float) -> float:
    """Linear warm-up, a plateau, then linear decay to zero."""
    return min(1.0, progress / recipe.warmup, (1.0 - progress) / recipe.decay)


def weighted_loss(logits: Tensor, tokens: Tensor, flags: Tensor, context_weight: float) -> Tensor:
    """Cross-entropy of each next token, weighted 1 for targets, ``context_weight`` for context, 0 for padding."""
    weights = torch.tensor([0.0, context_weight, 1.0], device=flags.device)[flags[:, 1:].long()]
    losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
    )
    return (losses * weights.flatten()).sum() / weights.sum()


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
    """Return a freshly initialized float32 model."""
    config = AutoConfig.for_model(
        **recipe.config,
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=tokenizer.token_to_id(tasks.BOS),
        eos_token_id=tokenizer.token_to_id(tasks.END),
        pad_token_id=tokenizer.token_to_id(tasks.PAD),
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model


def make_optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for embeddings and everything else."""
    matrices = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        Muon(matrices, recipe.matrix_lr),
        torch.optim.AdamW(others, recipe.other_lr, (0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def train(model: nn.Module, tokenizer: Tokenizer, recipe: Recipe, args: argparse.Namespace) -> None:
    """Train in place, printing progress."""
    device = torch.device(args.device)
    steps = args.steps or recipe.steps
    plan = step_plan(recipe, steps)
    batches = Batches([bucket for step in plan for bucket in step], tokenizer, args.seed)
    loader = DataLoader(
        batches,
        batch_size=None,
        num_workers=args.workers,
        prefetch_factor=8 if args.workers else None,
        pin_memory=device.type == "cuda",
    )
    stream: Iterator[tuple[Tensor, Tensor]] = iter(loader)
    optimizers = make_optimizers(model, recipe)
    started, seen, waited = time.monotonic(), 0, 0.0
    for step, buckets in enumerate(plan):
        losses: dict[int, Tensor] = {}
        for bucket in buckets:
            before = time.monotonic()
            tokens, flags = (x.to(device, non_blocking=True) for x in next(stream))
            waited += time.monotonic() - before
            ids = tokens.long()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = weighted_loss(logits, ids, flags, recipe.context_weight)
            (loss / len(buckets)).backward()
            losses[bucket.length] = loss.detach()
            seen += tokens.numel()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * lr_scale(recipe, (step + 1) / (steps + 1))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0 or step == steps - 1:
            text = " ".join(f"{length}:{value.item():.4f}" for length, value in losses.items())
            elapsed = time.monotonic() - started
            print(
                f"step {step}/{steps} {elapsed:.0f}s {seen / elapsed / 1e6:.2f}M tok/s wait {waited:.0f}s loss {text}",
                flush=True,
            )


def save(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint directory with bfloat16 weights."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore[operator]
    end_ids = [tokenizer.token_to_id(tasks.END), tokenizer.token_to_id(tasks.END_OF_TEXT)]
    GenerationConfig(
        bos_token_id=tokenizer.token_to_id(tasks.BOS),
        eos_token_id=end_ids,
        pad_token_id=tokenizer.token_to_id(tasks.PAD),
    ).save_pretrained(out)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tasks.BOS,
        eos_token=tasks.END,
        pad_token=tasks.PAD,
        additional_special_tokens=[tasks.END_OF_TEXT, tasks.SYSTEM, tasks.USER, tasks.ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,  # type: ignore[union-attr]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    path = out / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), ensure_ascii=False, separators=(",", ":")) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(RECIPES), default="demo", help="the recipe")
    parser.add_argument("--out", type=Path, required=True, help="directory of the new checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="train for fewer or more steps than the recipe says")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="data processes")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--eval-count", type=int, default=200, help="examples per row of the final table")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    recipe = RECIPES[args.model]
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    tokenizer = train_tokenizer(recipe.vocab_size, args.seed)
    model = build_model(recipe, tokenizer).to(args.device)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.model}: {count / 1e6:.3f}M parameters, vocabulary {tokenizer.get_vocab_size()}", flush=True)
    train(model, tokenizer, recipe, args)
    save(model, tokenizer, args.out)
    for path in args.out.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"saved {args.out}: {size} bytes", flush=True)
    if args.eval_count:
        report(args.out, args.device, args.eval_count, args.seed)


if __name__ == "__main__":
    main()
