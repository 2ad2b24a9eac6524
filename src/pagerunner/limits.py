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
MAX_BODY_BYTES = 32 * 1024 * 1024
