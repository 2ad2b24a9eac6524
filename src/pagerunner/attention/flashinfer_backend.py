"""Attention by FlashInfer (optional package flashinfer-python), over the same page-major views as every backend.

FlashInfer plans on the host. Before each eager step, and before each replay of a graph, the rows' pages and lengths are written
into buffers that belong to the graph, and the kernels' work is divided. FlashInfer builds its kernels when they are first used,
which takes about a minute once per machine. Nothing is imported or built unless this backend was asked for.

Windows are not served. In the first page of a window some slots may never have been written, because no query sees them.
FlashInfer's kernels multiply such slots by zero, and NaN times zero is NaN.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import AttentionCall, LatentCall, Projection
from pagerunner.attention.capability import HALVES, SOFTCAP, Capabilities
from pagerunner.attention.host_planned import PlanFence, RowPages
from pagerunner.attention.paged_mla import absorb, to_values
from pagerunner.ops.latent_attention import store_latent_
from pagerunner.ops.paged_attention import prepare_heads_, store_kv_

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for partial results; some launches need more
LONG_QUERIES = 128  # eager steps with such rows take the kernels made for them
_ROUNDING = 1024  # bytes lost where parts of the workspace begin on round addresses
_ANYWHERE = Capabilities(
    forms=frozenset(),
    compute_dtypes=HALVES,
    same_dtype=True,
    graphs=True,
    plans_on_host=True,
    devices=frozenset({"cuda"}),
    package=("flashinfer", "flashinfer-python"),
    triton=True,  # what stores heads and latents
)


@dataclass(frozen=True, slots=True)
class Use:
    """What a plan depends on, apart from the step: a layer's shapes, dtypes and scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    softcap: float


