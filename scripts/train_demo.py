"""Train a demo checkpoint from generated text and save it in the Hugging Face layout.

    python scripts/train_demo.py --model demo --out src/pagerunner/demo/demo --seed 0

The hybrid took two runs, because after the first it still mixed up owners in every twentieth story:

    python scripts/train_demo.py --model demo-hybrid --out first --seed 0
    python scripts/train_demo.py --model demo-hybrid-lessons --start first --out src/pagerunner/demo/demo-hybrid --seed 1

Needs torch, transformers and tokenizers. The recipes are meant for one large GPU and take a few minutes there (the
hybrid's 201 and 31 seconds on an H200); ``--steps`` shortens them for a trial.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

import demo_corpus as corpus
from check_demo import report
from gated_delta import fast_layers
from pagerunner.eval import tasks
from windowed import load_model, new_model, save_model

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
    """Documents padded to ``length``, ``rows`` of them in a batch; ``lesson`` for those about things that change hands."""

    length: int
    rows: int
    lesson: bool = False


@dataclass(frozen=True)
class Phase:
    """The buckets that each step draws one batch from, until ``end`` (a fraction of all steps)."""

    end: float
    buckets: tuple[Bucket, ...]


OPTIMIZER_SECONDS = 0.008
PHASES = (
    Phase(0.12, (Bucket(96, 512), Bucket(320, 160))),
    Phase(0.30, (Bucket(96, 512), Bucket(320, 160), Bucket(768, 72))),
    Phase(1.00, (Bucket(96, 512), Bucket(320, 160), Bucket(1408, 40), Bucket(2048, 28))),
)


_SHORT = (Bucket(96, 320), Bucket(320, 96))
HYBRID_PHASES = (
    Phase(0.12, _SHORT),
    Phase(0.50, (*_SHORT, Bucket(768, 40))),
    Phase(0.88, (*_SHORT, Bucket(1408, 24))),
    Phase(1.00, (*_SHORT, Bucket(1408, 24), Bucket(2048, 14))),
)
LESSON_PHASES = (Phase(1.00, (*_SHORT, Bucket(96, 192, lesson=True), Bucket(1408, 8))),)


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


HYBRID_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "sliding_attention", "full_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "mamba_ssm_dtype": "float32",
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": True,
}
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
    "demo-hybrid": Recipe(config=HYBRID_CONFIG, steps=2829, phases=HYBRID_PHASES),
    "demo-hybrid-lessons": Recipe(
        config=HYBRID_CONFIG, steps=442, matrix_lr=0.01, other_lr=1.5e-3, decay=0.7, phases=LESSON_PHASES
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
        make = corpus.giving_document if bucket.lesson else corpus.training_document
        documents = [make(rng, bucket.length) for _ in range(bucket.rows)]
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
    weights = (flags[:, 1:] == 1) * context_weight + (flags[:, 1:] == 2) * 1.0
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
    model: nn.Module = new_model(config, dtype=torch.float32, attn_implementation="sdpa")
    spread_decays(model)
    return model


@torch.no_grad()
def spread_decays(model: nn.Module) -> None:
    """Let recurrent heads start with memories of 1 to 1000 tokens; transformers' start forgets all within one."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            steps = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            parameter.copy_(steps + torch.log(-torch.expm1(-steps)))  # what softplus turns into `steps`


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


# transformers makes a mask where it records a graph, even for plain causal attention, unless it is told of none
NO_PADDING = dict.fromkeys(("full_attention", "sliding_attention", "linear_attention"))


class Pass:
    """Forward and backward of one bucket's batches, which adds to the gradients.

    On a GPU it is recorded once and replayed: kernels of so small a model take less time than launching them one by one.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, bucket: Bucket, device: torch.device) -> None:
        self.model, self.context_weight = model, recipe.context_weight
        self.tokens = torch.zeros(bucket.rows, bucket.length, dtype=torch.int16, device=device)
        self.flags = torch.ones(bucket.rows, bucket.length, dtype=torch.uint8, device=device)
        self.share = torch.zeros((), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.run()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.loss = self.run()

    def __call__(self, tokens: Tensor, flags: Tensor, share: float) -> Tensor:
        """The batch's loss, whose gradient counts `share`."""
        self.tokens.copy_(tokens, non_blocking=True)
        self.flags.copy_(flags, non_blocking=True)
        self.share.fill_(share)
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.loss.clone()

    def run(self) -> Tensor:
        """One pass over the batch in `tokens` and `flags`."""
        ids, kind = self.tokens.long(), self.tokens.device.type
        with fast_layers(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False):
            logits = self.model(input_ids=ids, attention_mask=NO_PADDING, use_cache=False).logits
        loss = weighted_loss(logits, ids, self.flags, self.context_weight)
        (loss * self.share).backward()
        return loss.detach()


