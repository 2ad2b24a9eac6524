"""The kernel of `kernels/latent/latent_gluon.py` run as Python: slices of all keys, of chosen slots, and of slots in e4m3 for more than 16 heads. `tests/gpu` runs it on a card."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.gluon_programs import Launched
from helpers.launches import compiled_for
from helpers.sparse_cases import Case, made
from pagerunner.batch import StepRows
from pagerunner.ops.kernels.latent import latent_decode, latent_gluon, latent_wide, sparse_latents
from pagerunner.ops.latent_attention import latent_values
from pagerunner.ops.sparse_latents import chosen_values

SIZES = Case((), top_k=200, heads=5, latent=512, rope=64, value=16, dtype=torch.bfloat16, longest=1100)
Rows = tuple[tuple[int, int], ...]
ROWS, DRAFTS = ((300, 1), (5, 1), (63, 1), (64, 1), (500, 1)), ((200, 3), (40, 1), (250, 4))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    found = Launched(latent_gluon, "slices_kernel")
    monkeypatch.setattr(latent_wide, "_gluon", lambda: SimpleNamespace(slices_kernel=found))
    monkeypatch.setattr(latent_wide, "has_gluon", lambda device: True)
    monkeypatch.setattr(latent_wide, "LEAST_UNITS", 1)
    monkeypatch.setattr(latent_wide, "_takes_pairs", lambda *_: False)
    few = latent_decode.ValuesConfig(
        16, 2, 2, 4
    )  # the interpreter has no products of bfloat16, which more tokens would take
    monkeypatch.setattr(latent_decode, "values_config", lambda *_: few)
    return found


def check(found: torch.Tensor, want: torch.Tensor) -> None:
    """Results are averages of latents, so they are less than latents and their error is told by the largest."""
    assert (found - want).abs().max() < 0.02 * want.abs().max()


@pytest.mark.parametrize(
    ("slices", "heads", "rows", "stride", "groups"),
    [(3, 5, ROWS, 0, 0), (20, 40, ROWS, 0, 0), (7, 5, DRAFTS, 4, 0), (20, 40, ROWS, 0, 4), (7, 40, DRAFTS, 4, 4)],
)
def test_chosen_slots(
    monkeypatch: pytest.MonkeyPatch, launched: Launched, slices: int, heads: int, rows: Rows, stride: int, groups: int
) -> None:
    """A unit is a token, with drafts too."""
    monkeypatch.setattr(latent_wide, "slice_count", lambda *_: slices)
    given = made(replace(SIZES, rows=rows, heads=heads, groups=groups, stride=stride, padding=1 if stride else 2))
    want, found = chosen_values.twin(*given), sparse_latents.chosen_values(*given)
    assert launched.programs == slices
    check(found, want)


@pytest.mark.parametrize(("limit", "plain"), [(2**26, True), (2 * 19 * 16 * 1152 - 1, False)])
def test_slots_that_many_tokens_read_become_numbers_once(
    monkeypatch: pytest.MonkeyPatch, launched: Launched, limit: int, plain: bool
) -> None:
    """Two rows of at most 19 pages, if there is room for all that these may have. A step takes all of the room, so that the plan of memory counts it."""
    monkeypatch.setattr(latent_wide, "slice_count", lambda *_: 5)
    monkeypatch.setattr(sparse_latents, "PLAIN_BYTES", limit)
    told, run = [], latent_wide.run_wide
    monkeypatch.setattr(latent_wide, "run_wide", lambda *given, **how: told.append(given[2]) or run(*given, **how))
    given = made(replace(SIZES, rows=((20, 9), (260, 30)), heads=20, groups=4, longest=0, padding=1))
    check(sparse_latents.chosen_values(*given), chosen_values.twin(*given))
    assert [one.scales_ESG is None for one in told] == [plain]
    assert not plain or told[0].latent_ESC.untyped_storage().nbytes() == limit


@pytest.mark.parametrize(
    ("slices", "heads", "rows", "stride", "scaled"),
    [(3, 5, ROWS, 0, 1), (9, 40, ROWS, 0, 1), (9, 4, ((190, 3), *DRAFTS[1:]), 4, 64), (3, 40, DRAFTS, 4, 1)],
)
def test_all_keys(
    monkeypatch: pytest.MonkeyPatch, launched: Launched, slices: int, heads: int, rows: Rows, stride: int, scaled: int
) -> None:
    """A unit is a row. 4 tokens of 40 heads are three blocks of 64 queries. A query may see none of a slice's keys, whatever scores are `scaled` by."""
    if scaled > 1:  # the last of 193 keys is a slice of its own, which two of three queries don't see
        tiles = latent_wide.wide_tiles
        monkeypatch.setattr(latent_wide, "wide_tiles", lambda queries: tiles(queries)._replace(least=1))
        monkeypatch.setattr(latent_decode, "SNAP", 0)
    monkeypatch.setattr(latent_wide, "slice_count", lambda *_: slices)
    q_THC, q_THP, held, table, step, _, scale, up, _ = made(
        replace(SIZES, rows=rows, heads=heads, top_k=1100, stride=stride, padding=1 if stride else 2)
    )
    pages = torch.cat((held.latent_ESC, held.rope_ESP), -1)
    q_THC, q_THP, scale = q_THC / scaled, q_THP / scaled, scale * scaled
    want = latent_values.twin(q_THC, q_THP, pages, table, step, scale, up, {})
    found = latent_decode.latent_values(q_THC, q_THP, pages, table, step, scale, up, {})
    assert launched.programs == slices * -(-heads * max(stride, 1) // (16 if heads * max(stride, 1) <= 16 else 64))
    there = step.row_T >= 0
    check(found[there], want[there])


def test_what_does_not_fit_goes_by_the_other_kernels(launched: Launched) -> None:
    """Latents of other sizes, float32, and vectors that don't begin at 16 bytes."""
    q_THC, q_THP, held, *_ = made(replace(SIZES, rows=ROWS))
    assert latent_wide.serves(q_THC, q_THP, held)
    vectors = torch.cat((held.latent_ESC, held.rope_ESP, held.rope_ESP[..., :4]), -1)
    assert not latent_wide.serves(q_THC, q_THP, held._replace(latent_ESC=vectors[..., :512]))
    for change in ({"latent": 256}, {"rope": 32}, {"dtype": torch.float32}, {"dtype": torch.float16, "groups": 4}):
        q_THC, q_THP, held, *_ = made(replace(SIZES, rows=ROWS, **change))
        assert not latent_wide.serves(q_THC, q_THP, held), change


def test_a_schedule_is_compiled_once_for_all_numbers_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of less than top_k tokens has as many chosen slots as tokens. Another kernel for each length would be compiled while others wait."""
    schedule, asked = latent_decode._schedule_kernel, set()

    class Noted:
        def __getitem__(self, grid):
            return lambda *arguments, **how: asked.add(compiled_for(schedule, arguments, how))

    monkeypatch.setattr(latent_decode, "_schedule_kernel", Noted())
    rows = StepRows.of([200], [300], [0])
    for slices, most in ((20, 1), (32, 16), (20, 199), (20, 2048)):
        latent_decode.run_schedule(rows, slices, latent_wide.wide_tiles(16), stride=1, most=most)
    assert len(asked) == 1
