"""Regular expressions from a checkpoint's config: whoever wrote them, a match takes little time.

Python's matcher tries one way after another. With repetitions inside of repetitions, or with many of them, ways are as many as 2 to the
power of the name's length. Such patterns are matched by following all ways at once: a set of the places where the text matched so far may
end. A name of 100 characters has at most 101 places.
"""

from __future__ import annotations

import re
from collections.abc import Set
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_FEW = (
    2  # repetitions one after another that Python's matcher gets: a name of 100 characters has 5,000 ways through two
)
_LONGEST = 2_000  # characters of a pattern; published ones have fewer than 200
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)
_WORD = re.compile(r"\w")
_KINDS = {
    ops.CATEGORY_DIGIT: re.compile(r"\d"),
    ops.CATEGORY_NOT_DIGIT: re.compile(r"\D"),
    ops.CATEGORY_SPACE: re.compile(r"\s"),
    ops.CATEGORY_NOT_SPACE: re.compile(r"\S"),
    ops.CATEGORY_WORD: _WORD,
    ops.CATEGORY_NOT_WORD: re.compile(r"\W"),
}


class Pattern:
    """A compiled pattern.

    Raises:
        ValueError: the text is no regular expression, or one that can't be matched in little time; the message says why.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ValueError(f"it has {len(text)} characters; patterns may have {_LONGEST}")
        try:
            self._compiled = re.compile(text)
            self._parts = list(_parser.parse(text))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None
        self._quick = _repetitions(self._parts) <= _FEW
        if not self._quick:
            if self._compiled.flags & ~re.UNICODE:
                raise ValueError("flags such as (?i) can't stand beside so many repetitions")
            _check(self._parts)

    def match(self, text: str) -> bool:
        """Whether `text` begins with what the pattern describes."""
        if self._quick:
            return self._compiled.match(text) is not None
        return bool(_ends(self._parts, text, {0}))


def _children(op: Any, argument: Any) -> list[Any]:
    """The sequences inside of one part of a pattern."""
    if op in _REPEATS or op is ops.POSSESSIVE_REPEAT:
        return [argument[2]]
    if op is ops.BRANCH:
        return list(argument[1])
    if op is ops.SUBPATTERN:
        return [argument[3]]
    if op in (ops.ASSERT, ops.ASSERT_NOT):
        return [argument[1]]
    if op is ops.ATOMIC_GROUP:
        return [argument]
    return [part for part in argument[1:] if part is not None] if op is ops.GROUPREF_EXISTS else []


def _repetitions(parts: Any) -> float:
    """How many repetitions stand one after another; infinite where a repetition has something else than one character in it."""
    count = 0.0
    for op, argument in parts:
        inside = _children(op, argument)
        if op in _REPEATS and argument[1] > 1:
            simple = len(argument[2]) == 1 and not _children(*argument[2][0])
            count += 1 if simple else float("inf")
        else:
            count += sum(map(_repetitions, inside))
    return count


def _check(parts: Any) -> None:
    """Refuse what depends on which way was taken."""
    for op, argument in parts:
        if op in (ops.GROUPREF, ops.GROUPREF_EXISTS, ops.ATOMIC_GROUP, ops.POSSESSIVE_REPEAT):
            raise ValueError("references to groups and possessive parts can't stand beside so many repetitions")
        if op is ops.SUBPATTERN and (argument[1] or argument[2]):
            raise ValueError("flags such as (?i:) can't stand beside so many repetitions")
        for inside in _children(op, argument):
            _check(inside)


def _ends(parts: Any, text: str, places: Set[int]) -> Set[int]:
    """Where a match of `parts` may end that begins at one of `places`."""
    for op, argument in parts:
        if not places:
            break
        places = _step(op, argument, text, places)
    return places


def _step(op: Any, argument: Any, text: str, places: Set[int]) -> Set[int]:
    if op in _REPEATS:
        return _repeated(argument, text, places)
    if op is ops.BRANCH:
        return set().union(*(_ends(parts, text, places) for parts in argument[1]))
    if op is ops.SUBPATTERN:
        return _ends(argument[3], text, places)
    if op in (ops.ASSERT, ops.ASSERT_NOT):
        return {place for place in places if _holds(argument, text, place) is (op is ops.ASSERT)}
    if op is ops.AT:
        return {place for place in places if _is_at(argument, text, place)}
    return {place + 1 for place in places if place < len(text) and _is_one(op, argument, text[place])}


def _repeated(argument: Any, text: str, places: Set[int]) -> Set[int]:
    least, most, parts = argument
    for _ in range(least):
        before, places = places, _ends(parts, text, places)
        if places == before:
            break
    found, new, count = set(places), places, least
    while new and count < most:
        new = _ends(parts, text, new) - found
        found |= new
        count += 1
    return found


def _holds(argument: Any, text: str, place: int) -> bool:
    """Whether what is looked ahead for, or back for, is there."""
    direction, parts = argument
    if direction > 0:
        return bool(_ends(parts, text, {place}))
    return any(place in _ends(parts, text[:place], {first}) for first in range(place + 1))


def _is_at(kind: Any, text: str, place: int) -> bool:
    if kind in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
        return place == 0
    if kind is ops.AT_END:
        return place == len(text) or text[place:] == "\n"
    if kind is ops.AT_END_STRING:
        return place == len(text)
    edge = bool(_WORD.match(text, place)) is not bool(place and _WORD.match(text[place - 1]))
    return edge is (kind is ops.AT_BOUNDARY)


def _is_one(op: Any, argument: Any, character: str) -> bool:
    """Whether a part that stands for one character stands for this one."""
    if op is ops.ANY:
        return character != "\n"
    if op is ops.IN:
        negated = argument[0][0] is ops.NEGATE
        return any(_is_one(kind, one, character) for kind, one in argument if kind is not ops.NEGATE) is not negated
    if op is ops.RANGE:
        return bool(argument[0] <= ord(character) <= argument[1])
    if op is ops.CATEGORY:
        return _KINDS[argument].match(character) is not None
    return (ord(character) == argument) is not (op is ops.NOT_LITERAL)