def fitting_steps(recipe: Recipe, passes: dict[Bucket, Pass], seconds: float) -> int:
    """How many steps take about so many seconds, by a measurement of each bucket."""
    cost: dict[Bucket, float] = {}
    for bucket, run in passes.items():
        run(run.tokens, run.flags, 0.0).item()
        started = time.monotonic()
        for _ in range(4):
            loss = run(run.tokens, run.flags, 0.0)
        loss.item()  # waits for the device
        cost[bucket] = (time.monotonic() - started) / 4
    print(" ".join(f"{b.rows}x{b.length}: {1000 * s:.1f} ms" for b, s in cost.items()), flush=True)
    mean, begin = 0.0, 0.0
    for phase in recipe.phases:
        mean += (phase.end - begin) * (OPTIMIZER_SECONDS + sum(cost[bucket] for bucket in phase.buckets))
        begin = phase.end
    return int(seconds / mean)


def train(model: nn.Module, tokenizer: Tokenizer, recipe: Recipe, args: argparse.Namespace) -> None:
    """Train in place, printing progress."""
    device = torch.device(args.device)
    optimizers = make_optimizers(model, recipe)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    buckets_used = dict.fromkeys(bucket for phase in recipe.phases for bucket in phase.buckets)
    passes = {bucket: Pass(model, recipe, bucket, device) for bucket in buckets_used}
    steps = args.steps or recipe.steps
    if args.seconds:
        steps = fitting_steps(recipe, passes, args.seconds)
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
    started, seen, waited = time.monotonic(), 0, 0.0
    for step, buckets in enumerate(plan):
        losses: dict[Bucket, Tensor] = {}
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        for bucket in buckets:
            before = time.monotonic()
            tokens, flags = next(stream)
            waited += time.monotonic() - before
            losses[bucket] = passes[bucket](tokens, flags, 1 / len(buckets))
            seen += tokens.numel()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * lr_scale(recipe, (step + 1) / (steps + 1))
            optimizer.step()
        if args.save_every and (step + 1) % args.save_every == 0:
            save(copy.deepcopy(model), tokenizer, args.out)
        if step % args.log_every == 0 or step == steps - 1:
            if not all(math.isfinite(value.item()) for value in losses.values()):
                raise SystemExit(f"the loss is no longer finite at step {step}")
            text = " ".join(f"{b.length}{'*' * b.lesson}:{value.item():.4f}" for b, value in losses.items())
            elapsed = time.monotonic() - started
            print(
                f"step {step}/{steps} {elapsed:.0f}s {seen / elapsed / 1e6:.2f}M tok/s wait {waited:.0f}s loss {text}",
                flush=True,
            )


def save(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint directory with bfloat16 weights."""
    out.mkdir(parents=True, exist_ok=True)
    save_model(model.to(torch.bfloat16), out)  # type: ignore[operator]
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
    parser.add_argument(
        "--start", type=Path, metavar="DIR", help="go on with this checkpoint instead of random weights"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="train for fewer or more steps than the recipe says")
    parser.add_argument("--seconds", type=float, help="as many steps as take about so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="data processes")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="also save on the way")
    parser.add_argument("--eval-count", type=int, default=200, help="examples per row of the final table")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    recipe = RECIPES[args.model]
    torch.manual_seed(args.seed)
    if args.start is None:
        tokenizer = train_tokenizer(recipe.vocab_size, args.seed)
        model = build_model(recipe, tokenizer).to(args.device)
    else:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
        model = load_model(args.start, dtype=torch.float32, attn_implementation="sdpa").to(args.device)
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