def capturing(device: torch.device) -> bool:
    """Whether work on the device is being recorded into a graph. Planning can't be recorded."""
    return bool(device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def partial_bytes(use: Use, shape: GraphShape | None, processors: int) -> int:
    """The most bytes that "fa2" asks for, when it plans, for the partial results of rows whose keys are divided.

    Partial results are float32 [blocks, heads, queries of a block, elements + 1]. A graph has as many blocks as its tokens
    could ever need. An eager step divides keys only where multiprocessors would idle, and has two blocks for each
    multiprocessor.
    """
    group, blocks, tile = (
        use.num_heads // use.num_kv_heads,
        2 * processors // use.num_kv_heads,
        _most_queries(use, None),
    )
    if shape is not None:
        tile = _most_queries(use, (shape.tokens - shape.rows + 1) * group)
        blocks = max(blocks, -(-shape.tokens * group // tile) + shape.rows - 1)
    return blocks * use.num_heads * tile * (use.head_dim + 1) * 4 + _ROUNDING


def _most_queries(use: Use, packed: int | None) -> int:
    """Queries of all heads of a group that a block of "fa2" takes, if the longest row has `packed` of them."""
    if packed is not None and packed <= 16:
        return 16
    return 64 if use.head_dim >= 256 or (packed is not None and packed <= 64) else 128


def _is_hopper(device: torch.device) -> bool:
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9)


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 0


class Workspace:
    """Memory for the partial results of one launch. Steps run one after another, so all states share one workspace."""

    def __init__(self) -> None:
        self._made: torch.Tensor | None = None

    def on(self, device: torch.device, needed: int = 0) -> torch.Tensor:
        """Memory of at least `needed` and WORKSPACE_BYTES bytes, uint8; states that had less keep what they had."""
        if self._made is None or self._made.numel() < needed:
            self._made = torch.zeros(max(needed, WORKSPACE_BYTES), dtype=torch.uint8, device=device)
        return self._made


@dataclass(slots=True)
class PlanState:
    """The wrappers of one graph, or of eager steps; each has buffers of its own."""

    shape: GraphShape | None
    workspace: Workspace
    wrappers: dict[Any, tuple[Any, PlanFence]] = field(default_factory=dict)

    def wrapper(self, key: Any, make: Any, inputs: PlanInputs) -> tuple[Any, PlanFence]:
        """The wrapper of `key`. `make(self.workspace, graph buffers)` makes it when it is first asked for."""
        found = self.wrappers.get(key)
        if found is None:
            device = inputs.page_table.device
            buffers: tuple[torch.Tensor, ...] | None = None
            if self.shape is not None:
                rows = self.shape.rows
                most_pages = rows * int(
                    inputs.page_table.shape[1]
                )  # each row may have as many as its table has columns
                sizes = (rows + 1, rows + 1, most_pages, rows)
                buffers = tuple(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
            found = self.wrappers[key] = (make(self.workspace, buffers), PlanFence(device))
        return found

    def pages(self, inputs: PlanInputs) -> RowPages:
        """The pages of a step.

        At a graph's capture the rows aren't known, and these are the most pages that its kernels are launched for.
        """
        if self.shape is not None and not inputs.query_lens:
            return RowPages.largest(self.shape, inputs.page_table.device)
        return RowPages.of(inputs, len(inputs.query_lens) if self.shape is None else self.shape.rows)


@dataclass(slots=True)
class WrapperPlan:
    """A step as planned. A wrapper is planned when a layer first asks for it."""

    inputs: PlanInputs
    state: PlanState
    pages: RowPages
    planned: dict[Use, Any] = field(default_factory=dict)


class _HostPlanned(ABC):
    """What the two backends share: which uses they have seen, and when each use is planned."""

    def __init__(self) -> None:
        self._uses: dict[Use, None] = {}
        self._workspace = Workspace()

    def new_state(self, shape: GraphShape | None) -> PlanState:
        """See AttentionBackend."""
        return PlanState(shape, self._workspace)

    def plan(self, inputs: PlanInputs, state: PlanState) -> WrapperPlan:
        """See AttentionBackend."""
        plan = WrapperPlan(inputs, state, state.pages(inputs))
        if state.shape is not None:
            for use in self._uses:
                plan.planned[use] = self._planned(use, plan)
        return plan

    def _wrapper(self, use: Use, plan: WrapperPlan) -> Any:
        found = plan.planned.get(use)
        if found is None:
            if capturing(plan.inputs.page_table.device):
                raise RuntimeError(f"A graph is captured with a layer that no step before it has run: {use}.")
            self._uses[use] = None
            found = plan.planned[use] = self._planned(use, plan)
        return found

    @abstractmethod
    def _planned(self, use: Use, plan: WrapperPlan) -> Any: ...


class FlashInferBackend(_HostPlanned):
    """See the module. An instance serves one memory group of one engine."""

    name = "flashinfer"
    capabilities = replace(
        _ANYWHERE,
        forms=frozenset({"full"}),
        head_dims=frozenset({64, 128, 256}),
        scores=frozenset({SOFTCAP}),
        projection=True,
    )

    def run(self, call: AttentionCall) -> torch.Tensor:
        """See AttentionCall."""
        inputs, pages, group, _, scores, _, _ = call
        if isinstance(inputs, Projection):
            prepare_heads_(*inputs, pages, group.write)
            q_THD = inputs.prep.split(inputs.qkv_TND)[0]
        else:
            q_THD, k_TKD, v_TKV = inputs
            store_kv_(k_TKD, v_TKV, pages, group.write)
        kv_heads, dim = pages.k.shape[2:]
        use = Use(q_THD.shape[1], kv_heads, dim, q_THD.dtype, scores.scale, scores.softcap)
        out: torch.Tensor = self._wrapper(use, group.plan).run(q_THD, (pages.k, pages.v))
        return out

    def _planned(self, use: Use, plan: WrapperPlan) -> Any:
        library, inputs, pages = importlib.import_module("flashinfer"), plan.inputs, plan.pages
        device, shape = inputs.page_table.device, plan.state.shape
        long = shape is None and inputs.rows.max_query_len >= LONG_QUERIES and _is_hopper(device)
        kernels = "fa3" if long else "fa2"

        def make(workspace: Workspace, buffers: tuple[torch.Tensor, ...] | None) -> Any:
            kind = library.BatchPrefillWithPagedKVCacheWrapper
            memory = workspace.on(device, 0 if long else partial_bytes(use, shape, _processors(device)))
            if buffers is None:
                return kind(memory, "NHD", backend=kernels)
            return kind(memory, "NHD", True, *buffers, backend=kernels)

        wrapper, fence = plan.state.wrapper((use, kernels), make, inputs)
        with fence:
            wrapper.plan(
                pages.query_start,
                pages.page_start,
                pages.indices,
                pages.last_page_len,
                use.num_heads,
                use.num_kv_heads,
                use.head_dim,
                inputs.page_tokens,
                causal=True,
                sm_scale=use.scale,
                logits_soft_cap=use.softcap,
                q_data_type=use.dtype,
                kv_data_type=use.dtype,
                max_token_per_sequence=inputs.rows.max_query_len,  # else it looks at every row
            )
        return wrapper


class FlashInferLatentBackend(_HostPlanned):
    """Latent attention of steps with one token per row. An instance serves one memory group of one engine."""

    name = "flashinfer_mla"
    capabilities = replace(_ANYWHERE, forms=frozenset({"latent"}), latent_dims=(512, 64), several_queries=False)

    def run(self, call: LatentCall) -> torch.Tensor:
        """See LatentCall."""
        q_THD, vectors_TL, up, memory, group, _, scale, *_ = call
        pages = memory.latent
        store_latent_(vectors_TL, pages, group.write)
        use = Use(q_THD.shape[1], 1, pages.shape[-1], q_THD.dtype, scale, 0.0)
        wrapper, latent = self._wrapper(use, group.plan), up.latent_dim
        q_THC = absorb(q_THD, up)
        out_THC = torch.zeros_like(q_THC, memory_format=torch.contiguous_format)
        wrapper.run(q_THC, q_THD[..., up.key_dim :], pages[..., :latent], pages[..., latent:], out=out_THC)
        return to_values(out_THC, up)

    def _planned(self, use: Use, plan: WrapperPlan) -> Any:
        library, inputs, pages = importlib.import_module("flashinfer"), plan.inputs, plan.pages

        sizes = self.capabilities.latent_dims
        assert sizes is not None

        def make(workspace: Workspace, buffers: tuple[torch.Tensor, ...] | None) -> Any:
            kind, memory = library.BatchMLAPagedAttentionWrapper, workspace.on(inputs.page_table.device)
            return kind(memory) if buffers is None else kind(memory, True, *buffers)

        wrapper, fence = plan.state.wrapper(use, make, inputs)
        # Padding counts as rows of one query without keys. How FlashInfer launches kernels depends on the mean number of
        # queries, which must be what it was at the capture.
        query_start = torch.arange(len(pages.kv_len) + 1, dtype=torch.int32)
        with fence:
            wrapper.plan(
                query_start,
                pages.page_start,
                pages.indices,
                pages.kv_len,
                use.num_heads,
                *sizes,
                inputs.page_tokens,
                False,
                use.scale,
                use.dtype,
                use.dtype,
            )
        return wrapper
