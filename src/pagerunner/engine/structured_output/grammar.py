"""Guides: grammars of structured outputs, followed token by token by llguidance, on threads beside the step loop.

A grammar that comes here has passed engine/structured_output/grammar_door.py. So another process has compiled it before, in
a smaller stack than these threads have.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from pagerunner import limits
from pagerunner.types import EngineRequest, Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
KEPT = 64  # compiled grammars that are kept for later requests with the same grammar
TOKENIZER_SECONDS = 60.0  # that llguidance may take, once, to read a tokenizer; it needs 4 for 150,000 tokens
QUICK_SECONDS = 0.0003  # of a processor, for a mask: quicker ones are made together
LONE_MASKS = 16  # quick ones in a row, after one that wasn't, until masks are made together again
TOGETHER_SECONDS = 0.01
"""After which each of those that were made together is made alone, to see which one took so long."""
_LARGE_CHARS = 4_096
_FOLLOWERS = max(2, min(8, (os.cpu_count() or 2) // 2))  # llguidance releases the interpreter's lock


def guide_tokenizer(tokenizer_json: str, size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """A tokenizer as llguidance knows it, for masks of `size` bits. Raises ValueError for a kind that it doesn't know."""
    from llguidance import LLTokenizer

    return LLTokenizer(
        tokenizer_json, n_vocab=size, eos_token=[token for token in eos_token_ids if token < size] or None
    )


def _parser_limits() -> LLParserLimits:
    """What llguidance may spend on one grammar. Its own limits end at 500 optional properties and 2,000 alternatives.

    A mask then takes at most about 70 ms on a thread (its default: 15 ms); a schema of 1,000 optional properties takes 10 ms.
    An error's message leaves the parser's state out.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=16_000, step_max_items=200_000, step_lexer_fuel=1_000_000, verbose_errors=False
    )


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at the beginning of the text. Raises ValueError that says why there can't be one."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


_REASONS = (
    ("NoExtension", "no finite text matches it"),
    ("intersection stack level", "its references go in a circle, or too deep"),
    ("Current row has", "it allows too many alternatives at one place"),
    ("too many expressions", "it takes too much work to follow, as nested repetitions do"),
    ("too many items", "it takes too much work to follow"),
)


def plain_reason(fault: str) -> str:
    """What llguidance says, as a sentence for the one who wrote the grammar."""
    fault = " ".join(fault.replace("<non-verbose/>", "")[:1_000].split())
    for words, meaning in _REASONS:
        if words in fault:
            return meaning if fault.startswith(words) else f"{meaning} ({fault[:200]})"
    return fault if len(fault) <= 400 else f"{fault[:397]}..."


class Once(Generic[Value]):
    """A value that is made at the first call, by one thread while others wait, and kept."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._value: list[Value] = []

    @property
    def made(self) -> bool:
        """Whether the first call has ended."""
        return bool(self._value)

    def __call__(self) -> Value:
        """The value. Raises what making it raises, each time."""
        with self._lock:
            if not self._value:
                self._value.append(self._make())
            return self._value[0]


