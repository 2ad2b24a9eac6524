"""Attention over chosen latents: the kernels in Triton's interpreter against their twin."""

from __future__ import annotations

import pytest
import torch

from helpers.interpreter_floats import install
from helpers.sparse_cases import Case, made
from pagerunner.attention import paged_sparse
from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import IndexerQueries, LatentCall, UpProjection
from pagerunner.attention.paged_sparse import PagedSparseBackend
from pagerunner.batch import GroupBatch, LatentPages, StepRows, WritePlaces
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import LatentKV
from pagerunner.ops.latent_heads import LatentPrep
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import rope_angles
from pagerunner.ops.sparse_latents import chosen_values
from pagerunner.runner.pages import Pages

pytest.importorskip("triton")
install()
from pagerunner.ops.kernels.latent import indexer, sparse_latents  # noqa: E402

ROWS = ((150, 1), (0, 1), (38, 1), (39, 1), (40, 1), (63, 1))  # around top_k


def check(case: Case, tolerance: float = 5e-5) -> None:
    for _ in range(2):
        given = made(case)
        want = chosen_values.twin(*given)
        found = chosen_values.kernel(*given)
        torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)
        assert torch.equal(chosen_values.kernel(*given), found), "layers of a step share the parts' places"


@pytest.mark.days(2)
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("heads", [3, 20])
def test_rows_of_one_token(monkeypatch: pytest.MonkeyPatch, splits: int, heads: int) -> None:
    """A token's slots are in one part or in several, of which some are empty; so are those of padding."""
    monkeypatch.setattr(sparse_latents, "split_count", lambda *_: splits)
    check(Case(ROWS, heads=heads, padding=2))


def test_half_precision() -> None:
    """Tiles as a card has them."""
    check(Case(((150, 1), (20, 2)), heads=20, top_k=100, dtype=torch.float16), 4e-3)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latents_in_fp8(groups: int, dtype: torch.dtype) -> None:
    check(Case(ROWS, latent=32, groups=groups, dtype=dtype), 5e-5 if dtype == torch.float32 else 2e-2)


def test_small_latents_in_fp8() -> None:
    """Their scales are less than any number of float16."""
    case = Case(((150, 1), (20, 2)), latent=32, groups=4, dtype=torch.float16, fp8=torch.float8_e5m2, size=1e-4)
    given = made(case)
    want = chosen_values.twin(*given)
    assert 1e-5 < want.abs().max() < 1e-2
    torch.testing.assert_close(chosen_values.kernel(*given), want, atol=2e-6, rtol=2e-2)


@pytest.mark.parametrize("stride", [2, 4])
def test_rows_with_drafts(stride: int) -> None:
    check(Case(((7, 1), (31, 2), (62, 1), (0, 2)), stride=stride, padding=1, longest=200))


KERNELS = (
    "store_latent_",
    "prepare_latent_heads_",
    "choose_slots",
    "chosen_values",
    "absorb_slots_",
    "store_slots_",
)
PLAIN = LatentKV(16, 8, "float32", indexer_dim=12)
SCALED = LatentKV(16, 8, "fp8_e4m3", rope_dtype="bfloat16", indexer_dim=12, scale_bytes=8, indexer_scale_bytes=4)


def steps(spec: LatentKV, graph: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Two rows' prompts and then their next tokens, through the backend: their pages' bytes afterwards, and the attention of each step."""
    torch.manual_seed(0)
    plan = plan_memory(
        [spec, spec], page_tokens=16, budget_bytes=1 << 17, max_model_len=64, model_max_len=64, max_num_seqs=2,
        max_num_batched_tokens=64,
    )  # fmt: skip
    memory = torch.zeros(plan.kv_bytes, dtype=torch.uint8)
    layer, group = Pages(plan, memory, poison=False).layers[1], plan.groups[0]
    assert isinstance(layer, LatentPages)
    table = torch.tensor([[plan.page_offset(0, 4 * row + i) // group.unit for i in range(4)] for row in (1, 0)])
    weight = torch.randn(3 * 11, 16) / 4
    up, backend, found = UpProjection(weight, 3, 6, 5), PagedSparseBackend(), []
    for news, ends in (([20, 4], [20, 4]), ([3, 2], [23, 6])):
        rows = StepRows.of(news, ends, [1, 0])
        host = ([], [], []) if graph else (news, ends, [1, 0])
        shape = GraphShape(2, rows.num_tokens, 64) if graph else None
        entry = table[rows.slots_R[rows.row_T.long()].long(), rows.positions_T // 16]
        group_plan = backend.plan(PlanInputs(rows, *host, table, 16, None), backend.new_state(shape))
        where = GroupBatch(table, WritePlaces(entry, rows.positions_T % 16), 16, backend, group_plan)
        count = rows.num_tokens
        q, vectors, keys = torch.randn(count, 3, 14), torch.randn(count, 24), torch.randn(count, 12).round()
        chooser = IndexerQueries(torch.randn(count, 4, 12).round(), torch.ones(count, 4), 9)
        angles = rope_angles(rows.positions_T, torch.rand(4), 1.0, torch.float32)
        prep = LatentPrep(Norm(torch.rand(16), 1e-6), angles, True)
        call = LatentCall(q, vectors, up, layer, where, rows, 0.3, prep, chooser, keys)
        found.append(backend.run(call))
    return memory, found


@pytest.mark.days(2)
@pytest.mark.parametrize("spec", [PLAIN, SCALED], ids=["floats", "fp8"])
@pytest.mark.parametrize("most", [1024, 16])
def test_the_backend_by_kernels_and_by_twins(monkeypatch: pytest.MonkeyPatch, spec: LatentKV, most: int) -> None:
    """Pages to the byte, whether a step's tokens attend at once or in blocks."""
    memory, want = steps(spec, graph=False)
    monkeypatch.setattr(paged_sparse, "MOST_TOKENS", most)
    monkeypatch.setattr(indexer, "MOST_PARTS", 4)  # others have no slots here
    for name in KERNELS:
        monkeypatch.setattr(paged_sparse, name, getattr(paged_sparse, name).kernel)
    held, found = steps(spec, graph=most > 16)
    if spec is PLAIN:
        torch.testing.assert_close(held.view(torch.float32), memory.view(torch.float32))
    else:
        assert torch.equal(held, memory)
    torch.testing.assert_close(found, want, atol=5e-5, rtol=5e-5)


def test_prompts() -> None:
    check(Case(((30, 9), (0, 3), (61, 2), (7, 20))))


def test_parts() -> None:
    """About one program for each multiprocessor, of which the interpreter has 4."""
    tiles, cpu = sparse_latents.Tiles(16, 64, 4, 2, 1), torch.device("cpu")
    assert sparse_latents.split_count(1, 16, 2048, cpu, tiles) == 4
    assert sparse_latents.split_count(1, 64, 2048, cpu, tiles) == 1
    assert sparse_latents.split_count(1, 16, 100, cpu, tiles) == 1
    assert sparse_latents.split_count(3, 16, 2048, cpu, tiles._replace(programs=2)) == 2
