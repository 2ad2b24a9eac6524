"""`quantization_config` of config.json, or `hf_quant_config.json` beside it, to a `Format`. Torch-free.

Every field of a writer is read, is known to change nothing, or is an error that names it. Sources: transformers' quantisation
configs, compressed-tensors' `quantization/quant_args.py` and `quant_scheme.py`, AutoAWQ's and GPTQModel's configs, and what NVIDIA's
Model Optimizer exports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pagerunner.errors import ConfigError
from pagerunner.models.configs.fields import Fields
from pagerunner.quant.formats import Format, Layout, Names, Number, Rounding, Scales, Scheme, Writer
from pagerunner.quant.patterns import Pattern

ALL = Names("module", ("re:.*",))
_INSTEAD = {
    "gguf": "GGUF files are made for llama.cpp; use the model's safetensors",
    "bitsandbytes": "bitsandbytes quantises while it loads; use the model's bfloat16 files, or a compressed-tensors checkpoint",
    "torchao": "torchao stores pickled tensors, which are never read; use a compressed-tensors checkpoint",
}
# What `quantization` may say of a checkpoint that is quantised, by its writer: vLLM's names.
_ALIASES: dict[Writer, str] = {
    "fp8": "fp8 deepseek_v4_fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "modelopt": "modelopt modelopt_fp4 modelopt_mixed",
    "compressed-tensors": "compressed-tensors compressed_tensors",
    "awq": "awq awq_marlin auto_awq",
    "gptq": "gptq gptq_marlin auto_gptq",
    "auto-round": "auto-round auto_round inc",
    "mxfp4": "mxfp4 gpt_oss_mxfp4",
}
_WRITERS: dict[str, Writer] = {name: writer for writer, names in _ALIASES.items() for name in names.split()}
# What it may say of a checkpoint in floats, which is then rounded while it is loaded.
_ONLINE = {
    "fp8": Scheme("fp8", "channel", rounding="token"),
    "fp8_per_tensor": Scheme("fp8", "channel", rounding="token"),  # a scale of each output feature is never coarser
    "fp8_per_channel": Scheme("fp8", "channel", rounding="token"),
    "fp8_per_block": Scheme("fp8", "block", (128, 128), rounding="block"),
    "int8_per_channel_weight_only": Scheme("int8", "channel"),
}
QUANTIZATIONS = tuple(sorted({*_WRITERS, *_ONLINE}))
# What tools note of how they quantised; none of it changes what the stored numbers mean.
_NOTES = {
    "fp8": "dequantize kv_cache_scheme",
    "fbgemm_fp8": "activation_scale_ub",
    "modelopt": "producer kv_cache_quant_algo kv_cache_scheme has_zero_point",
    "compressed-tensors": "version quantization_status global_compression_ratio kv_cache_scheme",
    "awq": "backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config damp_percent",
    "gptq": "damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name meta quantizer "
    "pack_dtype cache_block_outputs batch_size block_name_to_quantize dataset tokenizer module_name_preceding_first_block "
    "model_seqlen pad_token_id use_cuda_fp16 use_exllama exllama_config max_input_length disable_exllama backend act_group_aware hyb_act",
    "auto-round": "autoround_version iters nsamples seqlen lr minmax_lr batch_size train_bs dataset amp enable_minmax_tuning "
    "enable_norm_bias_tuning enable_quanted_input enable_alg_ext enable_torch_compile gradient_accumulate_steps low_gpu_mem_usage "
    "low_cpu_mem_usage scale_dtype backend damp_percent true_sequential static_groups quant_block_list provider seed act_data_type "
    "act_dynamic act_group_size act_sym",
    "mxfp4": "dequantize swizzle",
}


def read_format(values: Mapping[str, Any], where: str, path: tuple[str, ...] = ()) -> Format:
    """The format that the fields `values` of a quantization_config describe; `where` and `path` name them in messages.

    Raises:
        ConfigError: the writer is not known, or a field is unknown, missing or has a value that is not; the message names it.
    """
    fields = Fields(values, where, path=path)
    method = fields.take("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        instead = _INSTEAD.get(str(method), "use the model's checkpoint in bfloat16")
        raise fields.error(
            "quant_method", f"is {method!r}; known are {', '.join(_READERS)}. {instead[0].upper()}{instead[1:]}."
        )
    found = _READERS[method](fields)
    fields.finish(_NOTES[method].split())
    return found


def asked_format(quantization: str | None, found: Format | None, where: str) -> Format | None:
    """The format that a user's `quantization` and the one that the checkpoint is in come to; `where` names the checkpoint's.

    Raises:
        ConfigError: they contradict each other, or the name is not known; the message names both.
    """
    if quantization is None or quantization.lower() == "none":
        return found
    if instead := _INSTEAD.get(quantization):
        raise ConfigError(f"quantization={quantization!r}: {instead}.")
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization={quantization!r} is not known; known are {', '.join(QUANTIZATIONS)}.")
    if found is None:
        if quantization in _ONLINE:
            return Format("online", ((ALL, _ONLINE[quantization]),), Names("module"))
        raise ConfigError(
            f"quantization={quantization!r}, but {where} has no quantization_config: its weights are floats. Such weights can be "
            f"rounded while they are loaded, by quantization={' or '.join(map(repr, _ONLINE))}."
        )
    if _WRITERS.get(quantization) != found.writer:
        raise ConfigError(
            f"quantization={quantization!r}, but {where} says quant_method {found.writer!r}. Leave quantization out."
        )
    return found


def with_hf_quant_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The quantization_config that an `hf_quant_config.json` with the fields `values` stands for (older files of Model Optimizer).

    Raises:
        ConfigError: the file is not built as that tool builds it.
    """
    fields = Fields(values, where)
    quantization = fields.take("quantization")
    if not isinstance(quantization, dict):
        raise fields.error("quantization", f"must be an object, got {quantization!r:.80}.")
    fields.finish(("producer",))
    return {**quantization, "quant_method": "modelopt"}


