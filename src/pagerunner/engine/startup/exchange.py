"""What an engine's pages look like to others, and its exchange with them."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable
from dataclasses import fields

import torch

from pagerunner.config import ExchangeConfig
from pagerunner.engine.core.executors.base import Executor
from pagerunner.engine.startup.resolve import Resolved
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.tiers.exchange import Books, Exchange
from pagerunner.tiers.fingerprint import fingerprint
from pagerunner.tiers.page_server import listening
from pagerunner.tiers.secret import read_secret

PAGE_FORMAT = 1
"""What a page's bytes mean beside all other fields. One more whenever that changes; tests/runner/test_page_format.py notices."""
_NOT_OF_PAGES = frozenset(("path", "bos_token_id", "eos_token_ids", "sampling_defaults", "max_position_embeddings"))
_SHORT = 80


def page_fields(resolved: Resolved, plan: MemoryPlan, weights: str) -> dict[str, str]:
    """What must be equal for a page's key to mean equal bytes, by name. What is long is a digest. `weights` tells the weights from all others."""
    config, model = resolved.config, resolved.model
    found: dict[str, object] = {
        "page format": PAGE_FORMAT,
        "byte order": sys.byteorder,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "weights": weights,
        "batch_invariant": config.batch_invariant and _computed_by(config.device),
        "activation_quantization": resolved.args.activation_quantization,
        "quantization": resolved.args.quantization,
        "kv scales": resolved.kv_scales,
        "number of page groups": len(plan.groups),
    }
    for one in fields(model):
        if one.name not in _NOT_OF_PAGES:
            found[f"model {one.name}"] = getattr(model, one.name)
    for number, group in enumerate(plan.groups):
        found[f"group {number} tokens of a page"] = group.page_tokens
        found[f"group {number} bytes of a page"] = group.page_bytes
        found[f"group {number} layers"] = [(part.layer, part.offset, repr(part.spec)) for part in group.layers]
        found[f"group {number} rule"] = repr(group.rule)
    return {name: _text(value) for name, value in found.items()}


def _computed_by(device: str) -> str:
    """What must be equal for pages of one prefix to have the same bits."""
    version = importlib.import_module("pagerunner").__version__
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return (
        f"{torch.cuda.get_device_name() if device == 'cuda' else cpu}, torch {torch.__version__}, pagerunner {version}"
    )


def _text(value: object) -> str:
    text = str(value)
    return (
        text
        if isinstance(value, str | int | float | None) and len(text) <= _SHORT
        else fingerprint({"": value}).hex()[:32]
    )


def check_exchange(config: ExchangeConfig | None) -> None:
    """Raise ConfigError for a secret that can't be read, or an address that can't be had: loading a large model takes minutes before either is used."""
    if config is not None:
        read_secret(config.secret_file)
    if config is not None and config.lends:
        listening(config.host, config.port, 0).close()


def make_exchange(resolved: Resolved, plan: MemoryPlan, executor: Executor) -> Callable[[Books], Exchange] | None:
    """The maker of the engine's exchange with others, if it has one. Raises ConfigError for a secret that can't be read."""
    config = resolved.config.exchange
    if config is None:
        return None
    secret = read_secret(config.secret_file)
    ways = {name: str(getattr(resolved.config, name)) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    fields = lambda: ways | page_fields(resolved, plan, executor.weights_digest())  # noqa: E731  asked again for new weights
    return lambda scheduler: Exchange(config, secret, scheduler, executor.host_views, fields)
