"""What one layer keeps between steps. A spec knows its bytes and its lifetime, and nothing about configuration.

A model lists one spec per piece of memory, in layer order; a layer that keeps two kinds of state lists two. A new kind of
memory is a new spec here plus a rule in `rules.py`; the planner, the pool, the prefix index, the manager and the scheduler
only use the members of `Spec`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

from pagerunner.config import KV_DTYPE_BYTES
from pagerunner.errors import ConfigError

SCALE_BYTES = 4  # one float32
_ALIGNMENT = 16


class Spec(Protocol):
    """One piece of a layer's memory."""

    __slots__ = ()

    @property
    def lifetime(self) -> tuple[Any, ...]:
        """Layers with equal lifetimes share a group and its page table. The name of the rule is first, then its numbers."""

    @property
    def kind(self) -> str:
        """The name of the rule that the layer's pages live by, a key of `rules.RULES`."""
        return str(self.lifetime[0])

    @property
    def zero_fresh(self) -> bool:
        """Whether a kernel may read a fresh page before it writes it, so that the page must be zeroed."""

    @property
    def token_multiple(self) -> int:
        """A page's tokens must be a multiple of this."""
        return 1

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of this layer's share of a page of `page_tokens` tokens."""


@dataclass(frozen=True, slots=True)
class FullKV(Spec):
    """Keys and values of every token of a request, kept until the request ends.

    `head_dim_v` is the size of a value head where it differs from a key head's (None: equal). Kernels mask: they never
    read a token slot that has not been written. An fp8 page has float32 scales after its tokens, at `scales_offset`: one for
    each head's keys, then one for each head's values. With `static_scales` the checkpoint has the scales and the page has none.

    Raises:
        ConfigError: a size is not positive, or the dtype is unknown.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    head_dim_v: int | None = None
    static_scales: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_sizes(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, head_dim_v=self.value_dim)
        _check_dtype("kv dtype", self.dtype)

    @property
    def lifetime(self) -> tuple[Any, ...]:
        """All full layers share one group, whatever their sizes."""
        return ("full",)

    @property
    def quantised(self) -> bool:
        """Whether elements are fp8 numbers that mean nothing without a scale."""
        return _is_fp8(self.dtype)

    @property
    def zero_fresh(self) -> bool:
        """Whether the page has scales: they are read before the first write, to see whether they must grow."""
        return self.has_page_scales

    @property
    def value_dim(self) -> int:
        """Elements of one value head."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def has_page_scales(self) -> bool:
        """Whether a page ends with the scales of its keys and values."""
        return self.quantised and not self.static_scales

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * KV_DTYPE_BYTES[self.dtype]

    def value_offset(self, page_tokens: int) -> int:
        """Bytes from the layer's share of a page to its values."""
        return page_tokens * self.num_kv_heads * self.head_dim * KV_DTYPE_BYTES[self.dtype]

    def scales_offset(self, page_tokens: int) -> int:
        """Bytes from the layer's share of a page to its scales (of keys by head, of values by head)."""
        return _round_up(page_tokens * self.bytes_per_token, SCALE_BYTES)

    def page_bytes(self, page_tokens: int) -> int:
        """Keys of all the page's tokens, then values, then the scales if there are any.

        Scales are padded, so that the next layer's keys begin where a kernel can read 16 bytes at once.
        """
        if self.has_page_scales:
            return _round_up(self.scales_offset(page_tokens) + 2 * self.num_kv_heads * SCALE_BYTES, _ALIGNMENT)
        return page_tokens * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class WindowKV(FullKV):
    """Keys and values of the last `window` tokens: key j is visible to query i when i - window < j <= i.

    Raises:
        ConfigError: as FullKV, or the window is not positive.
    """

    window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        FullKV.__post_init__(self)
        _check_sizes(window=self.window)

    @property
    def lifetime(self) -> tuple[Any, ...]:
        """All layers of one window share a group."""
        return ("window", self.window)


@dataclass(frozen=True, slots=True)
class ChunkedKV(FullKV):
    """Keys and values of the current chunk: key j is visible to query i when i // chunk * chunk <= j <= i.

    Raises:
        ConfigError: as FullKV, or the chunk is not positive.
    """

    chunk: int = field(kw_only=True)

    def __post_init__(self) -> None:
        FullKV.__post_init__(self)
        _check_sizes(chunk=self.chunk)

    @property
    def lifetime(self) -> tuple[Any, ...]:
        """All layers of one chunk size share a group."""
        return ("chunked", self.chunk)


