"""Draws latencies as SVG: for each metric, the share of values that lie below a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP = 360, 200, 56, 48  # of a panel's plot, and what is left and above of it for text
_MOST_POINTS = 400
_MARKS = (50, 90, 99)
_COLORS = {50: "#228833", 90: "#997700", 99: "#ee6677"}


def latency_svg(title: str, panels: Mapping[str, Sequence[float]]) -> str:
    """A drawing with a panel for each name: its values in seconds as a cumulative curve over a logarithmic axis in ms."""
    shown = {name: sorted(values) for name, values in panels.items() if values}
    step_x, step_y = _WIDTH + _LEFT + 24, _HEIGHT + 2 * _TOP
    width, height = 2 * step_x + 16, step_y * -(-len(shown) // 2) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="15">{escape(title)}</text>',
    ]
    for index, (name, values) in enumerate(shown.items()):
        left, top = _LEFT + index % 2 * step_x, 40 + _TOP + index // 2 * step_y
        parts += _panel(name, [max(1e3 * value, 1e-3) for value in values], left, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, values: Sequence[float], left: float, top: float) -> Iterator[str]:
    low, high = math.log10(values[0]), math.log10(values[-1])
    if high - low < 0.1:  # all values are equal, and a curve needs some width
        low, high = low - 0.05, high + 0.05

    def x(value: float) -> float:
        return left + _WIDTH * (math.log10(value) - low) / (high - low)

    def y(share: float) -> float:
        return top + _HEIGHT * (1 - share)

    yield f'<text x="{left}" y="{top - 24}" font-weight="bold">{escape(name)}, {len(values):,} values</text>'
    for quarter in range(5):
        at = y(quarter / 4)
        yield f'<path d="M{left} {at:.1f}h{_WIDTH}" stroke="#dddddd"/>'
        yield f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{25 * quarter} %</text>'
    for tick in _ticks(low, high):
        yield f'<path d="M{x(tick):.1f} {top}v{_HEIGHT}" stroke="#dddddd"/>'
        yield f'<text x="{x(tick):.1f}" y="{top + _HEIGHT + 16}" text-anchor="middle">{tick:g} ms</text>'
    stride = max(1, len(values) // _MOST_POINTS)
    places = sorted({*range(0, len(values), stride), len(values) - 1})
    points = " ".join(f"{x(values[place]):.1f},{y((place + 1) / len(values)):.1f}" for place in places)
    yield f'<polyline points="{points}" fill="none" stroke="#4477aa" stroke-width="2"/>'
    for row, mark in enumerate(_MARKS):
        value = values[min(int(len(values) * mark / 100), len(values) - 1)]
        yield f'<path d="M{x(value):.1f} {top}v{_HEIGHT}" stroke="{_COLORS[mark]}" stroke-dasharray="4 3"/>'
        yield (f'<text x="{left + row * 112}" y="{top - 8}" fill="{_COLORS[mark]}">p{mark} {value:.4g} ms</text>')


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two logarithms: as many digits before powers of ten as there is room for."""
    digits = range(1, 10) if high - low < 0.7 else (1, 2, 5) if high - low < 2 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    return [tick for tick in ticks if low <= math.log10(tick) <= high]
