"""What crosses between the frontend and the engine core: requests, and what each step adds to them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from pagerunner import limits
from pagerunner.types.checks import at_most, is_int, refuse, require, show
from pagerunner.types.kv_transfer import KVTransferParams
from pagerunner.types.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["last", "mean"]
"""Which of a prompt's final hidden states become one vector: the last token's, or the mean of all."""


class Grammar(msgspec.Struct, frozen=True):
    """A grammar as the engine core compiles it: llguidance's text of it; `after` and `begins` as above, or ""."""

    text: str
    after: str = ""
    begins: str = ""

    def __post_init__(self) -> None:
        most = limits.MAX_GRAMMAR_CHARS
        require(len(self.text) <= most, "structured_outputs", f"is a grammar of over {most:,} characters.")


class EngineRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One sequence to generate, as the frontend hands it to the engine core. A request with `n > 1` is n of these.

    `request_id` is server-made and unique. `parent_id` is shared by the n siblings of one request, so that they share the
    prompt's pages even when prefix caching is off. `bad_words_ids` are `bad_words` as token sequences.
    `eos_token_ids` stop the sequence unless `params.ignore_eos`. `seed` is resolved: never None. `max_tokens` is
    resolved against the model's length. With `pooling` the request ends with its prompt: its only update has no tokens,
    but `pooled`. `grammar` is `params.structured_outputs`, checked and rewritten. `data_parallel_rank`: the team of ranks that is to run it, where
    there are several; None leaves that to the engine. `lora` is the name of its adapter, or "". `kv_transfer`: where its prompt's pages are to come from, or that they are to be lent.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str = ""
    parent_id: str = ""
    pooling: Pooling | None = None
    grammar: Grammar | None = None
    data_parallel_rank: int | None = None
    kv_transfer: KVTransferParams | None = None
    lora: str = ""

    def __post_init__(self) -> None:
        """Checks what needs no model, here and (by decoding) in the core. Raises InvalidRequestError. Ids of prompts are checked with the vocabulary."""
        params = self.params
        for name in ("seed", "priority"):
            if not is_int(value := getattr(self, name)):
                refuse(name, f"must be an integer of at most 64 bits, got {show(value)}.")
        if not math.isfinite(self.arrival_time):
            refuse("arrival_time", f"must be finite, got {show(self.arrival_time)}.")
        if not is_int(self.max_tokens) or self.max_tokens < 1:
            refuse("max_tokens", f"is {show(self.max_tokens)}, not 1 or more.")
        if self.max_tokens > limits.MAX_TOKENS:
            at_most(self.max_tokens, "MAX_TOKENS", "max_tokens", f"is {self.max_tokens}")
        if params.min_tokens > self.max_tokens:
            said = f"the {self.max_tokens} tokens that the request may generate (max_tokens)"
            refuse("min_tokens", f"is {params.min_tokens}, more than {said}.")
        if self.cache_salt:
            at_most(len(self.cache_salt), "MAX_SALT_CHARS", "cache_salt", f"has {len(self.cache_salt)} characters")
        if words := self.bad_words_ids:
            total = sum(map(len, words))
            require(min(map(len, words)) > 0, "bad_words", "holds a word without tokens.")
            at_most(total, "MAX_BAD_WORD_TOKENS", "bad_words", f"has {total} tokens in all")
            longest = max(map(len, words))
            at_most(longest, "MAX_BAD_WORD_LENGTH", "bad_words", f"holds a word of {longest} tokens")

    @property
    def is_alone(self) -> bool:
        """Whether it has no siblings. Frontends name a request's only sequence as its parent."""
        return self.parent_id in ("", self.request_id)

    def siblings(self, others: Sequence[tuple[str, int]]) -> list[EngineRequest]:
        """More sequences of the same request, by id and seed.

        They share all other values of this one, which aren't checked again. The prompt is scored only once.
        """
        params, made = self.params, []
        if others and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        for name, seed in others:
            require(is_int(seed), "seed", f"must be an integer of at most 64 bits, got {show(seed)}.")
            other = copy.copy(self)
            for field, value in (("request_id", name), ("seed", seed), ("params", params)):
                msgspec.structs.force_setattr(other, field, value)
            made.append(other)
        return made


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token's and the `k` most likely ones, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestUpdate(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What one step added to one sequence. `finish_reason` is set exactly once, on the last update.

    `num_cached_tokens` and `admitted_time` (on the machine's monotonic clock) come with the first tokens, and so does how many of
    the cached tokens' pages came from another memory (`num_external_computed_tokens`). `param` names the
    parameter that is to blame for `error`; None where the request isn't. `num_preemptions` counts those of the sequence so far.
    `kv_transfer_params`, in the last update, say where the prompt's pages are lent. `drafted`: how many tokens were drafted for the sequence in
    the step, and how many of them were accepted; None if none were drafted.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_external_computed_tokens: int = 0
    admitted_time: float = 0.0
    num_preemptions: int = 0
    error: str | None = None
    param: str | None = None
    pooled: list[float] | None = None
    kv_transfer_params: KVTransferParams | None = None
    drafted: tuple[int, int] | None = None
