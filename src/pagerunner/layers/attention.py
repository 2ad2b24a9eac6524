"""The step between projections and attention backend: a layer's call is made here, and run by the group's backend.

Shape letters: T tokens, S wanted tokens, N heads of a projection, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch

from pagerunner.attention.calls import AttentionCall, Heads, Projection
from pagerunner.attention.capability import SINKS
from pagerunner.batch import ForwardBatch, GroupBatch, KVPages
from pagerunner.layers.cuts import Features, by_outputs
from pagerunner.layers.linear import FusedLinear
from pagerunner.ops.paged_attention import HeadPrep, PagedPlan, Scores, takes_parts


def head_projection(
    features: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, bias: bool
) -> FusedLinear:
    """Query, key and value heads of one input side by side, [T, (H + 2 K) D]."""
    parts = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
    own, shared = by_outputs(query_heads(num_heads), head_dim), by_outputs(kv_heads(num_kv_heads), head_dim)
    cuts = {"q_proj": own, "k_proj": shared, "v_proj": shared}
    return FusedLinear(features, parts, dtype, bias=bias, cuts=cuts)


def query_heads(count: int) -> Features:
    """Query heads, as devices divide them."""
    return Features("heads", count, even=True)


def kv_heads(count: int) -> Features:
    """Key/value heads, as devices divide them: those of a device's query heads, which other devices may have too."""
    return Features("kv_heads", count, even=True, repeated=True)


class PagedAttention:
    """Attention of one layer over its pages, by whatever backend the batch's memory group has planned."""

    def __init__(self, layer_index: int, scale: float, softcap: float = 0.0) -> None:
        self.layer_index = layer_index
        self.scores = Scores(scale, softcap)

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        batch: ForwardBatch,
        sinks_H: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write k and v into the layer's pages, and return the attention of q over each token's sequence so far.

        With `wanted` [S], tokens by their places in T, only these are attended to, [S, H, D]; all are stored.
        """
        return self._run(Heads(q_THD, k_TKD, v_TKD), batch, sinks_H, wanted)

    def from_projection(
        self,
        qkv_TND: torch.Tensor,
        prep: HeadPrep,
        batch: ForwardBatch,
        sinks_H: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Prepare the heads of a projection's output [T, H + 2 K, D] in place, then as `__call__`. It may come as float32 sums [P, T, H + 2 K, D]."""
        if qkv_TND.dim() == 4:
            prep, like = prep._replace(parts_PTND=qkv_TND), prep.angles.cos_T1D
            qkv_TND = like.new_empty(like.shape[0], *qkv_TND.shape[2:])
        group = batch.groups[batch.kv[self.layer_index].group]
        takes_it = group.backend.capabilities.projection
        return self._run(
            Projection(qkv_TND, prep) if takes_it else Heads(*prep.apply_(qkv_TND)), batch, sinks_H, wanted
        )

    def takes_parts(self, prep: HeadPrep, batch: ForwardBatch) -> bool:
        """Whether `from_projection` gains by a projection's output that is still to be added up."""
        pages = batch.kv[self.layer_index]
        assert isinstance(pages, KVPages), "the layer's memory is not keys and values"
        plan = batch.groups[pages.group].plan
        return isinstance(plan, PagedPlan) and takes_parts(batch.rows.slots_R, prep, pages, batch.rows, plan)

    def _run(
        self, inputs: Heads | Projection, batch: ForwardBatch, sinks_H: torch.Tensor | None, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        pages = batch.kv[self.layer_index]
        assert isinstance(pages, KVPages), "the layer's memory is not keys and values"
        group = batch.groups[pages.group]
        scores = self.scores if sinks_H is None else self._with_sinks(sinks_H, group)
        alone = wanted if group.backend.capabilities.wanted else None
        out: torch.Tensor = group.backend.run(AttentionCall(inputs, pages, group, batch.rows, scores, alone))
        return out if wanted is alone else out.index_select(0, wanted)

    def _with_sinks(self, sinks_H: torch.Tensor, group: GroupBatch) -> Scores:
        """Raise if the model's config didn't name sinks: then a backend was chosen that would ignore them.

        This is a bug of ours.
        """
        if SINKS not in group.backend.capabilities.scores:
            raise RuntimeError(
                f"Layer {self.layer_index} has sinks, which {group.backend.name} doesn't compute; `attention_scores` of the "
                "model's config must name them."
            )
        return self.scores._replace(sinks_H=sinks_H)
