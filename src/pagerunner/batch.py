"""ForwardBatch: the tensors of one step. Shape letters: T tokens of the step, R rows (requests), S sampled rows,
P pages of a row, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pagerunner.types import StateSave


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's pages of a FullKV-like group, as strided views of the arena for one step.

    `k` and `v` have shape [num_entries, page_tokens, num_kv_heads, head_dim]; index 0 is a page table entry. Views of
    different entries may overlap when the table's unit is smaller than a page: only entries found in a page table are
    pages. `scales` are those of fp8 pages, [num_entries, 2] float32: the keys' and the values'. `static` ones come from the
    checkpoint, are the same for every entry (stride 0), and are never written. Where `v` is `k`, a slot is one vector that
    serves as both.
    """

    group: int
    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor | None = None
    static: bool = False


@dataclass(frozen=True, slots=True)
class LatentKV:
    """One layer's pages of a latent group: [num_entries, storage slots of a page, latent + rope elements].

    `indexer` are the slots' indexer keys, [num_entries, storage slots, elements], where the layer has them. `scales` are
    those of fp8 pages, [num_entries, 2] float32: the vectors' and the indexer keys'.
    """

    group: int
    latent: torch.Tensor
    scales: torch.Tensor | None = None
    indexer: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RecurrentKV:
    """One layer's recurrent state, by page table entry: one tensor [num_entries, *shape] for each declared shape."""

    group: int
    states: tuple[torch.Tensor, ...]


LayerMemory = LayerKV | LatentKV | RecurrentKV


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What the rows of one step need of one memory group.

    `page_table`: [R, P] int64 entries, padded with 0 beyond a row's pages (never read). Column 0 is the row's page
    number `first_page[r]`: 0 in groups that keep everything, the first page still held in window groups.
    `write_entry`, `write_offset`: [T] int64; token t goes to page `write_entry[t]`, token slot `write_offset[t]`. An
    entry of -1 means that no later step reads the token, and it is not stored.
    `metadata`: what the group's attention backend planned for this batch; only that backend reads it.
    """

    page_table: torch.Tensor
    first_page: torch.Tensor  # [R] int64
    write_entry: torch.Tensor
    write_offset: torch.Tensor
    page_tokens: int
    backend: Any
    metadata: Any


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's inputs. Rows are in plan order; a row's tokens are adjacent.

    `query_lens` and `seq_lens` are host copies (ints per row) of what the tensors say: tokens run this step, and tokens
    in the sequence including them.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start: torch.Tensor  # [R + 1] int64
    logits_index: torch.Tensor  # [S] int64, positions in T whose logits are needed
    query_lens: list[int]
    seq_lens: list[int]
    groups: tuple[GroupBatch, ...]
    kv: tuple[LayerMemory, ...]  # by layer index
    state_saves: tuple[StateSave, ...] = ()
