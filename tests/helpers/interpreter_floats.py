"""Triton 3.6's interpreter loses the carry when it rounds to fp8 or bfloat16; let torch convert instead."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def install() -> None:
    """Replace the interpreter's conversion between these dtypes."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if str(source) not in DTYPES or str(target) not in DTYPES:
            return original(data, source, target, rounding_mode)
        raw = torch.from_numpy(np.frombuffer(data.tobytes(), dtype=np.uint8).copy())
        out = raw.view(DTYPES[str(source)]).float().to(DTYPES[str(target)])
        dtype = _BYTES[out.element_size()]
        return np.frombuffer(out.view(torch.uint8).numpy().tobytes(), dtype=dtype).reshape(np.shape(data))

    if original.__module__ == interpreter.__name__:
        interpreter._convert_float = convert
