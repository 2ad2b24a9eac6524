"""What a step costs: a model of its seconds, measured at the start and refined by every step that the device's clock has timed.

A step's seconds are three parts:

- What its tokens take in products, norms, sampling and launches. A curve says that, by size: flat while weights take longer to be read than to
  be multiplied, and rising from there on. There is one curve for steps in which all rows generate, for each number of drafts, by rows; one for mixed
  steps in graphs and one for eager steps, by tokens. A step in a graph takes as long as the graph's own size.
- A price for each token whose keys and values a row that generates reads.
- A price for each pair of a prompt's token and a token that it sees. So a piece of 512 tokens at the end of 100,000 costs more than the first 512.

Example, 8B on an H200: 64 rows of 1,000 tokens take 4.9 ms on the curve and 64,000 times 35 ns for what they read: 7.1 ms.

What is known of each figure has an uncertainty, and an error is charged to the figures by what each may be wrong by (a Kalman filter
without covariances). A step can take longer than it costs by accident (a compiler, another process), and never less. So what is far
above the model moves it by little, once; if it stays, the model follows in some twenty steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import sqrt

import msgspec

from pagerunner.types.steps import MeasuredSteps, StepShape

_NOISE = 0.2  # of a step's seconds, what they differ by from step to step
_SURE, _UNSURE = 0.01, 0.25  # squares of what a figure may be wrong by, of itself: long known, and new
_MEASURED = 0.02  # the same of what was measured at the start
_GUESSED = 1.0  # and of what only was guessed
_AS_LONG = 16_384  # tokens that attention sees for as long as all else of a token takes
_FAR = 2.0  # times the expected error; what is further above counts as so much
_LATE = 32  # a step whose time hasn't come after so many others has none


class CostStats(msgspec.Struct, frozen=True):
    """Sums over all steps that were timed: what the model said before it knew, what they took, and by how much it was wrong."""

    predicted_seconds_total: float = 0.0
    measured_seconds_total: float = 0.0
    error_seconds_total: float = 0.0

    def with_step(self, predicted: float, measured: float) -> CostStats:
        """The sums with one more step."""
        wrong = abs(measured - predicted)
        return CostStats(
            self.predicted_seconds_total + predicted,
            self.measured_seconds_total + measured,
            self.error_seconds_total + wrong,
        )


class _Figure:
    """A figure, and the square of what it may be wrong by, as a part of it."""

    __slots__ = ("value", "variance")

    def __init__(self, value: float, variance: float = _UNSURE) -> None:
        self.value, self.variance = value, variance


Parts = list[tuple[_Figure, float]]
"""Figures and how often each is counted."""


class _Curve:
    """Seconds by size, which never fall. They are interpolated between sizes that are known, and rise in proportion beyond the largest.

    An interrupt may come between any two lines, and the curve goes on: `_sizes` has a size once `_figures` has its figure.
    """

    def __init__(self, graphs: Sequence[int] = ()) -> None:
        self._graphs = sorted(graphs)
        self._sizes: list[int] = []
        self._figures: dict[int, _Figure] = {}

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def parts(self, size: int) -> Parts:
        """The figures that the seconds of a size are made of. The curve must not be empty."""
        size = self._computed(size)
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes):
            return [(self._figures[self._sizes[-1]], size / self._sizes[-1])]
        above = self._sizes[place]
        if above == size or not place:
            return [(self._figures[above], 1.0)]
        below = self._sizes[place - 1]
        share = (size - below) / (above - below)
        return [(self._figures[below], 1 - share), (self._figures[above], share)]

    def seconds(self, size: int) -> float:
        """The seconds of a size. The curve must not be empty."""
        return _sum(self.parts(size))

    def know(self, size: int, seconds: float | None = None, variance: float = _UNSURE) -> None:
        """Have a figure of about this size from now on: `seconds`, or what the curve, which isn't empty then, has said so far."""
        node = self._computed(size)
        node = node if node in self._graphs else _rounded(node)
        place = bisect_left(self._sizes, node)
        new = place == len(self._sizes) or self._sizes[place] != node
        if seconds is not None:
            self._figures[node] = _Figure(seconds, variance)
        elif new:
            self._figures[node] = _Figure(self.seconds(node))
        if new:
            self._sizes.insert(place, node)
        if seconds is not None:
            self.level(self._figures[node])

    def covers(self, size: int) -> bool:
        """Whether what is known says something about this size: it lies between sizes that are known, or next to one."""
        size = self._computed(size)
        return bool(self) and 2 * self._sizes[0] <= 3 * size <= 4.5 * self._sizes[-1]

    def level(self, latest: _Figure) -> None:
        """Make smaller sizes take no longer than the `latest` figure says, and larger ones no less."""
        bound = min
        for size in self._sizes:
            figure = self._figures[size]
            if figure is latest:
                bound = max
            figure.value = bound(figure.value, latest.value)

    def _computed(self, size: int) -> int:
        """The size of the graph that a step runs in, or its own if there is none that large."""
        place = bisect_left(self._graphs, size)
        return self._graphs[place] if place < len(self._graphs) else max(size, 1)


