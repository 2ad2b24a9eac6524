"""What a page's bytes mean, for every kind of memory: a page is filled with counted numbers, and its digest is known.

Pages outlive the program that wrote them: on a disk, and in other engines of another version. A page's key says nothing of how its bytes are laid out.
PAGE_FORMAT does, as a part of the disk tier's fingerprint and of what peers compare.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from pagerunner.attention.compressed import _SlotWriter
from pagerunner.attention.kv_store import store_pages
from pagerunner.batch import GroupBatch, KVPages, StepRows, WritePlaces
from pagerunner.engine.startup.exchange import PAGE_FORMAT
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.rules import RULES
from pagerunner.memory.specs import ChunkedKV, FullKV, LatentKV, RecurrentState, Spec, WindowKV
from pagerunner.ops.causal_conv import causal_conv_rows
from pagerunner.ops.gdn import gated_delta_rows
from pagerunner.ops.latent_attention import store_latent_
from pagerunner.ops.latent_heads import LatentPrep, prepare_latent_heads_
from pagerunner.ops.linear import Norm
from pagerunner.ops.mamba2 import mamba2_rows
from pagerunner.ops.paged_attention import HeadPrep, prepare_heads_, store_kv_
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.sparse_latents import Latents, held_in_fp8, store_slots_
from pagerunner.ops.state_rows import StateRows
from pagerunner.ops.vectors_attention import prepare_vectors_
from pagerunner.runner.pages import Pages

TOKENS = 4
DELTA = RecurrentState(((2, 12), (2, 4, 2)), ("float32", "float32"))
MAMBA = RecurrentState(((2, 12), (2, 2, 4)), ("float32", "float32"))
SPECS = (
    FullKV(2, 8, "bfloat16"),
    FullKV(2, 8, "float32", head_dim_v=4),
    FullKV(2, 8, "fp8_e4m3"),
    FullKV(2, 8, "fp8_e4m3", static_scales=True),
    WindowKV(2, 8, "fp8_e5m2", window=8),
    ChunkedKV(2, 8, "float16", chunk=8),
    LatentKV(8, 4, "bfloat16"),
    LatentKV(8, 4, "fp8_e4m3"),
    LatentKV(8, 4, "fp8_e4m3", compression=2, indexer_dim=4),
    LatentKV(8, 4, "float32", window=8),
    DELTA,
    MAMBA,
    LatentKV(8, 4, "fp8_e4m3", rope_dtype="bfloat16", indexer_dim=4, scale_bytes=8, indexer_scale_bytes=4),
    LatentKV(
        8, 4, "fp8_e4m3", rope_dtype="bfloat16", indexer_dim=4, scale_bytes=8, indexer_scale_bytes=4, byte_scales=2
    ),
    LatentKV(8, 4, "fp8_e4m3", rope_dtype="bfloat16", scale_bytes=8, byte_scales=2, window=8),
)
DIGESTS: dict[int, tuple[str, ...]] = {
    1: (
        "c2677d16b0bfa76b",
        "da57c9771ba3c329",
        "93ca547659f2675d",
        "e57eed23ecd83cf0",
        "4c47e4cdbd59b90e",
        "ce75083d4bc8e82c",
        "b7bf1d7390864f8d",
        "c0e384e762701806",
        "c419cf81eed30fcc",
        "ecabaa5f6a14cd8b",
        "f213889af3550ac8",
        "244629b0a466bc7a",
        "876b46c634ff88db",
        "5739a16eba756d92",
        "d2e672dcf926cd7b",
    )
}
"""Of these specs' pages, by page format."""


def counted(*shape: int) -> torch.Tensor:
    """Whole numbers that every dtype of pages holds exactly, no two neighbours alike."""
    return (torch.arange(torch.Size(shape).numel()) * 5 % 13 + 1).float().view(shape)


