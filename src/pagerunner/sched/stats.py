"""What a scheduler counts, beside what its memory does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from pagerunner.memory.stats import MemoryStats
from pagerunner.sched.costs import CostStats
from pagerunner.sched.live import Wait
from pagerunner.tiers.stats import ExchangeStats, TierStats
from pagerunner.types.lora import LoraStats

STEP_PLACES = 16


class StepSizes(msgspec.Struct):
    """Steps by how many tokens they compute: in place i those of up to 2**i, and of more than 2**(i-1); in the last place all beyond."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * STEP_PLACES)
    total: int = 0

    def add(self, tokens: int) -> None:
        """Count a step."""
        self.counts[min((tokens - 1).bit_length(), STEP_PLACES - 1)] += 1
        self.total += tokens


class SpecCounts(msgspec.Struct):
    """What became of drafts. In place i of `accepted`: of how many drafts (of one row in one step) i tokens were accepted."""

    accepted: list[int]
    num_draft_tokens: int = 0

    @classmethod
    def of(cls, most: int) -> SpecCounts:
        """Nothing so far, of drafts of up to so many tokens."""
        return cls([0] * (most + 1))

    def add(self, drafted: int, accepted: int) -> None:
        """Count a row's draft: of its `drafted` tokens the first `accepted` ones were accepted."""
        self.accepted[accepted] += 1
        self.num_draft_tokens += drafted

    def since(self, before: SpecCounts | None) -> SpecCounts:
        """What has been counted after `before`."""
        if before is None:
            return self
        counts = [now - then for now, then in zip(self.accepted, before.accepted, strict=True)]
        return SpecCounts(counts, self.num_draft_tokens - before.num_draft_tokens)

    @property
    def num_drafts(self) -> int:
        """How many drafts there were."""
        return sum(self.accepted)

    @property
    def num_accepted_tokens(self) -> int:
        """How many drafted tokens were accepted."""
        return sum(tokens * drafts for tokens, drafts in enumerate(self.accepted))

    @property
    def accepted_per_pos(self) -> list[int]:
        """How often the token in each place of a draft was accepted."""
        return [sum(self.accepted[place + 1 :]) for place in range(len(self.accepted) - 1)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a row with a draft got in a step, its own one and those accepted; 1 without drafts."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    def text(self) -> str:
        """For a person, in vLLM's words: the last two parts of its log's line."""
        drafts, tokens = max(self.num_drafts, 1), max(self.num_draft_tokens, 1)
        rates = ", ".join(f"{count / drafts:.3f}" for count in self.accepted_per_pos)
        return f"Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {100 * self.num_accepted_tokens / tokens:.1f}%"


class SchedulerStats(MemoryStats, frozen=True, kw_only=True):
    """Counts at one moment, as `LLM.stats()` returns them and the server's metrics read them.

    `waiting_for` says why the first waiting sequence waits. The engine fills in `busy_seconds` of the device. With several teams of ranks
    `teams` has each team's counts. `tier`: of the host's memory, if pages go there. `exchange`: with other engines. `spec`: of drafts, if there are any.
    `costs`: of the model of costs, if there is one. `lora`: of adapters, if requests may have some.
    """

    running: int = 0
    waiting: int = 0
    waiting_for: Wait = ""
    preemptions_total: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    last_step_tokens: int = 0
    busy_seconds: float = 0.0
    step_sizes: StepSizes = msgspec.field(default_factory=StepSizes)
    tier: TierStats | None = None
    exchange: ExchangeStats | None = None
    spec: SpecCounts | None = None
    costs: CostStats | None = None
    lora: LoraStats | None = None
    teams: list[SchedulerStats] = []


@dataclass(slots=True)
class SchedulerCounts:
    """What a scheduler has counted since it began. Only the last field counts a single step."""

    arrivals: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    last_step_tokens: int = 0
    step_sizes: StepSizes = field(default_factory=StepSizes)
    spec: SpecCounts | None = None

    def carried_on(self) -> SchedulerCounts:
        """The same counts for a scheduler that has not run a step yet."""
        return replace(self, last_step_tokens=0)
