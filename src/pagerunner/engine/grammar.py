"""Grammars of structured outputs, by llguidance: checked before a request is queued, followed token by token in the core.

Nothing here runs on the step loop or on the event loop. llguidance compiles and matches within fixed amounts of work, so
that a thread is enough: what exceeds them is an error of that request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.types import EngineRequest, Grammar, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from pagerunner.models.tokenizer import Tokenizer

Value = TypeVar("Value")
_KEPT_CHECKS = 1_024
_KEPT_MATCHERS = 64
_PARAM = "structured_outputs"
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # what llama.cpp's notation has and Lark's hasn't


def grammar_text(wanted: StructuredOutputsParams) -> str:
    """llguidance's text of a grammar that hasn't been compiled. Raises InvalidRequestError."""
    from llguidance import LLMatcher, grammar_from

    try:
        if wanted.regex is not None:
            return LLMatcher.grammar_from_regex(wanted.regex)
        if wanted.choice is not None:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(x) for x in wanted.choice))
        if wanted.grammar is not None:
            return grammar_from("grammar" if _RULE.search(wanted.grammar) else "lark", wanted.grammar)
        options: dict[str, Any] = {}
        if wanted.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if wanted.whitespace_pattern is not None:
            options["whitespace_pattern"] = wanted.whitespace_pattern
        schema = wanted.json if wanted.json is not None else {"type": "object"}
        if isinstance(schema, str):
            schema = json.loads(schema)
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"structured_outputs cannot be read: {str(error)[:400]}.", param=_PARAM) from None


def guide_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """The tokenizer as llguidance knows it, for masks of `vocab_size` bits or more.

    Raises:
        InvalidRequestError: llguidance doesn't understand this kind of tokenizer.
    """
    from llguidance import LLTokenizer

    size = max(vocab_size, tokenizer.vocab_size)
    eos = [token for token in eos_token_ids if token < size]
    try:
        return LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=eos or None)
    except Exception as error:  # the package raises plain exceptions
        raise InvalidRequestError(
            f"This model's tokenizer cannot follow grammars: {error}. Leave structured_outputs out.", param=_PARAM
        ) from None


def _compile(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    # An error's message leaves the parser's state out.
    return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))


class Once(Generic[Value]):
    """A value that is made at the first call, by one thread while others wait, and kept."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._value: list[Value] = []

    def __call__(self) -> Value:
        """The value. Raises what making it raises, each time."""
        with self._lock:
            if not self._value:
                self._value.append(self._make())
            return self._value[0]


class GrammarDoor:
    """Checks structured outputs at the frontend, so that a bad one is refused before it is queued."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        self._tokenizer = Once(tokenizer)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="pagerunner-grammar")
        self._checked: OrderedDict[bytes, Future[str]] = OrderedDict()  # by digest: what is wrong, or ""

    def check(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar for the core. Waits for the check, which is remembered.

        Raises:
            InvalidRequestError: it is malformed, too large, or takes more than limits.MAX_GRAMMAR_SECONDS.
        """
        grammar = Grammar(grammar_text(wanted), wanted.after or "")
        try:
            _refuse(self._future(grammar.text).result(limits.MAX_GRAMMAR_SECONDS))
        except FutureTimeout:
            raise _too_slow() from None
        return grammar

    async def prepare(self, wanted: StructuredOutputsParams) -> None:
        """Wait on an event loop until `check` will not wait. Raises like it."""
        text = Grammar(grammar_text(wanted)).text
        try:
            pending = asyncio.shield(asyncio.wrap_future(self._future(text)))
            _refuse(await asyncio.wait_for(pending, limits.MAX_GRAMMAR_SECONDS))
        except TimeoutError:
            raise _too_slow() from None

    def _future(self, text: str) -> Future[str]:
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        found = self._checked.get(key)
        if found is None:
            found = self._checked[key] = self._threads.submit(self._fault, text)
            if len(self._checked) > _KEPT_CHECKS:
                self._checked.popitem(last=False)
        return found

    def _fault(self, text: str) -> str:
        matcher = _compile(self._tokenizer(), text)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return str(matcher.get_error())


