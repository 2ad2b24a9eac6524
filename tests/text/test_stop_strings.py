"""Stop strings: found wherever the text is split, never leaked, the first complete one wins."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from pagerunner import limits
from pagerunner.text.stop_strings import StopAutomaton, StopFinder


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    finder = StopFinder(tuple(stops), include)
    shown = ""
    for piece in pieces:
        text, stop = finder.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + finder.flush(), None


def reference(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Character by character: the first end of any stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


letters = st.text("ab", min_size=1, max_size=5)


@settings(max_examples=effort(166, 1000), deadline=None)
@given(
    stops=st.lists(letters, min_size=1, max_size=5),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    include=...,
)
def test_found_wherever_the_text_is_split(stops: list[str], pieces: list[str], include: bool) -> None:
    assert run(stops, pieces, include) == reference(stops, "".join(pieces), include)


@settings(max_examples=effort(100, 600), deadline=None)
@given(stops=st.lists(letters, min_size=1, max_size=4), pieces=st.lists(st.text("abc", max_size=4), max_size=12))
def test_nothing_is_shown_too_early_or_held_too_long(stops: list[str], pieces: list[str]) -> None:
    finder, text, shown = StopFinder(tuple(stops), False), "", ""
    for piece in pieces:
        text += piece
        part, stop = finder.feed(piece)
        shown += part
        if stop is not None:
            return
        held = text[len(shown) :]
        begins = [n for n in range(len(text) + 1) if any(s.startswith(text[n:]) and s != text[n:] for s in stops)]
        assert text == shown + held
        assert len(shown) == min(begins)


@settings(max_examples=effort(66, 400), deadline=None)
@given(
    stops=st.lists(letters, min_size=1, max_size=4),
    early=st.lists(st.text("ab", max_size=3), max_size=6),
    late=st.text("abc", max_size=6),
)
def test_unarmed_strings_pass_and_armed_ones_may_begin_in_them(stops: list[str], early: list[str], late: str) -> None:
    finder = StopFinder(tuple(stops), False)
    shown = "".join(finder.feed(piece, armed=False)[0] for piece in early)
    text, stop = finder.feed(late)
    shown += text
    whole, boundary = "".join(early) + late, len("".join(early))
    ends = [n for n in range(boundary + 1, len(whole) + 1) if any(whole[:n].endswith(s) for s in stops)]
    if stop is None:
        assert not ends and shown + finder.flush() == whole
    else:
        assert ends and whole[: ends[0]].endswith(stop)
        # An early string that passed was shown; only what was still held back can be taken away.
        assert shown == whole[: ends[0] - len(stop)]


def test_of_two_the_first_complete_one_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")
    assert run(["a", "ab"], ["xab"]) == ("x", "a")


def test_included_in_the_output() -> None:
    assert run(["END"], ["one E", "N", "D two"], include=True) == ("one END", "END")


def test_a_beginning_that_comes_to_nothing_is_shown() -> None:
    assert run(["STOP"], ["a S", "TO", "NE"]) == ("a STONE", None)
    assert run(["STOP"], ["a ST"]) == ("a ST", None)


def test_a_string_that_may_not_stop_yet_is_not_held_back() -> None:
    finder = StopFinder(("ab", "abcd"), False)
    assert finder.feed("xab", armed=False) == ("x", None)  # may become abcd
    assert finder.feed("cd", armed=False) == ("abcd", None)
    assert StopFinder(("ab",), False).feed("xab", armed=False) == ("xab", None)


def test_as_many_stop_strings_as_a_request_may_have_take_little_memory() -> None:
    source = random.Random(0)
    size = limits.MAX_STOP_STRING_CHARS
    strings = tuple("".join(source.choices("abcdefgh\u4e00", k=size)) for _ in range(limits.MAX_STOP_STRINGS))
    tracemalloc.start()
    try:
        machine = StopAutomaton(strings)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 4 * 2**20, "it was 17 MiB, for a body of 64 KiB"  # four times what one request may have
    state = 0
    for char in f"abc{strings[7]}":
        state = machine.step(state, char)
    assert machine.longest[state] == strings[7]
