"""Times a few steps at the start, for the model of costs (sched/costs.py). Each runs three times, one behind the other, as steps do when requests run.

The steps are the same on all ranks of an engine, whatever they take: no rank can make one alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from pagerunner.runner.device_clock import DeviceClock
from pagerunner.runner.graphs import GraphKey
from pagerunner.types import StepRow
from pagerunner.types.steps import MeasuredSteps, StepShape, pairs_of

_PROMPT = 512  # tokens, of which products take longer than weights are read
_PAST = 8_192  # before as many tokens again
_READ_BYTES = 256 * 2**20  # more than any cache holds
_RUNS = 3


def steps_to_time(keys: Sequence[GraphKey], most_rows: int, most_tokens: int, longest: int) -> Iterator[list[StepRow]]:
    """Rows of the steps: decode steps of the smallest, a middle and the largest graph, and prompts in graphs, beyond them, and behind others."""
    decode = sorted({key.rows for key in keys if key.decode}) or [1, most_rows]
    mixed = sorted({key.tokens for key in keys if not key.decode})
    for size in sorted({decode[0], decode[len(decode) // 4], decode[-1]}):
        yield [StepRow(slot, 1, 1, [], True) for slot in range(size)]
    most = min(most_tokens, longest)
    beyond = mixed[-1] + 16 if mixed else 16
    for size in sorted({*mixed[:1], *mixed[-1:], beyond, _PROMPT}):
        if size <= most:
            yield [StepRow(0, 0, size, [0] * size, True)]
    past = min(_PAST, longest - _PROMPT)
    if past >= _PROMPT <= most:
        yield [StepRow(0, past, _PROMPT, [0] * _PROMPT, True)]


def measure_steps(
    steps: Iterator[list[StepRow]],
    run: Callable[[list[StepRow]], Callable[[], object]],
    clock: DeviceClock,
    keys: Sequence[GraphKey],
    weights: torch.Tensor | None,
) -> MeasuredSteps:
    """Time `steps`. `run` launches one and returns what waits for it. `weights`: the bytes that say how fast the device reads."""
    shapes: list[StepShape] = []
    for rows in steps:
        decode = not rows[0].tokens
        number, tokens = len(shapes), sum(row.num_tokens for row in rows)
        pairs = 0 if decode else sum(pairs_of(row.start, row.num_tokens) for row in rows)
        shapes.append(StepShape(len(rows), tokens, 2 * len(rows) if decode else 0, pairs, decode=decode))
        for _ in range(_RUNS):
            with clock.step(number):
                wait = run(rows)
        wait()
    reads, rate = len(shapes), 0.0
    if weights is not None:
        words = weights[: min(_READ_BYTES, weights.numel() // 4 * 4)].view(torch.float32)
        for _ in range(_RUNS):
            with clock.step(reads):
                words.amax()
    total = _RUNS * (len(shapes) + (weights is not None))
    while clock.steps_done < total:
        time.sleep(1e-4)
    best: dict[int, float] = {}
    for number, seconds in clock.take_timed():
        best[number] = min(seconds, best.get(number, seconds))
    if weights is not None:
        rate = words.nbytes / max(best[reads], 1e-9)
    return MeasuredSteps(
        steps=[(shape, best[number]) for number, shape in enumerate(shapes)],
        decode_graphs={
            drafts: sorted({key.rows for key in keys if key.decode and key.drafts == drafts})
            for drafts in {0, *(key.drafts for key in keys)}
        },
        mixed_graphs=sorted({key.tokens for key in keys if not key.decode}),
        bytes_per_second=rate,
    )
