"""The module tree, fused linears and blocks."""

from __future__ import annotations

import pytest
import torch

from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import FusedLinear, Linear
from pagerunner.layers.mlp import GatedMLP
from pagerunner.layers.module import Module
from pagerunner.layers.moe import Experts, ExpertSizes, Router, SparseMLP
from pagerunner.layers.norm import OffsetRMSNorm, RMSNorm
from pagerunner.layers.sublayer import ResidualStream
from pagerunner.ops.activation import gelu_tanh_and_mul, silu_and_mul
from pagerunner.ops.routing import Routing
from pagerunner.quant.sinks import CopySink


def give_memory(module: Module) -> dict[str, torch.Tensor]:
    """Random weights for a tree, and views of them by checkpoint name."""
    for part in module.modules():
        for name, tensor in part.weights.items():
            part.weights[name] = torch.randn(tensor.shape)
    return targets(module, "x.")


def targets(module: Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """What each tensor of a checkpoint fills."""
    sinks = {tensor.name: tensor.sink for tensor in module.checkpoint(prefix) if not tensor.instead_of}
    return {name: sink.target for name, sink in sinks.items() if isinstance(sink, CopySink)}


def test_a_fused_linear_is_its_parts_side_by_side() -> None:
    fused = FusedLinear(6, {"a": 4, "b": 3}, torch.float32, bias=True)
    views = give_memory(fused)
    assert sorted(views) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    x = torch.randn(5, 6)
    a, b = fused(x).split([4, 3], -1)
    torch.testing.assert_close(a, x @ views["a.weight"].T + views["a.bias"])
    torch.testing.assert_close(b, x @ views["b.weight"].T + views["b.bias"])


def test_names_follow_attributes_and_tuples() -> None:
    class Tree(Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = GatedMLP(4, 8, torch.float32)
            self.many = (RMSNorm(4, 1e-6, torch.float32), Linear(4, 4, torch.float32, bias=True))

    tree = Tree()
    assert list(targets(tree)) == [
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "many.0.weight",
        "many.1.weight",
        "many.1.bias",
    ]
    assert len(list(tree.modules())) == 6


def test_a_shared_module_is_visited_once() -> None:
    class Tree(Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Linear(4, 4, torch.float32)
            self.two = (self.one, self.one)

    assert len(list(Tree().modules())) == 2


def test_gated_mlp() -> None:
    mlp = GatedMLP(4, 8, torch.float32, bias=True)
    views = give_memory(mlp)
    x = torch.randn(3, 4)
    gate = x @ views["x.gate_proj.weight"].T + views["x.gate_proj.bias"]
    up = x @ views["x.up_proj.weight"].T + views["x.up_proj.bias"]
    want = (torch.nn.functional.silu(gate) * up) @ views["x.down_proj.weight"].T + views["x.down_proj.bias"]
    torch.testing.assert_close(mlp(x), want)


@pytest.mark.parametrize("norm_class", [RMSNorm, OffsetRMSNorm])
@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul])
def test_a_layer_joined_with_its_norm_and_the_residual_stream_is_the_same(norm_class, activation) -> None:
    norm = norm_class(4, 1e-6, torch.float32)
    mlp = GatedMLP(4, 8, torch.float32, bias=True, activation=activation)
    give_memory(norm), give_memory(mlp)
    x = torch.randn(3, 4)
    want = x + mlp(norm(x))
    torch.testing.assert_close(mlp.gate_up_proj.of_norm(x, norm), mlp.gate_up_proj(norm(x)))
    stream = ResidualStream(x)
    mlp.add_to(stream, norm)
    assert stream.pending_TD is None
    torch.testing.assert_close(stream.x_TD, want)


def test_a_pending_output_is_added_by_the_next_norm() -> None:
    norm, mlp = RMSNorm(4, 1e-6, torch.float32), GatedMLP(4, 8, torch.float32, bias=True)
    give_memory(norm), give_memory(mlp)
    x, pending = torch.randn(3, 4), torch.randn(3, 4)
    between = x + pending
    want = between + mlp(norm(between))
    stream = ResidualStream(x.clone())
    stream.pending_TD = pending
    torch.testing.assert_close(stream.product(norm, mlp.gate_up_proj), mlp.gate_up_proj(norm(between)))
    assert stream.pending_TD is None
    torch.testing.assert_close(stream.x_TD, between)
    stream = ResidualStream(x.clone())
    stream.pending_TD = pending
    mlp.add_to(stream, norm)
    torch.testing.assert_close(stream.normed(norm), norm(want))
    torch.testing.assert_close(stream.x_TD, want)


def test_tokens_can_be_dropped_only_where_nothing_is_pending() -> None:
    stream = ResidualStream(torch.arange(12.0).view(3, 4))
    stream.keep(torch.tensor([2, 0]))
    assert stream.x_TD[:, 0].tolist() == [8, 0]
    stream.pending_TD = stream.x_TD
    with pytest.raises(AssertionError):
        stream.keep(torch.tensor([0]))


def test_tokens_that_stay_keep_their_rows() -> None:
    """Routers have other kernels without rows. First runs meet those of every number of tokens only with rows."""
    stream = ResidualStream(torch.zeros(3, 4), torch.tensor([4, 5, 6], dtype=torch.int32))
    stream.keep(torch.tensor([2, 0]))
    assert stream.row_T is not None
    assert stream.row_T.tolist() == [6, 4]


def test_a_part_may_have_another_name_in_the_checkpoint() -> None:
    class Named(Module):
        def __init__(self) -> None:
            super().__init__()
            self.names = {"inner": "outer"}
            self.inner = RMSNorm(4, 1e-6, torch.float32)
            self.other = RMSNorm(4, 1e-6, torch.float32)

    assert list(targets(Named(), "x.")) == ["x.outer.weight", "x.other.weight"]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tokens", "pending"), [(1, False), (1, True), (5, False)])
def test_experts_add_to_the_residual_stream(gated: bool, tokens: int, pending: bool) -> None:
    f32 = torch.float32
    shared, gate = GatedMLP(4, 5, f32), Linear(4, 1, f32) if gated else None
    router = Router(4, 3, f32, Routing(2, normalise=True), bias="bias")
    experts = SparseMLP(router, Experts(ExpertSizes(3, 4, 6), f32), shared=shared, shared_gate=gate)
    norm = RMSNorm(4, 1e-6, f32)
    give_memory(norm), give_memory(experts)
    x, before = torch.randn(tokens, 4), torch.randn(tokens, 4)
    stream = ResidualStream(x.clone())
    if pending:
        stream.pending_TD, x = before, x + before
    experts.add_to(stream, norm)
    assert stream.pending_TD is None
    torch.testing.assert_close(stream.x_TD, x + experts(norm(x)))


def test_embedding_looks_up_and_scores() -> None:
    embedding = Embedding(10, 4, torch.float32)
    table = give_memory(embedding)["x.weight"]
    assert torch.equal(embedding(torch.tensor([3, 3, 9])), table[[3, 3, 9]])
    torch.testing.assert_close(embedding.logits(torch.ones(1, 4)), table.sum(-1).unsqueeze(0))
