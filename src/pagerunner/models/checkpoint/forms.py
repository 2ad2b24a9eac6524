"""Which form each of a model's layers gets from the format that its checkpoint is in."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from pagerunner.errors import ConfigError
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.moe import Experts, Router
from pagerunner.quant.base import Unquantized
from pagerunner.quant.dequantized import Dequantized, DequantizedExperts
from pagerunner.quant.expert_panels import ExpertsInPanels
from pagerunner.quant.formats import Format, Scheme, inner_name
from pagerunner.quant.online import Online
from pagerunner.quant.packed8 import Packed8
from pagerunner.quant.panels import InPanels
from pagerunner.quant.stored import Beside, StoredExperts, StoredMethod
from pagerunner.quant.w4 import SCALES, W4, Packing
from pagerunner.quant.w8 import W8

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Held:
    """What a checkpoint's files hold: lists of ignored modules leave some out, so tensors have the last word.

    `plain` are modules with nothing but a matrix of floats, or with matrices of all experts. `quantised` are those with a matrix of
    numbers in bytes and something beside it, or with packed numbers. Names come without what tools write before a layer.
    `scales` is a dtype that holds all scales of 4-bit groups; it is float32 for scales in float64.
    """

    plain: frozenset[str]
    scales: torch.dtype
    quantised: frozenset[str] = frozenset()

    @classmethod
    def of(cls, dtypes: Mapping[str, str], otherwise: torch.dtype) -> Held:
        """From the dtypes of all tensors by name; `otherwise` are scales where there is none."""
        suffixes: dict[str, dict[str, str]] = {}
        for name, dtype in dtypes.items():
            module, _, suffix = name.rpartition(".")
            suffixes.setdefault(inner_name(module), {})[suffix] = dtype
        plain = (
            name for name, own in suffixes.items() if own.keys() <= {"weight", "bias"} and own.get("weight") in _FLOATS
        )
        together = (
            inner_name(name)
            for name, dtype in dtypes.items()
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and dtype in _FLOATS
        )
        codes = ("F8_E4M3", "I8", "U8")
        numbers = (name for name, own in suffixes.items() if own.get("weight") in codes and len(own) > 1)
        packed = [name for name, own in suffixes.items() if not own.keys().isdisjoint(("qweight", "weight_packed"))]
        groups = (suffixes[name].get(suffix, "") for name in packed for suffix in ("scales", "weight_scale"))
        dtypes_found = {_FLOATS[dtype] for dtype in groups if dtype in _FLOATS}
        scales = functools.reduce(torch.promote_types, dtypes_found) if dtypes_found else otherwise
        scales = torch.float32 if scales == torch.float64 else scales
        return cls(frozenset((*plain, *together)), scales, frozenset((*numbers, *packed)))


@dataclass(frozen=True, slots=True)
class Forms:
    """Makes forms of one checkpoint's layers.

    `dtype` is the model's. `keep`: weights stay in few bits in memory, as kernels take them; otherwise they are unpacked to `dtype` while
    they are loaded.
    """

    checkpoint: Format
    dtype: torch.dtype
    held: Held
    keep: bool

    def store(self, sources: Iterable[tuple[Module, str, str]]) -> None:
        """Give a form to every layer that the checkpoint holds quantised. `sources` are those of the model's layers (`Module.sources`).

        Raises:
            ConfigError: experts of one layer are stored in different ways, or sizes don't suit the format.
        """
        found: dict[Module, dict[str, str]] = {}
        for owner, part, name in sources:
            found.setdefault(owner, {})[part] = name
        for owner, modules in found.items():
            if isinstance(owner, Experts):
                schemes = self._expert_schemes(owner, modules)
            else:
                schemes = {part: self._scheme(owner, name) for part, name in modules.items()}
            if not any(schemes.values()):
                continue
            self._check_sizes(owner, schemes, modules)
            try:
                if isinstance(owner, Experts):
                    self._store_experts(owner, schemes)
                elif isinstance(owner, Linear):
                    head = next(iter(modules.values())).endswith("lm_head")
                    self._store_linear(owner, schemes, dense=owner.needs_dense or (owner.plain and not head))
            except ConfigError as error:
                raise ConfigError(f"{next(iter(modules.values()))}: {error}") from None

    def _check_sizes(self, owner: Module, schemes: Mapping[str, Scheme | None], modules: Mapping[str, str]) -> None:
        """Raise ConfigError for the first matrix that no checkpoint can hold so, before a form for a device is chosen."""
        checked = set()
        for part, scheme in schemes.items():
            if isinstance(owner, Experts):
                _, features, inner = owner.sizes
                down = part.endswith(f".{owner.checkpoint_names.down}")
                sizes = (features, inner) if down else (inner, features)
            else:
                assert isinstance(owner, Linear)
                sizes = owner.parts[part], owner.in_features
            if scheme is None or (scheme, sizes) in checked:
                continue
            checked.add((scheme, sizes))
            try:
                self._form(scheme).check(*sizes)
            except ConfigError as error:
                raise ConfigError(f"{modules[part]} can't be stored as {self.asked_by} says: {error}") from None

    @property
    def asked_by(self) -> str:
        """Whose word it is how weights are stored, for messages."""
        if self.checkpoint.writer == "online":
            return "quantization (rounding while loading)"
        return f"quantization_config ({self.checkpoint.writer})"

    def _expert_schemes(self, owner: Experts, modules: dict[str, str]) -> dict[str, Scheme | None]:
        """By expert and matrix. Of experts that no list and no file tells apart, some are enough.

        Lists name the experts' matrices one by one, or the matrix of all of them.
        """
        first, name = next(iter(modules.items()))
        experts = name.removesuffix(f".{first}")
        if not (self.held.plain or self.checkpoint.tells_apart(experts)):
            numbers = {part.partition(".")[0] for part in modules}
            # by digits, as patterns may count them
            alike = {min(own) for _, own in itertools.groupby(sorted(numbers, key=len), key=len)}
            modules = {part: name for part, name in modules.items() if part.partition(".")[0] in alike}
        floats = self.held.plain if self.checkpoint.writer != "online" else frozenset()
        left_alone = {
            own: self.checkpoint.ignored.match(f"{experts}.{together}") or inner_name(f"{experts}.{together}") in floats
            for own, together in zip(owner.checkpoint_names, ("gate_up_proj", "gate_up_proj", "down_proj"), strict=True)
        }
        return {
            part: None if left_alone[part.partition(".")[2]] else self._scheme(owner, name)
            for part, name in modules.items()
        }

    def _scheme(self, owner: Module, name: str) -> Scheme | None:
        if isinstance(owner, Linear) and owner.plain and not self._takes_plain(owner, name):
            return None
        if self.checkpoint.writer == "mxfp4" and not isinstance(owner, Experts):
            return None  # it is made for experts alone
        if self.checkpoint.writer == "online" and isinstance(owner, Linear) and owner.needs_dense:
            return None  # unpacked, it would take no less memory
        if self.checkpoint.writer != "online" and inner_name(name) in self.held.plain:
            return None
        if self.checkpoint.writer != "online" and inner_name(name) in self.held.quantised:
            return self.checkpoint.scheme_unless_listed(name)
        return self.checkpoint.scheme(name)

    def _takes_plain(self, owner: Linear, name: str) -> bool:
        """Whether a linear that formats leave alone is quantised all the same: named output weights, or what files hold so."""
        if self.checkpoint.writer != "online" and inner_name(name) in self.held.quantised:
            return True
        return name.endswith("lm_head") and self.checkpoint.names(name)

    def _store_experts(self, owner: Experts, schemes: Mapping[str, Scheme | None]) -> None:
        if len(set(schemes.values())) > 1:
            raise ConfigError("quantization_config stores experts of one layer in different ways.")
        (scheme,) = set(schemes.values())
        assert scheme is not None
        starts = (owner.sizes.inner,) if not owner.interleaved else (1,)
        form = self._form(scheme, starts)
        if self.keep and not scheme.permuted and not _only_unpacked(form):
            owner.store(StoredExperts(form))
            if owner.stays_packed:
                return
        owner.store(DequantizedExperts(form))

    def _store_linear(self, owner: Linear, schemes: Mapping[str, Scheme | None], *, dense: bool) -> None:
        """`dense`: the layer is unpacked while it is loaded, whatever the format."""
        sizes = tuple(owner.parts.values())
        starts = (0, *itertools.accumulate(sizes))[:-1]
        own = [schemes[part] for part in owner.parts]
        if self.keep and not dense:
            single = self._form(own[0], starts) if own[0] is not None and len(set(own)) == 1 else None
            if single is not None and (len(own) == 1 or single.joins(starts)) and not _only_unpacked(single):
                owner.store(single)
            else:
                owner.store(Beside(tuple(zip(sizes, map(self._beside, own), strict=True))))
            return
        owner.store(Dequantized({start: self._form(s) for start, s in zip(starts, own, strict=True) if s is not None}))

    def _beside(self, scheme: Scheme | None) -> Unquantized | StoredMethod:
        """The form of one part that is a matrix of its own."""
        if scheme is None:
            return Unquantized()
        form = self._form(scheme)
        return Dequantized({0: form}) if _only_unpacked(form) else form

    def _form(self, scheme: Scheme, starts: tuple[int, ...] = ()) -> StoredMethod:
        assert scheme.is_w8 or scheme.is_packed, "the config reader lets no other format through"
        if self.checkpoint.writer == "online":
            return Online(self.checkpoint, scheme, self.dtype, starts)
        if scheme.is_w8:
            return W8(self.checkpoint, scheme, self.dtype, starts)
        assert scheme.layout
        packing = Packing(
            scheme.layout,
            scheme.block[1],
            SCALES.get(scheme.layout, self.held.scales),
            scheme.zeros,
            scheme.zero_offset,
            scheme.permuted,
            8 if scheme.number == "int8" else 4,
        )
        return (Packed8 if packing.bits == 8 else W4)(packing, self.dtype)


def summary(modules: Iterable[Module]) -> str:
    """How many of a model's linear layers and mixtures have which form: "144 linear layers in few bits, 4 unpacked, 1 as they were"."""
    found: Counter[str] = Counter()
    for module in modules:
        if isinstance(module, Linear | Experts):
            kept = isinstance(module.method, StoredMethod | StoredExperts | Beside)
            unpacked = isinstance(module.method, Dequantized | DequantizedExperts)
            unpacked = unpacked or (isinstance(module.method, InPanels) and bool(module.method.forms))
            unpacked = unpacked or (isinstance(module.method, ExpertsInPanels) and module.method.form is not None)
            found["in few bits" if kept else "unpacked" if unpacked else "as they were"] += 1
    kinds = [(found[kind], kind) for kind in ("in few bits", "unpacked", "as they were") if found[kind]]
    return ", ".join(
        f"{count} linear layers {kind}" if not i else f"{count} {kind}" for i, (count, kind) in enumerate(kinds)
    )


def loaded_unpacked_bytes(modules: Iterable[Module]) -> int:
    """Bytes of the matrices that a checkpoint holds in few bits and memory in the model's dtype."""
    own = (module for module in modules if isinstance(module, Linear | Experts))
    return sum(module.nbytes for module in own if isinstance(module.method, Dequantized | DequantizedExperts))


def unpacked_bytes(modules: Iterable[Module], tokens: int) -> tuple[int, int]:
    """The most that a product unpacks at a time in steps of up to so many tokens on a CUDA device: of linears, and of experts."""
    all_modules = list(modules)
    active = max((module.routing.active for module in all_modules if isinstance(module, Router)), default=0)
    linears = (module.unpacked_bytes(tokens) for module in all_modules if isinstance(module, Linear))
    experts = (module.unpacked_bytes(tokens * active) for module in all_modules if isinstance(module, Experts))
    return max(linears, default=0), max(experts, default=0)


def _only_unpacked(form: StoredMethod) -> bool:
    """Whether no kernel takes the form."""
    return isinstance(form, Packed8) and form.packing.zeros
