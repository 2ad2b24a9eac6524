"""A device that exists in numbers only: how long steps take, about as an 8B in bf16 does on an H200 (docs/performance/engine.md)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pagerunner.types.steps import MeasuredSteps, StepShape, pairs_of

KEY_BYTES = 147_456
READS = 4.2e12  # bytes a second
DECODE_GRAPHS = (1, 2, 4, *range(8, 257, 8))
MIXED_GRAPHS = (16, 32, 64, 96, 128, 192, 256)


@dataclass
class Device:
    """`noise`: how much a step's time varies. `accidents`: the share of steps that take `late` seconds longer. `slow` times as slow."""

    noise: float = 0.0
    accidents: float = 0.0
    late: float = 0.5
    slow: float = 1.0
    launch: float = 0.008  # what the host needs for an eager step
    draft: float = 0.00035  # of a drafter's pass
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def seconds(self, shape: StepShape) -> float:
        """How long such a step takes, without noise."""
        if shape.decode:
            rows = next((size for size in DECODE_GRAPHS if size >= shape.rows), shape.rows)
            tokens = rows * (1 + shape.drafts)
            own = self._products(tokens) + shape.drafts * self.draft
        elif shape.tokens <= MIXED_GRAPHS[-1]:
            own = 0.0003 + self._products(next(size for size in MIXED_GRAPHS if size >= shape.tokens))
        else:
            own = max(self._products(shape.tokens), self.launch)
        return self.slow * (own + shape.keys * KEY_BYTES / READS + shape.pairs * 0.65e-9)

    def _products(self, tokens: int) -> float:
        return float((0.0039**4 + (23e-6 * tokens) ** 4) ** 0.25)

    def run(self, shape: StepShape) -> float:
        """How long the step takes this time."""
        seconds = self.seconds(shape) * (1 + abs(self.random.gauss(0, self.noise)))
        return seconds + self.late * (self.random.random() < self.accidents)

    def measured(self, drafts: tuple[int, ...] = ()) -> MeasuredSteps:
        """What a start finds."""
        shapes = [
            StepShape(rows, rows * (1 + k), rows, 0, k) for k in (0, *drafts) for rows in (1, 64, DECODE_GRAPHS[-1])
        ]
        shapes += [
            StepShape(rows, tokens, 0, pairs_of(start, tokens), decode=False)
            for rows, start, tokens in (
                (1, 0, 16),
                (1, 0, 256),
                (1, 0, 272),
                (1, 0, 1024),
                (1, 7168, 1024),
                (1, 0, 8192),
            )
        ]
        steps = [(shape, self.run(shape)) for shape in shapes]
        return MeasuredSteps(
            steps, {k: list(DECODE_GRAPHS) for k in (0, *drafts)}, list(MIXED_GRAPHS), bytes_per_second=READS
        )
