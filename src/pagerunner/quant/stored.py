"""Weights that stay in few bits in memory: kernels convert them in registers while they multiply."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping

import torch

from pagerunner.ops import numerics
from pagerunner.ops.dispatch import has_triton
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu, silu_linear_add_
from pagerunner.ops.pair_sums import PairSums, add_pairs_norm_linear_
from pagerunner.ops.stored import Stored, dense
from pagerunner.quant.base import ExpertMethod, WeightMethod, Weights
from pagerunner.quant.sinks import Sink


class StoredMethod(WeightMethod):
    """A form whose tensors are a `Stored` matrix (`ops/stored.py`). `dtype` is the model's."""

    dtype: torch.dtype

    @abstractmethod
    def stored(self, weights: Mapping[str, torch.Tensor]) -> Stored:
        """The matrix, or all experts' with a first dimension E."""

    def matrices(self, weights: Mapping[str, torch.Tensor]) -> tuple[Stored, ...]:
        """See WeightMethod."""
        return (self.stored(weights),)

    def matrix(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | Stored | None:
        """See WeightMethod."""
        return self.stored(weights) if self.order(weights) is None else None

    def order(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The input feature of each of the stored matrix's columns, int32 [I]; None if columns are in their order."""
        return None

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool = False) -> dict[str, Sink]:
        """What a checkpoint holds for one matrix of all experts together, by what stands behind the matrix's name.

        `transposed`: in floats, input features come before output features.
        """
        return {}

    def only_stacked(self, *, transposed: bool) -> bool:
        """See `ExpertMethod.only_stacked`."""
        return False

    def check(self, out_features: int, in_features: int) -> None:
        """Raise ConfigError if no checkpoint holds a matrix of these sizes in this form."""
        return None

    def joins(self, starts: tuple[int, ...]) -> bool:
        """Whether parts that begin at the output features `starts` can be kept as one matrix."""
        return True

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod."""
        matrix, order = self.columns(weights), self.order(weights)
        return matrix if order is None else torch.empty_like(matrix).index_copy_(1, order.long(), matrix)

    def columns(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`dense` with the columns in the order in which they are stored."""
        return dense(self.stored(weights), self.dtype)

    def apply(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        return linear(self._ordered(x_TI, weights), self.stored(weights), weights.get("bias"))

    def apply_add_(self, x_TI: torch.Tensor, weights: Weights, residual_TO: torch.Tensor) -> None:
        """See WeightMethod."""
        linear_add_(self._ordered(x_TI, weights), self.stored(weights), residual_TO, weights.get("bias"))

    def takes_gate(self, tokens: int, weights: Mapping[str, torch.Tensor]) -> bool:
        """See WeightMethod. Rounding a product's input, or putting it in the codes' order, is one pass with the gate."""
        if self.order(weights) is not None:
            return False
        stored = self.stored(weights)
        if not stored.codes.is_cuda or not has_triton():
            return tokens >= numerics.FAST.products.rounded_tokens
        return bool(silu_linear_add_.kernels_for(tokens, stored, self.dtype, stored.codes.device))

    def apply_silu_add_(self, gate_up_T2I: torch.Tensor, weights: Weights, residual_TO: torch.Tensor) -> None:
        """See WeightMethod."""
        if self.order(weights) is not None:
            super().apply_silu_add_(gate_up_T2I, weights, residual_TO)
            return
        silu_linear_add_(gate_up_T2I, self.stored(weights), residual_TO, weights.get("bias"))

    def joins_norm(self, tokens: int, size: int, weights: Mapping[str, torch.Tensor]) -> bool:
        """See WeightMethod. Where the product rounds its input, that is one pass with the norm."""
        return self.order(weights) is None

    def apply_to_norm(self, x_TI: torch.Tensor, norm: Norm, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        if self.order(weights) is not None:
            return super().apply_to_norm(x_TI, norm, weights)
        return norm_linear(x_TI, norm, self.stored(weights), weights.get("bias"))

    def apply_to_sum(self, x_TI: torch.Tensor, pairs: PairSums, norm: Norm, weights: Weights) -> torch.Tensor:
        """See WeightMethod. Where the product rounds its input, that is one pass with the sum and the norm."""
        if self.order(weights) is not None:
            return super().apply_to_sum(x_TI, pairs, norm, weights)
        return add_pairs_norm_linear_(x_TI, pairs, norm, self.stored(weights), weights.get("bias"))

    def apply_to_norm_silu(self, x_TI: torch.Tensor, norm: Norm, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        if self.order(weights) is not None:
            return super().apply_to_norm_silu(x_TI, norm, weights)
        return norm_linear_silu(x_TI, norm, self.stored(weights), weights.get("bias"))

    def _ordered(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        order = self.order(weights)
        return x_TI if order is None else x_TI.index_select(-1, order)


class StoredExperts(ExpertMethod):
    """Experts whose matrices are stored as `linear` stores one; their columns are in their order."""

    linear: StoredMethod

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool) -> dict[str, Sink]:
        """See ExpertMethod."""
        return self.linear.stacked(weights, transposed=transposed)

    def only_stacked(self, *, transposed: bool) -> bool:
        """See ExpertMethod."""
        return self.linear.only_stacked(transposed=transposed)

    def matrix(self, weights: Weights) -> torch.Tensor | Stored:
        """See ExpertMethod."""
        return self.linear.stored(weights)


class Beside(WeightMethod):
    """Parts of one layer in forms of their own: each is a matrix of its own, and their outputs stand beside each other.

    `parts` are the number of output features and the form of each part, in their order.
    """

    def __init__(self, parts: tuple[tuple[int, WeightMethod], ...]) -> None:
        self.parts = parts

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """See WeightMethod."""
        found: Weights = {}
        for number, (outputs, form) in enumerate(self.parts):
            own = form.create(outputs, in_features, dtype)
            found |= {f"{number}.{name}": tensor for name, tensor in own.items()}
        return found

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod; `rows` are those of one part."""
        first = 0
        for number, (outputs, form) in enumerate(self.parts):
            if first == rows.start:
                return form.sinks(_of(weights, number), slice(0, outputs))
            first += outputs
        raise AssertionError(f"no part begins at output feature {rows.start}")

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod."""
        return torch.cat([form.dense(_of(weights, number)) for number, (_, form) in enumerate(self.parts)])

    def matrices(self, weights: Mapping[str, torch.Tensor]) -> tuple[Stored, ...]:
        """See WeightMethod."""
        return tuple(one for number, (_, form) in enumerate(self.parts) for one in form.matrices(_of(weights, number)))

    def randomize(self, weights: Weights, generator: torch.Generator) -> None:
        """See WeightMethod."""
        for number, (_, form) in enumerate(self.parts):
            form.randomize(_of(weights, number), generator)
        if "bias" in weights:
            weights["bias"].normal_(0.0, 0.02, generator=generator)

    def apply(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        out = [form.apply(x_TI, _of(weights, number)) for number, (_, form) in enumerate(self.parts)]
        both, bias_O = torch.cat(out, -1), weights.get("bias")
        return both if bias_O is None else both.add_(bias_O)


def _of(weights: Mapping[str, torch.Tensor], number: int) -> Weights:
    """The weights of one part."""
    return {name: weights[whole] for name, whole in _names_of(tuple(weights), number)}


@functools.lru_cache(maxsize=256)  # a model has a few kinds of layers, and every product asks
def _names_of(names: tuple[str, ...], number: int) -> tuple[tuple[str, str], ...]:
    """What weights are called within a part, and among all."""
    before = f"{number}."
    return tuple((name.removeprefix(before), name) for name in names if name.startswith(before))
