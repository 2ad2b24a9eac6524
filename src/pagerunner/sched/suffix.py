"""Suffix decoding: guesses how a text goes on from what followed the same words before, in the request itself and in finished answers.

A text is looked up by its last 8 tokens, then by its last 4, then by its last 2. Each place where they occurred before is compared further
back: the more tokens match, the more may be drafted. Where several places match, their votes are the next token's probability.

Example: "a b c d" was followed twice by "e f" and once by "e g". Behind another "a b c d" the draft is "e f", with the probabilities 1 and 2/3.

Places are chained by hashes, as in LZ77: an index takes a few array writes a token and no allocation, and its memory is fixed. A trie of
all suffixes would take 24 nodes a token.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagerunner.config import SpeculativeConfig

LENGTHS = (8, 4, 2)
"""How many tokens at the end of a text are looked up, the longest that occurred first."""
MOST_PLACES = 16
"""How many places are compared, the latest ones."""
GLOBAL_TOKENS = 1 << 20
"""Tokens of finished answers that are kept; the oldest answers make room."""
MOST_TOKENS = 128
"""Most tokens of a draft."""
LEAST_TOKENS = 256
"""Room for a request's text at first."""
_BREAK = -1  # stands between texts
_LAST_END = 2**31 - 1
_WORD = 0xFFFFFFFF


class Bounds(NamedTuple):
    """What is drafted: behind a match of m tokens, of which `longest` are compared, at most `factor` * m tokens, each of them with a chance of `least` or more."""

    longest: int
    factor: float
    least: float


class SuffixIndex:
    """Where ends of texts occurred before. A ring of tokens, a power of two of them.

    `end` counts all tokens that ever came, and position p is the token that came after p others. Tokens before `low` are forgotten. This is the
    twin of `ops.native.suffix`, which does the same ten times as fast.
    """

    def __init__(self, tokens: int) -> None:
        size = 1 << max(tokens - 1, 1).bit_length()
        self._size, self._mask = size, size - 1
        self.end = self.low = 0
        self._text = array("i", [_BREAK]) * size
        self._hashes = tuple(array("I", [0]) * size for _ in LENGTHS)  # of the tokens before a position
        self._latest = tuple(array("i", [0]) * size for _ in LENGTHS)  # by hash, the last position behind such tokens
        # by position, the one before it in the same chain
        self._before = tuple(array("i", [0]) * size for _ in LENGTHS)

    @property
    def is_full(self) -> bool:
        """Whether the next token takes the place of the first one."""
        return self.end >= self._size

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return 4 * self._size * (1 + 3 * len(LENGTHS))

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that follow."""
        text, mask, end = self._text, self._mask, self.end
        hashes_8, hashes_4, hashes_2 = self._hashes
        latest_8, latest_4, latest_2 = self._latest
        before_8, before_4, before_2 = self._before
        for token in tokens:
            last = text[(end - 1) & mask]
            text[end & mask] = token
            end += 1
            place = end & mask
            hashed = ((last * 0x9E3779B1) ^ (token * 0x85EBCA6B)) & _WORD
            hashed = hashes_2[place] = (hashed ^ hashed >> 15) * 0x2C1B3C6D & _WORD
            slot = hashed & mask
            before_2[place] = latest_2[slot]
            latest_2[slot] = end
            hashed = (hashes_2[(end - 2) & mask] * 0x9E3779B1 ^ hashed) & _WORD
            hashed = hashes_4[place] = (hashed ^ hashed >> 15) * 0x2C1B3C6D & _WORD
            slot = hashed & mask
            before_4[place] = latest_4[slot]
            latest_4[slot] = end
            hashed = (hashes_4[(end - 4) & mask] * 0x9E3779B1 ^ hashed) & _WORD
            hashed = hashes_8[place] = (hashed ^ hashed >> 15) * 0x2C1B3C6D & _WORD
            slot = hashed & mask
            before_8[place] = latest_8[slot]
            latest_8[slot] = end
        self.end = end
        self.low = max(self.low, end - self._size)

    def forget_before(self, position: int) -> None:
        """Tokens before it aren't found any more."""
        self.low = max(self.low, position)

    def clear(self) -> None:
        """Forget all, and count from 0 again."""
        self.end = self.low = 0
        for latest in self._latest:
            memoryview(latest).cast("B")[:] = bytes(4 * self._size)  # in place

    def draft(self, answers: SuffixIndex | None, most: int, bounds: Bounds) -> list[int]:
        """How this text may go on by what it says itself, or by what `answers` say: at most `most` tokens, 1 or more. Of equals its own."""
        best, tokens = self.best(self, most, 0.0, bounds)
        if answers is not None and best < most:
            other, others = answers.best(self, most, best, bounds)
            tokens = others if other > best else tokens
        return tokens

    def best(self, text: SuffixIndex, most: int, above: float, bounds: Bounds) -> tuple[float, list[int]]:
        """How `text` may go on by what is known here: at most `most` tokens with the highest score above `above`, and the score.

        The score is the sum of the tokens' chances. Of equals the draft of the longer match is taken.
        """
        places = self._places(text, bounds.longest)
        tokens: list[int] = []
        for number, (length, _) in enumerate(places):
            budget = min(most, int(bounds.factor * length))
            if budget <= above:
                break  # a token counts 1 at most, and shorter matches may have no more tokens
            if number + 1 < len(places) and places[number + 1][0] == length:
                continue  # all places that match as far vote
            score, found = self._follow([one for _, one in places[: number + 1]], budget, bounds.least)
            if score > above:
                above, tokens = score, found
        return above, tokens

    def _places(self, other: SuffixIndex, longest: int) -> list[tuple[int, int]]:
        """Positions behind the end of `other`'s text, as (matching tokens, position), the longest match first and then the latest.

        The end of `other` itself is no such place.
        """
        for number, least in enumerate(LENGTHS):
            if other.end - other.low < least:
                continue
            position = self._latest[number][other._hashes[number][other.end & other._mask] & self._mask]
            found = []
            for _ in range(MOST_PLACES + 1):  # one of them may be the end
                if position <= self.low or position > self.end:
                    break
                if position < self.end and (length := self._matching(position, other, longest)) >= least:
                    found.append((length, position))
                earlier = self._before[number][position & self._mask]
                if earlier >= position:
                    break  # of what was overwritten
                position = earlier
            if found:
                return sorted(found, reverse=True)[:MOST_PLACES]
        return []

    def _matching(self, position: int, other: SuffixIndex, longest: int) -> int:
        """How many tokens before `position` are those at the end of `other`."""
        text, mask, theirs, their_mask, end = self._text, self._mask, other._text, other._mask, other.end
        most = min(longest, position - self.low, end - other.low)
        for back in range(1, most + 1):
            token = text[(position - back) & mask]
            if token != theirs[(end - back) & their_mask] or token == _BREAK:
                return back - 1
        return most

    def _follow(self, positions: Sequence[int], most: int, least_chance: float) -> tuple[float, list[int]]:
        """The most frequent tokens from these positions on, up to `most` while they are likely, and the sum of their chances."""
        text, mask, end = self._text, self._mask, self.end
        tokens: list[int] = []
        score, chance = 0.0, 1.0
        for ahead in range(most):
            nexts = [text[(position + ahead) & mask] for position in positions if position + ahead < end]
            if len(positions) == 1:
                token, votes = (nexts or [_BREAK])[0], 1
            elif nexts:
                # of equals the first, which is of the longest and latest match
                [(token, votes)] = Counter(nexts).most_common(1)
            else:
                break
            chance *= votes / len(positions)
            if token == _BREAK or chance < least_chance:
                break
            tokens.append(token)
            score += chance
            positions = [one for one in positions if one + ahead < end and text[(one + ahead) & mask] == token]
        return score, tokens