class Guides:
    """Makes the core's guides. Grammars compile on threads of their own and are kept for the next request that has them."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        self._tokenizer = Once(tokenizer)
        self._compilers = {  # a small grammar doesn't wait for large ones
            large: ThreadPoolExecutor(2, thread_name_prefix="pagerunner-compile") for large in (False, True)
        }
        self._looks = _Looks()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._waiting: Counter[str] = Counter()  # guides by the grammar that they wait for

    def __call__(self, request: EngineRequest) -> GrammarGuide:
        """A guide for a request that has a grammar."""
        grammar = request.grammar
        assert grammar is not None
        text = grammar.text
        compiled = self._compiled.get(text)
        if compiled is None:
            pool = self._compilers[len(text) > _LARGE_CHARS]
            compiled = self._compiled[text] = pool.submit(lambda: compile_grammar(self._tokenizer(), text))
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        self._waiting[text] += 1
        return GrammarGuide(self._tokenizer, compiled, self._looks, grammar, lambda: self._left(text, compiled))

    def _left(self, text: str, compiled: Future[LLMatcher]) -> None:
        """A sequence has ended.

        A grammar that no sequence waits for any more is not compiled, unless its compilation has begun.
        """
        self._waiting[text] -= 1
        if self._waiting[text] > 0:
            return
        del self._waiting[text]
        if compiled.cancel() and self._compiled.get(text) is compiled:
            del self._compiled[text]


class _Place:
    """Where a text is in its grammar, or before it: a grammar may begin late."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, grammar: Grammar) -> None:
        self.matcher, self._tokenizer = matcher, tokenizer
        self._after = grammar.after.encode()
        self._first: int | None = None  # the token that `begins` is, until there is a first token
        self._tail = b""  # of the text before the grammar begins
        if grammar.begins:
            found = tokenizer.tokenize_str(grammar.begins, parse_special=True)
            if len(found) == 1:
                self._first = found[0]
            else:
                self._after = b""

    def copy(self) -> _Place:
        """One that goes on by itself."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask."""
        return 4 * -(-self._tokenizer.vocab_size // 32)

    @property
    def is_before(self) -> bool:
        """Whether the grammar hasn't begun, so everything is allowed."""
        return bool(self._after) and self._first is None

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return not self.is_before and self.matcher.is_stopped()

    def consume(self, token_ids: Iterable[int]) -> _Place:
        """These tokens have come. Returns itself."""
        for token in token_ids:
            if self._first is not None:
                self._after = self._after if token == self._first else b""
                self._first = None
            if not self._after:
                self.matcher.consume_token(token)
                continue
            self._tail += self._tokenizer.decode_bytes([token])
            if self._after in self._tail:
                self._after = b""
            self._tail = self._tail[-len(self._after) :]
        return self

    def mask(self) -> bytes | None:
        """What may come next. Raises ValueError if the grammar can't be followed."""
        if self.is_before:
            return None
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())
        return self.checked(self.matcher.compute_bitmask()[: self.mask_bytes])

    def checked(self, mask: bytes) -> bytes:
        """The matcher's mask. Raises ValueError if it says that there is none."""
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())
        if self._first is None:
            return mask
        changed = bytearray(mask)
        changed[self._first // 8] |= 1 << self._first % 8
        return bytes(changed)


def masks_together(matchers: Sequence[LLMatcher], size: int) -> list[bytes]:
    """Their masks of so many bytes, made on threads of the library: these wait for no lock of the interpreter."""
    masks = np.empty((len(matchers), size), dtype=np.uint8)
    given = [(matcher, number) for number, matcher in enumerate(matchers)]
    _executor().unsafe_compute_mask_ptr(given, masks.ctypes.data, size, len(matchers))
    return [mask.tobytes() for mask in masks]


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(_FOLLOWERS)


class _Looks:
    """The threads that make masks. A next mask waits for no mask behind another sequence's draft, unless that one is being made.

    Next masks of guides whose masks take little are made together: a thread of Python's for each takes several times as long as they do.
    """

    def __init__(self, together: Callable[[Sequence[LLMatcher], int], list[bytes]] = masks_together) -> None:
        self._threads = ThreadPoolExecutor(_FOLLOWERS, thread_name_prefix="pagerunner-guide")
        self._firsts: deque[None] = deque()  # one for each next mask, or several together, that no thread has begun
        self._together, self._lock = together, threading.Lock()
        self._quick: list[_Look] = []
        self._busy = False  # a thread makes masks of quick ones

    def next(self, look: _Look) -> None:
        """Find a next mask."""
        if look.guide.lone:
            self._begin(lambda: self._make([look]))
            return
        with self._lock:
            self._quick.append(look)
            idle, self._busy = not self._busy, True
        if idle:
            self._begin(self._make_quick)

    def _begin(self, work: Callable[[], None]) -> None:
        self._firsts.append(None)

        def run() -> None:
            self._firsts.popleft()
            work()

        self._threads.submit(run)

    def _make_quick(self) -> None:
        while True:
            with self._lock:
                looks, self._quick = self._quick, []
                self._busy = bool(looks)
            if not looks:
                return
            self._make(looks)

    def _make(self, looks: list[_Look]) -> None:
        """Several, or the only one."""
        asked = [look for look in looks if look.begin()]
        masks: Sequence[bytes | None] = [None] * len(asked)
        if len(asked) > 1:
            began = time.monotonic()
            try:
                masks = self._together([look.place.matcher for look in asked], asked[0].place.mask_bytes)
            except BaseException:  # one of them can't go on, and says so itself when it is alone
                logger.debug("masks can't be made together", exc_info=True)
            if time.monotonic() - began > TOGETHER_SECONDS:
                for look in asked:
                    look.guide.lone = 1
        for look, mask in zip(asked, masks, strict=True):
            look.end(mask)
        for look in looks:
            if look.behind is not None:
                self._threads.submit(self.behind, *look.behind)

    def behind(self, steps: Iterator[None], done: threading.Event) -> None:
        """Go through steps, each of which makes a mask behind a draft; next masks that wait for a thread come before. Then it is `done`."""
        try:
            for _ in steps:
                if self._firsts:
                    self._threads.submit(self.behind, steps, done)
                    return
        except BaseException:  # whatever a library says of a token that may never come is no fault of the request
            logger.debug("a draft can't be looked at", exc_info=True)
        done.set()


class _Look:
    """A guide's next mask, which is to be made when `work` has made the text longer. What its library says of it ends that sequence only."""

    place: _Place

    def __init__(self, guide: GrammarGuide, work: Callable[[], _Place], drafts: Sequence[int]) -> None:
        self.guide, self._work, self._drafts = guide, work, drafts
        self._known, self._done = guide.known, guide.done
        self.behind: tuple[Iterator[None], threading.Event] | None = None

    def begin(self) -> bool:
        """Take the tokens. Returns whether a mask is to be made; else the look has ended."""
        try:
            self.place = self._work()
            if not self.place.is_before:
                return True
            self._found(None)
        except BaseException as error:  # also a library's panic
            self._failed(error)
        return False

    def end(self, mask: bytes | None) -> None:
        """The mask that was made together with others', or None: make it."""
        try:
            if mask is not None:
                self._found(self.place.checked(mask))
                return
            began = time.thread_time()
            mask = self.place.mask()
            self.guide.took(time.thread_time() - began)
            self._found(mask)
        except BaseException as error:
            self._failed(error)

    def _found(self, mask: bytes | None) -> None:
        guide = self.guide
        guide.masks, guide.finished = [mask], self.place.is_complete
        if self._drafts and not guide.finished:
            ahead = self.place.copy()  # now, as the next tokens may come once the mask is known
            self.behind = guide.look_behind(self._drafts, ahead, guide.masks, self._done), self._done
        self._known.set()
        if self.behind is None and self._done is not self._known:
            self._done.set()

    def _failed(self, error: BaseException) -> None:
        self.guide.fail(error)
        self._known.set()
        self._done.set()


class GrammarGuide:
    """Follows one sequence; see sched/guided.py. An exception on a thread becomes `error`."""

    def __init__(
        self,
        tokenizer: Once[LLTokenizer],
        compiled: Future[LLMatcher],
        looks: _Looks,
        grammar: Grammar,
        left: Callable[[], None],
    ) -> None:
        self._left, self._looks = left, looks
        self._place: _Place | None = None
        self.masks: list[bytes | None] = []
        self.finished = False
        self.lone = 1  # masks to be made alone
        self._error: str | None = None
        self._restart()
        if not tokenizer.made:
            self._due += TOKENIZER_SECONDS

        def begin() -> _Place:
            self._place = _Place(compiled.result().deep_copy(), tokenizer(), grammar)
            return self._place

        compiled.add_done_callback(lambda done: self._looks.next(_Look(self, begin, ())))

    def _restart(self, *, ahead: bool = False) -> None:
        self.known = threading.Event()
        self.done = threading.Event() if ahead else self.known
        self._due = time.monotonic() + limits.MAX_GRAMMAR_SECONDS

    @property
    def ready(self) -> bool:
        """See Guide.ready."""
        return self.known.is_set() or time.monotonic() > self._due

    @property
    def looks_ahead(self) -> bool:
        """See Guide.looks_ahead."""
        return not self.done.is_set()

    @property
    def error(self) -> str | None:
        """See Guide.error."""
        if not self.known.is_set():
            return f"its grammar took more than {limits.MAX_GRAMMAR_SECONDS:g} seconds."
        return self._error

    def wait(self, seconds: float, *, ahead: bool = False) -> None:
        """See Guide.wait."""
        (self.done if ahead else self.known).wait(seconds)

    def close(self) -> None:
        """See Guide.close."""
        self.done = threading.Event()
        self._left()

    def advance(self, token_ids: list[int], drafts: Sequence[int] = ()) -> None:
        """See Guide.advance."""
        self._restart(ahead=bool(drafts))
        place = self._place
        assert place is not None
        self._looks.next(_Look(self, lambda: place.consume(token_ids), drafts))

    def took(self, seconds: float) -> None:
        """A mask alone took so many seconds of a processor."""
        self.lone = LONE_MASKS if seconds > QUICK_SECONDS else max(self.lone - 1, 0)

    def fail(self, error: BaseException) -> None:
        """The library says that the grammar can't be followed."""
        self._error = f"its grammar cannot be followed: {plain_reason(str(error)).rstrip('.')}."

    def look_behind(
        self, drafts: Sequence[int], place: _Place, masks: list[bytes | None], done: threading.Event
    ) -> Iterator[None]:
        """Add the masks behind drafts, up to the first draft that may not come, or that ends the text: nothing can follow it."""
        for token in drafts:
            mask = masks[-1]
            if mask is not None and not (token < 8 * len(mask) and mask[token // 8] >> token % 8 & 1):
                return
            place.consume([token])
            mask = place.mask()
            if place.is_complete or done is not self.done:  # the sequence went on meanwhile, or has ended
                return
            masks.append(mask)
            yield
