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


TABLE: list[Limit] = []
FAULTS: list[str] = []
"""Sentences about environment variables that can't be understood; the engine doesn't start with one."""


def _limit(name: str, default: int, what: str) -> int:
    TABLE.append(Limit(name, default, what))
    text = os.environ.get(f"{PREFIX}{name}", "")
    if text == "":
        return default
    if text.isascii() and text.isdigit() and 0 < int(text[:19]) < 2**31 and len(text) < 19:
        return int(text)
    FAULTS.append(f"{PREFIX}{name} must be an integer from 1 to {2**31 - 1}, got {text[:80]!r}.")
    return default


MAX_N = _limit("MAX_N", 128, "answers to one prompt (`n`)")
MAX_PROMPTS_PER_CALL = _limit("MAX_PROMPTS_PER_CALL", 2_048, "answers of one call: prompts times `n`")
MAX_PROMPT_CHARS = _limit("MAX_PROMPT_CHARS", 8_000_000, "characters of one prompt, and of one rendered conversation")
MAX_TOKENS = _limit("MAX_TOKENS", 2**31 - 1, "`max_tokens` and `min_tokens`; the model's length limits them further")
MAX_LOGPROBS = _limit("MAX_LOGPROBS", 20, "`logprobs`, `top_logprobs` and `prompt_logprobs`")
MAX_STOP_STRINGS = _limit("MAX_STOP_STRINGS", 64, "strings in `stop`")
MAX_STOP_STRING_CHARS = _limit("MAX_STOP_STRING_CHARS", 1_024, "characters of one string in `stop` or `bad_words`")
MAX_STOP_CHARS = _limit("MAX_STOP_CHARS", 16_384, "characters of all strings in `stop` together")
MAX_STOP_TOKEN_IDS = _limit("MAX_STOP_TOKEN_IDS", 1_024, "ids in `stop_token_ids`")
MAX_BAD_WORDS = _limit("MAX_BAD_WORDS", 1_024, "strings in `bad_words`")
MAX_BAD_WORD_TOKENS = _limit("MAX_BAD_WORD_TOKENS", 16_384, "tokens of all `bad_words` together")
MAX_BAD_WORD_LENGTH = _limit("MAX_BAD_WORD_LENGTH", 128, "tokens of one of the `bad_words`")
MAX_LOGIT_BIAS = _limit("MAX_LOGIT_BIAS", 1_024, "entries of `logit_bias`")
MAX_ALLOWED_TOKEN_IDS = _limit("MAX_ALLOWED_TOKEN_IDS", 262_144, "ids in `allowed_token_ids`")
MAX_SALT_CHARS = _limit("MAX_SALT_CHARS", 256, "characters of `cache_salt`")
MAX_GRAMMAR_CHARS = _limit(
    "MAX_GRAMMAR_CHARS", 262_144, "characters of a JSON schema, regular expression, list of choices or grammar"
)
MAX_CHOICES = _limit("MAX_CHOICES", 10_000, "entries of `structured_outputs.choice`")
MAX_GRAMMAR_SECONDS: float = _limit(
    "MAX_GRAMMAR_SECONDS", 5, "seconds that a grammar may take to be compiled, and a token to be matched"
)
MAX_TOOLS = _limit("MAX_TOOLS", 512, "entries of `tools`")
MAX_TOOL_NAME_CHARS = _limit("MAX_TOOL_NAME_CHARS", 256, "characters of a tool's name")
MAX_MESSAGES = _limit("MAX_MESSAGES", 4_096, "messages of one conversation")
MAX_QUEUED_REQUESTS = _limit(
    "MAX_QUEUED_REQUESTS", 16_384, "answers that wait for their first token, of all calls; more get status 429"
)
MAX_QUEUED_TOKENS = _limit("MAX_QUEUED_TOKENS", 33_554_432, "prompt tokens of answers that wait for their first token")
MAX_BODY_BYTES = _limit("MAX_BODY_BYTES", 32 * 1024 * 1024, "bytes of a request's body")
MAX_BODIES_BYTES = _limit("MAX_BODIES_BYTES", 512 * 1024 * 1024, "bytes of all bodies that are being received")
MAX_BODY_VALUES = _limit("MAX_BODY_VALUES", 2_000_000, "values of a request's body, counted by its commas")
MAX_HEADERS = _limit("MAX_HEADERS", 128, "headers of a request")
MAX_HEADER_BYTES = _limit("MAX_HEADER_BYTES", 64 * 1024, "bytes of a request's line and headers together")
MAX_CONNECTIONS = _limit("MAX_CONNECTIONS", 16_384, "connections at once; the limit on open files may allow fewer")
HEADER_SECONDS = _limit(
    "HEADER_SECONDS", 30, "seconds that a client may take to send headers, or a body that is answered already"
)
KEEP_ALIVE_SECONDS = _limit("KEEP_ALIVE_SECONDS", 75, "seconds that a connection stays open between two requests")
BODY_SECONDS = _limit("BODY_SECONDS", 60, "seconds without a byte of a body that is not complete")
BODY_TOTAL_SECONDS = _limit("BODY_TOTAL_SECONDS", 300, "seconds that a client may take to send a body, in all")
UNREAD_SECONDS: float = _limit(
    "UNREAD_SECONDS", 120, "seconds for which what is written of an answer may wait for its client to read it"
)
TEMPLATE_SECONDS = _limit("TEMPLATE_SECONDS", 5, "seconds that a chat template may take for one conversation")
STALL_SECONDS = _limit(
    "STALL_SECONDS", 120, "seconds that a step may take before /health fails and all stacks are logged"
)
RANK_SECONDS = _limit(
    "RANK_SECONDS",
    30,
    "seconds that a rank or an API process may be silent, or a step go on in which no rank comes further, before it is ended; a start, or a call of ranks, has ten times as long",
)
TRANSFER_SECONDS = _limit(
    "TRANSFER_SECONDS",
    300,
    "seconds that an engine waits for a trainer, for its next call, and for each piece of new weights",
)
TRANSFER_MEGABYTES = _limit("TRANSFER_MEGABYTES", 4_096, "memory for the largest piece of new weights, on each rank")
MAX_API_SERVERS = _limit("MAX_API_SERVERS", 64, "processes that serve a port (`--api-server-count`)")
TEMPLATE_MEGABYTES = _limit("TEMPLATE_MEGABYTES", 512, "memory of the process that renders chat templates")
FAULTS += [
    f"{name} names no limit; there are {', '.join(limit.name for limit in TABLE)}."
    for name in os.environ
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in {limit.name for limit in TABLE}
]


def knob(name: str) -> str:
    """The end of a sentence about a limit that was exceeded: what changes it."""
    return f"({PREFIX}{name} in the server's environment)"
