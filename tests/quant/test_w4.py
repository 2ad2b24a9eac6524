"""Weights of 4 bits (and whole numbers of 8 in words): bit orders as literal words, every layout against plain loops, and what is refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from helpers import packers
from pagerunner.errors import ConfigError
from pagerunner.layers.linear import FusedLinear
from pagerunner.ops.stored import unpack4
from pagerunner.quant.dequantized import Dequantized
from pagerunner.quant.packed8 import Packed8
from pagerunner.quant.sinks import SinkError
from pagerunner.quant.stored import Beside, StoredMethod
from pagerunner.quant.w4 import W4, Packing

HALF, E4M3, BYTE = torch.float16, torch.float8_e4m3fn, torch.uint8
LAYOUTS: dict[str, tuple[Packing, packers.Packer]] = {
    "compressed": (Packing("compressed", 32, HALF), packers.compressed),
    "compressed channel": (Packing("compressed", 0, HALF), functools.partial(packers.compressed, group=0)),
    "compressed zeros": (Packing("compressed", 32, HALF, True), functools.partial(packers.compressed, zeros=True)),
    "compressed permuted": (
        Packing("compressed", 32, HALF, True, permuted=True),
        functools.partial(packers.compressed, zeros=True, permuted=True),
    ),
    "compressed 8 bits": (Packing("compressed", 0, HALF, bits=8), functools.partial(packers.compressed, bits=8, group=0)),
    "awq": (Packing("awq", 32, HALF, True), packers.awq),
    "gptq": (Packing("gptq", 32, HALF, False, 1), packers.gptq),
    "gptq zeros": (Packing("gptq", 32, HALF, True, 1), functools.partial(packers.gptq, zeros=True)),
    "gptq zeros v2": (Packing("gptq", 32, HALF, True), functools.partial(packers.gptq, zeros=True, version=2)),
    "gptq v2": (Packing("gptq", 64, HALF), functools.partial(packers.gptq, group=64, version=2)),
    "gptq column": (Packing("gptq", 0, HALF, False, 1), functools.partial(packers.gptq, group=0)),
    "gptq permuted": (Packing("gptq", 32, HALF, False, 1, True), functools.partial(packers.gptq, permuted=True)),
    "gptq 8 bits": (Packing("gptq", 32, HALF, False, 1, bits=8), functools.partial(packers.gptq, bits=8)),
    "gptq 8 bits zeros permuted": (
        Packing("gptq", 32, HALF, True, 1, True, 8),
        functools.partial(packers.gptq, bits=8, zeros=True, permuted=True),
    ),
    "mxfp4": (Packing("mxfp4", 32, BYTE), packers.mxfp4),
    "deepseek": (Packing("deepseek", 32, BYTE), packers.deepseek),
    "compressed nvfp4": (Packing("compressed nvfp4", 16, E4M3), packers.nvfp4_compressed),
    "nvfp4": (Packing("nvfp4", 16, E4M3), packers.nvfp4),
}  # fmt: skip


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def form_of(packing: Packing) -> StoredMethod:
    return (Packed8 if packing.bits == 8 else W4)(packing, torch.float32)


def empty(method: StoredMethod, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    made = method.create(outputs, inputs, torch.float32)
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in made.items()}


def fill(
    method: StoredMethod,
    weights: dict[str, torch.Tensor],
    held: Mapping[str, torch.Tensor],
    rows: slice,
    order: int = 1,
) -> None:
    sinks = method.sinks(weights, rows)
    assert {name for name, sink in sinks.items() if not sink.optional} <= held.keys() <= sinks.keys()
    for name, source in list(held.items())[::order]:
        assert sinks[name].takes(tuple(source.shape)) and source.dtype in sinks[name].dtypes, name
        sinks[name].put(source, copy)


def test_words_hold_their_numbers_where_the_formats_say() -> None:
    numbers = torch.arange(8).unsqueeze(0)
    assert packers.words(numbers, 4, 1).item() == 0x76543210
    assert packers.words(numbers, 4, 1, packers.AWQ_ORDER).item() == 0x75316420
    assert packers.words(torch.full((1, 8), 7), 4, 1).item() == 0x77777777
    assert packers.words(torch.full((1, 8), 8), 4, 1).item() == 0x88888888 - 2**32


def test_awqs_word_is_eight_output_features_in_its_order() -> None:
    method = form_of(Packing("awq", 32, HALF, True))
    weights = empty(method, 8, 32)
    held = {
        "qweight": torch.full((32, 1), 0x75316420, dtype=torch.int32),
        "qzeros": torch.full((1, 1), 0x11111111, dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=HALF),
    }
    fill(method, weights, held, slice(0, 8))
    assert method.dense(weights)[:, 5].tolist() == [-0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3]


@pytest.mark.parametrize(("version", "offset", "word"), [("v1", 1, 0x77777777), ("v2", 0, 0x88888888 - 2**32)])
def test_gptqs_word_is_eight_input_features_and_its_zeros_are_the_middle(version: str, offset: int, word: int) -> None:
    packing = Packing("gptq", 32, HALF, False, offset)
    method = form_of(packing)
    weights = empty(method, 8, 32)
    held = {
        "qweight": torch.full((4, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.full((1, 1), word, dtype=torch.int32),
        "scales": torch.full((1, 8), 2.0, dtype=HALF),
        "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    fill(method, weights, held, slice(0, 8))
    assert method.dense(weights)[3, :8].tolist() == [-16, -14, -12, -10, -8, -6, -4, -2]
    with pytest.raises(SinkError, match=r"holds 286331153 at \[0, 0\].*sym true"):
        method.sinks(weights, slice(0, 8))["qzeros"].put(torch.full((1, 1), 0x11111111, dtype=torch.int32), copy)


def test_gptqs_first_version_wraps_a_zero_point_of_zero() -> None:
    method = form_of(Packing("gptq", 32, HALF, True, 1))
    weights = empty(method, 8, 32)
    words = torch.tensor([[0x0123456F]], dtype=torch.int32)  # 15 is 0 less 1
    method.sinks(weights, slice(0, 8))["qzeros"].put(words, copy)
    assert weights["zeros"][:, 0].tolist() == [0, 7, 6, 5, 4, 3, 2, 1]


def test_fp4_bytes_hold_the_even_column_low() -> None:
    method = form_of(Packing("mxfp4", 32, BYTE))
    weights = empty(method, 1, 32)
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    fill(method, weights, {"weight_packed": packed, "weight_scale": torch.tensor([[128]], dtype=BYTE)}, slice(0, 1))
    magnitudes = [0, 1, 2, 3, 4, 6, 8, 12]
    assert method.dense(weights)[0, :16].tolist() == magnitudes + [-value for value in magnitudes]
    assert unpack4(weights["codes"])[0].tolist() == list(range(16)) * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [1, -1])
def test_a_layout_means_what_plain_loops_say_in_whatever_order_its_tensors_come(layout: str, order: int) -> None:
    packing, pack = LAYOUTS[layout]
    method = form_of(packing)
    weight = torch.randn(24, 192) * 0.1
    held, want = pack(weight)
    weights = empty(method, 24, 192)
    fill(method, weights, held, slice(0, 24), order)
    assert torch.equal(method.dense(weights), want)
    assert float((want - weight).abs().max()) < 0.2
    x = torch.randn(3, 192)
    if not (packing.bits == 8 and packing.zeros):  # no kernel takes that, so it is unpacked
        torch.testing.assert_close(method.apply(x, weights), x @ want.T)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "permuted" not in name])
@pytest.mark.parametrize(
    "rows", [(slice(0, 16), slice(16, 40)), (slice(0, 48, 2), slice(1, 48, 2))], ids=["below", "alternating"]
)
def test_parts_fill_their_own_rows(layout: str, rows: tuple[slice, slice]) -> None:
    packing, pack = LAYOUTS[layout]
    method = form_of(packing)
    weights = empty(method, 48, 64)
    for part in rows:
        held, want = pack(torch.randn(len(range(48)[part]), 64))
        fill(method, weights, held, part)
        assert torch.equal(method.dense(weights)[part], want)


@pytest.mark.parametrize("layout", ["compressed permuted", "gptq permuted"])
def test_parts_in_orders_of_their_own_stand_beside_each_other(layout: str) -> None:
    packing, pack = LAYOUTS[layout]
    assert not form_of(packing).joins((0, 16))
    layer = FusedLinear(64, {"a": 16, "b": 8}, torch.float32, bias=True)
    layer.store(Beside(((16, form_of(packing)), (8, form_of(packing)))))
    layer.weights = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in layer.weights.items()}
    sinks, want = {tensor.name: tensor.sink for tensor in layer.checkpoint("m.ab.")}, []
    for part, size in layer.parts.items():
        held, means = pack(torch.randn(size, 64))
        want.append(means)
        for name, source in held.items():
            sinks[f"m.{part}.{name}"].put(source, copy)
        sinks[f"m.{part}.bias"].put(torch.full((size,), 0.5), copy)
    assert torch.equal(layer.dense_OI, torch.cat(want))
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ torch.cat(want).T + 0.5)
    layer.randomize(torch.Generator().manual_seed(1))
    assert 0.01 < float(layer.dense_OI.std()) < 0.03


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cpu_unpacks_a_layout_part_by_part(layout: str) -> None:
    packing, pack = LAYOUTS[layout]
    method = Dequantized({0: form_of(packing), 16: form_of(packing)})
    weights = {"weight": torch.full((24, 64), float("nan"))}
    for part in (slice(0, 16), slice(16, 24)):
        held, want = pack(torch.randn(len(range(24)[part]), 64))
        sinks = method.sinks(weights, part)
        for name, source in held.items():
            sinks[name].put(source, copy)
        assert torch.equal(weights["weight"][part], want)


def test_gptq_takes_a_bias_of_zeros_where_the_layer_has_none_and_no_other() -> None:
    method = form_of(Packing("gptq", 32, HALF, False, 1))
    sink = method.sinks(empty(method, 8, 32), slice(0, 8))["bias"]
    assert sink.optional
    sink.put(torch.zeros(8, dtype=HALF), copy)
    with pytest.raises(SinkError, match="the config's layer has no bias"):
        sink.put(torch.ones(8, dtype=HALF), copy)


def test_groups_that_contradict_the_config_are_named() -> None:
    fixed = form_of(Packing("gptq", 32, HALF, False, 1))
    with pytest.raises(SinkError, match=r"holds 1 at \[0\], and not 0, but quantization_config says desc_act false"):
        fixed.sinks(empty(fixed, 8, 64), slice(0, 8))["g_idx"].put(torch.arange(64).flip(0).int() // 32, copy)
    sorted_ = form_of(Packing("gptq", 32, HALF, False, 1, True))
    with pytest.raises(SinkError, match="group_size of 32 each group from 0 to 1 must have 32"):
        sorted_.sinks(empty(sorted_, 8, 64), slice(0, 8))["g_idx"].put(torch.zeros(64, dtype=torch.int32), copy)


def test_sizes_that_a_format_does_not_have_are_named() -> None:
    for layout, group, dtype, sizes, said in (
        ("compressed", 128, HALF, (8, 2880), "2880 input features, which groups of 128 .group_size. don't divide"),
        ("nvfp4", 16, E4M3, (8, 48), "48 input features, which 32 doesn't divide"),
        ("awq", 32, HALF, (12, 32), "12 features where 8 share a word"),
        ("gptq", 0, HALF, (8, 36), "36 features where 8 share a word"),
    ):
        with pytest.raises(ConfigError, match=said):
            form_of(Packing(layout, group, dtype, layout == "awq")).check(*sizes)  # type: ignore[arg-type]
    assert form_of(Packing("mxfp4", 32, BYTE)).create(576, 2880, torch.float32)["scales"].shape == (576, 90)


def spoiled(scales: torch.Tensor, value: float) -> torch.Tensor:
    """Scales whose last one is `value`; bytes hold the exponent of e8m0."""
    own = scales.clone()
    if own.dtype == BYTE:
        own.view(torch.float8_e8m0fnu).view(-1)[-1:] = torch.tensor([value]).to(torch.float8_e8m0fnu)
    else:
        own.view(-1)[-1:] = torch.tensor([value]).to(own.dtype)
    return own


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "permuted" not in name])
def test_scales_that_mean_no_number_are_named(layout: str) -> None:
    packing, pack = LAYOUTS[layout]
    method = form_of(packing)
    held, _ = pack(torch.randn(32, 64))
    sinks = method.sinks(empty(method, 32, 64), slice(0, 32))
    scales = [name for name in held if name.startswith(("scale", "weight_scale", "weight_global"))]
    assert len(scales) == (2 if "nvfp4" in layout else 1)
    for name in scales:
        exponents = held[name].dtype in (BYTE, torch.float8_e8m0fnu)
        bad = {"nan": float("nan")}
        if not exponents and held[name].dtype != E4M3:
            bad["inf"] = float("inf")
        if packing.is_float and not exponents:
            bad["-0.5"] = -0.5
        if name == "weight_global_scale":
            bad["0"] = 0.0
        for said, value in bad.items():
            with pytest.raises(SinkError, match=rf"holds -?{said}\b"):
                sinks[name].put(spoiled(held[name], value), copy)
        fine = [2.0] if exponents or name == "weight_global_scale" else [0.0, *([] if packing.is_float else [-0.5])]
        for value in fine:
            sinks[name].put(spoiled(held[name], value), copy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_other_dtypes_are_not_taken(layout: str) -> None:
    packing, pack = LAYOUTS[layout]
    method = form_of(packing)
    held, _ = pack(torch.randn(8, 64))
    sinks = method.sinks(empty(method, 8, 64), slice(0, 8))
    for name, source in held.items():
        floats = source.dtype in (torch.float16, torch.float32)
        assert (torch.float8_e5m2 if floats else torch.float32) not in sinks[name].dtypes
        assert not sinks[name].takes((3, 5))


PLAIN_AND_EXPERTS = [
    (layout, experts)
    for layout, (packing, _) in LAYOUTS.items()
    for experts in ((), (3,))
    if not (experts and packing.permuted)  # experts in an order of their own are unpacked
]


@pytest.mark.parametrize(("layout", "experts"), PLAIN_AND_EXPERTS)
def test_random_weights_have_the_deviation_of_unquantised_ones(layout: str, experts: tuple[int, ...]) -> None:
    method = form_of(LAYOUTS[layout][0])
    weights = {n: torch.empty(experts + tuple(t.shape), dtype=t.dtype) for n, t in empty(method, 300, 192).items()}
    method.randomize(weights, torch.Generator().manual_seed(1))
    first = {name: tensor[0] for name, tensor in weights.items()} if experts else weights
    assert float(method.dense(first).std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("layout", ["mxfp4", "compressed"])
def test_scales_that_kernels_lift_beyond_bfloat16_are_refused_in_it_alone(layout: Any) -> None:
    """Kernels for bfloat16 hold a scale times up to 2**70. A larger one would be infinite there, and its weights of 0 would be NaN."""
    words = r"^holds 2.8823e\+17 at \[0, 0\]; kernels in bfloat16 compute with scales up to 1.44115e\+17. dtype=.float32. takes larger"
    for dtype, power, refused in ((torch.bfloat16, 57, False), (torch.bfloat16, 58, True), (torch.float32, 100, False)):
        form = W4(Packing(layout, 32, BYTE if layout == "mxfp4" else torch.bfloat16), dtype)
        scales = torch.full((2, 2), 127 + power, dtype=BYTE)
        held = scales if layout == "mxfp4" else scales.view(torch.float8_e8m0fnu).bfloat16()
        sink = form.sinks(empty(form, 2, 64), slice(0, 2))["weight_scale"]
        with pytest.raises(SinkError, match=words) if refused else contextlib.nullcontext():
            sink.put(held, copy)
