"""Products whose sums are made in the same order for every number of tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F

from pagerunner.errors import ConfigError
from pagerunner.ops import numerics
from pagerunner.ops.moe import Shared, fixed_pairs
from pagerunner.ops.pair_sums import PairSums, add_pairs_
from pagerunner.ops.routing import Routes, Routing, expert_logits, route
from pagerunner.ops.stored import Stored
from pagerunner.quant.base import Mixture, Unquantized, UnquantizedExperts, WeightMethod, Weights

_WORK_SPACE = "CUBLAS_WORKSPACE_CONFIG"
_TRIED = (1, 2, 3, 4, 7, 9, 16, 33, 64, 128, 200, 257)  # tokens


def without_work_space() -> None:
    """Have cuBLAS take none, in this process and for all engines in it. torch and cuBLAS look once, at the first product on a device."""
    os.environ[_WORK_SPACE] = ":0:0"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "0"  # torch would warn that it can't have more


def check_products(matrices: Iterable[torch.Tensor]) -> None:
    """Try matrices [O, I] of each shape: rows have to be the same bits in products of few tokens and of many.

    Raises:
        ConfigError: they aren't.
    """
    tried = set()
    for weight_OI in matrices:
        if weight_OI.shape in tried:
            continue
        tried.add(weight_OI.shape)
        generator = torch.Generator(weight_OI.device).manual_seed(0)
        x_TI = torch.randn(max(_TRIED), weight_OI.shape[1], generator=generator, device=weight_OI.device).to(
            weight_OI.dtype
        )
        for tokens in _TRIED:
            outputs = (F.linear(x_TI, weight_OI)[:tokens], F.linear(x_TI[:tokens], weight_OI))
            sums = (
                torch.addmm(outputs[0], x_TI[:tokens], weight_OI.t()),
                torch.addmm(F.linear(x_TI, weight_OI), x_TI, weight_OI.t())[:tokens],
            )
            if not (torch.equal(*outputs) and torch.equal(*sums)):
                raise ConfigError(
                    f"batch_invariant=True: cuBLAS computes a matrix of {list(weight_OI.shape)} by other sums for {tokens} tokens than for {max(_TRIED)}. It has "
                    f"work space if this process had products on the device before: start it with {_WORK_SPACE}=:0:0 in the environment, or leave batch_invariant out."
                )


class FixedOrder(Unquantized):
    """One matrix in the model's dtype, multiplied by cuBLAS for any number of tokens: one arithmetic, if cuBLAS has no work space.

    With work space it divides long sums among multiprocessors, how far by the number of tokens; see `without_work_space`.
    Norms, gates and biases are kernels of their own, which round as they do for many tokens.
    """

    def matrix(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | Stored | None:
        """None: kernels of other products would sum in other orders."""
        return None

    def apply(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See WeightMethod. With a bias torch would call another library."""
        out_TO = F.linear(x_TI, weights["weight"])
        return out_TO.add_(weights["bias"]) if "bias" in weights else out_TO

    def apply_add_(self, x_TI: torch.Tensor, weights: Weights, residual_TO: torch.Tensor) -> None:
        """See WeightMethod."""
        if "bias" in weights:
            residual_TO.add_(self.apply(x_TI, weights))
        else:
            residual_TO.addmm_(x_TI, weights["weight"].t())

    # What other forms join goes one after another.
    joins_norm = WeightMethod.joins_norm
    apply_to_norm = WeightMethod.apply_to_norm
    apply_to_norm_silu = WeightMethod.apply_to_norm_silu
    apply_silu = WeightMethod.apply_silu


class FixedExperts(UnquantizedExperts):
    """Experts' matrices in the model's dtype on a GPU. Each output is the sum of all its inputs in ascending order, whatever tile it is in."""

    def apply(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ExpertMethod."""
        out_TD = torch.zeros_like(x_TD) if residual_TD is None else residual_TD
        add_pairs_(out_TD, self._pairs(x_TD, routes, own))
        return out_TD

    def apply_then(
        self, x_TD: torch.Tensor, routes: Routes, own: Mixture, residual_TD: torch.Tensor, shared: Shared | None = None
    ) -> PairSums | None:
        """See ExpertMethod. The sums are always added by the next norm."""
        assert shared is None, "what every token passes has products in another order here"
        return self._pairs(x_TD, routes, own) if x_TD.shape[0] else None

    def outputs(self, x_TD: torch.Tensor, routes: Routes, own: Mixture) -> PairSums:
        """See ExpertMethod."""
        return self._pairs(x_TD, routes, own)

    def _pairs(self, x_TD: torch.Tensor, routes: Routes, own: Mixture) -> PairSums:
        return PairSums(fixed_pairs(x_TD, routes, self.operands(own)), routes.experts_TA)


def check_experts(own: Mixture, router_ED: torch.Tensor, routing: Routing) -> None:
    """Try a mixture: tokens have to get the same experts, and the same bits of them, in steps of few tokens and of many.

    Raises:
        ConfigError: they don't.
    """
    experts, features = router_ED.shape
    many = max(*_TRIED, -(-(numerics.FAST.experts.many + 1) * experts // routing.active))
    generator = torch.Generator(router_ED.device).manual_seed(0)
    x_TD = torch.randn(many, features, generator=generator, device=router_ED.device).to(router_ED.dtype)
    whole: tuple[torch.Tensor, ...] = ()
    for tokens in (many, *reversed(_TRIED)):
        routes = route(expert_logits(x_TD[:tokens], router_ED, fixed=True), routing, fixed=True)
        pairs = FixedExperts()._pairs(x_TD[:tokens], routes, own)
        made = routes.weights_TA, routes.experts_TA, pairs.out_PD.unflatten(0, routes.experts_TA.shape)
        whole = whole or made
        if not all(torch.equal(one, other[:tokens]) for one, other in zip(made, whole, strict=True)):
            raise ConfigError(
                f"batch_invariant=True: a mixture of {experts} experts of {features} features is computed by other sums for {tokens} tokens than for {many}. "
                f"Start the process with {_WORK_SPACE}=:0:0 in the environment, or leave batch_invariant out."
            )
