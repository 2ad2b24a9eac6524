"""A step that was launched, and what it will tell."""

from __future__ import annotations

from dataclasses import dataclass

from pagerunner.ops.accept import count_drafts
from pagerunner.runner.pooling import PooledRows
from pagerunner.runner.sampling.sampler import Sampled
from pagerunner.runner.scoring import PromptScores
from pagerunner.types import StepPlan, StepResult, TokenLogprobs


@dataclass(slots=True, eq=False)
class PendingStep:
    """A launched step. `result()` waits for the device and reads what the host needs."""

    plan: StepPlan
    sampled_rows: list[int]
    sampled: Sampled | None
    prompt_scores: dict[int, PromptScores]
    pooled: PooledRows
    in_graph: bool = False
    width: int = 1

    def result(self) -> StepResult:
        """The step's tokens and log-probabilities, by row of the plan."""
        token_ids: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        drafted: dict[int, int] = {}
        rows = self.sampled_rows
        if self.sampled is not None:
            tokens, details = self.sampled.read()
            failed = self.sampled.errors
            # of a row with drafts the first place that failed
            errors = {rows[index // self.width]: error for index, error in sorted(failed.items(), reverse=True)}
            if self.width == 1 and not failed:
                logprobs = {row: [detail] for row, detail in zip(rows, details, strict=True) if detail is not None}
                token_ids = [[token] for token in tokens]
            else:
                token_ids, drafted = self._by_row(tokens, details, logprobs)
        if len(rows) < len(self.plan.rows):
            found = dict(zip(rows, token_ids, strict=True))
            token_ids = [found.get(row, []) for row in range(len(self.plan.rows))]
        return StepResult(
            step_id=self.plan.step_id,
            token_ids=token_ids,
            drafted=drafted,
            drafts={}
            if self.sampled is None
            else dict(zip(self.plan.tell_drafts, self.sampled.read_drafts(), strict=True)),
            logprobs=logprobs,
            prompt_logprobs={row: scores.read() for row, scores in self.prompt_scores.items()},
            pooled=self.pooled.read(),
            errors=errors,
        )

    def _by_row(
        self, tokens: list[int], details: list[TokenLogprobs | None], logprobs: dict[int, list[TokenLogprobs]]
    ) -> tuple[list[list[int]], dict[int, int]]:
        """Of rows with several places the tokens up to one that failed, and how many drafts there were. Adds their `logprobs`."""
        token_ids: list[list[int]] = []
        drafted: dict[int, int] = {}
        failed = () if self.sampled is None else self.sampled.errors
        for number, row in enumerate(self.sampled_rows):
            first = number * self.width
            places = tokens[first : first + self.width]
            drafts, taken = count_drafts(places)
            kept = next((at for at in range(taken + 1) if first + at in failed), taken + 1)
            drafted[row] = drafts if kept > taken else 0
            token_ids.append(places[:kept])
            own = [detail for detail in details[first : first + kept] if detail is not None]
            if own:
                logprobs[row] = own
        return token_ids, drafted
