"""Runs a drafter over pages: those of the memory planner, with NaN in every slot that nobody wrote."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from pagerunner.attention.base import PlanInputs, Reach
from pagerunner.attention.select import select_backends
from pagerunner.batch import ForwardBatch, GroupBatch, StepRows, WritePlaces
from pagerunner.memory.planner import plan_memory
from pagerunner.models.checkpoint.loader import build_model, load_weights, materialize, weights_bytes
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.drafting import Drafted
from pagerunner.runner.pages import Pages

LENGTH = 160


def load_drafting(config: ModelConfig, dtype: str = "float32") -> Any:
    """The model of a config, with its drafter, filled from their checkpoints."""
    model = build_model(config, dtype)  # type: ignore[arg-type]
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    load_weights(model, Path(config.path))
    assert config.drafter is not None and model.drafter is not None
    if not model.drafter.prefix:
        load_weights(model.drafter, Path(config.drafter.path))
    return model


class DraftHarness:
    """The drafter of a model with `rows` sequences. Batches are for the target's layers, too, if `whole`."""

    def __init__(
        self, model: Any, config: ModelConfig, rows: int, page_tokens: int = 16, *, whole: bool = False
    ) -> None:
        self.drafter, self.whole = model.drafter, whole
        self.logits: Any = getattr(model.drafter, "compute_logits", None)
        specs = config.specs("float32")
        plan = plan_memory(
            specs,
            page_tokens=page_tokens,
            budget_bytes=2**25,
            max_model_len=LENGTH,
            model_max_len=LENGTH,
            max_num_seqs=rows,
            max_num_batched_tokens=LENGTH,
        )
        memory = torch.full((plan.kv_bytes,), 255, dtype=torch.uint8)
        self.layers = Pages(plan, memory, poison=False).layers
        scores = config.attention_scores
        self.backends = select_backends(plan.groups, "torch_ref", torch.device("cpu"), torch.float32, scores)
        self.groups, self.tables, self.rows = plan.groups, [], rows
        free = list(range(plan.num_slabs))
        random.Random(0).shuffle(free)
        for group in plan.groups:
            zero = any(piece.spec.zero_fresh for piece in group.layers)
            pages = rows * -(-LENGTH // group.page_tokens)
            slabs = [free.pop() for _ in range(-(-pages // group.pages_per_slab))]
            places = [
                slab * plan.slab_bytes + page * group.page_bytes
                for slab in slabs
                for page in range(group.pages_per_slab)
            ]
            random.Random(1).shuffle(places)
            assert all(place % group.unit == 0 for place in places)
            for place in places[:pages]:
                memory[place : place + group.page_bytes * zero].zero_()
            self.tables.append(torch.tensor([place // group.unit for place in places[:pages]]).view(rows, -1))
        self.memories = range(len(config.layer_specs("float32")), len(specs))

    def batch(self, spans: list[tuple[int, range]], ids_T: torch.Tensor) -> ForwardBatch:
        """A step of rows and the positions that each has in it."""
        slots, lens = [row for row, _ in spans], [len(span) for _, span in spans]
        rows = StepRows.of(lens, [span.stop for _, span in spans], slots)
        groups = tuple(self._group(index, rows, spans) for index in range(len(self.groups)))
        return ForwardBatch(ids_T, rows, torch.tensor(lens).cumsum(0) - 1, groups, self.layers)

    def _group(self, index: int, rows: StepRows, spans: list[tuple[int, range]]) -> Any:
        group, backend, table = self.groups[index], self.backends[index], self.tables[index]
        if not self.whole and not {piece.layer for piece in group.layers} & set(self.memories):
            return None
        size = group.page_tokens
        inputs = PlanInputs(
            rows,
            [len(s) for _, s in spans],
            [s.stop for _, s in spans],
            [r for r, _ in spans],
            table,
            size,
            Reach.of(group.layers[0].spec),
        )
        entries = torch.cat([table[row, torch.tensor(list(span)) // size] for row, span in spans])
        offsets = torch.cat([torch.tensor(list(span)) % size for _, span in spans])
        return GroupBatch(
            table, WritePlaces(entries, offsets), size, backend, backend.plan(inputs, backend.new_state(None))
        )

    @torch.inference_mode()
    def draft(
        self, taken: list[torch.Tensor], ids: list[list[int]], count: int, steps: list[list[tuple[int, range]]]
    ) -> tuple[list[list[int]], list[torch.Tensor], list[torch.Tensor]]:
        """Run the first pass over all rows in these steps, then `count` - 1 passes: drafts, and what each row's first pass left of all positions."""
        inputs: list[list[torch.Tensor]] = [[] for _ in range(self.rows)]
        hidden: list[list[torch.Tensor]] = [[] for _ in range(self.rows)]
        for spans in steps:
            taken_TX = torch.cat([taken[row][span.start : span.stop] for row, span in spans])
            ids_T = torch.tensor([ids[row][place] for row, span in spans for place in span])
            self._keep(self.drafter.first(taken_TX, self.batch(spans, ids_T)), spans, inputs, hidden)
        logit_input, left = (torch.stack([rows[-1][-1] for rows in kept]) for kept in (inputs, hidden))
        found: list[list[int]] = [[] for _ in range(self.rows)]
        for number in range(count):
            best = self.drafter.to_target(self.logits(logit_input).argmax(-1))
            for row, token in enumerate(best.tolist()):
                found[row].append(token)
            if number < count - 1:
                spans = [(row, range(len(ids[row]) + number, len(ids[row]) + number + 1)) for row in range(self.rows)]
                logit_input, left = self.drafter.step(left.clone(), self.batch(spans, best))
        return found, [torch.cat(kept) for kept in inputs], [torch.cat(kept) for kept in hidden]

    @staticmethod
    def _keep(
        drafted: Drafted,
        spans: list[tuple[int, range]],
        inputs: list[list[torch.Tensor]],
        hidden: list[list[torch.Tensor]],
    ) -> None:
        lens = [len(span) for _, span in spans]
        for (row, _), x, y in zip(spans, drafted.logit_input.split(lens), drafted.hidden.split(lens), strict=True):
            inputs[row].append(x.clone())
            hidden[row].append(y.clone())
