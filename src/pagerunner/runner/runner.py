"""ModelRunner: one step from a StepPlan to sampled tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.life import LIFE
from pagerunner.ops import numerics
from pagerunner.ops.accept import Chances, accept
from pagerunner.ops.ahead import compile_ahead
from pagerunner.ops.async_copy import ToHost, to_device
from pagerunner.ops.batch import SlotState
from pagerunner.ops.guesses import take_guesses
from pagerunner.ops.sample import SEED
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.device_clock import DeviceClock
from pagerunner.runner.graphs import Captured, GraphKey, GraphSettings, SecondWork, StepGraphs, Tensors
from pagerunner.runner.kernel_counts import KernelsOf, more_counts
from pagerunner.runner.pages import Pages
from pagerunner.runner.pending import PendingStep
from pagerunner.runner.pooling import HiddenStatePooler, PooledRows
from pagerunner.runner.recorded import RecordedSteps
from pagerunner.runner.sampling.sampler import Masks, Sampled, SampledRows, Sampler
from pagerunner.runner.scoring import CHUNK, PromptScorer
from pagerunner.runner.short_model import one_layer_of_each_kind
from pagerunner.runner.spec import Computed, Drafter, NoDrafts, Verified
from pagerunner.runner.stage_tokens import StageTokens
from pagerunner.runner.staging import StagedStep, Staging
from pagerunner.runner.step_costs import measure_steps, steps_to_time
from pagerunner.runner.step_threads import StepThreads
from pagerunner.runner.tables import PageTables
from pagerunner.runner.transfers import Transfers
from pagerunner.runner.warm_up import even_rows, first_request
from pagerunner.types import Guess, SamplingParams, SlotInit, StepPlan, StepRow
from pagerunner.types.steps import MeasuredSteps

BETWEEN_TOKENS = 272  # more than steps that run in graphs have, and a multiple of 16
FEW_TOKENS, FEW_KEYS = 128, 4096  # a past in fp8 pages that is copied for so few tokens, of all heads together


class RunnableModel(Protocol):
    """What the runner needs of a model."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, D] of a batch.

        If the batch is `last_alone`, a model may return sampled tokens alone, [S, D].
        """

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states as of `__call__`, and what a drafter takes of every token, [T, X], if there is one that goes on from that."""

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of hidden states, in the dtype of the weights; of one of several ranks, those of its token ids."""

    def join(self, most_tokens: int) -> None:
        """Compute for other teams of ranks, which have up to so many tokens; see Module."""


class ModelRunner:
    """Runs steps on one device. Holds the per-slot state; everything else of a step comes with its plan."""

    def __init__(
        self,
        model: RunnableModel,
        pages: Pages,
        tables: PageTables,
        state: SlotState,
        builder: BatchBuilder,
        sampler: Sampler,
        staging: Staging,
        graphs: GraphSettings,
        threads: StepThreads | None = None,
        unpacks: bool = False,
        kernels: Sequence[KernelsOf] = (),
        lengths: Sequence[KernelsOf] = (),
        agree: Callable[[Sequence[int]], list[int]] = list,
        recorded: RecordedSteps | None = None,
        stage: StageTokens | None = None,
        transfers: Transfers | None = None,
        drafter: Drafter | None = None,
        max_in_flight: int = 1,
        rates: Sequence[float] | None = None,
    ) -> None:
        """`unpacks`: products unpack weights, and larger parts of them for fewer than `parted_tokens` (ops/numerics.py). `kernels` say for which numbers of tokens
        the model's kernels differ, `lengths` for which lengths of a step's longest row; warm-ups run all of them. `agree` adds those of other ranks, whose parts of the model may have other sizes:
        all ranks run the same steps. `stage`: the model is that of one of several stages. `transfers` bring pages to host memory and back.
        `drafter` makes drafts, as many as `state` has room for. With `rates` they are taken by chance.
        """
        self._transfers = transfers
        self._num_drafts = state.drafts.shape[1]
        self._widths = sorted({1 + drafts for drafts in (*graphs.drafts, self._num_drafts)})
        self._drafter: Drafter = drafter or NoDrafts()
        self._chances: Chances | None = None
        if rates is not None:
            rates_K = to_device(rates, torch.float64, state.tokens.device)
            self._chances = Chances(rates_K, sampler.settings.words[:, SEED])
        self._uncertain = self._num_drafts * (max_in_flight - 1)
        self._stage = stage
        self._samples = stage is None or stage.samples
        self._unpacks, self._kernels, self._lengths, self._agree = unpacks, kernels, lengths, agree
        self._model = model
        self._threads = threads  # a CPU's
        self._recorded = recorded  # a CPU's
        self._pages = pages
        self._tables = tables
        self._state = state
        self._builder = builder
        self._sampler = sampler
        self._staging = staging
        self._max_model_len = graphs.max_model_len
        self._graphs = StepGraphs(graphs, builder)
        self._scorer = PromptScorer()
        self._pooler = HiddenStatePooler()
        self._taken_TX = torch.empty(0)
        if self._drafter.onward is not None:
            most = max((key.tokens for key in self._graphs.keys if key.decode), default=0)
            self._taken_TX = self._drafter.onward.room_for(most)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> PendingStep:
        """Launch one step. Steps run in the order of the calls; an earlier step's pages are written before a later
        one reads or reuses them.
        """
        if plan.transfers and self._transfers is None:
            raise RuntimeError("pages are to be transferred, and this runner has no other memory to transfer them to")
        with nullcontext() if self._threads is None else self._threads.during(plan.rows, plan.most_tokens):
            pending = self._run(plan)
        if plan.transfers and self._transfers is not None:
            self._transfers.store(plan.transfers)
        return pending

    def _run(self, plan: StepPlan) -> PendingStep:
        for init in plan.admitted:
            self._scorer.init_slot(init)
            self._pooler.init_slot(init)
            self._sampler.init_slot(init)
            self._drafter.init_slot(init)
            if self._builder.adapters is not None:
                self._builder.adapters.set(init.slot, init.adapter)
        if self._stage is not None:
            self._stage.begin(plan.rows)
        pages, tables, sampler = self._pages, self._tables, self._sampler
        entries, copies, fills = tables.places(plan.table_writes), pages.copies(plan.copies), pages.fills(plan.zero)
        width, strided = self._width(plan.rows, entries) if self._num_drafts else (1, False)
        step = self._staging.stage(
            plan.rows, entries, copies, fills, sampler.new_settings(), width=width, strided=strided
        )
        if step.num_settings:
            sampler.write_settings(step.setting_places_N, step.settings_N)
        if step.num_writes:
            tables.write(step.table_places_N, step.table_entries_N)
        if plan.guesses:
            self._take(plan.guesses)
        pages.prepare(step)
        for move in plan.adapter_moves:
            assert self._builder.adapters is not None, "no request has an adapter"
            self._builder.adapters.table.place(move.slot, move.offsets)
        if plan.transfers and self._transfers is not None:
            self._transfers.load(plan.transfers)
        if not plan.rows:
            return self._run_for_others(plan)
        scored, pooled = self._scorer.rows(step), self._pooler.rows(step.slots)
        needs_hidden = bool(scored or pooled)
        if plan.most_tokens:
            captured = self._graphs.find_for_teams(plan.most_tokens, plan.graphs)
        else:
            captured = self._graphs.find(step, needs_hidden=needs_hidden)
        if not self._samples:
            if captured is not None:
                self._graphs.replay(captured, step, plan.state_saves)
            else:
                self._model(self._builder.eager(step, plan.state_saves))
            return PendingStep(plan, [], None, {}, PooledRows(), in_graph=captured is not None)
        if captured is not None and captured.key.decode:
            outputs = self._graphs.replay(captured, step, plan.state_saves)
            sampled = self._sample_decoded(*outputs, step, plan, captured)
            self._tell(step, sampled)
            return PendingStep(plan, step.sampled_rows, sampled, {}, PooledRows(), in_graph=True, width=width)
        if self._recorded is not None and not (needs_hidden or self._builder.has_adapters(step.slots)):
            threads = torch.get_num_threads() if self._threads is None else self._threads.usual
            logits_SV = self._recorded.logits(step, self._builder, plan.state_saves, self._logits, threads)
            if logits_SV is not None:
                return PendingStep(
                    plan, step.sampled_rows, self._sample_logits(logits_SV, step, plan), {}, PooledRows()
                )
        taken_TX: torch.Tensor | None
        if captured is not None:
            alone, batch = False, captured.batch
            hidden_TD, taken_TX = (*self._graphs.replay(captured, step, plan.state_saves), None)[:2]
        else:
            alone = step.num_places < step.where.tokens and not needs_hidden
            batch = self._builder.eager(step, plan.state_saves, last_alone=alone, most_tokens=plan.most_tokens)
            batch = self._graphs.with_known_places(batch) if alone else batch
            hidden_TD, taken_TX = (
                self._model.run(batch) if self._drafter.onward is not None else (self._model(batch), None)
            )
        computed = self._computed(step, batch, taken_TX, None if captured is None else captured.states)
        found = self._sample(hidden_TD, step, plan, computed, alone=batch.logits_index.shape[0] if alone else 0)
        self._tell(step, found)
        scores = self._scorer.score(
            hidden_TD, step, scored, lambda hidden_SD: self._sampler.whole(self._model.compute_logits(hidden_SD))
        )
        vectors = self._pooler.pool(hidden_TD, step, pooled)
        return PendingStep(plan, step.sampled_rows, found, scores, vectors, captured is not None, width)

    def _take(self, guesses: Sequence[Guess]) -> None:
        """Take the host's guesses as drafts of their slots."""
        most = max(len(guess.tokens) for guess in guesses)
        packed = [[guess.slot, guess.start, *guess.tokens, *[-1] * (most - len(guess.tokens))] for guess in guesses]
        take_guesses(to_device(packed, torch.int64, self._state.drafts.device), self._state)

    def _width(self, rows: Sequence[StepRow], entries: Mapping[int, int]) -> tuple[int, bool]:
        """How many places sampled rows have in a step, and whether its tokens are at that stride, which graphs take."""
        width = max((row.num_tokens for row in rows if not row.tokens), default=1)
        if width == 1:
            return 1, False
        strided = -1 not in entries.values() and not any(row.tokens for row in rows)
        stride = self._graphs.stride_for(len(rows), width) if strided else 0
        if stride or not self._state.tokens.is_cuda:
            return stride or width, stride > 0
        return next(few for few in self._widths if few >= width), False  # kernels are made for few widths

    def _run_for_others(self, plan: StepPlan) -> PendingStep:
        """A step for which other teams of ranks alone have rows, or nobody: then only tables and pages change."""
        captured = self._graphs.find_for_teams(plan.most_tokens, plan.graphs) if plan.most_tokens else None
        if captured is not None:
            self._graphs.replay_empty(captured)
        elif plan.most_tokens:
            self._model.join(plan.most_tokens)
        return PendingStep(plan, [], None, {}, PooledRows(), in_graph=captured is not None)

    def _tell(self, step: StagedStep, sampled: Sampled | None) -> None:
        """Give the tokens to the other stages, if there are any."""
        if self._stage is not None and sampled is not None:
            self._stage.end(step.sampled_slots_S, sampled.token_ids, self._builder.sampled_positions(step))

    @torch.inference_mode()
    def warm_up(self, name: str = "") -> None:
        """Run the largest steps, and each shape that will be captured. Writes to the first page of each group only.

        Afterwards kernels are compiled, and memory for temporary tensors is taken.

        To be called before the first request. `name` stands for everything that
        decides which kernels there are, sizes included.
        """
        self._init_slots()
        more = self._more_counts()
        with one_layer_of_each_kind(self._model, self._builder.layers):
            compile_ahead(self._builder.tensors.row_T.device, name, lambda: self._first_runs(more, rehearsal=True))
            self._first_runs(more)
        # the whole model in a few shapes, for the memory of all layers together and for kernels that one layer alone has
        self._run_largest_steps()
        self._graphs.warm_up(self._work, self._second, extremes=True)

    def _init_slots(self) -> None:
        """Slots that want all that a sampler does. Of several ranks, the last one wants what these do otherwise: draw without filters."""
        everything = SamplingParams(
            temperature=1.0, top_k=20, top_p=0.9, presence_penalty=1.0, logprobs=1, max_tokens=1
        )
        free, last = SamplingParams(temperature=1.0, max_tokens=1), self._builder.max_rows - 1
        for slot in range(last + 1):
            params = free if self._sampler.is_divided and 0 < slot == last else everything
            self._sampler.init_slot(SlotInit(slot, first_request(params), []))

    def _first_runs(self, more: tuple[list[int], ...], *, rehearsal: bool = False) -> None:
        for rows in self._first_steps():
            self._run_first(rows)
        self._run_first(even_rows(1, 1, self._max_model_len, past=True), {0: [self._sampler.whole_mask]})
        self._run_more_kernels(*more)
        self._run_largest_steps()
        if self._builder.adapters is not None:
            self._builder.adapters.set_all(0)
            for rows in self._first_steps():
                self._run_first(rows)
            self._run_more_kernels(*more)  # a product with an adapter beside it is another kernel
            self._builder.adapters.set_all(-1)
        step = self._staging.stage([StepRow(0, 0, 1, [0], False)], {0: 0}, [[(0, 0, 0)]], [(0, 0, 0)])
        self._tables.write(step.table_places_N, step.table_entries_N)
        if self._num_drafts:
            self._take([Guess(self._builder.max_rows, 0, [0])])  # of no slot
        self._pages.prepare(step)
        for stride in {key.stride for key in self._graphs.keys if key.drafts}:  # rows aren't built in the graphs
            step.where = step.where._replace(one_token=False, stride=stride)
            self._builder.fill(step, 1, stride)
        self._graphs.warm_up(self._work, self._second, rehearsal=rehearsal)

    def _run_largest_steps(self) -> None:
        adapters = self._builder.adapters
        for rows in self._largest_steps():
            self._run_scored(rows)
            if adapters is not None:
                adapters.set_all(0)
                self._run_scored(rows)
                adapters.set_all(-1)

    def _run_scored(self, rows: list[StepRow]) -> None:
        """Run a step with a prompt to be scored in the first row."""
        scored = first_request(SamplingParams(prompt_logprobs=1, max_tokens=1))
        self._scorer.init_slot(SlotInit(0, scored, []))
        self._run_first(rows)
        self._scorer.clear()

    def _run_first(self, rows: list[StepRow], masks: Masks | None = None) -> None:
        """Run a step of a warm-up. Rows that generate begin where they say, as no step before has left their slots' lengths."""
        given = [(row.slot, 0, row.start - 1) for row in rows if not row.tokens]
        if given:
            self._state.store(*to_device(given, torch.int64, self._state.tokens.device).T.contiguous())
        plan = StepPlan(step_id=-1, rows=rows, num_drafts=self._num_drafts, masks=dict(masks or {}))
        self.run(plan).result()
        LIFE.moved()

    def set_static_scales(self, scales: Mapping[int, tuple[float, float]]) -> None:
        """Give layers whose fp8 pages take a checkpoint's scales other ones, of keys and of values."""
        self._pages.set_static_scales(scales)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs; `warm_up` must have run."""
        self._graphs.capture(self._work, self._second)

    @torch.inference_mode()
    def measure(self, weights: torch.Tensor | None) -> MeasuredSteps:
        """Time a few steps of requests that want nothing but tokens. `warm_up` and `capture` must have run."""
        for slot in range(self._builder.max_rows):
            self._sampler.init_slot(SlotInit(slot, first_request(SamplingParams(temperature=0.0, max_tokens=1)), []))
        keys, tokens = self._graphs.keys, self._builder.max_tokens
        steps = steps_to_time(keys, min(self._builder.max_rows, tokens), tokens, self._max_model_len)

        def run(rows: list[StepRow]) -> Callable[[], object]:
            drafts = 0 if rows[0].tokens else rows[0].num_tokens - 1
            return self.run(StepPlan(step_id=-1, rows=rows, num_drafts=drafts)).result

        return measure_steps(steps, self._run_first, run, DeviceClock.of(self._state.tokens.device), keys, weights)

    def state_digest(self) -> str:
        """A digest of all page tables and of all slots' last tokens and lengths, which runners with the same plans share. Waits for the device."""
        if self._stage is not None:
            self._stage.catch_up()
        digest = hashlib.sha256()
        for state in (self._tables.all.entries, self._state.tokens[:-1], self._state.lengths[:-1]):
            digest.update(state.cpu().numpy().tobytes())
        return digest.hexdigest()

    @property
    def num_graphs(self) -> int:
        """How many graphs `capture` makes."""
        return len(self._graphs.keys)

    def _first_steps(self) -> Iterator[list[StepRow]]:
        """The step with most rows, and steps for which Triton makes other kernels: numbers of rows and tokens that are 1,
        multiples of 16, and neither; and a row as long as can be, with and without a past. Attention of long rows has other tiles, and the largest
        steps may have rows of half that length, and rows that a library serves. Many tokens in rows too short for the kernel of long rows have
        one of their own. So have, in fp8 pages, long rows with no more past than new tokens: of the longest there may be too much to copy. Rows that are just long enough for it may be so many that the schedule looks for pages that all share.
        Few keys of a token are divided among fewer programs, and many keys of some tokens in the kernel of long rows: in fp8 pages only as many as are copied together.
        """
        longest, most, most_rows = self._max_model_len, self._builder.max_tokens, self._builder.max_rows
        for rows in (1, 3, 16):
            if rows > most_rows:
                break
            for tokens in (BETWEEN_TOKENS, BETWEEN_TOKENS + 3):
                yield even_rows(rows, min(tokens, most), longest, past=True)
            yield even_rows(rows, rows, longest, past=True)
        for tokens, length in ((1, 32), (16, 32), (1, 100), (16, 100)):
            yield even_rows(1, min(tokens, most), min(length, longest), past=True)
        size, short = max(min(longest, most) - 1, 1), numerics.FAST.attention.wide_queries - 1
        for past in (True, False):
            yield even_rows(1, size, longest, past=past)
        yield even_rows(1, size, min(longest, 2 * size), past=True)
        for fewer in (0, 1):
            yield even_rows(1, min(numerics.FAST.attention.divided_queries - fewer, size), longest, past=True)
        for tokens in (numerics.FAST.attention.divided_queries, FEW_TOKENS):
            yield even_rows(1, min(tokens, size), min(longest, FEW_KEYS), past=True)
        count = min(-(-most // short), most_rows)
        yield even_rows(count, min(count * short, most), longest, past=True)
        count = min(most // (short + 1), most_rows)
        if 0 < self._builder.min_sharing_rows <= count:
            yield even_rows(count, count * (short + 1), longest, past=True)
        yield even_rows(most_rows, min(2 * most_rows, most), longest, past=True)
        yield even_rows(min(most_rows, most), min(most_rows, most), longest, past=True)
        for width in self._widths:
            yield from self._drafted_steps((1, 3, most_rows), width)

    def _drafted_steps(self, sizes: Sequence[int], width: int) -> Iterator[list[StepRow]]:
        """Steps of so many rows of `width` tokens, or of as many as sequences can have, at the end of sequences."""
        width = min(width, self._max_model_len - 1)
        for rows in sorted({min(size, self._builder.max_rows, self._builder.max_tokens // width) for size in sizes}):
            if width > 1 and rows:
                yield [StepRow(slot, self._max_model_len - width, width, [], True) for slot in range(rows)]

    def _largest_steps(self) -> Iterator[list[StepRow]]:
        """Steps with as many tokens as a step can have, at the end of sequences and at their beginning.

        A library that may still be loading serves the beginning of sequences. Where products of fewer tokens unpack larger parts of weights,
        there is a step with just fewer tokens, for the memory that it takes.
        """
        longest, most, most_rows = self._max_model_len, self._builder.max_tokens, self._builder.max_rows
        long_rows, wide = self._long_rows(most), numerics.FAST.attention.wide_queries
        yield long_rows
        if longest > wide and any(row.start == 0 or row.num_tokens < wide for row in long_rows):
            size = min(longest - 1, most)  # long rows with a past have a kernel of their own
            yield even_rows(min(most // size, most_rows), min(most // size, most_rows) * size, longest, past=True)
        yield even_rows(min(-(-most // longest), most_rows), most, longest, past=False)
        yield from self._drafted_steps((most_rows,), 1 + self._num_drafts)
        if self._unpacks and most >= numerics.FAST.products.parted_tokens:
            yield self._long_rows(numerics.FAST.products.parted_tokens - 1)

    def _more_counts(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Numbers of sampled, scored and other tokens of steps, and lengths of rows, for kernels that no other step of the warm-up needs.

        In eager steps the last layer and the output weights run for sampled tokens alone, and the output weights for tokens that
        are scored. So numbers of these are looked at beside numbers of tokens.
        """
        longest, most = self._max_model_len, self._builder.max_tokens
        steps, graphs = (*self._first_steps(), *self._largest_steps()), self._graphs.keys
        sampled = {len(rows) for rows in steps} | {key.tokens for key in graphs if key.decode}
        tokens = {sum(row.num_tokens for row in rows) for rows in steps} | {key.tokens for key in graphs}
        rows = self._agree(more_counts(self._kernels, sampled, min(self._builder.max_rows, most)))
        scored = self._agree(more_counts(self._kernels, sampled.union(rows), min(CHUNK, longest, most)))
        more = self._agree(more_counts(self._kernels, tokens.union(rows, scored), most))
        return rows, scored, more, self._agree(more_counts(self._lengths, [longest], longest))

    def _run_more_kernels(
        self, rows: Sequence[int], scored: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """See `_more_counts`."""
        longest = self._max_model_len
        for count in rows:
            self._run_first(even_rows(count, count, longest, past=True))
        for count in scored:
            self._run_scored(even_rows(1, count, longest, past=False))
        for count in tokens:
            self._run_first(self._long_rows(count))
        of_graphs = (key.rows for key in self._graphs.keys if key.decode)
        generating = 1 + max(of_graphs, default=0)  # rows that no graph has
        for length in lengths:
            self._run_first(even_rows(1, min(length, BETWEEN_TOKENS, self._builder.max_tokens), length, past=True))
            if generating <= min(self._builder.max_rows, self._builder.max_tokens):
                self._run_first(even_rows(generating, generating, length, past=True))

    def _long_rows(self, tokens: int) -> list[StepRow]:
        """A step of so many tokens at the end of long sequences."""
        longest = self._max_model_len
        return even_rows(min(-(-2 * tokens // longest), self._builder.max_rows), tokens, longest, past=True)

    def _work(self, batch: ForwardBatch, decode: bool) -> Tensors:
        """What a graph computes.

        Mixed step: hidden states. Decode step: logits, sampled tokens, and the largest logits; of a stage that isn't the last: the stream.
        """
        if self._drafter.onward is not None:
            hidden_TD, taken_TX = self._model.run(batch)
            assert taken_TX is not None, "the model leaves nothing for its drafter"
            if not decode:
                return hidden_TD, taken_TX
            self._taken_TX[: len(taken_TX)].copy_(taken_TX)  # another graph's second part reads it
        else:
            hidden_TD = self._model(batch)
        if not decode or not self._samples:
            return (hidden_TD,)
        logits_SV = self._model.compute_logits(hidden_TD)
        rows = batch.rows
        slots_S, positions_S = self._builder.tensors.sample_slots[: rows.num_tokens], rows.positions_T
        tokens_S, best_S = self._sampler.pick(logits_SV, slots_S, positions_S)
        found_S = self._settle(tokens_S, slots_S, positions_S, rows.seq_lens_R, rows.stride or 1)
        return logits_SV, tokens_S, best_S, found_S

    def _work_on(self, key: GraphKey, batch: ForwardBatch, states: Sequence[Any]) -> None:
        """What the second part of a decode step's graph does, once what is sampled is settled: it drafts as many tokens as the step had."""
        assert self._drafter.onward is not None, "others have no second part"
        places_S = torch.arange(0, key.tokens, key.stride or 1, device=self._taken_TX.device)
        slots_S = self._builder.tensors.sample_slots[: key.tokens : key.stride or 1]
        self._drafter.onward.go_on(
            Computed((), batch, self._taken_TX[: key.tokens], places_S, states), slots_S, key.drafts
        )

    @property
    def _second(self) -> SecondWork | None:
        """What decode steps' graphs have a second part for, if anything."""
        return self._work_on if self._drafter.onward is not None else None

    def _settle(
        self,
        tokens_S: torch.Tensor,
        slots_S: torch.Tensor,
        positions_S: torch.Tensor,
        ends_R: torch.Tensor | None,
        width: int,
    ) -> torch.Tensor:
        """Let slots go on from what was sampled at their rows' places. Returns what of it counts."""
        if width == 1 or ends_R is None:
            self._state.store(slots_S, tokens_S, positions_S)
            return tokens_S
        places = slots_S[::width], positions_S[::width], ends_R
        return accept(tokens_S.view(-1, width), *places, self._state, self._chances).view(-1)

    def _computed(
        self, step: StagedStep, batch: ForwardBatch, taken_TX: torch.Tensor | None, states: Sequence[Any] | None
    ) -> Computed | None:
        """What a drafter goes on from, if there is one that does."""
        if taken_TX is None:
            return None
        if step.width == 1 or not step.where.stride:
            places_S = step.logits_index_S[:: step.width]
        else:
            places_S = torch.arange(0, step.where.rows * step.width, step.width, device=taken_TX.device)
        return Computed(step.rows, batch, taken_TX, places_S, states)

    def _sample(
        self, hidden_TD: torch.Tensor, step: StagedStep, plan: StepPlan, computed: Computed | None, *, alone: int
    ) -> Sampled | None:
        """The tokens of a step whose hidden states are known, which may be padded; `alone`: or only so many, those of sampled tokens first."""
        if not step.sampled_rows:
            if computed is not None:
                self._drafter.draft(None, 0, computed)
            return None
        places = hidden_TD.shape[0]
        every = places == alone or step.samples_all and places == step.num_places
        logits_SV = self._model.compute_logits(hidden_TD if every else hidden_TD.index_select(0, step.logits_index_S))
        return self._sample_logits(logits_SV[: step.num_places], step, plan, computed)

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Of all tokens, [T, V]."""
        return self._model.compute_logits(self._model(batch))

    def _sample_logits(
        self,
        logits_SV: torch.Tensor,
        step: StagedStep,
        plan: StepPlan,
        computed: Computed | None = None,
        drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        captured: Captured | None = None,
    ) -> Sampled:
        """Sample a step's places, unless a graph has `drawn`, and draft what may follow: in the `captured` graph's second part if it is for as many."""
        rows = self._sampled_rows(step)
        ends_R = self._builder.sampled_ends(step) if step.width > 1 else None

        def settle(tokens_S: torch.Tensor) -> torch.Tensor:
            return self._settle(tokens_S, rows.slots_S, rows.positions_S, ends_R, step.width)

        sampled = self._sampler.sample(logits_SV, rows, _by_sample(step, plan.masks), drawn, settle)
        second = None if captured is None else captured.drafting_of(plan.num_drafts)
        if second is not None:
            second.replay()
        elif self._num_drafts:
            width, found_S = step.width, sampled.token_ids
            verified = Verified(found_S.view(-1, width), rows.slots_S[::width], rows.positions_S[::width])
            self._drafter.draft(verified, plan.num_drafts, computed)
        if plan.tell_drafts:
            slots = [plan.rows[row].slot for row in plan.tell_drafts]
            slots_N = to_device(slots, torch.int64, self._state.drafts.device)
            drafts_NK = self._state.drafts[:, : plan.num_drafts].index_select(0, slots_N)
            sampled.new_drafts = ToHost((drafts_NK,), drafts_NK.device)
        return sampled

    def _sample_decoded(
        self,
        logits_SV: torch.Tensor,
        tokens_S: torch.Tensor,
        best_S: torch.Tensor,
        found_S: torch.Tensor,
        step: StagedStep,
        plan: StepPlan,
        captured: Captured,
    ) -> Sampled:
        """The tokens of a decode step that ran in a graph, where all rows are sampled and their tokens are settled already."""
        count, computed = step.num_places, None
        if self._drafter.onward is not None and captured.drafting_of(plan.num_drafts) is None:
            computed = self._computed(step, captured.batch, self._taken_TX[: captured.key.tokens], captured.states)
        drawn = tokens_S[:count], best_S[:count], found_S[:count]
        return self._sample_logits(logits_SV[:count], step, plan, computed, drawn, captured)

    def _sampled_rows(self, step: StagedStep) -> SampledRows:
        slots: Sequence[int] = step.slots
        lens: Sequence[int] = step.seq_lens
        if self._num_drafts:  # the least that they may be at the first place
            rows = step.rows
            lens = [row.start + (row.num_tokens if row.tokens else 1 - self._uncertain) for row in rows]
        if len(step.sampled_rows) < len(slots):
            slots = [slots[row] for row in step.sampled_rows]
            lens = [lens[row] for row in step.sampled_rows]
        places = self._builder.sampled_slots(step), self._builder.sampled_positions(step)
        return SampledRows(slots, lens, *places, step.width, step.counts, self._state.drafts)


def _by_sample(step: StagedStep, masks: Masks) -> Masks:
    """Masks by row of the plan, as masks by sampled row."""
    if not masks:
        return masks
    return {index: masks[row] for index, row in enumerate(step.sampled_rows) if row in masks}
