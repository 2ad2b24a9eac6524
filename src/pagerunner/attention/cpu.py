"""Attention by the CPU kernels, which read page tables as a GPU's kernels do."""

from __future__ import annotations

import torch

from pagerunner.attention.capability import HEADS, Capabilities
from pagerunner.attention.paged import PagedBackend, PagedOps
from pagerunner.ops.native import paged


class CpuBackend(PagedBackend):
    """See the module. Like its base it has no state of its own."""

    name = "cpu"
    capabilities = Capabilities(
        forms=HEADS,
        compute_dtypes=frozenset({torch.float32}),
        page_dtypes=frozenset({"float32"}),
        projection=True,
        wanted=True,
        devices=frozenset({"cpu"}),
        cpu_kernels=True,
    )
    ops = PagedOps(paged.store_kv_, paged.prepare_heads_, paged.paged_attention, paged.projected_attention)
