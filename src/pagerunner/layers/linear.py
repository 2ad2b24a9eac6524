"""Linear layers. Shape letters: T tokens, I input features, O output features, G groups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from pagerunner.dist.base import RankSums
from pagerunner.layers.cuts import Cut, tensor_cuts
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.linear import linear, linear_parts
from pagerunner.ops.lora import Adapters, Fused, joins_product, joins_row
from pagerunner.ops.pair_sums import PairSums
from pagerunner.ops.stored import Stored
from pagerunner.ops.unpacked import product_bytes
from pagerunner.quant.base import Unquantized, WeightMethod
from pagerunner.quant.sinks import CopySink


class Linear(Module):
    """`y_TO = x_TI @ weight.T + bias`, with weights stored as `method` says.

    `cut` says which features may be divided among devices: output features (each device computes some of them), or input
    features (each computes a sum over some of them, and the sums are added up). None: each device needs the whole layer. A layer that is
    cut along its input features can't be divided in a form that orders them by group (GPTQ's `desc_act`).
    `parts` are the output features of each linear that the layer is made of, by its name in the checkpoint; "" is the layer's own
    name. A layer that is `plain` stays in the model's dtype in every format: routers, output weights. One that `needs_dense` is read
    as one matrix for products of another shape. So it is unpacked while it is loaded, whatever the format.
    `adapted` says where adapters of the layer are found; None while there are none. Products get the adapters of the rows of `x`, and add what
    these adapters say; without, they are what they are in an engine that knows of no adapters. `takes_adapters`: whoever calls the layer hands
    them on.
    `most_weights`: of the matrix, or, if ranks divide it, of the largest part that one of them has. What ranks do together is decided by it.
    """

    adapted: Fused | None = None
    takes_adapters = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        cut: Cut | None = None,
        plain: bool = False,
        needs_dense: bool = False,
        method: WeightMethod | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.parts = {"": out_features}
        self.cut, self.plain, self.needs_dense = cut, plain, needs_dense
        self.has_bias = bias
        self.most_weights = out_features * in_features
        self.store(method or Unquantized())

    def store(self, method: WeightMethod) -> None:
        """Store the weights as `method` says. They have no memory afterwards."""
        self.method = method
        self.weights = method.create(self.out_features, self.in_features, self.dtype)
        if self.has_bias:
            self.weights["bias"] = torch.empty(self.out_features, dtype=self.dtype, device="meta")

    @property
    def matrix(self) -> torch.Tensor | Stored | None:
        """The matrix as products of `ops/` take it, [O, I]; None if there is more to the form's products."""
        return self.method.matrix(self.weights)

    def __call__(self, x_TI: torch.Tensor, adapters: Adapters | None = None) -> torch.Tensor:
        """Apply the layer."""
        if adapters is None or self.adapted is None:
            return self.method.apply(x_TI, self.weights)
        if self._joins(x_TI):
            return self._joined(x_TI, adapters)
        if (sums := self.part(x_TI, adapters)) is not None:
            return sums.total()
        y_TO = self.method.apply(x_TI, self.weights)
        adapters.add_(x_TI, self.adapted, y_TO)
        return y_TO

    def add_(self, x_TI: torch.Tensor, residual_TO: torch.Tensor, adapters: Adapters | None = None) -> None:
        """Add the layer's output to `residual` in place."""
        if adapters is None or self.adapted is None:
            self.method.apply_add_(x_TI, self.weights, residual_TO)
        elif self._joins(x_TI):
            self._joined(x_TI, adapters, residual_TO=residual_TO)
        elif (sums := self.part(x_TI, adapters)) is not None:
            sums.add_(residual_TO)
        else:
            self.method.apply_add_(x_TI, self.weights, residual_TO)
            adapters.add_(x_TI, self.adapted, residual_TO)

    def part(self, x_TI: torch.Tensor, adapters: Adapters | None = None) -> RankSums | None:
        """What `add_` adds, if ranks are to add it up: this rank's part of it. Of `B (A x)` that is B times what A's columns here make of `x`."""
        if adapters is None or self.adapted is None:
            return self.method.unfinished(x_TI, self.weights)
        sums = self.method.part(x_TI, self.weights)
        if sums is not None:
            adapters.add_(x_TI, self.adapted, sums.part)
        return sums

    def joins_norm(self, tokens: int) -> bool:
        """Whether `of_norm` of so many tokens has the norm in one of the product's own kernels, on the rank with the largest part."""
        return self.method.joins_norm(tokens, self.most_weights, self.weights)

    def takes_gate(self, tokens: int) -> bool:
        """Whether `add_silu_` does more for so many tokens than the gate and `add_`, one after another."""
        return self.method.takes_gate(tokens, self.weights)

    def add_silu_(self, gate_up_T2I: torch.Tensor, residual_TO: torch.Tensor, adapters: Adapters | None = None) -> None:
        """Add the layer's output for `silu(gate) * up` to `residual` in place."""
        self.method.apply_silu_add_(gate_up_T2I, self.weights, residual_TO)
        if adapters is not None and self.adapted is not None:
            adapters.add_(silu_and_mul(gate_up_T2I), self.adapted, residual_TO)

    def of_norm(self, x_TI: torch.Tensor, norm: RMSNorm, adapters: Adapters | None = None) -> torch.Tensor:
        """Apply the layer to `norm(x)`."""
        if adapters is None or self.adapted is None:
            return self.method.apply_to_norm(x_TI, norm.parameters, self.weights)
        if self._joins(x_TI):
            return self._joined(x_TI, adapters, norm)
        if isinstance(self.matrix, torch.Tensor) and not self.joins_norm(x_TI.shape[0]):
            return self(norm(x_TI), adapters)
        y_TO = self.method.apply_to_norm(x_TI, norm.parameters, self.weights)
        adapters.add_(x_TI, self.adapted, y_TO, norm.parameters)
        return y_TO

    def in_parts(self, x_TI: torch.Tensor, norm: RMSNorm | None, adapters: Adapters | None = None) -> torch.Tensor:
        """Apply the layer to `norm(x)`, or `x`: [T, O]; or float32 sums [P, T, O], maybe of more tokens, which add up to it in their order."""
        if adapters is None and not self.has_bias and type(self.method) is Unquantized:
            return linear_parts(x_TI, self.weights["weight"], None if norm is None else norm.parameters)
        return self(x_TI, adapters) if norm is None else self.of_norm(x_TI, norm, adapters)

    def of_sum(
        self, x_TI: torch.Tensor, pairs: PairSums, norm: RMSNorm, adapters: Adapters | None = None
    ) -> torch.Tensor:
        """Add the pairs' sums to `x` in place, and apply the layer to `norm(x)`."""
        y_TO = self.method.apply_to_sum(x_TI, pairs, norm.parameters, self.weights)
        if adapters is not None and self.adapted is not None:
            adapters.add_(x_TI, self.adapted, y_TO, norm.parameters)
        return y_TO

    def silu_of_norm(self, x_TI: torch.Tensor, norm: RMSNorm, adapters: Adapters | None = None) -> torch.Tensor:
        """`silu(gate) * up`, [T, O / 2], of the layer applied to `norm(x)`, whose output is the gate's features, then up's."""
        if adapters is not None and self.adapted is not None:
            if self._joins(x_TI):
                return self._joined(x_TI, adapters, norm, gated=True)
            if isinstance(self.matrix, torch.Tensor) and not self.joins_norm(x_TI.shape[0]):
                return self.silu(norm(x_TI), adapters)
            y_T2O = self.method.apply_to_norm(x_TI, norm.parameters, self.weights)
            return adapters.gated(x_TI, self.adapted, y_T2O, norm.parameters)
        return self.method.apply_to_norm_silu(x_TI, norm.parameters, self.weights)

    def silu(self, x_TI: torch.Tensor, adapters: Adapters | None = None) -> torch.Tensor:
        """As `silu_of_norm`, of the layer applied to `x`."""
        if adapters is not None and self.adapted is not None:
            if self._joins(x_TI):
                return self._joined(x_TI, adapters, gated=True)
            return adapters.gated(x_TI, self.adapted, self.method.apply(x_TI, self.weights))
        return self.method.apply_silu(x_TI, self.weights)

    def _joins(self, x_TI: torch.Tensor) -> bool:
        """Whether adapters' sums are part of the product's own kernels."""
        if self.adapted is None or type(self.method) is not Unquantized:
            return False
        weight_OI = self.weights["weight"]
        return joins_row(x_TI, weight_OI) or joins_product(x_TI, weight_OI)

    def _joined(
        self,
        x_TI: torch.Tensor,
        adapters: Adapters,
        norm: RMSNorm | None = None,
        *,
        gated: bool = False,
        residual_TO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output for `x`, or for `norm(x)`, of a product that `_joins`, or what `gated` makes of it; added to `residual`, if there is one."""
        assert self.adapted is not None
        tokens = x_TI.shape[0]
        width = self.out_features // (2 if gated and tokens == 1 else 1)
        out_TO = x_TI.new_empty(tokens, width) if residual_TO is None else residual_TO
        flags = {"gated": gated, "add": residual_TO is not None}
        weight_OI, bias_O = self.weights["weight"], self.weights.get("bias")
        if tokens > 1:
            x_TI = x_TI if norm is None else norm(x_TI)
            return adapters.product(self.adapted, x_TI, weight_OI, bias_O, out_TO, **flags)
        own = None if norm is None else norm.parameters
        return adapters.row(self.adapted, x_TI, weight_OI, bias_O, out_TO, own, **flags)

    @property
    def dense_OI(self) -> torch.Tensor:
        """The weights as one matrix in the model's dtype, for products of another shape."""
        return self.method.dense(self.weights)

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The matrices in few bits that products read; none for a form in the model's dtype."""
        return self.method.matrices(self.weights)

    def unpacked_bytes(self, tokens: int) -> int:
        """The most that the layer unpacks at a time for up to so many tokens on a CUDA device."""
        sizes = (product_bytes(one, self.dtype, tokens) for one in self.stored)
        return max(sizes, default=0)

    def randomize(self, generator: torch.Generator) -> None:
        """See Module."""
        self.method.randomize(self.weights, generator)

    def sources(self, prefix: str = "") -> Iterator[tuple[Module, str, str]]:
        """See Module."""
        for part in self.parts:
            yield self, part, self._part_prefix(prefix, part).removesuffix(".")

    def checkpoint(self, prefix: str = "") -> Iterator[CheckpointTensor]:
        """What the form asks for each part, and the part's bias."""
        first, bias_O = 0, self.weights.get("bias")
        for part, size in self.parts.items():
            rows = slice(first, first + size)
            sinks = self.method.sinks(self.weights, rows)
            if bias_O is not None:
                sinks["bias"] = CopySink(bias_O[rows], ("outputs",))
            cut = self.cut_of(part)
            cuts = tensor_cuts(sinks, cut)
            for name, sink in sinks.items():
                once = name == "bias" and sink.fills and cut is not None and cut.axis == "inputs"
                yield CheckpointTensor(
                    self._part_prefix(prefix, part) + name, sink, self, part, cut=cuts[name], once=once
                )
            first += size

    def _part_prefix(self, prefix: str, part: str) -> str:
        """What the names of a part's tensors begin with."""
        return prefix

    def cut_of(self, part: str) -> Cut | None:
        """Which features of a part may be divided among devices."""
        return self.cut


def kernels_of(modules: Iterable[Module]) -> list[Callable[[int], Hashable]]:
    """For each kind of matrix in a model, what decides which kernels a number of tokens needs on a CUDA device; see `Op.kernels_for`."""
    kinds: dict[Hashable, Callable[[int], Hashable]] = {}
    for layer in (module for module in modules if isinstance(module, Linear)):
        for matrix in layer.stored:
            parts = matrix._asdict()
            kind = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in parts.values())
            shapes: dict[str, Any] = {name: x.to("meta") for name, x in parts.items() if isinstance(x, torch.Tensor)}
            kinds[kind] = partial(_kernels, matrix._replace(**shapes), layer.dtype, matrix.codes.device)
        dense = None if layer.stored else layer.matrix
        if isinstance(dense, torch.Tensor):
            in_parts = partial(layer.method.takes_parts, features=dense.shape[0], dtype=layer.dtype)
            asks = partial(_dense_kernels, dense.to("meta"), layer.dtype, dense.device, in_parts)
            kinds[dense.shape, dense.dtype, type(layer.method)] = asks
    return list(kinds.values())


