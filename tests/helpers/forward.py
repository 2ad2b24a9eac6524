"""A minimal runner for model tests: page tables in random order, chunked prefill, mixed batches, poisoned pages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagerunner.attention.base import PlanInputs, Reach
from pagerunner.attention.torch_ref import TorchBackend
from pagerunner.batch import ForwardBatch, GroupBatch, KVPages, StepRows, WritePlaces
from pagerunner.models.checkpoint.loader import Model, build_model, load_weights, materialize, weights_bytes
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.reader import read_model_config


@dataclass
class Sequence:
    """One request's tokens, how many of them are in pages, and those pages."""

    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)


class Harness:
    """Holds a model and page-major pools, one per memory group: page -> layer -> K/V -> token -> head -> dim. Every free
    slot is NaN, and so is what a window has passed.

    `gap` elements follow each page, so that the distance between pages need not be a multiple of a token. A page has the
    same number in every group.
    """

    def __init__(
        self,
        model: Model,
        config: Any,
        *,
        dtype: torch.dtype,
        page_tokens: int,
        num_pages: int,
        gap: int = 0,
        seed: int = 0,
    ) -> None:
        self.model, self.backend, self.page_tokens = model, TorchBackend(), page_tokens
        specs = config.layer_specs(str(dtype).removeprefix("torch."))
        lifetimes = list(dict.fromkeys(spec.lifetime for spec in specs))
        self.specs = [next(spec for spec in specs if spec.lifetime == lifetime) for lifetime in lifetimes]
        self.pools = []
        layers: dict[int, KVPages] = {}
        for group, lifetime in enumerate(lifetimes):
            members = [i for i, spec in enumerate(specs) if spec.lifetime == lifetime]
            heads, dim = self.specs[group].num_kv_heads, self.specs[group].head_dim
            block = page_tokens * heads * dim
            stride = len(members) * 2 * block + gap
            pool = torch.full((num_pages * stride,), float("nan"), dtype=dtype)
            views = [
                pool.as_strided((num_pages, page_tokens, heads, dim), (stride, heads * dim, dim, 1), i * block)
                for i in range(len(members) * 2)
            ]
            layers |= {layer: KVPages(group, views[2 * i], views[2 * i + 1]) for i, layer in enumerate(members)}
            self.pools.append(pool.view(num_pages, stride))
        self.kv = tuple(layers[i] for i in range(len(specs)))
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)  # pages of a row are neither adjacent nor in order

    def step(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Run the given number of tokens of each sequence; the log-probabilities after each row's last token."""
        size = self.page_tokens
        for sequence, count in work:
            while len(sequence.pages) * size < sequence.computed + count:
                sequence.pages.append(self.free.pop())
        batch = self._batch(work)
        hidden = self.model(batch)
        for sequence, count in work:
            sequence.computed += count
            for group, spec in enumerate(self.specs):
                if (reach := Reach.of(spec)) is not None:
                    passed = max(reach.oldest(sequence.computed), 0) // size
                    self.pools[group][sequence.pages[:passed]] = float("nan")
        logits = self.model.compute_logits(hidden[batch.logits_index])
        return logits.log_softmax(-1)

    def _batch(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        query_lens = [count for _, count in work]
        seq_lens = [sequence.computed + count for sequence, count in work]
        tokens, positions = [], []
        for sequence, count in work:
            span = range(sequence.computed, sequence.computed + count)
            tokens += [sequence.tokens[p] for p in span]
            positions += span
        rows = StepRows.of(query_lens, seq_lens, range(len(work)))
        groups = tuple(self._group(spec, work, rows, torch.tensor(positions)) for spec in self.specs)
        last = torch.tensor(query_lens).cumsum(0) - 1
        return ForwardBatch(torch.tensor(tokens), rows, last, groups, self.kv)

    def _group(
        self, spec: Any, work: list[tuple[Sequence, int]], rows: StepRows, position_T: torch.Tensor
    ) -> GroupBatch:
        size, reach = self.page_tokens, Reach.of(spec)
        table = torch.zeros(len(work), max(len(s.pages) for s, _ in work), dtype=torch.int64)
        entries = []
        for row, (sequence, count) in enumerate(work):
            end = sequence.computed + count
            kept = 0 if reach is None else reach.oldest(end)  # no later step reads what is before
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
            entries += [sequence.pages[p // size] if p >= kept else -1 for p in range(sequence.computed, end)]
        query_lens, seq_lens = [count for _, count in work], [s.computed + count for s, count in work]
        inputs = PlanInputs(rows, query_lens, seq_lens, range(len(work)), table, size, reach)
        plan = self.backend.plan(inputs, self.backend.new_state(None))
        return GroupBatch(table, WritePlaces(torch.tensor(entries), position_T % size), size, self.backend, plan)

    def generate(self, prompts: list[list[int]], new_tokens: int, *, chunk: int = 10**9) -> list[Sequence]:
        """Greedy generation of all prompts together; `chunk` bounds the tokens of a step (at least one per row)."""
        sequences = [Sequence(list(p)) for p in prompts]
        ends = [len(p) + new_tokens for p in prompts]
        while True:
            work, budget = [], chunk
            for sequence, end in zip(sequences, ends, strict=True):
                count = min(len(sequence.tokens) - sequence.computed, budget)
                if len(sequence.tokens) < end and count > 0:
                    work.append((sequence, count))
                    budget -= count
            if not work:
                return sequences
            logprobs = self.step(work)
            for (sequence, _), row in zip(work, logprobs, strict=True):
                if sequence.computed == len(sequence.tokens):
                    sequence.logprobs.append(row)
                    sequence.tokens.append(int(row.argmax()))


def load(path: Path, dtype: str = "float32") -> tuple[Model, ModelConfig]:
    """The model of a checkpoint directory, with its weights in a region of its own."""
    config = read_model_config(path)
    model = build_model(config, dtype)  # type: ignore[arg-type]
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    load_weights(model, path)
    return model, config


def prompts(lengths: list[int], vocab: int = 512) -> list[list[int]]:
    """Random token ids, the same for the same lengths."""
    ids = random.Random(sum(lengths))
    return [[ids.randrange(vocab) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def check(reference: Any, prompt: list[int], sequence: Any) -> None:
    """A sequence's generated tokens are the reference's greedy choice at every step, with its log-probabilities."""
    assert sequence.tokens[: len(prompt)] == prompt
    # transformers keeps Gemma-3's cap of attention scores in the config, but hands it to no attention function
    cap = getattr(reference.config, "attn_logit_softcapping", None)
    options = {} if cap is None else {"softcap": cap}
    logits = reference(torch.tensor([sequence.tokens[:-1]]), **options).logits[0, len(prompt) - 1 :]
    want = logits.float().log_softmax(-1)
    assert want.argmax(-1).tolist() == sequence.tokens[len(prompt) :]
    torch.testing.assert_close(torch.stack(sequence.logprobs), want, atol=1e-4, rtol=0)
