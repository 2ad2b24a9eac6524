"""Steps as graphs: decode steps and small mixed steps are captured once by shape and replayed, padded to that shape.

A decode step has one token a row, or one and its drafts at a stride, and every row is sampled. It is captured from the embedding to the sampled tokens, which the
graph stores as the slots' last tokens. Some rows ask for more than their settings can say, such as penalties. These rows are
sampled again, from the logits of the graph. A mixed step is captured up to the hidden states.

Capture isolation: no capture sees what a warm-up touched. Every graph has its own attention state. That state is made after
the warm-up has run on other state, so anything that is initialised at first use is part of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from pagerunner.attention.base import GraphShape
from pagerunner.batch import ForwardBatch
from pagerunner.life import LIFE
from pagerunner.ops.device_errors import never_free
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.staging import StagedStep
from pagerunner.types import StateSave

SHARING_STEP = 32  # rows between graphs of decode steps whose rows may share their first pages
MIXED_SIZES = (16, 32, 64, 96, 128, 192, 256)
_LARGE_MIXED_SIZES = (
    320, 384, 448, 512, 640, 768, 896, *range(1024, 2048, 128), *range(2048, 4096, 256), *range(4096, 8193, 512),
)  # fmt: skip
_LAUNCHED = 4e11
"""Weights times tokens up to which steps run in graphs: what an H200 multiplies in 1.05 ms, 2,050 tokens of a layer of 8B, whose kernels the host launches for 0.6 to 1.1 ms."""
_WITH_EXPERTS = 0.75
"""Of that for mixtures: gpt-oss's 2,050 tokens take 1.1 ms a layer, and the host 1.1 to 2 ms."""
_EXPERTS_SIZES = (320, 384, 448, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192)
MOST_MIXED_OF_EXPERTS = 512
"""Tokens of mixed steps whose graphs are no matter of memory or attention: 32 prompts that were found but for their last 16 tokens."""
Tensors = tuple[torch.Tensor, ...]


class Graph(Protocol):
    """Recorded work. `outputs` hold what its last replay made, until any graph of the engine is replayed again."""

    outputs: Tensors

    def replay(self) -> None:
        """Do the work again on the same tensors."""


class GraphEngine(Protocol):
    """Records what a function does on a device."""

    def capture(self, run: Callable[[], Tensors]) -> Graph:
        """Call `run` once and record its work, without doing it where the device can record alone."""


_capturing = threading.Lock()  # engines made in several threads share one stream to capture on


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all engines of a process.

    For every stream that was ever used torch keeps 32 MiB of work space for cuBLAS.
    """
    return torch.cuda.Stream(device)


class CudaGraphs:
    """CUDA graphs of one device, which share their memory: they are replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensors]) -> Graph:
        """See GraphEngine. Whatever `run` needs for the first time (kernels, library handles) must be there already."""
        graph = torch.cuda.CUDAGraph()
        with _capturing:
            return self._capture(graph, run)

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Tensors]) -> Graph:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                outputs = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # this error says only that the capture has failed
                    graph.capture_end()
                never_free(graph)  # torch ends the process when it frees a graph whose capture has failed
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return _CudaGraph(graph, tuple(_unowned(tensor) for tensor in outputs))


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Tensors) -> None:
        self.outputs = outputs
        self.replay = graph.replay


class _Address:
    """A tensor's place and shape, as the CUDA array interface has it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without keeping it: the next graph may work where this graph has put its outputs."""
    raw = tensor.view(torch.uint8)  # the interface doesn't know every dtype
    return torch.as_tensor(_Address(raw), device=tensor.device).view(tensor.dtype)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What one graph serves: steps of up to `rows` rows and `tokens` tokens. With `decode`, token t is row t's only one, or a row has up to
    `drafts` more; with `no_shared_prefix`, rows don't all begin with the same pages. With `adapters` rows may have adapters,
    which with `experts` may have products of experts.
    """

    rows: int
    tokens: int
    decode: bool
    no_shared_prefix: bool = False
    drafts: int = 0
    adapters: bool = False
    experts: bool = False

    @property
    def stride(self) -> int:
        """See StepRows."""
        return 1 + self.drafts if self.drafts else 0


def decode_sizes(max_num_seqs: int, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Numbers of rows to capture decode steps for: `wanted` up to the limit, or 1, 2, 4, every eighth and the limit."""
    if wanted is not None:
        return tuple(sorted({size for size in wanted if size <= max_num_seqs}))
    return tuple(
        sorted({size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs} | {max_num_seqs})
    )


