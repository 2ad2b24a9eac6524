"""Guides on their threads, with a grammar library that waits and fails as it is told."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher

from helpers.checkpoints import make_checkpoint
from helpers.patience import LONG
from pagerunner.engine.structured_output import grammar
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import Grammar

END, BAD, ODD = 1, 2, 3
"""Tokens: the last one of a text; one that isn't allowed; one that is allowed and that the library can't take."""


class Panic(BaseException):
    """What a library in Rust raises where it has an error of its own: no Exception."""


class Library:
    """What all matchers of a test have in common: gates that a text's mask waits for, and the masks in the order of their making."""

    def __init__(self) -> None:
        self.gates: dict[tuple[int, ...], threading.Event] = {}
        self.begun: dict[tuple[int, ...], threading.Event] = defaultdict(threading.Event)
        self.made: list[tuple[int, ...]] = []
        self.fault: BaseException = ValueError("it can't be")


class Matcher:
    """Allows all tokens below 16 but one."""

    def __init__(self, library: Library, text: tuple[int, ...] = ()) -> None:
        self._library, self._text = library, text

    def deep_copy(self) -> Matcher:
        return Matcher(self._library, self._text)

    def consume_token(self, token: int) -> bool:
        if token == ODD:
            raise self._library.fault
        self._text += (token,)
        return True

    def compute_bitmask(self) -> bytes:
        library, text = self._library, self._text
        library.begun[text].set()
        if text in library.gates:
            assert library.gates[text].wait(LONG)
        library.made.append(text)
        return (0xFFFF & ~(1 << BAD)).to_bytes(2, "little")

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return self._text[-1:] == (END,)


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def make_guide(library: Library, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(grammar, "_FOLLOWERS", 1)
    one: Any = grammar._Looks()
    monkeypatch.setattr(grammar, "_FOLLOWERS", 4)
    many: Any = grammar._Looks()

    def make(*, alone: bool = False, after: str = "", looks: Any = many) -> grammar.GrammarGuide:
        compiled: Future[Any] = Future()
        compiled.set_result(Matcher(library))
        tokenizer: Any = grammar.Once(lambda: SimpleNamespace(decode_bytes=bytes, vocab_size=16))
        guide = grammar.GrammarGuide(
            tokenizer, compiled, one if alone else looks, Grammar("g", after=after), lambda: None
        )
        guide.wait(LONG)
        assert guide.error is None
        return guide

    return make


def test_the_next_mask_is_known_before_those_behind_drafts(library: Library, make_guide: Any) -> None:
    guide = make_guide()
    library.gates[5, 6] = threading.Event()
    guide.advance([5], [6, 7])
    guide.wait(LONG)
    assert guide.ready and guide.looks_ahead and len(guide.masks) == 1
    library.gates[5, 6].set()
    guide.wait(LONG, ahead=True)
    assert len(guide.masks) == 3 and not guide.looks_ahead


@pytest.mark.parametrize(
    ("drafts", "masks"), [([6, BAD, 7], 2), ([BAD], 1), ([6, END, 7], 2), ([6, 99], 2), ([6, 7, 8], 4)]
)
def test_drafts_count_up_to_the_first_that_may_not_come_or_ends_the_text(
    make_guide: Any, drafts: list[int], masks: int
) -> None:
    guide = make_guide()
    guide.advance([5], drafts)
    guide.wait(LONG, ahead=True)
    assert (len(guide.masks), guide.error, guide.finished) == (masks, None, False)


def test_drafts_may_lead_from_reasoning_into_the_grammar(make_guide: Any) -> None:
    """Bytes stand for tokens here. What the drafts have begun has not begun for the text."""
    guide = make_guide(after="</t>")
    for text, drafts in ((b"so <", b"/t>"), (b"/", b"t>"), (b"t", b">")):
        guide.advance([*text], [*drafts, 5, BAD])
        guide.wait(LONG, ahead=True)
        assert [mask is None for mask in guide.masks] == [*[True] * len(drafts), False, False]
        assert guide.error is None


@pytest.mark.parametrize("fault", [ValueError("a"), OverflowError("b"), RuntimeError("c"), Panic("d")])
def test_a_draft_that_the_library_fails_at_is_none_and_a_token_ends_the_request_at_once(
    library: Library, make_guide: Any, fault: BaseException
) -> None:
    library.fault = fault
    guide = make_guide()
    guide.advance([5], [6, ODD, 7])
    guide.wait(LONG, ahead=True)
    assert (len(guide.masks), guide.error) == (2, None)
    guide.advance([6, 8])
    guide.wait(LONG)
    assert guide.error is None and library.made[-1] == (5, 6, 8), "what was looked at ahead isn't the text"
    guide.advance([ODD])
    guide.wait(LONG)
    assert guide.error == f"its grammar cannot be followed: {fault}."


def test_who_goes_on_meanwhile_gets_the_masks_of_the_new_text(library: Library, make_guide: Any) -> None:
    guide = make_guide()
    gate = library.gates[5, 6] = threading.Event()
    guide.advance([5], [6, 7, 8])
    assert library.begun[5, 6].wait(LONG)
    guide.advance([9], [10])
    guide.wait(LONG, ahead=True)
    assert len(guide.masks) == 2
    gate.set()
    assert make_guide().error is None
    guide.advance([11])
    guide.wait(LONG, ahead=True)
    assert len(guide.masks) == 1 and (5, 6, 7) not in library.made, "the old drafts are given up"


def test_a_next_mask_waits_for_no_other_sequences_drafts(library: Library, make_guide: Any) -> None:
    """One thread: the mask that it is making is the last one before."""
    one, other = make_guide(alone=True), make_guide(alone=True)
    library.made.clear()
    gate = library.gates[5, 6] = threading.Event()
    one.advance([5], [6, 7, 8, 9])
    assert library.begun[5, 6].wait(LONG)
    other.advance([12])
    gate.set()
    other.wait(LONG)
    one.wait(LONG, ahead=True)
    assert library.made == [(5,), (5, 6), (12,), (5, 6, 7), (5, 6, 7, 8), (5, 6, 7, 8, 9)]
    assert len(one.masks) == 5


def test_an_ended_sequence_looks_at_no_further_draft(library: Library, make_guide: Any) -> None:
    guide = make_guide(alone=True)
    gate = library.gates[5, 6] = threading.Event()
    guide.advance([5], [6, 7, 8])
    assert library.begun[5, 6].wait(LONG)
    guide.close()
    gate.set()
    make_guide(alone=True)  # behind it on the same thread
    assert library.made[-1] == () and (5, 6, 7) not in library.made


def test_a_grammar_that_is_used_again_and_again_is_compiled_once(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others come and go beside it: the one that was used longest ago is given up."""
    compiled: list[str] = []
    monkeypatch.setattr(grammar, "KEPT", 2)
    monkeypatch.setattr(grammar, "compile_grammar", lambda _, text: compiled.append(text) or Matcher(library))
    tokenizer: Any = SimpleNamespace(decode_bytes=bytes, vocab_size=16)
    guides = grammar.Guides(lambda: tokenizer)
    for text in ("a", "b", "a", "c", "a", "d", "a", "b"):
        request: Any = SimpleNamespace(grammar=Grammar(text=text))
        guide = guides(request)
        guide.wait(LONG)
        assert guide.ready and guide.error is None
        guide.close()
    assert compiled == ["a", "b", "c", "d", "b"]


def test_quick_masks_are_made_together_and_are_those_that_are_made_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Tokenizer.from_path(str(make_checkpoint(tmp_path, "llama"))).to_json()
    tokenizer = grammar.guide_tokenizer(
        data, 510, [0]
    )  # masks of all tokens are a word shorter than those of the library
    text = LLMatcher.grammar_from_regex("(yes|no), because [a-z ]+")
    asked: Any = SimpleNamespace(grammar=Grammar(text))
    monkeypatch.setattr(grammar, "QUICK_SECONDS", LONG)
    guides = grammar.Guides(lambda: tokenizer)
    several, alone = [guides(asked) for _ in range(5)], grammar.compile_grammar(tokenizer, text)
    for guide in several:
        guide.wait(LONG)
    looks, made = guides._looks, 0
    for token in tokenizer.tokenize_str("yes, because of it"):
        looks._busy = True
        for guide in several:
            guide.advance([token])
        looks._make_quick()
        alone.consume_token(token)
        for guide in several:
            assert guide.error is None and guide.masks == [alone.compute_bitmask()[:64]]
        made += all(guide.lone == 0 for guide in several)
    assert made > 3, "nothing was made together"


def test_who_fails_among_masks_that_are_made_together_fails_alone(library: Library, make_guide: Any) -> None:
    """What all of them raise is nobody's fault, and a slow one is found by what it takes alone."""
    made: list[int] = []

    def together(matchers: Any, size: int) -> list[bytes]:
        made.append(len(matchers))
        if len(made) == 1:
            raise Panic
        return [matcher.compute_bitmask() for matcher in matchers]

    looks: Any = grammar._Looks(together)
    guides = [make_guide(looks=looks) for _ in range(3)]
    assert all(guide.lone == 0 for guide in guides)
    for expected in ([3], [3, 3]):
        looks._busy = True
        for guide in guides:
            guide.advance([5])
        looks._make_quick()
        for guide in guides:
            guide.wait(LONG)
            assert guide.error is None and len(guide.masks) == 1
        assert made == expected
    looks._busy = True
    guides[0].advance([ODD])
    for guide in guides[1:]:
        guide.advance([6])
    looks._make_quick()
    assert [guide.error is None for guide in guides] == [False, True, True] and made[-1] == 2


def test_a_mask_that_took_long_is_made_alone_for_a_while(make_guide: Any) -> None:
    guide = make_guide()
    guide.took(1.0)
    for left in range(grammar.LONE_MASKS, 0, -1):
        assert guide.lone == left
        guide.took(0.0)
    assert guide.lone == 0
