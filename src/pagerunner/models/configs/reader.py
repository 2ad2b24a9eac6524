"""Reading config.json and generation_config.json. Torch-free, so that memory can be planned from a config alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagerunner.config import DTYPE_BYTES
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.models.configs.base import ModelConfig, RopeConfig
from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.json_files import read_json
from pagerunner.models.configs.quantization import asked_format, read_format, with_hf_quant_config
from pagerunner.models.configs.quantization_fields import ALL
from pagerunner.models.registry import FAMILIES, Family
from pagerunner.quant.formats import Format

__all__ = ["ModelConfig", "RopeConfig", "read_model_config"]

_MOST_LAYERS = 10_000  # published models have fewer than 200; each one is built to be planned
_QUANTIZATIONS = ("quantization_config", "compression_config")
_SECOND_FILE = "hf_quant_config.json"
_SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# What only images and videos need, and a label of training.
_IMAGE_FIELDS = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "language_model_only", "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image",
    "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer",
    "media_placeholder_token_id", "projection_hidden_size", "projection_layer_norm_eps", "use_unified_vision_chunk",
    "video_placeholder", "ignore_index",
)  # fmt: skip


def read_model_config(
    path: str | Path,
    max_model_len: int | None = None,
    hf_overrides: str | dict[str, Any] | None = None,
    *,
    quantised: bool = False,
    quantization: str | None = None,
) -> ModelConfig:
    """Read the configuration of the model directory (or of the config.json) at `path`.

    `max_model_len` is the longest sequence that will be run, if the user has set one: a sliding window of at least that
    has no effect and is accepted. `hf_overrides`, a mapping or JSON, replaces fields of config.json; objects are merged,
    and null stands for a field that is not there. `quantised`: weights may be stored in any format, as nobody will load them.
    `quantization` is what the user says of how they are, or shall be, quantised.

    Raises:
        CheckpointError: there is no such directory, no config.json in it, or it is not a JSON object.
        ConfigError: the family or a field's value is not supported; the message names both.
    """
    directory, file = locate(path)
    values = _overridden(read_json(file), _read_overrides(hf_overrides), str(file))
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"{file}: model_type is {family!r}, which is not supported; supported are {', '.join(sorted(FAMILIES))}."
        )
    if "eagle" in (kind := str(values.get("architectures"))).lower():
        raise ConfigError(
            f"{file}: architectures is {kind}: a head that drafts tokens for another model, and can't be served itself. Name it beside that model: "
            f"""--speculative-config '{{"model": "{directory}", "num_speculative_tokens": 3}}'."""
        )
    path_inside: tuple[str, ...] = ()
    quantization_path: tuple[str, ...] = ()  # those of text and images often say it outside
    if FAMILIES[family].nested:
        outer, values = values, _text_values(Fields(values, str(file)), FAMILIES[family], f"{family}_text")
        path_inside = ("text_config",)
        quantization_path = path_inside if any(outer["text_config"].get(name) for name in _QUANTIZATIONS) else ()
    values = {**FAMILIES[family].defaults, **values}
    fields = Fields(values, str(file), path=path_inside)
    said, layout = take_quantization(fields, directory, quantization_path, quantised)
    if said is None or layout is not None:
        layout = asked_format(quantization, layout, str(file))
    common = read_common(fields, values, directory, family, "float32" if said is None else "bfloat16")
    common["quantization"], common["format"] = said, layout
    fields.length = min(common["max_position_embeddings"], max_model_len or common["max_position_embeddings"])
    config = FAMILIES[family].read(fields, common)
    fields.finish()
    return config


def take_quantization(
    fields: Fields, directory: Path, path: tuple[str, ...], allowed: bool
) -> tuple[dict[str, Any] | None, Format | None]:
    """How the weights are quantised, as the config says it and, where they can be loaded, as a format; None where they aren't.

    `path` are the objects of config.json that it is said in. Raises ConfigError for those that can't be loaded, unless `allowed`.
    """
    found, layout = None, None
    for name, value in _quantizations(fields, directory):
        if value is None:
            continue
        try:
            read = read_format(value, f"{fields.where}: {name}", (*path, name))
        except ConfigError:
            if not allowed:
                raise
            found = value
            continue
        if not read.schemes:
            continue
        found = value
        if layout is not None and layout.schemes_said != read.schemes_said:
            raise fields.error(name, "says something else than quantization_config does; remove the one that is wrong.")
        layout = read
    if layout is not None and found is not None:
        _check_second_file(found, layout, fields.where, directory / _SECOND_FILE)
    return found, layout


def _check_second_file(said: Mapping[str, Any], layout: Format, where: str, file: Path) -> None:
    """Model Optimizer may say the same twice. Raises ConfigError if the second file says something else than the config.

    Lists of modules that stay as they were may differ: each tool spells names in its own way, and tensors have the last word.
    """
    if not file.is_file():
        return
    second = with_hf_quant_config(read_json(file), str(file))
    if second.get("quant_algo") is None:  # nothing but, perhaps, a kv_cache_quant_algo
        return
    for name in ("quant_algo", "group_size"):
        if name in second and name in said and second[name] != said[name]:
            raise ConfigError(
                f"{where}: quantization_config says {name} {said[name]!r}, and {file.name} beside it says {second[name]!r}; "
                "remove the one that is wrong."
            )
    other = read_format(second, f"{file}: quantization")
    for names, scheme in other.schemes:
        for module in names.entries:
            own = layout.schemes[-1][1] if module == ALL.entries[0] else layout.scheme(module)
            if own is None or scheme is None or replace(own, rounding="") != replace(scheme, rounding=""):
                raise ConfigError(
                    f"{where}: quantization_config and {file.name} beside it say different things of "
                    f"{'all modules' if module == ALL.entries[0] else module}; remove the one that is wrong."
                )


def _quantizations(fields: Fields, directory: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """What config.json says of quantisation; where it says nothing, the file that older versions of Model Optimizer write."""
    given = [(name, fields.mapping(name)) for name in _QUANTIZATIONS]
    yield from given
    file = directory / _SECOND_FILE
    if all(value is None for _, value in given) and file.is_file():
        yield file.name, with_hf_quant_config(read_json(file), str(file))


def _read_overrides(option: str | dict[str, Any] | None) -> dict[str, Any]:
    try:
        values = json.loads(option) if isinstance(option, str) else option
    except json.JSONDecodeError as error:
        raise ConfigError(f"hf_overrides is not valid JSON: {error}.") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f'hf_overrides must be an object such as {{"rope_theta": 1000000}}, got {option!r}.')
    return values or {}


def _overridden(values: dict[str, Any], overrides: dict[str, Any], where: str) -> dict[str, Any]:
    """`values` with `overrides` over them; objects in both are merged."""
    found = dict(values)
    for name, value in overrides.items():
        if value is None and name not in values:
            raise ConfigError(f"hf_overrides sets {name} to null, but {where} has no such field.")
        inner = values.get(name)
        if isinstance(value, dict) and isinstance(inner, dict):
            value = _overridden(inner, value, f"{where}: {name}")
        found[name] = value
    return found


def _text_values(outer: Fields, family: Family, text_type: str) -> dict[str, Any]:
    """The text model's fields of a config.json that also describes how images become tokens."""
    text_types = family.text_types or (text_type,)
    text = outer.take("text_config")
    if not isinstance(text, dict) or text.get("model_type") not in text_types:
        raise outer.error(
            "text_config", f"must be an object of model_type {' or '.join(text_types)}, got {text!r:.80}."
        )
    shared = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", *_QUANTIZATIONS)
    found = {name: value for name in shared if (value := outer.take(name)) is not None}
    tied = outer.take("tie_word_embeddings")
    outer.finish(_IMAGE_FIELDS)
    return found | text | ({} if tied is None else {"tie_word_embeddings": tied})


