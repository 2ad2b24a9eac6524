"""How the weights of a checkpoint are stored, as its `quantization_config` says. Torch-free; `models/configs/quantization.py` reads it.

Numbers: fp8 is e4m3; int8 and int4 are whole numbers; fp4 is e2m1. A scale multiplies the stored numbers of one matrix, of one output
feature, of one block of rows and columns, or of one group of neighbouring columns.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from dataclasses import dataclass
from typing import Literal

from pagerunner.quant.patterns import Pattern

Writer = Literal[
    "fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "awq", "gptq", "auto-round", "mxfp4", "deepseek-v4", "online"
]
Number = Literal["fp8", "int8", "int4", "fp4"]
Scales = Literal["tensor", "channel", "block", "group"]
Rounding = Literal["", "static", "tensor", "token", "block", "group"]
Rule = Literal["module", "part", "wildcard"]
Layout = Literal["compressed", "awq", "gptq", "gpt-oss", "mxfp4", "deepseek", "compressed nvfp4", "nvfp4"]
_AROUND = re.compile(r"^(model\.|language_model\.)+")
_ALL = ("re:.*",)
_WILD = re.compile(r"[*?\[]")
# Matrices that some programs keep as one; lists of ignored modules have the names of either.
_FUSED = {
    "qkv_proj": "q_proj k_proj v_proj",
    "gate_up_proj": "gate_proj up_proj",
    "w13": "w1 w3",
    "in_proj_ba": "in_proj_b in_proj_a",
    "in_proj_qkvz": "in_proj_qkv in_proj_z",
    "fused_qkv_a_proj": "q_a_proj kv_a_proj_with_mqa",
}
_WHOLES: dict[str, list[str]] = {}
for _whole, _parts in _FUSED.items():
    for _part in _parts.split():
        _WHOLES.setdefault(_part, []).append(_whole)
        _WHOLES.setdefault(_whole, []).append(_part)
_SPELLINGS = ("model.", "", "language_model.", "model.language_model.", "language_model.model.")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one matrix is stored.

    `block` is rows and columns that share a scale: (128, 128), or (1, 32) for groups of 32 input features; (0, 0) where `scales`
    says it already. `zeros`: each group has a zero point of its own; otherwise all have the middle, 8 of int4. `zero_offset` is added to
    stored zero points (GPTQ's first version stores them less one). `permuted`: a table says the group of each input feature (GPTQ's
    `desc_act`). `layout` is how numbers lie several in a byte or a word (`quant/w4.py` describes each); "": a byte for each.
    `rounding` is how the writer means activations to be rounded to the weights' number format: with a scale from the checkpoint
    ("static"), or with one made at run time for the whole step ("tensor"), for each token, block or group; "" leaves them alone.
    `unused` are tensors beside the weights that nothing reads: those of activations that the writer rounds with a zero point, which no product does.
    """

    number: Number
    scales: Scales
    block: tuple[int, int] = (0, 0)
    zeros: bool = False
    permuted: bool = False
    zero_offset: int = 0
    layout: Layout | Literal[""] = ""
    rounding: Rounding = ""
    unused: tuple[str, ...] = ()

    @property
    def is_w8(self) -> bool:
        """Whether it is the form of `quant/w8.py`: a byte for each number, and no zero points."""
        return self.number in ("fp8", "int8") and self.scales != "group" and not (self.layout or self.zeros)

    @property
    def is_packed(self) -> bool:
        """Whether it is a form of `quant/w4.py` or `quant/packed8.py`: several numbers in a byte or a word, and scales for groups."""
        return bool(self.layout) and self.scales in ("group", "channel")


@functools.lru_cache(maxsize=64)  # several lists are asked about one module after another
def inner_name(module: str) -> str:
    """A module's name without what tools write before a layer."""
    return _AROUND.sub("", module)


