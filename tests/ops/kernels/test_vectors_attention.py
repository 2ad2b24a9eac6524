"""Attention to a window's vectors and slots: kernels against their twins in Triton's interpreter, and twins against a dense computation."""

from __future__ import annotations

import re

import pytest
import torch

from helpers.interpreter_floats import install
from helpers.vectors_cases import CASES, Case, densely, in_fp8, inputs
from pagerunner.batch import WritePlaces
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.vectors_attention import prepare_vectors_, vectors_attention

pytest.importorskip("triton")
install()
from pagerunner.ops.kernels.latent import vectors_attention as kernels  # noqa: E402
from pagerunner.ops.kernels.linear import linear_wide  # noqa: E402


@pytest.mark.days(3)
@pytest.mark.parametrize("programs", [1, 300], ids=["whole", "parts"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention(case: Case, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: programs)
    tiles = kernels.attention_tiles
    monkeypatch.setattr(kernels, "attention_tiles", lambda *of: tiles(*of)._replace(keys=16))
    arguments, told = inputs(case)
    tolerance = 3e-5 if case.dtype == torch.float32 else 3e-3
    want = vectors_attention.twin(*arguments)
    torch.testing.assert_close(want, densely(arguments, told, case), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(vectors_attention.kernel(*arguments), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("programs", [1, 300], ids=["whole", "parts"])
def test_no_number_stays_none(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a query, and of one key among many. The engine's check of logits finds a broken request by it."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: programs)
    arguments, _ = inputs(CASES["decode"])
    q_THD, window, _, rows, *_ = arguments
    q_THD[1] = float("nan")
    held = window.table_SW[rows.slots_R[3].long(), 200 // window.pages.shape[1] % window.table_SW.shape[1]]
    window.pages[held, 200 % window.pages.shape[1]] = float("nan")
    got = vectors_attention.kernel(*arguments)
    assert got[[1, 3]].isnan().all() and got[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("pages", [torch.float32, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "size", "rotary"), [(3, 24, 8), (9, 16, 16), (1, 12, 2)])
def test_preparing(heads: int, size: int, rotary: int, pages: torch.dtype) -> None:
    q, vectors = torch.randn(5, heads, size + 4)[..., :size], torch.randn(5, size + 7)[:, 7:]
    angle = torch.rand(5, 1, rotary // 2)
    angles = RopeAngles(torch.cat([angle.cos()] * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1))
    where = WritePlaces(torch.tensor([2, -1, 0, 2, 1]), torch.tensor([0, 1, 2, 1, 0]))
    found = []
    for op in (prepare_vectors_.kernel, prepare_vectors_.twin):
        empty = torch.full((3, 3, size), float("nan"))
        own = in_fp8(empty, 4)[0] if pages == torch.float8_e4m3fn else empty.to(pages)
        mine = q.clone(), vectors.clone()
        torch.manual_seed(1)
        op(*mine, Norm(torch.rand(size), 1e-3), angles, own, where)
        at = torch.arange(9) // 3, torch.arange(9) % 3
        held = own[at] if isinstance(own, torch.Tensor) else torch.cat(own.read(*at), -1)
        assert torch.equal(held[[6, 2, 7]].float(), mine[1][[0, 2, 3]]), "vectors are rounded as pages hold them"
        found.append((*mine, held))
    assert int(found[1][2].isfinite().all(-1).sum()) == 4
    near = {torch.float32: 1e-5, torch.float16: 2e-3, torch.float8_e4m3fn: 0.13}[
        pages
    ]  # a number may round to its neighbour
    for got, want, most in zip(*found, (1e-5, near, near), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=most, atol=1e-3)


def test_the_log_says_once_which_kernel_serves_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    say = linear_wide.say_kernel
    say.cache_clear()
    caplog.set_level("INFO", linear_wide.__name__)
    arguments, _ = inputs(CASES["decode, chosen"])
    for _ in range(2):
        vectors_attention.kernel(*arguments)
    monkeypatch.setattr(linear_wide, "has_gluon", lambda device: True)
    given = torch.device("cpu"), 64, 512, torch.bfloat16
    say("windows", "vectors_gluon", True, *given, torch.bfloat16)
    say("windows", "vectors_gluon", False, *given, torch.float8_e4m3fn)
    first, *others = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        r"attention to windows and slots of \d+ tokens: Triton's kernel \(.* needs Hopper and Triton 3\.6, here are cpu .*",
        first,
    )
    assert others == [
        "attention to windows: vectors_gluon in Gluon (64 heads of 512 in torch.bfloat16, pages in torch.bfloat16)",
        "attention to windows: Triton's kernel (vectors_gluon in Gluon doesn't take 64 heads of 512 in torch.bfloat16, pages in torch.float8_e4m3fn)",
    ]
    say.cache_clear()