def _rounded(size: int) -> int:
    """The nearest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: two sizes from one power of two to the next."""
    low = 1 << (size.bit_length() - 1)
    return min((low, low + low // 2, 2 * low), key=lambda node: abs(node - size))


def _sum(parts: Parts) -> float:
    return sum(figure.value * times for figure, times in parts)


class CostModel:
    """Seconds of steps by their shapes.

    `key_bytes` are those that a token's keys and values take in all layers. Without `measured` the model knows nothing before the first step.
    """

    def __init__(self, measured: MeasuredSteps | None = None, key_bytes: int = 0) -> None:
        measured = measured or MeasuredSteps()
        self._decode = {drafts: _Curve(sizes) for drafts, sizes in measured.decode_graphs.items()}
        self._mixed, self._eager = _Curve(measured.mixed_graphs), _Curve()
        self._most_mixed = max(measured.mixed_graphs, default=0)
        rate = measured.bytes_per_second
        self._key, self._pair = _Figure(key_bytes / rate if rate else 0.0, _GUESSED), _Figure(0.0, _GUESSED)
        self._planned: dict[int, StepShape] = {}
        self.stats = CostStats()
        by_size: dict[tuple[int, bool, int], list[tuple[StepShape, float]]] = {}
        for shape, seconds in measured.steps:
            by_size.setdefault((shape.tokens, shape.decode, shape.drafts), []).append((shape, seconds))
        for timed in by_size.values():
            self._begin(timed)
        if measured.steps:
            self._guess(min(seconds / shape.tokens for shape, seconds in measured.steps))

    def _begin(self, timed: list[tuple[StepShape, float]]) -> None:
        """Take what was measured at the start of steps of one size: prompts with and without a past say what a pair costs."""
        (first, low), (last, high) = min(timed, key=_pairs), max(timed, key=_pairs)
        if last.pairs > first.pairs and high > low:
            self._pair = _Figure((high - low) / (last.pairs - first.pairs), _MEASURED)
        curve, size = self._curve(first)
        curve.know(size, max(low - first.pairs * self._pair.value, low / 2), _MEASURED)

    def seconds(self, shape: StepShape) -> float:
        """How long such a step takes; 0 if nothing is known yet."""
        return _sum(self._parts(shape))

    def decode_seconds(self, rows: int, keys: int, drafts: int = 0) -> float:
        """How long a step takes in which `rows` generate, each with so many `drafts`, and read `keys` tokens together."""
        return self.seconds(StepShape(rows, rows * (1 + drafts), keys, 0, drafts))

    def knows(self, rows: int, drafts: int) -> bool:
        """Whether steps were timed in which about so many rows generate, with so many drafts."""
        return drafts in self._decode and self._decode[drafts].covers(rows)

    def planned(self, step_id: int, shape: StepShape, made: int = 0) -> None:
        """A step of this shape is under way, which has `made` drafts of each row. One that computes fewer than it has made says what neither number takes."""
        if shape.decode and made > shape.drafts:
            return
        self._planned[step_id] = shape
        if len(self._planned) > _LATE:
            del self._planned[next(iter(self._planned))]

    def timed(self, steps: Iterable[tuple[int, float]]) -> None:
        """Steps that were planned took so many seconds."""
        for step_id, seconds in steps:
            if (shape := self._planned.pop(step_id, None)) is not None and seconds > 0:
                self.learn(shape, seconds)

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step took so many seconds."""
        curve, size = self._curve(shape)
        predicted = self.seconds(shape)
        if predicted:
            self.stats = self.stats.with_step(predicted, seconds)
        if not curve.covers(size):
            read = shape.keys * self._key.value + shape.pairs * self._pair.value
            curve.know(size, max(seconds - read, seconds / 2))
            self._guess(seconds / max(shape.tokens, 1))
            return
        curve.know(size)
        parts = self._parts(shape)
        predicted = _sum(parts)
        spread = [figure.variance * (figure.value * times) ** 2 for figure, times in parts]
        expected = sum(spread) + (_NOISE * predicted) ** 2
        error = min(seconds - predicted, _FAR * sqrt(expected))
        for (figure, times), own in zip(parts, spread, strict=True):
            if own:
                gain = own / expected
                figure.value *= max(1 + error * gain / (figure.value * times), 0.1)
                figure.variance = max(figure.variance * (1 - gain), _SURE)
        for figure, _ in parts[:-2]:
            curve.level(figure)

    def _guess(self, per_token: float) -> None:
        """Prices of what is read, until steps say more: in most models attention costs as much as all else at some ten thousand tokens."""
        for figure in (self._key, self._pair):
            figure.value = figure.value or per_token / _AS_LONG

    def _parts(self, shape: StepShape) -> Parts:
        curve, size = self._curve(shape)
        if not curve:  # another one says what so many tokens take
            size = shape.tokens
            alike, others = self._decode.get(0, curve), (self._eager, self._mixed)
            curve = next((one for one in ((alike, *others) if shape.decode else (*others, alike)) if one), curve)
        own = curve.parts(size) if curve else []
        return [*own, (self._key, shape.keys), (self._pair, shape.pairs)]

    def _curve(self, shape: StepShape) -> tuple[_Curve, int]:
        """The curve of steps like this one, and the size that it is looked up by."""
        if shape.decode:
            return self._decode.setdefault(shape.drafts, _Curve()), shape.rows
        return (self._mixed if shape.tokens <= self._most_mixed else self._eager), shape.tokens


def _pairs(timed: tuple[StepShape, float]) -> int:
    return timed[0].pairs
