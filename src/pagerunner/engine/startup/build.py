"""The composition root: the one place where an engine's parts meet.

On a CPU the memory plan is made first. On a CUDA device the final plan is made last:

1. Addresses are reserved for an upper bound.
2. The weights are loaded, and one slab of pages is mapped.
3. The largest step is warmed up, and the graphs are captured.
4. The memory that is really free then becomes pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pagerunner.attention.base import AttentionBackend
from pagerunner.attention.select import select_backends
from pagerunner.config import EngineArgs, EngineConfig
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors.inline import InlineExecutor
from pagerunner.engine.startup.machine import DeviceMemory, available_memory
from pagerunner.engine.startup.measure import StartMeter, final_plan
from pagerunner.engine.startup.resolve import Resolved, kv_scales_again, resolve
from pagerunner.engine.structured_output.grammar import Guides, guide_tokenizer
from pagerunner.layers import linear, moe
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.report import plan_table
from pagerunner.memory.residency import PageSampler
from pagerunner.memory.units import human_bytes
from pagerunner.models.checkpoint.forms import summary, unpacked_bytes
from pagerunner.models.checkpoint.loader import (
    Model,
    build_model,
    dummy_weights,
    load_weights,
    materialize,
    tensor_dtypes,
    weights_bytes,
)
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.checkpoint.weight_copy import ThreadStagers, copy_now
from pagerunner.ops.ahead import load_libraries
from pagerunner.ops.device_errors import full_device_said
from pagerunner.ops.dispatch import has_triton
from pagerunner.ops.unpacked import MANY_TOKENS
from pagerunner.runner.arena import Arena, CpuArena
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.cuda_arena import CudaArena
from pagerunner.runner.cuda_driver import CudaDriver, Driver
from pagerunner.runner.device_clock import DeviceClock
from pagerunner.runner.graphs import CudaGraphs, GraphEngine, GraphSettings, decode_sizes, mixed_sizes
from pagerunner.runner.host_copy import CudaHostMemory, HostCopy, HostMemory
from pagerunner.runner.pages import Pages
from pagerunner.runner.recorded import RecordedSteps
from pagerunner.runner.runner import ModelRunner
from pagerunner.runner.sampling.sampler import Sampler
from pagerunner.runner.sleep import Scratch, Sleeper, TorchCache, WeightsInPlace, WeightsOnHost
from pagerunner.runner.staging import Staging
from pagerunner.runner.step_threads import StepThreads
from pagerunner.runner.tables import LastTokens, PageTables
from pagerunner.sched.guide import MakeGuide
from pagerunner.sched.scheduler import Scheduler
from pagerunner.text.tokenizer import Tokenizer, end_token_ids

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


def build_core(args: EngineArgs, progress: Progress | None = None) -> EngineCore:
    """An engine core ready to run. `progress(done_bytes, total_bytes)` is called while weights load.

    Raises:
        ConfigError, CapacityError, CheckpointError: the sentence says what to change.
    """
    return build_from(resolve(args), progress)


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device as start-up and sleep use it."""

    driver: Driver
    host: HostMemory
    scratch: Scratch

    @classmethod
    def first(cls, memory: DeviceMemory) -> Card:
        """The first card that torch sees. Raises CapacityError when the card has not even memory for a stream."""
        device = torch.device("cuda", 0)
        with full_device_said(
            lambda reason: (
                f"Out of device memory before anything is loaded ({reason}): {human_bytes(memory.free)} of the device's "
                f"{human_bytes(memory.total)} were free; free memory on the device."
            )
        ):
            return cls(CudaDriver(0), CudaHostMemory(device), TorchCache(device))


