"""What a backend declares that it can do, and the sentence that refuses a layer which needs more.

Selection (`attention.select`) compares declarations with the layers of a memory group. The layers, the batch builder and the
graphs ask the same declaration how a backend is fed. They ask a backend nothing else.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from pagerunner.memory.specs import FullKV, LatentKV, Spec
from pagerunner.ops.dispatch import has_triton
from pagerunner.ops.native.library import SWITCH, library

OLDEST_DEVICE = (8, 0)  # bfloat16 and asynchronous copies; NVIDIA's Ampere generation
HALVES = frozenset({torch.float16, torch.bfloat16})
FLOATS = HALVES | {torch.float32}
HEADS = frozenset({"full", "window", "chunked"})
WINDOW_VECTORS = "window vectors"
# What a layer's scores may have beside a scale: learned sinks, a soft cap.
SINKS, SOFTCAP = "sinks", "softcap"


def memory_form(spec: Spec) -> str:
    """What a layer's memory is to a backend.

    `full`, `window`, `chunked`: keys and values by head, of all tokens, of the last ones, of the current chunk. `window
    vectors`: one vector per token of a window, the key and value of every head. `latent`: one latent per token (MLA).
    `chosen`: such latents of which an indexer chooses. `compressed`: latents that stand for several tokens. `recurrent`: one state per request.
    """
    if not isinstance(spec, LatentKV):
        return spec.kind
    if spec.kind == "window":
        return WINDOW_VECTORS
    if spec.compression > 1:
        return "compressed"
    return "chosen" if spec.indexer_dim else "latent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend serves, and how it is fed.

    What it serves. `forms`: kinds of memory, see `memory_form`. `compute_dtypes`: dtypes of queries. `page_dtypes`: dtypes of
    pages by their names in a spec (None: all); with `same_dtype` they must be those of the queries. `head_dims`: sizes of
    heads, keys' and values' alike (None: any up to `max_head_dim`). `latent_dims`: elements of a latent and of its rotary
    part (None: any). `slot_scales`: forms whose latents may be fp8 of any kind with scales beside each slot,
    and rotary parts in another dtype. `scores`: what scores may have beside a scale. `several_queries`: rows may have more than one token in
    a step.

    How it is fed. `projection`: it takes a projection's raw output, and norms, rotates and stores heads itself. `wanted`: it
    computes the attention of the wanted tokens alone. `graphs`: its kernels read everything that differs between steps from
    device memory, so they may be captured. `plans_on_host`: its plan depends on the step's host lists, so it is planned
    before each replay too. `min_sharing_rows`: steps of fewer rows don't look for pages that all rows share (0: none do).
    `drafts`: it serves strided batches (`StepRows.stride`), in graphs. `merged`: it takes raw vectors of a window together with slots
    (`VectorsCall`). `invariant`: set to `fixed`, it computes a token in the same order of sums whatever else is in the step.

    What it runs on. `devices`: types (None: any). `package`: what must be installed, the module's name and the
    distribution's. `triton`: on CUDA its kernels are Triton's (elsewhere their torch twins run).
    `cpu_kernels`: its kernels are compiled by the machine's C compiler. `shared_memory`: bytes that
    the largest program takes, in half precision and in float32.
    """

    forms: frozenset[str]
    compute_dtypes: frozenset[torch.dtype] | None = None
    page_dtypes: frozenset[str] | None = None
    same_dtype: bool = False
    head_dims: frozenset[int] | None = None
    max_head_dim: int | None = None
    latent_dims: tuple[int, int] | None = None
    slot_scales: frozenset[str] = frozenset()
    scores: frozenset[str] = frozenset({SINKS, SOFTCAP})
    several_queries: bool = True
    projection: bool = False
    wanted: bool = False
    graphs: bool = False
    plans_on_host: bool = False
    min_sharing_rows: int = 0
    drafts: bool = False
    merged: bool = False
    invariant: bool = False
    devices: frozenset[str] | None = None
    package: tuple[str, str] | None = None
    triton: bool = False
    cpu_kernels: bool = False
    shared_memory: tuple[int, int] = (0, 0)

    def refusal(self, spec: Spec, device: str, dtype: torch.dtype, scores: Collection[str] = ()) -> str | None:
        """Why this backend can't serve a layer with queries of `dtype` on `device`; None if it can.

        `scores` are what the layer's scores have beside a scale.
        """
        return (
            self._lacks_memory(spec)
            or self._lacks_scores(scores)
            or self._lacks_dtype(spec, dtype)
            or self._lacks_device(device, dtype)
        )

    def _lacks_memory(self, spec: Spec) -> str | None:
        form = memory_form(spec)
        if form not in self.forms:
            return f"it serves {_listed(self.forms)} memory, not {form} ({type(spec).__name__})"
        return self._lacks_latent(spec) if isinstance(spec, LatentKV) else self._lacks_heads(spec)

    def _lacks_heads(self, spec: Spec) -> str | None:
        if not isinstance(spec, FullKV):
            return None
        largest = max(spec.head_dim, spec.value_dim)
        if self.max_head_dim is not None and largest > self.max_head_dim:
            return f"its heads have at most {self.max_head_dim} elements, not {largest}"
        if self.head_dims is not None and (spec.head_dim not in self.head_dims or spec.value_dim != spec.head_dim):
            return f"its heads have {_listed(self.head_dims)} elements, not {spec.head_dim} and {spec.value_dim}"
        return None

    def _lacks_latent(self, spec: LatentKV) -> str | None:
        """See `runner.pages.latent_view`."""
        if spec.indexer_dtype not in (None, spec.dtype):
            return f"it needs indexer keys in the latents' dtype, {spec.dtype}"
        scaled = bool(spec.scale_bytes) and bool(spec.indexer_scale_bytes) == bool(spec.indexer_dim)
        whole = memory_form(spec) in self.slot_scales and scaled and spec.rope_dtype not in (None, spec.dtype)
        if spec.rope_dtype not in (None, spec.dtype) and not whole:
            return f"it needs rotary parts in the latents' dtype, {spec.dtype}"
        if (spec.scale_bytes or spec.indexer_scale_bytes) and not whole:
            return f"it needs fp8 latents to have one scale per page, not {spec.scale_bytes} bytes of them per slot"
        if spec.byte_scales and memory_form(spec) not in ("compressed", WINDOW_VECTORS):
            return "it needs scales of fp8 latents in float32, not bytes of exponents"
        if spec.kind == "window" and spec.indexer_dim:
            return "it needs a window's vectors to have no indexer keys"
        sizes = (spec.latent_dim, spec.rope_dim)
        if self.latent_dims not in (None, sizes):
            return f"it needs latents of {self.latent_dims} elements, not {sizes}"
        return None

    def _lacks_scores(self, scores: Collection[str]) -> str | None:
        lacking = sorted(set(scores) - self.scores)
        return f"its scores have no {_listed(lacking)}" if lacking else None

    def _lacks_dtype(self, spec: Spec, dtype: torch.dtype) -> str | None:
        if not dtype.is_floating_point or (self.compute_dtypes is not None and dtype not in self.compute_dtypes):
            return f"it does not compute in {dtype}"
        if not isinstance(spec, FullKV | LatentKV):
            return None
        scaled = isinstance(spec, LatentKV) and spec.scale_bytes > 0 and memory_form(spec) in self.slot_scales
        if self.page_dtypes is not None and spec.dtype not in self.page_dtypes and not scaled:
            return f"it needs pages in {_listed(self.page_dtypes)}, not {spec.dtype}"
        if self.same_dtype and str(dtype) != f"torch.{spec.dtype}":
            return f"it needs pages in the model's dtype {dtype}, not {spec.dtype}"
        return None

    def _lacks_device(self, device: str, dtype: torch.dtype) -> str | None:
        if self.package is not None and importlib.util.find_spec(self.package[0]) is None:
            return f"the package {self.package[1]} is not installed"
        if self.devices is not None and device not in self.devices:
            return f"it needs a {_listed(self.devices)} device, not {device}"
        if self.cpu_kernels and library() is None:
            off = os.environ.get(SWITCH) == "0"
            return f"{SWITCH}=0 turns the CPU kernels off" if off else "this machine has no CPU kernels"
        return lacks(device, self.shared_memory[dtype == torch.float32]) if self.triton else None


def _listed(names: Collection[Any]) -> str:
    return ", ".join(str(name) for name in sorted(names))


def lacks(device: str, shared_memory: int = 0) -> str | None:
    """Why kernels whose programs take `shared_memory` bytes can't run there; None if they can, or run as torch twins."""
    if device != "cuda":
        return None
    if not has_triton():
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_DEVICE:
        return f"its kernels need compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    there = int(torch.cuda.get_device_properties().shared_memory_per_block_optin)
    if there < shared_memory:
        return f"its kernels need {shared_memory} bytes of shared memory a program, this device has {there}"
    return None
