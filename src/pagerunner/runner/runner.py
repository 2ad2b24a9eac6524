"""ModelRunner: one step from a StepPlan to sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from pagerunner.batch import ForwardBatch
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.pages import Pages
from pagerunner.runner.sampling.sampler import Sampled, Sampler
from pagerunner.runner.tables import LastTokens, PageTables
from pagerunner.types import EngineRequest, StepPlan, StepResult, StepRow, TokenLogprobs

PROMPT_LOGPROBS_CHUNK = 256  # positions whose logits are held at once


class CausalLM(Protocol):
    """What the runner needs of a model."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, D] of a batch."""
        ...

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Float32 logits [S, V] of hidden states."""
        ...


class PendingStep:
    """A launched step. `result()` waits for the device and reads what the host needs."""

    def __init__(
        self,
        plan: StepPlan,
        sampled_rows: list[int],
        sampled: Sampled | None,
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> None:
        self._plan = plan
        self._sampled_rows = sampled_rows
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs

    def result(self) -> StepResult:
        """The step's tokens and log-probabilities, by row of the plan."""
        token_ids: list[list[int]] = [[] for _ in self._plan.rows]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        if self._sampled is not None:
            tokens, details = self._sampled.read()
            errors = {self._sampled_rows[index]: error for index, error in self._sampled.errors.items()}
            for row, token, detail in zip(self._sampled_rows, tokens, details, strict=True):
                token_ids[row] = [token]
                if detail is not None:
                    logprobs[row] = [detail]
        return StepResult(
            step_id=self._plan.step_id,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
            errors=errors,
        )


class ModelRunner:
    """Runs steps on one device. Holds the per-slot state; everything else of a step comes with its plan."""

    def __init__(
        self,
        model: CausalLM,
        pages: Pages,
        tables: PageTables,
        last_tokens: LastTokens,
        builder: BatchBuilder,
        sampler: Sampler,
        max_num_seqs: int,
    ) -> None:
        self._model = model
        self._pages = pages
        self._tables = tables
        self._last_tokens = last_tokens
        self._builder = builder
        self._sampler = sampler
        self._requests: list[EngineRequest | None] = [None] * max_num_seqs

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> PendingStep:
        """Launch one step. Steps run in the order of the calls; an earlier step's pages are written before a later
        one reads or reuses them.
        """
        for init in plan.admitted:
            self._requests[init.slot] = init.request
            self._sampler.init_slot(init)
        self._tables.apply(plan.table_writes)
        self._pages.prepare(plan.copies, plan.zero)
        rows = plan.rows
        sampled_rows = [index for index, row in enumerate(rows) if row.samples]
        ends = np.cumsum([row.num_tokens for row in rows])
        batch = self._builder.build(rows, ends[sampled_rows] - 1, plan.state_saves)
        hidden_TD = self._model(batch)
        sampled = self._sample(hidden_TD, batch, rows, sampled_rows) if sampled_rows else None
        prompt_logprobs = self._prompt_logprobs(hidden_TD, rows, ends)
        return PendingStep(plan, sampled_rows, sampled, prompt_logprobs)

    def _sample(
        self, hidden_TD: torch.Tensor, batch: ForwardBatch, rows: Sequence[StepRow], sampled_rows: list[int]
    ) -> Sampled:
        wanted = hidden_TD if len(sampled_rows) == hidden_TD.shape[0] else hidden_TD[batch.logits_index]
        logits_SV = self._model.compute_logits(wanted)
        slots = [rows[index].slot for index in sampled_rows]
        positions = [rows[index].start + rows[index].num_tokens for index in sampled_rows]
        sampled = self._sampler.sample(logits_SV, slots, positions)
        self._last_tokens.store(torch.tensor(slots), sampled.token_ids)
        return sampled

    def _prompt_logprobs(
        self, hidden_TD: torch.Tensor, rows: Sequence[StepRow], ends: np.ndarray
    ) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        for index, row in enumerate(rows):
            request = self._requests[row.slot]
            if request is None or request.params.prompt_logprobs is None:
                continue
            targets = request.prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1]
            first = int(ends[index]) - row.num_tokens
            entries: list[TokenLogprobs] = []
            for at in range(0, len(targets), PROMPT_LOGPROBS_CHUNK):
                chunk = targets[at : at + PROMPT_LOGPROBS_CHUNK]
                logits = self._model.compute_logits(hidden_TD[first + at : first + at + len(chunk)])
                wanted = torch.tensor(chunk, device=logits.device)
                entries += self._sampler.prompt_logprobs(logits, wanted, request.params.prompt_logprobs)
            if entries:
                found[index] = entries
        return found
