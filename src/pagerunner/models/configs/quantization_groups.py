"""A quantization_config with groups of modules: those of compressed-tensors and of NVIDIA's Model Optimizer. Torch-free.

Sources: compressed-tensors' `quantization/quant_args.py` and `quant_scheme.py`; Model Optimizer's `export/convert_hf_config.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.quantization_fields import ALL, block_in, names_in, read_pages
from pagerunner.quant.formats import Format, Layout, Names, Number, Rounding, Scales, Scheme

_ALGORITHMS: dict[str, Scheme] = {
    "FP8": Scheme("fp8", "tensor", rounding="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", "channel", rounding="token"),
    "FP8_PB_WO": Scheme("fp8", "block", (128, 128)),
    "NVFP4": Scheme("fp4", "group", (1, 16), layout="nvfp4", rounding="static"),
    "W4A16_NVFP4": Scheme("fp4", "group", (1, 16), layout="nvfp4"),
}
_MIXED = "MIXED_PRECISION"


def read_modelopt(fields: Fields) -> Format:
    """NVIDIA's Model Optimizer: one algorithm for all modules, or one for each. Newer files say it once more as groups."""
    groups = fields.take("config_groups") or {}
    ignored = Names("wildcard", names_in(fields, "ignore", "exclude_modules"))
    read_pages(fields)
    if not (groups or fields.holds("quant_algo")):
        fields.skip("quant_algo", "group_size", "awq_block_size")
        return Format("modelopt", (), ignored)
    algorithm = _algorithm(fields, (*_ALGORITHMS, _MIXED))
    schemes = _mixed_schemes(fields) if algorithm == _MIXED else ((ALL, _modelopt_scheme(fields, algorithm)),)
    found = Format("modelopt", schemes, ignored)
    _compare_groups(fields, groups, found)
    return found


def read_mixed_experts(fields: Fields) -> tuple[tuple[Names, Scheme], ...]:
    """Modules that Model Optimizer has quantised in a checkpoint of another writer, and how: the experts of NVIDIA's DeepSeek-V4-NVFP4.

    `ignore` are then modules that it left as they were, which that writer's fields describe.
    """
    if (said := fields.take("quant_algo")) is None:
        return ()
    if said != _MIXED:
        raise fields.error(
            "quant_algo", f"is {said!r:.80}; beside another quant_method than modelopt it may be {_MIXED}."
        )
    schemes = _mixed_schemes(fields)
    algorithm = fields.choice("moe_quant_algo", tuple(_ALGORITHMS), "NVFP4")
    if {scheme for _, scheme in schemes} != {_ALGORITHMS[algorithm]}:
        raise fields.error("moe_quant_algo", f"is {algorithm!r}, and quantized_layers says something else.")
    _compare_groups(
        fields, fields.take("config_groups") or {}, Format("modelopt", ((ALL, schemes[0][1]),), Names("module"))
    )
    names_in(fields, "ignore")
    return schemes


def _algorithm(fields: Fields, known: tuple[str, ...]) -> str:
    said = fields.take("quant_algo")
    algorithm = said.upper() if isinstance(said, str) else said
    if algorithm not in known:
        raise fields.error(
            "quant_algo",
            f"is {said!r:.80}; Model Optimizer's files are read in {', '.join(known)}. Use NVIDIA's FP8 or NVFP4 repository of the "
            "model, or one in compressed-tensors.",
        )
    return str(algorithm)


def _modelopt_scheme(fields: Fields, algorithm: str) -> Scheme:
    group, scheme = fields.integer("group_size", fields.integer("awq_block_size", 16)), _ALGORITHMS[algorithm]
    if scheme.number == "fp4" and group != 16:
        raise fields.error("group_size", f"is {group}; NVFP4 has groups of 16.")
    return scheme


