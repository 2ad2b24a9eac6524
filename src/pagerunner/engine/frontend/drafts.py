"""What became of one request's drafts, as answers tell it (per_request_spec_decode_metrics)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pagerunner.types import SpeculativeMetrics


@dataclass(slots=True, eq=False)
class DraftLog:
    """The steps of a sequence in which tokens were drafted, as (drafted, accepted). `most` may be drafted in a step."""

    most: int
    detailed: bool
    steps: list[tuple[int, int]] = field(default_factory=list)

    def metrics(self) -> SpeculativeMetrics:
        """The sums."""
        steps = self.steps
        drafted, accepted = sum(one for one, _ in steps), sum(one for _, one in steps)
        counts = Counter(steps)
        lengths = sorted({length for length, _ in counts})
        by_length = {length: [counts[length, taken] for taken in range(length + 1)] for length in lengths}
        taken = Counter(one for _, one in steps)
        return SpeculativeMetrics(
            num_spec_tokens=self.most,
            num_spec_steps=len(steps),
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            mean_acceptance_length=1 + accepted / max(len(steps), 1),
            draft_acceptance_rate=accepted / max(drafted, 1),
            acceptance_histogram=[taken[one] for one in range(self.most + 1)],
            acceptance_histogram_by_draft_length=by_length,
            per_step_drafted=[one for one, _ in steps] if self.detailed else None,
            per_step_accepted=[one for _, one in steps] if self.detailed else None,
        )
