"""Regular expressions of adapters' configs, matched in a time that has a bound.

Configs come from strangers, and Python's `re` tries one way through an expression after the other, with the interpreter's lock held: 25 characters
of `((\\w|\\.)+)+!` are enough to stop an engine for ever. Here an expression becomes a program of a few instructions. All its ways are followed at once,
and what is left of them after each character is remembered. So a name takes as many steps as it has characters. What decides between ways that match
(`*?` instead of `*`) says nothing here, as only whether a name matches is asked.

Example: `(a|ab)c` is the program 0: on at 1 or 3, 1: "a", 2: on at 5, 3: "a", 4: "b", 5: "c", 6: the end. After "a" of "abc" the ways stand at 2 and 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from pagerunner.errors import ConfigError

MAX_CHARS = 4_096
MAX_INSTRUCTIONS = 4_096
MAX_STEPS = 4_000_000
"""What matching one config's patterns with all names may take; a second has some 500,000 steps."""
_NEEDS_RE = "what looks ahead or behind, refers to a group or a character by its number, sets a flag or never gives back isn't supported"
_PLAIN = re.compile(r"[\w.-]+")
_WORD = re.compile(r"\w")
_REPEATS = re.compile(r"(?:([*+?])|\{(\d*)(?:(,)(\d*))?\})([?+]?)")


class ExpressionError(ValueError):
    """Says what is wrong with an expression."""


class Budget:
    """The steps that the patterns of one config, in `file`, may still take."""

    def __init__(self, file: str) -> None:
        self._file, self.left = file, MAX_STEPS

    def take(self, steps: int) -> None:
        """Raises ConfigError if there are no more."""
        self.left -= steps
        if self.left < 0:
            raise ConfigError(
                f"{self._file}: to match the regular expressions (target_modules, exclude_modules, rank_pattern, alpha_pattern) with the model's names "
                f"takes more than {MAX_STEPS:,} steps; write plain names."
            )


class Patterns:
    """Numbers by regular expressions for the ends of names. That of the first expression that matches is a name's.

    Most are names themselves, where each point stands for any character, and a config may have thousands. So those with points at the same places
    are found at once.
    """

    def __init__(self, values: Mapping[str, float], budget: Budget) -> None:
        """Raises ExpressionError."""
        self.numbers, self._budget = list(values.values()), budget
        self._plain: dict[tuple[int, tuple[int, ...]], dict[str, int]] = {}
        self._others: list[tuple[int, Expression]] = []
        self._found: dict[str, int] = {}
        for number, text in enumerate(values):
            if _PLAIN.fullmatch(text):
                points = tuple(at for at, char in enumerate(text) if char == ".")
                self._plain.setdefault((len(text), points), {}).setdefault(text, number)
            else:
                Expression(text, budget)  # what is none alone may be one among the others' brackets
                self._others.append((number, Expression(rf"(?:.*\.)?(?:{text})", budget)))

    def of(self, name: str, otherwise: float) -> float:
        """A name's number, or another one."""
        if not self.numbers:
            return otherwise
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = min(self._all_of(name), default=-1)
        return otherwise if found < 0 else self.numbers[found]

    def _all_of(self, name: str) -> Iterator[int]:
        self._budget.take(len(self._plain))
        for (size, points), numbers in self._plain.items():
            if size == len(name) or (size < len(name) and name[-size - 1] == "."):
                end = list(name[-size:])
                for at in points:
                    end[at] = "."
                number = numbers.get("".join(end))
                if number is not None:
                    yield number
        for number, expression in self._others:
            if expression.matches(name):
                yield number


class _One(NamedTuple):
    """A character of this kind."""

    is_one: Callable[[str], object]


class _At(NamedTuple):
    """A place: "^", "$", "b" (where a word begins or ends) or "B" (everywhere else)."""

    kind: str


class _Go(NamedTuple):
    """On at each of the instructions so far from here."""

    by: tuple[int, ...]


_Program = list["_One | _At | _Go"]


