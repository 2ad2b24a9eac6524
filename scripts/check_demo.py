"""Measure a checkpoint on the eval tasks with plain transformers, healthy and with damaged KV pages.

python scripts/check_demo.py src/pagerunner/demo/demo --count 100
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagerunner.eval.tasks import RECALL_DISTANCES, TASKS, Example, make_examples

PAGE = 16
FAULTS = ("zeros", "noise", "other page")
CacheHook = Callable[[Any, Sequence[int]], None]


def load(path: Path | str, device: str = "cpu") -> tuple[Any, Any]:
    """Return the model in float32 and the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(path)


def damage_pages(fault: str, fraction: float, seed: int) -> CacheHook:
    """Return a hook that overwrites ``fraction`` of each row's pages in every layer of a left-padded cache."""
    rng = random.Random(f"pages/{seed}")

    def hook(cache: Any, lengths: Sequence[int]) -> None:
        width = max(lengths)
        generator = torch.Generator().manual_seed(seed)
        for row, length in enumerate(lengths):
            start = width - length
            pages = -(-length // PAGE)
            for page in rng.sample(range(pages), max(1, round(fraction * pages))):
                source = rng.choice([other for other in range(length // PAGE) if other != page])
                low, high = start + page * PAGE, min(start + (page + 1) * PAGE, width)
                copy = slice(start + source * PAGE, start + source * PAGE + high - low)
                for layer in cache.layers:
                    for states in (layer.keys, layer.values):
                        damage(states[row], slice(low, high), copy, start, fault, generator)

    return hook


def damage(states: Tensor, page: slice, copy: slice, start: int, fault: str, generator: torch.Generator) -> None:
    """Overwrite one page of one layer's keys or values, shape (heads, tokens, head_dim), in place."""
    if fault == "zeros":
        states[:, page] = 0.0
    elif fault == "noise":
        shape = states[:, page].shape
        states[:, page] = torch.randn(shape, generator=generator).to(states) * states[:, start:].std()
    else:
        states[:, page] = states[:, copy].clone()


@torch.inference_mode()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], limit: int, hook: CacheHook | None = None
) -> list[str]:
    """Decode greedily in one left-padded batch; ``hook`` may change the cache after the prompt."""
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    lengths = [len(ids) for ids in encoded]
    width = max(lengths)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded], device=model.device)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths], device=model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ends = torch.tensor(model.generation_config.eos_token_id, device=model.device).flatten()
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    if hook is not None:
        hook(output.past_key_values, lengths)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    written: list[Tensor] = []
    last = positions[:, -1:]
    for _ in range(limit):
        token = output.logits[:, -1].argmax(-1)
        done |= torch.isin(token, ends)
        written.append(torch.where(done, pad, token))
        if bool(done.all()):
            break
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
        last = last + 1
        output = model(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=last,
            past_key_values=output.past_key_values,
            use_cache=True,
        )
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in torch.stack(written, 1).tolist()]


def accuracy(
    model: Any, tokenizer: Any, examples: Sequence[Example], hook: CacheHook | None = None, batch: int = 64
) -> float:
    """Return the share of examples answered exactly."""
    right = 0
    for i in range(0, len(examples), batch):
        part = examples[i : i + batch]
        limit = 8 + max(len(tokenizer(example.answer)["input_ids"]) for example in part)
        answers = generate(model, tokenizer, [example.prompt for example in part], limit, hook)
        right += sum(answer == example.answer for answer, example in zip(answers, part, strict=True))
    return right / len(examples)


def report(path: Path | str, device: str, count: int, seed: int) -> None:
    """Print a table of accuracies; recall also with one page in ten damaged."""
    model, tokenizer = load(path, device)
    print(f"{'task':<12}{'healthy':>10}" + "".join(f"{fault:>12}" for fault in FAULTS), flush=True)
    for task in TASKS:
        for distance in RECALL_DISTANCES if task == "recall" else (None,):
            started = time.monotonic()
            examples = make_examples(task, count, seed, distance)
            row = f"{task + ('' if distance is None else f' {distance}'):<12}"
            row += f"{accuracy(model, tokenizer, examples):>10.3f}"
            if task == "recall":
                hooks = [damage_pages(fault, 0.1, seed) for fault in FAULTS]
                row += "".join(f"{accuracy(model, tokenizer, examples, hook):>12.3f}" for hook in hooks)
            print(f"{row}   {time.monotonic() - started:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    report(args.path, args.device, args.count, args.seed)


if __name__ == "__main__":
    main()
