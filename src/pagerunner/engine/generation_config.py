"""Default sampling parameters from a checkpoint's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagerunner.errors import CheckpointError, InvalidRequestError
from pagerunner.types import SamplingParams

_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(model_path: Path, source: str) -> SamplingParams:
    """SamplingParams() with what the checkpoint's authors recommend; `source="vllm"` ignores the checkpoint.

    `do_sample: false` without a temperature means greedy. Raises CheckpointError when the file is broken.
    """
    path = model_path / "generation_config.json"
    if source == "vllm" or not path.exists():
        return SamplingParams()
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = {ours: raw[theirs] for theirs, ours in _FIELDS.items() if raw.get(theirs) is not None}
        if raw.get("do_sample") is False and "temperature" not in values:
            values["temperature"] = 0.0
        return SamplingParams(**values)
    except (ValueError, TypeError, AttributeError, InvalidRequestError) as error:
        raise CheckpointError(f"{path} cannot be read: {error} Mend it or pass generation_config=vllm.") from error
