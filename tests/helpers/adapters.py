"""PEFT directories for tests: written by hand for any matrices of a tiny model, with and without `peft`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from helpers.forward import load
from pagerunner.engine.core.core import EngineCore
from pagerunner.layers.moe import Experts, ExpertSizes, Router, SparseMLP
from pagerunner.lora.adapter import Adapter, Stack, Targets, read_adapter
from pagerunner.lora.blocks import AdapterTable, Products
from pagerunner.models.checkpoint.loader import own_name
from pagerunner.ops.lora import Adapters
from pagerunner.ops.routing import Routing
from pagerunner.types.lora import AdapterInfo, LoRARequest

PREFIX = "base_model.model."


def load_adapters(core: EngineCore, requests: Iterable[LoRARequest]) -> list[AdapterInfo]:
    """Load adapters and wait for them. Raises what is wrong with the first that can't be loaded; the others are.

    Where a name is taken nothing is loaded.
    """
    numbers = core.begin_adapters(requests)
    while (infos := core.loaded_adapters(numbers)) is None:
        pass
    return infos


def write_adapter(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A directory with a config and these tensors, whose names begin behind the usual prefix."""
    path.mkdir(parents=True, exist_ok=True)
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (path / "adapter_config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file(
        {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors"
    )
    return path


def pair(name: str, outputs: int, inputs: int, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Both tensors of a matrix's adapter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.lora_A.weight": torch.randn(rank, inputs, generator=generator),
        f"{name}.lora_B.weight": torch.randn(outputs, rank, generator=generator),
    }


def fused_deltas(model: Any, adapter: str = "default") -> dict[str, torch.Tensor]:
    """By parameter, what a PEFT model adds to it."""
    found = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "parameter_name"):
            plain = name.replace(".base_layer", "")
            found[f"{plain}.{module.parameter_name}"] = module.get_delta_weight(adapter).detach()
        elif hasattr(module, "get_delta_weight") and adapter in getattr(module, "lora_A", {}):
            found[name] = module.get_delta_weight(adapter).detach()
    return found


class LowRank(NamedTuple):
    """What is added to one matrix's product: `B (A x)`. The scale is in B already."""

    a_RI: torch.Tensor
    b_OR: torch.Tensor


def products_of(adapter: Adapter) -> dict[str, LowRank]:
    """Each by the name of its matrix."""
    return {name: LowRank(a, b) for names, *both in adapter.stacks for name, a, b in zip(names, *both, strict=True)}


def trained(model: Any, seed: int = 1) -> None:
    """Give every A and B of a PEFT model random values."""
    generator = torch.Generator().manual_seed(seed)
    fill: Callable[[torch.Tensor], object] = lambda tensor: tensor.data.normal_(0.0, 0.1, generator=generator)  # noqa: E731
    for name, tensor in model.named_parameters():
        if "lora_" in name:
            fill(tensor)


def random_adapter(
    base: Path, path: Path, *, rank: int, seed: int, alpha: float = 2.0, only: tuple[str, ...] = ("",)
) -> Path:
    """An adapter of every matrix of a checkpoint that may have one, or of those whose names end in one of `only`."""
    model, _ = load(base)
    sizes = {name: size for name, size in Products.of(model).sizes.items() if name.endswith(only)}
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, (outputs, inputs)) in enumerate(sizes.items()):
        tensors |= pair(name, outputs, inputs, rank, seed=1000 * seed + number)
    scaled = {name: tensor * 0.1 for name, tensor in tensors.items()}
    return write_adapter(path, {"target_modules": list(sizes), "r": rank, "lora_alpha": alpha * rank}, scaled)


def merged_checkpoint(base: Path, adapter: Path, path: Path) -> Path:
    """A copy of a checkpoint, whose matrices have what the adapter adds to them."""
    shutil.copytree(base, path, dirs_exist_ok=True)
    model, _ = load(base)
    known = Targets.of(model)
    read = read_adapter(adapter, known, torch.float32, 512)
    file = path / "model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    for name, product in products_of(read).items():
        delta_OI = product.b_OR @ product.a_RI
        found = [
            one for one in tensors if one == f"{name}.weight" or own_name(one, [f"{name}.weight"]) == f"{name}.weight"
        ]
        if found:
            tensors[found[0]] += delta_OI
        else:
            _add_to_stacked(tensors, name, known, delta_OI)
    save_file(tensors, file, {"format": "pt"})
    return path


