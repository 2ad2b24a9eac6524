"""What a server's structured outputs are by default: vLLM's `--structured-outputs-config`."""

from __future__ import annotations

from typing import Any

import msgspec

from pagerunner.config import one_of, read_option


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The names are vLLM's.

    `disable_any_whitespace` makes all JSON compact. There is one `backend`, llguidance, so that nothing falls back to another
    one (`disable_fallback`).
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_fallback: bool = False


def read_structured_outputs_config(option: str | dict[str, Any] | None) -> StructuredOutputsConfig:
    """The option, given as a mapping or JSON. Raises ConfigError when it isn't such JSON."""
    config = read_option(
        "structured_outputs_config", option, StructuredOutputsConfig, '{"disable_any_whitespace": true}'
    )
    one_of("backend of structured_outputs_config", config.backend, ("auto", "guidance"))
    return config
