"""A quantization_config of small numbers that lie several in a word: those of AWQ, GPTQ and AutoRound. Torch-free.

Sources: transformers' `utils/quantization_config.py`, AutoAWQ's and GPTQModel's configs, and AutoRound's `export`.
"""

from __future__ import annotations

import re
from typing import Any

from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.quantization_fields import ALL, NOTES, checked_entry, names_in
from pagerunner.quant.formats import Format, Layout, Names, Scheme


def read_awq(fields: Fields) -> Format:
    old_bits, old_group = fields.take("w_bit"), fields.take("q_group_size")
    bits = fields.integer("bits", old_bits if type(old_bits) is int else None)
    if bits != 4:
        raise fields.error("bits", f"is {bits}; AWQ is read with 4.")
    fields.choice("version", ("gemm", "GEMM"), "gemm")  # gemv and gemv_fast pack their words in other orders
    group = fields.integer("group_size", old_group if type(old_group) is int else 128, least=-1)
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", "is false, which no tool writes for gemm.")
    scheme = Scheme(
        "int4", "group" if group > 0 else "channel", (1, group) if group > 0 else (0, 0), zeros=True, layout="awq"
    )
    return Format("awq", ((ALL, scheme),), Names("part", names_in(fields, "modules_to_not_convert")))


def read_gptq(fields: Fields) -> Format:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise fields.error("bits", f"is {bits}; GPTQ is read with 4 or 8.")
    version = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    head = fields.flag("lm_head", False)
    group = fields.integer("group_size", 128, least=-1)
    permuted, symmetric = fields.flag("desc_act", False), fields.flag("sym", True)
    usual = {"bits": bits, "group_size": group, "desc_act": permuted, "sym": symmetric}
    overrides = fields.take("dynamic") or {}
    if not isinstance(overrides, dict):
        raise fields.error("dynamic", f"must be an object of patterns, got {overrides!r:.80}.")
    kept, schemes = list(names_in(fields, "modules_to_not_convert")), []
    for pattern, changes in overrides.items():
        entry = checked_entry(fields, "dynamic", f"re:{pattern.removeprefix('-:').removeprefix('+:')}")
        if pattern.startswith("-:"):
            kept.append(entry)
            continue
        if not isinstance(changes, dict):
            raise fields.error(
                "dynamic", f"has {pattern!r:.120}, which must be an object of settings, got {changes!r:.80}."
            )
        own = fields.inside(f"dynamic.{pattern}", {**usual, **changes})
        schemes.append((Names("module", (entry,)), _gptq_scheme(own, version)))
        own.finish(NOTES["gptq"].split())
    scheme = _gptq_scheme(fields.inside("gptq", usual), version)
    if head:
        schemes.append((Names("module", ("lm_head",)), scheme))
    else:
        kept.append("lm_head")
    return Format("gptq", (*schemes, (ALL, scheme)), Names("module", tuple(kept)))


def _gptq_scheme(fields: Fields, version: str) -> Scheme:
    """How one module is stored, from the settings for all and those of its own."""
    bits, group = fields.integer("bits"), fields.integer("group_size", 128, least=-1)
    if bits not in (4, 8):
        raise fields.error("bits", f"is {bits}; GPTQ is read with 4 or 8.")
    return Scheme(
        "int4" if bits == 4 else "int8",
        "group" if group > 0 else "channel",
        (1, group) if group > 0 else (0, 0),
        zeros=not fields.flag("sym", True),
        permuted=fields.flag("desc_act", False) and group > 0,
        zero_offset=1 if version == "gptq" else 0,
        layout="gptq",
    )


_ROUND_LAYOUTS: dict[str, Layout] = {"auto_gptq": "gptq", "gptq": "gptq", "auto_awq": "awq", "awq": "awq"}
_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")


def read_auto_round(fields: Fields) -> Format:
    """Intel's AutoRound: tensors of GPTQ or AWQ, for the layers of the blocks that it names, with settings by module."""
    packing = fields.take("packing_format", "auto_round:auto_gptq")
    layout = _ROUND_LAYOUTS.get(packing.removeprefix("auto_round:")) if isinstance(packing, str) else None
    if layout is None:
        raise fields.error(
            "packing_format",
            f"is {packing!r}; AutoRound's files are read in those of GPTQ and AWQ (auto_round:auto_gptq, auto_round:auto_awq). Use such a "
            "repository of the model, or one in compressed-tensors.",
        )
    usual: dict[str, Any] = {
        "bits": fields.integer("bits", 4),
        "group_size": fields.integer("group_size", 128, least=-1),
        "sym": fields.flag("sym", True),
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
        schemes.append((Names("module", (entry,)), _round_scheme(inside, layout, permuted=permuted)))
        inside.finish(NOTES["auto-round"].split())
    blocks = _blocks(fields)
    scheme = _round_scheme(fields.inside("settings of all modules", usual), layout, permuted=permuted)
    if head and not any(names.match("lm_head") for names, _ in schemes):
        schemes.append((Names("module", ("lm_head",)), scheme))
    named_head = any(names.match("lm_head") for names, _ in schemes)
    rest = Names("module", blocks) if blocks else ALL
    return Format(
        "auto-round", (*schemes, (rest, scheme)), Names("module", (*kept, *(() if named_head else ("lm_head",))))
    )


def _round_scheme(fields: Fields, layout: Layout, *, permuted: bool) -> Scheme:
    """How one module is stored, from the settings for all and those of its own."""
    fields.choice("data_type", ("int",))
    if (rounded := fields.integer("act_bits", 16)) < 16:
        raise fields.error(
            "act_bits", f"is {rounded}; AutoRound's files are read with activations that aren't rounded."
        )
    bits, group, symmetric = fields.integer("bits"), fields.integer("group_size", least=-1), fields.flag("sym", True)
    if bits not in ((4, 8) if layout == "gptq" else (4,)):
        known = "4 or 8 in the words of GPTQ" if layout == "gptq" else "4 in the words of AWQ"
        raise fields.error("bits", f"is {bits}; AutoRound's files are read with {known}.")
    return Scheme(
        "int4" if bits == 4 else "int8",
        "group" if group > 0 else "channel",
        (1, group) if group > 0 else (0, 0),
        zeros=layout == "awq" or not symmetric,
        permuted=permuted and group > 0,
        zero_offset=1 if layout == "gptq" else 0,
        layout=layout,
    )


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
    return tuple(found)
