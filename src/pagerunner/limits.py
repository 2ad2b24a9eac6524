"""The one table of what a request may ask for.

Each limit is checked where a request enters (`server/`, `engine/frontend/input_processor.py`), and the client gets a
sentence. Limits of single requests are checked again when a `SamplingParams` or an `EngineRequest` is built or decoded. So
they hold in the core's process too, whatever a frontend let through.

`PAGERUNNER_LIMIT_<NAME>` in the environment changes a limit, for both processes: `PAGERUNNER_LIMIT_MAX_N=8`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

PREFIX = "PAGERUNNER_LIMIT_"


class Limit(NamedTuple):
    """One row: the constant's name here, its default, and what it limits."""

    name: str
    default: int
    what: str


TABLE: tuple[Limit, ...] = (
    Limit("MAX_N", 128, "answers to one prompt (`n`)"),
    Limit("MAX_PROMPTS_PER_CALL", 2_048, "answers of one call: prompts times `n`"),
    Limit("MAX_PROMPT_CHARS", 8_000_000, "characters of one prompt, and of one rendered conversation"),
    Limit("MAX_TOKENS", 2**31 - 1, "`max_tokens` and `min_tokens`; the model's length limits them further"),
    Limit("MAX_LOGPROBS", 20, "`logprobs`, `top_logprobs` and `prompt_logprobs`"),
    Limit("MAX_STOP_STRINGS", 64, "strings in `stop`"),
    Limit("MAX_STOP_STRING_CHARS", 1_024, "characters of one string in `stop` or `bad_words`"),
    Limit("MAX_STOP_CHARS", 16_384, "characters of all strings in `stop` together"),
    Limit("MAX_STOP_TOKEN_IDS", 1_024, "ids in `stop_token_ids`"),
    Limit("MAX_BAD_WORDS", 1_024, "strings in `bad_words`"),
    Limit("MAX_BAD_WORD_TOKENS", 16_384, "tokens of all `bad_words` together"),
    Limit("MAX_BAD_WORD_LENGTH", 128, "tokens of one of the `bad_words`"),
    Limit("MAX_LOGIT_BIAS", 1_024, "entries of `logit_bias`"),
    Limit("MAX_ALLOWED_TOKEN_IDS", 262_144, "ids in `allowed_token_ids`"),
    Limit("MAX_SALT_CHARS", 256, "characters of `cache_salt`"),
    Limit("MAX_GRAMMAR_CHARS", 262_144, "characters of a JSON schema, regular expression, list of choices or grammar"),
    Limit("MAX_CHOICES", 10_000, "entries of `structured_outputs.choice`"),
    Limit("MAX_GRAMMAR_SECONDS", 5, "seconds that a grammar may take to be compiled, and a token to be matched"),
    Limit("MAX_TOOLS", 512, "entries of `tools`"),
    Limit("MAX_TOOL_NAME_CHARS", 256, "characters of a tool's name"),
    Limit("MAX_MESSAGES", 4_096, "messages of one conversation"),
    Limit("MAX_QUEUED_REQUESTS", 16_384, "answers that wait for their first token, of all calls; more get status 429"),
    Limit("MAX_QUEUED_TOKENS", 33_554_432, "prompt tokens of answers that wait for their first token"),
    Limit("MAX_BODY_BYTES", 32 * 1024 * 1024, "bytes of a request's body"),
    Limit("MAX_BODIES_BYTES", 512 * 1024 * 1024, "bytes of all bodies that are being received"),
    Limit("MAX_BODY_VALUES", 2_000_000, "values of a request's body, counted by its commas"),
    Limit("MAX_HEADERS", 128, "headers of a request"),
    Limit("MAX_HEADER_BYTES", 64 * 1024, "bytes of a request's line and headers together"),
    Limit("MAX_CONNECTIONS", 16_384, "connections at once; the limit on open files may allow fewer"),
    Limit("HEADER_SECONDS", 30, "seconds that a client may take to send headers, or a body that is answered already"),
    Limit("BODY_SECONDS", 60, "seconds without a byte of a body that is not complete"),
    Limit("BODY_TOTAL_SECONDS", 300, "seconds that a client may take to send a body, in all"),
    Limit("TEMPLATE_SECONDS", 5, "seconds that a chat template may take for one conversation"),
    Limit("STALL_SECONDS", 120, "seconds that a step may take before /health fails and all stacks are logged"),
    Limit(
        "RANK_SECONDS",
        30,
        "seconds that a rank may be behind the others, or give no sign of life, before the engine ends",
    ),
    Limit("TEMPLATE_MEGABYTES", 512, "memory of the process that renders chat templates"),
)
FAULTS: list[str] = []
"""Sentences about environment variables that can't be understood; the engine doesn't start with one."""


