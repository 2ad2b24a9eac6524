"""What reading pages takes, measured, against the number in the memory plan."""

from __future__ import annotations

import pytest
import torch

from pagerunner.attention import torch_plan
from pagerunner.attention.base import PlanInputs, Reach
from pagerunner.attention.calls import AttentionCall, Heads, LatentCall, UpProjection
from pagerunner.attention.mla import LatentBackend
from pagerunner.attention.torch_plan import scratch_bytes
from pagerunner.attention.torch_ref import Scratch, TorchBackend
from pagerunner.batch import GroupBatch, KVPages, LatentPages, StepRows, WritePlaces
from pagerunner.memory import specs
from pagerunner.ops.paged_attention import Scores
from pagerunner.runner.pages import TORCH_DTYPES

SIZE, LENGTH = 16, 96
PADDED = 160  # slots that one call of short rows may gather, in place of 32,768


def serve(
    backend: TorchBackend | LatentBackend, spec: specs.Spec, dtype: torch.dtype, rows: list[tuple[int, int]]
) -> None:
    """Run steps of (past, new tokens) rows through one layer of `spec`."""
    query_lens, seq_lens = [q for _, q in rows], [past + q for past, q in rows]
    reach = Reach.of(spec)
    pages = -(-max(seq_lens) // SIZE)
    table = torch.arange(len(rows) * pages).view(len(rows), pages)
    positions = [(row, p) for row, (past, q) in enumerate(rows) for p in range(past, past + q)]
    entries = torch.tensor([int(table[row, p // SIZE]) for row, p in positions])
    offsets = torch.tensor([p % SIZE for _, p in positions])
    step = StepRows.of(query_lens, seq_lens, range(len(rows)))
    plan = backend.plan(PlanInputs(step, query_lens, seq_lens, range(len(rows)), table, SIZE, reach), None)
    group = GroupBatch(table, WritePlaces(entries, offsets), SIZE, backend, plan)
    held = TORCH_DTYPES[spec.dtype]  # type: ignore[attr-defined]
    heads = getattr(spec, "num_kv_heads", 1)
    scales = torch.ones(table.numel(), 2, heads) if spec.has_page_scales else None  # type: ignore[attr-defined]
    if isinstance(spec, specs.LatentKV):
        vector = spec.latent_dim + spec.rope_dim
        latent = LatentPages(0, torch.zeros(table.numel(), SIZE, vector).to(held), scales)
        up = UpProjection(torch.randn(2 * 9, spec.latent_dim).to(dtype), 2, 4, 5)
        q = torch.randn(len(positions), 2, 4 + spec.rope_dim).to(dtype)
        assert isinstance(backend, LatentBackend)
        backend.run(LatentCall(q, torch.randn(len(positions), vector).to(dtype), up, latent, group, step, 1.0))
        return
    assert isinstance(spec, specs.FullKV) and isinstance(backend, TorchBackend)
    k = torch.zeros(table.numel(), SIZE, spec.num_kv_heads, spec.head_dim).to(held)
    v = torch.zeros(table.numel(), SIZE, spec.num_kv_heads, spec.value_dim).to(held)
    layer = KVPages(0, k, v, scales)
    new_k, new_v = (torch.randn(len(positions), *x.shape[2:]).to(dtype) for x in (k, v))
    q = torch.randn(len(positions), 2 * spec.num_kv_heads, spec.head_dim).to(dtype)
    backend.run(AttentionCall(Heads(q, new_k, new_v), layer, group, step, Scores(1.0)))


FULL_STEPS = [
    [(0, 50)],
    [(LENGTH - 40, 40)],  # the past of one long row
    [(LENGTH - 1, 1)],
    [(PADDED // 4 - 1, 1)] * 4,  # as many short rows as one call takes
    [(PADDED // 4 - 2, 2)] * 9,
]


@pytest.mark.parametrize("computed", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("kind", ["heads", "uneven heads", "latents"])
def test_reading_takes_what_the_plan_says(monkeypatch: pytest.MonkeyPatch, kind: str, held: str, computed: str) -> None:
    monkeypatch.setattr(torch_plan, "MAX_PADDED_SLOTS", PADDED)
    made: dict[str, tuple[specs.Spec, ...]] = {
        "heads": (specs.FullKV(2, 8, held),),
        "uneven heads": (specs.FullKV(2, 8, held, head_dim_v=5), specs.FullKV(1, 10, held)),
        "latents": (specs.LatentKV(12, 4, held),),
    }
    backend = LatentBackend() if kind == "latents" else TorchBackend()
    for spec in made[kind]:
        for rows in FULL_STEPS:
            serve(backend, spec, getattr(torch, computed), rows)
    assert backend._scratch.num_bytes == scratch_bytes(made[kind], LENGTH, 256, computed)


WINDOW, CHUNK = 10, 20
FORGETTING: dict[str, tuple[specs.FullKV, list[list[tuple[int, int]]]]] = {
    "window": (
        specs.WindowKV(2, 8, "bfloat16", window=WINDOW),
        # decodes fill a call, or a row of as many tokens as still are in pages is the largest
        [[(50, 1)] * 16, [(50, WINDOW - 1)], [(50, 40)], [(0, 90)]],
    ),
    "chunks": (
        specs.ChunkedKV(2, 8, "bfloat16", chunk=CHUNK),
        [[(35, 1)] * 10, [(38, 1)], [(30, 60)], [(0, 90)]],
    ),
}


@pytest.mark.parametrize("seqs", [16, 1])
@pytest.mark.parametrize("kind", FORGETTING)
def test_groups_that_forget_read_no_more_than_they_keep(monkeypatch: pytest.MonkeyPatch, kind: str, seqs: int) -> None:
    monkeypatch.setattr(torch_plan, "MAX_PADDED_SLOTS", PADDED)
    spec, steps = FORGETTING[kind]
    backend = TorchBackend()
    for rows in steps:
        serve(backend, spec, torch.float32, rows[:seqs])
    said = scratch_bytes((spec,), 2**20, seqs, "float32")
    assert said == backend._scratch.num_bytes
    slots = {("window", 16): PADDED, ("window", 1): 2 * WINDOW - 2, ("chunks", 16): PADDED, ("chunks", 1): CHUNK - 1}
    assert said == slots[kind, seqs] * 2 * 16 * (2 + 4)


def test_few_short_requests_need_less() -> None:
    spec = (specs.FullKV(2, 8, "float32"),)
    assert scratch_bytes(spec, 100, 3, "float32") == 300 * 2 * 16 * 4
    assert scratch_bytes(spec, 10**6, 3, "float32") == 10**6 * 2 * 16 * 4
    assert scratch_bytes((specs.RecurrentState(((4,),), ("float32",)),), 100, 3, "float32") == 0


def test_nothing_else_is_made_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Scratch()
    pages = torch.randn(4, SIZE, 2, 8).to(torch.float8_e4m3fn)
    from pagerunner.ops.pages import slot_layout, slot_rows

    layout = slot_layout(pages)
    rows = slot_rows(torch.tensor([3, 0]), torch.tensor([1, 15]), layout)
    read = scratch.read(0, pages, rows, layout, torch.bfloat16, torch.tensor([[2.0, 4.0], [0.5, 0.5]]))
    by_head = torch.tensor([[2.0], [4.0]])
    wanted = torch.stack((pages[3, 1].float() * by_head, pages[0, 15].float() / 2)).to(torch.bfloat16)
    assert torch.equal(read, wanted)
    held = {tensor.untyped_storage().data_ptr() for tensor in scratch._held.values()}
    assert read.untyped_storage().data_ptr() in held
    assert scratch.num_bytes == 2 * 16 * (1 + 4 + 2)
