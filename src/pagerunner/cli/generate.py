"""`pagerunner generate`: prompts in, text out, and a line that says what memory and time it took."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagerunner.cli.options import (
    TEXT_EXCLUDED,
    Parser,
    add_common_options,
    add_engine_options,
    add_sampling_options,
    checkpoint_of,
    parse_number,
    sampling_values,
)
from pagerunner.cli.session import note, open_llm, resolve_model, show_progress
from pagerunner.errors import ConfigError
from pagerunner.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pagerunner.memory.memory_plan import MemoryPlan

NOTHING = "(the model ended its text at once; `pagerunner chat` asks it as a question)"
_MARKUP = re.compile(r"<\|\w+\|>")


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser("pagerunner generate", "Complete prompts. Without a prompt, run a few that show what a model does.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete; - reads prompts from stdin")
    parser.add_argument("--model", help="model directory, hub name or a demo's (default: demo)")
    parser.add_argument("--n", type=parse_number, metavar="N", default=1, help="completions of each prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    add_sampling_options(parser, max_tokens=128)
    add_engine_options(parser, without=TEXT_EXCLUDED)
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Generate, print each prompt with its text, then the summary on stderr."""
    params = SamplingParams(**sampling_values(namespace))
    prompts = _read_prompts(namespace.prompts)
    if namespace.model is None and (given := next(filter(checkpoint_of, namespace.prompts), None)):
        found = checkpoint_of(given)
        what = "a model's directory" if Path(given).is_dir() else "a file of a model"
        raise ConfigError(f"{given} is {what}; name it with --model {found}.")
    args, demo = resolve_model(namespace)
    builtin = not prompts
    prompts = prompts or builtin_prompts(demo is not None)
    llm = open_llm(args, use_tqdm=show_progress(namespace))
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=show_progress(namespace))
    seconds = time.perf_counter() - started
    for output in outputs:
        print(json.dumps(_as_json(output), ensure_ascii=False) if namespace.json else _as_text(output, builtin))
    note(namespace, summary(outputs, seconds, llm.memory_plan))
    if (spec := llm.stats().spec) is not None:
        note(namespace, f"Drafts: {spec.mean_acceptance_length:.2f} tokens a step with drafts. {spec.text()}.")
    return 2 if any(output.error for output in outputs) else 0


def builtin_prompts(demo: bool) -> list[str]:
    """Prompts for a first look: the demo model's own tasks, or plain sentences for any other model."""
    if not demo:
        return ["The capital of France is", "Once upon a time,", "The three primary colours are"]
    from pagerunner.eval.tasks import chat_prompt, make_examples

    story = "Anna was hungry, so she ate some bread. Leo was lost, so he asked for help. Why did Leo do that?"
    questions = ["What is 127 + 58?", "Sort these numbers: 71, 12, 94, 38, 55.", story]
    recall = [make_examples("recall", 1, seed, distance)[0].prompt for seed, distance in ((1, 64), (2, 512))]
    return [*(chat_prompt(question) for question in questions), *recall]


def _read_prompts(words: Sequence[str]) -> list[str]:
    if list(words) != ["-"]:
        return list(words)
    prompts = [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not prompts:
        raise ConfigError("stdin holds no prompt; give one per line.")
    return prompts


def _as_text(output: RequestOutput, builtin: bool) -> str:
    prompt = output.prompt or ""
    lines = [_shortened(_MARKUP.sub("", prompt) if builtin else prompt)]
    lines += [f"  -> {' '.join(filter(None, (one.text.strip(), output.error))) or NOTHING}" for one in output.outputs]
    return "\n".join(lines) + "\n"


def _shortened(prompt: str) -> str:
    more = len(prompt) - 240
    return prompt if more <= 0 else f"{prompt[:120]} [... {more} characters ...] {prompt[-120:]}"


def _as_json(output: RequestOutput) -> dict[str, object]:
    return {
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
        "outputs": [
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            for completion in output.outputs
        ],
    }


def summary(outputs: Sequence[RequestOutput], seconds: float, plan: MemoryPlan) -> str:
    """One line: requests, tokens per second, prefix hits, and the pages these sequences fill of those there are."""
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return (
        f"{len(outputs)} prompt{'s' * (len(outputs) != 1)}, {prompt_tokens} prompt tokens ({cached} from the prefix cache), "
        f"{generated} generated in {seconds:.2f} s ({generated / max(seconds, 1e-9):.0f} tokens/s); "
        f"{_pages(outputs, plan)}"
    )


def _pages(outputs: Sequence[RequestOutput], plan: MemoryPlan) -> str:
    parts = []
    for index, group in enumerate(plan.groups):
        size = group.page_tokens
        filled = 0
        for output in outputs:
            prompt = len(output.prompt_token_ids)
            lengths = [prompt + len(completion.token_ids) for completion in output.outputs]
            # Siblings share the prompt's full pages, and a prefix hit shares those of an earlier request.
            shared = prompt // size * (len(lengths) - 1) + output.num_cached_tokens // size
            filled += sum(-(-length // size) for length in lengths) - shared
        parts.append(f"{filled} of {plan.num_pages(index)} pages of {size} tokens filled")
    return ", ".join(parts) + "."
