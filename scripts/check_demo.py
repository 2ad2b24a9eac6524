"""Measure a checkpoint on the eval tasks with plain transformers, healthy and with damaged memory of each kind.

python scripts/check_demo.py src/pagerunner/demo/demo --count 100
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
from torch import Tensor
from transformers import AutoTokenizer

from pagerunner.eval.tasks import RECALL_DISTANCES, TASKS, Example, make_examples
from windowed import layer_kinds, load_model

PAGE = 16
FAULTS = ("zeros", "noise", "other page")
CacheHook = Callable[[Any, Sequence[int]], None]


def load(path: Path | str, device: str = "cpu") -> tuple[Any, Any]:
    """Return the model in float32 and the tokenizer."""
    model = load_model(path, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(path)


def damage_pages(
    fault: str, fraction: float, seed: int, layers: Sequence[int] | None = None, window: int = 0
) -> CacheHook:
    """Return a hook that overwrites ``fraction`` of each row's pages, at least one, in a left-padded cache.

    Of the ``layers`` (all of them if not given), and of the pages that a ``window`` of so many tokens still reads. A prompt
    of one page has no other page to be copied from; that fault leaves it alone.
    """
    rng = random.Random(f"pages/{seed}")

    def hook(cache: Any, lengths: Sequence[int]) -> None:
        width = max(lengths)
        generator = torch.Generator().manual_seed(seed)
        chosen = cache.layers if layers is None else [cache.layers[index] for index in layers]
        for row, length in enumerate(lengths):
            start = width - length
            pages = range(max(0, length - window) // PAGE if window else 0, -(-length // PAGE))
            for page in rng.sample(pages, max(1, round(fraction * len(pages)))):
                source = rng.choice([other for other in range(length // PAGE) if other != page] or [page])
                low, high = start + page * PAGE, min(start + (page + 1) * PAGE, width)
                copy = slice(start + source * PAGE, start + source * PAGE + high - low)
                for layer in chosen:
                    for states in (layer.keys, layer.values):
                        damage(states[row], slice(low, high), copy, start, fault, generator)

    return hook


def damage_states(fault: str, fraction: float, seed: int, layers: Sequence[int]) -> CacheHook:
    """Return a hook that overwrites the recurrent states of ``fraction`` of the rows; each row has one page of them."""
    rng = random.Random(f"states/{seed}")

    def hook(cache: Any, lengths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = rng.sample(range(len(lengths)), max(1, round(fraction * len(lengths))))
        for index in layers:
            for states in (cache.layers[index].conv_states[0], cache.layers[index].recurrent_states[0]):
                healthy = states.clone()
                for row in rows:
                    if fault == "zeros":
                        states[row] = 0.0
                    elif fault == "noise":
                        noise = torch.randn(states[row].shape, generator=generator)
                        states[row] = noise.to(states) * healthy.std()
                    else:
                        states[row] = healthy[row - 1]

    return hook


def damage_group(model: Any, kind: str, fault: str, fraction: float, seed: int) -> CacheHook:
    """Return a hook that damages the memory of the layers of one kind."""
    layers = [index for index, found in enumerate(layer_kinds(model)) if found == kind]
    if kind == "linear_attention":
        return damage_states(fault, fraction, seed, layers)
    window = model.config.sliding_window if kind == "sliding_attention" else 0
    return damage_pages(fault, fraction, seed, layers, window)


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
    """Print a table of accuracies: healthy, and by kind of memory with a tenth of the pages (half the states) damaged.

    Of a model with one kind of memory only recall is measured damaged.
    """
    model, tokenizer = load(path, device)
    kinds = list(dict.fromkeys(layer_kinds(model)))
    print(f"{'task':<12}{'healthy':>10}  {'damaged':<18}" + "".join(f"{fault:>12}" for fault in FAULTS), flush=True)
    for task in TASKS:
        for distance in RECALL_DISTANCES if task == "recall" else (None,):
            examples = make_examples(task, count, seed, distance)
            row = f"{task + ('' if distance is None else f' {distance}'):<12}"
            row += f"{accuracy(model, tokenizer, examples):>10.3f}  "
            for kind in kinds if task == "recall" or len(kinds) > 1 else ():
                fraction = 0.5 if kind == "linear_attention" else 0.1
                hooks = [damage_group(model, kind, fault, fraction, seed) for fault in FAULTS]
                scores = "".join(f"{accuracy(model, tokenizer, examples, hook):>12.3f}" for hook in hooks)
                print(f"{row}{kind:<18}{scores}", flush=True)
                row = " " * 24
            if row.strip():
                print(row, flush=True)


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
