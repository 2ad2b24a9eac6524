"""Static scales of fp8 keys and values: numbers that a checkpoint holds beside the weights of each attention layer.

They were measured when the checkpoint was made, for fp8_e4m3: key = number * k_scale, value = number * v_scale. Tools name
them differently: `self_attn.k_scale` (compressed-tensors), `self_attn.k_proj.k_scale` (ModelOpt), `self_attn.attn.k_scale`
(vLLM), `self_attn.k_proj.output_scale` (older compressed-tensors), and `self_attn.kv_scale` for both (AutoFP8). Scales of queries
and of the softmax are passed over: neither is rounded. So are those of models with latents: they are of the keys and values that latents are
projected to, and pages hold the latents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagerunner.errors import CheckpointError
from pagerunner.memory.specs import FullKV, LatentKV, Spec

Scales = Mapping[int, tuple[float, float]]  # by layer: of keys, of values
DTYPE = "fp8_e4m3"
_PLACE = r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d{1,9})\.(?:self_attn|attn|attention)\."
_NAMES = tuple(
    (re.compile(_PLACE + pattern + "$"), which)
    for pattern, which in (
        (r"(?:k_proj\.|qkv_proj\.|attn\.)?k_scale", (0,)),
        (r"(?:v_proj\.|qkv_proj\.|attn\.)?v_scale", (1,)),
        (r"k_proj\.output_scale", (0,)),
        (r"v_proj\.output_scale", (1,)),
        (r"kv_scale", (0, 1)),
        # of queries and of softmax, which nothing here rounds
        (r"(?:q_proj\.|qkv_proj\.|attn\.)?(?:q|prob)_scale", ()),
    )
)
_KINDS = ("key", "value")


def place_of(name: str) -> tuple[int, tuple[int, ...]] | None:
    """The layer of a scale, and what it scales: 0 for keys, 1 for values, nothing for others. None for the name of another tensor."""
    if not name.endswith("_scale"):
        return None
    for pattern, which in _NAMES:
        if match := pattern.match(name):
            return int(match.group(1)), which
    return None


def read_kv_scales(files: Mapping[Path, Sequence[str]], specs: Sequence[Spec]) -> Scales:
    """The static scales in the safetensors `files` of a model with the layers `specs`; empty if they hold none.

    `files` are those of `loader.checkpoint_files`.

    Raises:
        CheckpointError: a layer lacks a scale that another has, holds it twice or keeps no keys and values, or a scale is not
            one finite positive number.
    """
    found: dict[tuple[int, int], tuple[str, float]] = {}
    for file, listed in files.items():
        if listed and not any(map(place_of, listed)):
            continue
        for name, value in _read(file).items():
            layer, parts = place_of(name) or (0, ())
            if layer < len(specs) and isinstance(specs[layer], LatentKV):
                continue
            if layer >= len(specs) or not _keeps_keys(specs[layer]):
                raise CheckpointError(
                    f"{file}: {name} belongs to layer {layer}, which has no keys and values to scale."
                )
            for which in parts:
                if (layer, which) in found:
                    other = found[layer, which][0]
                    raise CheckpointError(
                        f"{file}: {name} and {other} are both the {_KINDS[which]} scale of layer {layer}."
                    )
                found[layer, which] = (name, value)
    if not found:
        return {}
    layers = [layer for layer, spec in enumerate(specs) if _keeps_keys(spec)]
    for layer in layers:
        for which in (0, 1):
            if (layer, which) not in found:
                example = next(iter(found.values()))[0]
                raise CheckpointError(
                    f"{next(iter(files)).parent}: layer {layer} has no {_KINDS[which]} scale, but the checkpoint holds "
                    f"{example}; every layer with keys and values needs both, or none."
                )
    return {layer: (found[layer, 0][1], found[layer, 1][1]) for layer in layers}


def with_static_scales(specs: Sequence[Spec], scales: Scales) -> tuple[Spec, ...]:
    """`specs` whose e4m3 pages take the checkpoint's scales, if there are any, instead of holding their own."""
    return tuple(
        replace(spec, static_scales=True)
        if layer in scales and isinstance(spec, FullKV) and spec.dtype == DTYPE
        else spec
        for layer, spec in enumerate(specs)
    )


def _keeps_keys(spec: Spec) -> bool:
    return isinstance(spec, FullKV)


def _read(file: Path) -> dict[str, float]:
    try:
        handle: Any = safe_open(file, framework="pt", device="cpu")
        with handle as tensors:
            names = [name for name in tensors.keys() if (place_of(name) or (0, ()))[1]]  # noqa: SIM118 (not a mapping)
            return {name: _value(file, name, tensors.get_tensor(name)) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a complete safetensors file: {error}.") from None


def _value(file: Path, name: str, tensor: torch.Tensor) -> float:
    if tensor.numel() != 1 or not tensor.dtype.is_floating_point:
        shape, dtype = list(tensor.shape), str(tensor.dtype)[6:]
        raise CheckpointError(f"{file}: {name} must be one number, got shape {shape} of {dtype}.")
    value = float(tensor.float())
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{file}: {name} must be finite and above 0, got {value}.")
    return value
