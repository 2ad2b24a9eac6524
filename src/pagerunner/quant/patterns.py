"""Regular expressions from a checkpoint's config: whoever wrote them, a match takes little time.

Python's matcher tries one way after another. With repetitions inside of repetitions, or with many repetitions or
alternatives one after another, ways are as many as 2 to the power of the name's length: 40 times `.?` has 2 to the power of
40. Such patterns are matched by following all ways at once: a set of the places where the text matched so far may end. A
name of 100 characters has at most 101 places.
"""

from __future__ import annotations

import re
from collections.abc import Set
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_NAME = 100  # characters of a long module's name
_FEW = 16 * (_NAME + 1) ** 2  # ways that Python's matcher gets: two repetitions, and alternatives beside them
_DEEPEST = 3  # repetitions inside of repetitions; each level may follow the places several times
_LONGEST = 2_000  # characters of a pattern; published ones have fewer than 200
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)
_ONE = (ops.ANY, ops.IN, ops.LITERAL, ops.NOT_LITERAL)  # parts that stand for one character
_LOOKS = (ops.ASSERT, ops.ASSERT_NOT)
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
        self._quick = _ways(self._parts) <= _FEW
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
    if op in _LOOKS:
        return [argument[1]]
    if op is ops.ATOMIC_GROUP:
        return [argument]
    return [part for part in argument[1:] if part is not None] if op is ops.GROUPREF_EXISTS else []


def _ways(parts: Any) -> float:
    """How many ways Python's matcher may try through a name, at most.

    Alternatives add up, and parts one after another multiply: `.*(a|b)` has 101 times 2. It is infinite where a repetition has
    something else than one character in it.
    """
    ways = 1.0
    for op, argument in parts:
        inside = [_ways(part) for part in _children(op, argument)]
        if op in _REPEATS or op is ops.POSSESSIVE_REPEAT:
            ways *= _repeated_ways(op, argument, inside[0])
        elif op in (ops.BRANCH, ops.GROUPREF_EXISTS):
            ways *= sum(inside) + (op is ops.GROUPREF_EXISTS)
        elif inside:
            ways *= inside[0]
    return ways


def _repeated_ways(op: Any, argument: Any, inside: float) -> float:
    least, most, parts = argument
    if len(parts) == 1 and parts[0][0] in _ONE:
        return 1 if op is ops.POSSESSIVE_REPEAT else max(min(most, _NAME) - least, 0) + 1
    return inside + (least == 0) if most <= 1 else float("inf")


def _check(parts: Any, deep: int = 0, looks: bool = False) -> None:
    """Refuse what depends on which way was taken, and what takes long all the same.

    `deep`: of how many repetitions `parts` are inside. `looks`: whether they are inside of what is looked ahead or back for.
    """
    if deep > _DEEPEST:
        raise ValueError(f"repetitions inside of repetitions may be {_DEEPEST} deep")
    for op, argument in parts:
        if op in (ops.GROUPREF, ops.GROUPREF_EXISTS, ops.ATOMIC_GROUP, ops.POSSESSIVE_REPEAT):
            raise ValueError("references to groups and possessive parts can't stand beside so many repetitions")
        if op is ops.SUBPATTERN and (argument[1] or argument[2]):
            raise ValueError("flags such as (?i:) can't stand beside so many repetitions")
        if op in _LOOKS and looks:
            raise ValueError(
                "(?=) inside of (?=), or of another that looks ahead or back, can't stand beside so many repetitions"
            )
        for inside in _children(op, argument):
            nested = op in _REPEATS and argument[1] > 1 and not (len(inside) == 1 and inside[0][0] in _ONE)
            _check(inside, deep + nested, looks or op in _LOOKS)


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
    if op in _LOOKS:
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