def _list(fields: Fields, *names: str) -> tuple[str, ...]:
    """The entries of a list of names that writers call by several names; none where it is null."""
    entries: list[str] = []
    for name in names:
        value = fields.take(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise fields.error(name, f"must be a list of names, got {value!r:.120}.")
        entries += (_checked(fields, name, entry) for entry in value)
    return tuple(entries)


def _checked(fields: Fields, name: str, entry: str) -> str:
    """The entry `re:PATTERN` of the field `name`, or any other, if the pattern can be matched."""
    if entry.startswith("re:"):
        try:
            Pattern(entry[3:])
        except ValueError as error:
            raise fields.error(name, f"has {entry!r:.120}, which is no pattern that can be matched: {error}.") from None
    return entry


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None where there are none."""
    value = fields.take(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise fields.error(name, f"must be two whole numbers, rows and columns, got {value!r:.80}.")
    return value[0], value[1]


def _read_fp8(fields: Fields) -> Format:
    static = fields.choice("activation_scheme", ("static", "dynamic"), "dynamic") == "static"
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.choice("scale_fmt", ("ue8m0", "float"), "float")  # powers of two, but in the dtype that the file has
    block = _block(fields, "weight_block_size")
    if block is None:
        scheme = Scheme("fp8", "tensor", rounding="static" if static else "tensor")
    elif static:
        raise fields.error("activation_scheme", "is 'static' beside a weight_block_size, which has no static scales.")
    else:
        scheme = Scheme("fp8", "block", block, rounding="block")
    return Format("fp8", ((ALL, scheme),), Names("module", _list(fields, "modules_to_not_convert", "ignored_layers")))


def _read_fbgemm(fields: Fields) -> Format:
    """Weights as PyTorch's FBGEMM rounds them, in rows. The bound of activations' scales is for products that round activations."""
    scheme = Scheme("fp8", "channel", rounding="token")
    return Format("fbgemm_fp8", ((ALL, scheme),), Names("module", _list(fields, "modules_to_not_convert")))


def _read_modelopt(fields: Fields) -> Format:
    algorithm = fields.choice("quant_algo", (*_ALGORITHMS, "MIXED_PRECISION"))
    groups = fields.take("config_groups")  # newer files say the same twice
    if groups is not None and not isinstance(groups, dict):
        raise fields.error("config_groups", f"must be an object, got {groups!r:.80}.")
    ignored = Names("wildcard", _list(fields, "ignore", "exclude_modules"))
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


def _read_compressed(fields: Fields) -> Format:
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
        targets = _list(inside, "targets")
        if not targets:
            raise inside.error("targets", "is empty; it must name modules, or Linear for all of them.")
        names = ALL if "Linear" in targets else Names("module", targets)
        schemes.append((names, _compressed_scheme(inside, own)))
        inside.finish()
    # a target by name says more than the class of all linears
    schemes.sort(key=lambda entry: entry[0] == ALL)
    return Format("compressed-tensors", tuple(schemes), Names("module", _list(fields, "ignore")))


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
    block, group = _block(weights, "block_structure"), weights.take("group_size")
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


def _read_awq(fields: Fields) -> Format:
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
    return Format("awq", ((ALL, scheme),), Names("part", _list(fields, "modules_to_not_convert")))


def _read_gptq(fields: Fields) -> Format:
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
    kept, schemes = list(_list(fields, "modules_to_not_convert")), []
    for pattern, changes in overrides.items():
        entry = _checked(fields, "dynamic", f"re:{pattern.removeprefix('-:').removeprefix('+:')}")
        if pattern.startswith("-:"):
            kept.append(entry)
            continue
        if not isinstance(changes, dict):
            raise fields.error(
                "dynamic", f"has {pattern!r:.120}, which must be an object of settings, got {changes!r:.80}."
            )
        own = fields.inside(f"dynamic.{pattern}", {**usual, **changes})
        schemes.append((Names("module", (entry,)), _gptq_scheme(own, version)))
        own.finish(_NOTES["gptq"].split())
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


def _read_auto_round(fields: Fields) -> Format:
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
        entry = _checked(fields, "extra_config", f"re:{name}") if _SPECIAL.search(name) else name
        inside = fields.inside(f"extra_config.{name}", {**usual, **said})
        if said.get("bits") in (16, 32):
            kept.append(entry)
            continue
        schemes.append((Names("module", (entry,)), _round_scheme(inside, layout, permuted=permuted)))
        inside.finish(_NOTES["auto-round"].split())
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


def _read_mxfp4(fields: Fields) -> Format:
    ignored = Names("module", _list(fields, "modules_to_not_convert"))
    return Format("mxfp4", ((ALL, Scheme("fp4", "group", (1, 32), layout="gpt-oss")),), ignored)


_READERS: dict[str, Callable[[Fields], Format]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "mxfp4": _read_mxfp4,
}
