"""The composition root: the one place where an engine's parts meet.

On a CPU the memory plan is made beforehand. On a CUDA device it is made last: addresses are reserved for an upper
bound, the weights loaded, one slab of pages mapped, the largest step warmed up, the graphs captured; what is then really
free becomes pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import torch

from pagerunner.attention.select import select_backends
from pagerunner.config import EngineArgs, EngineConfig
from pagerunner.engine.core import EngineCore
from pagerunner.engine.executors.inline import InlineExecutor
from pagerunner.engine.resolve import Resolved, resolve
from pagerunner.engine.startup import StartMeter, final_plan
from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import MemoryPlan
from pagerunner.memory.report import plan_table
from pagerunner.models.loader import Model, build_model, dummy_weights, load_weights, materialize, weights_bytes
from pagerunner.models.staging import PinnedStager, copy_now
from pagerunner.runner.arena import Arena, CpuArena
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.cuda_arena import CudaArena
from pagerunner.runner.cuda_driver import CudaDriver, Driver
from pagerunner.runner.pages import Pages
from pagerunner.runner.runner import ModelRunner
from pagerunner.runner.sampling.sampler import Sampler
from pagerunner.runner.sleep import Sleeper
from pagerunner.runner.tables import LastTokens, PageTables
from pagerunner.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


@runtime_checkable
class _Prepares(Protocol):
    """A runner that wants to run its largest step, and to capture graphs, before it serves."""

    def warm_up(self, progress: Progress | None = None) -> None: ...

    def capture(self, progress: Progress | None = None) -> object: ...


def build_core(args: EngineArgs, progress: Progress | None = None) -> EngineCore:
    """An engine core ready to run. `progress(done_bytes, total_bytes)` is called while weights load.

    Raises:
        ConfigError, CapacityError, CheckpointError: the sentence says what to change.
    """
    return build_from(resolve(args), progress)


def build_from(resolved: Resolved, progress: Progress | None = None, driver: Driver | None = None) -> EngineCore:
    """An engine core from a resolved configuration. `driver` stands for the card that it was resolved for."""
    config, plan, card = resolved.config, resolved.plan, resolved.card
    if card is not None and driver is None:
        driver = CudaDriver()
    meter = StartMeter(driver if card is not None else None, card.free if card is not None else None)
    meter.add_seconds("config", resolved.seconds)
    arena: Arena = CudaArena(driver) if card is not None and driver is not None else CpuArena()
    model, fill_weights = _load_model(resolved, arena, meter, progress)
    with meter.phase("pages"):
        kv_bytes = arena.reserve("kv", plan.kv_bytes, mapped=plan.first_bytes)
    with meter.phase("tables", "tables and sampling state"):
        runner = _make_runner(resolved, model, kv_bytes)
    if isinstance(runner, _Prepares):
        with meter.phase("warm-up", "activations and kernels"):
            runner.warm_up()
        with meter.phase("capture", "graphs"):
            runner.capture()
    if card is not None and driver is not None:
        plan = final_plan(
            plan,
            meter.taken,
            card,
            driver.memory()[0],
            resolved.gpu_memory_utilization,
            fixed=resolved.fixed_pages,
            auto=resolved.auto_length,
        )
        config = msgspec.structs.replace(config, max_model_len=plan.max_model_len)
    with meter.phase("pages"):
        arena.grow("kv", plan.kv_bytes)
    startup = meter.report()
    logger.info("memory plan:\n%s\n%s", plan_table(plan), startup.text())
    return EngineCore(
        build_scheduler(config, plan),
        InlineExecutor(runner, Sleeper(arena, fill_weights)),
        plan,
        max_in_flight=config.max_in_flight,
        enable_sleep_mode=config.enable_sleep_mode,
        startup=startup,
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


def _load_model(
    resolved: Resolved, arena: Arena, meter: StartMeter, progress: Progress | None
) -> tuple[Model, Callable[[], None]]:
    """The model with its weights in the arena, and what fills that region again."""
    config = resolved.config
    with meter.phase("model", "constants"):
        model = build_model(resolved.model, config.dtype, config.device)

    def fill_weights() -> None:
        if config.load_format == "dummy":
            dummy_weights(model, config.seed)
            return
        device = torch.device(config.device)
        copy = PinnedStager(device) if device.type == "cuda" else copy_now
        load_weights(model, Path(config.model_path), progress, copy)

    with meter.phase("weights"):
        materialize(model, arena.reserve("weights", weights_bytes(model)))
        fill_weights()
    return model, fill_weights


def _make_runner(resolved: Resolved, model: Model, kv_bytes: torch.Tensor) -> ModelRunner:
    """The runner with its tables and state, none of which depends on how many slabs get mapped."""
    config, plan = resolved.config, resolved.plan
    device = torch.device(config.device)
    backends = select_backends(plan.groups, config.attention_backend, device, getattr(torch, config.dtype))
    pages = Pages(plan, kv_bytes, poison=config.poison_fresh_pages)
    tables = PageTables(plan)
    last_tokens = LastTokens(config.max_num_seqs, device)
    return ModelRunner(
        model=model,
        pages=pages,
        tables=tables,
        last_tokens=last_tokens,
        builder=BatchBuilder(plan, tables, last_tokens, pages.layers, backends),
        sampler=Sampler(config.max_num_seqs, resolved.model.vocab_size, device),
        max_num_seqs=config.max_num_seqs,
    )