@dataclass(frozen=True)
class Names:
    """Modules by name, as a writer lists them.

    `rule` "module": an entry is a module's whole name, or the name of a module around it, with * for a layer's number. "part": an
    entry is any part of a name. In both, one that begins with "re:" is a pattern that is matched from the start of the name.
    "wildcard": * stands for any characters. What tools write before a layer (`model.`, `language_model.`) makes no difference.
    """

    rule: Rule
    entries: tuple[str, ...] = ()

    def match(self, module: str) -> bool:
        """Whether an entry stands for the module. Raises ConfigError for an entry that is no pattern."""
        if self.entries == _ALL or not self.entries:
            return bool(self.entries)
        inner = inner_name(module)
        if self._modules and not self._modules.isdisjoint(itertools.accumulate(inner.split("."), "{}.{}".format)):
            return True
        if inner in self._names or inner.startswith(self._beginnings):
            return True
        return any(pattern.match(before + inner) for pattern in self._patterns for before in _SPELLINGS)

    def tells_apart(self, module: str) -> bool:
        """Whether an entry may stand for a numbered module inside `module`, and not for another whose number has as many digits."""
        inside = f"{inner_name(module)}."
        if any(name.startswith(inside) for name in itertools.chain(self._modules, self._names, self._beginnings)):
            return True
        return self._numbered

    def holds(self, module: str) -> bool:
        """Whether an entry is the whole name of the module, or of one around it."""
        if not self._modules:
            return False
        parts = itertools.accumulate(inner_name(module).split("."), "{}.{}".format)
        return not self._modules.isdisjoint(parts)

    @functools.cached_property
    def _modules(self) -> frozenset[str]:
        """Whole names, without what stands before a layer. Lists have hundreds of them, and models thousands of modules."""
        whole = [
            name for name in self.entries if self.rule == "module" and "*" not in name and not name.startswith("re:")
        ]
        return frozenset(map(inner_name, whole))

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        """Whole names among wildcards."""
        names = [name for name in self.entries if self.rule == "wildcard" and not _WILD.search(name)]
        return frozenset(_AROUND.sub("", name) for name in names)

    @functools.cached_property
    def _beginnings(self) -> tuple[str, ...]:
        """What stands before the star of wildcards such as `model.layers.3.linear_attn*`."""
        names = [name for name in self.entries if self.rule == "wildcard" and _ends_in_star(name)]
        return tuple(_AROUND.sub("", name[:-1]) for name in names)

    @functools.cached_property
    def _numbered(self) -> bool:
        """Whether an entry that is matched as a pattern names a digit."""
        whole = self._modules | self._names | frozenset(self._beginnings)
        return any(
            re.search(r"\d", entry) for entry in self.entries if _AROUND.sub("", entry).removesuffix("*") not in whole
        )

    @property
    def _own_patterns(self) -> tuple[str, ...]:
        return tuple(entry[3:] for entry in self.entries if entry.startswith("re:"))

    @functools.cached_property
    def _patterns(self) -> tuple[re.Pattern[str] | Pattern, ...]:
        """The other entries, to be matched from the start of a name."""
        if self.rule == "part":
            parts = (re.escape(entry) for entry in self.entries if not entry.startswith("re:"))
            return (*(re.compile(".*" + part) for part in parts), *map(Pattern, self._own_patterns))
        if self.rule == "wildcard":
            wild = [entry for entry in self.entries if _WILD.search(entry) and not _ends_in_star(entry)]
            return tuple(re.compile(fnmatch.translate(entry)) for entry in wild)
        layers = [entry for entry in self.entries if "*" in entry and not entry.startswith("re:")]
        return tuple(map(Pattern, self._own_patterns)) + tuple(
            re.compile(re.escape(entry).replace(r"\*", r"\d+") + r"(\.|$)") for entry in layers
        )


def _ends_in_star(name: str) -> bool:
    """Whether a wildcard is the beginning of names and a star; `*` and `model.*` are left to patterns."""
    inner = _AROUND.sub("", name[:-1])
    return name.endswith("*") and bool(inner) and not _WILD.search(inner)


@dataclass(frozen=True, slots=True)
class Format:
    """What a `quantization_config` says: who wrote it, which modules stay as they were, and how the others are stored.

    The writer "online" is nobody: a checkpoint in floats is rounded while it is loaded, as its user asks.

    `schemes` are tried in their order, each with the modules that it is for; ("re:.*",) is for all. None: these modules stay as they were,
    unless an earlier entry names them. `ignored` come before all schemes. `rounds`: products may round activations
    where a scheme says so; an engine's user may forbid it.
    """

    writer: Writer
    schemes: tuple[tuple[Names, Scheme | None], ...]
    ignored: Names
    rounds: bool = True

    @property
    def schemes_said(self) -> frozenset[Scheme]:
        """How matrices are stored, without the modules that it is said of: writers list these by different names."""
        return frozenset(scheme for _, scheme in self.schemes if scheme is not None)

    def names(self, module: str) -> bool:
        """Whether a scheme is for this module by a name, and not for all modules."""
        named = ((names, scheme) for names, scheme in self.schemes if names.entries != _ALL)
        return any(scheme is not None and names.match(module) for names, scheme in named)

    def tells_apart(self, module: str) -> bool:
        """Whether numbered modules inside `module`, such as experts, may be stored in different ways; see Names."""
        return self.ignored.tells_apart(module) or any(names.tells_apart(module) for names, _ in self.schemes)

    def scheme(self, module: str) -> Scheme | None:
        """How a module's matrix is stored; None for one that isn't quantised, or that is a part of a module that isn't."""
        around, _, own = module.rpartition(".")
        if self.ignored.match(module) or any(self.ignored.holds(f"{around}.{other}") for other in _WHOLES.get(own, ())):
            return None
        return next((scheme for names, scheme in self.schemes if names.match(module)), None)

    def scheme_unless_listed(self, module: str) -> Scheme | None:
        """How a module's matrix is stored that isn't as it was, whatever lists say of modules that are."""
        return next((scheme for names, scheme in self.schemes if scheme is not None and names.match(module)), None)