def _kernels(matrix: torch.Tensor | Stored, dtype: torch.dtype, device: torch.device, tokens: int) -> Hashable:
    return linear.kernels_for(tokens, matrix, dtype, device)


def _dense_kernels(
    matrix: torch.Tensor, dtype: torch.dtype, device: torch.device, parts: Callable[[int], bool], tokens: int
) -> Hashable:
    return _kernels(matrix, dtype, device, tokens), parts(tokens)


class FusedLinear(Linear):
    """Several linears of one input as one matrix: their outputs stand beside each other in `parts` order.

    `parts` maps each one's name in the checkpoint, a sibling of this layer, to its output features. `cuts` are those of the parts that it
    names.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        dtype: torch.dtype,
        *,
        bias: bool = False,
        cuts: Mapping[str, Cut] | None = None,
        plain: bool = False,
        method: WeightMethod | None = None,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), dtype, bias=bias, plain=plain, method=method)
        self.parts = parts
        self._part_cuts = dict(cuts or {})

    def _part_prefix(self, prefix: str, part: str) -> str:
        parent = prefix.removesuffix(".").rpartition(".")[0]
        return f"{parent}.{part}." if parent else f"{part}."

    def cut_of(self, part: str) -> Cut | None:
        """See Linear."""
        return self._part_cuts.get(part)


class GroupedLinear(Linear):
    """A linear for each group of input features: `y_TGO = x_TGI @ weight_GOI.T`. Its matrix holds the groups one below another.

    A checkpoint holds that matrix, [G * O, I].
    """

    def __init__(
        self, groups: int, in_features: int, out_features: int, dtype: torch.dtype, *, cut: Cut | None = None
    ) -> None:
        super().__init__(in_features, groups * out_features, dtype, cut=cut, needs_dense=True)
        self.groups = groups

    def __call__(self, x_TGI: torch.Tensor, adapters: Adapters | None = None) -> torch.Tensor:
        """Apply the layer, [T, G, O]. It takes no adapters."""
        assert adapters is None, "a layer that needs its matrix dense takes no adapters"
        weight_GOI = self.dense_OI.view(self.groups, -1, x_TGI.shape[-1])
        return torch.bmm(x_TGI.transpose(0, 1), weight_GOI.transpose(1, 2)).transpose(0, 1)
