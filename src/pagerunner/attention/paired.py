"""Two backends for one memory group: the first takes steps of one token a row, the second all others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pagerunner.attention.base import AttentionBackend, GraphShape, PlanInputs


@dataclass(frozen=True, slots=True)
class PairedPlan:
    """Which of the two runs the step, and its own plan."""

    backend: AttentionBackend[Any]
    plan: Any


class PairedBackend:
    """See the module. The plan of a step decides which backend runs it. In a graph the capture's plan decides."""

    def __init__(self, one_query: AttentionBackend[Any], several: AttentionBackend[Any]) -> None:
        self.name = f"{one_query.name}, {several.name} for rows of several tokens"
        first, second = one_query.capabilities, several.capabilities
        self.capabilities = replace(
            first,
            several_queries=True,
            projection=first.projection and second.projection,
            wanted=first.wanted and second.wanted,
            graphs=first.graphs and second.graphs,
            plans_on_host=first.plans_on_host or second.plans_on_host,
            min_sharing_rows=max(first.min_sharing_rows, second.min_sharing_rows),
        )
        self._backends = (one_query, several)

    def new_state(self, shape: GraphShape | None) -> tuple[Any, Any]:
        """The state of both."""
        return self._backends[0].new_state(shape), self._backends[1].new_state(shape)

    def plan(self, inputs: PlanInputs, state: tuple[Any, Any]) -> PairedPlan:
        """The plan of the backend that runs this step."""
        which = 0 if inputs.rows.one_token else 1
        return PairedPlan(self._backends[which], self._backends[which].plan(inputs, state[which]))

    def run(self, call: Any) -> torch.Tensor:
        """Any call that both run."""
        chosen: PairedPlan = call.group.plan
        return chosen.backend.run(call._replace(group=replace(call.group, plan=chosen.plan)))