class SuffixDrafter:
    """The texts of running requests, and those of finished answers.

    Requests with a salt (`cache_salt`) have nothing in common with others: their answers aren't kept, and they get no others' words.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        new_index: Callable[[int], SuffixIndex] = SuffixIndex,
        tokens: int = GLOBAL_TOKENS,
    ) -> None:
        """`new_index` makes an index of so many tokens; finished answers have `tokens`."""
        self._bounds = Bounds(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
        self._new_index = new_index
        self._most_answers = config.suffix_decoding_max_cached_requests
        self._answers = new_index(tokens if self._most_answers else 2)
        self._begins: deque[int] = deque()
        self._room = tokens

    def begin(self, length: int) -> SuffixIndex:
        """Room for the text of a request that has `length` tokens. When it `is_full` it has to begin again: a request may become far longer than most do."""
        return self._new_index(max(length * 3 // 2, LEAST_TOKENS))

    def keep(self, answer: Sequence[int]) -> None:
        """A finished answer."""
        answers = self._answers
        answer = answer[-(self._room - 1) :]
        if not self._most_answers or len(answer) <= LENGTHS[-1]:
            return
        if answers.end + len(answer) >= _LAST_END - 1:
            answers.clear()
            self._begins.clear()
        self._begins.append(answers.end)
        answers.extend((_BREAK, *answer))
        while len(self._begins) > self._most_answers:
            self._begins.popleft()
        answers.forget_before(self._begins[0])

    def draft(self, text: SuffixIndex, most: int, *, alone: bool = False) -> list[int]:
        """How the text may go on, at most `most` tokens; none where nothing likely is known. `alone`: its own words are all that is looked at."""
        most = min(most, MOST_TOKENS)
        return [] if most < 1 else text.draft(None if alone else self._answers, most, self._bounds)
