"""The FlashInfer backends over the library itself, where it is installed. Its kernels are built first, which takes minutes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import latent_cases
from helpers.attention_cases import Case, plain, run
from pagerunner.attention.flashinfer_backend import FlashInferBackend, FlashInferLatentBackend

pytest.importorskip("flashinfer")
HALF = torch.bfloat16
STEPS = {
    "decode": (plain(1500, 1), plain(0, 1), plain(64, 1), plain(63, 1)),
    "mixed": (plain(300, 1), plain(0, 90), plain(40, 17)),
    "long": (plain(0, 700), plain(200, 300), plain(10, 1)),
}


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 4), (2, 1)])
def test_equals_attention_row_by_row(rows, kv_heads: int, group: int) -> None:
    case = Case(rows, 16, kv_heads, group, 128, gap=64, dtype=HALF, kv_dtype=HALF)
    got, want = run(case, FlashInferBackend(), "cuda")
    assert (got - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("heads", [16, 128])
def test_latents(heads: int) -> None:
    rows = tuple(latent_cases.RowCase(start, 1) for start in (1500, 0, 64, 63))
    sizes = {"key_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512, "gap": 64}
    case = latent_cases.Case(rows, page_tokens=64, heads=heads, dtype=HALF, compute=HALF, **sizes)
    for mixed in (case, replace(case, rows=(*rows, latent_cases.RowCase(30, 9)))):
        got, want = latent_cases.run(mixed, FlashInferLatentBackend(), "cuda")
        assert (got - want).norm() < 1e-2 * want.norm()
