"""Prompts and parameters to engine requests: every check that needs the tokenizer, the vocabulary or the model's length."""

from __future__ import annotations

import copy
import hashlib
import itertools
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pagerunner import limits
from pagerunner.engine.frontend.source import SOURCE
from pagerunner.engine.structured_output.grammar_door import GrammarDoor
from pagerunner.errors import InvalidRequestError, PromptTooLongError
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import EngineRequest, Grammar, Pooling, SamplingParams, show
from pagerunner.types.checks import extremes, in_vocabulary, refuse

Prompt = str | Sequence[int] | Mapping[str, object]

POOLING_PARAMS = SamplingParams(temperature=0, max_tokens=1, detokenize=False, output_kind="final_only")
"""For requests with `pooling`, whose prompt must leave room for a token although none is generated."""
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_END_MARK = "THE-ANSWER-GOES-ON-HERE"
_CHARS_PER_TOKEN = 16  # most texts have far fewer


class Truncation(NamedTuple):
    """How much of a prompt stays: its last `keep` tokens, or with `first` its first ones."""

    keep: int
    first: bool = False

    def of(self, token_ids: list[int]) -> list[int]:
        """The tokens that stay."""
        return token_ids[: self.keep] if self.first else token_ids[-self.keep :]


def shown_text(prompt: Prompt) -> str | None:
    """The text that came, which outputs show; None where token ids alone came."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def own_params(params: SamplingParams) -> SamplingParams:
    """A copy, as whoever has made them may set them anew for the next request. Raises InvalidRequestError for anything else."""
    if not isinstance(params, SamplingParams):
        refuse("sampling_params", f"must be a SamplingParams, got {show(params)}.")
    return copy.copy(params)


def check_text(text: str) -> None:
    """Raise InvalidRequestError for a text that must not reach a tokenizer: too long, or no valid Unicode."""
    if len(text) > limits.MAX_PROMPT_CHARS:
        raise _bad_prompt(
            f"The prompt has {len(text)} characters; at most {limits.MAX_PROMPT_CHARS} are allowed "
            f"{limits.knob('MAX_PROMPT_CHARS')}."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _bad_prompt(f"The prompt is not valid Unicode: character {error.start} is a lone surrogate.") from None


def check_queueable(n: int, prompts: int, tokens: int) -> None:
    """Raise InvalidRequestError for a call that is larger than the whole queue. It would be refused whenever it comes.

    Args:
        n: how many answers to each prompt.
        prompts: how many prompts.
        tokens: how many tokens the prompts have together. Each answer waits with the tokens of its prompt.
    """
    for one_each, name, what in (
        (prompts, "MAX_QUEUED_REQUESTS", "answers"),
        (tokens, "MAX_QUEUED_TOKENS", "prompt tokens"),
    ):
        most = getattr(limits, name)
        if n * one_each > most:
            count = f"{n * one_each} {what}" if n == 1 else f"{n * one_each} {what} (n={n})"
            raise InvalidRequestError(
                f"The request has {count}; at most {most} may wait at once {limits.knob(name)}.",
                param="prompt" if one_each > most else "n",
            )


def check_continues(continue_final_message: bool, add_generation_prompt: bool) -> None:
    """Raise InvalidRequestError when an answer is both to go on with the last message and to begin a new one."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message goes on with the last message and add_generation_prompt begins a new one; "
            "set add_generation_prompt=false.",
            param="continue_final_message",
        )


