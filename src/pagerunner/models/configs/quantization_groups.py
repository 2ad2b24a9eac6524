"""A quantization_config with groups of modules: those of compressed-tensors and of NVIDIA's Model Optimizer. Torch-free.

Sources: compressed-tensors' `quantization/quant_args.py` and `quant_scheme.py`; Model Optimizer's `export/convert_hf_config.py`.
"""

from __future__ import annotations

from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.quantization_fields import ALL, block_in, names_in
from pagerunner.quant.formats import Format, Layout, Names, Number, Rounding, Scales, Scheme


def read_modelopt(fields: Fields) -> Format:
    algorithm = fields.choice("quant_algo", (*_ALGORITHMS, "MIXED_PRECISION"))
    groups = fields.take("config_groups")  # newer files say the same twice
    if groups is not None and not isinstance(groups, dict):
        raise fields.error("config_groups", f"must be an object, got {groups!r:.80}.")
    ignored = Names("wildcard", names_in(fields, "ignore", "exclude_modules"))
    if algorithm == "MIXED_PRECISION":
        return Format("modelopt", _mixed_schemes(fields), ignored)
    return Format("modelopt", ((ALL, _modelopt_scheme(fields, algorithm)),), ignored)


_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")


def _modelopt_scheme(fields: Fields, algorithm: str) -> Scheme:
    group = fields.integer("group_size", 16)
    if algorithm == "FP8":
        return Scheme("fp8", "tensor", rounding="static")
    if group != 16:
        raise fields.error("group_size", f"is {group}; NVFP4 has groups of 16.")
    return Scheme("fp4", "group", (1, group), layout="nvfp4", rounding="static" if algorithm == "NVFP4" else "")


def _mixed_schemes(fields: Fields) -> tuple[tuple[Names, Scheme], ...]:
    """What `quantized_layers` says of modules by their names."""
    layers = fields.take("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise fields.error("quantized_layers", f"must be an object with at least one module, got {layers!r:.80}.")
    found: dict[Scheme, list[str]] = {}
    for name, said in layers.items():
        if not isinstance(said, dict):
            raise fields.error("quantized_layers", f"has {name}, which must be an object, got {said!r:.80}.")
        inside = fields.inside(f"quantized_layers.{name}", said)
        scheme = _modelopt_scheme(inside, inside.choice("quant_algo", _ALGORITHMS))
        inside.finish()
        found.setdefault(scheme, []).append(name)
    return tuple((Names("module", tuple(names)), scheme) for scheme, names in found.items())


_COMPRESSED: dict[str, tuple[str, tuple[int, ...]]] = {
    "float-quantized": ("float", (8,)),
    "naive-quantized": ("float", (8,)),
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
_ARGUMENT_NOTES = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def read_compressed(fields: Fields) -> Format:
    layout = fields.choice("format", (*_COMPRESSED, "mixed-precision"))
    for name in ("sparsity_config", "transform_config"):
        if value := fields.take(name):
            raise fields.error(name, f"is {value!r:.80}; sparse and transformed weights are not supported.")
    groups = fields.take("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.error("config_groups", f"must be an object with at least one group, got {groups!r:.80}.")
    schemes = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise fields.error("config_groups", f"has {name}, which must be an object, got {group!r:.80}.")
        inside = fields.inside(f"config_groups.{name}", group)
        own = inside.choice("format", tuple(_COMPRESSED), layout if layout in _COMPRESSED else None)
        targets = names_in(inside, "targets")
        if not targets:
            raise inside.error("targets", "is empty; it must name modules, or Linear for all of them.")
        names = ALL if "Linear" in targets else Names("module", targets)
        schemes.append((names, _compressed_scheme(inside, own)))
        inside.finish()
    # a target by name says more than the class of all linears
    schemes.sort(key=lambda entry: entry[0] == ALL)
    return Format("compressed-tensors", tuple(schemes), Names("module", names_in(fields, "ignore")))


def _compressed_scheme(fields: Fields, layout: str) -> Scheme:
    kind, sizes = _COMPRESSED[layout]
    weights = _arguments(fields, "weights")
    if weights is None:
        raise fields.error("weights", "is missing.")
    weights.choice("type", (kind,), "int")
    bits = weights.integer("num_bits", 8)
    if bits not in sizes:
        raise weights.error("num_bits", f"is {bits}, which {layout} is not read with; it must be among {sizes}.")
    scales = _SCALES[weights.choice("strategy", tuple(_SCALES), "tensor")]
    symmetric, order = weights.flag("symmetric", True), weights.take("actorder")
    if order not in (None, False, "weight", "static", "group", "dynamic"):
        raise weights.error("actorder", f"is {order!r}, which is not known.")
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "is true; weights have scales of their own.")
    block, group = block_in(weights, "block_structure"), weights.take("group_size")
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
    rounding = _compressed_rounding(fields, kind, bits)
    return Scheme(
        number,
        scales,
        block or (0, 0),
        not symmetric,
        order in ("group", "dynamic"),  # two names of the same
        layout=_COMPRESSED_LAYOUTS.get(layout, ""),
        rounding=rounding,
    )


def _compressed_rounding(fields: Fields, kind: str, bits: int) -> Rounding:
    """How activations are rounded beside weights of `bits` and of the type `kind`. What layers return is never rounded."""
    if (outputs := fields.take("output_activations")) is not None:
        raise fields.error("output_activations", f"is {outputs!r:.80}; rounding what layers return is not supported.")
    inputs = _arguments(fields, "input_activations")
    if inputs is None:
        return ""
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
    for name in ("group_size", "block_structure", "actorder", "symmetric"):
        inputs.take(name)
    inputs.finish(_ARGUMENT_NOTES)
    if dynamic is not True:
        return "static"
    return _ROUNDINGS[strategy]


def _arguments(fields: Fields, name: str) -> Fields | None:
    value = fields.take(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.error(name, f"must be an object, got {value!r:.80}.")
    return fields.inside(name, value)
