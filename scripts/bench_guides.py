"""What masks of drafts take: microseconds from a sequence's token to its next mask, and for each draft to the mask behind it. On a CPU, no model.

    python scripts/bench_guides.py [--size 151936] [--drafts 3]

Tokens are random words of the letters of English, half with a space before them: as many as the vocabulary has.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from llguidance import LLMatcher

from pagerunner.engine.structured_output.grammar import Guides, guide_tokenizer
from pagerunner.types import EngineRequest, Grammar, SamplingParams

LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
TEXT = {"type": "string", "maxLength": 60}
SCHEMA = {
    "type": "object",
    "properties": {"name": TEXT, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["red", "green"]}}, "note": {"type": "string"}},
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
}  # fmt: skip
CASES = {
    "JSON schema": (
        LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)),
        '{"name": "annet seril", "age": 371, "tags": ["red", "green", "red"], "note": "tolen ansi rent oil"}',
    ),
    "a choice of three": (LLMatcher.grammar_from_regex("positive|negative|neutral and more"), "neutral and more"),
    "regex [a-z ,]{10,200}": (
        LLMatcher.grammar_from_regex("(yes|no), because [a-z ,]{10,200}"),
        "yes, because the rain on the hill was not there, and so on",
    ),
}


def tokenizer_json(size: int) -> tuple[str, int]:
    """A byte-level tokenizer, and its token of the end."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    rng, vocabulary = random.Random(1), {shown[byte]: byte for byte in range(256)}
    while len(vocabulary) < size - 1:
        word = "".join(rng.choices(LETTERS, weights=range(52, 0, -2), k=rng.randint(2, 9)))
        vocabulary.setdefault(rng.choice(("", shown[32])) + rng.choice((word, word.capitalize())), len(vocabulary))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": len(vocabulary), "content": "<|end|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    made: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end | flags], "normalizer": None, "pre_tokenizer": level,
        "post_processor": None, "decoder": level, "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    return json.dumps(made), len(vocabulary)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=151_936, help="tokens of the vocabulary")
    parser.add_argument("--drafts", type=int, default=3, help="drafts of each row, all of which are right")
    args = parser.parse_args()
    text, end = tokenizer_json(args.size)
    tokenizer = guide_tokenizer(text, args.size, [end])
    guides = Guides(lambda: tokenizer)
    print(
        f"{'grammar':24}{'next mask':>12}{'each draft':>12}   us, medians of all places of the text, {args.drafts} drafts"
    )
    for name, (grammar, answer) in CASES.items():
        request = EngineRequest(
            request_id="", prompt_token_ids=[0], params=SamplingParams(), seed=0, max_tokens=999, grammar=Grammar(grammar)
        )  # fmt: skip
        tokens, known, ahead = tokenizer.tokenize_str(answer), list[float](), list[float]()
        for _ in range(10):
            guide = guides(request)
            guide.wait(60.0)
            assert guide.error is None, guide.error
            for at in range(len(tokens) - 1 - args.drafts):
                began = time.perf_counter()
                guide.advance(tokens[at : at + 1], tokens[at + 1 : at + 1 + args.drafts])
                guide.wait(60.0)
                known.append(time.perf_counter() - began)
                guide.wait(60.0, ahead=True)
                if (more := len(guide.masks) - 1) > 0:
                    ahead.append((time.perf_counter() - began - known[-1]) / more)
        print(f"{name:24}{statistics.median(known) * 1e6:12.0f}{statistics.median(ahead or [0]) * 1e6:12.0f}")


if __name__ == "__main__":
    main()