def with_marked_end(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with a mark behind its last message's text, for `up_to_mark`.

    Without a mark the text's end can't be told from the markup after it. Example: a text "e", and the markup "<|end|>".

    Raises:
        InvalidRequestError: the last message has no text.
    """
    last = messages[-1].get("content") if messages else None
    if not isinstance(last, str) or not last.strip():
        raise _not_continued()
    return [*map(dict, messages[:-1]), {**messages[-1], "content": last + _END_MARK}]


def up_to_mark(text: str) -> str:
    """A rendered conversation up to the mark of `with_marked_end`, without the markup that closes the message.

    Raises:
        InvalidRequestError: the chat template doesn't show the last message's text.
    """
    shown, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise _not_continued()
    return shown


def _plain(ids: Sequence[object]) -> list[int]:
    """Token ids as a list of their own. This takes a quarter of what a look at each one's type takes, 0.03 ms for 8,192."""
    try:
        return msgspec.convert(ids, list[int])
    except msgspec.ValidationError:
        index, token = next(
            (index, token) for index, token in enumerate(ids) if isinstance(token, bool) or not isinstance(token, int)
        )
        raise _bad_prompt(f"prompt_token_ids must hold integers, got {show(token)} at index {index}.") from None


def _bad_prompt(text: str) -> InvalidRequestError:
    return InvalidRequestError(text, param="prompt")


def _empty() -> InvalidRequestError:
    return _bad_prompt("The prompt is empty; it needs at least 1 token.")


def _not_continued() -> InvalidRequestError:
    return InvalidRequestError(
        "continue_final_message needs a last message whose text the chat template shows as it is.",
        param="continue_final_message",
    )


class InputProcessor:
    """Makes engine requests for one model.

    Args:
        tokenizer: None when the engine has none; prompts must then be token ids.
        vocab_size: the model's; ids must be below it.
        max_model_len: prompt and generated tokens together.
        eos_token_ids: end a sequence unless a request ignores them.
        grammars: checks structured outputs; None refuses them.
        seed: with a counter, it seeds the requests that name no seed: the same calls give the same tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        grammars: GrammarDoor | None = None,
        seed: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._seed = seed
        self._unseeded = itertools.count()

    async def prepare(self, params: SamplingParams) -> Grammar | None:
        """Do on threads the slow part of `process`, which would block an event loop.

        Raises what `process` would raise.
        """
        if params.structured_outputs is None or self._grammars is None:
            return None
        return await self._grammars.prepare(params.structured_outputs, SOURCE.get())

    def close(self) -> None:
        """End the helper process. Callers that still wait for it get RequestFailedError."""
        if self._grammars is not None:
            self._grammars.close()

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        *,
        pooling: Pooling | None = None,
        grammar: Grammar | None = None,
        lora: str = "",
    ) -> list[EngineRequest]:
        """The n sequences of one request, in output order.

        Args:
            prompt: a text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`.
                With both, the ids are used and `prompt` is only shown.
            request_id: unique among running requests; sequences are named after it.
            pooling: asks for one vector of the prompt and no tokens.
            lora: the name of the adapter to generate with, if any.
            grammar: what `prepare` has made of the structured outputs. Without it, structured outputs are checked here.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot work with this model.
        """
        params = own_params(params)
        token_ids, salt = self._read_prompt(prompt)
        self._check_prompt(token_ids)
        max_tokens = self._max_tokens(params, len(token_ids))
        self.check_token_ids("stop_token_ids", params.stop_token_ids or ())
        self.check_token_ids("logit_bias", params.logit_bias or ())
        self.check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        if self._tokenizer is None and params.stop:
            raise InvalidRequestError("stop needs a tokenizer, and this engine has none.", param="stop")
        bad_words = self._encode_bad_words(params)
        if params.structured_outputs is not None:
            if self._grammars is None:
                raise InvalidRequestError("structured_outputs needs a tokenizer.", param="structured_outputs")
            grammar = grammar or self._grammars.check(params.structured_outputs)
            params = msgspec.structs.replace(params, structured_outputs=None)
        seed = self._next_seed() if params.seed is None else params.seed
        arrival = time.monotonic()
        first = EngineRequest(
            request_id=request_id if params.n == 1 else f"{request_id}_0",
            prompt_token_ids=token_ids,
            params=params,
            seed=_wrap(seed),
            max_tokens=max_tokens,
            eos_token_ids=self._eos_token_ids,
            bad_words_ids=bad_words,
            priority=priority,
            arrival_time=arrival,
            cache_salt=salt or cache_salt,
            parent_id=request_id,
            pooling=pooling,
            grammar=grammar,
            lora=lora,
        )
        return [first, *first.siblings([(f"{request_id}_{n}", _wrap(seed + n)) for n in range(1, params.n)])]

    def _read_prompt(self, prompt: Prompt) -> tuple[list[int], str]:
        salt: object = ""
        value: object = prompt
        if isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in _PROMPT_KEYS]
            if unknown:
                known = ", ".join(_PROMPT_KEYS)
                raise _bad_prompt(f"A prompt has no key {show(unknown[0])}; supported are {known}.")
            salt = prompt.get("cache_salt") or ""
            value = prompt.get("prompt_token_ids")
            if value is None:
                value = prompt.get("prompt")
                if not isinstance(value, str):
                    raise _bad_prompt(
                        f"A prompt needs a text as prompt or a list as prompt_token_ids, got {show(value)}."
                    )
            elif isinstance(value, str):
                raise _bad_prompt("prompt_token_ids must be a list of integers, got a string.")
        if not isinstance(salt, str):
            raise InvalidRequestError(f"cache_salt must be a string, got {show(salt)}.", param="cache_salt")
        if isinstance(value, str):
            if not value:
                raise _empty()
            return self.encode(value), salt
        if isinstance(value, (list, tuple)):
            return _plain(value), salt
        raise _bad_prompt(f"A prompt must be a text, a list of token ids or a mapping, got {show(value)}.")

    def encode(self, text: str, add_special_tokens: bool = True, truncation: Truncation | None = None) -> list[int]:
        """The token ids of a text that may be a prompt.

        Raises:
            PromptTooLongError: it is far too long, which is found without tokenising all of it.
            InvalidRequestError: it is no valid Unicode, or has too many characters, or there is no tokenizer.
        """
        if self._tokenizer is None:
            raise _bad_prompt(
                "This engine has no tokenizer (skip_tokenizer_init), so a prompt must be prompt_token_ids."
            )
        check_text(text)
        if truncation is not None:
            return self._encode_end(self._tokenizer, text, add_special_tokens, truncation)
        least = self._tokenizer.least_tokens(text, self._max_model_len)
        if least >= self._max_model_len:
            raise PromptTooLongError(
                f"The prompt has {len(text)} characters and at least {least} tokens, but this model's maximum context "
                f"length is {self._max_model_len} tokens (max_model_len), prompt and answer together.",
                param="prompt",
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @staticmethod
    def _encode_end(tokenizer: Tokenizer, text: str, add_special_tokens: bool, truncation: Truncation) -> list[int]:
        """The tokens that stay of a text, however long the text is.

        Only a piece of the text with twice as many tokens is tokenised. At the cut a word may get other tokens. They are
        far from the tokens that stay.
        """
        size = _CHARS_PER_TOKEN * truncation.keep
        while True:
            piece = text[:size] if truncation.first else text[-size:]
            ids = tokenizer.encode(piece, add_special_tokens=add_special_tokens)
            if len(ids) >= 2 * truncation.keep or size >= len(text):
                return truncation.of(ids)
            size *= 4

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise _empty()
        # Length first: it costs nothing, whatever was sent.
        if len(token_ids) >= self._max_model_len:
            raise _bad_prompt(
                f"This model's maximum context length is {self._max_model_len} tokens, prompt and answer together "
                f"(max_model_len), but the prompt has {len(token_ids)}; it may have at most {self._max_model_len - 1}."
            )
        least, most = extremes(token_ids)
        if 0 <= least and most < self._vocab_size:
            return
        for index, token in enumerate(token_ids):
            if not 0 <= token < self._vocab_size:
                raise _bad_prompt(
                    f"prompt_token_ids holds {show(token)} at index {index}, outside the vocabulary of "
                    f"{self._vocab_size} tokens."
                )

    def _max_tokens(self, params: SamplingParams, prompt_len: int) -> int:
        room = self._max_model_len - prompt_len
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but after a prompt of {prompt_len} tokens only {room} are left of "
                f"{self._max_model_len} (max_model_len).",
                param="min_tokens",
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def check_token_ids(self, name: str, ids: Collection[int]) -> None:
        """Raise InvalidRequestError, with the parameter's name, for an id outside the vocabulary."""
        in_vocabulary(name, ids, self._vocab_size)

    def _encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Every word as it is tokenised at the start of a text and after a space, without duplicates.

        The second form counts only if the first doesn't cover it: if it is as long and begins with another token. vLLM does the
        same, so both ban the same words.
        """
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise InvalidRequestError("bad_words needs a tokenizer, and this engine has none.", param="bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            bare, spaced = (
                tuple(self._tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
            )
            forms = [bare]
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                forms.append(spaced)
            for form in forms:
                if not form:
                    raise InvalidRequestError(f"bad_words holds {show(word)}, which has no tokens.", param="bad_words")
                self.check_token_ids("bad_words", form)
                found[form] = None
        return tuple(found)  # EngineRequest counts their tokens

    def _next_seed(self) -> int:
        text = f"{self._seed}/{next(self._unseeded)}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _wrap(seed: int) -> int:
    """A signed 64-bit seed; one past the largest is the smallest."""
    return (seed + 2**63) % 2**64 - 2**63
