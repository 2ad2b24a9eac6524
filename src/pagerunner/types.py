"""The values that cross layers: sampling parameters, requests, step plans and results, outputs.

Everything here is torch-free. The `msgspec` structs also cross the process boundary as MessagePack.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from pagerunner import limits
from pagerunner.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]
OutputKind = Literal["cumulative", "delta", "final_only"]
Pooling = Literal["last", "mean"]
"""Which of a prompt's final hidden states become one vector: the last token's, or the mean of all."""


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequestError(f"{param} {message}", param=param)


def show(value: object) -> str:
    """A value from a user for an error message: its repr, cut to a readable length."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits refuses to become text
        return f"{type(value).__name__} too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _at_most(count: int, limit: str, param: str, has: str) -> None:
    """Hold `count` to a row of the limits' table; `has` says in words what there are `count` of."""
    most = getattr(limits, limit)
    _require(count <= most, param, f"{has}; at most {most} are allowed {limits.knob(limit)}." if count > most else "")


def _range(value: int | None, least: int, limit: str) -> str:
    knob = f" {limits.knob(limit)}" if value is not None and value >= least else ""
    return f"must be in [{least}, {getattr(limits, limit)}], got {show(value)}{knob}."


def _strings(param: str, value: object, limit: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{param} must be a string or a list of strings, got {show(value)}.", param=param)
    _at_most(len(value), limit, param, f"has {len(value)} entries")
    for item in value:
        _require(isinstance(item, str) and item != "", param, "must hold non-empty strings.")
        _at_most(len(item), "MAX_STOP_STRING_CHARS", param, f"holds a string of {len(item)} characters")
        _require(item.isascii() or _is_unicode(item), param, "holds a lone surrogate, which is not valid Unicode.")
    return tuple(value)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _token_ids(param: str, value: object, limit: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidRequestError(f"{param} must be a list of token ids, got {show(value)}.", param=param)
    _at_most(len(value), limit, param, f"has {len(value)} entries")
    # At once where all is well: there may be very many.
    if not set(map(type, value)) <= {int} or not 0 <= min(value, default=0) <= max(value, default=0) < 2**63:
        for token in value:
            _require(_is_int(token) and token >= 0, param, f"must hold token ids (integers from 0), got {show(token)}.")
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float]:
    """Keys may be digits in a string: that is how JSON carries them."""
    name = "logit_bias"
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must map token ids to numbers, got {show(value)}.", param=name)
    _at_most(len(value), "MAX_LOGIT_BIAS", name, f"has {len(value)} entries")
    checked: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        _require(_is_int(token) and token >= 0, name, f"must have token ids as keys, got {show(key)}.")
        _require(
            _is_finite(bias) and -100 <= bias <= 100,
            name,
            f"of token {token} must be in [-100, 100], got {show(bias)}.",
        )
        _require(token not in checked, name, f"names token {token} twice.")
        checked[token] = float(bias)
    return checked


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What the generated text must be; the names are vLLM's. Exactly one of the first five is given.

    `json` is a JSON schema, as an object or as its text. `regex` matches the whole text. `choice` lists texts to choose from.
    `grammar` is in Lark's or in llama.cpp's notation. `json_object` asks for any JSON object. Two fields belong to JSON:
    `disable_any_whitespace` allows none outside of strings, `whitespace_pattern` is a regex of what is allowed.
    With `after`, all of that holds for the text behind the first appearance of this text in the output; before it
    everything goes. That is how a reasoning model thinks first. With `begins` too, it is so only if the output begins with that
    token (its text); otherwise the rest holds from the start.

    Raises:
        InvalidRequestError: none or several are given, or one has the wrong type or is too large.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    after: str | None = None
    begins: str | None = None

    def __post_init__(self) -> None:
        name = "structured_outputs"
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        given = [kind for kind in kinds if getattr(self, kind) not in (None, False)]
        _require(
            len(given) == 1,
            name,
            f"needs exactly one of {', '.join(kinds)}, got {', '.join(given) if given else 'none'}.",
        )
        for kind in ("regex", "grammar", "whitespace_pattern", "after", "begins"):
            value = getattr(self, kind)
            _require(value is None or isinstance(value, str), name, f"has a {kind} that is no string: {show(value)}.")
        for kind in ("json_object", "disable_any_whitespace"):
            value = getattr(self, kind)
            _require(value in (None, True, False), name, f"has a {kind} that is neither true nor false: {show(value)}.")
        _require(
            self.json is None or isinstance(self.json, (str, dict)), name, f"has no schema as json: {show(self.json)}."
        )
        _require(self.after != "", name, "has an empty text as after.")
        _require(self.begins is None or self.after is not None, name, "has begins, which needs after.")
        if self.choice is not None:
            most = limits.MAX_CHOICES
            _require(isinstance(self.choice, (list, tuple)), name, f"has no list as choice: {show(self.choice)}.")
            _require(0 < len(self.choice) <= most, name, f"has {len(self.choice)} choices; 1 to {most} are allowed.")
            _require(
                all(isinstance(x, str) and x for x in self.choice), name, "has a choice that is no text, or empty."
            )
        length = sum(len(x) for x in (self.regex, self.grammar, self.whitespace_pattern, self.after, self.begins) if x)
        length += sum(map(len, self.choice or ())) + (len(self.json) if isinstance(self.json, str) else 0)
        most = limits.MAX_GRAMMAR_CHARS
        _require(length <= most, name, f"has {length:,} characters; at most {most:,} are allowed.")


class Grammar(msgspec.Struct, frozen=True):
    """A grammar as the engine core compiles it: llguidance's text of it; `after` and `begins` as above, or ""."""

    text: str
    after: str = ""
    begins: str = ""

    def __post_init__(self) -> None:
        most = limits.MAX_GRAMMAR_CHARS
        _require(len(self.text) <= most, "structured_outputs", f"is a grammar of over {most:,} characters.")


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to pick the tokens of one request; names and defaults are vLLM's.

    `top_k` of 0 or -1, `top_p` of 1 and `min_p` of 0 switch those filters off. `temperature` 0 is greedy.
    `seed` makes the request's tokens independent of whatever else runs. `stop` and `bad_words` take one string or
    several. `max_tokens=None` means up to the model's length. `logprobs` and `prompt_logprobs` ask for that many
    alternatives beside the chosen token's own log-probability. `structured_outputs` says what the text must be.

    Raises:
        InvalidRequestError: a value is out of range; the message names the parameter, the value and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | str | None = ()
    stop_token_ids: tuple[int, ...] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] | str | None = ()
    allowed_token_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = "cumulative"
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_filters()
        self._check_lengths()
        self._normalise()

    def _check_types(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            value = getattr(self, name)
            _require(_is_int(value), name, f"must be an integer of at most 64 bits, got {show(value)}.")
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or _is_int(value),
                name,
                f"must be an integer of at most 64 bits or None, got {show(value)}.",
            )
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            value = getattr(self, name)
            _require(_is_finite(value), name, f"must be a finite number, got {show(value)}.")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, f"must be true or false, got {show(value)}.")
        kinds = get_args(OutputKind)
        _require(
            self.output_kind in kinds,
            "output_kind",
            f"must be one of {', '.join(kinds)}, got {show(self.output_kind)}.",
        )
        wanted = self.structured_outputs
        _require(
            wanted is None or isinstance(wanted, StructuredOutputsParams),
            "structured_outputs",
            f"must be a StructuredOutputsParams, got {show(wanted)}.",
        )

    def _check_filters(self) -> None:
        _require(self.temperature >= 0, "temperature", f"must be at least 0, got {show(self.temperature)}.")
        _require(0 < self.top_p <= 1, "top_p", f"must be in (0, 1], got {show(self.top_p)}.")
        _require(self.top_k >= -1, "top_k", f"must be -1 or 0 (off) or at least 1, got {show(self.top_k)}.")
        _require(0 <= self.min_p <= 1, "min_p", f"must be in [0, 1], got {show(self.min_p)}.")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, f"must be in [-2, 2], got {show(getattr(self, name))}.")
        _require(
            self.repetition_penalty > 0,
            "repetition_penalty",
            f"must be greater than 0, got {show(self.repetition_penalty)}.",
        )

    def _check_lengths(self) -> None:
        _require(1 <= self.n <= limits.MAX_N, "n", _range(self.n, 1, "MAX_N"))
        for name in ("max_tokens", "min_tokens"):
            _at_most(getattr(self, name) or 0, "MAX_TOKENS", name, f"is {getattr(self, name)}")
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            f"must be at least 1, got {show(self.max_tokens)}.",
        )
        _require(self.min_tokens >= 0, "min_tokens", f"must be at least 0, got {show(self.min_tokens)}.")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"is {show(self.min_tokens)}, more than max_tokens={show(self.max_tokens)}.",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or 0 <= value <= limits.MAX_LOGPROBS,
                name,
                _range(value, 0, "MAX_LOGPROBS"),
            )

    def _normalise(self) -> None:
        put = msgspec.structs.force_setattr
        put(self, "stop", _strings("stop", self.stop, "MAX_STOP_STRINGS"))
        put(self, "bad_words", _strings("bad_words", self.bad_words, "MAX_BAD_WORDS"))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or (), "MAX_STOP_TOKEN_IDS"))
        put(self, "top_k", max(self.top_k, 0))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, "MAX_ALLOWED_TOKEN_IDS")
            _require(bool(allowed), "allowed_token_ids", "must hold at least 1 id, got none.")
            put(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            put(self, "logit_bias", _logit_bias(self.logit_bias))
        _require(self.detokenize or not self.stop, "stop", "needs detokenize=True.")


class EngineRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One sequence to generate, as the frontend hands it to the engine core. A request with `n > 1` is n of these.

    `request_id` is server-made and unique. `family` is shared by the n siblings of one request, so that they share the
    prompt's pages even when prefix caching is off. `bad_words_ids` are `bad_words` as token sequences.
    `eos_token_ids` stop the sequence unless `params.ignore_eos`. `seed` is resolved: never None. `max_tokens` is
    resolved against the model's length. With `pooling` the request ends with its prompt: its only update has no tokens,
    but `pooled`. `grammar` is `params.structured_outputs`, checked and rewritten.
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
    family: str = ""
    pooling: Pooling | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Checks what needs no model, here and (by decoding) in the core. Raises InvalidRequestError."""
        params, prompt = self.params, self.prompt_token_ids
        _require(_is_int(self.seed), "seed", f"must be an integer of at most 64 bits, got {show(self.seed)}.")
        _require(
            _is_int(self.priority), "priority", f"must be an integer of at most 64 bits, got {show(self.priority)}."
        )
        _require(math.isfinite(self.arrival_time), "arrival_time", f"must be finite, got {show(self.arrival_time)}.")
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            "max_tokens",
            f"is {show(self.max_tokens)}, not 1 or more.",
        )
        _at_most(self.max_tokens, "MAX_TOKENS", "max_tokens", f"is {self.max_tokens}")
        _require(
            params.min_tokens <= self.max_tokens,
            "min_tokens",
            f"is {params.min_tokens}, more than the {self.max_tokens} tokens that the request may generate (max_tokens).",
        )
        _require(min(prompt, default=0) >= 0, "prompt", "holds a negative token id.")
        _at_most(len(self.cache_salt), "MAX_SALT_CHARS", "cache_salt", f"has {len(self.cache_salt)} characters")
        words = self.bad_words_ids
        total = sum(map(len, words))
        _require(not words or min(map(len, words)) > 0, "bad_words", "holds a word without tokens.")
        _at_most(total, "MAX_BAD_WORD_TOKENS", "bad_words", f"has {total} tokens in all")

    def siblings(self, others: Sequence[tuple[str, int]]) -> list[EngineRequest]:
        """More sequences of the same request, by id and seed. They share what this one holds, which isn't checked again, and the
        prompt is scored once only.
        """
        params, made = self.params, []
        if others and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        for name, seed in others:
            _require(_is_int(seed), "seed", f"must be an integer of at most 64 bits, got {show(seed)}.")
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

    `num_cached_tokens` and `admitted_time` (on the machine's monotonic clock) come with the first tokens.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    admitted_time: float = 0.0
    error: str | None = None
    pooled: list[float] | None = None


class SlotInit(msgspec.Struct, frozen=True):
    """A request takes a slot: what the runner must know until the slot is released.

    `output_token_ids` are the tokens a preempted request had already generated (penalties count them).
    """

    slot: int
    request: EngineRequest
    output_token_ids: list[int]


class StepRow(NamedTuple):
    """One request's share of a step: tokens at positions [start, start + num_tokens).

    `tokens` holds the ids that the host knows for the first `len(tokens)` positions; a missing last one is the token
    that the device sampled for this slot last. With `samples` the last position's logits are sampled.
    """

    slot: int
    start: int
    num_tokens: int
    tokens: list[int]
    samples: bool


class TableWrite(NamedTuple):
    """Pages `first` .. of a slot, as its backend counts them, are at `entries`. An entry of -1 is a page that no later step reads, and is not there."""

    group: int
    slot: int
    first: int
    entries: list[int]


class PageCopy(NamedTuple):
    """Copy one page of `group` from byte offset `source` to byte offset `target` of the KV region."""

    group: int
    source: int
    target: int


class StateSave(NamedTuple):
    """Within the forward pass, copy row `row`'s recurrent state after the token at `position - 1` to a page of `group`.

    `target` is the page's byte offset. `position` lies in (row.start, row.start + row.num_tokens].
    """

    row: int
    position: int
    group: int
    target: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the runner does in one step, in this order: slots, table writes, copies (in list order), zeroing, forward, sampling.

    A request may be admitted a step before its first row: its first pages are copies of what this step computes.
    `zero` lists the byte offsets of fresh pages, one list per group, for groups that ask for it. A fresh page may have
    been the source of one of the step's copies, so copies come first.
    `masks` holds, for some of the rows that sample, which tokens they may take: a bit per token, lowest bit first.
    Rows may share pages that another row of the same step writes: within a layer all writes precede all reads.
    """

    step_id: int
    rows: list[StepRow]
    admitted: list[SlotInit] = []
    table_writes: list[TableWrite] = []
    zero: list[list[int]] = []
    copies: list[PageCopy] = []
    state_saves: list[StateSave] = []
    masks: dict[int, bytes] = {}


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step produced. Lists are aligned with `plan.rows`; rows that don't sample have an empty list.

    `prompt_logprobs[i]` covers positions start+1 .. start+num_tokens of row i (the token after each computed position
    that is still a prompt token). `pooled` holds the vectors of rows that ended a pooling request's prompt. `errors` maps a
    row index to the sentence that ends only that request.
    """

    step_id: int
    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    pooled: dict[int, list[float]] = {}
    errors: dict[int, str] = {}


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token, its rank in the vocabulary (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of a request's n generated sequences (or, with output_kind "delta", what was added to it)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Monotonic times in seconds; None where the request has not got that far."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request's state as its caller sees it; fields are vLLM's, and `error` says why a sequence ended with "error".

    `pooled` is the vector of a pooling request, which has no text.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    pooled: list[float] | None = None
