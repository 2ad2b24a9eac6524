"""Attention by the CPU kernels, which read page tables as a GPU's kernels do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import (
    LatentCall,
    NativeRecurrence,
    Recurrence,
    RecurrentCall,
    SteppedRecurrence,
    Tensors,
)
from pagerunner.attention.capability import HEADS, Capabilities
from pagerunner.attention.mla import LatentBackend
from pagerunner.attention.paged import PagedBackend, PagedOps
from pagerunner.attention.recurrent import RecurrentBackend, TorchRecurrentPlan
from pagerunner.attention.torch_ref import TorchPlan
from pagerunner.batch import KVPages, StepRows
from pagerunner.ops.native import latent, paged
from pagerunner.ops.paged_attention import PagedPlan, Scores

MAX_SHORT_QUERIES = 16
"""Tokens of a row up to which queries are carried into the latent space. Keys of longer rows are expanded, see `attention.mla`."""


class CpuBackend(PagedBackend):
    """See the module. Like its base it has no state of its own."""

    name = "cpu"
    capabilities = Capabilities(
        forms=HEADS,
        compute_dtypes=frozenset({torch.float32}),
        page_dtypes=frozenset({"float32"}),
        projection=True,
        wanted=True,
        devices=frozenset({"cpu"}),
        cpu_kernels=True,
        invariant=True,
    )
    ops = PagedOps(paged.store_kv_, paged.prepare_heads_, paged.paged_attention, paged.projected_attention)


class CpuLatentBackend:
    """Latent attention. Steps whose rows are short run by the CPU kernels, others by torch (`LatentBackend`).

    Queries in the latent space have one key and value head, the vectors in pages: so their attention is that of `CpuBackend`.
    """

    name = "cpu_mla"
    capabilities = Capabilities(
        forms=frozenset({"latent"}),
        compute_dtypes=frozenset({torch.float32}),
        page_dtypes=frozenset({"float32"}),
        projection=True,
        devices=frozenset({"cpu"}),
        cpu_kernels=True,
    )

    def __init__(self) -> None:
        self._torch = LatentBackend()

    def new_state(self, shape: GraphShape | None) -> None:
        """None: it keeps nothing of a step."""

    def plan(self, inputs: PlanInputs, state: None) -> TorchPlan | None:
        """None: all rows are short. Such a plan holds nothing of the step, so a recorded step can run again."""
        return self._torch.plan(inputs, state) if inputs.rows.max_query_len > MAX_SHORT_QUERIES else None

    def run(self, call: LatentCall) -> torch.Tensor:
        """See LatentCall."""
        q_THD, vectors_TL, up, memory, group, rows, scale, prep, *_ = call
        if group.plan is not None:
            if prep is not None:
                prep.apply_(q_THD, vectors_TL)
            return self._torch.run(call)
        pages = memory.latent
        q_THL = latent.absorbed_heads_(q_THD, vectors_TL, prep, up.keys_HNC, pages, group.write)
        vectors_T1L, kv = vectors_TL.unsqueeze(1), up.latent_dim
        held = KVPages(memory.group, pages.unsqueeze(2), pages.unsqueeze(2)[..., :kv])
        latents_THC = paged.paged_attention(
            q_THL, vectors_T1L, vectors_T1L[..., :kv], held, group.page_table, rows, PagedPlan(), Scores(scale)
        )
        return latent.values(latents_THC, up.values_HVC)


@dataclass(slots=True)
class RecurrentPlan:
    """`native`: rows have one token each, no accepted drafts to run before it, and no state is to be saved. Such a step needs nothing of `inputs`, so a recorded one can run
    again. `divided` is torch's plan for other steps, which the first layer makes.
    """

    native: bool
    inputs: PlanInputs
    divided: TorchRecurrentPlan | None = None


class _OneByOne(RecurrentBackend):
    """Tokens that rows take one after another run by the CPU kernels, longer rows by torch."""

    def step(self, recurrence: SteppedRecurrence, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """See RecurrentBackend."""
        if not _native(recurrence, inputs, states):
            return super().step(recurrence, inputs, states)
        count = len(inputs[0])
        rows = StepRows.of([1] * count, [1] * count, range(count))
        return recurrence.one_token(inputs, states, torch.arange(count).unsqueeze(-1), rows), states


class CpuRecurrentBackend:
    """Recurrences. Tokens that rows take one after another run by the CPU kernels, others by torch."""

    name = "cpu_recurrent"
    capabilities = Capabilities(
        forms=frozenset({"recurrent"}),
        compute_dtypes=frozenset({torch.float32}),
        devices=frozenset({"cpu"}),
        cpu_kernels=True,
    )

    def __init__(self) -> None:
        self._rest = _OneByOne()

    def new_state(self, shape: GraphShape | None) -> None:
        """None: it keeps nothing of a step."""

    def plan(self, inputs: PlanInputs, state: None) -> RecurrentPlan:
        """Whether the kernels find the states of the step in their pages."""
        rows = inputs.rows
        current = rows.accepted_R is None or not bool((rows.accepted_R > 0).any())
        return RecurrentPlan(rows.one_token and current and not inputs.state_saves, inputs)

    def run(self, call: RecurrentCall) -> torch.Tensor:
        """See RecurrentCall."""
        recurrence, inputs, pages, group, rows = call
        plan: RecurrentPlan = group.plan
        if plan.native and _native(recurrence, inputs, pages.states):
            return recurrence.one_token(inputs, pages.states, group.page_table, rows)
        if plan.divided is None:
            plan.divided = self._rest.plan(plan.inputs, None)
        return self._rest.run(call._replace(group=replace(group, plan=plan.divided)))


def _native(recurrence: Recurrence, inputs: Tensors, states: Tensors) -> TypeGuard[NativeRecurrence]:
    floats = all(x.dtype == torch.float32 for x in (*inputs, *states))
    return floats and isinstance(recurrence, NativeRecurrence)


CPU_KINDS: dict[str, type[CpuLatentBackend] | type[CpuRecurrentBackend]] = {
    "latent": CpuLatentBackend,
    "recurrent": CpuRecurrentBackend,
}
"""Backends of kinds of memory that are not keys and values by head."""
