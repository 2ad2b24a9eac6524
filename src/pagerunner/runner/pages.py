"""Pages: the KV region of the arena, seen by layers as strided views and by plans as byte ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pagerunner.batch import KVPages, LatentPages, LayerMemory, StatePages
from pagerunner.memory.memory_plan import GroupPlan, LayerSlice, MemoryPlan
from pagerunner.memory.specs import SCALE_BYTES, LatentKV, RecurrentState
from pagerunner.ops.pages import copy_pages, fill_pages
from pagerunner.runner.copy_launches import copy_launches
from pagerunner.runner.staging import StagedStep, Triple
from pagerunner.types import PageCopy

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
POISON_BYTE = 0xFF  # every float format reads NaN from bytes of all ones


def layer_view(
    kv_bytes: torch.Tensor,
    group: GroupPlan,
    index: int,
    piece: LayerSlice,
    static_scales: tuple[float, float] | None = None,
) -> KVPages:
    """One layer's K and V as views [num_entries, page_tokens, num_kv_heads, head_dim] whose first stride is the unit.

    The view is indexed by table entry, so any page offset that is a multiple of the unit can be reached by arithmetic.
    `static_scales` (of keys, of values) are those of a layer whose spec has them.
    """
    spec = piece.spec
    dtype = TORCH_DTYPES[spec.dtype]
    typed = kv_bytes.view(dtype)
    num_entries = (kv_bytes.numel() - group.page_bytes) // group.unit + 1

    def view(offset_bytes: int, head_dim: int) -> torch.Tensor:
        row = spec.num_kv_heads * head_dim
        size = (num_entries, group.page_tokens, spec.num_kv_heads, head_dim)
        return typed.as_strided(size, (group.unit // dtype.itemsize, row, head_dim, 1), offset_bytes // dtype.itemsize)

    static = bool(spec.quantised and spec.static_scales)
    if static:
        if static_scales is None:
            raise ValueError(f"layer {piece.layer} needs static scales")
        own = torch.empty(2, spec.num_kv_heads, dtype=torch.float32, device=kv_bytes.device)
        scales = _put_scales(own, static_scales).expand(num_entries, 2, spec.num_kv_heads)
    else:
        scales = _page_scales(kv_bytes, group, piece)
    values = piece.offset + spec.value_offset(group.page_tokens)
    return KVPages(index, view(piece.offset, spec.head_dim), view(values, spec.value_dim), scales, static)


def _put_scales(target: torch.Tensor, scales: tuple[float, float]) -> torch.Tensor:
    """Fill [2, num_kv_heads] with the scale of keys and that of values."""
    return target.copy_(torch.tensor(scales, dtype=torch.float32).unsqueeze(1))


def _page_scales(kv_bytes: torch.Tensor, group: GroupPlan, piece: LayerSlice) -> torch.Tensor | None:
    spec = piece.spec
    if not spec.has_page_scales:
        return None
    num_entries = (kv_bytes.numel() - group.page_bytes) // group.unit + 1
    first = (piece.offset + spec.scales_offset(group.page_tokens)) // SCALE_BYTES
    heads = 1 if isinstance(spec, LatentKV) else spec.num_kv_heads
    strides = (group.unit // SCALE_BYTES, heads, 1)
    return kv_bytes.view(torch.float32).as_strided((num_entries, 2, heads), strides, first)


def recurrent_view(kv_bytes: torch.Tensor, group: GroupPlan, index: int, piece: LayerSlice) -> StatePages:
    """One layer's states and journal as views [num_entries, *shape] whose first stride is the unit, in the order of its spec."""
    spec = piece.spec
    if not isinstance(spec, RecurrentState):
        raise TypeError(f"{spec} is not recurrent state")
    num_entries = (kv_bytes.numel() - group.page_bytes) // group.unit + 1
    views = []
    for (shape, name), offset in zip(spec.tensors, spec.offsets, strict=True):
        dtype = TORCH_DTYPES[name]
        strides = [group.unit // dtype.itemsize]
        strides += torch.empty(shape, device="meta").stride()
        first = (piece.offset + offset) // dtype.itemsize
        views.append(kv_bytes.view(dtype).as_strided((num_entries, *shape), strides, first))
    count = len(spec.shapes)
    return StatePages(index, tuple(views[:count]), tuple(views[count:]))


def latent_view(kv_bytes: torch.Tensor, group: GroupPlan, index: int, piece: LayerSlice) -> LatentPages:
    """One layer's vectors as a view [num_entries, slots, latent + rope elements] whose first stride is the unit.

    Indexer keys are another such view. Slots with scales of their own are several, see LatentPages.
    """
    spec = piece.spec
    if not isinstance(spec, LatentKV) or spec.indexer_dtype not in (None, spec.dtype):
        raise TypeError(f"{spec} is not one vector per slot, with an indexer key of its dtype")
    if spec.scale_bytes and bool(spec.indexer_scale_bytes) == bool(spec.indexer_dim):
        return _slots_with_scales(kv_bytes, group, index, piece, spec)
    if spec.scale_bytes or spec.indexer_scale_bytes or spec.rope_dtype not in (None, spec.dtype):
        raise TypeError(f"{spec} is not one vector of one dtype per slot")
    dtype = TORCH_DTYPES[spec.dtype]
    num_entries = (kv_bytes.numel() - group.page_bytes) // group.unit + 1

    def view(offset_bytes: int, elements: int) -> torch.Tensor:
        size = (num_entries, spec.slots(group.page_tokens), elements)
        strides = (group.unit // dtype.itemsize, elements, 1)
        return kv_bytes.view(dtype).as_strided(size, strides, offset_bytes // dtype.itemsize)

    indexer = None
    if spec.indexer_dim:
        indexer = view(piece.offset + spec.indexer_offset(group.page_tokens), spec.indexer_dim)
    vectors = view(piece.offset, spec.latent_dim + spec.rope_dim)
    return LatentPages(index, vectors, _page_scales(kv_bytes, group, piece), indexer)


def _slots_with_scales(
    kv_bytes: torch.Tensor, group: GroupPlan, index: int, piece: LayerSlice, spec: LatentKV
) -> LatentPages:
    """A slot is a latent, the scales of its blocks, and a rotary part. All slots' indexer keys follow, then all their scales.

    Scales of a byte are behind all the slots.
    """
    num_entries, slots = (kv_bytes.numel() - group.page_bytes) // group.unit + 1, spec.slots(group.page_tokens)

    def view(dtype: torch.dtype, first: int, slot_bytes: int, elements: int) -> torch.Tensor:
        strides = (group.unit // dtype.itemsize, slot_bytes // dtype.itemsize, 1)
        size = (num_entries, slots, elements)
        return kv_bytes.view(dtype).as_strided(size, strides, (piece.offset + first) // dtype.itemsize)

    held, rope = TORCH_DTYPES[spec.dtype], TORCH_DTYPES[spec.rope_dtype or spec.dtype]
    latent, keys = spec.latent_dim * held.itemsize, spec.indexer_offset(group.page_tokens)
    scales, has_keys = spec.indexer_scales_offset(group.page_tokens), spec.indexer_dim > 0
    own = spec.slot_scales_offset(group.page_tokens)
    if spec.byte_scales:
        stride, turned = spec.vector_bytes, latent
        slot_scales = view(torch.uint8, own, spec.scale_bytes, spec.byte_scales)
    else:
        stride, turned = spec.slot_bytes, latent + spec.scale_bytes
        slot_scales = view(torch.float32, own, stride, spec.scale_bytes // SCALE_BYTES)
    return LatentPages(
        index,
        view(held, 0, stride, spec.latent_dim),
        indexer=view(held, keys, spec.indexer_dim * held.itemsize, spec.indexer_dim) if has_keys else None,
        rope=view(rope, turned, stride, spec.rope_dim),
        slot_scales=slot_scales,
        indexer_scales=view(torch.float32, scales, SCALE_BYTES, 1).squeeze(-1) if has_keys else None,
    )


def window_view(
    kv_bytes: torch.Tensor,
    group: GroupPlan,
    index: int,
    piece: LayerSlice,
    static_scales: tuple[float, float] | None = None,
) -> KVPages:
    """One layer of a window: keys and values, or vectors that serve as both, as one head; see KVPages."""
    if not isinstance(piece.spec, LatentKV):
        return layer_view(kv_bytes, group, index, piece, static_scales)
    found = latent_view(kv_bytes, group, index, piece)
    vectors = found.latent.unsqueeze(2)
    return KVPages(index, vectors, vectors, found.scales, coded=None if found.rope is None else found)


# by the kind of the layer's spec; the others are keys and values
_STATE_VIEWS = {"recurrent": recurrent_view, "latent": latent_view}
_KEY_VIEWS = {"window": window_view}


class Pages:
    """Owns the views of the KV region, and zeroes, poisons and copies whole pages in it."""

    def __init__(
        self,
        plan: MemoryPlan,
        kv_bytes: torch.Tensor,
        *,
        poison: bool,
        static_scales: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """`static_scales`: of keys and of values, for the layers whose specs have them."""
        self._bytes = kv_bytes
        self._groups = plan.groups
        self._poison = poison
        static = static_scales or {}
        layers: dict[int, LayerMemory] = {}
        for index, group in enumerate(plan.groups):
            for piece in group.layers:
                state_view = _STATE_VIEWS.get(piece.spec.kind)
                if state_view is not None:
                    layers[piece.layer] = state_view(kv_bytes, group, index, piece)
                else:
                    view = _KEY_VIEWS.get(piece.spec.kind, layer_view)
                    layers[piece.layer] = view(kv_bytes, group, index, piece, static.get(piece.layer))
        self.layers: tuple[LayerMemory, ...] = tuple(layers[layer] for layer in sorted(layers))

    def set_static_scales(self, scales: Mapping[int, tuple[float, float]]) -> None:
        """Give the layers that have static scales others, in place, so graphs that were captured read them too."""
        for layer, pair in scales.items():
            memory = self.layers[layer]
            assert isinstance(memory, KVPages) and memory.static and memory.scales is not None
            with torch.inference_mode():
                _put_scales(memory.scales[0], pair)

    def copies(self, copies: Sequence[PageCopy]) -> list[list[Triple]]:
        """Copies as (source, target, bytes), divided into launches: within one, the order of copies doesn't matter."""
        return copy_launches((copy.source, copy.target, self._groups[copy.group].page_bytes) for copy in copies)

    def fills(self, fresh: Sequence[Sequence[int]]) -> list[Triple]:
        """What fresh pages (byte offsets by group) are filled with, as (offset, bytes, value).

        A poisoned run fills fresh pages with NaN patterns; a normal run leaves them as they were. Groups whose kernels read
        before they write get zeros in both.
        """
        found: list[Triple] = []
        for group, offsets in zip(self._groups, fresh, strict=False):
            if group.zero_fresh or self._poison:
                value = 0 if group.zero_fresh else POISON_BYTE
                found += [(offset, group.page_bytes, value) for offset in offsets]
        return found

    def prepare(self, step: StagedStep) -> None:
        """Copy pages in list order, then clear the fresh ones; all before the first kernel.

        Copies come first: a page that a copy reads may be handed out afresh in the same step.
        """
        for copies_N3, most_bytes in step.copies:
            copy_pages(self._bytes, copies_N3, most_bytes)
        if step.fills is not None:
            fill_pages(self._bytes, *step.fills)
