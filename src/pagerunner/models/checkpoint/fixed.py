"""Products of a model whose tokens may not depend on what else a step computes (`batch_invariant`)."""

from __future__ import annotations

from functools import partial

import torch

from pagerunner.errors import ConfigError
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import Experts, Router, SparseMLP
from pagerunner.models.checkpoint.loader import Model
from pagerunner.ops.native.mixture import FEW_TOKENS
from pagerunner.ops.routing import expert_logits
from pagerunner.quant.base import Unquantized, UnquantizedExperts
from pagerunner.quant.expert_panels import ExpertsInPanels
from pagerunner.quant.fixed import FixedExperts, FixedOrder, check_experts, check_products, without_work_space
from pagerunner.quant.panels import InPanels

_BY_TOKENS = "their products are chosen by the number of tokens"
_ON_CPUS = 'a CPU\'s products have a fixed order by its own kernels, which need dtype="float32" and a C compiler'


def fix_products(model: Model, device: str) -> None:
    """Let all products of a model on a "cpu" or "cuda" device make their sums in a fixed order. It has no memory yet.

    A CPU's kernels do so anyway (`ops/native/products.h`).

    Raises:
        ConfigError: a layer has products that can't.
    """
    if device == "cuda":
        without_work_space()
    for module in model.modules():
        if isinstance(module, Experts | Router):
            _fix_mixture(module, device)
        if not isinstance(module, Linear | Embedding) or (
            isinstance(module, Embedding) and not getattr(model, "tied", False)
        ):
            continue
        if isinstance(module, Linear) and module.needs_dense:
            raise _refused("latent attention", "its matrices are multiplied in other shapes by the number of tokens")
        if device == "cuda" and type(module.method) is Unquantized:
            module.store(FixedOrder())
        elif device == "cuda":
            raise _refused(f"weights as {type(module.method).__name__}", _BY_TOKENS)
        elif not isinstance(module.method, InPanels):
            raise _refused(f"weights in {str(module.dtype).removeprefix('torch.')} on a CPU", _ON_CPUS)


def _fix_mixture(module: Experts | Router, device: str) -> None:
    if isinstance(module, Router):
        module.fixed_logits = partial(expert_logits, fixed=True) if device == "cuda" else _logits_of_few
    elif device == "cuda" and type(module.method) is UnquantizedExperts:
        module.store(FixedExperts())
    elif device == "cuda":
        raise _refused(f"experts as {type(module.method).__name__}", _BY_TOKENS)
    elif isinstance(module.method, ExpertsInPanels):
        module.method.fixed = True
    else:
        raise _refused("experts on a CPU", _ON_CPUS)


def _logits_of_few(x_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> torch.Tensor:
    """Scores of as many tokens at a time as the CPU's kernel takes, so that torch has none of them."""
    return torch.cat([expert_logits(part_TD, weight_ED, bias_E) for part_TD in x_TD.split(FEW_TOKENS)])


def check_fixed(model: Model) -> None:
    """Try the products of a model that has its weights, on a CUDA device. Raises ConfigError if what is beside a token changes its bits."""
    fixed = (
        module
        for module in model.modules()
        if isinstance(module, Linear | Embedding) and isinstance(module.method, FixedOrder)
    )
    check_products(module.dense_OI if isinstance(module, Linear) else module.table_VD for module in fixed)
    tried = set()
    for module in model.modules():
        if isinstance(module, SparseMLP) and (module.experts.sizes, module.router.routing) not in tried:
            tried.add((module.experts.sizes, module.router.routing))
            check_experts(module.experts.mixture, module.router.matrix_ED, module.router.routing)


def _refused(what: str, why: str) -> ConfigError:
    return ConfigError(f"batch_invariant=True isn't there for {what}: {why}. Leave batch_invariant out.")
