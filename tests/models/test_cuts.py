"""What devices would hold of a model follows from what it declares: in every format, the parts of all tensors fit each other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.declared import check
from helpers.effort import by_days
from helpers.parts import Layers, fill, layer_part, layers_of, shorten, store
from helpers.published import Published, all_published
from helpers.quantise import CONFIGS, PACKED, packed
from pagerunner.errors import ConfigError
from pagerunner.layers.attention import head_projection
from pagerunner.layers.cuts import Features, Section, TensorCut
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.moe import Experts, ExpertSizes
from pagerunner.layers.shares import Parts, Share, divided, part_of, shape_of
from pagerunner.models.checkpoint.forms import Forms, Held
from pagerunner.models.checkpoint.loader import build_model, materialize, weights_bytes
from pagerunner.models.configs.quantization import asked_format, read_format
from pagerunner.models.configs.reader import read_model_config
from pagerunner.models.decoder import CausalLM
from pagerunner.ops.activation import SILU, GatedActivation
from pagerunner.ops.routing import Routes
from pagerunner.quant.formats import Format, inner_name

FAMILIES = {
    "llama": "meta-llama/Llama-3.1-8B-Instruct",
    "mistral3": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "qwen2": "Qwen/Qwen2.5-72B-Instruct",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "qwen3_next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3_5": "Qwen/Qwen3.5-27B",
    "qwen3_5_moe": "Qwen/Qwen3.5-35B-A3B",
    "gemma3": "google/gemma-3-27b-it",
    "gpt_oss": "openai/gpt-oss-20b",
    "bamba": "ibm-ai-platform/Bamba-9B-v2",
    "llama4": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "deepseek_v2": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "deepseek_v32": "deepseek-ai/DeepSeek-V3.2",
    "deepseek_v4": "deepseek-ai/DeepSeek-V4-Flash",
    "kimi_k2": "moonshotai/Kimi-K2-Instruct",
}
KINDS = ["floats", "online", *CONFIGS, *PACKED]
PERMUTED = [kind for kind in PACKED if "permuted" in kind]
FEW_ROWS = ("in_proj_ba", "in_proj_b", "in_proj_a")
"""Projections of few rows. A word or a block is too much of them to be cut, and published checkpoints have them in floats."""


def short(published: Published) -> tuple[CausalLM, Format | None]:
    """A published model in floats, cut down, and its format."""
    config = read_model_config(published.file, quantised=True)
    model: Any = build_model(replace(config, format=None), "bfloat16")
    shorten(model)
    return model, config.format


def read(kind: str, block: int | None = None) -> Format | None:
    if kind in ("floats", "panels"):
        return None
    if kind == "online":
        return asked_format("fp8", None, kind)
    config = CONFIGS[kind] if kind in CONFIGS else PACKED[kind][0]
    return read_format(
        {**config, "weight_block_size": [block, block]} if kind == "fp8 block" and block else config, kind
    )


def forms_of(checkpoint: Format | None, module: Module, dtype: torch.dtype, *, keep: bool = True) -> Forms | None:
    few = frozenset(inner_name(name) for _, _, name in module.sources() if name.endswith(FEW_ROWS))
    return None if checkpoint is None else Forms(checkpoint, dtype, Held(few, torch.float16), keep)


def check_parts(model: Module, forms: Any, layers: Layers, devices: int) -> None:
    """Each tensor's part has the shape that a layer of a part's sizes asks for."""
    tensors = {id(tensor.sink): tensor for tensor in model.checkpoint()}.values()  # some have two names
    owned: dict[int, list[CheckpointTensor]] = {}
    for tensor in tensors:
        owned.setdefault(id(tensor.owner), []).append(tensor)
        assert tensor.cut is None or (tensor.sink.fills and not tensor.once)
    for own in {repr(own): own for own in divided(tensors, devices)}.values():
        for layer, names in layers.items():
            mine = owned[id(layer)]
            made = layer_part(layer, mine, own)
            store(made, names, forms)
            wanted = [tensor for tensor in made.checkpoint() if tensor.sink.fills]
            declared = [tensor for tensor in mine if tensor.sink.fills]
            for want, whole in zip(wanted, declared, strict=True):
                assert want.sink.takes(shape_of(whole, own)), (whole.name, whole.cut, want.sink.shape)


@pytest.mark.parametrize(("kind", "family"), by_days(KINDS, FAMILIES))
def test_parts_of_all_tensors_of_a_layer_have_one_size(family: str, kind: str) -> None:
    model, _ = short(all_published()[FAMILIES[family]])
    forms, layers = forms_of(read(kind, 128), model, torch.bfloat16), layers_of(model)
    for layer, names in layers.items():
        store(layer, names, forms)
    try:
        for devices in (2, 4):
            check_parts(model, forms, layers, devices)
    except ConfigError as error:  # step sizes of 128 heads are one block
        assert (family, kind) == ("bamba", "fp8 block"), error


@pytest.mark.parametrize("published", all_published().values(), ids=lambda published: published.repository)
def test_published_models_declare_all_of_their_weights_and_can_be_cut_in_two(published: Published) -> None:
    model, checkpoint = short(published)
    check(model)
    forms, layers = forms_of(checkpoint, model, torch.bfloat16), layers_of(model)
    for layer, names in layers.items():
        store(layer, names, forms)
    check_parts(model, forms, layers, 2)


def filled(module: Module, tensors: dict[str, torch.Tensor], forms: Any, prefix: str) -> Module:
    """The whole module, in a format and filled."""
    for layer, names in layers_of(module, prefix).items():
        store(layer, names, forms)
    give_memory(module)
    for tensor in module.checkpoint(prefix):
        if tensor.name in tensors:
            tensor.sink.put(tensors[tensor.name], lambda target, source: target.copy_(source))
    return module


def give_memory(module: Any) -> None:
    materialize(module, torch.full((weights_bytes(module),), 255, dtype=torch.uint8))


def devices_of(
    module: Module, tensors: dict[str, torch.Tensor], forms: Any, prefix: str, devices: int = 2
) -> Iterator[tuple[Any, Parts]]:
    """The module as each of the devices has it, loaded from the whole checkpoint by declarations alone."""
    whole = list(module.checkpoint(prefix))
    ranks = divided(whole, devices)
    for device, own in enumerate(ranks):
        made: Any = copy.copy(module)
        names_of = {child: name for name, child in module.children()}
        for layer, names in layers_of(module, prefix).items():
            part = layer_part(layer, [tensor for tensor in whole if tensor.owner is layer], own)
            store(part, names, forms)
            if layer is module:
                made = part
            else:
                setattr(made, names_of[layer], part)
        give_memory(made)
        fill(made, prefix, Share(module, ranks, device), tensors)
        yield made, own


@pytest.mark.days(2)
@pytest.mark.parametrize("kind", [*KINDS, "panels"])
def test_two_devices_compute_together_what_one_computes(kind: str) -> None:
    torch.manual_seed(0)
    features, inner = 32, 192
    mlp: Any = GatedMLP(features, inner, torch.float32, bias=True)
    weights = {tensor.name: torch.randn(tensor.sink.shape) / 8 for tensor in mlp.checkpoint("mlp.")}
    matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    held = matrices if kind in ("floats", "online", "panels") else packed(matrices, kind)[0]
    tensors = {**weights, **held}
    for keep in (True, False):
        forms = kind if kind == "panels" else forms_of(read(kind), mlp, torch.float32, keep=keep)
        whole: Any = filled(mlp, tensors, forms, "mlp.")
        x, inputs, outs = torch.randn(3, features), [], []
        for part, _ in devices_of(whole, tensors, forms, "mlp."):
            inputs.append(part.activation(part.gate_up_proj(x)))
            outs.append(None if kind in PERMUTED else part.down_proj(inputs[-1]))
        out = whole.down_proj(torch.cat(inputs, -1)) if kind in PERMUTED else sum(outs)
        torch.testing.assert_close(out, whole(x), rtol=0, atol=0.3 if kind == "online" else 1e-4)


@pytest.mark.parametrize("kind", PERMUTED)
def test_columns_that_are_ordered_by_group_are_not_cut(kind: str) -> None:
    """A part of them has columns of all groups, and of some more than of others."""
    mlp = GatedMLP(64, 192, torch.float32)
    forms = forms_of(read(kind), mlp, torch.float32)
    for layer, names in layers_of(mlp, "mlp.").items():
        store(layer, names, forms)
    found = {tensor.name: tensor.cut for tensor in mlp.checkpoint("mlp.")}
    assert not any(cut for name, cut in found.items() if "down" in name)
    assert found["mlp.up_proj.scales" if "gptq" in kind else "mlp.up_proj.weight_scale"] is not None
    experts = Experts(ExpertSizes(2, 64, 192), torch.float32)
    for layer, names in layers_of(experts, "experts.").items():
        store(layer, names, forms)
    assert not any(tensor.cut for tensor in experts.checkpoint("experts."))


def expert_weights(experts: Experts, prefix: str) -> dict[str, torch.Tensor]:
    asked = [tensor for tensor in experts.checkpoint(prefix) if not tensor.instead_of]
    return {tensor.name: torch.randn(tensor.sink.shape) / 4 for tensor in asked}


@pytest.mark.days(2)
@pytest.mark.parametrize("kind", ["floats", "panels", "fp8 block", "int4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("by", ["inner features", "whole experts"])
def test_experts_are_divided_by_their_features_or_one_by_one(kind: str, by: str) -> None:
    torch.manual_seed(0)
    activation = GatedActivation("clamped_swiglu", 7.0) if kind == "mxfp4" else SILU
    features, inner, prefix = 32, 192 if kind == "fp8 block" else 64, "experts."
    together = kind == "mxfp4"
    experts: Any = Experts(
        ExpertSizes(4, features, inner), torch.float32, transposed=together, bias=together, activation=activation
    )
    weights = expert_weights(experts, prefix)
    matrices = {name: weight for name, weight in weights.items() if "bias" not in name}
    tensors = {**weights, **(matrices if kind in ("floats", "panels") else packed(matrices, kind)[0])}
    checkpoint = read_format({"quant_method": "mxfp4"}, kind) if together else read(kind)
    forms = kind if kind == "panels" else forms_of(checkpoint, experts, torch.float32)
    whole: Any = filled(experts, tensors, forms, prefix)
    x, chosen = torch.randn(5, features), torch.tensor([[0, 1], [2, 0], [1, 3], [3, 1], [0, 2]])
    routes = Routes(torch.rand(5, 2), chosen)
    if by == "inner features":
        out = sum(part(x, routes) for part, _ in devices_of(whole, tensors, forms, prefix))
    else:
        out = sum(
            part(x, Routes(routes.weights_TA * (chosen // 2 == device), chosen % 2))
            for device, part in enumerate(halves(whole, tensors, forms, prefix))
        )
    torch.testing.assert_close(out, whole(x, routes), rtol=0, atol=1e-4)


def halves(experts: Experts, tensors: dict[str, torch.Tensor], forms: Any, prefix: str) -> Iterator[Any]:
    """Two devices with half of the experts each."""
    number = experts.sizes.experts // 2
    for device in range(2):
        part: Any = copy.copy(experts)
        part.sizes = part.sizes._replace(experts=number)
        store(part, [name for _, _, name in part.sources(prefix)], forms)
        give_memory(part)
        own = range(device * number, (device + 1) * number)
        sinks = {tensor.name: tensor.sink for tensor in part.checkpoint(prefix)}
        for tensor in experts.checkpoint(prefix):
            assert tensor.experts is not None
            mine = [expert for expert in tensor.experts if expert in own]
            if tensor.name not in tensors or not mine:
                continue
            source, name = tensors[tensor.name], tensor.name
            if (place := tensor.sink.along("experts")) is not None:
                source = source.narrow(place[0], own.start, number)
            elif len(tensor.experts) == 1:
                name = name.replace(f".{mine[0]}.", f".{mine[0] - own.start}.", 1)
            sinks[name].put(source, lambda target, source: target.copy_(source))
        yield part


def test_key_value_heads_are_repeated_and_query_heads_are_not() -> None:
    """Eight devices with 16 query heads of 4 and 2 key/value heads: two of the former each, and one of the latter for four devices."""
    qkv = head_projection(32, 16, 2, 4, torch.float32, bias=False)
    weights = {tensor.name: torch.randn(tensor.sink.shape) for tensor in qkv.checkpoint("a.qkv.")}
    own = divided(qkv.checkpoint("a.qkv."), 8)
    (k,) = (tensor for tensor in qkv.checkpoint("a.qkv.") if tensor.part == "k_proj")
    assert torch.equal(part_of(k, weights[k.name], own[3]), weights[k.name][:4])
    assert torch.equal(part_of(k, weights[k.name], own[4]), weights[k.name][4:])
    found = [part for part, _ in devices_of(Holder(qkv), weights, None, "a.", 8)]
    assert {part.qkv.out_features for part in found} == {(2 + 1 + 1) * 4}
    with pytest.raises(ConfigError, match=r"16 heads can't be divided among 3 ranks\..*: 1, 2, 4, 8, 16\.$"):
        divided(qkv.checkpoint("a.qkv."), 3)


class Holder(Module):
    """A parent of one layer."""

    def __init__(self, qkv: Module) -> None:
        super().__init__()
        self.qkv = qkv


def test_inner_features_may_be_divided_unevenly_and_the_last_part_be_short() -> None:
    inner = Features("inner", 2880)
    tensor = TensorCut(1, (Section(inner),), step=32, multiple=128)
    assert tensor.together() == {inner: 128}
    own = [{inner: found} for found in (range(1408), range(1408, 2880))]
    assert [tensor.slices(part) for part in own] == [[slice(0, 44)], [slice(44, 90)]]


def test_sections_are_cut_one_by_one() -> None:
    keys = Features("key_heads", 4)
    channels = TensorCut(0, (Section(keys, 2), Section(keys, 2), Section(keys, 6)))
    assert channels.slices({keys: range(1, 3)}) == [slice(2, 6), slice(10, 14), slice(22, 34)]
    blocks = TensorCut(0, (Section(keys, 2), Section(keys, 6)), step=4, multiple=4)
    assert blocks.together() == {keys: 2}
    unlucky = TensorCut(0, (Section(keys, 1), Section(keys, 6)), step=8, multiple=8)
    assert unlucky.together() == {keys: 4}, "the second section begins inside a block"
    heads = Features("heads", 128, even=True)
    assert TensorCut(0, (Section(heads, 192),), step=128, multiple=128).together() == {heads: 2}


def test_an_element_that_two_sections_share_is_read_once() -> None:
    """Six rows and six more, four in a word: the second word has two rows of each. Such a tensor isn't cut."""
    features = Features("inner", 6)
    cut = TensorCut(0, (Section(features), Section(features)), step=4, multiple=4)
    assert cut.together() == {features: 6}
    assert cut.slices({features: range(6)}) == [slice(0, 2), slice(2, 3)]
