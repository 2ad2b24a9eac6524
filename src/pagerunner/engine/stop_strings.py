"""Stop strings in a text that arrives in pieces: found wherever pieces split them, and never leaked in part."""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """Aho and Corasick's automaton (CACM 18(6), 1975) over a set of strings: a step per character, whatever their number.

    State s has read `depth[s]` characters of some string; `longest[s]` is the longest string that ends there.
    """

    __slots__ = ("depth", "fail", "firsts", "longest", "next")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.longest: list[str | None] = [None]
        for string in strings:
            self._insert(string)
        self.firsts = frozenset(self.next[0])
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self.next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            following = self.next[state].get(char)
            if following is None:
                following = len(self.next)
                self.next[state][char] = following
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.longest.append(None)
            state = following
        self.longest[state] = string

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.next[state].items():
                self.fail[following] = self.step(self.fail[state], char)
                queue.append(following)
            if self.longest[state] is None:
                self.longest[state] = self.longest[self.fail[state]]


@lru_cache(maxsize=32)
def _automaton(strings: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(strings)


class StopFinder:
    """Watches one text for stop strings. The first one to be complete wins; of several that end at the same character
    the longest does, so where pieces are split never matters."""

    __slots__ = ("_automaton", "_held", "_include", "_state")

    def __init__(self, strings: tuple[str, ...], include_stop_str_in_output: bool) -> None:
        self._automaton = _automaton(strings)
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
                while not machine.next[state] and state:  # nothing longer can follow: no need to hold it back
                    state = machine.fail[state]
        self._state = state
        certain = len(text) - machine.depth[state]
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """The text held back, when nothing follows."""
        held, self._held, self._state = self._held, "", 0
        return held
