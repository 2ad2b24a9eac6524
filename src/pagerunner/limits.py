"""The one table of what a single request may ask for, enforced by `SamplingParams` wherever one is built or decoded."""

from __future__ import annotations

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1_024
MAX_STOP_TOKEN_IDS = 1_024
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_TOKENS = 16_384
MAX_LOGIT_BIAS = 1_024
MAX_ALLOWED_TOKEN_IDS = 262_144
MAX_LOGPROBS = 20
MAX_PROMPTS_PER_CALL = 2_048
MAX_GRAMMAR_CHARS = 262_144
"""Of a structured output's schema, regex, grammar or choices, and of what they become."""
MAX_CHOICES = 10_000
MAX_GRAMMAR_SECONDS = 5.0
"""How long a grammar may take to be compiled, and a token to be matched; what it compiles to is bounded as well."""
MAX_TOOLS = 512
MAX_TOOL_NAME_CHARS = 256
MAX_BODY_BYTES = 32 * 1024 * 1024
