"""ModelRunner: one step from a StepPlan to sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.ops.ahead import compile_ahead
from pagerunner.ops.sample import greedy
from pagerunner.ops.transfer import ToHost
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.graphs import CaptureReport, GraphSettings, Progress, StepGraphs, Tensors
from pagerunner.runner.pages import Pages
from pagerunner.runner.pooling import Pooler
from pagerunner.runner.sampling.sampler import Sampled, Sampler
from pagerunner.runner.short_model import one_layer_of_each_kind
from pagerunner.runner.staging import StagedStep, Staging
from pagerunner.runner.tables import LastTokens, PageTables
from pagerunner.types import (
    EngineRequest,
    SamplingParams,
    SlotInit,
    StepPlan,
    StepResult,
    StepRow,
    TokenLogprobs,
)

PROMPT_LOGPROBS_CHUNK = 256  # positions whose logits are held at once
BETWEEN_TOKENS = 272  # more than steps that run in graphs have, and a multiple of 16


class CausalLM(Protocol):
    """What the runner needs of a model."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, D] of a batch; [S, D], if the batch is `last_alone`, where the model can save something."""
        ...

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of hidden states, in the dtype of the weights."""
        ...


class PendingStep:
    """A launched step. `result()` waits for the device and reads what the host needs."""

    def __init__(
        self,
        plan: StepPlan,
        sampled_rows: list[int],
        sampled: Sampled | None,
        prompt_logprobs: dict[int, list[TokenLogprobs]],
        pooled: dict[int, ToHost],
        *,
        in_graph: bool = False,
    ) -> None:
        self.in_graph = in_graph
        self._plan = plan
        self._sampled_rows = sampled_rows
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._pooled = pooled

    def result(self) -> StepResult:
        """The step's tokens and log-probabilities, by row of the plan."""
        token_ids: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        rows = self._sampled_rows
        if self._sampled is not None:
            tokens, details = self._sampled.read()
            errors = {rows[index]: error for index, error in self._sampled.errors.items()}
            logprobs = {row: [detail] for row, detail in zip(rows, details, strict=True) if detail is not None}
            token_ids = [[token] for token in tokens]
        if len(rows) < len(self._plan.rows):
            found = dict(zip(rows, token_ids, strict=True))
            token_ids = [found.get(row, []) for row in range(len(self._plan.rows))]
        return StepResult(
            step_id=self._plan.step_id,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
            pooled={row: copy.lists()[0] for row, copy in self._pooled.items()},
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
        staging: Staging,
        graphs: GraphSettings,
    ) -> None:
        self._model = model
        self._pages = pages
        self._tables = tables
        self._last_tokens = last_tokens
        self._builder = builder
        self._sampler = sampler
        self._staging = staging
        self._max_model_len = graphs.max_model_len
        self._graphs = StepGraphs(graphs, builder)
        self._scored: dict[int, EngineRequest] = {}  # by slot, requests that ask for their prompt's log-probabilities
        self._pooler = Pooler()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> PendingStep:
        """Launch one step. Steps run in the order of the calls; an earlier step's pages are written before a later
        one reads or reuses them.
        """
        for init in plan.admitted:
            self._scored.pop(init.slot, None)
            if init.request.params.prompt_logprobs is not None:
                self._scored[init.slot] = init.request
            self._pooler.init_slot(init)
            self._sampler.init_slot(init)
        pages, tables = self._pages, self._tables
        step = self._staging.stage(
            plan.rows, tables.places(plan.table_writes), pages.copies(plan.copies), pages.fills(plan.zero)
        )
        if step.num_writes:
            tables.write(step.table_places_N, step.table_entries_N)
        pages.prepare(step)
        scored = [row for row, slot in enumerate(step.slots) if slot in self._scored] if self._scored else []
        pooled = self._pooler.rows(step.slots)
        captured = self._graphs.find(step) if step.stores_all and not (scored or pooled) else None
        if captured is None:
            some = len(step.sampled_rows) < step.where.tokens and not (scored or pooled)
            batch = self._builder.eager(step, plan.state_saves, last_alone=some)
            hidden_TD = self._model(batch)
            sampled = self._sample(hidden_TD, step, plan.masks)
            prompt_logprobs = self._prompt_logprobs(hidden_TD, step, scored)
            vectors = self._pooler.pool(hidden_TD, step, pooled)
            return PendingStep(plan, step.sampled_rows, sampled, prompt_logprobs, vectors)
        outputs = self._graphs.replay(captured, step, plan.state_saves)
        if captured.key.decode:
            sampled = self._sample_decoded(*outputs, step, plan.masks)
        else:
            sampled = self._sample(outputs[0], step, plan.masks)
        return PendingStep(plan, step.sampled_rows, sampled, {}, {}, in_graph=True)

    @torch.inference_mode()
    def warm_up(self, progress: Progress | None = None, name: str = "") -> None:
        """Run the largest steps, and each shape that will be captured, so that whatever happens at first use has
        happened: kernels compiled, memory for temporary tensors taken. Writes to the first page of each group only.

        To be called before the first request. `progress(done, total)` counts shapes. `name` stands for everything that
        decides which kernels there are, sizes included.
        """
        self._init_slots()
        with one_layer_of_each_kind(self._model, self._builder.layers):
            compile_ahead(self._builder.tensors.row_T.device, name, lambda: self._first_runs(rehearsal=True))
            self._first_runs(progress)
        # the whole model in a few shapes: the memory that all its layers take, and whatever one of them has of its own
        for rows in self._largest_steps():
            self.run(StepPlan(step_id=-1, rows=rows)).result()
        self._graphs.warm_up(self._work, extremes=True)
        self._scored.clear()

    def _init_slots(self) -> None:
        params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, presence_penalty=1.0, logprobs=1, max_tokens=1)
        greedy = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=1)
        prompt = [0] * (PROMPT_LOGPROBS_CHUNK + 1)
        for slot in range(self._builder.max_rows):
            wish = params if slot % 2 else greedy
            request = EngineRequest(request_id="", prompt_token_ids=prompt, params=wish, seed=0, max_tokens=1)
            self._sampler.init_slot(SlotInit(slot, request, []))
            if not slot:
                self._scored[slot] = request

    def _first_runs(self, progress: Progress | None = None, *, rehearsal: bool = False) -> None:
        scored, self._scored = self._scored, {}  # so that these compute the last layer for sampled tokens alone
        for rows in self._first_steps():
            self.run(StepPlan(step_id=-1, rows=rows)).result()
        self._scored = scored
        for rows in self._largest_steps():
            self.run(StepPlan(step_id=-1, rows=rows)).result()
        step = self._staging.stage([StepRow(0, 0, 1, [0], False)], {0: 0}, [[(0, 0, 0)]], [(0, 0, 0)])
        self._tables.write(step.table_places_N, step.table_entries_N)
        self._pages.prepare(step)
        self._graphs.warm_up(self._work, progress, rehearsal=rehearsal)

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> CaptureReport:
        """Capture the graphs; `warm_up` must have run. `progress(done, total)` counts them."""
        return self._graphs.capture(self._work, progress)

    @property
    def num_graphs(self) -> int:
        """How many graphs `capture` makes."""
        return len(self._graphs.keys)

    def _first_steps(self) -> Iterator[list[StepRow]]:
        """As many rows as a step can have, and whatever may make a kernel another one: numbers of rows and tokens that are
        1, a multiple of 16, and neither.
        """
        longest, most, most_rows = self._max_model_len, self._builder.max_tokens, self._builder.max_rows
        for rows in (1, 3, 16):
            if rows > most_rows:
                break
            for tokens in (BETWEEN_TOKENS, BETWEEN_TOKENS + 3):
                yield _even_rows(rows, min(tokens, most), longest, past=True)
            yield _even_rows(rows, rows, longest, past=True)
        yield _even_rows(most_rows, min(2 * most_rows, most), longest, past=True)
        yield _even_rows(min(most_rows, most), min(most_rows, most), longest, past=True)

    def _largest_steps(self) -> Iterator[list[StepRow]]:
        """As many tokens as a step can have, at the end of sequences and at their beginning; the latter is served by a
        library that may still be loading.
        """
        longest, most, most_rows = self._max_model_len, self._builder.max_tokens, self._builder.max_rows
        yield _even_rows(min(-(-2 * most // longest), most_rows), most, longest, past=True)
        yield _even_rows(min(-(-most // longest), most_rows), most, longest, past=False)

    def _work(self, batch: ForwardBatch, decode: bool) -> Tensors:
        """What graphs do: the hidden states of a mixed step; of a decode step logits, most likely tokens and their logits."""
        hidden_TD = self._model(batch)
        if not decode:
            return (hidden_TD,)
        logits_SV = self._model.compute_logits(hidden_TD)
        tokens_S, best_S = greedy(logits_SV)
        self._last_tokens.store(self._builder.tensors.sample_slots_R[: batch.rows.num_rows], tokens_S)
        return logits_SV, tokens_S, best_S

    def _sample(self, hidden_TD: torch.Tensor, step: StagedStep, masks: Mapping[int, bytes]) -> Sampled | None:
        """The tokens of a step of which hidden states are known; they may be padded. `masks` are by row of the plan."""
        if not step.sampled_rows:
            return None
        every = len(step.sampled_rows) == hidden_TD.shape[0]
        logits_SV = self._model.compute_logits(hidden_TD if every else hidden_TD.index_select(0, step.logits_index_S))
        slots = [step.slots[row] for row in step.sampled_rows]
        if not masks and self._sampler.take_best(slots):
            sampled = self._sampler.best(*greedy(logits_SV))
        else:
            positions = [step.seq_lens[row] for row in step.sampled_rows]
            by_sample = {index: masks[row] for index, row in enumerate(step.sampled_rows) if row in masks}
            sampled = self._sampler.sample(logits_SV, slots, positions, by_sample)
        self._last_tokens.store(step.sampled_slots_S, sampled.token_ids)
        return sampled

    def _sample_decoded(
        self,
        logits_SV: torch.Tensor,
        tokens_S: torch.Tensor,
        best_S: torch.Tensor,
        step: StagedStep,
        masks: Mapping[int, bytes],
    ) -> Sampled:
        """The tokens of a decode step that ran in a graph, where all rows are sampled and the best are stored already."""
        rows = step.where.rows
        if not masks and self._sampler.take_best(step.slots):
            return self._sampler.best(tokens_S[:rows], best_S[:rows])
        sampled = self._sampler.sample(logits_SV[:rows], list(step.slots), step.seq_lens, masks)
        self._last_tokens.store(step.sampled_slots_S, sampled.token_ids)
        return sampled

    def _prompt_logprobs(
        self, hidden_TD: torch.Tensor, step: StagedStep, scored: Sequence[int]
    ) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        if not scored:
            return found
        firsts = [0, *accumulate(step.query_lens)]
        for index in scored:
            row = step.rows[index]
            request = self._scored[row.slot]
            num = request.params.prompt_logprobs
            targets = request.prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1]
            entries: list[TokenLogprobs] = []
            for at in range(0, len(targets), PROMPT_LOGPROBS_CHUNK):
                chunk = targets[at : at + PROMPT_LOGPROBS_CHUNK]
                first = firsts[index] + at
                logits = self._model.compute_logits(hidden_TD[first : first + len(chunk)])
                wanted = torch.tensor(chunk, device=logits.device)
                entries += self._sampler.prompt_logprobs(logits, wanted, num or 0)
            if entries:
                found[index] = entries
        return found


def _even_rows(count: int, tokens: int, longest: int, *, past: bool) -> list[StepRow]:
    """At most `count` rows of `tokens` tokens together, at the beginning or the end of sequences of `longest` tokens.

    Rows of one token are those of requests that generate.
    """
    rows: list[StepRow] = []
    left = tokens
    for slot in range(count):
        size = min(-(-left // (count - slot)), longest)
        if size:
            rows.append(StepRow(slot, longest - size if past else 0, size, [0] * size if size > 1 else [], True))
        left -= size
    return rows
