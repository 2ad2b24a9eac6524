"""What one layer keeps between steps. A spec knows its bytes and its lifetime, and nothing about configuration.

A new kind of memory is a new spec here plus a rule in `rules.py`; the planner, the pool, the prefix index, the manager
and the scheduler only use the members of `Spec`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from pagerunner.config import DTYPE_BYTES
from pagerunner.errors import ConfigError


class Spec(Protocol):
    """One layer's memory."""

    @property
    def kind(self) -> str:
        """The name of the rule that the layer's pages live by, a key of `rules.RULES`."""

    @property
    def lifetime(self) -> Hashable:
        """Layers with equal lifetimes share a group and its page table."""

    @property
    def zero_fresh(self) -> bool:
        """Whether a kernel may read a fresh page before it writes it, so that the page must be zeroed."""

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of this layer's share of a page of `page_tokens` tokens."""


@dataclass(frozen=True, slots=True)
class FullKV:
    """Keys and values of every token of a request, kept until the request ends.

    `head_dim_v` is the size of a value head where it differs from a key head's (None: equal). Kernels mask: they never
    read a token slot that has not been written.

    Raises:
        ConfigError: a size is not positive, or the dtype is unknown.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "head_dim_v"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"kv dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}.")

    @property
    def kind(self) -> str:
        """The rule `full`."""
        return "full"

    @property
    def lifetime(self) -> Hashable:
        """All full layers share one group, whatever their sizes."""
        return ("full",)

    @property
    def zero_fresh(self) -> bool:
        """False: kernels mask what has not been written."""
        return False

    @property
    def value_dim(self) -> int:
        """Elements of one value head."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * DTYPE_BYTES[self.dtype]

    def page_bytes(self, page_tokens: int) -> int:
        """Keys of all the page's tokens, then values."""
        return page_tokens * self.bytes_per_token
