"""Linears and experts own a method, and use it for everything."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from pagerunner.layers.cuts import Cut, Features, Section, TensorCut, by_inputs, by_outputs
from pagerunner.layers.linear import FusedLinear, GroupedLinear
from pagerunner.layers.moe import Experts, ExpertSizes
from pagerunner.layers.norm import RMSNorm
from pagerunner.ops.routing import Routes
from pagerunner.quant.base import ExpertMethod, WeightMethod
from pagerunner.quant.sinks import Along, CopySink, CopyWeight, Sink


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


class Packed(Sink):
    """Takes int8 codes [I, O / 2], of which each holds two output features in its halves."""

    def __init__(self, codes_OI: torch.Tensor) -> None:
        outputs, inputs = codes_OI.shape
        super().__init__((inputs, outputs // 2), (torch.int8,), ("inputs", Along("outputs", 2)))
        self.codes_OI = codes_OI

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        codes = torch.empty(source.shape, dtype=source.dtype, device=self.codes_OI.device)
        copy(codes, source)
        self.codes_OI[0::2], self.codes_OI[1::2] = (codes & 15).T, (codes >> 4).T


class Scalar(Sink):
    """Takes one number for all rows."""

    def __init__(self, scale_O: torch.Tensor) -> None:
        super().__init__((1,), (torch.float32,))
        self.scale_O = scale_O

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        copy(self.scale_O, source.expand(self.scale_O.shape))


class Halves(WeightMethod):
    """Small whole numbers, packed in pairs along the output features in checkpoints, times a scale for each feature.

    Nothing that a checkpoint holds of it has output features in dimension 0.
    """

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            "codes": torch.empty(out_features, in_features, dtype=torch.int8, device="meta"),
            "scale": torch.empty(out_features, dtype=torch.float32, device="meta"),
        }

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        return {"packed": Packed(weights["codes"][rows]), "weight_scale": Scalar(weights["scale"][rows])}

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return weights["codes"] * weights["scale"].unsqueeze(-1)

    def apply(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.linear(x_TI, self.dense(weights), weights.get("bias"))


class HalvedExperts(ExpertMethod):
    """Experts of such matrices, one after another."""

    def __init__(self) -> None:
        super().__init__(Halves())

    def matrix(self, weights):
        raise AssertionError("this form computes by itself")

    def apply(self, x_TD, routes, own, residual_TD=None) -> torch.Tensor:
        gate_up, down, activation, _ = own
        out_TD = torch.zeros_like(x_TD)
        matrices = {}
        for name, weights in {"gate_up": gate_up, "down": down}.items():
            assert weights["codes"].dim() == 3 and weights["scale"].dim() == 2
            matrices[name] = weights["codes"] * weights["scale"].unsqueeze(-1)
        for token, (chosen, shares) in enumerate(zip(routes.experts_TA.tolist(), routes.weights_TA, strict=True)):
            for expert, share in zip(chosen, shares, strict=True):
                inner = activation(x_TD[token] @ matrices["gate_up"][expert].T)
                out_TD[token] += share * (inner @ matrices["down"][expert].T)
        return out_TD


def packed(weight_OI: torch.Tensor) -> torch.Tensor:
    """Whole numbers from 0 to 7 as Halves packs them."""
    return (weight_OI[0::2] + 16 * weight_OI[1::2]).T.to(torch.int8).contiguous()


def give_memory(module, value: float = float("nan")) -> None:
    for part in module.modules():
        for name, tensor in part.weights.items():
            filler = value if tensor.is_floating_point() else 77
            part.weights[name] = torch.full(tensor.shape, filler, dtype=tensor.dtype)


def filled(parts: dict[str, torch.Tensor], scales: dict[str, float], **settings) -> FusedLinear:
    sizes = {name: weight.shape[0] for name, weight in parts.items()}
    linear = FusedLinear(4, sizes, torch.float32, method=Halves(), **settings)
    give_memory(linear)
    for tensor in linear.checkpoint("m.qkv."):
        kind = tensor.name.rpartition(".")[2]
        assert tensor.owner is linear and tensor.name == f"m.{tensor.part}.{kind}"
        source = {
            "packed": packed(parts[tensor.part]),
            "weight_scale": torch.tensor([scales[tensor.part]]),
            "bias": torch.arange(float(sizes[tensor.part])),
        }[kind]
        assert tensor.sink.shape == tuple(source.shape) and source.dtype in tensor.sink.dtypes
        tensor.sink.put(source, copy)
    return linear


def test_a_form_says_what_a_checkpoint_holds_and_unpacks_it_part_by_part() -> None:
    parts = {"a": torch.randint(0, 8, (2, 4)), "b": torch.randint(0, 8, (6, 4))}
    linear = filled(parts, {"a": 0.5, "b": 2.0}, bias=True)
    want = torch.cat([parts["a"] * 0.5, parts["b"] * 2.0])
    assert torch.equal(linear.dense_OI, want)
    x = torch.randn(3, 4)
    bias = torch.tensor([0.0, 1, 0, 1, 2, 3, 4, 5])
    torch.testing.assert_close(linear(x), x @ want.T + bias)


@pytest.mark.parametrize(
    ("cut", "packed_dimension", "bias_dimension"),
    [(by_outputs(Features("rows", 2)), 1, 0), (by_inputs(Features("columns", 4)), 0, None), (None, None, None)],
)
def test_the_dimension_to_divide_is_the_forms_own(cut: Cut | None, packed_dimension, bias_dimension) -> None:
    linear = FusedLinear(4, {"a": 2}, torch.float32, method=Halves(), bias=True, cuts={"a": cut} if cut else None)
    found = {tensor.name: tensor for tensor in linear.checkpoint("m.qkv.")}
    dimensions = {name: None if tensor.cut is None else tensor.cut.dimension for name, tensor in found.items()}
    assert dimensions == {"m.a.packed": packed_dimension, "m.a.weight_scale": None, "m.a.bias": bias_dimension}
    assert found["m.a.bias"].once is (cut is not None and cut.axis == "inputs")


def test_a_form_without_joined_operations_works_behind_norms_and_into_the_residual_stream() -> None:
    linear = filled({"a": torch.randint(0, 8, (2, 4)), "b": torch.randint(0, 8, (2, 4))}, {"a": 0.1, "b": 0.2})
    norm = RMSNorm(4, 1e-6, torch.float32)
    norm.weights = {"weight": torch.rand(4)}
    x = torch.randn(3, 4)
    applied = linear(norm(x))
    torch.testing.assert_close(linear.of_norm(x, norm), applied)
    gated = torch.nn.functional.silu(applied[:, :2]) * applied[:, 2:]
    torch.testing.assert_close(linear.silu_of_norm(x, norm), gated)
    residual = torch.ones(3, 4)
    linear.add_(x, residual)
    torch.testing.assert_close(residual, linear(x) + 1)


def test_experts_are_the_linears_form_with_a_dimension_more() -> None:
    sizes = ExpertSizes(experts=3, features=4, inner=6)
    experts = Experts(sizes, torch.float32, method=HalvedExperts())
    plain = Experts(sizes, torch.float32)
    give_memory(experts), give_memory(plain)
    sinks = {tensor.name: tensor.sink for tensor in plain.checkpoint("x.") if not tensor.instead_of}
    cuts = {}
    for tensor in experts.checkpoint("x."):
        cuts[tensor.name] = tensor.cut
        base, _, kind = tensor.name.rpartition(".")
        if kind == "weight_scale":
            tensor.sink.put(torch.tensor([0.25]), copy)
            continue
        outputs = tensor.sink.shape[1] * 2
        weight_OI = torch.randint(0, 8, (outputs, tensor.sink.shape[0]))
        tensor.sink.put(packed(weight_OI), copy)
        sinks[f"{base}.weight"].put(weight_OI * 0.25, copy)
    assert cuts["x.2.up_proj.packed"].dimension == 1 and cuts["x.2.down_proj.packed"].dimension == 0
    x, weights, chosen = torch.randn(5, 4), torch.rand(5, 2), torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1], [0, 2]])
    routes = Routes(weights, chosen)
    torch.testing.assert_close(experts(x, routes), plain(x, routes))


def test_experts_are_held_one_by_one_or_together_or_transposed() -> None:
    sizes = ExpertSizes(experts=2, features=4, inner=3)
    found = {tensor.name: tensor for tensor in Experts(sizes, torch.float32).checkpoint("x.")}
    assert set(found["x.gate_up_proj"].instead_of) == {f"x.{e}.{m}_proj.weight" for e in (0, 1) for m in ("gate", "up")}
    assert found["x.down_proj"].instead_of == ("x.0.down_proj.weight", "x.1.down_proj.weight")
    inner = Features("inner", 3)
    assert found["x.gate_up_proj"].cut == TensorCut(1, (Section(inner), Section(inner)))
    assert found["x.down_proj"].cut == TensorCut(2, (Section(inner),))
    assert [found[f"x.{name}"].experts for name in ("1.up_proj.weight", "down_proj")] == [range(1, 2), range(2)]
    together = Experts(sizes, torch.float32, transposed=True, bias=True)
    held = {tensor.name: (tensor.sink.shape, tensor.once, tensor.instead_of) for tensor in together.checkpoint("x.")}
    assert held == {
        "x.gate_up_proj": ((2, 4, 6), False, ()),
        "x.gate_up_proj_bias": ((2, 6), False, ()),
        "x.down_proj": ((2, 3, 4), False, ()),
        "x.down_proj_bias": ((2, 4), True, ()),
    }


def test_a_grouped_linear_is_a_linear_for_each_group() -> None:
    linear = GroupedLinear(2, 3, 5, torch.float32)
    give_memory(linear)
    (tensor,) = linear.checkpoint("wo_a.")
    assert (tensor.name, tensor.sink.shape) == ("wo_a.weight", (10, 3))
    weight = torch.randn(10, 3)
    tensor.sink.put(weight, copy)
    x = torch.randn(4, 2, 3)
    want = torch.stack([x[:, 0] @ weight[:5].T, x[:, 1] @ weight[5:].T], 1)
    torch.testing.assert_close(linear(x), want)


def test_numbers_are_converted_and_codes_are_not() -> None:
    sink = CopySink(torch.empty(2, 3, dtype=torch.bfloat16))
    assert torch.float16 in sink.dtypes and torch.float8_e4m3fn not in sink.dtypes and torch.int8 not in sink.dtypes
    assert torch.int32 in CopySink(torch.empty(2, dtype=torch.int64)).dtypes
