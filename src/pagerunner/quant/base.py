"""The seam between layers and the form their weights are stored in.

A form says what tensors it keeps in memory (`create`), which tensors of a checkpoint fill them (`sinks`), and how products are
computed from them. Layers read weights in no other way.

Shape letters: T tokens, I input features, O output features, E experts, A active experts of a token, D features of the residual
stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch

from pagerunner.dist.base import RankSums
from pagerunner.ops.activation import GatedActivation, silu_and_mul
from pagerunner.ops.embedding import embedding
from pagerunner.ops.linear import Norm, joins_few, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.moe import ExpertWeights, Shared, moe_experts, moe_experts_then, pair_products
from pagerunner.ops.pair_sums import PairSums, add_pairs_norm_
from pagerunner.ops.routing import Here, Routes
from pagerunner.ops.stored import Stored
from pagerunner.quant.sinks import CopySink, Sink

Weights = dict[str, torch.Tensor]


class WeightMethod(ABC):
    """Stored form of a linear layer's weights, [O, I] when they are unpacked.

    `weights` are those of the layer by name; they may also hold a "bias" [O] in the model's dtype, which is the layer's and is
    added by every product. A method that has operations which join the product with what stands before or behind it overrides
    the last four.
    """

    @abstractmethod
    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """The weights as meta tensors, of the shapes and dtypes that they have in memory; `dtype` is the model's."""

    @abstractmethod
    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """What a checkpoint holds for the output features `rows`, by the last part of the tensors' names.

        Several linears of one input may be kept as one layer; then each fills its own rows. `rows` has a start and a stop.
        It has a step of 2 where the rows of two linears alternate, as those of some experts' gates and ups.
        The sinks' `axes` say where the tensors could be cut for several devices.
        """

    @abstractmethod
    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weights as one matrix in the model's dtype, [O, I]: what the form stands for."""

    def matrices(self, weights: Mapping[str, torch.Tensor]) -> tuple[Stored, ...]:
        """The matrices in few bits that products read, [O, I]; none for a form in the model's dtype."""
        return ()

    def matrix(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | Stored | None:
        """The matrix as products of `ops/` take it, [O, I]; None if there is more to this form's products."""
        return None

    def rows(self, numbers_T: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The output features `numbers` of the matrix, [T, I]: the use of output weights as an embedding."""
        return embedding(numbers_T, self.dense(weights))

    def randomize(self, weights: Weights, generator: torch.Generator) -> None:
        """Fill the weights, or those of several such matrices with a dimension before the others, with small random values.

        The matrix and the bias get a deviation of 0.02. They are for measurements without a checkpoint.
        """
        for tensor in weights.values():
            tensor.normal_(0.0, 0.02, generator=generator)

    @abstractmethod
    def apply(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The layer's output [T, O]."""

    def apply_add_(self, x_TI: torch.Tensor, weights: Weights, residual_TO: torch.Tensor) -> None:
        """Add the layer's output to `residual` in place."""
        residual_TO.add_(self.apply(x_TI, weights))

    def part(self, x_TI: torch.Tensor, weights: Weights) -> RankSums | None:
        """What `apply_add_` adds, if that is a sum of ranks: this rank's part of it. None if there is nothing to add up."""
        return None

    def unfinished(self, x_TI: torch.Tensor, weights: Weights) -> RankSums | None:
        """As `part`, or parts in float32 that are still to be added up."""
        return self.part(x_TI, weights)

    def takes_parts(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        """Whether `unfinished` of so many tokens may be parts, so that the sum has a kernel of its own for them."""
        return False

    def joins_norm(self, tokens: int, size: int, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether `apply_to_norm` of so many tokens, with a matrix of `size` weights, has the norm in one of the product's own kernels."""
        return False

    def takes_gate(self, tokens: int, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether `apply_silu_add_` does more for so many tokens than the gate and `apply_add_`, one after another."""
        return False

    def apply_silu_add_(self, gate_up_T2I: torch.Tensor, weights: Weights, residual_TO: torch.Tensor) -> None:
        """Add the layer's output for `silu(gate) * up` to `residual` in place."""
        self.apply_add_(silu_and_mul(gate_up_T2I), weights, residual_TO)

    def apply_to_norm(self, x_TI: torch.Tensor, norm: Norm, weights: Weights) -> torch.Tensor:
        """The layer's output for `norm(x)`, [T, O]."""
        return self.apply(norm(x_TI), weights)

    def apply_to_sum(self, x_TI: torch.Tensor, pairs: PairSums, norm: Norm, weights: Weights) -> torch.Tensor:
        """Add the pairs' sums to `x` in place; the layer's output for `norm(x)` afterwards, [T, O]."""
        return self.apply(add_pairs_norm_(x_TI, pairs, norm), weights)

    def apply_to_norm_silu(self, x_TI: torch.Tensor, norm: Norm, weights: Weights) -> torch.Tensor:
        """`silu(gate) * up`, [T, O / 2], of the layer's output for `norm(x)`, which is the gate's features, then up's."""
        return silu_and_mul(self.apply_to_norm(x_TI, norm, weights))

    def apply_silu(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The same for `x`."""
        return silu_and_mul(self.apply(x_TI, weights))


class Unquantized(WeightMethod):
    """One matrix in the model's dtype."""

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """A single "weight" of shape [O, I]."""
        return {"weight": torch.empty(out_features, in_features, dtype=dtype, device="meta")}

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        return {"weight": CopySink(weights["weight"][rows], ("outputs", "inputs"))}

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod."""
        return weights["weight"]

    def matrix(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | Stored | None:
        """See WeightMethod."""
        return weights["weight"]

    def apply(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        return linear(x_TI, weights["weight"], weights.get("bias"))

    def apply_add_(self, x_TI: torch.Tensor, weights: Weights, residual_TO: torch.Tensor) -> None:
        """See WeightMethod."""
        linear_add_(x_TI, weights["weight"], residual_TO, weights.get("bias"))

    def joins_norm(self, tokens: int, size: int, weights: Mapping[str, torch.Tensor]) -> bool:
        """See WeightMethod."""
        return joins_few(tokens, weights["weight"].dtype, size)

    def apply_to_norm(self, x_TI: torch.Tensor, norm: Norm, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        return norm_linear(x_TI, norm, weights["weight"], weights.get("bias"))

    def apply_to_norm_silu(self, x_TI: torch.Tensor, norm: Norm, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        return norm_linear_silu(x_TI, norm, weights["weight"], weights.get("bias"))

    def apply_silu(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        return norm_linear_silu(x_TI, None, weights["weight"], weights.get("bias"))


class Mixture(NamedTuple):
    """What a layer asks of its experts: both matrices' weights, what is between them, and whether inputs are weighted instead of outputs."""

    gate_up: Weights
    down: Weights
    activation: GatedActivation
    weigh_inputs: bool = False


class ExpertMethod(ABC):
    """Stored form of the experts of a mixture: two matrices for each, "gate_up" [2 I, D] and "down" [D, I].

    Each expert's matrix is stored as `linear` stores it. So a matrix's weights are those of `linear` with a first dimension of experts:
    "weight" [E, 2 I, D] and [E, D, I] of Unquantized. They may also hold a "bias" [E, 2 I] and [E, D].
    `teams`: the products are for the tokens of so many teams of ranks. `summed`: their outputs are still to be added up with those of other ranks.
    `only`: those of several ranks' experts whose matrices are here.
    """

    teams = 1
    summed = False
    only: Here | None = None

    def __init__(self, linear: WeightMethod) -> None:
        self.linear = linear

    def create(self, experts: int, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """One matrix of all experts as meta tensors."""
        single = self.linear.create(out_features, in_features, dtype)
        return {name: tensor.new_empty(experts, *tensor.shape) for name, tensor in single.items()}

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool) -> dict[str, Sink]:
        """What a checkpoint holds for one matrix of all experts together, by what stands behind the matrix's name.

        `transposed`: input features come before output features. Empty for a form in which no checkpoint does that.
        """
        return {}

    def only_stacked(self, *, transposed: bool) -> bool:
        """Whether checkpoints never hold the experts' matrices one by one.

        `transposed`: checkpoints in floats hold them together, input features before output features, and never one by one.
        """
        return False

    @abstractmethod
    def matrix(self, weights: Weights) -> torch.Tensor | Stored:
        """One matrix of all experts, [E, 2 I, D] or [E, D, I], as `moe_experts` takes it."""

    def matrices(self, weights: Weights) -> tuple[Stored, ...]:
        """The matrices in few bits that products read; none for a form in the model's dtype."""
        own = self.matrix(weights)
        return () if isinstance(own, torch.Tensor) else (own,)

    def apply(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `moe_experts`, [T, D]."""
        return moe_experts(x_TD, routes, self.operands(own), residual_TD)

    def apply_then(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor, shared: Shared | None = None
    ) -> PairSums | RankSums | None:
        """See `moe_experts_then`. Several ranks' sums are still to be added up."""
        return moe_experts_then(x_TD, routes, self.operands(own), residual_TD, shared)

    def leaves_pairs(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        """Whether `apply_then` of so many tokens leaves pairs to the kernel that adds up ranks' sums."""
        return False

    def outputs(self, x_TD: torch.Tensor, routes: Routes, own: Mixture) -> PairSums | torch.Tensor:
        """As `apply`, [T, D], or what is still to be added up to that."""
        out_TD = torch.empty_like(x_TD)
        pairs = moe_experts_then(x_TD, routes, self.operands(own), out_TD, add=False)
        return out_TD if pairs is None else pairs

    def here(self, routes: Routes) -> Routes:
        """The routes to experts whose matrices are here; of others, pairs have no expert. They may be that already."""
        return routes

    def pair_products(self, x: torch.Tensor, routes: Routes, weights: Weights) -> torch.Tensor:
        """See `ops.moe.pair_products`, of one of the two matrices."""
        return pair_products(x, routes, self.matrix(weights), weights.get("bias"))

    def operands(self, own: Mixture) -> ExpertWeights:
        """The mixture as products take it."""
        gate_up, down, activation, weigh_inputs = own
        matrices, biases = (self.matrix(gate_up), self.matrix(down)), (gate_up.get("bias"), down.get("bias"))
        return ExpertWeights(*matrices, activation, *biases, weigh_inputs)


class UnquantizedExperts(ExpertMethod):
    """Matrices in the model's dtype."""

    def __init__(self) -> None:
        super().__init__(Unquantized())

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool) -> dict[str, Sink]:
        """The matrices under their own name."""
        if transposed:
            return {"": CopySink(weights["weight"].transpose(1, 2), ("experts", "inputs", "outputs"))}
        return {"": CopySink(weights["weight"], ("experts", "outputs", "inputs"))}

    def only_stacked(self, *, transposed: bool) -> bool:
        """See ExpertMethod."""
        return transposed

    def matrix(self, weights: Weights) -> torch.Tensor | Stored:
        """See ExpertMethod."""
        return weights["weight"]
