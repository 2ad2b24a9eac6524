"""The backend of recurrent groups whose kernels find states through page tables on the device, so it runs in graphs.

Every row runs on from the state in its page and leaves the new state there. Rows of padding touch nothing. Only the states to
save inside a step depend on the host. `plan` fills their tensors before every step, also before a graph is replayed. Shape
letters: R rows, T tokens of the step, N saves.
"""

from __future__ import annotations

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import RecurrentCall
from pagerunner.attention.capability import Capabilities
from pagerunner.attention.recurrent import saves_by_row
from pagerunner.ops.async_copy import put, to_device
from pagerunner.ops.state_rows import StateRows, StateSaves

# bytes that the largest program takes, of keys and values of 256 and one stage: in half precision, in float32
SHARED_MEMORY = (66_560, 147_456)


class SaveState:
    """A graph's saves, or an eager step's saves, which are made for each step.

    A graph has room for one save of each token, and for one more of each row: of a row that generates, a plan asks for two at most.
    """

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
            dtypes = torch.int32, torch.int32, torch.int32, torch.int64
            found = zip(saves_by_row(inputs, len(inputs.slots)), dtypes, strict=True)
            return StateSaves(*(to_device(part, dtype, device) for part, dtype in found))
        if self._saves is None:
            self._saves = _room(self._shape.rows, self._shape.tokens + self._shape.rows, device)
        if inputs.state_saves or not self._empty:
            for mine, given in zip(self._saves, saves_by_row(inputs, self._shape.rows), strict=True):
                put(torch.from_numpy(given), mine[: len(given)])
        self._empty = not inputs.state_saves
        return self._saves


def _room(rows: int, saves: int, device: torch.device) -> StateSaves:
    """Tensors without saves, with room for some."""
    sizes = ((rows + 1, torch.int32), (saves, torch.int32), (saves, torch.int32), (saves, torch.int64))
    return StateSaves(*(torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes))


class PagedRecurrentBackend:
    """See the module. It has no state of its own: an instance may serve any number of groups."""

    name = "paged_recurrent"
    capabilities = Capabilities(
        forms=frozenset({"recurrent"}),
        graphs=True,
        drafts=True,
        plans_on_host=True,
        triton=True,
        shared_memory=SHARED_MEMORY,
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
        return recurrence.rows(inputs, pages, StateRows(step, group.page_table, group.plan))
