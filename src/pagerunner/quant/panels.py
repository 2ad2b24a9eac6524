"""Weights of a CPU's models: one matrix in panels, as the CPU kernels read it, and no other copy of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from pagerunner.ops.linear import Norm
from pagerunner.ops.panels import Layout, chosen_rows, product, put_rows, put_rows_apart, rows_of
from pagerunner.quant.base import WeightMethod, Weights
from pagerunner.quant.dequantized import unpacked_sinks
from pagerunner.quant.sinks import FLOATS, CopyWeight, Sink, evidence


class PanelMethod(WeightMethod):
    """A "weight" in float32 in panels, [P, I, N]."""

    @abstractmethod
    def layout_of(self, weights: Mapping[str, torch.Tensor]) -> Layout:
        """How these weights stand in panels."""

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        return {"weight": PanelSink(weights["weight"], self.layout_of(weights), rows)}

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod; a copy."""
        return rows_of(weights["weight"], self.layout_of(weights))

    def rows(self, numbers_T: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod."""
        return chosen_rows(weights["weight"], self.layout_of(weights), numbers_T)

    def randomize(self, weights: Weights, generator: torch.Generator) -> None:
        """See WeightMethod. The matrix, or the matrices of several experts, are those that `Unquantized` would have."""
        for name, tensor in weights.items():
            if name == "weight":
                layout, panels = self.layout_of(weights), tensor.unflatten(0, (1, -1)) if tensor.dim() == 3 else tensor
                matrices = tensor.new_empty(len(panels), layout.outputs, tensor.shape[-2])
                matrices.normal_(0.0, 0.02, generator=generator)
                for panels_PIN, matrix_OI in zip(panels, matrices, strict=True):
                    put_rows(panels_PIN, layout, 0, matrix_OI)
            else:
                tensor.normal_(0.0, 0.02, generator=generator)

    def apply(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        if x_TI.dim() != 2:
            return self.apply(x_TI.flatten(0, -2), weights).unflatten(0, x_TI.shape[:-1])
        return product(x_TI, weights["weight"], self.layout_of(weights), weights.get("bias"))

    def apply_add_(self, x_TI: torch.Tensor, weights: Weights, residual_TO: torch.Tensor) -> None:
        """See WeightMethod."""
        product(x_TI, weights["weight"], self.layout_of(weights), weights.get("bias"), add_to_TO=residual_TO)

    def apply_to_norm(self, x_TI: torch.Tensor, norm: Norm, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        return product(x_TI, weights["weight"], self.layout_of(weights), weights.get("bias"), norm=norm)

    def apply_to_norm_silu(self, x_TI: torch.Tensor, norm: Norm, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        return product(x_TI, weights["weight"], self.layout_of(weights), weights.get("bias"), norm=norm, gate=True)


class InPanels(PanelMethod):
    """A layer's matrix in panels.

    `forms` are those in which a checkpoint holds parts of it, by the first of their output features, as for `Dequantized`.
    """

    def __init__(self, layout: Layout, forms: Mapping[int, WeightMethod] | None = None) -> None:
        self.layout, self.forms = layout, dict(forms or {})

    def layout_of(self, weights: Mapping[str, torch.Tensor]) -> Layout:
        """See PanelMethod."""
        return self.layout

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """See WeightMethod."""
        assert dtype == torch.float32 and out_features == self.layout.outputs
        shape = (self.layout.panels, in_features, self.layout.width)
        return {"weight": torch.empty(shape, dtype=dtype, device="meta")}

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        panels_PIN, form = weights["weight"], self.forms.get(rows.start)
        if form is None:
            return super().sinks(weights, rows)
        return unpacking(form, panels_PIN, self.layout, rows)


def unpacking(form: WeightMethod, panels_PIN: torch.Tensor, layout: Layout, rows: slice) -> dict[str, Sink]:
    """What fills the output features `rows`, which may have a step, from what a checkpoint holds of them in `form`."""
    numbers = range(layout.outputs)[rows]

    def put(matrix_RI: torch.Tensor) -> None:
        if numbers.step == 1:
            put_rows(panels_PIN, layout, numbers.start, matrix_RI)
        else:
            put_rows_apart(panels_PIN, layout, numbers, matrix_RI)

    return unpacked_sinks(form, (len(numbers), panels_PIN.shape[1]), panels_PIN, put)


class PanelSink(Sink):
    """Fills the output features `rows` of a matrix in panels from a checkpoint's matrix of floats."""

    def __init__(self, panels_PIN: torch.Tensor, layout: Layout, rows: slice) -> None:
        super().__init__((rows.stop - rows.start, panels_PIN.shape[1]), FLOATS, ("outputs", "inputs"))
        self.panels_PIN, self.layout, self.first = panels_PIN, layout, rows.start

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """See Sink."""
        put_rows(self.panels_PIN, self.layout, self.first, source)
        return evidence(source)
