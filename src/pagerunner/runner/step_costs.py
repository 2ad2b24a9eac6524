"""Times a few steps at the start, for the model of costs (sched/costs.py). Each runs twice, one behind the other, as steps do when requests run.

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
_RUNS = 2


def steps_to_time(keys: Sequence[GraphKey], most_rows: int, most_tokens: int, longest: int) -> Iterator[list[StepRow]]:
    """Rows of the steps: for each number of drafts decode steps of the smallest, a middle and the largest graph; and prompts in graphs, beyond
    them, and behind others.
    """
    for drafts in sorted({0, *(key.drafts for key in keys)}):
        decode = sorted({key.rows for key in keys if key.decode and key.drafts == drafts}) or [1, most_rows]
        for size in sorted({decode[0], decode[len(decode) // 4], decode[-1]}):
            yield [StepRow(slot, 1, 1 + drafts, [], True) for slot in range(size)]
    mixed = sorted({key.tokens for key in keys if not key.decode})
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
    begin: Callable[[list[StepRow]], None],
    run: Callable[[list[StepRow]], Callable[[], object]],
    clock: DeviceClock,
    keys: Sequence[GraphKey],
    weights: torch.Tensor | None,
) -> MeasuredSteps:
    """Time `steps`. `begin` runs one once, so that slots have the lengths that its rows say; `run` launches one and returns what waits for it.
    `weights`: the bytes that say how fast the device reads.
    """
    found: list[tuple[StepShape, float]] = []
    for rows in steps:
        begin(rows)
        for _ in range(_RUNS):
            with clock.step():
                wait = run(rows)
        wait()
        found.append((_shape(rows), _best(clock)))
    rate = 0.0
    if weights is not None:
        words = weights[: min(_READ_BYTES, weights.numel() // 4 * 4)].view(torch.float32)
        for _ in range(_RUNS):
            with clock.step():
                words.amax()
        rate = words.nbytes / max(_best(clock), 1e-9)
    return MeasuredSteps(
        steps=found,
        decode_graphs={
            drafts: sorted({key.rows for key in keys if key.decode and key.drafts == drafts})
            for drafts in {0, *(key.drafts for key in keys)}
        },
        mixed_graphs=sorted({key.tokens for key in keys if not key.decode}),
        bytes_per_second=rate,
    )


def _shape(rows: list[StepRow]) -> StepShape:
    if rows[0].tokens:
        pairs = sum(pairs_of(row.start, row.num_tokens) for row in rows)
        return StepShape(len(rows), sum(row.num_tokens for row in rows), 0, pairs, decode=False)
    return StepShape(len(rows), len(rows) * rows[0].num_tokens, 2 * len(rows), 0, rows[0].num_tokens - 1)


def _best(clock: DeviceClock) -> float:
    """The shortest of the runs that the clock has timed since the last call. Waits for the device."""
    seconds: list[float] = []
    while len(seconds) < _RUNS:
        seconds += [each for _, each in clock.take_timed()]
        time.sleep(1e-5)
    return min(seconds)