def _mixed_schemes(fields: Fields) -> tuple[tuple[Names, Scheme], ...]:
    """What `quantized_layers` says of modules by their names."""
    fields.integer("group_size", 16)  # each module says its own
    layers = fields.take("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise fields.error("quantized_layers", f"must be an object with at least one module, got {layers!r:.80}.")
    found: dict[Scheme, list[str]] = {}
    for name, said in layers.items():
        if not isinstance(said, dict):
            raise fields.error("quantized_layers", f"has {name}, which must be an object, got {said!r:.80}.")
        inside = fields.inside(f"quantized_layers.{name}", said)
        scheme = _modelopt_scheme(inside, _algorithm(inside, tuple(_ALGORITHMS)))
        inside.finish()
        found.setdefault(scheme, []).append(name)
    return tuple((Names("module", tuple(names)), scheme) for scheme, names in found.items())


def _compare_groups(fields: Fields, groups: Any, found: Format) -> None:
    """Raises ConfigError if `config_groups` say something else of modules than the algorithms do."""
    for name, group in _objects(fields, "config_groups", groups):
        inside = fields.inside(f"config_groups.{name}", group)
        targets, weights = names_in(inside, "targets"), _arguments(inside, "weights")
        inputs = _arguments(inside, "input_activations")
        if inside.flag("has_zero_point", False):
            raise inside.error("has_zero_point", "is true, and no algorithm that is read has zero points.")
        inside.finish()
        if weights is None:
            raise inside.error("weights", "is missing.")
        schemes = {found.scheme(target) for target in targets if target != "Linear"} or {found.schemes[0][1]}
        _compare_weights(inside, weights, schemes)
        if inputs is not None:
            _compare_inputs(inside, inputs, schemes)


def _compare_weights(group: Fields, weights: Fields, schemes: Collection[Scheme | None]) -> None:
    bits, kind, size = weights.integer("num_bits", 8), weights.take("type", "float"), weights.take("group_size")
    strategy, block = weights.take("strategy"), block_in(weights, "block_structure")
    for scheme in schemes:
        want = None if scheme is None else 8 if scheme.number == "fp8" else 4
        if scheme is None or (bits, kind) != (want, "float") or size not in (None, scheme.block[1] or None):
            raise group.error(
                "weights", f"says {bits} bits of type {kind!r:.20} in groups of {size}, and quant_algo something else."
            )
        if block not in (None, scheme.block):
            raise weights.error("block_structure", f"is {block}, and quant_algo says {scheme.block}.")
        if strategy is not None and _SCALES.get(str(strategy)) != scheme.scales:
            raise weights.error("strategy", f"is {strategy!r:.40}, and quant_algo says {scheme.scales}.")
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "is false, and no algorithm that is read has zero points.")
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "is true; weights have scales of their own.")
    weights.finish()


def _compare_inputs(group: Fields, inputs: Fields, schemes: Collection[Scheme | None]) -> None:
    """Products with weights of 4 bits never round activations, so nothing but their names is compared there."""
    bits = {8 if scheme is not None and scheme.number == "fp8" else 4 for scheme in schemes}.pop()
    said, kind, strategy = inputs.integer("num_bits", bits), inputs.take("type", "float"), inputs.take("strategy")
    for scheme in schemes:
        if (bits == 8 and said != 8) or kind != "float":
            raise group.error(
                "input_activations", f"says {said} bits of type {kind!r:.20}, other numbers than the weights."
            )
        if strategy is not None and _ROUNDINGS.get(str(strategy)) not in _input_scales(scheme):
            raise inputs.error("strategy", f"is {strategy!r:.40}, and quant_algo something else.")
    if not inputs.flag("symmetric", True):
        raise inputs.error("symmetric", "is false, and no algorithm that is read has zero points.")
    inputs.finish(("dynamic", "group_size"))  # scales that a checkpoint must hold are missed where it doesn't


def _input_scales(scheme: Scheme | None) -> tuple[Rounding, ...]:
    """How activations may be said to be rounded beside weights that are stored so."""
    if scheme is None or scheme.number == "fp4":
        return "tensor", "group"
    return ("tensor",) if scheme.rounding == "static" else (scheme.rounding or "block",)


