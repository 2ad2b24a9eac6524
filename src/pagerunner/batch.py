"""ForwardBatch: the tensors of one step. Shape letters: T tokens of the step, R rows (requests), S sampled rows,
P pages of a row, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's pages of a FullKV-like group, as strided views of the arena for one step.

    `k` and `v` have shape [num_entries, page_tokens, num_kv_heads, head_dim]; index 0 is a page table entry. Views of
    different entries may overlap when the table's unit is smaller than a page: only entries found in a page table are
    pages. `scales` are those of fp8 pages, [num_entries, 2, num_kv_heads] float32: the keys' and the values'. `static` ones
    come from the checkpoint, are the same for every entry (stride 0), and are never written. Where `v` is `k`, a slot is
    one vector that serves as both. `coded`: the same pages, where such slots are in fp8 and have scales of their own; `k` has the codes alone.
    """

    group: int
    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor | None = None
    static: bool = False
    coded: LatentPages | None = None


@dataclass(frozen=True, slots=True)
class LatentPages:
    """One layer's pages of a latent group: [num_entries, storage slots of a page, latent + rope elements].

    `indexer` are the slots' indexer keys, [num_entries, storage slots, elements], where the layer has them. `scales` are
    those of fp8 pages, [num_entries, 2, 1] float32: the vectors' and the indexer keys'.

    Where fp8 slots have scales of their own, `latent` are the latents alone, [.., latent elements], `rope` the rotary parts,
    `slot_scales` the scales of a latent's blocks, [num_entries, storage slots, blocks] in float32 or as exponents (see `ops.fp8.exponents`), and
    `indexer_scales` those of the indexer keys, [num_entries, storage slots] in float32.
    """

    group: int
    latent: torch.Tensor
    scales: torch.Tensor | None = None
    indexer: torch.Tensor | None = None
    rope: torch.Tensor | None = None
    slot_scales: torch.Tensor | None = None
    indexer_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StatePages:
    """One layer's recurrent state, by page table entry: one tensor [num_entries, *shape] for each declared shape.

    `journal`: what the recurrence took of a row's last drafts, one tensor [num_entries, drafts, ..] for each of its inputs; none
    where there are no drafts. The state is that before the first of them.
    """

    group: int
    states: tuple[torch.Tensor, ...]
    journal: tuple[torch.Tensor, ...] = ()


LayerMemory = KVPages | LatentPages | StatePages


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step as kernels see them, the same for every group. Integers are int32 unless said.

    A step that runs in a graph has the graph's shapes: rows beyond its own have `seq_lens_R` 0 and no tokens, tokens
    beyond its own have `row_T` -1 (and position 0). `max_query_len` and `max_seq_len` are host bounds; in a graph they hold
    for every replay. `one_token`: no row has more than one token, and token t belongs to row t.

    `stride`: 0, or every row has room for so many tokens, and token t belongs to row t // stride (a *strided* batch, for rows with draft
    tokens). A row's tokens that aren't there come last; they are like tokens of padding. `one_token` is False. Kernels for strided batches
    take a token's place from `positions_T`, and whether it is there from `row_T`. All tokens that are there have pages, as any of them may
    become the row's last. Example: of two rows with stride 4 the first may have 4 tokens and the second 2; `row_T` is 0, 0, 0, 0, 1, 1,
    -1, -1.

    `accepted_R` of a row that generates: so many drafts of its last step were taken. Its first token is certain, the others are drafts.
    It is -1 of a row that computes a prompt, all of whose tokens are certain. Where it is None, all tokens of all rows are.
    """

    slots_R: torch.Tensor
    query_start_R1: torch.Tensor  # [R + 1]; rows without tokens repeat the value
    seq_lens_R: torch.Tensor  # tokens in the sequence, this step's included
    row_T: torch.Tensor
    positions_T: torch.Tensor  # int64
    max_query_len: int
    max_seq_len: int
    one_token: bool
    stride: int = 0
    accepted_R: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        slots: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> StepRows:
        """The rows of a step from host lists of the same length."""
        query_start = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        row_T = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)
        first_R = np.array(seq_lens, dtype=np.int64) - query_start[1:]
        positions_T = np.arange(len(row_T), dtype=np.int64) + np.repeat(first_R, query_lens)
        return cls(
            slots_R=torch.from_numpy(np.array(slots, dtype=np.int32)).to(device),
            query_start_R1=torch.from_numpy(query_start).to(device),
            seq_lens_R=torch.from_numpy(np.array(seq_lens, dtype=np.int32)).to(device),
            row_T=torch.from_numpy(row_T).to(device),
            positions_T=torch.from_numpy(positions_T).to(device),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            one_token=max(query_lens) == 1 and min(query_lens) == 1,
        )

    def of_tokens(self, tokens_S: torch.Tensor) -> StepRows:
        """One row for each of the tokens at the places `tokens_S` in T: the token, after all tokens before it. Padding stays padding."""
        positions_S, row_S = self.positions_T.index_select(0, tokens_S), self.row_T.index_select(0, tokens_S)
        count = torch.arange(len(tokens_S) + 1, dtype=torch.int32, device=tokens_S.device)
        return StepRows(
            slots_R=self.slots_R.index_select(0, row_S.clamp(min=0)),
            query_start_R1=count,
            seq_lens_R=(positions_S + 1).to(torch.int32).mul_(row_S >= 0),
            row_T=torch.where(row_S < 0, row_S, count[:-1]),
            positions_T=positions_S,
            max_query_len=1,
            max_seq_len=self.max_seq_len,
            one_token=True,
        )

    @property
    def num_rows(self) -> int:
        """R, padding included."""
        return int(self.slots_R.shape[0])

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return int(self.row_T.shape[0])


class WritePlaces(NamedTuple):
    """Where tokens go, [T] int64: token t to page `entry[t]`, token slot `offset[t]`.

    An entry of -1 means that no later step reads the token, and it is not stored.
    """

    entry_T: torch.Tensor
    offset_T: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What the rows of one step need of one memory group.

    `page_table`: the group's table of all slots, [slots, W] int64 entries: page n of row r is at [rows.slots_R[r], n % W].
    `write`: where the step's tokens go.
    `plan`: what the group's attention backend planned for this step; only that backend reads it.
    """

    page_table: torch.Tensor
    write: WritePlaces
    page_tokens: int
    backend: Any
    plan: Any


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's inputs. Rows are in plan order; a row's tokens are adjacent.

    `last_alone`: only the hidden states of `logits_index`' tokens are needed. A model may then return these alone, [S, D],
    instead of all, [T, D]. `most_tokens`: as many as the fullest of several teams of ranks has in this step, 0 where there is one team, or where all
    have T. Mixtures of experts gather so many of each team. `adapters` are those of the T tokens (`Adapters` in `ops/lora.py`); None: no row of the step has one.
    """

    token_ids: torch.Tensor  # [T] int64
    rows: StepRows
    logits_index: torch.Tensor  # [S] int64, positions in T whose logits are needed
    groups: tuple[GroupBatch, ...]
    kv: tuple[LayerMemory, ...]  # by layer index
    last_alone: bool = False
    most_tokens: int = 0
    adapters: Any = None

    @property
    def wanted_S(self) -> torch.Tensor | None:
        """The tokens whose hidden states are needed, by their places in T; None: those of all."""
        return self.logits_index if self.last_alone else None

    @property
    def positions(self) -> torch.Tensor:
        """[T] int64: each token's place in its sequence."""
        return self.rows.positions_T