def build_from(resolved: Resolved, progress: Progress | None = None, card: Card | None = None) -> EngineCore:
    """An engine core from a resolved configuration.

    `card` is the CUDA device for which it was resolved, if there is one.
    """
    config, plan, memory = resolved.config, resolved.plan, resolved.card
    if memory is None:
        card = None
    elif card is None:
        card = Card.first(memory)
    meter = StartMeter(card.driver if card is not None else None, memory.free if memory is not None else None)
    meter.add_seconds("config", resolved.seconds)
    loading = load_libraries(torch.device(config.device))
    arena: Arena = CudaArena(card.driver) if card is not None else CpuArena()
    model, weights, fill_weights = _load_model(resolved, arena, meter, progress)
    with meter.phase("pages"):
        kv_bytes = arena.reserve("kv", plan.kv_bytes, mapped=plan.first_bytes)
    with meter.phase("tables", "tables and sampling state"):
        runner = _make_runner(resolved, model, kv_bytes)
    if card is not None or runner.num_graphs:
        with meter.phase("warm-up", "activations and kernels"):
            runner.warm_up(name=_kernels_name(resolved))
        for thread in loading:
            thread.join()  # no thread may use the device while graphs are captured
        with meter.phase("capture", "graphs"):
            runner.capture()
    if card is not None and memory is not None:
        plan = final_plan(
            plan,
            meter.taken,
            memory,
            card.driver.memory()[0],
            resolved.gpu_memory_utilization,
            fixed=resolved.fixed_pages,
            auto=resolved.auto_length,
        )
        config = msgspec.structs.replace(config, max_model_len=plan.max_model_len)
    with meter.phase("pages"):
        arena.grow("kv", plan.kv_bytes)
    reload = partial(_reload, resolved, fill_weights, runner)
    if card is not None and config.enable_sleep_mode:
        sleeper = _sleeper(arena, card, weights, reload)
    else:
        sleeper = Sleeper(arena, WeightsInPlace(reload))
    startup = meter.report()
    logger.info("memory plan:\n%s\n%s", plan_table(plan), startup.text())
    return EngineCore(
        partial(build_scheduler, config, plan, _make_guides(resolved)),
        InlineExecutor(runner, sleeper, DeviceClock.of(torch.device(config.device))),
        plan,
        vocab_size=resolved.model.vocab_size,
        max_in_flight=config.max_in_flight,
        enable_sleep_mode=config.enable_sleep_mode,
        startup=startup,
    )


def _make_guides(resolved: Resolved) -> MakeGuide | None:
    """The maker of guides, which follow grammars. It reads the tokenizer when the first grammar comes."""
    config, model = resolved.config, resolved.model
    if config.skip_tokenizer_init:
        return None

    def load() -> LLTokenizer:
        tokenizer = Tokenizer.from_path(config.tokenizer_path)
        ends = end_token_ids(model.eos_token_ids, tokenizer)
        return guide_tokenizer(tokenizer.to_json(), max(model.vocab_size, tokenizer.vocab_size), ends)

    return Guides(load)


def build_scheduler(config: EngineConfig, plan: MemoryPlan, make_guide: MakeGuide | None = None) -> Scheduler:
    """The scheduler and its memory manager: everything of an engine that needs no device."""
    sample = config.kv_cache_metrics_sample
    manager = KVManager(
        plan,
        enable_prefix_caching=config.enable_prefix_caching,
        list_fresh_pages=config.poison_fresh_pages,
        sampler=PageSampler(sample) if sample else None,
    )
    return Scheduler(
        manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        max_in_flight=config.max_in_flight,
        make_guide=make_guide,
    )


def graph_engine(device: torch.device) -> GraphEngine | None:
    """The engine that records graphs on a device. None on the CPU, where graphs gain nothing."""
    return CudaGraphs(device) if device.type == "cuda" else None


def _kernels_name(resolved: Resolved) -> str:
    """A name made of everything that decides which kernels a start needs.

    If a thing is missing here, a start compiles some kernels late.
    """
    config = resolved.config
    sizes = (config.max_num_seqs, config.max_num_batched_tokens, config.block_size, config.max_model_len)
    choices = (config.dtype, config.kv_cache_dtype, config.attention_backend, config.poison_fresh_pages)
    graphs = (config.enforce_eager, config.cudagraph_capture_sizes)
    pages = [(group.kind, group.page_tokens) for group in resolved.plan.groups]
    model = replace(resolved.model, path="")  # where it lies changes nothing
    held = set() if model.format is None else set(tensor_dtypes(Path(resolved.model.path)).values())  # those of scales
    return repr((model, sorted(held), sizes, choices, graphs, pages, bool(resolved.kv_scales)))


