"""The backend of recurrent groups whose kernels find states through page tables on the device, so it runs in graphs.

Every row runs on from the state in its page and leaves the new state there. Rows of padding touch nothing. Only the states to
save inside a step depend on the host. `plan` fills their tensors before every step, also before a graph is replayed. Shape
letters: R rows, T tokens of the step, N saves.
"""

from __future__ import annotations

import numpy as np
import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import RecurrentCall
from pagerunner.attention.capability import Capabilities
from pagerunner.ops.async_copy import put, to_device
from pagerunner.ops.state_rows import StateRows, StateSaves

# bytes that the largest program takes, of keys and values of 256 and one stage: in half precision, in float32
SHARED_MEMORY = (66_560, 147_456)


class SaveState:
    """A graph's saves, at most one for each of its tokens; or an eager step's saves, which are made for each step."""

    def __init__(self, shape: GraphShape | None) -> None:
        self._shape = shape
        self._saves: StateSaves | None = None
        self._empty = True

    def fill(self, inputs: PlanInputs) -> StateSaves:
        """The saves of a step."""
        device = inputs.page_table.device
        if self._shape is None:
            if not inputs.state_saves:
                return _room(inputs.rows.num_rows, 1, device)
            start, end, target = _by_row(inputs, len(inputs.slots))
            return StateSaves(
                to_device(start, torch.int32, device),
                to_device(end, torch.int32, device),
                to_device(target, torch.int64, device),
            )
        if self._saves is None:
            self._saves = _room(self._shape.rows, self._shape.tokens, device)
        if inputs.state_saves or not self._empty:
            for mine, given in zip(self._saves, _by_row(inputs, self._shape.rows), strict=True):
                put(torch.from_numpy(given), mine[: len(given)])
        self._empty = not inputs.state_saves
        return self._saves


def _room(rows: int, saves: int, device: torch.device) -> StateSaves:
    """Tensors without saves, with room for some."""
    sizes = ((rows + 1, torch.int32), (saves, torch.int32), (saves, torch.int64))
    return StateSaves(*(torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes))


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
    capabilities = Capabilities(
        forms=frozenset({"recurrent"}), graphs=True, plans_on_host=True, triton=True, shared_memory=SHARED_MEMORY
    )

    def new_state(self, shape: GraphShape | None) -> SaveState:
        """See AttentionBackend."""
        return SaveState(shape)

    def plan(self, inputs: PlanInputs, state: SaveState) -> StateSaves:
        """The places of the states that are to be saved inside the step."""
        return state.fill(inputs)

    def run(self, call: RecurrentCall) -> torch.Tensor:
        """See RecurrentCall."""
        recurrence, inputs, pages, group, step = call
        return recurrence.rows(inputs, pages.states, StateRows(step, group.page_table, group.plan))
