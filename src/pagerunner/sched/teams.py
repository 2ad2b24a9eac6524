"""One scheduler for several teams of ranks, which take each step together.

A team's ranks have the same requests, and pages of their own for them. All teams' ranks divide the experts, so no team can make a step alone. Each
team has a `Scheduler`, which knows of no other. Their plans are one step.

Example with two teams: the first decodes 3 requests, and the second computes 500 tokens of a prompt. The step has a plan for each, and both plans
say that the fullest team has 500 tokens. So every rank knows what it gathers from the others before it has heard of them. If the second team has
nothing to do, its plan has no rows, and its ranks compute their experts for the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pagerunner.errors import InvalidRequestError
from pagerunner.memory.affinity import MOST_UNITS, UNITS_OF_A_REQUEST
from pagerunner.memory.prefix import UNIT_TOKENS
from pagerunner.sched.scheduler import Scheduler
from pagerunner.sched.stats import SchedulerStats
from pagerunner.types import EngineRequest, RequestUpdate, StepPlan, StepResult, TeamsPlan, TeamsResult, TransferEnd
from pagerunner.types.lora import AdapterInfo

_SHARES = frozenset(
    """kv_usage kv_fragmentation kv_waste usage fragmentation waste
    bytes_per_second seconds_per_token""".split()
)


class TeamsScheduler:
    """See Scheduler for the methods. A request stays with the team that it was given to."""

    def __init__(self, teams: Sequence[Scheduler]) -> None:
        self.teams = teams
        self._steps = 0
        self._latest: tuple[str, Scheduler] = ("", teams[0])  # whose siblings come next

    def add(self, request: EngineRequest) -> None:
        """See Scheduler.add."""
        self._team_for(request).add(request)

    def resume(self, request: EngineRequest, output: list[int], adapter: AdapterInfo | None = None) -> None:
        """See Scheduler.resume."""
        self._team_for(request).resume(request, output, adapter)

    def adapter_of(self, request_id: str) -> AdapterInfo | None:
        """See Scheduler.adapter_of."""
        return next((found for team in self.teams if (found := team.adapter_of(request_id)) is not None), None)

    def _team_for(self, request: EngineRequest) -> Scheduler:
        """The team that the request asks for, that its siblings are with, or that has least to do, less what it holds of the prompt."""
        if any(request.request_id in team for team in self.teams):
            raise InvalidRequestError(f"request_id {request.request_id!r} is already in use.", param="request_id")
        parent, team = self._latest
        if request.data_parallel_rank is not None:
            team = self.teams[request.data_parallel_rank]
        elif not parent or request.parent_id != parent:
            first = self._steps % len(self.teams)  # of equal ones each has its turn
            chain = team.manager.chain(request.cache_salt, parent_id=request.parent_id)
            beginning = request.prompt_token_ids[: MOST_UNITS * UNIT_TOKENS]
            takes = request.params.prompt_logprobs is None  # else it computes the whole prompt

            def to_do(one: Scheduler) -> tuple[float, float]:
                units = one.manager.cached_tokens(chain, beginning) // UNIT_TOKENS if takes else 0
                return one.load - units / UNITS_OF_A_REQUEST, one.manager.usage

            team = min((*self.teams[first:], *self.teams[:first]), key=to_do)
        self._latest = request.parent_id, team
        return team

    def count_on(self, earlier: TeamsScheduler) -> None:
        """See Scheduler.count_on."""
        self._steps = earlier._steps
        for team, before in zip(self.teams, earlier.teams, strict=True):
            team.count_on(before)

    def close_guides(self) -> None:
        """See Scheduler.close_guides."""
        for team in self.teams:
            team.close_guides()

    def abort(self, request_ids: list[str]) -> list[RequestUpdate]:
        """See Scheduler.abort."""
        return [update for team in self.teams for update in team.abort(request_ids)]

    @property
    def request_ids(self) -> list[str]:
        """See Scheduler.request_ids."""
        return [name for team in self.teams for name in team.request_ids]

    @property
    def has_work(self) -> bool:
        """See Scheduler.has_work."""
        return any(team.has_work for team in self.teams)

    def settle_guides(self) -> list[RequestUpdate]:
        """See Scheduler.settle_guides."""
        return [update for team in self.teams for update in team.settle_guides()]

    def wait_for_guide(self, seconds: float) -> bool:
        """See Scheduler.wait_for_guide."""
        return any(team.wait_for_guide(seconds) for team in self.teams)

    def schedule(self) -> TeamsPlan | None:
        """The next step of all teams, or None if no team has anything to run."""
        plans = [team.schedule() for team in self.teams]
        if all(plan is None for plan in plans):
            return None
        most = max(plan.num_tokens if plan is not None else 0 for plan in plans)
        step, self._steps = self._steps, self._steps + 1
        idle = StepPlan(step_id=step, rows=[])
        graphs = _graphs([plan for plan in plans if plan is not None])
        of_teams = [msgspec.structs.replace(plan or idle, most_tokens=most, graphs=graphs) for plan in plans]
        return TeamsPlan(step_id=step, rows=[row for plan in of_teams for row in plan.rows], teams=of_teams)

    def schedule_loads(self) -> None:
        """See Scheduler.schedule_loads. Teams make all steps together, so their loads begin with the next one."""

    @property
    def num_transfers(self) -> int:
        """See Scheduler.num_transfers."""
        return sum(team.num_transfers for team in self.teams)

    def end_transfer(self, end: TransferEnd) -> None:
        """See Scheduler.end_transfer."""
        self.teams[end.team].end_transfer(end)

    def host_ready(self, num_bytes: int) -> None:
        """See Scheduler.host_ready."""
        for team in self.teams:
            team.host_ready(num_bytes)

    def clear_tiers(self, *, new_weights: bool = False) -> None:
        """See Scheduler.clear_tiers."""
        for team in self.teams:
            team.clear_tiers(new_weights=new_weights)

    def attach_tiers(self) -> None:
        """See Scheduler.attach_tiers."""
        for team in self.teams:
            team.attach_tiers()

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """See Scheduler.note_step. How long a step takes is what its fullest team needs: one with less than half as much learns nothing from it."""
        assert isinstance(plan, TeamsPlan)
        for team, own in zip(self.teams, plan.teams, strict=True):
            if 2 * own.num_tokens >= own.most_tokens:
                team.note_step(own, seconds)

    def preempt_all(self) -> None:
        """See Scheduler.preempt_all."""
        for team in self.teams:
            team.preempt_all()

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """See Scheduler.commit."""
        assert isinstance(plan, TeamsPlan) and isinstance(result, TeamsResult)
        both = zip(self.teams, plan.teams, result.teams, strict=True)
        return [update for team, own, found in both if own.rows or own.transfers for update in team.commit(own, found)]

    def take_failed(self) -> list[RequestUpdate]:
        """See Scheduler.take_failed."""
        return [update for team in self.teams for update in team.take_failed()]

    def reset_prefix_cache(self) -> bool:
        """See Scheduler.reset_prefix_cache."""
        done = [team.reset_prefix_cache() for team in self.teams]
        return all(done)

    def stats(self, *, paused: bool = False) -> SchedulerStats:
        """The counts of all teams together, with those of each in `teams`. Shares are the largest: that of a team whose requests wait."""
        of_teams = [team.stats(paused=paused) for team in self.teams]
        together: SchedulerStats = _together("", of_teams)
        return msgspec.structs.replace(together, steps_total=self._steps, teams=of_teams)


def _graphs(plans: Sequence[StepPlan]) -> Literal["mixed", "decode"]:
    """Which graphs suit the rows of all plans. A prompt's last token alone is none of a decode graph's."""
    rows = (row for plan in plans for row in plan.rows)
    return "decode" if all(row.num_tokens == 1 and row.samples and not row.tokens for row in rows) else "mixed"


def _together(name: str, values: Sequence[Any]) -> Any:
    """The sum of a field's values, the largest of shares, the first of texts; of structs and lists part by part."""
    first = values[0]
    if isinstance(first, msgspec.Struct):
        names = first.__struct_fields__
        return type(first)(**{field: _together(field, [getattr(one, field) for one in values]) for field in names})
    if isinstance(first, list):
        return [_together(name, parts) for parts in zip(*values, strict=True)]
    if first is None or isinstance(first, str):
        return next(filter(None, values), first)
    return max(values) if name in _SHARES else sum(values)