def _load_model(
    resolved: Resolved, arena: Arena, meter: StartMeter, progress: Progress | None
) -> tuple[Model, torch.Tensor, Callable[[], None]]:
    """The model, the arena's region that holds its weights, and what fills that region again."""
    config = resolved.config
    with meter.phase("model", "constants"):
        model = build_model(resolved.model, config.dtype, config.device)
        panels = store_in_panels(model) if config.device == "cpu" else 0
        if panels:
            logger.info("%d matrices in panels, for the CPU kernels.", panels)
        if resolved.model.format is not None:
            logger.info("weights in %s's format: %s.", resolved.model.format.writer, summary(model.modules()))

    def fill_weights() -> None:
        if config.load_format == "dummy":
            dummy_weights(model, config.seed)
            return
        device = torch.device(config.device)
        copy = ThreadStagers(device) if device.type == "cuda" else copy_now
        load_weights(model, Path(config.model_path), progress, copy)

    with meter.phase("weights"):
        weights = arena.reserve("weights", weights_bytes(model))
        materialize(model, weights)
        fill_weights()
    meter.loaded_bytes = 0 if config.load_format == "dummy" else weights.nbytes
    return model, weights, fill_weights


def _reload(resolved: Resolved, fill_weights: Callable[[], None], runner: ModelRunner) -> None:
    """Read the checkpoint again, the scales of keys and values too."""
    scales = kv_scales_again(resolved)  # first, as it takes no time and may raise
    fill_weights()
    runner.set_static_scales(scales)


def _sleeper(arena: Arena, card: Card, weights: torch.Tensor, reload: Callable[[], None]) -> Sleeper:
    """Sleep with a host copy of the weights, which begins to be made now."""

    def make_copy() -> HostCopy:
        return HostCopy(weights, card.host, available_memory)

    return Sleeper(arena, WeightsOnHost(reload, make_copy), card.scratch)


def _make_runner(resolved: Resolved, model: Model, kv_bytes: torch.Tensor) -> ModelRunner:
    """The runner with its tables and state, none of which depends on how many slabs get mapped."""
    config, plan = resolved.config, resolved.plan
    device = torch.device(config.device)
    dtype = getattr(torch, config.dtype)
    backends = select_backends(plan.groups, config.attention_backend, device, dtype, resolved.model.attention_scores)
    pages = Pages(plan, kv_bytes, poison=config.poison_fresh_pages, static_scales=resolved.kv_scales)
    tables = PageTables(plan, device)
    last_tokens = LastTokens(config.max_num_seqs, device)
    unpacks = unpacked_bytes(model.modules(), MANY_TOKENS - 1)[0] > 0
    kernels = [*linear.kernels_of(model.modules()), *moe.kernels_of(model.modules())]
    return ModelRunner(
        model=model,
        pages=pages,
        tables=tables,
        last_tokens=last_tokens,
        builder=BatchBuilder(plan, tables, last_tokens, pages.layers, backends, config.max_num_batched_tokens),
        sampler=Sampler(config.max_num_seqs, resolved.model.vocab_size, device),
        staging=Staging(device, config.max_in_flight + 1),
        graphs=GraphSettings(
            engine=None if config.enforce_eager else graph_engine(device),
            decode_sizes=decode_sizes(config.max_num_seqs, config.cudagraph_capture_sizes),
            mixed_sizes=mixed_sizes(config.max_num_batched_tokens, config.cudagraph_capture_sizes),
            max_model_len=plan.max_model_len,
        ),
        threads=_step_threads(model, plan) if device.type == "cpu" else None,
        unpacks=unpacks,
        kernels=kernels if device.type == "cuda" and has_triton() else (),
        recorded=RecordedSteps() if _can_record(config, backends) else None,
    )


def _can_record(config: EngineConfig, backends: Sequence[AttentionBackend[Any]]) -> bool:
    """Whether decode steps may be made of commands of the CPU kernels alone."""
    return not config.enforce_eager and all(backend.capabilities.cpu_kernels for backend in backends)


def _step_threads(model: Model, plan: MemoryPlan) -> StepThreads:
    layers = sum(len(group.layers) for group in plan.groups)
    token_bytes = plan.request_bytes(plan.max_model_len) // plan.max_model_len
    return StepThreads(weights_bytes(model) // layers, token_bytes // layers)
