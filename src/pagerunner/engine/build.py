"""The composition root: the one place where an engine's parts meet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from pagerunner.attention.select import select_backends
from pagerunner.config import EngineArgs, EngineConfig
from pagerunner.engine.core import EngineCore
from pagerunner.engine.executors.inline import InlineExecutor
from pagerunner.engine.resolve import Resolved, resolve
from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import MemoryPlan
from pagerunner.memory.report import plan_table
from pagerunner.models.loader import build_model, dummy_weights, load_weights, materialize, weights_bytes
from pagerunner.runner.arena import CpuArena
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.pages import Pages
from pagerunner.runner.runner import ModelRunner
from pagerunner.runner.sampling.sampler import Sampler
from pagerunner.runner.sleep import Sleeper
from pagerunner.runner.tables import LastTokens, PageTables
from pagerunner.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


def build_core(args: EngineArgs, progress: Progress | None = None) -> EngineCore:
    """An engine core ready to run. `progress(done_bytes, total_bytes)` is called while weights load.

    Raises:
        ConfigError, CapacityError, CheckpointError: the sentence says what to change.
    """
    return build_from(resolve(args), progress)


def build_from(resolved: Resolved, progress: Progress | None = None) -> EngineCore:
    """An engine core from a resolved configuration."""
    config, plan = resolved.config, resolved.plan
    executor = _build_executor(resolved, progress)
    logger.info("memory plan:\n%s", plan_table(plan))
    return EngineCore(
        build_scheduler(config, plan),
        executor,
        plan,
        max_in_flight=config.max_in_flight,
        enable_sleep_mode=config.enable_sleep_mode,
    )


def build_scheduler(config: EngineConfig, plan: MemoryPlan) -> Scheduler:
    """The scheduler and its memory manager: everything of an engine that needs no device."""
    manager = KVManager(
        plan, enable_prefix_caching=config.enable_prefix_caching, list_fresh_pages=config.poison_fresh_pages
    )
    return Scheduler(
        manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        max_in_flight=config.max_in_flight,
    )


def _build_executor(resolved: Resolved, progress: Progress | None) -> InlineExecutor:
    config, plan = resolved.config, resolved.plan
    device = torch.device(config.device)
    backends = select_backends(plan.groups, config.attention_backend, device, getattr(torch, config.dtype))
    arena = CpuArena()
    model = build_model(resolved.model, config.dtype, config.device)
    materialize(model, arena.reserve("weights", weights_bytes(model)))

    def fill_weights() -> None:
        if config.load_format == "dummy":
            dummy_weights(model, config.seed)
        else:
            load_weights(model, Path(config.model_path), progress)

    fill_weights()
    pages = Pages(plan, arena.reserve("kv", plan.kv_bytes), poison=config.poison_fresh_pages)
    seen = plan.for_kernels()
    tables = PageTables(seen)
    last_tokens = LastTokens(config.max_num_seqs, device)
    runner = ModelRunner(
        model=model,
        pages=pages,
        tables=tables,
        last_tokens=last_tokens,
        builder=BatchBuilder(seen, tables, last_tokens, pages.layers, backends),
        sampler=Sampler(config.max_num_seqs, resolved.model.vocab_size, device),
        max_num_seqs=config.max_num_seqs,
    )
    return InlineExecutor(runner, Sleeper(arena, fill_weights))
