"""Quantise a checkpoint to fp8 or int4, as compressed-tensors stores them, which pagerunner and vLLM both load.

    python scripts/quantise.py MODEL OUTPUT --format fp8
    python scripts/quantise.py MODEL OUTPUT --format int4 [--group-size 128]

MODEL is a directory with safetensors in floats, or a demo's name; OUTPUT is made. Every linear layer of the text model is quantised, and
every expert that is a matrix of its own. These stay as they are: embeddings, output weights, routers, norms, experts of a layer in one
tensor (gpt-oss, Llama 4), matrices that take part in products of another shape, and what reads images. One file is in memory at a time.

fp8: e4m3 numbers, and a float32 scale for each output feature, which makes its largest weight 448.
int4: whole numbers from -8 to 7, and a scale for each group of input features: the one among 20 candidates with the least squared error.
Where the group size doesn't divide a layer's input features, the layer gets the next smaller power of two that does, 32 at least; a layer
that none divides stays as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pagerunner.demo import find_model
from pagerunner.errors import ConfigError, PagerunnerError
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import Experts
from pagerunner.memory.units import human_bytes
from pagerunner.models.checkpoint.loader import build_model, checkpoint_files, own_name
from pagerunner.models.configs.json_files import read_json
from pagerunner.models.configs.reader import read_model_config

FORMATS = ("fp8", "int4")
LEAST_GROUP = 32
_E4M3_MOST = 448.0
_STEPS = 20  # candidates for a scale, from 100 % of the group's largest weight down to 62 %
_INDEX = "model.safetensors.index.json"
Packed = dict[str, torch.Tensor]


def linear_weights(model: Path) -> dict[str, int]:
    """The model's names of all matrices that can be quantised, each with a number that its groups must divide.

    That is its input features; for an expert, the common divisor of all matrices' of the layer, as they have one group size.

    Raises:
        ConfigError: the model is quantised already, or not supported.
    """
    config = read_model_config(model)
    if config.quantization is not None:
        raise ConfigError(f"{model} is quantised already ({config.quantization.get('quant_method')}).")
    found = {}
    for tensor in build_model(config, "float32").checkpoint():
        owner = tensor.owner
        wanted = isinstance(owner, Experts) or (isinstance(owner, Linear) and not (owner.plain or owner.needs_dense))
        if wanted and tensor.name.endswith(".weight") and len(tensor.sink.shape) == 2:
            sizes = math.gcd(*owner.sizes[1:]) if isinstance(owner, Experts) else tensor.sink.shape[1]
            found[tensor.name] = sizes
    return found


def to_fp8(weight_OI: torch.Tensor) -> Packed:
    """e4m3 numbers and a scale for each output feature."""
    weight = weight_OI.float()
    scale = weight.abs().amax(1, keepdim=True) / _E4M3_MOST
    scale = torch.where(scale > 0, scale, 1.0)
    numbers = (weight / scale).clamp(-_E4M3_MOST, _E4M3_MOST).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}


def to_int4(weight_OI: torch.Tensor, group: int) -> Packed:
    """Numbers in words of 32 bits, eight a word, the first in the lowest bits; a scale for each group, in the weights' dtype."""
    parts = weight_OI.float().unflatten(1, (-1, group))
    largest = parts.abs().amax(2, keepdim=True)
    best = torch.full_like(largest, torch.inf)
    scales = torch.ones_like(largest)
    for step in range(_STEPS):
        scale = (largest * (1 - 0.02 * step) / 7.5).to(weight_OI.dtype).float()
        scale = torch.where(scale > 0, scale, 1.0)
        error = ((parts / scale).round().clamp(-8, 7) * scale - parts).square().sum(2, keepdim=True)
        scales, best = torch.where(error < best, scale, scales), torch.minimum(error, best)
    numbers = ((parts / scales).round().clamp(-8, 7) + 8).flatten(1).to(torch.int32)
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int32)
    for place in range(8):
        words |= numbers[:, place::8] << 4 * place
    return {
        "weight_packed": words,
        "weight_scale": scales.squeeze(2).to(weight_OI.dtype),
        "weight_shape": torch.tensor(weight_OI.shape),
    }


def fitting_group(in_features: int, group: int) -> int | None:
    """The largest group of at most `group` that divides so many input features; None if there is none."""
    while group >= LEAST_GROUP:
        if in_features % group == 0:
            return group
        group //= 2
    return None


