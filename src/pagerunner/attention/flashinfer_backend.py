"""Attention by FlashInfer (optional package flashinfer-python), over the same page-major views as every backend.

FlashInfer plans on the host: before each step, and before each replay of a graph, the rows' pages and lengths are written
into buffers that belong to the graph, and its kernels' work is divided anew. It builds its kernels when they are first
used, which takes a minute or so once per machine; nothing is imported or built unless this backend was asked for.

Layers with attention sinks go to the `triton` backend. Window groups do altogether: in the first page of a window, slots
that no query sees may never have been written, and FlashInfer's kernels multiply them by zero, which NaN survives.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.host_planned import HostPages, PinnedTurn, max_pages
from pagerunner.attention.mla import UpProjection
from pagerunner.attention.paged import PagedBackend
from pagerunner.attention.paged_mla import PagedLatentBackend, absorb, to_values
from pagerunner.batch import ForwardBatch, GroupBatch, LatentKV, LayerKV
from pagerunner.memory.specs import LatentKV as LatentSpec
from pagerunner.memory.specs import Spec
from pagerunner.ops.latent_attention import store_latent_
from pagerunner.ops.paged_attention import HeadPrep, PagedKV, prepare_heads_, store_kv_

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for partial results; some launches need more
LONG_QUERIES = 128  # eager steps with such rows take the kernels made for them
HEAD_DIMS = (64, 128, 256)
LATENT_DIMS = (512, 64)
_ROUNDING = 1024  # bytes lost where parts of the workspace begin on round addresses
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Use:
    """What a plan depends on beside the step: a layer's shapes, dtypes and scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    softcap: float


