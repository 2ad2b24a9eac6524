"""Windows of vectors and slots beside them (DeepSeek-V4), by kernels that read page tables on the device, so it runs in graphs.

One instance serves a group of windows or a group of slots. The window's runs the layer's call. See `ops.vectors_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import VectorsCall
from pagerunner.attention.capability import FLOATS, WINDOW_VECTORS, Capabilities
from pagerunner.ops.indexer_heads import is_mixed
from pagerunner.ops.slot_pooling import store_slots_
from pagerunner.ops.sparse_latents import Latents, held_in_fp8
from pagerunner.ops.vectors_attention import Choice, Slots, Window, prepare_vectors_, vectors_attention

SHARED_MEMORY = 163_840, 147_456
"""Bytes of Triton's largest program, in half precision and in float32. Gluon's are for Hopper, which has 227 KiB."""


@dataclass(frozen=True, slots=True)
class VectorsPlan:
    """How far back a group's windows reach (0: it has slots), and what its layers share."""

    window: int
    scratch: dict[Any, Any] = field(default_factory=dict)


class PagedVectorsBackend:
    """See the module. It has no state of its own: an instance may serve any number of groups."""

    name = "paged_vectors"
    capabilities = Capabilities(
        forms=frozenset({WINDOW_VECTORS, "compressed"}),
        compute_dtypes=FLOATS,
        page_dtypes=frozenset({"float32", "bfloat16", "float16"}),
        merged=True,
        slot_scales=frozenset({WINDOW_VECTORS, "compressed"}),
        graphs=True,
        drafts=True,
        triton=True,
        shared_memory=SHARED_MEMORY,
    )

    def new_state(self, shape: GraphShape | None) -> None:
        """None: it keeps nothing of a step."""

    def plan(self, inputs: PlanInputs, state: None) -> VectorsPlan:
        """The device finds everything that differs between steps."""
        return VectorsPlan(0 if inputs.reach is None else inputs.reach.size)

    def run(self, call: VectorsCall) -> torch.Tensor:
        """See VectorsCall."""
        group, given, rows = call.group, call.slots, call.rows
        coded, plan = held_in_fp8(call.pages.coded), group.plan
        pages = coded[0] if coded else call.pages.k.squeeze(2)
        prepare_vectors_(call.q_THD, call.vectors_TD, call.norm, call.angles, pages, group.write)
        slots = None
        if given is not None:
            latent, keys, own = given.pages.latent, given.pages.indexer, given.group
            ratio, chosen = own.page_tokens // latent.shape[1], None
            plain = (latent,) if keys is None else (latent, keys)
            both: tuple[torch.Tensor | Latents, ...] = held_in_fp8(given.pages) or plain
            where = (rows.positions_T, own.write)
            store_slots_(given.pooled_TX, given.norms, both, given.angles, *where, ratio, is_mixed(given.pages))
            if given.chooser is not None and keys is not None:
                query = given.chooser
                by = (query.q_TJI, query.weights_TJ, query.top_k, keys)
                chosen = Choice(*by, given.pages.indexer_scales, own.plan.scratch)
            slots = Slots(both[0], own.page_table, ratio, chosen)
        window = Window(call.vectors_TD, pages, group.page_table, plan.window)
        return vectors_attention(call.q_THD, window, slots, rows, call.scale, call.sinks_H, call.angles)
