"""pagerunner: an LLM inference engine whose subject is memory. Names follow vLLM's.

Importing this package costs milliseconds and doesn't import torch: `LLM` and `AsyncEngine` load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pagerunner import threads as _threads
from pagerunner.config import EngineArgs
from pagerunner.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineSleepingError,
    InvalidRequestError,
    PagerunnerError,
)
from pagerunner.types import (
    CompletionOutput,
    Logprob,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

if TYPE_CHECKING:
    from pagerunner.engine.frontend.async_engine import AsyncEngine
    from pagerunner.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineDeadError",
    "EngineSleepingError",
    "InvalidRequestError",
    "LLM",
    "LoRARequest",
    "Logprob",
    "PagerunnerError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_LAZY = {"LLM": "pagerunner.llm", "AsyncEngine": "pagerunner.engine.frontend.async_engine"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LLM":
        _threads.settle_threads()
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