def missing(device: str, dtype: torch.dtype, kept: str) -> str | None:
    """Why FlashInfer can't serve pages of dtype `kept` here, whatever the layers; None if it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if device != "cuda":
        return f"it needs a CUDA device, not {device}"
    if dtype not in _HALVES.values():
        return f"it computes in float16 and bfloat16, not {dtype}"
    if _HALVES.get(kept) != dtype:
        return f"it needs pages in the model's dtype {dtype}, not {kept}"
    return None


def capturing(device: torch.device) -> bool:
    """Whether work on the device is being recorded, which planning can't be."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def partial_bytes(use: Use, shape: GraphShape | None, processors: int) -> int:
    """The most that "fa2" asks for, when it plans, for the partial results of rows whose keys are divided.

    These are float32 [blocks, heads, queries of a block, elements + 1]. In a graph there are as many blocks as its tokens
    could ever need; in eager steps, which divide keys only where processors would idle, two for each processor.
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
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 0


class Workspace:
    """Where kernels leave partial results of one launch. Steps run one after another, so that all states share one."""

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
    wrappers: dict[Any, tuple[Any, PinnedTurn]] = field(default_factory=dict)

    def wrapper(self, key: Any, make: Any, inputs: PlanInputs) -> tuple[Any, PinnedTurn]:
        """That of `key`, made by `make(self.workspace, graph buffers)` when it is first asked for."""
        found = self.wrappers.get(key)
        if found is None:
            device = inputs.page_table.device
            buffers: tuple[torch.Tensor, ...] | None = None
            if self.shape is not None:
                rows = self.shape.rows
                sizes = (rows + 1, rows + 1, max_pages(inputs, rows), rows)
                buffers = tuple(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
            found = self.wrappers[key] = (make(self.workspace, buffers), PinnedTurn(device))
        return found

    def pages(self, inputs: PlanInputs) -> HostPages:
        """Of a step; of a graph's capture, whose rows aren't known, the most that its kernels are launched for."""
        if self.shape is not None and not inputs.query_lens:
            return HostPages.largest(self.shape, inputs.page_table.device)
        return HostPages.of(inputs, len(inputs.query_lens) if self.shape is None else self.shape.rows)


@dataclass(slots=True)
class StepPlan:
    """A step as planned: `other` is the metadata of the backend that takes what FlashInfer doesn't; without `pages`, that
    is all of the step. A wrapper that isn't planned yet is when a layer first asks.
    """

    other: Any
    inputs: PlanInputs
    state: PlanState
    pages: HostPages | None
    planned: dict[Use, Any] = field(default_factory=dict)


class _HostPlanned(ABC):
    """What the two backends share: which uses have been seen, and when they are planned."""

    reads_tables = True
    plans_on_host = True
    min_sharing_rows = 0

    def __init__(self) -> None:
        self._uses: dict[Use, None] = {}
        self._workspace = Workspace()

    def new_state(self, shape: GraphShape | None) -> PlanState:
        """See DeviceBackend."""
        return PlanState(shape, self._workspace)

    def _plan_step(self, inputs: PlanInputs, state: PlanState, other: Any, served: bool) -> StepPlan:
        plan = StepPlan(other, inputs, state, state.pages(inputs) if served else None)
        if served and state.shape is not None:
            for use in self._uses:
                plan.planned[use] = self._planned(use, plan)
        return plan

    def _wrapper(self, use: Use, plan: StepPlan) -> Any:
        found = plan.planned.get(use)
        if found is None:
            if capturing(plan.inputs.page_table.device):
                raise RuntimeError(f"A graph is captured with a layer that no step before it has run: {use}.")
            self._uses[use] = None
            found = plan.planned[use] = self._planned(use, plan)
        return found

    @abstractmethod
    def _planned(self, use: Use, plan: StepPlan) -> Any: ...


class FlashInferBackend(_HostPlanned):
    """See the module. An instance serves one memory group of one engine."""

    name = "flashinfer"

    def __init__(self) -> None:
        super().__init__()
        self._other = PagedBackend()

    def unsupported(self, spec: Spec, device: str, dtype: torch.dtype) -> str | None:
        """Serves full attention in half precision, pages in the same."""
        heads: Any = spec
        if spec.kind == "window":
            return "its kernels read what a window hides in its first page, which may never have been written"
        if spec.kind != "full":
            return f"it serves full attention, not {spec.kind}"
        if heads.head_dim not in HEAD_DIMS or heads.value_dim != heads.head_dim:
            return f"its heads have {HEAD_DIMS} elements, not {heads.head_dim} and {heads.value_dim}"
        return missing(device, dtype, heads.dtype) or self._other.unsupported(spec, device, dtype)

    def plan(self, inputs: PlanInputs, state: PlanState) -> StepPlan:
        """See DeviceBackend."""
        return self._plan_step(inputs, state, self._other.plan(inputs, None), True)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        layer: LayerKV,
        group: GroupBatch,
        batch: ForwardBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """See DeviceBackend.forward."""
        plan: StepPlan = group.metadata
        if sinks_H is not None:
            other = replace(group, metadata=plan.other)
            return self._other.forward(q_THD, k_TKD, v_TKD, layer, other, batch, scale, sinks_H, softcap)
        store_kv_(k_TKD, v_TKD, PagedKV(layer.k, layer.v), group.write_entry, group.write_offset)
        return self._attend(q_THD, layer, plan, scale, softcap)

    def from_projection(
        self,
        qkv_TND: torch.Tensor,
        prep: HeadPrep,
        layer: LayerKV,
        group: GroupBatch,
        batch: ForwardBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """See PagedBackend.from_projection."""
        plan: StepPlan = group.metadata
        if sinks_H is not None:
            other = replace(group, metadata=plan.other)
            return self._other.from_projection(qkv_TND, prep, layer, other, batch, scale, sinks_H, softcap)
        prepare_heads_(qkv_TND, prep, PagedKV(layer.k, layer.v), group.write_entry, group.write_offset)
        return self._attend(prep.split(qkv_TND)[0], layer, plan, scale, softcap)

    def _attend(
        self, q_THD: torch.Tensor, layer: LayerKV, plan: StepPlan, scale: float, softcap: float
    ) -> torch.Tensor:
        use = Use(*q_THD.shape[1:2], *layer.k.shape[2:], q_THD.dtype, scale, softcap)
        out: torch.Tensor = self._wrapper(use, plan).run(q_THD, (layer.k, layer.v))
        return out

    def _planned(self, use: Use, plan: StepPlan) -> Any:
        library, inputs, pages = importlib.import_module("flashinfer"), plan.inputs, plan.pages
        assert pages is not None, "a step that FlashInfer doesn't serve is not planned"
        device, shape = inputs.page_table.device, plan.state.shape
        long = shape is None and inputs.rows.max_query_len >= LONG_QUERIES and _is_hopper(device)
        kernels = "fa3" if long else "fa2"

        def make(workspace: Workspace, buffers: tuple[torch.Tensor, ...] | None) -> Any:
            kind = library.BatchPrefillWithPagedKVCacheWrapper
            memory = workspace.on(device, 0 if long else partial_bytes(use, shape, _processors(device)))
            if buffers is None:
                return kind(memory, "NHD", backend=kernels)
            return kind(memory, "NHD", True, *buffers, backend=kernels)

        wrapper, turn = plan.state.wrapper((use, kernels), make, inputs)
        with turn:
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
    """Latent attention of steps with one token per row; others go to the `triton` kernels.

    An instance serves one memory group of one engine.
    """

    name = "flashinfer_mla"

    def __init__(self) -> None:
        super().__init__()
        self._other = PagedLatentBackend()

    def unsupported(self, spec: Spec, device: str, dtype: torch.dtype) -> str | None:
        """Serves latents of DeepSeek's size in half precision."""
        reason = self._other.unsupported(spec, device, dtype)
        if reason is not None or not isinstance(spec, LatentSpec):
            return reason
        if (spec.latent_dim, spec.rope_dim) != LATENT_DIMS:
            return f"it needs latents of {LATENT_DIMS} elements, not ({spec.latent_dim}, {spec.rope_dim})"
        return missing(device, dtype, spec.dtype)

    def plan(self, inputs: PlanInputs, state: PlanState) -> StepPlan:
        """See DeviceBackend."""
        return self._plan_step(inputs, state, self._other.plan(inputs, state.shape), inputs.rows.one_token)

    def forward(
        self,
        q_THD: torch.Tensor,
        vectors_TL: torch.Tensor,
        up: UpProjection,
        layer: LatentKV,
        group: GroupBatch,
        batch: ForwardBatch,
        scale: float,
    ) -> torch.Tensor:
        """See PagedLatentBackend.forward."""
        plan: StepPlan = group.metadata
        if plan.pages is None:
            other = replace(group, metadata=plan.other)
            return self._other.forward(q_THD, vectors_TL, up, layer, other, batch, scale)
        pages = layer.latent
        store_latent_(vectors_TL, pages, group.write_entry, group.write_offset)
        use = Use(q_THD.shape[1], 1, pages.shape[-1], q_THD.dtype, scale, 0.0)
        wrapper, latent = self._wrapper(use, plan), up.latent_dim
        q_THC = absorb(q_THD, up)
        out_THC = torch.zeros_like(q_THC, memory_format=torch.contiguous_format)
        wrapper.run(q_THC, q_THD[..., up.key_dim :], pages[..., :latent], pages[..., latent:], out=out_THC)
        return to_values(out_THC, up)

    def _planned(self, use: Use, plan: StepPlan) -> Any:
        library, inputs, pages = importlib.import_module("flashinfer"), plan.inputs, plan.pages
        assert pages is not None, "a step that FlashInfer doesn't serve is not planned"

        def make(workspace: Workspace, buffers: tuple[torch.Tensor, ...] | None) -> Any:
            kind, memory = library.BatchMLAPagedAttentionWrapper, workspace.on(inputs.page_table.device)
            return kind(memory) if buffers is None else kind(memory, True, *buffers)

        wrapper, turn = plan.state.wrapper(use, make, inputs)
        # Padding counts as rows of one query without keys: how its kernels are launched depends on the mean number of
        # queries, which must be what it was at the capture.
        query_start = torch.arange(len(pages.kv_len) + 1, dtype=torch.int32)
        with turn:
            wrapper.plan(
                query_start,
                pages.page_start,
                pages.indices,
                pages.kv_len,
                use.num_heads,
                *LATENT_DIMS,
                inputs.page_tokens,
                False,
                use.scale,
                use.dtype,
                use.dtype,
            )
        return wrapper