@dataclass(frozen=True, slots=True)
class LatentKV(Spec):
    """One vector per slot that serves as key and value of every head (MLA): `latent_dim` elements, then `rope_dim` rotary ones.

    A slot stands for `compression` tokens. With `window` only so many last tokens are kept (None: all). `rope_dtype` is the
    rotary part's dtype (None: `dtype`). `indexer_dim` elements per slot, the indexer key, select the slots that are attended to
    (0: there are none). Indexer keys follow all vectors of the page, at `indexer_offset`.

    Scales of fp8 elements are either for each slot or at the page's end. For a slot: `scale_bytes` between its latent and its rotary
    part; or, if `byte_scales` of them are scales of a byte, behind all vectors of the page, at `slot_scales_offset`, so that a vector's length is
    that of its elements. Such a byte is a power of two's exponent, as in e8m0. And `indexer_scale_bytes`, which follow all the page's indexer keys at `indexer_scales_offset`. If these are 0, the page ends
    with two float32 scales at `scales_offset`: one for the vectors, one for the indexer keys.

    Raises:
        ConfigError: a size or the compression ratio is not positive, a dtype is unknown, or a window is compressed.
    """

    latent_dim: int
    rope_dim: int
    dtype: str
    compression: int = 1
    indexer_dim: int = 0
    window: int | None = None
    rope_dtype: str | None = None
    indexer_dtype: str | None = None
    scale_bytes: int = 0
    indexer_scale_bytes: int = 0
    byte_scales: int = 0

    def __post_init__(self) -> None:
        _check_sizes(latent_dim=self.latent_dim, compression=self.compression)
        _check_sizes(0, rope_dim=self.rope_dim, indexer_dim=self.indexer_dim)
        _check_sizes(0, scale_bytes=self.scale_bytes, indexer_scale_bytes=self.indexer_scale_bytes)
        _check_sizes(0, byte_scales=self.byte_scales)
        for name in ("dtype", "rope_dtype", "indexer_dtype"):
            _check_dtype(f"latent {name}", getattr(self, name) or self.dtype)
        if self.window is not None:
            _check_sizes(window=self.window)
            if self.compression != 1:
                raise ConfigError(
                    f"A latent layer with window={self.window} must have compression=1, got {self.compression}."
                )

    @property
    def lifetime(self) -> tuple[Any, ...]:
        """All latent layers of one compression ratio share a group; windows share theirs with other kinds of layers."""
        return ("latent", self.compression) if self.window is None else ("window", self.window)

    @property
    def quantised(self) -> bool:
        """Whether vectors are fp8 numbers that mean nothing without a scale."""
        return _is_fp8(self.dtype)

    @property
    def has_page_scales(self) -> bool:
        """Whether a page ends with the scale of its vectors and that of its indexer keys."""
        return self.quantised and not self.scale_bytes

    @property
    def zero_fresh(self) -> bool:
        """Whether the page has scales: they are read before the first write, to see whether they must grow."""
        return self.has_page_scales

    @property
    def token_multiple(self) -> int:
        """A page holds whole slots."""
        return self.compression

    @property
    def vector_bytes(self) -> int:
        """Bytes of one slot's latent and rotary part."""
        rope = self.rope_dim * KV_DTYPE_BYTES[self.rope_dtype or self.dtype]
        return self.latent_dim * KV_DTYPE_BYTES[self.dtype] + rope

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's vector with its scales."""
        return self.vector_bytes + self.scale_bytes

    @property
    def indexer_slot_bytes(self) -> int:
        """Bytes of one slot's indexer key with its scales."""
        return self.indexer_dim * KV_DTYPE_BYTES[self.indexer_dtype or self.dtype] + self.indexer_scale_bytes

    def slots(self, page_tokens: int) -> int:
        """Slots of a page.

        Raises:
            ConfigError: `page_tokens` is not a multiple of the compression ratio.
        """
        if page_tokens % self.compression:
            raise ConfigError(
                f"A page of {page_tokens} tokens doesn't hold whole slots of compression={self.compression} tokens; "
                f"take a block_size of {_round_up(page_tokens, self.compression)}."
            )
        return page_tokens // self.compression

    def slot_scales_offset(self, page_tokens: int) -> int:
        """Bytes from the layer's share of a page to its first slot's scales."""
        return (
            self.slots(page_tokens) * self.vector_bytes
            if self.byte_scales
            else self.latent_dim * KV_DTYPE_BYTES[self.dtype]
        )

    def indexer_offset(self, page_tokens: int) -> int:
        """Bytes from the layer's share of a page to its indexer keys."""
        return _round_up(self.slots(page_tokens) * self.slot_bytes, _ALIGNMENT)

    def indexer_scales_offset(self, page_tokens: int) -> int:
        """Bytes from the layer's share of a page to the scales of its indexer keys, where each slot has its own."""
        keys = self.slots(page_tokens) * (self.indexer_slot_bytes - self.indexer_scale_bytes)
        return self.indexer_offset(page_tokens) + _round_up(keys, SCALE_BYTES)

    def scales_offset(self, page_tokens: int) -> int:
        """Bytes from the layer's share of a page to its two scales (vectors, indexer keys)."""
        if not self.indexer_dim:
            return _round_up(self.slots(page_tokens) * self.slot_bytes, SCALE_BYTES)
        end = self.indexer_offset(page_tokens) + self.slots(page_tokens) * self.indexer_slot_bytes
        return _round_up(end, SCALE_BYTES)

    def page_bytes(self, page_tokens: int) -> int:
        """Vectors of all the page's slots, then indexer keys, then the scales if there are any.

        With scales it is a multiple of 16, so that the next layer's share begins where kernels can read 16 bytes at once.
        """
        if self.has_page_scales:
            return _round_up(self.scales_offset(page_tokens) + 2 * SCALE_BYTES, _ALIGNMENT)
        slots = self.slots(page_tokens)
        if not self.indexer_dim:
            return slots * self.slot_bytes
        if self.indexer_scale_bytes:
            return _round_up(self.indexer_scales_offset(page_tokens) + slots * self.indexer_scale_bytes, _ALIGNMENT)
        return self.indexer_offset(page_tokens) + slots * self.indexer_slot_bytes