def quantise(model: Path, output: Path, number: str, group: int = 128) -> dict[str, Any]:
    """Write the quantised checkpoint to `output`; the quantization_config that it got.

    Raises:
        ConfigError: an argument or the model is not supported.
        CheckpointError: a file is missing or damaged.
    """
    if number not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {number!r}.")
    if group < LEAST_GROUP or group & (group - 1):
        raise ConfigError(f"group_size must be a power of two of at least {LEAST_GROUP}, got {group}.")
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty.")
    weights, files = linear_weights(model), checkpoint_files(model)
    output.mkdir(parents=True, exist_ok=True)
    groups: dict[int, list[str]] = {}
    kept: list[str] = []
    places: dict[str, str] = {}
    for file in files:
        written: Packed = {}
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in sorted(tensors.keys()):
                tensor, module = tensors.get_tensor(name), name.removesuffix(".weight")
                features = weights.get(own_name(name, weights))
                size = 0 if number == "fp8" or features is None else fitting_group(features, group)
                if features is None or size is None:
                    written[name] = tensor
                    kept += _left_out(name, tensor.dim(), kept)
                    continue
                groups.setdefault(size, []).append(module)
                packed = to_int4(tensor, size) if size else to_fp8(tensor)
                written |= {f"{module}.{suffix}": part.contiguous() for suffix, part in packed.items()}
        _save(written, output / file.name)
        places |= dict.fromkeys(written, file.name)
    said = _config(number, groups, kept)
    _write_others(model, output, said, places if len(files) > 1 else None)
    return said


def _left_out(name: str, dimensions: int, listed: list[str]) -> list[str]:
    """The module of a tensor that stays as it is, if it is a matrix that isn't listed yet; experts in one tensor are one module."""
    module, _, own = name.rpartition(".")
    matrix = own == "weight" and dimensions == 2
    experts = module.endswith(".experts") and dimensions == 3
    return [module] if (matrix or experts) and module not in listed[-2:] else []


def _config(number: str, groups: dict[int, list[str]], kept: list[str]) -> dict[str, Any]:
    """The quantization_config: a group of most matrices, and groups by name of those with other sizes."""
    sizes = sorted(groups, key=lambda size: -len(groups[size]))
    if not sizes:
        raise ConfigError("the model has no matrix that can be quantised.")
    described = {
        f"group_{i}": {
            "targets": groups[size] if i else ["Linear"],
            "weights": _weights(number, size),
            "input_activations": _inputs(number),
            "output_activations": None,
        }
        for i, size in enumerate(sizes)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if number == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": described,
        "ignore": kept or ["lm_head"],
    }


def _weights(number: str, size: int) -> dict[str, Any]:
    if number == "fp8":
        return {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": True, "dynamic": False}


def _inputs(number: str) -> dict[str, Any] | None:
    """fp8 activations are rounded token by token where that is faster; int4 weights leave activations alone."""
    if number == "int4":
        return None
    return {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def _save(tensors: Packed, path: Path) -> None:
    """A file for everybody whom the umask lets read: safetensors makes its files for their owner alone."""
    save_file(tensors, path, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _write_others(model: Path, output: Path, said: dict[str, Any], places: dict[str, str] | None) -> None:
    """config.json, the index of several files, and the tokenizer's files."""
    config = read_json(model / "config.json")
    (output / "config.json").write_text(json.dumps({**config, "quantization_config": said}, indent=2) + "\n")
    if places is not None:
        (output / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=2) + "\n")
    modules = model.glob("[0-9]_*/*")  # of an embedding model
    for file in (*model.glob("*"), *modules):
        copied = output / file.relative_to(model)
        if file.suffix in (".json", ".jinja", ".model", ".txt") and file.name != _INDEX and not copied.exists():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copied)


def main(words: list[str] | None = None) -> int:
    """Run the script; the exit status."""
    parser = argparse.ArgumentParser(
        description="Quantise a checkpoint to fp8 or int4, as compressed-tensors stores them."
    )
    parser.add_argument("model", help="directory of a checkpoint in floats, or a demo's name")
    parser.add_argument("output", type=Path, help="directory to make")
    parser.add_argument("--format", choices=FORMATS, default="fp8", help="(default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=128, metavar="N", help="of int4 (default: %(default)s)")
    given = parser.parse_args(words)
    try:
        model = Path(find_model(given.model)[0])
        said = quantise(model, given.output, given.format, given.group_size)
    except PagerunnerError as error:
        print(f"quantise.py: {error}", file=sys.stderr)
        return 1
    except (OSError, SafetensorError) as error:
        print(f"quantise.py: {given.output} can't be written: {error}. What is there is not complete.", file=sys.stderr)
        return 1
    before, after = (
        human_bytes(sum(f.stat().st_size for f in folder.glob("*.safetensors"))) for folder in (model, given.output)
    )
    print(f"{given.output}: {after}, before {before}; {len(said['ignore'])} matrices as they were.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
