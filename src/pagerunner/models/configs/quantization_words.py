"""A quantization_config of small numbers that lie several in a word: those of AWQ, GPTQ and AutoRound. Torch-free.

Sources: transformers' `utils/quantization_config.py`, AutoAWQ's config, GPTQModel's `quantization/config.py`, and AutoRound's `export`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.quantization_fields import ALL, NOTES, checked_entry, names_in
from pagerunner.quant.formats import Format, Layout, Names, Scheme

_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")
_ELSEWHERE = "Use such a repository of the model, or one in compressed-tensors."


def read_awq(fields: Fields) -> Format:
    """AWQ, by AutoAWQ, GPTQModel or AutoRound."""
    old_bits, old_group = fields.take("w_bit"), fields.take("q_group_size")
    bits = fields.integer("bits", old_bits if type(old_bits) is int else None)
    if bits != 4:
        raise fields.error("bits", f"is {bits}; AWQ is read with 4. {_ELSEWHERE}")
    _order_of_words(fields, "awq", ("version", "format", "checkpoint_format"), ("gemm",))
    group = _group_size(fields, old_group if type(old_group) is int else 128)
    fields.flag("zero_point", True)  # where it is false, zero points are there all the same: the middle
    if fields.flag("desc_act", False):
        raise fields.error("desc_act", "is true, for which AWQ has no tensor.")
    scheme = _words("awq", bits, group, zeros=True)
    kept, overrides = list(names_in(fields, "modules_to_not_convert")), _overrides(fields)
    if own := next((pattern for pattern, _, changes in overrides if changes is not None), None):
        raise fields.error("dynamic", f"has settings for {own!r:.120}; AWQ has the same for all modules.")
    head = ((Names("module", ("lm_head",)), scheme),) if fields.flag("lm_head", False) else ()
    return Format("awq", (*head, (ALL, scheme)), Names("part", (*kept, *(entry for _, entry, _ in overrides))))


def read_gptq(fields: Fields) -> Format:
    """GPTQ, by AutoGPTQ, GPTQModel, transformers or AutoRound."""
    version = _order_of_words(fields, "gptq", ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    head = fields.flag("lm_head", False)
    usual = _gptq_settings(fields)
    scheme = _gptq_scheme(fields, usual, version)
    kept = list(names_in(fields, "modules_to_not_convert"))
    schemes: list[tuple[Names, Scheme | None]] = []
    for pattern, entry, changes in _overrides(fields):  # the first pattern that matches a module decides
        if changes is None:
            schemes.append((Names("module", (entry,)), None))
            continue
        own = fields.inside(f"dynamic.{pattern}", {**usual, **changes})
        schemes.append((Names("module", (entry,)), _gptq_scheme(own, _gptq_settings(own), version)))
        own.finish(NOTES["gptq"].split())
    if head:
        schemes.append((Names("module", ("lm_head",)), scheme))
    else:
        kept.append("lm_head")
    return Format("gptq", (*schemes, (_modules_in_blocks(fields), scheme)), Names("module", tuple(kept)))


def _order_of_words(fields: Fields, method: str, names: tuple[str, ...], known: tuple[str, ...]) -> str:
    """How numbers lie in words, which writers say in several fields; the first of `known` if in none.

    Raises ConfigError for an order that isn't known, and for two fields that differ.
    """
    said: dict[str, str] = {}
    for name in names:
        value = fields.take(name)
        if value is None:
            continue
        if not isinstance(value, str) or value.lower() not in known:
            raise fields.error(
                name, f"is {value!r:.80}, another order of words than {' or '.join(known)}. {_ELSEWHERE}"
            )
        said[name] = value.lower()
    if len(set(said.values())) > 1:
        raise fields.error(" and ".join(said), f"are {' and '.join(map(repr, said.values()))}; one of them is wrong.")
    fields.choice("method", (method,), method)
    fields.choice("pack_dtype", ("int32",), "int32")
    return next(iter(said.values()), known[0])


def _overrides(fields: Fields) -> list[tuple[str, str, dict[str, Any] | None]]:
    """GPTQModel's `dynamic`: patterns, what they are as entries of Names, and their modules' settings; None where they aren't quantised."""
    given = fields.take("dynamic") or {}
    if not isinstance(given, dict) or not all(isinstance(pattern, str) for pattern in given):
        raise fields.error("dynamic", f"must be an object of patterns, got {given!r:.80}.")
    found = []
    for pattern, changes in given.items():
        entry = checked_entry(fields, "dynamic", f"re:{pattern.removeprefix('-:').removeprefix('+:')}")
        kept = pattern.startswith("-:")
        if not kept and not isinstance(changes, dict):
            raise fields.error(
                "dynamic", f"has {pattern!r:.120}, which must be an object of settings, got {changes!r:.80}."
            )
        found.append((pattern, entry, None if kept else changes))
    return found


