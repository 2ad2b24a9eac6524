"""Latent attention to what an indexer chooses (DeepSeek-V3.2). Its kernels read page tables on the device, so it runs in graphs.

Every token is a query in the latent space. Its indexer scores all slots of its row, the best are chosen, and it attends to these
(`ops/indexer.py`, `ops/sparse_latents.py`). Where no row of a step may have more tokens than are chosen, attention is that of
`attention.paged_mla`, unless slots have scales of their own.

Shape letters: see `attention.paged_mla`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pagerunner.attention.calls import LatentCall
from pagerunner.attention.paged_mla import LatentPlan, PagedLatentBackend, absorb
from pagerunner.ops.indexer import choose_slots
from pagerunner.ops.latent_attention import store_latent_
from pagerunner.ops.latent_heads import absorb_latent_heads_
from pagerunner.ops.sparse_latents import Latents, chosen_values, store_slots_


class PagedSparseBackend(PagedLatentBackend):
    """See the module. It has no state of its own: an instance may serve any number of groups."""

    name = "paged_sparse_mla"
    capabilities = replace(
        PagedLatentBackend.capabilities,
        forms=frozenset({"chosen"}),
        page_dtypes=frozenset({"float32", "bfloat16", "float16"}),
        slot_scales=True,
    )

    def run(self, call: LatentCall) -> torch.Tensor:
        """See LatentCall."""
        q_THD, vectors_TL, up, memory, group, rows, scale, prep, chooser, keys_TI = call
        plan: LatentPlan = group.plan
        assert chooser is not None and keys_TI is not None and memory.indexer is not None, "no indexer"
        where, pages = (group.write_entry, group.write_offset), memory.latent
        if memory.rope is not None:
            held = Latents(pages, memory.rope, memory.slot_scales)
            if prep is not None:
                prep.apply_(q_THD, vectors_TL)
            assert memory.indexer_scales is not None
            store_slots_(vectors_TL, keys_TI, held, memory.indexer, memory.indexer_scales, *where)
            q_THC = absorb(q_THD, up)
        else:
            store_latent_(keys_TI, memory.indexer, *where)
            if rows.max_seq_len <= chooser.top_k:
                return super().run(call)
            held = Latents(pages[..., : up.latent_dim], pages[..., up.latent_dim :])
            if prep is None:
                store_latent_(vectors_TL, pages, *where)
                q_THC = absorb(q_THD, up)
            else:
                q_THC = absorb_latent_heads_(
                    q_THD, vectors_TL, prep, up.keys_HNC, pages, *where, most_of_page=rows.stride
                )
        choice = chooser.q_TJI, chooser.weights_TJ, chooser.top_k, memory.indexer, group.page_table, rows, 1
        chosen_TK = choose_slots(*choice, plan.scratch, memory.indexer_scales)
        q_THP = q_THD[..., up.key_dim :]
        return chosen_values(q_THC, q_THP, held, group.page_table, rows, chosen_TK, scale, up.values_HVC, plan.scratch)