def _objects(fields: Fields, name: str, given: Any) -> list[tuple[str, dict[str, Any]]]:
    """The objects in the object that the field `name` holds."""
    if not isinstance(given, dict):
        raise fields.error(name, f"must be an object, got {given!r:.80}.")
    for inner, value in given.items():
        if not isinstance(value, dict):
            raise fields.error(name, f"has {inner}, which must be an object, got {value!r:.80}.")
    return list(given.items())


_COMPRESSED: dict[str, tuple[str, tuple[int, ...]]] = {  # type of numbers, bits
    "float-quantized": ("float", (8,)),
    "naive-quantized": ("", (8,)),  # of either type
    "int-quantized": ("int", (8,)),
    "pack-quantized": ("int", (4, 8)),
    "nvfp4-pack-quantized": ("float", (4,)),
    "mxfp4-pack-quantized": ("float", (4,)),
}
_COMPRESSED_LAYOUTS: dict[str, Layout] = {
    "pack-quantized": "compressed",
    "nvfp4-pack-quantized": "compressed nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
}
_SCALES: dict[str, Scales] = {
    "tensor": "tensor",
    "channel": "channel",
    "block": "block",
    "group": "group",
    "tensor_group": "group",
}
_ROUNDINGS: dict[str, Rounding] = {
    "tensor": "tensor",
    "token": "token",
    "block": "block",
    "group": "group",
    "tensor_group": "group",
}
_ELSEWHERE = (
    "Use another repository of the model, such as one in its -FP8-dynamic or .w4a16 form, or the one in bfloat16."
)
_ARGUMENT_NOTES = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def read_compressed(fields: Fields) -> Format:
    """compressed-tensors: groups of modules, each with numbers and scales of its own. Without groups, it may say how keys and values are."""
    groups, pages = fields.take("config_groups"), read_pages(fields)
    if pages and not groups:
        fields.take("format")
        return Format("compressed-tensors", (), Names("module", names_in(fields, "ignore")))
    layout = _layout(fields, (*_COMPRESSED, "mixed-precision"), None)
    for name in ("sparsity_config", "transform_config"):
        value = fields.take(name)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise fields.error(
                name, f"is {value!r:.80}; sparse and transformed weights are not supported. {_ELSEWHERE}"
            )
    if not groups:
        raise fields.error("config_groups", f"must be an object with at least one group, got {groups!r:.80}.")
    schemes = []
    for name, group in _objects(fields, "config_groups", groups):
        inside = fields.inside(f"config_groups.{name}", group)
        own = _layout(inside, tuple(_COMPRESSED), layout if layout in _COMPRESSED else None)
        targets = names_in(inside, "targets")
        if not targets:
            raise inside.error("targets", "is empty; it must name modules, or Linear for all of them.")
        names = ALL if "Linear" in targets else Names("module", targets)
        schemes.append((names, _compressed_scheme(inside, own)))
        inside.finish()
    # a target by name says more than the class of all linears
    schemes.sort(key=lambda entry: entry[0] == ALL)
    return Format("compressed-tensors", tuple(schemes), Names("module", names_in(fields, "ignore")))


def _layout(fields: Fields, known: tuple[str, ...], default: str | None) -> str:
    """The `format` of all groups, or of one."""
    said = fields.take("format", default)
    said = default if said is None else said
    if said not in known:
        raise fields.error("format", f"is {said!r:.80}; compressed-tensors is read in {', '.join(known)}. {_ELSEWHERE}")
    return str(said)


