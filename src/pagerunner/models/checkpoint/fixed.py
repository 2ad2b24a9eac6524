"""Products of a model whose tokens may not depend on what else a step computes (`batch_invariant`)."""

from __future__ import annotations

from pagerunner.errors import ConfigError
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import Experts, Router
from pagerunner.models.checkpoint.loader import Model
from pagerunner.quant.panels import InPanels


def fix_products(model: Model, device: str) -> None:
    """Let all products of a model on a "cpu" or "cuda" device make their sums in a fixed order. It has no memory yet.

    A CPU's kernels do so anyway (`ops/native/products.h`).

    Raises:
        ConfigError: a layer has products that can't.
    """
    if device != "cpu":
        raise _refused(f"a {device} device so far", "its products are chosen by the number of tokens")
    for module in model.modules():
        if isinstance(module, Experts | Router):
            raise _refused("a mixture of experts", "experts are computed by what else a step sends to them")
        if not isinstance(module, Linear | Embedding) or (
            isinstance(module, Embedding) and not getattr(model, "tied", False)
        ):
            continue
        if not isinstance(module.method, InPanels):
            why = "a CPU's products have a fixed order by its own kernels, in float32 with a C compiler"
            raise _refused(f"weights as {type(module.method).__name__} on a CPU", why)


def _refused(what: str, why: str) -> ConfigError:
    return ConfigError(f"batch_invariant=True isn't there for {what}: {why}. Leave batch_invariant out.")
