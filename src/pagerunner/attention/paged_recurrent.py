"""The backend of recurrent groups whose kernels find states through page tables on the device, at home in graphs.

Every row runs from the state in its page on and leaves the new one there; rows of padding touch nothing. What of a step
depends on the host are the states to save inside it: tensors that `plan` fills before every step, also before a graph is
replayed. Shape letters: R rows, T tokens of the step, N saves.
"""

from __future__ import annotations

import numpy as np
import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.recurrent import Recurrence, Tensors
from pagerunner.batch import ForwardBatch, GroupBatch, RecurrentKV
from pagerunner.memory.specs import Spec
from pagerunner.ops.dispatch import has_triton
from pagerunner.ops.state_rows import StateRows, StateSaves


class SaveState:
    """A graph's saves, one for each of its tokens at most, or those of eager steps, which are made for each."""

    def __init__(self, shape: GraphShape | None) -> None:
        self._shape = shape
        self._saves: StateSaves | None = None
        self._empty = True

    def fill(self, inputs: PlanInputs) -> StateSaves | None:
        """The saves of a step, or None if an eager step has none."""
        device = inputs.page_table.device
        if self._shape is None:
            if not inputs.state_saves:
                return None
            start, ends, targets = _by_row(inputs, len(inputs.slots))
            return StateSaves(*(torch.from_numpy(x).to(device) for x in (start, ends, targets)))
        if self._saves is None:
            sizes = (
                (self._shape.rows + 1, torch.int32),
                (self._shape.tokens, torch.int32),
                (self._shape.tokens, torch.int64),
            )
            self._saves = StateSaves(*(torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes))
        if inputs.state_saves or not self._empty:
            for mine, given in zip(self._saves, _by_row(inputs, self._shape.rows), strict=True):
                mine[: len(given)].copy_(torch.from_numpy(given), non_blocking=True)
        self._empty = not inputs.state_saves
        return self._saves


def _by_row(inputs: PlanInputs, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start [rows + 1], end and target of the saves; see StateSaves."""
    query_start = np.concatenate(([0], np.cumsum(inputs.query_lens)))
    saves = sorted(inputs.state_saves, key=lambda save: (save.row, save.position))
    for save in saves:
        start = inputs.seq_lens[save.row] - inputs.query_lens[save.row]
        assert start < save.position <= inputs.seq_lens[save.row], f"{save} of a row that begins at {start}"
    counts = np.bincount([save.row for save in saves], minlength=rows)
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    # positions of a row's tokens, counted from the step's first token
    ends = [query_start[save.row + 1] - inputs.seq_lens[save.row] + save.position for save in saves]
    return first, np.array(ends, dtype=np.int32), np.array([save.target for save in saves], dtype=np.int64)


class PagedRecurrentBackend:
    """See the module. It has no state of its own: an instance may serve any number of groups."""

    name = "paged_recurrent"
    reads_tables = True
    plans_on_host = True
    min_sharing_rows = 0

    def unsupported(self, spec: Spec, device: str, dtype: torch.dtype) -> str | None:
        """Serves every recurrent state, on CUDA devices through Triton's kernels."""
        if spec.kind != "recurrent":
            return f"it serves recurrent state, not {spec.kind}"
        return "Triton is not installed" if device == "cuda" and not has_triton() else None

    def new_state(self, shape: GraphShape | None) -> SaveState:
        """See DeviceBackend."""
        return SaveState(shape)

    def plan(self, inputs: PlanInputs, state: SaveState) -> StateSaves | None:
        """Where states go that are to be kept from within the step."""
        return state.fill(inputs)

    def forward(
        self, recurrence: Recurrence, inputs: Tensors, layer: RecurrentKV, group: GroupBatch, batch: ForwardBatch
    ) -> torch.Tensor:
        """Run every row from its state on, keep the states that the plan asks for, and the last ones; [T, ..]."""
        saves: StateSaves | None = group.metadata
        if saves is None and any(save.group == layer.group for save in batch.state_saves):
            raise RuntimeError("The step saves states that PlanInputs did not name.")
        step = batch.rows
        rows = StateRows(
            slots_R=step.slots_R,
            query_start_R1=step.query_start_R1,
            row_T=step.row_T,
            page_table=group.page_table,
            one_token=step.one_token,
            max_query_len=step.max_query_len,
            saves=saves,
        )
        return recurrence.rows(inputs, layer.states, rows)