def _compressed_scheme(fields: Fields, layout: str) -> Scheme:
    wanted_kind, sizes = _COMPRESSED[layout]
    weights = _arguments(fields, "weights")
    if weights is None:
        raise fields.error("weights", "is missing.")
    kind = weights.choice("type", (wanted_kind,) if wanted_kind else ("float", "int"), "int")
    bits = weights.integer("num_bits", 8)
    if bits not in sizes:
        raise weights.error(
            "num_bits", f"is {bits}, which {layout} is not read with; it must be among {sizes}. {_ELSEWHERE}"
        )
    block, group = block_in(weights, "block_structure"), weights.take("group_size")
    by_size = "group" if group not in (None, -1) else "channel" if group == -1 else "tensor"
    strategy = weights.choice("strategy", tuple(_SCALES), by_size)
    scales, packed = _SCALES[strategy], layout in _COMPRESSED_LAYOUTS
    if scales not in (("group", "channel") if packed else ("tensor", "channel", "block")):
        raise weights.error("strategy", f"is {strategy!r}, which {layout} is not read with. {_ELSEWHERE}")
    symmetric, order = weights.flag("symmetric", True), weights.take("actorder")
    if order not in (None, True, False, "weight", "static", "group", "dynamic"):
        raise weights.error("actorder", f"is {order!r}, which is not known.")
    permuted = order in (True, "group", "dynamic")  # names of the same
    if permuted and scales != "group":
        raise weights.error(
            "actorder", f"is {order!r} beside the strategy {strategy!r}; only groups have an order of input features."
        )
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "is true; weights have scales of their own.")
    if not (packed or symmetric):
        raise weights.error(
            "symmetric",
            f"is false; weights of 8 bits with zero points are read as pack-quantized, and not {layout}. {_ELSEWHERE}",
        )
    weights.finish(_ARGUMENT_NOTES)
    if scales == "block" and block is None:
        raise weights.error("block_structure", "is missing beside the strategy 'block'.")
    if scales == "group":
        if type(group) is not int or group <= 0:
            raise weights.error("group_size", f"must be a whole number above 0, got {group!r}.")
        block = (1, group)
    wanted = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}.get(layout)
    if wanted is not None and block != (1, wanted):
        raise fields.error("weights", f"has the group_size {group!r} in {layout}, whose groups have {wanted} numbers.")
    number: Number = ("fp8" if kind == "float" else "int8") if bits == 8 else ("fp4" if kind == "float" else "int4")
    rounding, unused = _compressed_rounding(fields, kind, bits)
    return Scheme(
        number,
        scales,
        block or (0, 0),
        not symmetric,
        permuted,
        layout=_COMPRESSED_LAYOUTS.get(layout, ""),
        rounding=rounding,
        unused=unused,
    )


def _compressed_rounding(fields: Fields, kind: str, bits: int) -> tuple[Rounding, tuple[str, ...]]:
    """How activations are rounded beside weights of `bits` and of the type `kind`, and tensors that are there and not used.

    What layers return is never rounded.
    """
    if (outputs := fields.take("output_activations")) is not None:
        raise fields.error("output_activations", f"is {outputs!r:.80}; rounding what layers return is not supported.")
    inputs = _arguments(fields, "input_activations")
    if inputs is None:
        return "", ()
    own_bits, own_kind = inputs.integer("num_bits", 8), inputs.choice("type", ("float", "int"), "int")
    if bits == 8 and (own_bits, own_kind) != (bits, kind):  # products of fewer bits never round activations
        raise inputs.error(
            "num_bits",
            f"is {own_bits}, of type {own_kind}; beside weights of 8 bits and type {kind} activations are rounded to the same.",
        )
    strategy = inputs.choice("strategy", tuple(_ROUNDINGS), "tensor")
    dynamic = inputs.take("dynamic")
    if dynamic not in (None, True, False, "local"):
        raise inputs.error("dynamic", f"is {dynamic!r}, which is not known.")
    symmetric = inputs.flag("symmetric", True)
    for name in ("group_size", "block_structure", "actorder"):
        inputs.take(name)
    inputs.finish(_ARGUMENT_NOTES)
    if not symmetric:
        # no product takes numbers with zero points; activations that are left alone are closer to the model in floats
        return "", () if dynamic is True else ("input_scale", "input_zero_point")
    return _ROUNDINGS[strategy] if dynamic is True else "static", ()


def _arguments(fields: Fields, name: str) -> Fields | None:
    value = fields.mapping(name)
    return None if value is None else fields.inside(name, value)