def _read(limit: Limit) -> int:
    text = os.environ.get(f"{PREFIX}{limit.name}", "")
    if text == "":
        return limit.default
    if text.isascii() and text.isdigit() and 0 < int(text[:19]) < 2**31 and len(text) < 19:
        return int(text)
    FAULTS.append(f"{PREFIX}{limit.name} must be an integer from 1 to {2**31 - 1}, got {text[:80]!r}.")
    return limit.default


FAULTS += [
    f"{name} names no limit; there are {', '.join(limit.name for limit in TABLE)}."
    for name in os.environ
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in {limit.name for limit in TABLE}
]
_VALUES = {limit.name: _read(limit) for limit in TABLE}
MAX_N = _VALUES["MAX_N"]
MAX_PROMPTS_PER_CALL = _VALUES["MAX_PROMPTS_PER_CALL"]
MAX_PROMPT_CHARS = _VALUES["MAX_PROMPT_CHARS"]
MAX_TOKENS = _VALUES["MAX_TOKENS"]
MAX_LOGPROBS = _VALUES["MAX_LOGPROBS"]
MAX_STOP_STRINGS = _VALUES["MAX_STOP_STRINGS"]
MAX_STOP_STRING_CHARS = _VALUES["MAX_STOP_STRING_CHARS"]
MAX_STOP_CHARS = _VALUES["MAX_STOP_CHARS"]
MAX_STOP_TOKEN_IDS = _VALUES["MAX_STOP_TOKEN_IDS"]
MAX_BAD_WORDS = _VALUES["MAX_BAD_WORDS"]
MAX_BAD_WORD_TOKENS = _VALUES["MAX_BAD_WORD_TOKENS"]
MAX_BAD_WORD_LENGTH = _VALUES["MAX_BAD_WORD_LENGTH"]
MAX_LOGIT_BIAS = _VALUES["MAX_LOGIT_BIAS"]
MAX_ALLOWED_TOKEN_IDS = _VALUES["MAX_ALLOWED_TOKEN_IDS"]
MAX_SALT_CHARS = _VALUES["MAX_SALT_CHARS"]
MAX_GRAMMAR_CHARS = _VALUES["MAX_GRAMMAR_CHARS"]
MAX_CHOICES = _VALUES["MAX_CHOICES"]
MAX_GRAMMAR_SECONDS: float = _VALUES["MAX_GRAMMAR_SECONDS"]
MAX_TOOLS = _VALUES["MAX_TOOLS"]
MAX_TOOL_NAME_CHARS = _VALUES["MAX_TOOL_NAME_CHARS"]
MAX_MESSAGES = _VALUES["MAX_MESSAGES"]
MAX_QUEUED_REQUESTS = _VALUES["MAX_QUEUED_REQUESTS"]
MAX_QUEUED_TOKENS = _VALUES["MAX_QUEUED_TOKENS"]
MAX_BODY_BYTES = _VALUES["MAX_BODY_BYTES"]
MAX_BODIES_BYTES = _VALUES["MAX_BODIES_BYTES"]
MAX_BODY_VALUES = _VALUES["MAX_BODY_VALUES"]
MAX_HEADERS = _VALUES["MAX_HEADERS"]
MAX_HEADER_BYTES = _VALUES["MAX_HEADER_BYTES"]
MAX_CONNECTIONS = _VALUES["MAX_CONNECTIONS"]
HEADER_SECONDS = _VALUES["HEADER_SECONDS"]
BODY_SECONDS = _VALUES["BODY_SECONDS"]
BODY_TOTAL_SECONDS = _VALUES["BODY_TOTAL_SECONDS"]
TEMPLATE_SECONDS = _VALUES["TEMPLATE_SECONDS"]
STALL_SECONDS = _VALUES["STALL_SECONDS"]
RANK_SECONDS = _VALUES["RANK_SECONDS"]
TEMPLATE_MEGABYTES = _VALUES["TEMPLATE_MEGABYTES"]


def knob(name: str) -> str:
    """The end of a sentence about a limit that was exceeded: what changes it."""
    return f"({PREFIX}{name} in the server's environment)"
