"""Stop strings in a text that arrives in pieces: found wherever pieces split them, and never leaked in part."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from weakref import WeakValueDictionary

_NONE = -1


class StopAutomaton:
    """Aho and Corasick's automaton (CACM 18(6), 1975) over a set of strings: a step per character, whatever their number.

    State s has read `depth[s]` characters of some string; `longest[s]` is the longest string that ends there. Nearly every state
    has one successor, which lies in arrays: a request may bring 65,536 characters.
    """

    __slots__ = ("__weakref__", "_code", "_others", "_target", "depth", "fail", "firsts", "longest")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._code = array("l", [_NONE])  # of the character that leads to `_target`
        self._target = array("l", [0])
        self._others: dict[int, dict[int, int]] = {}  # further characters, by state
        self.fail = array("l", [0])
        self.depth = array("l", [0])
        self.longest: list[str | None] = [None]
        for string in strings:
            self._insert(string)
        self.firsts = frozenset(string[0] for string in strings)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        code = ord(char)
        while True:
            if self._code[state] == code:
                return self._target[state]
            following = self._others[state].get(code) if state in self._others else None
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]

    def is_leaf(self, state: int) -> bool:
        """Whether no string goes on from there."""
        return self._code[state] == _NONE

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            code, new = ord(char), len(self.longest)
            if self._code[state] == code:
                state = self._target[state]
                continue
            if self._code[state] == _NONE:
                self._code[state], self._target[state] = code, new
                following = new
            else:
                following = self._others.setdefault(state, {}).setdefault(code, new)
            if following == new:
                self._code.append(_NONE)
                self._target.append(0)
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.longest.append(None)
            state = following
        self.longest[state] = string

    def _following(self, state: int) -> Iterator[tuple[int, int]]:
        if self._code[state] != _NONE:
            yield self._code[state], self._target[state]
            yield from self._others.get(state, {}).items()

    def _link(self) -> None:
        queue = deque(state for _, state in self._following(0))
        while queue:
            state = queue.popleft()
            for code, following in self._following(state):
                self.fail[following] = self.step(self.fail[state], chr(code))
                queue.append(following)
            if self.longest[state] is None:
                self.longest[state] = self.longest[self.fail[state]]


_live: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()


def automaton(strings: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these strings, which takes milliseconds to make for a thousand characters.

    As long as a caller holds it, every StopFinder of the same strings uses it."""
    found = _live.get(strings)
    return found if found is not None else _recent(strings)


@lru_cache(maxsize=32)
def _recent(strings: tuple[str, ...]) -> StopAutomaton:
    made = _live[strings] = StopAutomaton(strings)
    return made


class StopFinder:
    """Watches one text for stop strings. The first string to be complete wins. Of several that end at the same character
    the longest wins. So it never matters where pieces are split."""

    __slots__ = ("_automaton", "_held", "_include", "_state")

    def __init__(self, strings: tuple[str, ...], include_stop_str_in_output: bool) -> None:
        self._automaton = automaton(strings)
        self._include = include_stop_str_in_output
        self._state = 0
        self._held = ""

    def feed(self, piece: str, armed: bool = True) -> tuple[str, str | None]:
        """The text that may be given out now, and the stop string that ends it, if one does.

        Unless `armed`, strings that become complete in this piece don't stop anything. After a stop string the text is
        over: feed nothing more.
        """
        machine, state = self._automaton, self._state
        if state == 0 and machine.firsts.isdisjoint(piece):
            return piece, None
        text, held = self._held + piece, len(self._held)
        for place, char in enumerate(piece):
            state = machine.step(state, char)
            stop = machine.longest[state]
            if stop is not None:
                if armed:
                    end = held + place + 1
                    return text[: end if self._include else end - len(stop)], stop
                while machine.is_leaf(state) and state:  # nothing longer can follow: no need to hold it back
                    state = machine.fail[state]
        self._state = state
        certain = len(text) - machine.depth[state]
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """The text held back, when nothing follows."""
        held, self._held, self._state = self._held, "", 0
        return held
