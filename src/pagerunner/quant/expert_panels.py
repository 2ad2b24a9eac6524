"""Experts of a CPU's models: each expert's two matrices in panels, as the CPU kernels read them.

Shape letters: E experts, D features of the residual stream, I an expert's inner features, N features of a panel, T tokens, P
panels of a matrix, or pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagerunner.ops.activation import SILU
from pagerunner.ops.moe import Shared, add_shared_, sum_of_pairs
from pagerunner.ops.native import mixture
from pagerunner.ops.native.calls import Commands
from pagerunner.ops.panels import Layout, product, put_rows
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored
from pagerunner.quant.base import ExpertMethod, Mixture, WeightMethod, Weights
from pagerunner.quant.dequantized import experts_only_stacked, unpacking_experts
from pagerunner.quant.panels import PanelMethod, unpacking
from pagerunner.quant.sinks import FLOATS, CopyWeight, Sink, evidence


class _OfOneExpert(PanelMethod):
    """The form of an expert's matrix: gates and ups, or the one that follows them.

    Its shape tells which: with as many input features, gates and ups are twice as many panels.
    """

    def __init__(self, width: int, features: int, inner: int, form: WeightMethod | None) -> None:
        self.form = form
        self.layouts = (Layout(width, 2 * inner, 2), features), (Layout(width, features), inner)

    def layout_of(self, weights: Mapping[str, torch.Tensor]) -> Layout:
        """See PanelMethod."""
        shape = tuple(weights["weight"].shape[-3:-1])
        (layout,) = (one for one, inputs in self.layouts if (one.panels, inputs) == shape)
        return layout

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        if self.form is None:
            return super().sinks(weights, rows)
        return unpacking(self.form, weights["weight"], self.layout_of(weights), rows)

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """See WeightMethod."""
        assert dtype == torch.float32
        (layout,) = (one for one, inputs in self.layouts if (one.outputs, inputs) == (out_features, in_features))
        return {"weight": torch.empty(layout.panels, in_features, layout.width, dtype=dtype, device="meta")}


class ExpertsInPanels(ExpertMethod):
    """Experts' matrices in float32, those of each expert in panels: "weight" [E, P, D, N] and [E, P, I, N].

    `form` is that in which a checkpoint holds each matrix, or all of them together; None: floats.
    """

    linear: _OfOneExpert
    fixed = False
    """Whether more tokens run as several steps of few: sums over a token's experts then have one order."""

    def __init__(self, width: int, features: int, inner: int, form: WeightMethod | None = None) -> None:
        super().__init__(_OfOneExpert(width, features, inner, form))
        self.form = form

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool) -> dict[str, Sink]:
        """All experts' matrices under the matrix's own name; in a form, what that says."""
        panels_EPIN, layout = weights["weight"], self.linear.layout_of(weights)
        if self.form is None:
            return {"": _ExpertsSink(panels_EPIN, layout, transposed=transposed)}
        inputs, dtype = panels_EPIN.shape[2], panels_EPIN.dtype

        def put(expert: int, matrix_OI: torch.Tensor) -> None:
            put_rows(panels_EPIN[expert], layout, 0, matrix_OI)

        shape = (len(panels_EPIN), layout.outputs, inputs)
        return unpacking_experts(self.form, shape, dtype, panels_EPIN.device, put, transposed=transposed)

    def only_stacked(self, *, transposed: bool) -> bool:
        """See ExpertMethod."""
        return transposed if self.form is None else experts_only_stacked(self.form, transposed=transposed)

    def matrix(self, weights: Weights) -> torch.Tensor | Stored:
        """See ExpertMethod; a copy. Products read panels."""
        return torch.stack([self.linear.dense({"weight": panels_PIN}) for panels_PIN in weights["weight"]])

    def matrices(self, weights: Weights) -> tuple[Stored, ...]:
        """See ExpertMethod."""
        return ()

    def apply(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ExpertMethod."""
        gate_up, down, activation, weigh_inputs = own
        if self.fixed and x_TD.shape[0] > mixture.FEW_TOKENS:
            out_TD = torch.zeros_like(x_TD) if residual_TD is None else residual_TD
            for x, weights, experts_of, out in zip(
                *(one.split(mixture.FEW_TOKENS) for one in (x_TD, *routes[:2], out_TD)), strict=True
            ):
                self.apply(x, Routes(weights, experts_of), own, out)
            return out_TD
        if mixture.serves(x_TD, routes, residual_TD):
            matrices = mixture.Matrices(gate_up["weight"], down["weight"], gate_up.get("bias"), down.get("bias"))
            how = self.linear.layout_of(gate_up).section, activation
            return mixture.experts(x_TD, routes, matrices, *how, weigh_inputs=weigh_inputs, residual_TD=residual_TD)
        gated, experts = activation == SILU, gate_up["weight"].shape[0]

        def run(x_PD: torch.Tensor, counts_E: list[int]) -> torch.Tensor:
            commands = Commands()
            inner = self._products(gate_up, x_PD, counts_E, commands, gate=gated)
            if not gated:
                commands.run()
                commands, inner = Commands(), activation(inner)
            out_PD = self._products(down, inner, counts_E, commands)
            commands.run()
            return out_PD

        out_TD = sum_of_pairs(x_TD, routes, experts, run, weigh_inputs=weigh_inputs)
        return out_TD if residual_TD is None else residual_TD.add_(out_TD)

    def apply_then(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor, shared: Shared | None = None
    ) -> None:
        """See ExpertMethod. No pairs are left."""
        if shared is not None:
            add_shared_(x_TD, shared, own.activation, residual_TD)
        self.apply(x_TD, routes, own, residual_TD)

    def outputs(self, x_TD: torch.Tensor, routes: Routes, own: Mixture) -> torch.Tensor:
        """See ExpertMethod."""
        return self.apply(x_TD, routes, own)

    def pair_products(self, x: torch.Tensor, routes: Routes, weights: Weights) -> torch.Tensor:
        """See ExpertMethod."""
        active, pairs = routes.experts_TA.shape[1], routes.experts_TA.numel()
        experts_P, experts = routes.experts_TA.flatten(), weights["weight"].shape[0]
        order_P = experts_P.argsort(stable=True)[int((experts_P < 0).sum()) :]
        counts_E = torch.bincount(experts_P[order_P], minlength=experts).tolist()
        commands = Commands()
        own = self._products(weights, x[order_P if len(x) == pairs else order_P // active], counts_E, commands)
        commands.run()
        return x.new_zeros(pairs, own.shape[1]).index_copy_(0, order_P, own)

    def _products(
        self, weights: Weights, x_PI: torch.Tensor, counts_E: list[int], commands: Commands, *, gate: bool = False
    ) -> torch.Tensor:
        """Each pair's product with its expert's matrix, once `commands` have run. Pairs stand in the order of their experts."""
        panels_EPIN, bias_EO, layout = weights["weight"], weights.get("bias"), self.linear.layout_of(weights)
        out_PO, first = x_PI.new_empty(x_PI.shape[0], layout.section if gate else layout.outputs), 0
        for expert, count in enumerate(counts_E):
            if count:
                own, bias_O = slice(first, first + count), None if bias_EO is None else bias_EO[expert]
                matrix = panels_EPIN[expert], layout, bias_O
                product(x_PI[own], *matrix, gate=gate, out_TO=out_PO[own], commands=commands)
                first += count
        return out_PO


class _ExpertsSink(Sink):
    """Fills the matrices of all experts from one tensor, [E, O, I], or [E, I, O] if it is `transposed`."""

    def __init__(self, panels_EPIN: torch.Tensor, layout: Layout, *, transposed: bool) -> None:
        experts, outputs, inputs = panels_EPIN.shape[0], layout.outputs, panels_EPIN.shape[2]
        if transposed:
            super().__init__((experts, inputs, outputs), FLOATS, ("experts", "inputs", "outputs"))
        else:
            super().__init__((experts, outputs, inputs), FLOATS, ("experts", "outputs", "inputs"))
        self.panels_EPIN, self.layout, self.transposed = panels_EPIN, layout, transposed

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """See Sink."""
        for panels_PIN, matrix in zip(
            self.panels_EPIN, source.transpose(1, 2) if self.transposed else source, strict=True
        ):
            put_rows(panels_PIN, self.layout, 0, matrix)
        return evidence(source)
