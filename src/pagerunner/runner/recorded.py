"""Decode steps of a CPU engine, recorded as commands of the CPU kernels: a CPU's graphs.

A step of a small model is hundreds of calls from Python, each of which computes for a few microseconds. All of a step's tensors are at
the same places in every step with as many rows. So the first step with that number of rows records its commands, and later ones
run them in one call. Models whose layers ask torch to compute run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.ops.native.calls import CannotRecordError, Recording, RecordingTooLargeError, record
from pagerunner.ops.native.mixture import FEW_TOKENS
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.staging import StagedStep
from pagerunner.types import StateSave

logger = logging.getLogger(__name__)
RECORDED_BYTES = 16 << 20
"""Memory for the tensors of a recorded step; a step that needs more has so much to compute that recording gains nothing."""


class _Recorded(NamedTuple):
    recording: Recording
    run: Callable[[], None]
    logits_SV: torch.Tensor


class RecordedSteps:
    """Recorded steps by their number of rows.

    All use the same memory, and are valid while pages and weights are where they were. Memory may be given back and come again, but a
    module or pages with other tensors need another object of this class. `steps` and `recorded` count decode steps, and those of them
    that ran from a recording.

    A number of rows for which the memory is too small costs one attempt: then three quarters of the rows are the most. So from 256 rows
    to none it takes 20 attempts, not 256. A model that computes with torch is tried once, and its memory given back. Tried first with
    more rows than every kernel takes, it is tried once more with as few: mixtures ask torch above `FEW_TOKENS` rows only.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._memory = torch.empty(RECORDED_BYTES, dtype=torch.uint8)
        self._held: dict[int, _Recorded] = {}
        self._most_rows = 1 << 62
        self.steps = self.recorded = 0

    def logits(
        self,
        step: StagedStep,
        builder: BatchBuilder,
        state_saves: Sequence[StateSave],
        logits_of: Callable[[ForwardBatch], torch.Tensor],
        threads: int,
    ) -> torch.Tensor | None:
        """The logits [S, V] of a step in which every row has one token and is sampled; None for a step that can't be recorded.

        They are valid until the next step. `logits_of` computes them from a batch, here on up to `threads` threads: one call wakes them
        once, so they pay in smaller steps than the threads of single operations.
        """
        where = step.where
        if not where.one_token or len(step.sampled_rows) != where.rows or where.rows > self._most_rows or state_saves:
            return None
        builder.fill(step, where.rows, where.tokens)
        if builder.replays(where.rows):
            return None
        self.steps += 1
        held = self._held.get(where.rows)
        if held is None or not held.recording.is_valid:
            try:
                held = self._record(builder.eager(step), logits_of, threads)
            except CannotRecordError as error:
                if isinstance(error, RecordingTooLargeError):
                    self._most_rows = where.rows - max(1, where.rows // 4)
                else:  # with more rows than some kernels take, torch computes, though it may not with fewer
                    self._most_rows = FEW_TOKENS if where.rows > FEW_TOKENS else 0
                more = f" of more than {self._most_rows} rows" if self._most_rows else ""
                logger.info("Decode steps%s run operation by operation: %s.", more, error)
                if not self._most_rows:
                    self._memory = torch.empty(0, dtype=torch.uint8)
                    self._held.clear()
                return None
            self._held[where.rows] = held
        held.run()
        self.recorded += 1
        return held.logits_SV

    def _record(
        self, batch: ForwardBatch, logits_of: Callable[[ForwardBatch], torch.Tensor], threads: int
    ) -> _Recorded:
        made, logits_SV = record(self._memory, lambda: logits_of(batch))
        return _Recorded(made, made.finish(threads), logits_SV)
