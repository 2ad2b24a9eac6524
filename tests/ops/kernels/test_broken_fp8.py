"""What isn't a number stays none in fp8, in kernels as in their twins: the engine's check of logits finds a broken request by it."""

from __future__ import annotations

import pytest
import torch

from helpers.interpreter_floats import install

triton = pytest.importorskip("triton")
install()
import triton.language as tl  # noqa: E402

from pagerunner.batch import WritePlaces  # noqa: E402
from pagerunner.ops.fp8 import fitting_scale, to_fp8  # noqa: E402
from pagerunner.ops.kernels.paged import paged_heads  # noqa: E402
from pagerunner.ops.latent_attention import store_latent_  # noqa: E402
from pagerunner.ops.latent_heads import LatentPrep, prepare_latent_heads_  # noqa: E402
from pagerunner.ops.linear import Norm  # noqa: E402
from pagerunner.ops.rope import RopeAngles  # noqa: E402
from pagerunner.ops.slot_pooling import store_slots_ as store_pooled_  # noqa: E402
from pagerunner.ops.sparse_latents import Latents, from_exponents, store_slots_  # noqa: E402
from pagerunner.ops.vectors_attention import prepare_vectors_  # noqa: E402


@triton.jit
def _store(x, y, scale, FP8_MAX: tl.constexpr, FP8: tl.constexpr):
    i = tl.arange(0, 4)
    value = tl.load(x + i)
    own = paged_heads.fitting_scale(tl.max(tl.abs(value), 0), FP8_MAX)
    tl.store(y + i, paged_heads.quantise(value, own, FP8_MAX, FP8).to(tl.float32))
    tl.store(scale, own)


@pytest.mark.parametrize("dtype", paged_heads.FP8_MAX)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_number_stays_none(dtype: torch.dtype, broken: float) -> None:
    x, found, scale = torch.tensor([1.0, broken, -3.0, 0.0]), torch.empty(4), torch.empty(1)
    _store[(1,)](x, found, scale, FP8_MAX=paged_heads.FP8_MAX[dtype], FP8=paged_heads.fp8_type(dtype))
    own = fitting_scale(x.abs().amax(), dtype)
    want = to_fp8(x, own, dtype).float() * own
    assert want[1].isnan() and (found * scale)[1].isnan()
    if broken != broken:  # a page's other numbers are what they are
        assert (found * scale).tolist()[::2] == [1.0, -3.0]


@triton.jit
def _each(x, codes, scales, N: tl.constexpr, FP8_MAX: tl.constexpr, FP8: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    scale = paged_heads.fitting_scale(tl.abs(value), FP8_MAX)
    tl.store(scales + i, scale)
    tl.store(codes + i, paged_heads.quantise(value * 0.3, scale, FP8_MAX, FP8).to(tl.float32))


@pytest.mark.parametrize("dtype", paged_heads.FP8_MAX)
def test_scales_and_codes_without_division_have_its_bits(dtype: torch.dtype) -> None:
    """Around each power of two times the largest code, from numbers that aren't normal to the largest float."""
    most = (paged_heads.FP8_MAX[dtype] * 2.0 ** torch.arange(-140.0, 113).double()).float()
    tops = torch.cat([most.view(torch.int32) + step for step in (-1, 0, 1)]).view(torch.float32)
    x = torch.cat([tops, -tops, torch.tensor([0.0, 1e-40, 3.4e38])])
    x = torch.nn.functional.pad(x[x.isfinite()], (0, 2048))[:2048]
    codes, scales = torch.empty(2048), torch.empty(2048)
    _each[(1,)](x, codes, scales, N=2048, FP8_MAX=paged_heads.FP8_MAX[dtype], FP8=paged_heads.fp8_type(dtype))
    want = fitting_scale(x.abs(), dtype)
    assert torch.equal(scales, want) and torch.equal(codes, to_fp8(x * 0.3, want, dtype).float())


ANGLES = RopeAngles(torch.ones(3, 1, 4), torch.zeros(3, 1, 4))
WHERE = WritePlaces(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]))


def _slots(how: str, vectors: torch.Tensor) -> list[torch.Tensor]:
    """The scales of three slots, of blocks of latents and of indexer keys."""
    pages = Latents(torch.zeros(2, 2, 16, dtype=torch.float8_e4m3fn), torch.zeros(2, 2, 4), torch.zeros(2, 2, 2))
    keys, scales = torch.zeros(2, 2, 8, dtype=torch.float8_e4m3fn), torch.zeros(2, 2)
    getattr(store_slots_, how)(vectors, vectors[:, :8].clone(), pages, keys, scales, WHERE)
    return [pages.scales_ESG[tuple(WHERE)], scales[tuple(WHERE)].unsqueeze(-1)]


def _pooled(how: str, vectors: torch.Tensor) -> list[torch.Tensor]:
    pages = Latents(
        torch.zeros(2, 2, 16, dtype=torch.float8_e4m3fn), torch.zeros(2, 2, 4), torch.zeros(2, 2, 2, dtype=torch.uint8)
    )
    norm = Norm(torch.ones(20), 1e-6)
    getattr(store_pooled_, how)(
        vectors, [norm], [pages], ANGLES, torch.tensor([3, 7, 11]), WritePlaces(WHERE[0], WHERE[1] * 4), 4
    )
    return [from_exponents(pages.scales_ESG[tuple(WHERE)])]


def _window(how: str, vectors: torch.Tensor) -> list[torch.Tensor]:
    pages = Latents(
        torch.zeros(2, 2, 16, dtype=torch.float8_e4m3fn), torch.zeros(2, 2, 4), torch.zeros(2, 2, 2, dtype=torch.uint8)
    )
    own = vectors.clone()
    getattr(prepare_vectors_, how)(torch.randn(3, 1, 20), own, Norm(torch.ones(20), 1e-6), ANGLES, pages, WHERE)
    assert own[0].isnan().any() and own[1:].isfinite().all(), "the step's own vectors are as pages hold them"
    return [from_exponents(pages.scales_ESG[tuple(WHERE)])]


def _pages(how: str, vectors: torch.Tensor) -> list[torch.Tensor]:
    """The scales of the slots' pages, which have one for all of their vectors."""
    scales = torch.zeros(2)
    getattr(store_latent_, how)(vectors, torch.zeros(2, 2, 20, dtype=torch.float8_e4m3fn), WHERE, scales)
    return [scales[WHERE[0]].unsqueeze(-1)]


def _prepared(how: str, vectors: torch.Tensor) -> list[torch.Tensor]:
    prep, scales = LatentPrep(Norm(torch.ones(16), 1e-6), ANGLES, pairs=False), torch.zeros(2)
    pages = torch.zeros(2, 2, 20, dtype=torch.float8_e4m3fn)
    getattr(prepare_latent_heads_, how)(torch.randn(3, 1, 8), vectors, prep, pages, WHERE, scales)
    return [scales[WHERE[0]].unsqueeze(-1)]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", ["kernel", "twin"])
@pytest.mark.parametrize("scales_of", [_slots, _pooled, _window, _pages, _prepared])
@pytest.mark.filterwarnings("ignore:.*encountered.*:RuntimeWarning")
def test_the_scale_of_broken_latents_is_infinite(scales_of, how: str, broken: float) -> None:
    """The words of PTX that make numbers of e4m3 read 480 where a code is none, so the scale has to say it."""
    vectors = torch.randn(3, 20)
    vectors[0, 2] = broken
    for scales in scales_of(how, vectors):
        assert not scales[0].isfinite().all() and scales[1:].isfinite().all(), scales
