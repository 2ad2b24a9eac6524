"""What layers ask of attention backends: one call per kind of memory, all of them run by `AttentionBackend.run`.

A call holds one layer's inputs for one step, and the layer's pages. Calls are made by `layers/`, once per layer and step.

Shape letters: T tokens of the step, S wanted tokens, N heads of a projection or slots that the step completes, H query
heads, K key/value heads, D head size, V size of a value head, L elements of a latent and its rotary part, I indexer key
size, J indexer heads, B rows, C latent size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from pagerunner.batch import GroupBatch, KVPages, LatentPages, StatePages, StepRows
from pagerunner.ops.latent_heads import LatentPrep
from pagerunner.ops.linear import Norm
from pagerunner.ops.paged_attention import HeadPrep, Scores
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.state_rows import StateRows

Result = tuple[torch.Tensor, torch.Tensor]  # attention and the log-sum-exp of its scores (float32)
Tensors = tuple[torch.Tensor, ...]


class Heads(NamedTuple):
    """Queries, keys and values, ready for attention: normed and rotated. A backend may round k and v in place."""

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor


class Projection(NamedTuple):
    """A projection's raw output and what makes heads of it. A backend changes `qkv` in place."""

    qkv_TND: torch.Tensor
    prep: HeadPrep


class AttentionCall(NamedTuple):
    """Causal softmax attention over keys and values in pages: store the step's keys and values, then attend; [T, H, V].

    `inputs` is a Projection only for backends that declare `projection`. `wanted`: the tokens
    whose attention is asked for, [S, H, V] (None: all); only for backends that declare `wanted`. All tokens are stored anyway.
    `lse_TH`: float32 memory for the log-sum-exp of each token's scores, for a caller that merges; only if `pages` hold one
    vector per token. A token whose `group.write.entry_T` is -1 has no page, so only its own step's queries see it.
    """

    inputs: Heads | Projection
    pages: KVPages
    group: GroupBatch
    rows: StepRows
    scores: Scores
    wanted: torch.Tensor | None = None
    lse_TH: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class UpProjection:
    """A layer's weights from latents to keys and values, one head after another: [H * (N + V), C]; N elements of a key
    have no rotary position.
    """

    weight: torch.Tensor
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def latent_dim(self) -> int:
        """C."""
        return int(self.weight.shape[1])

    @property
    def _weight_HUC(self) -> torch.Tensor:
        return self.weight.view(self.num_heads, self.key_dim + self.value_dim, self.latent_dim)

    @property
    def keys_HNC(self) -> torch.Tensor:
        """From latents to keys without rotary parts."""
        return self._weight_HUC[:, : self.key_dim]

    @property
    def values_HVC(self) -> torch.Tensor:
        """From latents to values."""
        return self._weight_HUC[:, self.key_dim :]

    def absorb(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Queries against vectors, [T, H, L]."""
        latent_HTC = torch.bmm(q_THD[..., : self.key_dim].transpose(0, 1), self.keys_HNC)
        return torch.cat((latent_HTC.transpose(0, 1), q_THD[..., self.key_dim :]), -1)

    def values(self, latent_THC: torch.Tensor) -> torch.Tensor:
        """Weighted latents as values, [T, H, V]."""
        return torch.bmm(latent_THC.transpose(0, 1), self.values_HVC.transpose(1, 2)).transpose(0, 1)

    def expand(self, vectors_SL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Every head's keys [S, H, D] and values [S, H, V]."""
        both_SHU = F.linear(vectors_SL[:, : self.latent_dim], self.weight).unflatten(-1, (self.num_heads, -1))
        rope_SHR = vectors_SL[:, None, self.latent_dim :].expand(-1, self.num_heads, -1)
        return torch.cat((both_SHU[..., : self.key_dim], rope_SHR), -1), both_SHU[..., self.key_dim :]

    def absorbs(self, queries: int) -> bool:
        """Whether `queries` over the same slots multiply less in the latent space than over expanded slots."""
        expansion = (self.key_dim + self.value_dim) * self.latent_dim
        return queries * (2 * self.latent_dim - self.key_dim - self.value_dim) <= expansion


@dataclass(frozen=True, slots=True)
class IndexerQueries:
    """Queries that choose slots: a slot's score is the sum over heads of `weight * relu(query . key)`.

    The best `top_k` slots are seen.
    """

    q_TJI: torch.Tensor
    weights_TJ: torch.Tensor
    top_k: int


class LatentCall(NamedTuple):
    """Multi-head latent attention: store every token's vector (latent, then rotary part), then attend causally; [T, H, V].

    A query's last elements are its rotary ones. All vectors, this step's too, take part rounded as
    pages hold them. So a narrower page dtype doesn't make results depend on how a prompt is divided into steps.

    `prep`: queries and vectors are raw, and this makes them ready. Only for backends that declare `projection`; they may change
    both in place.

    With a `chooser` (DeepSeek-V3.2) also store every token's indexer key, and let each query attend to what the indexer chooses alone.
    """

    q_THD: torch.Tensor
    vectors_TL: torch.Tensor
    up: UpProjection
    pages: LatentPages
    group: GroupBatch
    rows: StepRows
    scale: float
    prep: LatentPrep | None = None
    chooser: IndexerQueries | None = None
    index_keys_TI: torch.Tensor | None = None


class CompressedCall(NamedTuple):
    """Attention over slots that stand for several tokens; [T, H, D].

    Store the slots that the step completes (`CompletedSlots.completed` of the group's plan). Let each query attend to the slots
    that are complete by its position. Merge with the result of `window`, if there is one.
    """

    q_THD: torch.Tensor
    window: Result | None
    vectors_ND: torch.Tensor
    index_keys_NI: torch.Tensor | None
    chooser: IndexerQueries | None
    pages: LatentPages
    group: GroupBatch
    rows: StepRows
    scores: Scores


class SlotsInput(NamedTuple):
    """What a layer's slots are made of, and its memory of them: pooled numbers by token [T, X], vectors' and indexer keys' (see
    `ops.slot_pooling`), the norms of both, and the angles of each token's slot.
    """

    pooled_TX: torch.Tensor
    norms: tuple[Norm, ...]
    angles: RopeAngles
    chooser: IndexerQueries | None
    pages: LatentPages
    group: GroupBatch


class VectorsCall(NamedTuple):
    """Attention to a window's vectors and, beside it, slots, in one pass: `CompressedCall` for backends that declare `merged`; [T, H, D].

    Queries and vectors are raw, and are changed in place. The result is turned back by `angles`.
    """

    q_THD: torch.Tensor
    vectors_TD: torch.Tensor
    norm: Norm
    angles: RopeAngles
    pages: KVPages
    group: GroupBatch
    slots: SlotsInput | None
    rows: StepRows
    scale: float
    sinks_H: torch.Tensor


class CompletedSlots(Protocol):
    """What the plan of a group of compressed latents says to the layers, whatever the backend."""

    def completed(self, ratio: int) -> torch.Tensor:
        """Indices of the step's tokens that complete a slot of `ratio` tokens, [N]."""


class Recurrence(Protocol):
    """What one layer computes from its inputs and state. States are in the order of the layer's spec."""

    def rows(self, inputs: Tensors, memory: StatePages, rows: StateRows) -> torch.Tensor:
        """All rows of a step: inputs [T, ..] to outputs [T, ..], states and journals being read from and written to `memory`.

        A journal keeps the first inputs, as many as it has tensors.
        """


@runtime_checkable
class SteppedRecurrence(Recurrence, Protocol):
    """A recurrence that backends may lead from token to token."""

    def step(self, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """One token of B rows: inputs [B, ..] and states [B, *shape] to outputs [B, ..] and new states."""

    def chunks(self, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Tokens of one row: inputs [T, ..] and states [*shape] to outputs [T, ..] and new states."""


@runtime_checkable
class NativeRecurrence(Protocol):
    """A recurrence that has CPU kernels."""

    def one_token(self, inputs: Tensors, pages: Tensors, table_SX: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """Rows of one token each: inputs [T, ..] to outputs [T, ..], states being read from and written to `pages`. All is float32."""


class RecurrentCall(NamedTuple):
    """Run every row from its state on, save the states that the plan was asked for, and write the last ones back; [T, ..]."""

    recurrence: Recurrence
    inputs: Tensors
    pages: StatePages
    group: GroupBatch
    rows: StepRows
