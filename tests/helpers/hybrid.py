"""A minimal runner for models with recurrent layers: their own state pages beside the pages of full attention."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from pagerunner.attention.base import PlanInputs
from pagerunner.attention.recurrent import RecurrentBackend
from pagerunner.attention.torch_ref import TorchBackend
from pagerunner.batch import ForwardBatch, GroupBatch, StepRows, WritePlaces
from pagerunner.config import Dtype
from pagerunner.memory.memory_plan import LayerSlice
from pagerunner.models.checkpoint.loader import Model
from pagerunner.models.configs.base import ModelConfig
from pagerunner.runner.pages import layer_view, recurrent_view
from pagerunner.types import StateSave


@dataclass
class Row:
    """One request: its tokens, how many are computed, its pages of full attention, and its state's page."""

    tokens: list[int]
    state: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)


class HybridHarness:
    """Holds a model and its memory: group 0 is full attention, every slot NaN; group 1 is recurrent state.

    Pages of states are NaN too until a row takes one, which is when it is zeroed. `saves` counts a step's snapshots.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        *,
        dtype: Dtype = "float32",
        page_tokens: int = 16,
        num_pages: int = 64,
        num_states: int = 40,
        recurrent: Any = None,
    ) -> None:
        self.model, self.page_tokens = model, page_tokens
        self.recurrent = recurrent or RecurrentBackend()
        specs = config.layer_specs(dtype)
        layers: dict[int, Any] = {}
        self.memory: list[torch.Tensor] = []
        self.unit: list[int] = []
        for index, (kind, view, count) in enumerate(
            (("full", layer_view, num_pages), ("recurrent", recurrent_view, num_states))
        ):
            offset, pieces = 0, []
            for layer, spec in enumerate(specs):
                if spec.kind == kind:
                    pieces.append(LayerSlice(layer, spec, offset))
                    offset += -(-spec.page_bytes(page_tokens) // 16) * 16
            plan: Any = SimpleNamespace(
                page_tokens=page_tokens,
                page_bytes=offset,
                unit=offset,
                kind=kind,
            )
            memory = torch.full((count * offset,), 0xFF, dtype=torch.uint8)
            layers |= {piece.layer: view(memory, plan, index, piece) for piece in pieces}
            self.memory.append(memory)
            self.unit.append(offset)
        self.layers = tuple(layers[index] for index in sorted(layers))
        self.free = list(range(num_pages))
        self.free_states = list(range(num_states))
        random.Random(0).shuffle(self.free)
        random.Random(1).shuffle(self.free_states)

    def state_bytes(self, state: int) -> torch.Tensor:
        """The bytes of one state's page."""
        return self.memory[1][state * self.unit[1] : (state + 1) * self.unit[1]]

    def start(self, tokens: list[int]) -> Row:
        """A new row with a zeroed state."""
        row = Row(list(tokens), self.free_states.pop())
        self.state_bytes(row.state).zero_()
        return row

    def resume(self, tokens: list[int], computed: int, snapshot: int, pages: list[int]) -> Row:
        """A row whose first `computed` tokens are in `pages` and in the snapshot's state, which is copied."""
        row = Row(list(tokens), self.free_states.pop(), computed, list(pages))
        self.state_bytes(row.state).copy_(self.state_bytes(snapshot))
        return row

    def step(self, work: list[tuple[Row, int]], saves: dict[int, list[int]] | None = None) -> torch.Tensor:
        """Run the given number of tokens of each row; the log-probabilities after each row's last token.

        `saves` maps a row's index to positions; the states there go to fresh pages, listed in `self.saved` in order.
        """
        size = self.page_tokens
        for row, count in work:
            while len(row.pages) * size < row.computed + count:
                row.pages.append(self.free.pop())
        requests = []
        self.saved = []
        for index, positions in (saves or {}).items():
            for position in positions:
                self.saved.append(self.free_states.pop())
                requests.append(StateSave(index, position, 1, self.saved[-1] * self.unit[1]))
        batch = self._batch(work, tuple(requests))
        hidden = self.model(batch)
        for row, count in work:
            row.computed += count
        return self.model.compute_logits(hidden[batch.logits_index]).log_softmax(-1)

    def _batch(self, work: list[tuple[Row, int]], saves: tuple[StateSave, ...]) -> ForwardBatch:
        size = self.page_tokens
        query_lens = [count for _, count in work]
        seq_lens = [row.computed + count for row, count in work]
        spans = [range(row.computed, row.computed + count) for row, count in work]
        positions = torch.tensor([p for span in spans for p in span])
        tokens = torch.tensor([row.tokens[p] for (row, _), span in zip(work, spans, strict=True) for p in span])
        entries = torch.tensor([row.pages[p // size] for (row, _), span in zip(work, spans, strict=True) for p in span])
        table = torch.zeros(len(work), max(len(row.pages) for row, _ in work), dtype=torch.int64)
        for index, (row, _) in enumerate(work):
            table[index, : len(row.pages)] = torch.tensor(row.pages)
        states = torch.tensor([[row.state] for row, _ in work])
        rows = StepRows.of(query_lens, seq_lens, range(len(work)))
        none = torch.zeros(len(tokens), dtype=torch.int64)

        def group(backend: Any, pages: torch.Tensor, entry: torch.Tensor, saves: tuple[StateSave, ...]) -> GroupBatch:
            inputs = PlanInputs(rows, query_lens, seq_lens, range(len(work)), pages, size, None, saves)
            plan = backend.plan(inputs, backend.new_state(None))
            return GroupBatch(pages, WritePlaces(entry, positions % size), size, backend, plan)

        groups = (group(TorchBackend(), table, entries, ()), group(self.recurrent, states, none, saves))
        last = torch.tensor(query_lens).cumsum(0) - 1
        return ForwardBatch(tokens, rows, last, groups, self.layers)

    def generate(self, rows: list[Row], new_tokens: int, *, chunk: int = 10**9) -> None:
        """Greedy generation of all rows together; `chunk` bounds the tokens of a step (at least one per row)."""
        ends = [len(row.tokens) + new_tokens for row in rows]
        while True:
            work, budget = [], chunk
            for row, end in zip(rows, ends, strict=True):
                count = min(len(row.tokens) - row.computed, budget)
                if len(row.tokens) < end and count > 0:
                    work.append((row, count))
                    budget -= count
            if not work:
                return
            for (row, _), logprobs in zip(work, self.step(work), strict=True):
                if row.computed == len(row.tokens):
                    row.logprobs.append(logprobs)
                    row.tokens.append(int(logprobs.argmax()))