def _group_size(fields: Fields, usual: int = 128) -> int:
    """Input features of a group; -1 for all of a matrix."""
    group = fields.integer("group_size", usual, least=-1)
    if not group:
        raise fields.error("group_size", "is 0; it must be at least 1, or -1 for one group of all input features.")
    return group


def _words(layout: Layout, bits: int, group: int, *, zeros: bool, permuted: bool = False, offset: int = 0) -> Scheme:
    """Whole numbers of `bits` in words; `group` as in `_group_size`."""
    return Scheme(
        "int4" if bits == 4 else "int8",
        "group" if group > 0 else "channel",
        (1, group) if group > 0 else (0, 0),
        zeros=zeros,
        permuted=permuted and group > 0,
        zero_offset=offset,
        layout=layout,
    )


def _gptq_settings(fields: Fields) -> dict[str, Any]:
    return {
        "bits": fields.integer("bits"),
        "group_size": _group_size(fields),
        "desc_act": fields.flag("desc_act", False),
        "sym": fields.flag("sym", True),
    }


def _gptq_scheme(fields: Fields, said: Mapping[str, Any], version: str) -> Scheme:
    """How modules with the settings `said` are stored; `fields` are for messages."""
    bits, group = said["bits"], said["group_size"]
    if bits not in (4, 8):
        raise fields.error("bits", f"is {bits}; GPTQ is read with 4 or 8. {_ELSEWHERE}")
    offset = 1 if version == "gptq" else 0
    return _words("gptq", bits, group, zeros=not said["sym"], permuted=said["desc_act"], offset=offset)


def _modules_in_blocks(fields: Fields) -> Names:
    """The modules that are quantised: all, or those that `modules_in_block_to_quantize` names by what stands behind a layer's number.

    Lists of mixtures have each expert's modules. Numbers become *, so a long list becomes a short one.
    """
    given, blocks = fields.take("modules_in_block_to_quantize") or [], _blocks(fields) or ("model.layers",)
    lists = given if isinstance(given, list) else [given]
    names = [name for part in lists for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) for name in names):
        raise fields.error("modules_in_block_to_quantize", f"must be lists of names of modules, got {given!r:.80}.")
    entries = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names)
    whole = tuple(f"{block}." for block in blocks)
    found = [(name,) if name.startswith(whole) else tuple(f"{block}*.{name}" for block in whole) for name in entries]
    return Names("module", tuple(itertools.chain.from_iterable(found))) if names else ALL


def read_auto_round(fields: Fields) -> Format:
    """AutoRound: tensors of GPTQ, AWQ or compressed-tensors, for the layers of the blocks that it names, with settings by module."""
    symmetric = fields.flag("sym", True)
    layout, offset = _round_layout(fields, symmetric)
    usual: dict[str, Any] = {
        "bits": fields.integer("bits", 4),
        "group_size": _group_size(fields),
        "sym": symmetric,
        "data_type": fields.take("data_type", "int"),
        "act_bits": fields.take("act_bits"),
    }
    permuted, head = fields.flag("desc_act", False), fields.flag("quant_lm_head", False)
    own = fields.take("extra_config") or {}
    if not isinstance(own, dict) or not all(isinstance(said, dict) for said in own.values()):
        raise fields.error("extra_config", f"must be an object of modules and their settings, got {own!r:.80}.")
    kept, schemes = [], []
    for name, said in own.items():
        entry = checked_entry(fields, "extra_config", f"re:{name}") if _SPECIAL.search(name) else name
        inside = fields.inside(f"extra_config.{name}", {**usual, **said})
        if said.get("bits") in (16, 32):
            kept.append(entry)
            continue
        schemes.append((Names("module", (entry,)), _round_scheme(inside, layout, offset, permuted=permuted)))
        inside.finish(NOTES["auto-round"].split())
    blocks = _blocks(fields)
    scheme = _round_scheme(fields.inside("settings of all modules", usual), layout, offset, permuted=permuted)
    if head and not any(names.match("lm_head") for names, _ in schemes):
        schemes.append((Names("module", ("lm_head",)), scheme))
    named_head = any(names.match("lm_head") for names, _ in schemes)
    rest = Names("module", blocks) if blocks else ALL
    return Format(
        "auto-round", (*schemes, (rest, scheme)), Names("module", (*kept, *(() if named_head else ("lm_head",))))
    )