def quarter_turn(size: int) -> RopeAngles:
    """Angles that put each half in the other's place."""
    sines = torch.cat((-torch.ones(size // 2), torch.ones(size // 2)))
    return RopeAngles(torch.zeros(TOKENS, 1, size), sines.expand(TOKENS, 1, size).contiguous())


def fill_heads(spec: FullKV, layer: KVPages, write: WritePlaces) -> None:
    if spec.head_dim != spec.value_dim:
        keys, values = counted(TOKENS, 2, spec.head_dim), -counted(TOKENS, 2, spec.value_dim)
        return store_kv_.twin(keys, values, layer, write)
    qkv = torch.cat((counted(TOKENS, 4, 8), -counted(TOKENS, 2, 8)), 1)  # two queries, two keys, two values
    prepare_heads_.twin(qkv, HeadPrep(2, 2, quarter_turn(8)), layer, write)


def fill_latents(spec: LatentKV, layer: Any, write: WritePlaces) -> None:
    if spec.window is not None and spec.scale_bytes:
        norm, angles = Norm(torch.full((12,), 2.0), 0.0), quarter_turn(4)
        prepare_vectors_.twin(
            counted(TOKENS, 1, 12), torch.ones(TOKENS, 12), norm, angles, held_in_fp8(layer.coded)[0], write
        )
    elif spec.window is not None:  # stored as one head
        store_latent_.twin(counted(TOKENS, 12), layer.k.squeeze(2), write, None)
    elif spec.scale_bytes:
        pages = Latents(layer.latent, layer.rope, layer.slot_scales)
        vectors = torch.cat((counted(TOKENS, 8), -counted(TOKENS, 4)), 1)
        store_slots_.twin(vectors, -100 * counted(TOKENS, 4), pages, layer.indexer, layer.indexer_scales, write)
    elif spec.compression > 1:
        slots: Any = GroupBatch(torch.zeros(1, 1), WritePlaces(*(one[:2] for one in write)), 2, None, None)
        store_pages(layer.latent.unsqueeze(2), layer.scales, 0, counted(2, 1, 12), slots, _SlotWriter())
        store_pages(layer.indexer.unsqueeze(2), layer.scales, 1, -100 * counted(2, 1, 4), slots, _SlotWriter())
    else:
        prep = LatentPrep(Norm(torch.full((8,), 2.0), 0.0), quarter_turn(4), pairs=True)
        vectors = torch.cat((torch.ones(TOKENS, 8), counted(TOKENS, 4)), 1)
        scales = None if layer.scales is None else layer.scales[:, 0, 0]
        prepare_latent_heads_.twin(counted(TOKENS, 1, 12), vectors, prep, layer.latent, write, scales)


def fill_states(spec: RecurrentState, layer: Any, entry: torch.Tensor) -> None:
    """One token with key (or B) 1, 0, .. and rates that take all of the value: a state is the value at its place."""
    rows = StateRows(StepRows.of([1], [1], [0]), entry[:1].view(1, 1).long())
    conv, state = layer.states
    causal_conv_rows.twin(counted(1, 12), conv, torch.ones(12, 3), None, rows)
    large, none = torch.full((1, 2), 40.0), torch.zeros(2)
    if spec is DELTA:
        one = torch.eye(4)[1]  # query and key of the one key head, then two values of two
        mixed = torch.cat((one, one, counted(4)))[None]
        gated_delta_rows.twin(mixed, large, large, none - 40, none, state, 1, rows)
    else:
        mixed = torch.cat((counted(4), torch.eye(4)[1], torch.eye(4)[2]))[None]
        mamba2_rows.twin(mixed, large, none - 40, none, none, state, rows)


def page_of(spec: Spec) -> bytes:
    """The bytes of a page of two layers, of which the second is filled."""
    plan = plan_memory(
        [spec, spec], page_tokens=TOKENS, budget_bytes=1 << 16, max_model_len=64, model_max_len=64, max_num_seqs=1,
        max_num_batched_tokens=64,
    )  # fmt: skip
    memory = torch.zeros(plan.kv_bytes, dtype=torch.uint8)
    pages = Pages(plan, memory, poison=False, static_scales={0: (0.5, 0.25), 1: (0.5, 0.25)})
    group, at = plan.groups[0], plan.page_offset(0, 3)
    write = WritePlaces(torch.full((TOKENS,), at // group.unit), torch.arange(TOKENS))
    layer: Any = pages.layers[1]
    if isinstance(spec, FullKV):
        fill_heads(spec, layer, write)
    elif isinstance(spec, LatentKV):
        fill_latents(spec, layer, write)
    elif isinstance(spec, RecurrentState):
        fill_states(spec, layer, write.entry_T)
    page = memory[at : at + group.page_bytes].clone()
    assert page.any() and not memory[:at].any() and not memory[at + group.page_bytes :].any()
    if isinstance(spec, RecurrentState):  # sums of products: whole numbers but for the last bits
        page.view(torch.float32).round_().add_(0.0)
    return page.numpy().tobytes()


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_a_page_holds_what_it_held_in_the_version_before(number: int) -> None:
    digest = hashlib.sha256(page_of(SPECS[number])).hexdigest()[:16]
    assert digest == DIGESTS[PAGE_FORMAT][number], (
        f"pages of {SPECS[number]} are laid out otherwise than before: raise PAGE_FORMAT in engine/startup/exchange.py, and give that format its "
        f"digests here, {digest!r} for this one. Otherwise an engine reads such pages from a disk, or from an engine of the version before, and "
        "answers with wrong tokens"
    )


def test_every_kind_of_memory_has_a_page_here() -> None:
    assert {spec.kind for spec in SPECS} == set(RULES)
