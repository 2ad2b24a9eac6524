"""Log-probabilities of prompts: what `prompt_logprobs` asks for, of the hidden states of a prompt's tokens.

Shape letters: T tokens of a step, D features, V vocabulary, N tokens that are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from pagerunner.ops.async_copy import ToHost, to_device
from pagerunner.ops.logprobs import gather_logprobs
from pagerunner.runner.sampling.logprobs import to_token_logprobs
from pagerunner.runner.staging import StagedStep
from pagerunner.types import EngineRequest, SlotInit, TokenLogprobs

CHUNK = 256  # positions whose logits are held at once


@dataclass(slots=True, eq=False)
class PromptScores:
    """The scores of one row of one step, on their way to the host."""

    targets: list[int]
    copy: ToHost
    num_top: int

    def read(self) -> list[TokenLogprobs]:
        """One entry per target. Waits for the step that made them only."""
        return to_token_logprobs(self.targets, self.copy.lists(), [self.num_top] * len(self.targets))


class PromptScorer:
    """Knows which slots hold requests whose prompt is still to be scored.

    A prompt's token is scored by the step that computes the token before it. After the last token of the prompt is scored, the
    request is like any other.
    """

    def __init__(self) -> None:
        self._requests: dict[int, EngineRequest] = {}

    def init_slot(self, init: SlotInit) -> None:
        """A request takes a slot; one that has generated before has had its prompt scored. Of one token none is scored."""
        self._requests.pop(init.slot, None)
        request = init.request
        unscored = len(request.prompt_token_ids) > 1 and not init.output_token_ids
        if unscored and request.params.prompt_logprobs is not None:
            self._requests[init.slot] = request

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()

    def rows(self, step: StagedStep) -> list[int]:
        """The rows of a step in which prompt tokens are scored."""
        if not self._requests:
            return []
        return [
            index
            for index, row in enumerate(step.rows)
            if row.slot in self._requests and row.start + 1 < len(self._requests[row.slot].prompt_token_ids)
        ]

    def score(
        self,
        hidden_TD: torch.Tensor,
        step: StagedStep,
        rows: Sequence[int],
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[int, PromptScores]:
        """Scores of `rows`, by row. Nothing waits for the device."""
        found: dict[int, PromptScores] = {}
        if not rows:
            return found
        firsts = [0, *accumulate(step.query_lens)]
        for index in rows:
            row = step.rows[index]
            request = self._requests[row.slot]
            num_top = request.params.prompt_logprobs or 0
            targets = request.prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1]
            targets_N = to_device(targets, torch.int64, hidden_TD.device)
            hidden_ND = hidden_TD[firsts[index] : firsts[index] + len(targets)]
            chunks = [
                gather_logprobs(compute_logits(hidden), None, wanted, num_top)
                for hidden, wanted in zip(hidden_ND.split(CHUNK), targets_N.split(CHUNK), strict=True)
            ]
            report = chunks[0] if len(chunks) == 1 else tuple(map(torch.cat, zip(*chunks, strict=True)))
            found[index] = PromptScores(targets, ToHost(report, hidden_TD.device), num_top)
            if row.start + row.num_tokens + 1 >= len(request.prompt_token_ids):
                del self._requests[row.slot]
        return found