def _round_layout(fields: Fields, symmetric: bool) -> tuple[Layout | None, int]:
    """The layout of the tensors, and what is to be added to stored zero points. None: those of compressed-tensors, by the data type.

    AutoRound names the layout, and behind it perhaps a kernel: `auto_round:auto_gptq:exllamav2`. Without a layout they are GPTQ's words
    with zero points as they are; the first version of GPTQ stores them less one.
    """
    packing = fields.take("packing_format")
    parts = packing.split(":") if isinstance(packing, str) else []
    parts = parts[1:] if parts[:1] == ["auto_round"] else parts
    kind = parts[0] if parts else "auto_round" if isinstance(packing, str) else None
    if kind in ("auto_gptq", "gptq") or (packing is None and symmetric):
        return "gptq", 1
    if kind in ("auto_round", "gptqmodel", "exllamav2", "tritonv2", "triton"):
        return "gptq", 0
    if kind in ("auto_awq", "awq"):
        return "awq", 0
    if kind == "llm_compressor":
        return None, 0
    if packing is None:
        raise fields.error(
            "packing_format", f"is missing beside sym false: nothing says how zero points are stored. {_ELSEWHERE}"
        )
    raise fields.error(
        "packing_format",
        f"is {packing!r:.80}; AutoRound's files are read in those of GPTQ, AWQ and LLM Compressor (auto_round:auto_gptq, "
        f"auto_round:auto_awq, auto_round:llm_compressor). {_ELSEWHERE}",
    )


def _round_scheme(fields: Fields, layout: Layout | None, offset: int, *, permuted: bool) -> Scheme:
    """How one module is stored, from the settings for all and those of its own."""
    rounded = fields.integer("act_bits", 16)
    bits, group, symmetric = fields.integer("bits"), _group_size(fields), fields.flag("sym", True)
    if layout is None:
        return _round_floats(fields, bits, group)
    fields.choice("data_type", ("int",))
    if rounded < 16:
        raise fields.error(
            "act_bits",
            f"is {rounded}; beside whole numbers, AutoRound's files are read with activations that aren't rounded.",
        )
    if bits not in ((4, 8) if layout == "gptq" else (4,)):
        known = "4 or 8 in the words of GPTQ" if layout == "gptq" else "4 in the words of AWQ"
        raise fields.error("bits", f"is {bits}; AutoRound's files are read with {known}. {_ELSEWHERE}")
    zeros = layout == "awq" or not symmetric
    return _words(layout, bits, group, zeros=zeros, permuted=permuted, offset=offset)


def _round_floats(fields: Fields, bits: int, group: int) -> Scheme:
    """fp4 in the tensors of compressed-tensors. Products with weights of 4 bits never round activations."""
    kind = fields.take("data_type")
    layouts: dict[str, tuple[Layout, int]] = {"nv_fp": ("compressed nvfp4", 16), "mx_fp": ("mxfp4", 32)}
    layout = layouts.get(kind[:5]) if isinstance(kind, str) else None
    if layout is None or (bits, group) != (4, layout[1]):
        raise fields.error(
            "data_type",
            f"is {kind!r:.40} with {bits} bits in groups of {group}; files of LLM Compressor by AutoRound are read with nv_fp in "
            f"groups of 16 and mx_fp in groups of 32, of 4 bits. {_ELSEWHERE}",
        )
    return Scheme("fp4", "group", (1, group), layout=layout[0], rounding="group")


def _blocks(fields: Fields) -> tuple[str, ...]:
    """The names of the modules whose layers are quantised; none where nothing is said, which is all of them."""
    found: list[str] = []
    for name in ("block_name_to_quantize", "to_quant_block_names"):
        value = fields.take(name)
        for entry in value if isinstance(value, list) else [] if value is None else [value]:
            parts = entry if isinstance(entry, list) else [entry]  # older files list the blocks of each tower
            if not all(isinstance(part, str) for part in parts):
                raise fields.error(name, f"must be names of modules, got {value!r:.80}.")
            found += [part.strip() for text in parts for part in text.split(",")]
        if any(part.startswith("re:") for part in found):
            raise fields.error(name, f"must be names of modules and not patterns, got {value!r:.80}.")
    return tuple(found)