def locate(path: str | Path) -> tuple[Path, Path]:
    """The directory of the model at `path`, and its config.json. Raises CheckpointError if there is none."""
    given, path = str(path), Path(path)
    if path.is_file() and path.suffix == ".json":
        return path.parent, path
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise CheckpointError(f"{path} is not a model directory: it has no config.json.")
        return path, file
    if path.exists():
        raise CheckpointError(f"{path} is a file; a model is a directory with config.json and *.safetensors.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", given) and not given.startswith((".", "~")):
        raise CheckpointError(
            f"There is no directory {given}. Names on the Hugging Face Hub are found by LLM, AsyncEngine and the command line; "
            "here give a directory."
        )
    hint = " A name on the Hugging Face Hub has two parts, ORG/NAME." if re.fullmatch(r"[\w.-]+", given) else ""
    raise CheckpointError(f"There is no model directory {given}.{hint}")


def read_common(
    fields: Fields, values: dict[str, Any], directory: Path, family: str, default_dtype: str
) -> dict[str, Any]:
    """The fields of ModelConfig that every config.json has, from `fields`, which also stand in `values` as they are."""
    given = {"dtype": values.get("dtype") or values.get("torch_dtype")}
    dtype = Fields(given, fields.where).choice("dtype", tuple(DTYPE_BYTES), default_dtype)
    vocab_size = fields.integer("vocab_size")
    generation: dict[str, Any] = {}
    if (directory / "generation_config.json").is_file():
        generation = read_json(directory / "generation_config.json")
    eos = _token_ids(fields, values.get("eos_token_id"), vocab_size)
    eos += _token_ids(Fields({}, str(directory / "generation_config.json")), generation.get("eos_token_id"), vocab_size)
    bos = _token_ids(fields, values.get("bos_token_id"), None, "bos_token_id")
    recommended = {ours: generation.get(theirs) for theirs, ours in _SAMPLING_DEFAULTS.items()}
    defaults = {name: value for name, value in recommended.items() if value is not None}
    if generation.get("do_sample") is False:
        defaults.setdefault("temperature", 0.0)
    layers = fields.integer("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise fields.error("num_hidden_layers", f"must be at most {_MOST_LAYERS}, got {layers}.")
    return {
        "path": str(directory),
        "family": family,
        "dtype": dtype,
        "num_layers": layers,
        "vocab_size": vocab_size,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": tuple(dict.fromkeys(eos)),
        "sampling_defaults": defaults,
    }


def _token_ids(fields: Fields, value: Any, vocab_size: int | None, name: str = "eos_token_id") -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise fields.error(name, f"must be a token id or a list of them, got {value!r}.")
    return [token for token in ids if vocab_size is None or 0 <= token < vocab_size]