class Expression:
    """One regular expression. `matches` says whether the whole name is one of its."""

    def __init__(self, text: str, budget: Budget) -> None:
        """Raises ExpressionError for what is no expression, too large, or not supported."""
        if len(text) > MAX_CHARS:
            raise ExpressionError(f"it has {len(text):,} characters, and at most {MAX_CHARS:,} are read")
        try:
            re.compile(text)
            self._program = _Compiler(text).program()
        except (re.error, RecursionError, OverflowError) as error:
            raise ExpressionError(f"it is no regular expression ({error})") from None
        budget.take(20 * len(text))
        self._budget = budget
        self._places: list[tuple[frozenset[int], bool | None]] = []
        self._numbers: dict[tuple[frozenset[int], bool | None], int] = {}
        self._next: dict[tuple[int, str], int] = {}
        self._first = self._number(frozenset((0,)), None)

    def matches(self, name: str) -> bool:
        """Whether the expression is of the whole name. Raises ConfigError where the budget is used up."""
        place, steps = self._first, self._next
        for char in name:
            after = steps.get((place, char))
            place = self._step(place, char) if after is None else after
        after = steps.get((place, ""))
        return bool(self._step(place, "") if after is None else after)

    def _number(self, ways: frozenset[int], word: bool | None) -> int:
        """The number of a place: where all ways stand, and whether the character before is one of a word, None at the beginning."""
        number = self._numbers.setdefault((ways, word), len(self._places))
        if number == len(self._places):
            self._places.append((ways, word))
        return number

    def _step(self, place: int, char: str) -> int:
        """Where the ways stand after a character; with none left, whether one of them is at the end."""
        ways, before = self._places[place]
        word = _WORD.match(char) is not None if char else None
        reached, found = self._reached(ways, before, word), 0
        if char:
            there = frozenset(
                at + 1 for at in reached if isinstance(one := self._program[at], _One) and one.is_one(char)
            )
            found = self._number(there, word)
        else:
            found = int(len(self._program) - 1 in reached)
        self._next[place, char] = found
        return found

    def _reached(self, ways: frozenset[int], before: bool | None, after: bool | None) -> set[int]:
        """All instructions that these ways come to without a character."""
        to_do, seen = list(ways), set(ways)
        while to_do:
            at = to_do.pop()
            match self._program[at]:
                case _Go(by):
                    more: tuple[int, ...] = tuple(at + one for one in by)
                case _At(kind) if _is_at(kind, before, after):
                    more = (at + 1,)
                case _:
                    continue
            for one in more:
                if one not in seen:
                    seen.add(one)
                    to_do.append(one)
        self._budget.take(len(seen) + 1)
        return seen


def _is_at(kind: str, before: bool | None, after: bool | None) -> bool:
    if kind == "^":
        return before is None
    if kind == "$":
        return after is None
    return (bool(before) != bool(after)) == (kind == "b")


class _Compiler:
    """Makes a program of an expression that `re` takes, so that its syntax is right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def program(self) -> _Program:
        """The last instruction is the end."""
        return [*self._either(), _Go(())]

    def _either(self) -> _Program:
        """Up to the end of a group, or of all."""
        rows = [self._row()]
        while self._text[self._at : self._at + 1] == "|":
            self._at += 1
            rows.append(self._row())
        found = rows.pop()
        for one in reversed(rows):
            found = _counted([_Go((1, len(one) + 2)), *one, _Go((len(found) + 1,)), *found])
        return found

    def _row(self) -> _Program:
        found: _Program = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._part()
            repeats = _REPEATS.match(self._text, self._at)
            if repeats is not None and repeats[0] != "{}":
                self._at = repeats.end()
                part = _repeated(part, *repeats.groups())
            found += part
            _counted(found)
        return found

    def _part(self) -> _Program:
        text, at = self._text, self._at
        char = text[at]
        self._at += 1
        if char == "(":
            if text.startswith("?:", self._at):
                self._at += 2
            elif text.startswith("?P<", self._at):
                self._at = text.index(">", at) + 1
            elif text.startswith("?", self._at):
                raise ExpressionError(_NEEDS_RE)
            inner = self._either()
            self._at += 1
            return inner
        if char in "^$":
            return [_At(char)]
        if char == "[":
            close = text.index("]", at + (3 if text.startswith("^", at + 1) else 2))
            while _escaped(text, at, close):
                close = text.index("]", close + 1)
            self._at = close + 1
        elif char == "\\":
            kind = text[self._at]
            self._at += 1
            if kind in "AZbB":
                return [_At({"A": "^", "Z": "$"}.get(kind, kind))]
            if kind.isdigit() or kind in "xuUN":
                raise ExpressionError(_NEEDS_RE)
        return [_One(re.compile(text[at : self._at]).fullmatch)]


def _repeated(part: _Program, sign: str, least: str, comma: str, most: str, way: str) -> _Program:
    """The instructions of as many as `*`, `+`, `?` or `{least,most}` says."""
    if way == "+":
        raise ExpressionError(_NEEDS_RE)
    low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (int(least or 0), int(most) if most else None))
    if sign is None and not comma:
        high = low
    size = len(part) + 1
    _check(max(low + 1, high or 0) * size)
    found = part * low
    if high is None:
        return [*found, _Go((1, size + 1)), *part, _Go((-size,))]
    for left in range(high - low, 0, -1):
        found += [_Go((1, left * size)), *part]
    return found


def _counted(program: _Program) -> _Program:
    _check(len(program))
    return program


def _check(instructions: int) -> None:
    if instructions > MAX_INSTRUCTIONS:
        raise ExpressionError(f"it takes more than {MAX_INSTRUCTIONS:,} instructions")


def _escaped(text: str, start: int, at: int) -> bool:
    """Whether an odd number of backslashes is before the character."""
    before = text[start + 1 : at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
