"""What a library that plans on the host needs to know of a step: one list of the pages that each row reads.

Shape letters: R rows (padding included), P pages of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.ops.async_copy import to_device


@dataclass(frozen=True, slots=True)
class RowPages:
    """The rows of a step.

    On the host, int32: query starts [R + 1], starts in `indices` [R + 1], tokens in a row's pages [R] and in its last page [R].
    On the device: the table entries of all rows' pages, `indices` [P] int32. Rows of padding have neither queries nor pages.
    """

    query_start: torch.Tensor
    page_start: torch.Tensor
    kv_len: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(cls, inputs: PlanInputs, rows: int) -> RowPages:
        """The pages of a step, padded to `rows` rows. The page table is read on the device, as it is now."""
        size, table = inputs.page_tokens, inputs.page_table
        queries, ends = np.array(inputs.query_lens, dtype=np.int64), np.array(inputs.seq_lens, dtype=np.int64)
        counts = -(-ends // size)
        real, total = len(ends), int(counts.sum())
        packed = np.stack((counts, np.cumsum(counts) - counts, np.array(inputs.slots, dtype=np.int64)))
        counts_R, start_R, slots_R = to_device(packed, torch.int64, table.device)
        row_P = torch.repeat_interleave(torch.arange(real, device=table.device), counts_R, output_size=total)
        column_P = torch.arange(total, device=table.device) - start_R[row_P]
        return cls(
            query_start=_starts(queries, rows),
            page_start=_starts(counts, rows),
            kv_len=_padded(ends, rows),
            last_page_len=_padded(ends - np.maximum(counts - 1, 0) * size, rows),
            indices=table[slots_R[row_P], column_P].to(torch.int32),
        )

    @classmethod
    def largest(cls, shape: GraphShape, device: torch.device) -> RowPages:
        """The pages for the capture of a graph, whose rows aren't known: as many tokens as the graph has, and a page for each row."""
        queries = np.ones(shape.rows, dtype=np.int64)
        queries[0] = shape.tokens - shape.rows + 1
        one = np.ones(shape.rows, dtype=np.int64)
        indices = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        starts, ones = _starts(one, shape.rows), _padded(one, shape.rows)
        return cls(_starts(queries, shape.rows), starts, ones, ones, indices)


def _starts(counts: np.ndarray, rows: int) -> torch.Tensor:
    found = np.full(rows + 1, counts.sum(), dtype=np.int32)
    found[: len(counts)] = np.cumsum(counts) - counts
    return torch.from_numpy(found)


def _padded(values: np.ndarray, rows: int) -> torch.Tensor:
    found = np.zeros(rows, dtype=np.int32)
    found[: len(values)] = values
    return torch.from_numpy(found)


class PlanFence:
    """Keeps a plan on the host from being overwritten before the device has read it.

    A library that plans on the host writes a plan into pinned memory and copies it asynchronously. With two steps in
    flight, the next plan could overwrite memory that the copy of the last plan has yet to read.
    """

    def __init__(self, device: torch.device) -> None:
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def __exit__(self, *error: object) -> None:
        if self._copied is not None:
            self._copied.record()
