"""How the files of sentence-transformers say which vector an embedding model's hidden states become. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pagerunner.config import read_option
from pagerunner.errors import CheckpointError, ConfigError, InvalidRequestError, RequestFailedError
from pagerunner.models.configs.json_files import read_json
from pagerunner.types import Pooling, RequestOutput

Vector = np.ndarray[Any, np.dtype[np.float32]]

_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_TYPES: dict[str, Pooling] = {"LAST": "last", "MEAN": "mean"}


class PoolerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `pooler_config` may say, under vLLM's older and newer names; it beats the checkpoint's files."""

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


@dataclass(frozen=True)
class Pooler:
    """Which hidden states make a model's vectors, whether these get length 1, and to which lengths they may be cut.

    `dimensions` is None where a vector can't be cut, and empty where it can be cut anywhere (matryoshka).
    """

    kind: Pooling
    normalize: bool
    dimensions: tuple[int, ...] | None

    def check_dimensions(self, wanted: int | None) -> None:
        """Raise InvalidRequestError unless vectors can be cut to `wanted` numbers."""
        if wanted is None or self.dimensions == ():
            return
        if self.dimensions is None:
            why = "is not supported: the model's config.json doesn't say is_matryoshka, so its vectors can't be cut."
        elif wanted not in self.dimensions:
            why = f"must be one of {', '.join(map(str, self.dimensions))}, got {wanted}."
        else:
            return
        raise InvalidRequestError(f"dimensions {why}", param="dimensions")

    def finish(self, output: RequestOutput, dimensions: int | None = None) -> Vector:
        """The embedding, float32 [D], of what the engine pooled: cut to `dimensions`, then of length 1 if so asked.

        Raises:
            InvalidRequestError: there aren't that many dimensions.
            RequestFailedError: the engine pooled nothing.
        """
        if output.pooled is None:
            why = output.error or "the request was ended before its prompt had been read."
            raise RequestFailedError(f"A prompt of {len(output.prompt_token_ids)} tokens has no vector: {why}")
        vector = np.asarray(output.pooled, dtype="<f4")
        if dimensions is not None:
            if dimensions > len(vector):
                raise InvalidRequestError(
                    f"dimensions is {dimensions}, but the model's vectors have {len(vector)}.", param="dimensions"
                )
            vector = vector[:dimensions]
        length = float(np.linalg.norm(vector.astype("<f8")))
        return (vector / length).astype("<f4") if self.normalize and length > 0 else vector


def read_pooler(path: str, option: str | dict[str, Any] | None = None) -> Pooler | None:
    """What `modules.json` of the model directory `path` says, with `option`, a PoolerConfig, over it.

    None if neither the files nor the option say which hidden states to take.

    Raises:
        CheckpointError: the files ask for a pooling or a module that this engine doesn't have.
        ConfigError: the option does, or it is not such JSON.
    """
    directory = Path(path)
    kind, normalize = _read_modules(directory)
    given = read_option("pooler_config", option, PoolerConfig, '{"pooling_type": "LAST"}')
    if (asked := given.seq_pooling_type or given.pooling_type) is not None:
        if asked.upper() not in _TYPES:
            raise ConfigError(f"pooler_config: pooling_type must be one of {', '.join(_TYPES)}, got {asked!r}.")
        kind, normalize = _TYPES[asked.upper()], normalize if kind is not None else True
    if (wish := given.normalize if given.use_activation is None else given.use_activation) is not None:
        normalize = wish
    return None if kind is None else Pooler(kind, normalize, _dimensions(directory))


def _read_modules(directory: Path) -> tuple[Pooling | None, bool]:
    file = directory / "modules.json"
    if not file.is_file():
        return None, False
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
        kinds = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in modules}
    except (msgspec.MsgspecError, KeyError) as error:
        raise CheckpointError(f"{file} is not a list of modules with types and paths: {error}.") from None
    if unknown := sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise CheckpointError(f"{file} asks for the module {unknown[0]}, which is not supported.")
    if "Pooling" not in kinds:
        return None, False
    where = directory / kinds["Pooling"] / "config.json"
    modes = [name for name, on in read_json(where).items() if name.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CheckpointError(
            f"{where} asks for {' and '.join(modes) or 'no pooling mode'}; supported is one of {', '.join(_MODES)}."
        )
    return _MODES[modes[0]], "Normalize" in kinds


def _dimensions(directory: Path) -> tuple[int, ...] | None:
    config = read_json(directory / "config.json")
    if isinstance(found := config.get("matryoshka_dimensions"), list) and found:
        return tuple(found)
    return () if config.get("is_matryoshka") is True else None
