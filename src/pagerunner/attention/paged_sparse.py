"""Latent attention to what an indexer chooses (DeepSeek-V3.2). Its kernels read page tables on the device, so it runs in graphs.

Every token is a query in the latent space. Its indexer scores all slots of its row, the best are chosen, and it attends to these
(`ops/indexer.py`, `ops/sparse_latents.py`). Where no row of a step may have more tokens than are chosen, attention is that of
`attention.paged_mla`, unless slots have scales of their own.

Shape letters: see `attention.paged_mla`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from pagerunner.attention.calls import IndexerQueries, LatentCall
from pagerunner.attention.paged_mla import LatentPlan, PagedLatentBackend, absorb
from pagerunner.ops.indexer import choose_slots, equal_parts
from pagerunner.ops.latent_attention import store_latent_
from pagerunner.ops.latent_heads import prepare_latent_heads_
from pagerunner.ops.sparse_latents import Latents, absorb_slots_, chosen_values, store_slots_

SHARED_MEMORY = (231_936, 148_480)  # bytes that the largest program takes, in half precision and in float32
MOST_TOKENS = 1024  # whose queries in the latent space exist at once: 128 MiB of them with 128 heads in half precision


class PagedSparseBackend(PagedLatentBackend):
    """See the module. It has no state of its own: an instance may serve any number of groups."""

    name = "paged_sparse_mla"
    capabilities = replace(
        PagedLatentBackend.capabilities,
        forms=frozenset({"chosen"}),
        page_dtypes=frozenset({"float32", "bfloat16", "float16"}),
        slot_scales=frozenset({"chosen"}),
        shared_memory=SHARED_MEMORY,
    )

    def run(self, call: LatentCall) -> torch.Tensor:
        """See LatentCall."""
        q_THD, vectors_TL, up, memory, group, rows, _, prep, chooser, keys_TI = call
        plan: LatentPlan = group.plan
        assert chooser is not None and keys_TI is not None and memory.indexer is not None, "no indexer"
        where, pages, q_THC = group.write, memory.latent, None
        few = rows.num_tokens <= MOST_TOKENS or rows.stride > 0 or rows.one_token
        if memory.rope is not None:
            held = Latents(pages, memory.rope, memory.slot_scales)
        elif rows.max_seq_len <= chooser.top_k:
            store_latent_(keys_TI, memory.indexer, where)
            return super().run(call)
        else:
            held = Latents(pages[..., : up.latent_dim], pages[..., up.latent_dim :])
        if prep is not None and few:
            own = keys_TI, held, memory.indexer, memory.indexer_scales, where
            q_THC = absorb_slots_(q_THD, vectors_TL, prep, up.keys_HNC, *own)
        elif memory.indexer_scales is not None:
            if prep is not None:
                prep.apply_(q_THD, vectors_TL)
            store_slots_(vectors_TL, keys_TI, held, memory.indexer, memory.indexer_scales, where)
        else:
            store_latent_(keys_TI, memory.indexer, where)
            if prep is None:
                store_latent_(vectors_TL, pages, where)
            else:
                prepare_latent_heads_(q_THD, vectors_TL, prep, pages, where)
        if few:
            beside = q_THC is not None
            return _attend(call, held, q_THC if beside else absorb(q_THD, up), plan.scratch, beside)
        out_THV = q_THD.new_empty(q_THD.shape[0], up.num_heads, up.value_dim)
        for first, last in pairwise(equal_parts(rows.num_tokens, MOST_TOKENS)):
            part = slice(first, last)
            some = replace(rows, row_T=rows.row_T[part], positions_T=rows.positions_T[part])
            queries = IndexerQueries(chooser.q_TJI[part], chooser.weights_TJ[part], chooser.top_k)
            one = call._replace(q_THD=q_THD[part], rows=some, chooser=queries)
            out_THV[part] = _attend(one, held, absorb(q_THD[part], up), {})
        return out_THV


def _attend(
    call: LatentCall, held: Latents, q_THC: torch.Tensor, scratch: dict[Any, Any], beside: bool = False
) -> torch.Tensor:
    """Attention of tokens, `q_THC` in the latent space, to what their indexer queries choose. All is in pages. `beside`: see `choose_slots`."""
    chooser, memory, table, up = call.chooser, call.pages, call.group.page_table, call.up
    assert chooser is not None and memory.indexer is not None
    choice = chooser.q_TJI, chooser.weights_TJ, chooser.top_k, memory.indexer, table, call.rows, 1
    chosen_TK = choose_slots(*choice, scratch, memory.indexer_scales, beside=beside)
    q_THP = call.q_THD[..., up.key_dim :]
    return chosen_values(q_THC, q_THP, held, table, call.rows, chosen_TK, call.scale, up.values_HVC, scratch)
