"""Pages: the KV region of the arena, seen by layers as strided views and by plans as byte ranges."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagerunner.batch import LatentKV, LayerKV, LayerMemory, RecurrentKV
from pagerunner.memory.planner import GroupPlan, LayerSlice, MemoryPlan
from pagerunner.memory.specs import SCALE_BYTES, RecurrentState
from pagerunner.memory.specs import LatentKV as LatentSpec
from pagerunner.types import PageCopy

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
POISON_BYTE = 0xFF  # every float format reads NaN from bytes of all ones


def layer_view(kv_bytes: torch.Tensor, group: GroupPlan, index: int, piece: LayerSlice) -> LayerKV:
    """One layer's K and V as views [num_entries, kernel_tokens, num_kv_heads, head_dim] whose first stride is the unit.

    The view is indexed by table entry, so any page offset that is a multiple of the unit can be reached by arithmetic.
    """
    spec = piece.spec
    dtype = TORCH_DTYPES[spec.dtype]
    typed = kv_bytes.view(dtype)
    num_entries = (kv_bytes.numel() - group.page_bytes) // group.unit + 1 + group.entries_inside

    def view(offset_bytes: int, head_dim: int) -> torch.Tensor:
        row = spec.num_kv_heads * head_dim
        size = (num_entries, group.kernel_tokens, spec.num_kv_heads, head_dim)
        return typed.as_strided(size, (group.unit // dtype.itemsize, row, head_dim, 1), offset_bytes // dtype.itemsize)

    scales = None
    if spec.has_page_scales:
        first = (piece.offset + spec.scales_offset(group.page_tokens)) // SCALE_BYTES
        scales = kv_bytes.view(torch.float32).as_strided((num_entries, 2), (group.unit // SCALE_BYTES, 1), first)
    values = piece.offset + spec.value_offset(group.page_tokens)
    return LayerKV(index, view(piece.offset, spec.head_dim), view(values, spec.value_dim), scales)


def recurrent_view(kv_bytes: torch.Tensor, group: GroupPlan, index: int, piece: LayerSlice) -> RecurrentKV:
    """One layer's states as views [num_entries, *shape] whose first stride is the unit, in the order of its spec."""
    spec = piece.spec
    if not isinstance(spec, RecurrentState):
        raise TypeError(f"{spec} is not recurrent state")
    num_entries = (kv_bytes.numel() - group.page_bytes) // group.unit + 1
    states = []
    for shape, name, offset in zip(spec.shapes, spec.dtypes, spec.offsets, strict=True):
        dtype = TORCH_DTYPES[name]
        strides = [group.unit // dtype.itemsize]
        strides += torch.empty(shape, device="meta").stride()
        first = (piece.offset + offset) // dtype.itemsize
        states.append(kv_bytes.view(dtype).as_strided((num_entries, *shape), strides, first))
    return RecurrentKV(index, tuple(states))


def latent_view(kv_bytes: torch.Tensor, group: GroupPlan, index: int, piece: LayerSlice) -> LatentKV:
    """One layer's vectors as a view [num_entries, slots, latent + rope elements] whose first stride is the unit."""
    spec = piece.spec
    if (
        not isinstance(spec, LatentSpec)
        or spec.quantised
        or spec.indexer_dim
        or spec.rope_dtype not in (None, spec.dtype)
    ):
        raise TypeError(f"{spec} is not one vector of one dtype per slot")
    dtype = TORCH_DTYPES[spec.dtype]
    vector = spec.latent_dim + spec.rope_dim
    num_entries = (kv_bytes.numel() - group.page_bytes) // group.unit + 1
    size = (num_entries, spec.slots(group.page_tokens), vector)
    strides = (group.unit // dtype.itemsize, vector, 1)
    return LatentKV(index, kv_bytes.view(dtype).as_strided(size, strides, piece.offset // dtype.itemsize))


# by the kind of the layer's spec; the others are keys and values
_VIEWS = {"recurrent": recurrent_view, "latent": latent_view}


class Pages:
    """Owns the views of the KV region, and zeroes, poisons and copies whole pages in it."""

    def __init__(self, plan: MemoryPlan, kv_bytes: torch.Tensor, *, poison: bool) -> None:
        self._bytes = kv_bytes
        self._groups = plan.groups
        self._poison = poison
        layers: dict[int, LayerMemory] = {}
        for index, group in enumerate(plan.groups):
            for piece in group.layers:
                layers[piece.layer] = _VIEWS.get(piece.spec.kind, layer_view)(kv_bytes, group, index, piece)
        self.layers: tuple[LayerMemory, ...] = tuple(layers[layer] for layer in sorted(layers))

    def prepare(self, copies: Sequence[PageCopy], zero: Sequence[Sequence[int]]) -> None:
        """Copy pages in list order, then clear the fresh ones (byte offsets by group); all before the first kernel.

        Copies come first: a page that a copy reads may be handed out afresh in the same step. A poisoned run fills
        fresh pages with NaN patterns where a normal one leaves what was there; groups whose kernels read before they
        write get zeros in both.
        """
        for copy in copies:
            size = self._groups[copy.group].page_bytes
            self._bytes[copy.target : copy.target + size].copy_(self._bytes[copy.source : copy.source + size])
        for group, offsets in zip(self._groups, zero, strict=False):
            if group.zero_fresh or self._poison:
                fill = 0 if group.zero_fresh else POISON_BYTE
                for offset in offsets:
                    self._bytes[offset : offset + group.page_bytes].fill_(fill)
