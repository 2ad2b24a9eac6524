"""What a user asks for: sampling parameters and structured output, checked when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from pagerunner import limits
from pagerunner.types.checks import (
    as_logit_bias,
    as_strings,
    as_token_ids,
    at_most,
    is_finite,
    is_int,
    range_text,
    refuse,
    require,
    show,
)

OutputKind = Literal["cumulative", "delta", "final_only"]
_KINDS = get_args(OutputKind)
_NONE: tuple[()] = ()  # asked for with `is`: an array that is compared is no truth value


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What the generated text must be; the names are vLLM's. Exactly one of the first six is given.

    `json` is a JSON schema, as an object or as its text. `regex` matches the whole text. `choice` lists texts to choose from.
    `grammar` is in Lark's or in llama.cpp's notation. `json_object` asks for any JSON object. `structural_tag`, an object
    or its text, is free text with parts that follow a schema (engine/structured_output/structural_tag.py). Two fields
    belong to JSON: `disable_any_whitespace` allows none outside of strings, `whitespace_pattern` is a regex of what is
    allowed. With `after`, the grammar holds only for the text after the first appearance of `after` in the output. Before
    it any text is allowed. So a reasoning model can think first. With `begins` too, this is so only if the output begins
    with the token of that text. Otherwise the grammar holds from the start.

    Raises:
        InvalidRequestError: none or several are given, or one has the wrong type or is too large.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    after: str | None = None
    begins: str | None = None

    def __post_init__(self) -> None:
        name = "structured_outputs"
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [kind for kind in kinds if not any(getattr(self, kind) is unset for unset in (None, False))]
        require(
            len(given) == 1,
            name,
            f"needs exactly one of {', '.join(kinds)}, got {', '.join(given) if given else 'none'}.",
        )
        for kind in ("regex", "grammar", "whitespace_pattern", "after", "begins"):
            value = getattr(self, kind)
            require(value is None or isinstance(value, str), name, f"has a {kind} that is no string: {show(value)}.")
        for key in ("json_object", "disable_any_whitespace"):
            value = getattr(self, key)
            require(isinstance(value, bool | None), name, f"has a {key} that is neither true nor false: {show(value)}.")
        require(
            self.json is None or isinstance(self.json, (str, dict)), name, f"has no schema as json: {show(self.json)}."
        )
        require(
            self.structural_tag is None or isinstance(self.structural_tag, (str, dict)),
            name,
            f"has no structural_tag but {show(self.structural_tag)}.",
        )
        require(self.after != "", name, "has an empty text as after.")
        require(self.begins is None or self.after is not None, name, "has begins, which needs after.")
        if self.choice is not None:
            most = limits.MAX_CHOICES
            require(isinstance(self.choice, (list, tuple)), name, f"has no list as choice: {show(self.choice)}.")
            require(0 < len(self.choice) <= most, name, f"has {len(self.choice)} choices; 1 to {most} are allowed.")
            require(all(isinstance(x, str) and x for x in self.choice), name, "has a choice that is no text, or empty.")
        length = sum(len(x) for x in (self.regex, self.grammar, self.whitespace_pattern, self.after, self.begins) if x)
        length += sum(map(len, self.choice or ()))
        length += sum(len(text) for text in (self.json, self.structural_tag) if isinstance(text, str))
        most = limits.MAX_GRAMMAR_CHARS
        require(length <= most, name, f"has {length:,} characters; at most {most:,} are allowed.")


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to pick the tokens of one request; names and defaults are vLLM's.

    `top_k` of 0 or -1, `top_p` of 1 and `min_p` of 0 switch those filters off. `temperature` 0 is greedy.
    `seed` fixes the request's random numbers, but for -1, which is None. A token's number depends on the seed and the token's position, never on other
    requests. Logits may differ in their last bits with the number of requests that run beside this one. Then a token may
    differ. `stop` and `bad_words` take one string or several. `max_tokens=None` means up to the model's length. `logprobs`
    and `prompt_logprobs` ask for that many alternatives beside the chosen token's own log-probability. `structured_outputs`
    says what the text must be. A field can be set later, as in vLLM, for the requests after that.

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
    stop: Sequence[str] | str | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[str] | str | None = ()
    allowed_token_ids: Sequence[int] | None = None
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

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field. All are checked as at the start, and nothing changes if one is wrong then."""
        changed = msgspec.structs.replace(self, **{name: value})
        msgspec.structs.force_setattr(self, name, getattr(changed, name))

    def _check_types(self) -> None:
        # Sentences are made only where something is wrong: a request is checked by the frontend and by the core, between two steps.
        for name in ("n", "top_k", "min_tokens"):
            if not is_int(value := getattr(self, name)):
                refuse(name, f"must be an integer of at most 64 bits, got {show(value)}.")
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None and not is_int(value):
                refuse(name, f"must be an integer of at most 64 bits or None, got {show(value)}.")
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not is_finite(value := getattr(self, name)):
                refuse(name, f"must be a finite number, got {show(value)}.")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                refuse(name, f"must be true or false, got {show(value)}.")
        if not isinstance(self.output_kind, str) or self.output_kind not in _KINDS:
            refuse("output_kind", f"must be one of {', '.join(_KINDS)}, got {show(self.output_kind)}.")
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
            refuse("structured_outputs", f"must be a StructuredOutputsParams, got {show(wanted)}.")

    def _check_filters(self) -> None:
        if not self.temperature >= 0:
            refuse("temperature", f"must be at least 0, got {show(self.temperature)}.")
        if not 0 < self.top_p <= 1:
            refuse("top_p", f"must be in (0, 1], got {show(self.top_p)}.")
        if not self.top_k >= -1:
            refuse("top_k", f"must be -1 or 0 (off) or at least 1, got {show(self.top_k)}.")
        if not 0 <= self.min_p <= 1:
            refuse("min_p", f"must be in [0, 1], got {show(self.min_p)}.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= (value := getattr(self, name)) <= 2:
                refuse(name, f"must be in [-2, 2], got {show(value)}.")
        if not self.repetition_penalty > 0:
            refuse("repetition_penalty", f"must be greater than 0, got {show(self.repetition_penalty)}.")

    def _check_lengths(self) -> None:
        if not 1 <= self.n <= limits.MAX_N:
            refuse("n", range_text(self.n, 1, "MAX_N"))
        for name in ("max_tokens", "min_tokens"):
            if (value := getattr(self, name) or 0) > limits.MAX_TOKENS:
                at_most(value, "MAX_TOKENS", name, f"is {value}")
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", f"must be at least 1, got {show(self.max_tokens)}.")
        if self.min_tokens < 0:
            refuse("min_tokens", f"must be at least 0, got {show(self.min_tokens)}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"is {show(self.min_tokens)}, more than max_tokens={show(self.max_tokens)}.")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= limits.MAX_LOGPROBS:
                refuse(name, range_text(value, 0, "MAX_LOGPROBS"))

    def _normalise(self) -> None:
        put = msgspec.structs.force_setattr
        if self.stop is not _NONE:
            put(self, "stop", as_strings("stop", self.stop, "MAX_STOP_STRINGS"))
            length = sum(map(len, self.stop or ()))
            at_most(length, "MAX_STOP_CHARS", "stop", f"has {length} characters in all")
        if self.bad_words is not _NONE:
            put(self, "bad_words", as_strings("bad_words", self.bad_words, "MAX_BAD_WORDS"))
        if self.stop_token_ids is not _NONE:
            ids = () if self.stop_token_ids is None else self.stop_token_ids
            put(self, "stop_token_ids", as_token_ids("stop_token_ids", ids, "MAX_STOP_TOKEN_IDS"))
        put(self, "top_k", max(self.top_k, 0))
        if self.seed == -1:
            put(self, "seed", None)
        if self.allowed_token_ids is not None:
            allowed = as_token_ids("allowed_token_ids", self.allowed_token_ids, "MAX_ALLOWED_TOKEN_IDS")
            require(bool(allowed), "allowed_token_ids", "must hold at least 1 id, got none.")
            put(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            put(self, "logit_bias", as_logit_bias(self.logit_bias))
        require(self.detokenize or not self.stop, "stop", "needs detokenize=True.")
