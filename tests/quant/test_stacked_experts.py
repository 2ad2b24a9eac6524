"""A checkpoint holds experts one by one or stacked. Whichever it is, every weight is filled or a missing tensor is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagerunner.errors import CheckpointError
from pagerunner.layers.cuts import Section, TensorCut
from pagerunner.layers.mlp import inner_features
from pagerunner.layers.moe import Experts, ExpertSizes
from pagerunner.models.checkpoint.loader import load_weights, materialize, weights_bytes
from pagerunner.ops.activation import SILU, GatedActivation
from pagerunner.quant.base import ExpertMethod, UnquantizedExperts, WeightMethod
from pagerunner.quant.sinks import ByteSink, CopySink, Sink

SIZES = ExpertSizes(experts=2, features=4, inner=3)


class Scaled(WeightMethod):
    """Codes, and a scale for each output feature."""

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            "codes": torch.empty(out_features, in_features, dtype=torch.int8, device="meta"),
            "scale": torch.empty(out_features, dtype=torch.float32, device="meta"),
        }

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        return {
            "blocks": ByteSink(weights["codes"][rows], ("outputs", "inputs")),
            "scales": CopySink(weights["scale"][rows], ("outputs",)),
        }

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return weights["codes"] * weights["scale"][..., None]

    def apply(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return x_TI @ self.dense(weights).T


class ScaledExperts(ExpertMethod):
    """Two tensors for each stacked matrix."""

    def __init__(self) -> None:
        super().__init__(Scaled())

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool) -> dict[str, Sink]:
        codes, axes = weights["codes"], ("outputs", "inputs")
        if transposed:
            codes, axes = codes.transpose(1, 2), ("inputs", "outputs")
        return {"_blocks": CopyCodes(codes, (None, *axes)), "_scales": CopySink(weights["scale"], (None, "outputs"))}

    def matrix(self, weights):
        raise AssertionError("these tests load weights and compute nothing with them")


class CopyCodes(Sink):
    def __init__(self, target, axes) -> None:
        super().__init__(tuple(target.shape), (torch.int8,), axes)
        self.target = target

    def put(self, source, copy) -> None:
        copy(self.target, source)


def activation(interleaved: bool) -> GatedActivation:
    return GatedActivation("clamped_swiglu", 7.0) if interleaved else SILU


class Model(Experts):
    unused_tensors = ()


def model(method: ExpertMethod, **settings) -> Model:
    made = Model(SIZES, torch.float32, method=method, **settings)
    materialize(made, torch.zeros(weights_bytes(made), dtype=torch.uint8))
    return made


def held(module: Experts, stacked: bool) -> dict[str, torch.Tensor]:
    """Ones for everything that a checkpoint of one of the two layouts holds."""
    tensors = list(module.checkpoint())
    replaced = {name for tensor in tensors if stacked for name in tensor.instead_of}
    taken = [t for t in tensors if (stacked or not t.instead_of) and t.name not in replaced]
    return {t.name: torch.ones(t.sink.shape, dtype=t.sink.dtypes[0]) for t in taken}


def load(module: Experts, path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path / "model.safetensors")
    load_weights(module, path)


METHODS = pytest.mark.parametrize("method", [UnquantizedExperts, ScaledExperts])
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
LAYOUTS = pytest.mark.parametrize(
    ("transposed", "stacked"), [(False, False), (False, True), (True, True)], ids=["single", "stacked", "transposed"]
)


@METHODS
@BIAS
@LAYOUTS
def test_every_layout_fills_every_weight(tmp_path: Path, method, bias: bool, transposed: bool, stacked: bool) -> None:
    module = model(method(), bias=bias, transposed=transposed)
    tensors = held(module, stacked)
    assert ("gate_up_proj_bias" in tensors) is bias and any(n.startswith("0.") for n in tensors) is not stacked
    load(module, tmp_path, tensors)
    assert all(bool((weight == 1).all()) for weight in module.weights.values())


@METHODS
@BIAS
@LAYOUTS
def test_a_tensor_that_is_left_out_is_named(
    tmp_path: Path, method, bias: bool, transposed: bool, stacked: bool
) -> None:
    tensors = held(model(method(), bias=bias, transposed=transposed), stacked)
    for left_out in tensors:
        module = model(method(), bias=bias, transposed=transposed)
        rest = {name: tensor for name, tensor in tensors.items() if name != left_out}
        with pytest.raises(CheckpointError, match="lacks the tensor") as caught:
            load(module, tmp_path, rest)
        # A stacked matrix of a single tensor that isn't there leaves the loader with single experts to ask for.
        assert left_out in str(caught.value) or (stacked and not transposed and " 0." in str(caught.value))


@METHODS
def test_biases_alone_are_no_experts(tmp_path: Path, method) -> None:
    biases = {"gate_up_proj_bias": torch.ones(2, 6), "down_proj_bias": torch.ones(2, 4)}
    with pytest.raises(CheckpointError, match="lacks the tensor 0.down_proj"):
        load(model(method(), bias=True), tmp_path, biases)


@METHODS
def test_a_matrix_is_not_held_in_both_layouts(tmp_path: Path, method) -> None:
    module = model(method(), bias=True)
    with pytest.raises(CheckpointError, match="not part of the model"):
        load(module, tmp_path, held(module, False) | held(module, True))


@pytest.mark.parametrize("transposed", [False, True])
def test_gates_and_ups_are_cut_alike_in_pairs_or_in_sections(transposed: bool) -> None:
    for interleaved in (False, True):
        module = Experts(SIZES, torch.float32, bias=True, transposed=transposed, activation=activation(interleaved))
        cuts = {tensor.name: tensor.cut for tensor in module.checkpoint() if not tensor.name[0].isdigit()}
        outputs, inputs = (2, 1) if transposed else (1, 2)
        inner = inner_features(SIZES.inner)
        sections = (Section(inner, 2),) if interleaved else (Section(inner), Section(inner))
        assert cuts == {
            "gate_up_proj": TensorCut(outputs, sections),
            "gate_up_proj_bias": TensorCut(1, sections),
            "down_proj": TensorCut(inputs, (Section(inner),)),
            "down_proj_bias": None,
        }


@pytest.mark.parametrize("interleaved", [False, True])
def test_single_experts_fill_the_rows_that_the_stacked_matrix_has(tmp_path: Path, interleaved: bool) -> None:
    module = model(UnquantizedExperts(), activation=activation(interleaved))
    tensors = {name: torch.randn(tensor.shape) for name, tensor in held(module, False).items()}
    load(module, tmp_path, tensors)
    gate, up = tensors["1.gate_proj.weight"], tensors["1.up_proj.weight"]
    want = torch.stack([gate, up], 1).flatten(0, 1) if interleaved else torch.cat([gate, up])
    assert torch.equal(module.weights["gate_up.weight"][1], want)