def mixed_sizes(
    max_tokens: int,
    wanted: Sequence[int] | None = None,
    layer_weights: int = 0,
    *,
    most_with_experts: int | None = None,
) -> tuple[int, ...]:
    """Numbers of tokens to capture mixed steps for, up to the largest of `wanted`.

    Larger ones than 256 are captured where the host would take longer to launch a layer than a GPU to compute it. That goes by
    the `layer_weights`, 0 if they aren't known. Example: 16 million (0.6B) up to 8,192 tokens, 101 million (4B) up to 3,840, 193 million (8B) up to 2,048. A mixture has fewer
    sizes, as padding goes to no expert, and larger ones if there is memory for so many tokens. Example: 57 million (30B-A3B) up to 4,096 tokens, and on each of two ranks up to 8,192; 126 million (gpt-oss) up to 2,048.
    """
    most = min(max_tokens, max(wanted, default=0) if wanted is not None else max_tokens)
    launched, sizes = _LAUNCHED / layer_weights if layer_weights else 0, _LARGE_MIXED_SIZES
    if most_with_experts is not None:
        launched, sizes = min(_WITH_EXPERTS * launched, most_with_experts), _EXPERTS_SIZES
    large = tuple(size for size in sizes if size <= launched)
    return tuple(size for size in (*MIXED_SIZES, *large) if size <= most)


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What to capture, and with what. Without an engine, or with backends that can't be captured, steps run eagerly.

    `teams`: there are several teams of ranks, whose steps take the same graphs. `drafts`: numbers of drafts of a row to capture decode steps for.
    `most_pairs`: of a query and a key that it sees, in large mixed steps, where a graph takes longer for them than an eager step (0: it doesn't).
    """

    engine: GraphEngine | None
    decode_sizes: tuple[int, ...] = ()
    mixed_sizes: tuple[int, ...] = ()
    max_model_len: int = 0
    teams: bool = False
    drafts: tuple[int, ...] = ()
    most_pairs: int = 0


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph with what it works on. `drafting` is its second part, which runs when what was sampled counts for good."""

    key: GraphKey
    graph: Graph
    batch: ForwardBatch
    states: list[Any]
    drafting: Graph | None = None

    def drafting_of(self, count: int) -> Graph | None:
        """The second part, if there is one and it makes so many drafts."""
        return self.drafting if self.key.drafts == count else None


class _BySize:
    """Graphs of one kind by size, the smallest first."""

    def __init__(self, graphs: list[Captured]) -> None:
        self.graphs = graphs
        self._sizes = [captured.key.tokens for captured in graphs]

    def find(self, size: int) -> Captured | None:
        """The smallest that `size` fits in."""
        place = bisect_left(self._sizes, size)
        return self.graphs[place] if place < len(self.graphs) else None


class _Set:
    """Graphs of all kinds, of which any step finds its own: `drafted` by stride. `made` begins with the smallest."""

    def __init__(self, made: list[Captured]) -> None:
        drafted = [captured for captured in made if captured.key.drafts]
        self.drafted = {
            stride: _BySize([captured for captured in drafted if captured.key.stride == stride])
            for stride in sorted({captured.key.stride for captured in drafted})
        }
        made = [captured for captured in made if not captured.key.drafts]
        least = min((captured.key.rows for captured in made if captured.key.no_shared_prefix), default=0)
        self.mixed = _BySize([captured for captured in made if not captured.key.decode])
        self.decode = _BySize(
            [captured for captured in made if captured.key.decode and not captured.key.no_shared_prefix]
        )
        self.no_shared_prefix = _BySize(
            [c for c in made if c.key.decode and (c.key.no_shared_prefix or c.key.rows < least)]
        )


def _for_any_rows(key: GraphKey, sharing: int) -> bool:
    """Whether a graph serves rows that share pages as well as others."""
    return not key.decode or key.no_shared_prefix or key.rows < sharing or not sharing


def decode_keys(sizes: Sequence[int], min_sharing_rows: int) -> list[GraphKey]:
    """Graphs of decode steps. From `min_sharing_rows` on, each size has one for rows that don't share their first
    pages, and few sizes have one for rows that may.
    """
    keys = [GraphKey(size, size, True) for size in sizes if not min_sharing_rows or size < min_sharing_rows]
    shared = [size for size in sizes if 0 < min_sharing_rows <= size]
    keys += [GraphKey(size, size, True, no_shared_prefix=True) for size in shared]
    return keys + [
        GraphKey(size, size, True) for size in shared if size % SHARING_STEP == 0 or size in (shared[0], sizes[-1])
    ]


def drafted_keys(sizes: Sequence[int], drafts: Sequence[int]) -> list[GraphKey]:
    """Graphs of decode steps with drafts. They have fewer sizes: 1, 2, 4, every sixteenth and the largest."""
    most = max(sizes, default=0)
    some = [size for size in sizes if size <= 8 or size % 16 == 0 or size == most]
    return [GraphKey(size, size * (1 + count), True, True, count) for count in drafts for size in some]


def is_telling(key: GraphKey) -> bool:
    """Whether a shape may need other kernels than the other shapes.

    Kernels are chosen by size up to powers of two. Triton also makes a new kernel for numbers that are 1, and for numbers that
    are multiples of 16.
    """
    return not key.decode or key.rows <= 24 or key.rows & (key.rows - 1) == 0


Work = Callable[[ForwardBatch, bool], Tensors]
"""`work(batch, decode)`: what a graph does with a batch."""
SecondWork = Callable[[GraphKey, ForwardBatch, Sequence[Any]], None]
"""`second(key, batch, states)`: what the second part of a decode step's graph does; `states` are the backends'."""


class StepGraphs:
    """All graphs of a runner.

    Methods that capture take the `Work` to capture as an argument, and this object keeps no reference to it. The work is a method
    of the runner, and the runner owns this object. Keeping it would make a cycle, and a cycle's memory is freed only when
    Python collects garbage: an engine that nobody refers to would go on holding the device.
    """

    def __init__(self, settings: GraphSettings, builder: BatchBuilder) -> None:
        self._settings = settings
        self._builder = builder
        most_rows = builder.tensors.slots_R.shape[0]
        keys: list[GraphKey] = []
        if settings.engine is not None and builder.graphs:
            sharing = builder.min_sharing_rows
            keys += decode_keys(settings.decode_sizes, sharing)
            if settings.teams:  # teams whose rows share pages and others would take different ones
                keys = [key for key in keys if _for_any_rows(key, sharing)]
            keys += drafted_keys(settings.decode_sizes, settings.drafts if builder.strided else ())
            keys += [GraphKey(min(size, most_rows), size, False) for size in settings.mixed_sizes]
            if builder.adapters is not None:
                # How many adapters there are, the device knows; few rows of these share pages. Those of experts are many launches in each layer.
                some = [replace(key, adapters=True) for key in keys if _for_any_rows(key, sharing)]
                keys += some
                if builder.adapters.may_be_of_experts:
                    # The largest take long to capture: this kind of them serves all steps.
                    keys = [key for key in keys if key.decode or key.tokens <= MOST_MIXED_OF_EXPERTS]
                    keys += [replace(key, experts=True) for key in some]
        self.keys = tuple(sorted(keys, key=lambda key: (key.tokens, key.rows, key.no_shared_prefix), reverse=True))
        self._plain = self._adapted = self._of_experts = _Set([])

    def find(self, step: StagedStep, *, needs_hidden: bool = False) -> Captured | None:
        """The smallest graph that the step fits in. With `needs_hidden` only graphs that put hidden states out."""
        where = step.where
        own = self._plain
        if self._builder.has_adapters(step.slots):
            own = self._of_experts if self._builder.has_experts(step.slots) else self._adapted
        if where.stride:
            return own.drafted[where.stride].find(where.rows * where.stride)
        if needs_hidden or not where.one_token or len(step.sampled_rows) != where.rows:
            mixed = own.mixed.find(where.tokens) or self._of_experts.mixed.find(where.tokens)
            return mixed if self._is_quick(step) else None
        if own.no_shared_prefix.graphs and (own is not self._plain or not self._builder.may_share(step.slots)):
            return own.no_shared_prefix.find(where.rows)
        return own.decode.find(where.rows)

    def _is_quick(self, step: StagedStep) -> bool:
        """Whether a mixed step's attention takes not much longer in a graph."""
        most = self._settings.most_pairs
        if not most or step.where.tokens <= MOST_MIXED_OF_EXPERTS:
            return True
        return sum(new * (seen - new // 2) for new, seen in zip(step.query_lens, step.seq_lens, strict=True)) <= most

    def with_known_places(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with as many sampled tokens as the next larger graph has: the step's first token fills up. Where none is sampled there stays none.

        cuBLAS chooses its kernels by such a number, and loads one when it is first asked for. So what the last layer and the output weights need has been loaded for the graphs.
        """
        count = batch.logits_index.shape[0]
        like = (self._plain.no_shared_prefix if self._plain.no_shared_prefix.graphs else self._plain.decode).find(count)
        if not count or like is None or like.key.tokens >= batch.token_ids.shape[0]:
            return batch
        return replace(batch, logits_index=F.pad(batch.logits_index, (0, like.key.tokens - count)))

    def stride_for(self, rows: int, width: int) -> int:
        """The least stride with a graph for so many rows of up to `width` tokens; 0 if there is none."""
        drafted = self._plain.drafted.items()
        fits = (stride for stride, graphs in drafted if stride >= width and graphs.find(rows * stride))
        return min(fits, default=0)

    def find_for_teams(self, most_tokens: int, graphs: str) -> Captured | None:
        """The graph that the ranks of all teams take; see `StepPlan`."""
        own = self._plain
        if graphs == "decode":
            return (own.no_shared_prefix if own.no_shared_prefix.graphs else own.decode).find(most_tokens)
        return own.mixed.find(most_tokens) if graphs == "mixed" else None

    def replay_empty(self, captured: Captured) -> None:
        """Run a step for which other teams of ranks alone have rows."""
        self._builder.clear()
        self._builder.plan_empty(captured.batch, captured.states)
        captured.graph.replay()

    def replay(self, captured: Captured, step: StagedStep, state_saves: Sequence[StateSave]) -> Tensors:
        """Run the step; the graph's outputs, padded, are valid until the next step."""
        self._builder.fill(step, captured.key.rows, captured.key.tokens)
        self._builder.plan_replay(captured.batch, step, captured.states, state_saves)
        captured.graph.replay()
        return captured.graph.outputs

    def warm_up(
        self, work: Work, second: SecondWork | None = None, *, rehearsal: bool = False, extremes: bool = False
    ) -> None:
        """Run every shape once, on state that is thrown away: kernels are compiled and libraries initialised.

        A rehearsal looks for kernels only, so it leaves out shapes that need no other kernels. `extremes`: only the largest and
        the smallest shape of each kind.
        """
        self._builder.clear()
        keys = [key for key in self.keys if not rehearsal or is_telling(key)]
        if extremes:
            kinds: dict[GraphKey, list[GraphKey]] = {}
            for key in keys:
                kinds.setdefault(replace(key, rows=0, tokens=0), []).append(key)
            keys = [key for alike in kinds.values() for key in (alike[0], alike[-1])]
        for key in keys:
            batch, states = self._prepare(key)
            self._run(key, batch, work)
            if second is not None and key.decode:
                second(key, batch, states)
            LIFE.moved()

    def capture(self, work: Work, second: SecondWork | None = None) -> None:
        """Capture every shape, largest first, so that smaller shapes reuse the memory of larger ones."""
        self._builder.clear()
        made: list[Captured] = []
        collects = gc.isenabled()
        gc.disable()  # a tensor freed by a collection in the middle of a capture would be part of it
        try:
            for key in self.keys:
                made.append(self._capture(key, work, second))
                LIFE.moved()
        finally:
            if collects:
                gc.enable()
        made.reverse()
        self._plain = _Set([captured for captured in made if not captured.key.adapters])
        self._adapted = _Set([captured for captured in made if captured.key.adapters and not captured.key.experts])
        self._of_experts = _Set([captured for captured in made if captured.key.experts])

    def _prepare(self, key: GraphKey) -> tuple[ForwardBatch, list[Any]]:
        shape = GraphShape(key.rows, key.tokens, self._settings.max_model_len, sharing=not key.no_shared_prefix)
        states = self._builder.new_states(shape)
        most_tokens = key.tokens if self._settings.teams else 0
        batch = self._builder.captured(
            shape, one_token=key.decode and not key.drafts, states=states, most_tokens=most_tokens, stride=key.stride
        )
        return batch, states

    def _run(self, key: GraphKey, batch: ForwardBatch, work: Work) -> Tensors:
        return work(self._builder.adapted(batch, experts=key.experts) if key.adapters else batch, key.decode)

    def _capture(self, key: GraphKey, work: Work, second: SecondWork | None) -> Captured:
        engine = self._settings.engine
        assert engine is not None, "there are no keys without an engine"
        batch, states = self._prepare(key)
        graph = engine.capture(lambda: self._run(key, batch, work))
        if second is None or not key.decode:
            return Captured(key, graph, batch, states)

        def draft() -> Tensors:
            second(key, batch, states)
            return ()

        return Captured(key, graph, batch, states, engine.capture(draft))
