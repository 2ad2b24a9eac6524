"""A warm-up's numbers of tokens need every kernel of products with stored weights that any other number of tokens needs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.effort import by_days, share_of_the_day
from helpers.launches import compiled_for
from helpers.stored_cases import stored
from pagerunner.layers.linear import Linear, kernels_of
from pagerunner.ops import numerics
from pagerunner.ops import quantize as twins
from pagerunner.ops.linear import linear, linear_add_, silu_linear_add_
from pagerunner.ops.stored import Stored8
from pagerunner.quant.base import Unquantized
from pagerunner.quant.ranked import Summed
from pagerunner.runner.kernel_counts import more_counts

interpreter = pytest.importorskip("triton.runtime.interpreter")
linear_dense = pytest.importorskip("pagerunner.ops.kernels.linear.linear_dense")
linear_held = pytest.importorskip("pagerunner.ops.kernels.linear.linear_held")
many = pytest.importorskip("pagerunner.ops.kernels.linear.linear_many")
linear_tiles = pytest.importorskip("pagerunner.ops.kernels.linear.linear_tiles")
EightConfig, WideConfig = many.linear_eight.EightConfig, many.linear_wide.WideConfig
MOST = 8192
USUAL = {1, 3, 16, 272, 275, MOST}
"""Numbers of tokens that a warm-up without graphs runs in any case."""
FORMS = {
    "int8 row, rounded": "token", "fp8 row, rounded": "token", "fp8 block, rounded": "block", "fp8 row": "none", "int4 f16 128": "none",
    "e2m1 e8m0 32": "none", "int4 f16 96": "none",
}  # fmt: skip
SIZES = [(1024, 4608), (4096, 2304), (17_408, 576), (1536, 8960), (3072, 8192)]
MULTIPROCESSORS = [78, 108, 114, 132, 148]
NEAR_CHANGES = [*range(1, 66), *(64 * tile + end for tile in range(2, MOST // 64) for end in (0, 1)), MOST]
"""Numbers of tokens beside which a choice may change: the first ones, and the ends of tiles."""


def matrix(form: str, outputs: int, inputs: int) -> Any:
    """Stored weights, which no kernel reads here."""
    made = stored(form.partition(",")[0], outputs, inputs)
    return made._replace(activations=FORMS[form]) if isinstance(made, Stored8) else made


class Product:
    """Products with one matrix, whose kernels aren't run: it tells which ones would be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, form: str, outputs: int, inputs: int) -> None:
        self.matrix = matrix(form, outputs, inputs)
        self.launches: set[Any] = set()
        half = {"dtype": torch.bfloat16}
        self.x, self.gate_up = torch.empty(MOST, inputs, **half), torch.empty(MOST, 2 * inputs, **half)
        self.out = torch.empty(MOST, outputs, **half)
        for module in (many.linear_rounded, linear_tiles):
            monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(many.linear_rounded, "cublas", lambda x, *_: self.out[: x.codes.shape[0]])
        monkeypatch.setattr(torch, "mm", lambda *_, **__: None)
        monkeypatch.setattr(torch.Tensor, "addmm_", lambda *_, **__: None)
        monkeypatch.setattr(torch.Tensor, "add_", lambda *_, **__: None)
        monkeypatch.setattr(many, "quantize", twins.quantize.kernel)
        monkeypatch.setattr(many, "silu_quantize", twins.silu_quantize.kernel)
        monkeypatch.setattr(many, "silu_and_mul", lambda x: x[:, : x.shape[1] // 2])
        monkeypatch.setattr(
            interpreter.InterpretedFunction,
            "run",
            lambda kernel, *args, **how: self.launches.add(compiled_for(kernel, args, how)),
        )

    def kernels(self, tokens: int) -> set[Any]:
        self.launches = set()
        linear.kernel(self.x[:tokens], self.matrix)
        linear_add_.kernel(self.x[:tokens], self.matrix, self.out[:tokens])
        if tokens >= numerics.FAST.products.rounded_tokens:
            silu_linear_add_.kernel(self.gate_up[:tokens], self.matrix, self.out[:tokens])
        return self.launches


class Held(Unquantized):
    """A form that has one matrix."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    def matrices(self, weights: Any) -> Any:
        return (self.matrix,)


@pytest.mark.parametrize(("form", "sizes"), by_days(FORMS, SIZES))
def test_no_number_of_tokens_needs_a_kernel_that_the_warm_up_has_not_met(monkeypatch, form, sizes):
    outputs, inputs = sizes
    product = Product(monkeypatch, form, outputs, inputs)
    layer = Linear(inputs, outputs, torch.bfloat16, method=Held(product.matrix))
    more = more_counts(kernels_of([layer, layer]), USUAL, MOST)
    assert len(more) <= 24
    met = set().union(*(product.kernels(tokens) for tokens in (*USUAL, *more)))
    assert len(met) > 2
    for tokens in share_of_the_day(MOST, 97):
        assert product.kernels(tokens + 1) <= met, tokens + 1


@pytest.mark.parametrize(("form", "sizes"), by_days(FORMS, SIZES))
def test_between_two_numbers_of_tokens_that_need_the_same_kernels_there_are_no_others(monkeypatch, form, sizes):
    """`more_counts` finds the numbers by it."""
    weights = matrix(form, *sizes)
    for places in MULTIPROCESSORS:
        for module in (many.linear_rounded, linear_tiles):
            monkeypatch.setattr(module, "multiprocessors", lambda device, places=places: places)
        runs = itertools.groupby(
            linear.kernels_for(n, weights, torch.bfloat16, weights.scales.device) for n in NEAR_CHANGES
        )
        answers = [answer for answer, _ in runs]
        assert len(answers) == len(set(answers)), (places, answers)


GLUON_FORMS = ("int4 f16 128", "int4 f16 32", "int8 group 128", "fp8 row, rounded", "fp8 block, rounded")


@pytest.mark.parametrize("form", GLUON_FORMS)
@pytest.mark.parametrize("sizes", [(24_576, 4096), (6144, 4096), (4096, 4096), (12_288, 28_672), (4096, 896)])
def test_that_holds_for_kernels_in_gluon_too(monkeypatch, form, sizes):
    """Steps of 97 to 128 tokens and of 193 to 256 may have the same tile, with others between them."""
    made = stored(form.partition(",")[0], 128, 128)
    codes = torch.empty(sizes[0], sizes[1] * made.codes.shape[1] // 128, dtype=made.codes.dtype, device="meta")
    weights = made._replace(codes=codes, **({"activations": FORMS[form]} if "rounded" in form else {}))
    if "row" in form:
        weights = weights._replace(block=(1, sizes[1]))
    for module in (many.linear_wide, many.linear_eight):
        monkeypatch.setattr(module, "has_gluon", lambda device: True)
    for places in MULTIPROCESSORS:
        for module in (many.linear_wide, many.linear_eight, many.linear_rounded, linear_tiles):
            monkeypatch.setattr(module, "multiprocessors", lambda device, places=places: places)
        answers = [linear.kernels_for(n, weights, torch.float16, torch.device("cpu")) for n in range(1, 1025)]
        runs = [answer for answer, _ in itertools.groupby(answers)]
        assert len(runs) == len(set(runs)), (places, runs)
        assert isinstance(answers[19], EightConfig) or isinstance(answers[19][0], EightConfig | WideConfig)


def test_matrices_of_one_kind_are_asked_about_once():
    one, other = stored("int4 f16 32", 64, 64), stored("int4 f16 32", 64, 64)
    layers = [Linear(64, 64, torch.bfloat16, method=Held(matrix)) for matrix in (one, other, stored("fp8 row", 64, 64))]
    dense = [Linear(64, 64, torch.bfloat16) for _ in range(2)]
    assert len(kernels_of([*layers, *dense])) == 3


def test_the_warm_up_meets_all_kernels_of_dense_products(monkeypatch):
    """One token has a kernel of its own, and 2 to 8 have one on Hopper; another has up to 64 tokens, by tiles; cuBLAS has the rest. The smallest have no tiles."""
    for module in (linear_dense, linear_held):
        monkeypatch.setattr(module, "has_gluon", lambda device: True)
    monkeypatch.setattr(linear_dense, "multiprocessors", lambda device: 132)
    asks = kernels_of([Linear(4096, 12_288, torch.bfloat16)])
    answers = [asks[0](tokens) for tokens in range(1, 129)]
    assert [len(list(run)) for _, run in itertools.groupby(answers)] == [1, 7, 8, 16, 32, 64]
    small = kernels_of([Linear(1024, 1024, torch.bfloat16)])
    assert [len(list(run)) for _, run in itertools.groupby(map(small[0], range(1, 33)))] == [1, 7, 8, 16]


def test_the_warm_up_meets_sums_of_ranks_that_add_up_parts(monkeypatch):
    """Also of more tokens than have a kernel of ours, whose products are whole."""
    monkeypatch.setattr(linear_dense, "has_gluon", lambda device: True)
    monkeypatch.setattr(linear_dense, "multiprocessors", lambda device: 132)
    comm = SimpleNamespace(takes_parts=lambda tokens, features, dtype: 16 < tokens <= 256 and features == 4096)
    method = Summed(Unquantized(), comm)
    asks = kernels_of([Linear(4096, 4096, torch.bfloat16), Linear(4096, 4096, torch.bfloat16, method=method)])
    assert len(asks) == 2 and not any(asks[0](tokens)[1] for tokens in range(1, 512))
    answers = [asks[1](tokens) for tokens in range(1, 512)]
    runs = [answer for answer, _ in itertools.groupby(answers)]
    assert len(runs) == len(set(runs))
    assert [tokens + 1 for tokens in range(511) if answers[tokens][1]] == list(range(17, 257))
    assert answers[255] != answers[256]