def _add_to_stacked(tensors: dict[str, torch.Tensor], name: str, known: Targets, delta_OI: torch.Tensor) -> None:
    """Add to one expert's matrix where a checkpoint holds all experts' together."""
    where, expert, part = name.rsplit(".", 2)
    owner = known.experts[where]
    wanted = f"{where}.down_proj" if part == owner.checkpoint_names.down else f"{where}.gate_up_proj"
    [theirs] = [one for one in tensors if own_name(one, [wanted]) == wanted]
    matrix = tensors[theirs][int(expert)]
    matrix_OI = matrix.T if owner.transposed else matrix
    if part == owner.checkpoint_names.down:
        matrix_OI += delta_OI
    elif owner.interleaved:
        matrix_OI[int(part == owner.checkpoint_names.up) :: 2] += delta_OI
    else:
        matrix_OI[: owner.sizes.inner] += delta_OI if part == owner.checkpoint_names.gate else 0
        matrix_OI[owner.sizes.inner :] += delta_OI if part == owner.checkpoint_names.up else 0


class AdaptedMixture:
    """A mixture with random weights, and an adapter of all its experts, of rank 20, in slot 1 of two; that in slot 0 has none of experts."""

    def __init__(
        self, sizes: ExpertSizes, active: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.sizes, self.active, self.dtype, self.device = sizes, active, dtype, device
        self.mlp = self._mixture(dtype, device)
        products, page = Products.of(self.mlp), 64 * sizes.features
        products.adapt(device)
        self.sides = [
            (torch.randn(20, inputs) / inputs**0.5, torch.randn(outputs, 20) / 5)
            for outputs, inputs in products.sizes.values()
        ]
        stacks = [
            Stack([name], a[None].to(dtype), b[None].to(dtype))
            for name, (a, b) in zip(products.sizes, self.sides, strict=True)
        ]
        packed = products.pack(Adapter("", stacks), 32, dtype, page // dtype.itemsize)
        pages = range(len(packed.pages))
        memory = torch.zeros(len(pages) * page, dtype=torch.uint8, device=device)
        self.table = AdapterTable(products, memory, page, dtype, 2, 32)
        self.table.fill(1, packed, [number * page for number in pages], pages)

    def _mixture(self, dtype: torch.dtype, device: torch.device | str) -> SparseMLP:
        router = Router(self.sizes.features, self.sizes.experts, dtype, Routing(self.active))
        mlp = SparseMLP(router, Experts(self.sizes, dtype))
        for module in (mlp.router, mlp.experts):
            for name, one in module.weights.items():
                module.weights[name] = (torch.randn(one.shape) / one.shape[-1] ** 0.5).to(device, dtype)
        return mlp

    def on_cpu(self, *, merged: bool) -> Experts:
        """The experts on a CPU and in float32, `merged` with what the adapter adds or as they are."""
        experts = self._mixture(torch.float32, "cpu").experts
        experts.weights = {
            name: one.cpu().to(torch.float32, copy=True) for name, one in self.mlp.experts.weights.items()
        }
        gate_up, down = (experts.weights[f"{name}.weight"] for name in ("gate_up", "down"))
        for number, (a, b) in enumerate(self.sides if merged else ()):
            expert, part = divmod(number, 3)
            (down[expert] if part == 2 else gate_up[expert].unflatten(0, (2, -1))[part]).add_(b @ a)
        return experts

    def adapters(self, slots: list[int]) -> Adapters:
        """Of rows of one token with these slots."""
        starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=self.device)
        own = torch.tensor(slots, dtype=torch.int32, device=self.device)
        return Adapters.of_rows(own, starts, starts[:-1], 2, self.table.blocks)