def _refuse(fault: str) -> None:
    if fault:
        fault = " ".join(fault.split())
        fault = fault if len(fault) <= 400 else f"{fault[:397]}..."
        raise InvalidRequestError(f"structured_outputs is no grammar that can be followed: {fault}", param=_PARAM)


def _too_slow() -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs takes more than {limits.MAX_GRAMMAR_SECONDS:g} seconds to compile.", param=_PARAM
    )


class Guides:
    """Makes the core's guides. Grammars compile on threads of their own and are kept for the next request that has them."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        self._tokenizer = Once(tokenizer)
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="pagerunner-compile")
        self._followers = ThreadPoolExecutor(2, thread_name_prefix="pagerunner-guide")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def __call__(self, request: EngineRequest) -> GrammarGuide:
        """A guide for a request that has a grammar."""
        grammar = request.grammar
        assert grammar is not None
        compiled = self._compiled.get(grammar.text)
        if compiled is None:
            compiled = self._compiled[grammar.text] = self._compilers.submit(self._compile, grammar.text)
            if len(self._compiled) > _KEPT_MATCHERS:
                self._compiled.popitem(last=False)
        return GrammarGuide(self._tokenizer, compiled, self._followers, grammar.after)

    def _compile(self, text: str) -> LLMatcher:
        return _compile(self._tokenizer(), text)


class GrammarGuide:
    """Follows one sequence; see sched/guided.py. What goes wrong on a thread becomes `error`."""

    def __init__(
        self, tokenizer: Callable[[], LLTokenizer], compiled: Future[LLMatcher], threads: ThreadPoolExecutor, after: str
    ) -> None:
        self._tokenizer = tokenizer
        self._threads = threads
        self._after = after.encode()
        self._tail = b""  # of the text before the grammar begins
        self._matcher: LLMatcher | None = None
        self._mask: bytes | None = None
        self._finished = False
        self._error: str | None = None
        self._restart()
        compiled.add_done_callback(lambda done: self._submit(lambda: self._begin(done)))

    def _restart(self) -> None:
        self._done = threading.Event()
        self._due = time.monotonic() + limits.MAX_GRAMMAR_SECONDS

    @property
    def ready(self) -> bool:
        """See Guide.ready."""
        return self._done.is_set() or time.monotonic() > self._due

    @property
    def mask(self) -> bytes | None:
        """See Guide.mask."""
        return self._mask

    @property
    def finished(self) -> bool:
        """See Guide.finished."""
        return self._finished

    @property
    def error(self) -> str | None:
        """See Guide.error."""
        if not self._done.is_set():
            return f"its grammar took more than {limits.MAX_GRAMMAR_SECONDS:g} seconds."
        return self._error

    def wait(self, seconds: float) -> None:
        """See Guide.wait."""
        self._done.wait(seconds)

    def advance(self, token_ids: list[int]) -> None:
        """See Guide.advance."""
        self._restart()
        self._submit(lambda: self._consume(token_ids))

    def _submit(self, work: Callable[[], None]) -> None:
        done = self._done

        def run() -> None:
            try:
                work()
                self._look()
            except Exception as error:  # it must end this sequence only
                self._error = f"its grammar cannot be followed: {error}"
            done.set()

        self._threads.submit(run)

    def _begin(self, compiled: Future[LLMatcher]) -> None:
        self._matcher = compiled.result().deep_copy()

    def _consume(self, token_ids: list[int]) -> None:
        assert self._matcher is not None
        for token in token_ids:
            if not self._after:
                self._matcher.consume_token(token)
                continue
            self._tail += self._tokenizer().decode_bytes([token])
            if self._after in self._tail:
                self._after = b""
            self._tail = self._tail[-len(self._after) :]

    def _look(self) -> None:
        """What may come next."""
        matcher = self._matcher
        assert matcher is not None
        if self._after:
            return
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        self._finished = matcher.is_stopped()
        self._mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
