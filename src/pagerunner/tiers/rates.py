"""How fast pages come and how fast tokens are computed, as measured: whether loading pays."""

from __future__ import annotations

_NEWEST = 0.3  # the weight of the newest measurement
_LEAST_BYTES = 2**20  # a smaller transfer measures only how long one takes to begin
_LEAST_TOKENS = 256  # a smaller step measures how long weights take to be read


class Rates:
    """Moving averages; 0 until something was measured. What isn't known yet pays."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self.seconds_per_token = 0.0
        self._asked = False  # whether a prompt is computed to know that

    def moved(self, num_bytes: int, seconds: float) -> None:
        """A transfer took so long, after all before it."""
        if num_bytes >= _LEAST_BYTES and seconds > 0:
            self.bytes_per_second = _averaged(self.bytes_per_second, num_bytes / seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            self.seconds_per_token = _averaged(self.seconds_per_token, seconds / tokens)

    def seconds(self, num_bytes: int) -> float:
        """How long so many bytes take; 0 if that isn't known."""
        return num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0

    def sooner(self, seconds: float, tokens: int, before: int) -> bool:
        """Whether what a store below brings in `seconds` is there sooner than the `tokens` tokens that it stands for are computed, after so many `before` them.

        What computing takes is known from steps alone, and where all prompts are found none says it. So the first prompt that is long enough is computed.
        """
        if self.seconds_per_token:
            return seconds < (before + tokens) * self.seconds_per_token
        first = not self._asked and tokens >= _LEAST_TOKENS
        self._asked |= first
        return not first

    def pays(self, num_bytes: int, before: int, tokens: int) -> bool:
        """Whether bytes behind so many others are there sooner than `tokens` tokens are computed: those that the bytes stand for, and all before them."""
        if not self.bytes_per_second or not self.seconds_per_token:
            return True
        return self.seconds(num_bytes + before) < tokens * self.seconds_per_token


def _averaged(before: float, now: float) -> float:
    return now if not before else (1 - _NEWEST) * before + _NEWEST * now