@dataclass(frozen=True, slots=True)
class RecurrentState(Spec):
    """State of fixed size per request: one tensor for each of `shapes`, with the dtype of the same place in `dtypes`.

    A page is one state of every layer, whatever number of tokens it stands for. Tensors follow each other in order, each
    at a multiple of 16 bytes.

    With drafted tokens a page ends with a journal: of the last `journal` drafts what the recurrence took of each, tensors of
    `entry` in `entry_dtype` (empty: what the model computes in). Example: Qwen3-Next keeps 16.1 KiB of a draft and layer, beside a
    state of 1 MiB.

    Raises:
        ConfigError: there is no tensor, a dimension is not positive, a dtype is unknown or quantised, or a journal has no entries.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    entry: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)
    entry_dtype: str = field(default="", kw_only=True)
    journal: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ConfigError(
                f"A recurrent layer needs one dtype for each of its state tensors, got {len(self.shapes)} shapes and "
                f"{len(self.dtypes)} dtypes."
            )
        _check_sizes(0, journal=self.journal)
        if self.journal and not (self.entry and self.entry_dtype):
            raise ConfigError(
                f"A journal of {self.journal} drafts needs the shapes and the dtype of what a recurrence takes."
            )
        for shape, dtype in self.tensors:
            if not shape or min(shape) < 1:
                raise ConfigError(f"A recurrent state's dimensions must be at least 1, got {shape}.")
            _check_dtype("recurrent state dtype", dtype)
            if _is_fp8(dtype):
                raise ConfigError(f"Recurrent state can't be kept in {dtype}; take float32, bfloat16 or float16.")

    @property
    def lifetime(self) -> tuple[Any, ...]:
        """All recurrent layers share one group, whatever their sizes."""
        return ("recurrent",)

    @property
    def zero_fresh(self) -> bool:
        """True: a new request's first token continues from the page's state, which must be zero."""
        return True

    @property
    def tensors(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the states' tensors, then of the journal's."""
        journal = [((self.journal, *shape), self.entry_dtype) for shape in self.entry if self.journal]
        return [*zip(self.shapes, self.dtypes, strict=True), *journal]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Bytes from the layer's share of a page to each of `tensors`."""
        found, end = [], 0
        for size in self._sizes:
            found.append(end)
            end += _round_up(size, _ALIGNMENT)
        return tuple(found)

    @property
    def _sizes(self) -> list[int]:
        return [prod(shape) * KV_DTYPE_BYTES[dtype] for shape, dtype in self.tensors]

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of one state and its journal; `page_tokens` plays no part."""
        return self.offsets[-1] + self._sizes[-1]


def with_journal(specs: Iterable[Spec], drafts: int, dtype: str) -> tuple[Spec, ...]:
    """The specs for steps of up to `drafts` drafts a row, of a model that computes in `dtype`: recurrent layers keep a journal."""
    return tuple(
        replace(spec, journal=drafts, entry_dtype=spec.entry_dtype or dtype)
        if drafts and isinstance(spec, RecurrentState)
        else spec
        for spec in specs
    )


def _is_fp8(dtype: str) -> bool:
    return dtype.startswith("fp8")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check_sizes(least: int = 1, /, **sizes: int) -> None:
    for name, value in sizes.items():
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}.")


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in KV_DTYPE_BYTES:
        raise ConfigError(f"{name} must be one of {', '.join(KV_DTYPE_BYTES)}, got {dtype!r}.")
