"""Weights of 8 bits: what their tensors mean, whatever their shapes, and that nothing else is taken for them."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers.quantise import unpacked
from pagerunner.errors import ConfigError
from pagerunner.layers.linear import FusedLinear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import ResidualStream
from pagerunner.ops.stored import Stored8
from pagerunner.quant.dequantized import Dequantized
from pagerunner.quant.formats import Format, Names, Scheme
from pagerunner.quant.sinks import ByteSink, ScaleCheck, SinkError
from pagerunner.quant.w8 import W8


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def form(scales: str, block: tuple[int, int] = (0, 0), writer: str = "fp8", number: str = "fp8", **more) -> W8:
    scheme = Scheme(number, scales, block, **more)  # type: ignore[arg-type]
    every = Names("module", ("re:.*",))
    return W8(Format(writer, ((every, scheme),), Names("module")), scheme, torch.float32)  # type: ignore[arg-type]


def filled(method: W8, outputs: int, inputs: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in method.create(outputs, inputs, torch.float32).items()}
    sinks = method.sinks(weights, slice(0, outputs))
    assert sinks.keys() == tensors.keys()
    for name, source in tensors.items():
        assert sinks[name].takes(tuple(source.shape)) and source.dtype in sinks[name].dtypes
        sinks[name].put(source, copy)
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 192), (128, 128), (5, 300)])
def test_a_block_is_multiplied_by_its_scale_also_where_it_is_cut_off(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    scales = (2.0 ** torch.randint(-6, 7, (-(-outputs // 128), -(-inputs // 128)))).to(dtype)
    method = form("block", (128, 128))
    found = method.dense(filled(method, outputs, inputs, {"weight": codes, "weight_scale_inv": scales}))
    for i in range(outputs):
        want = [float(codes[i, j].float()) * float(scales[i // 128, j // 128].float()) for j in range(0, inputs, 37)]
        assert found[i, ::37].tolist() == want


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_matrixs_scale_is_every_features(shape: tuple[int, ...]) -> None:
    codes = torch.tensor([[1.0, -2.0], [0.5, 448.0]]).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": torch.full(shape, 0.5), "input_scale": torch.full(shape, 3.0)}
    method = form("tensor", rounding="static")
    weights = filled(method, 2, 2, tensors)
    assert weights["weight_scale"].tolist() == [[0.5], [0.5]]
    assert method.dense(weights).tolist() == [[0.5, -1.0], [0.25, 224.0]]
    assert method.apply(torch.ones(1, 2), weights).tolist() == [[-0.5, 224.25]]


def test_scales_and_zero_points_of_activations_are_taken_and_not_used() -> None:
    codes = torch.tensor([[4, -8], [2, 1]], dtype=torch.int8)
    tensors = {"weight": codes, "weight_scale": torch.tensor([[0.5], [2.0]]), "input_scale": torch.tensor([3.0])}
    method = form("channel", writer="compressed-tensors", number="int8", unused=("input_scale", "input_zero_point"))
    weights = filled(method, 2, 2, {**tensors, "input_zero_point": torch.tensor([5], dtype=torch.int8)})
    assert method.dense(weights).tolist() == [[2.0, -4.0], [4.0, 2.0]] and method.activations == "none"


@pytest.mark.parametrize("shape", [(2, 1, 3, 1), (2, 3)])
def test_model_optimizers_scales_of_blocks_have_two_more_dimensions(shape: tuple[int, ...]) -> None:
    codes, scales = torch.ones(256, 384).to(torch.float8_e4m3fn), torch.arange(6.0).reshape(2, 3)
    method = form("block", (128, 128), writer="modelopt")
    found = method.dense(filled(method, 256, 384, {"weight": codes, "weight_scale": scales.reshape(shape)}))
    assert torch.equal(found[::128, ::128], scales) and method.activations == "none"


@pytest.mark.parametrize("shape", [(2, 1), (2,)])
def test_a_channels_scale_is_its_own(shape: tuple[int, ...]) -> None:
    codes = torch.tensor([[1.0, -2.0], [0.5, 4.0]]).to(torch.float8_e4m3fn)
    method = form("channel", writer="compressed-tensors")
    weights = filled(method, 2, 2, {"weight": codes, "weight_scale": torch.tensor([2.0, 0.25]).reshape(shape)})
    assert method.dense(weights).tolist() == [[2.0, -4.0], [0.125, 1.0]]


def test_int8_is_a_whole_number_times_its_channels_scale() -> None:
    codes = torch.tensor([[127, -128], [3, 0]], dtype=torch.int8)
    method = form("channel", writer="compressed-tensors", number="int8")
    weights = filled(method, 2, 2, {"weight": codes, "weight_scale": torch.tensor([[0.5], [2.0]])})
    assert method.dense(weights).tolist() == [[63.5, -64.0], [6.0, 0.0]]


def test_parts_with_scales_of_their_own_stand_beside_each_other_exactly() -> None:
    method = form("tensor")
    weights = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in method.create(6, 2, torch.float32).items()}
    for rows, scale in ((slice(0, 4), 0.3), (slice(4, 6), 7.0)):
        sinks = method.sinks(weights, rows)
        sinks["weight"].put(torch.ones(rows.stop - rows.start, 2).to(torch.float8_e4m3fn), copy)
        sinks["weight_scale"].put(torch.tensor(scale), copy)
    want = torch.tensor([0.3] * 4 + [7.0] * 2).unsqueeze(-1).expand(6, 2)
    assert torch.equal(method.dense(weights), want)


@pytest.mark.parametrize(
    ("sizes", "high"), [((576, 64), 64), ((192, 192), 64), ((128, 256, 100), 128), ((33, 7, 200), 1)]
)
def test_parts_that_begin_inside_a_block_keep_scales_of_their_own(sizes: tuple[int, ...], high: int) -> None:
    starts = (0, *itertools.accumulate(sizes))[:-1]
    scheme = Scheme("fp8", "block", (128, 128))
    method = W8(Format("fp8", (), Names("module")), scheme, torch.float32, starts)
    assert method.high == high
    weights = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in method.create(sum(sizes), 200, torch.float32).items()}
    want = []
    for start, size in zip(starts, sizes, strict=True):
        codes, scales = torch.randn(size, 200).to(torch.float8_e4m3fn), torch.rand(-(-size // 128), 2)
        sinks = method.sinks(weights, slice(start, start + size))
        sinks["weight"].put(codes, copy)
        assert sinks["weight_scale_inv"].takes(tuple(scales.shape))
        sinks["weight_scale_inv"].put(scales, copy)
        want.append(unpacked(codes, scales, (128, 128)))
    assert torch.equal(method.dense(weights), torch.cat(want))
    assert method.stored(weights).block == (high, 128)
    if high == 1:
        return  # every output feature begins a block
    with pytest.raises(ConfigError, match=f"output feature {starts[1] + high // 2}, which {high}, its blocks' rows"):
        method.sinks(weights, slice(starts[1] + high // 2, sum(sizes)))


def test_a_layer_may_have_parts_in_forms_and_parts_as_they_are() -> None:
    linear = FusedLinear(2, {"a": 3, "b": 2}, torch.float32)
    linear.store(Dequantized({3: form("tensor")}))
    linear.weights = {name: torch.full(tensor.shape, float("nan")) for name, tensor in linear.weights.items()}
    sinks = {tensor.name: tensor.sink for tensor in linear.checkpoint("m.ab.")}
    assert sorted(sinks) == ["m.a.weight", "m.b.weight", "m.b.weight_scale"]
    sinks["m.a.weight"].put(torch.ones(3, 2), copy)
    sinks["m.b.weight_scale"].put(torch.tensor(3.0), copy)
    assert linear.dense_OI[3:].isnan().all()
    sinks["m.b.weight"].put(torch.full((2, 2), 2.0).to(torch.float8_e4m3fn), copy)
    assert linear.dense_OI.tolist() == [[1, 1]] * 3 + [[6, 6]] * 2


@pytest.mark.parametrize(
    ("scales", "rounding", "rounds", "want"),
    [
        ("tensor", "static", True, "token"),
        ("tensor", "tensor", True, "token"),
        ("channel", "token", True, "token"),
        ("block", "block", True, "block"),
        ("block", "token", True, "block"),
        ("channel", "", True, "none"),
        ("channel", "token", False, "none"),
        ("block", "block", False, "none"),
    ],
)
def test_activations_may_be_rounded_where_the_writer_says_so_and_the_user_does_not_forbid_it(
    scales: str, rounding: str, rounds: bool, want: str
) -> None:
    scheme = Scheme("fp8", scales, (128, 128) if scales == "block" else (0, 0), rounding=rounding)  # type: ignore[arg-type]
    every = Names("module", ("re:.*",))
    method = W8(Format("fp8", ((every, scheme),), Names("module"), rounds), scheme, torch.float32)
    weights = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in method.create(256, 256, torch.float32).items()}
    stored = method.stored(weights)
    assert isinstance(stored, Stored8) and stored.activations == want


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_feed_forward_computes_the_same_whoever_computes_its_gate(tokens: int) -> None:
    torch.manual_seed(1)
    mlp, norm = GatedMLP(32, 48, torch.float32), RMSNorm(32, 1e-6, torch.float32)
    norm.weights["weight"] = torch.rand(32)
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        layer.store(form("channel", rounding="token"))
        layer.weights = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in layer.weights.items()}
        layer.randomize(torch.Generator().manual_seed(2))
    x = torch.randn(tokens, 32)
    stream = ResidualStream(x.clone())
    assert mlp.down_proj.takes_gate(tokens) is (tokens == 40)
    mlp.add_to(stream, norm)
    torch.testing.assert_close(stream.x_TD, x + mlp(norm(x)))


def test_codes_are_copied_byte_by_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    target = torch.empty(256, dtype=torch.uint8)
    ByteSink(target, dtype=torch.float8_e8m0fnu).put(every.view(torch.float8_e8m0fnu), copy)
    assert torch.equal(target, every)  # a numeric copy makes 1, 2 and 0 of 1.0, 2.0 and 0.5


@pytest.mark.parametrize("number", ["fp8", "int8"])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_random_weights_have_the_deviation_of_unquantised_ones(number: str, experts: tuple[int, ...]) -> None:
    method = form("channel", number=number)
    made = method.create(300, 200, torch.float32)
    weights = {name: torch.empty(experts + tuple(t.shape), dtype=t.dtype) for name, t in made.items()}
    weights["bias"] = torch.empty(*experts, 300)
    method.randomize(weights, torch.Generator().manual_seed(1))
    matrices = (
        [method.dense({n: t[i] for n, t in weights.items()}) for i in range(3)] if experts else [method.dense(weights)]
    )
    for matrix in (*matrices, weights["bias"]):
        assert float(matrix.std()) == pytest.approx(0.02, rel=0.1) and abs(float(matrix.mean())) < 0.005


@pytest.mark.parametrize(
    ("method", "name", "shape"),
    [
        (form("tensor"), "weight_scale", (1,)),
        (form("channel"), "weight_scale", (4, 1)),
        (form("block", (2, 2)), "weight_scale_inv", (2, 2)),
    ],
    ids=["tensor", "channel", "block"],
)
def test_scales_that_mean_no_number_are_named(method: W8, name: str, shape: tuple[int, ...]) -> None:
    weights = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in method.create(4, 4, torch.float32).items()}
    sink = method.sinks(weights, slice(0, 4))[name]
    for value in (float("nan"), float("inf"), -1.0):
        scales = torch.ones(shape)
        scales.view(-1)[-1] = value
        with pytest.raises(SinkError, match=rf"holds {value:g} at \[.*\]; scales must be finite and not negative"):
            sink.put(scales, copy)
    sink.put(torch.zeros(shape), copy)
    with pytest.raises(SinkError, match="holds inf at"):  # in float32, as it would be kept
        sink.put(torch.full(shape, 1e300, dtype=torch.float64), copy)
    if name == "weight_scale_inv":
        with pytest.raises(SinkError, match=r"holds nan at \[0, 0\]"):
            sink.put(torch.full(shape, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu), copy)


def test_experts_together_and_scales_of_int8_are_checked_too() -> None:
    fbgemm = form("channel", writer="fbgemm_fp8")
    single = fbgemm.create(4, 8, torch.float32)
    weights = {n: torch.empty(3, *t.shape, dtype=t.dtype) for n, t in single.items()}
    sink = fbgemm.stacked(weights, transposed=True)["_scale"]
    with pytest.raises(SinkError, match=r"holds -1 at \[0, 0, 0\]"):
        sink.put(torch.full((3, 1, 4), -1.0), copy)
    whole = form("channel", number="int8", writer="compressed-tensors")
    weights = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in whole.create(4, 8, torch.float32).items()}
    sink = whole.sinks(weights, slice(0, 4))["weight_scale"]
    sink.put(torch.full((4, 1), -1.0), copy)
    with pytest.raises(SinkError, match=r"holds -inf at \[0, 0\]; scales must be finite\."):
        sink.put(torch.full((4, 1), float("-inf")), copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("signed", [False, True])
def test_no_scales_are_good_scales(dtype: torch.dtype, signed: bool) -> None:
    ScaleCheck(torch.float32, 8, signed=signed)(torch.empty(0, 4, dtype=dtype))


def test_a_scale_of_e4m3_may_be_below_0_where_scales_are_signed() -> None:
    scales = torch.tensor([1.0, 0.0, -0.0, -2.0]).to(torch.float8_e4m3fn)
    signed, unsigned = ScaleCheck(torch.float32, 8, signed=True), ScaleCheck(torch.float32, 8)
    signed(scales)
    unsigned(scales[:3])
    with pytest.raises(SinkError, match=r"holds -2 at \[3\]; scales must be finite and not negative\."):
        unsigned(scales)
    for code in (127, 255):
        broken = torch.tensor([0, code], dtype=torch.uint8).view(torch.float8_e4m3fn)
        with pytest.raises(SinkError, match=r"holds nan at \[1\]; scales must be finite\."):
            signed(broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_scale_may_reach_the_largest_number_of_the_models_dtype_with_its_largest_code(dtype: torch.dtype) -> None:
    check = ScaleCheck(torch.float16, 8, signed=True)
    check(torch.tensor([[1.0, -8188 if dtype != torch.bfloat16 else -8160]], dtype=dtype))  # 8 x 8188 = 65504
    for scale in (8192, -8192):
        words = rf"holds {scale} at \[1, 0\], which multiplies numbers up to 8: 65536 is more than float16 can hold \(65504\)"
        with pytest.raises(SinkError, match=words):
            check(torch.tensor([[1.0], [scale]], dtype=dtype))


def test_a_number_that_divides_is_too_small_where_its_reciprocal_is_too_large() -> None:
    check = ScaleCheck(torch.float16, 6 * 448, divides=True)
    check(torch.tensor(2688 / 65504))
    check(torch.tensor([1e30]))
    with pytest.raises(
        SinkError, match=r"holds 0.03125 at \[0\], which divides numbers up to 2688: 86016 is more than"
    ):
        check(torch.tensor([0.03125]))
    with pytest.raises(SinkError, match="holds 0, and numbers are divided by it"):
        check(torch.tensor(0.0))
    with pytest.raises(SinkError, match="is more than float16 can hold .65504.. The file is damaged"):
        check(torch.tensor(1e-44))
