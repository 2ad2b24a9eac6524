"""`quantization_config` of config.json, or `hf_quant_config.json` beside it, to a `Format`. Torch-free.

Every field of a writer is read, is known to change nothing, or is an error that names it. Sources: transformers' quantisation
configs, compressed-tensors' `quantization/quant_args.py` and `quant_scheme.py`, AutoAWQ's and GPTQModel's configs, and what NVIDIA's
Model Optimizer exports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagerunner.errors import ConfigError
from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.quantization_fields import ALL, NOTES, block_in, names_in, read_pages
from pagerunner.models.configs.quantization_groups import read_compressed, read_mixed_experts, read_modelopt
from pagerunner.models.configs.quantization_words import read_auto_round, read_awq, read_gptq
from pagerunner.quant.formats import Format, Names, Scheme, Writer

_ANOTHER = "use a repository of the model in fp8, AWQ, GPTQ or compressed-tensors, or the one in bfloat16"
_INSTEAD = {
    "gguf": "GGUF files are made for llama.cpp; use the model's safetensors",
    "bitsandbytes": "its weights are quantised while they are loaded; use the model's bfloat16 files, or a compressed-tensors checkpoint",
    "torchao": "its tensors are pickled, and pickles are never read; use a compressed-tensors checkpoint",
    "quark": f"AMD's Quark stores numbers by rules of its own, which aren't read; {_ANOTHER}",
    "marlin": f"its words are in the order of one GPU kernel, which isn't read; {_ANOTHER}",
}
# What `quantization` may say of a checkpoint that is quantised, by its writer: vLLM's names.
_ALIASES: dict[Writer, str] = {
    "fp8": "fp8 deepseek_v4_fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "modelopt": "modelopt modelopt_fp4 modelopt_mixed",
    "compressed-tensors": "compressed-tensors compressed_tensors",
    "awq": "awq awq_marlin auto_awq",
    "gptq": "gptq gptq_marlin auto_gptq",
    "auto-round": "auto-round auto_round intel/auto-round inc",
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


def read_format(values: Mapping[str, Any], where: str, path: tuple[str, ...] = ()) -> Format:
    """The format that the fields `values` of a quantization_config describe; `where` and `path` name them in messages.

    It has no schemes if the fields are about keys and values only.

    Raises:
        ConfigError: the writer is not known, or a field is unknown, missing or has a value that is not; the message names it.
    """
    fields = Fields(values, where, path=path)
    method = _method(fields)
    found = _READERS[method](fields)
    fields.finish(NOTES[method].split())
    return found


def _method(fields: Fields) -> Writer:
    """Who wrote the config. Some of Model Optimizer's name themselves as the producer alone, and MLX's don't at all."""
    said, producer = fields.take("quant_method"), fields.take("producer")
    if said is None and isinstance(producer, dict) and producer.get("name") == "modelopt":
        said = "modelopt"
    if said is None and fields.holds("bits") and fields.holds("group_size"):
        raise fields.error(
            "quant_method", f"is missing, as in files of MLX, which are made for Apple's processors; {_ANOTHER}."
        )
    if said is None:
        raise fields.error("quant_method", f"is missing; known are {', '.join(_READERS)}.")
    method = _WRITERS.get(said) if isinstance(said, str) else None
    if method is None:
        instead = _INSTEAD.get(str(said), _ANOTHER)
        raise fields.error(
            "quant_method", f"is {said!r:.80}; known are {', '.join(_READERS)}. {instead[0].upper()}{instead[1:]}."
        )
    return method


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


def _read_fp8(fields: Fields) -> Format:
    read_pages(fields)
    experts = read_mixed_experts(fields)
    static = fields.choice("activation_scheme", ("static", "dynamic"), "dynamic") == "static"
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.choice("scale_fmt", ("ue8m0", "float"), "float")  # powers of two, but in the dtype that the file has
    block = block_in(fields, "weight_block_size")
    if block is None:
        scheme = Scheme("fp8", "tensor", rounding="static" if static else "tensor")
    elif static:
        raise fields.error("activation_scheme", "is 'static' beside a weight_block_size, which has no static scales.")
    else:
        scheme = Scheme("fp8", "block", block, rounding="block")
    kept = names_in(fields, "modules_to_not_convert", "ignored_layers")
    return Format("fp8", (*experts, (ALL, scheme)), Names("module", kept))


def _read_fbgemm(fields: Fields) -> Format:
    """Weights as PyTorch's FBGEMM rounds them, in rows. The bound of activations' scales is for products that round activations."""
    scheme = Scheme("fp8", "channel", rounding="token")
    return Format("fbgemm_fp8", ((ALL, scheme),), Names("module", names_in(fields, "modules_to_not_convert")))


def _read_mxfp4(fields: Fields) -> Format:
    ignored = Names("module", names_in(fields, "modules_to_not_convert"))
    return Format("mxfp4", ((ALL, Scheme("fp4", "group", (1, 32), layout="gpt-oss")),), ignored)


_READERS: dict[str, Callable[[Fields], Format]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "modelopt": read_modelopt,
    "compressed-tensors": read_compressed,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "mxfp4": _read_mxfp4,
}
