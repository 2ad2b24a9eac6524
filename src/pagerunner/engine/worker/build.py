"""The parts of a worker: its model with weights in the arena, its runner, and what it needs to sleep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagerunner.attention.base import AttentionBackend
from pagerunner.attention.capability import memory_form
from pagerunner.attention.select import Backend, select_backends
from pagerunner.config import EngineConfig
from pagerunner.dist.base import Comm, Stage, union
from pagerunner.engine.startup.machine import ranks_share_devices
from pagerunner.engine.startup.measure import StartMeter
from pagerunner.engine.startup.resolve import Resolved, kv_scales_again
from pagerunner.engine.startup.shares import available_memory
from pagerunner.engine.worker.card import Card
from pagerunner.layers import linear, moe, streams
from pagerunner.layers.shares import Share
from pagerunner.lora.adapter import Targets
from pagerunner.lora.blocks import AdapterTable, Products, RowAdapters, Whole
from pagerunner.lora.loader import AdapterLoader
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.specs import FullKV, LatentKV, Spec
from pagerunner.models.checkpoint.fixed import check_fixed, fix_products
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
from pagerunner.models.checkpoint.ranks import build_share, join_ranks, share_of_drafter, token_ids
from pagerunner.models.checkpoint.weight_copy import ThreadStagers, copy_now
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.decoder import elsewhere
from pagerunner.ops import numerics
from pagerunner.ops.batch import SlotState
from pagerunner.ops.dispatch import has_triton
from pagerunner.ops.indexer import choose_slots
from pagerunner.ops.paged_attention import WIDE_HEADS
from pagerunner.ops.unpacked import rounds
from pagerunner.runner.arena import Arena
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.graphs import (
    MOST_MIXED_OF_EXPERTS,
    CudaGraphs,
    GraphEngine,
    GraphSettings,
    decode_sizes,
    mixed_sizes,
)
from pagerunner.runner.host_buffers import HostBuffers
from pagerunner.runner.host_copy import CudaHostMemory, HostCopy
from pagerunner.runner.kernel_counts import KernelsOf
from pagerunner.runner.pages import Pages
from pagerunner.runner.recorded import RecordedSteps
from pagerunner.runner.runner import ModelRunner
from pagerunner.runner.sampling.sampler import Sampler
from pagerunner.runner.sampling.vocabulary import DividedVocabulary
from pagerunner.runner.sleep import Sleeper, WeightsInPlace, WeightsOnHost
from pagerunner.runner.spec.made import check_backends, make_drafter
from pagerunner.runner.stage_tokens import StageTokens
from pagerunner.runner.staging import Staging
from pagerunner.runner.step_threads import StepThreads, own_thread_setter
from pagerunner.runner.tables import PageTables
from pagerunner.runner.transfers import HostPages, Transfers
from pagerunner.tiers.host import cut_host

logger = logging.getLogger(__name__)
_LATENT_NUMBERS, _FP8_NUMBERS = 1.5e10, 6e10
"""Pairs of queries and keys times their numbers that an H200 multiplies while the host launches a layer: in the latent space (a prompt of 1,300 tokens with 16 heads), and in fp8 pages (of 3,800 with 32 of 128)."""
Progress = Callable[[int, int], None]


def graph_engine(device: torch.device) -> GraphEngine | None:
    """The engine that records graphs on a device. None on the CPU, where graphs gain nothing."""
    return CudaGraphs(device) if device.type == "cuda" else None


def load_model(
    resolved: Resolved,
    device: torch.device,
    arena: Arena,
    meter: StartMeter,
    progress: Progress | None,
    comm: Comm,
    stage: Stage | None,
    teams: Comm | None,
) -> tuple[Model, Share | None, torch.Tensor, Callable[[], None], list[Backend]]:
    """The model, its share if it is one of several ranks', the arena's region that holds its weights, what fills that region again, and
    the backends of the plan's groups. What the model or its attention can't do is refused before weights are read.

    `comm` joins the ranks of one stage, or of one team; `teams` those of all teams, if there are several.
    """
    config = resolved.config
    share: Share | None = None
    with meter.phase("model", "constants"):
        if comm.size == 1 and stage is None and teams is None:
            model = build_model(resolved.model, config.dtype, str(device))
        else:
            layers = None if stage is None else resolved.stages[stage.number]
            team = 0 if teams is None else teams.rank // comm.size
            place = comm.rank, comm.size, team, config.teams
            model, share = build_share(resolved.model, config.dtype, str(device), *place, layers=layers)
            model.model.stage = stage
        panels = store_in_panels(model) if config.device == "cpu" else 0
        if panels:
            logger.info("%d matrices in panels, for the CPU kernels.", panels)
        if config.batch_invariant:
            fix_products(model, config.device)
        if resolved.model.format is not None:
            logger.info("weights in %s's format: %s.", resolved.model.format.writer, summary(model.modules()))
        drafter = model.drafter if model.drafter is not None and not model.drafter.prefix else None
        drafter_share: Share | None = None
        if share is not None:
            join_ranks(model, share, comm, teams)
            if drafter is not None and isinstance(share.whole, Model):
                drafter_share = share_of_drafter(share.whole, share)
                join_ranks(drafter, drafter_share, comm)
        dtype, scores, fixed = getattr(torch, config.dtype), resolved.model.attention_scores, config.batch_invariant
        backend = config.attention_backend
        backends = select_backends(resolved.plan.groups, backend, device, dtype, scores, batch_invariant=fixed)

    def fill_weights() -> None:
        with torch.inference_mode():  # weights that were made in this mode change only in it
            weights.zero_()  # what pads a form isn't loaded, and belongs to the weights' digest
        if config.load_format == "dummy":
            dummy_weights(model, config.seed, divided=share is not None)
            return
        copy = ThreadStagers(device) if device.type == "cuda" else copy_now
        load_weights(model, Path(config.model_path), progress, copy, share)
        if drafter is not None and resolved.model.drafter is not None:
            load_weights(drafter, resolved.model.drafter.path, None, copy, drafter_share)

    with meter.phase("weights"):
        weights = arena.reserve("weights", weights_bytes(model))
        materialize(model, weights)
        fill_weights()
        if config.batch_invariant and device.type == "cuda":
            check_fixed(model)
    meter.loaded_bytes = 0 if config.load_format == "dummy" else weights.nbytes
    return model, share, weights, fill_weights, backends


def make_runner(
    resolved: Resolved,
    device: torch.device,
    model: Model,
    share: Share | None,
    kv_bytes: torch.Tensor,
    comm: Comm,
    stage: Stage | None,
    teams: Comm | None,
    transfers: Transfers | None,
    table: AdapterTable | None,
    backends: list[Backend],
) -> ModelRunner:
    """The runner with its tables and state, none of which depends on how many slabs get mapped. `comm` joins the ranks of one stage.
    `table` says where adapters lie, if requests may have some. `backends` serve the plan's groups.
    """
    config, plan = resolved.config, resolved.plan
    everybody = teams or (comm if stage is None else stage.world)
    ranks = config.num_ranks
    pages = Pages(plan, kv_bytes, poison=config.poison_fresh_pages, static_scales=resolved.kv_scales)
    drafts = config.speculative
    tables = PageTables(plan, device, keep_ends=model.drafter is not None)
    num_drafts = drafts.num_speculative_tokens if drafts is not None else 0
    state = SlotState.empty(config.max_num_seqs, device, num_drafts)
    if drafts is not None and device.type == "cuda":
        check_backends(plan.groups, backends)
    unpacks = unpacked_bytes(model.modules(), numerics.FAST.products.parted_tokens - 1)[0] > 0
    if device.type == "cuda":  # for the warm-up; CPUs have none, so their ranks needn't load in equal times
        unpacks = any(union(everybody, [unpacks]))
    vocabulary = None if share is None or comm.size == 1 else DividedVocabulary(comm, token_ids(share))
    adapters = None if table is None else RowAdapters(table, config.max_num_seqs)
    builder = BatchBuilder(plan, tables, state, pages.layers, backends, config.max_num_batched_tokens, adapters)
    pieces = len(pages.layers) - len(resolved.model.spec_layers)
    drafter = make_drafter(drafts, state, plan.max_model_len, builder, model.drafter, pieces, vocabulary)
    return ModelRunner(
        model=model,
        pages=pages,
        tables=tables,
        state=state,
        builder=builder,
        sampler=Sampler(config.max_num_seqs, resolved.model.vocab_size, device, vocabulary, num_drafts),
        staging=Staging(device, config.max_in_flight + 1),
        graphs=GraphSettings(
            engine=graph_engine(device) if not config.enforce_eager and (stage is None or stage.in_graphs) else None,
            decode_sizes=decode_sizes(config.max_num_seqs, config.cudagraph_capture_sizes),
            mixed_sizes=_mixed_sizes(config, model, plan, teams or comm, device),
            most_pairs=min(union(everybody, [_most_pairs(model, plan)])) if device.type == "cuda" else 0,
            max_model_len=plan.max_model_len,
            teams=teams is not None,
            drafts=drafts.lengths if drafts is not None else (),
        ),
        threads=_step_threads(model, plan, ranks) if device.type == "cpu" else None,
        unpacks=unpacks,
        kernels=_kernels_of(model, device) if device.type == "cuda" and has_triton() else (),
        lengths=_length_kernels_of(resolved.model) if device.type == "cuda" and has_triton() else (),
        agree=partial(union, everybody),
        recorded=RecordedSteps() if ranks == 1 and drafter.onward is None and _can_record(config, backends) else None,
        stage=None if stage is None else StageTokens(stage, state, config.max_in_flight),
        transfers=transfers,
        drafter=drafter,
        max_in_flight=config.max_in_flight,
        rates=drafts.acceptance_rates if drafts is not None else None,
    )


def _kernels_of(model: Model, device: torch.device) -> list[KernelsOf]:
    """Of numbers of tokens."""
    own = streams.kernels_of(model.model.stream_shape, device)
    return [*linear.kernels_of(model.modules()), *moe.kernels_of(model.modules()), *own]


def _length_kernels_of(config: ModelConfig) -> list[KernelsOf]:
    """Of lengths of a step's longest row."""
    return [partial(lambda own, length: choose_slots.kernels_for(length, *own), own) for own in config.choices]


def make_adapters(
    resolved: Resolved, model: Model, share: Share | None, kv_bytes: torch.Tensor, card: Card | None
) -> AdapterLoader | None:
    """What loads adapters into the page memory, and says where they lie. On a `card` their host memory is page-locked.

    A rank reads whole adapters, so that each finds the same faults and the same digest, and keeps what belongs to its `share`.
    """
    config, plan, device = resolved.config, resolved.plan, kv_bytes.device
    if not config.enable_lora:
        return None
    whole = None
    if share is not None:
        assert isinstance(share.whole, Model)
        whole = Whole(share.whole, share.parts)
    products, dtype = Products.of(model, config.lora_target_modules, whole), getattr(torch, config.dtype)
    products.adapt(device)
    page_bytes = plan.groups[plan.largest_group].page_bytes
    table = AdapterTable(products, kv_bytes, page_bytes, dtype, config.max_loras, config.max_lora_rank)
    make = HostBuffers(None if card is None else CudaHostMemory(device)).take
    targets = Targets.of(model if whole is None else whole.model)
    return AdapterLoader(targets, table, make, own_thread_setter())


def make_transfers(resolved: Resolved, kv_bytes: torch.Tensor, card: Card | None) -> Transfers | None:
    """What copies pages to host memory and back, if the engine has some. On a `card` that memory is page-locked."""
    config, plan = resolved.config, resolved.plan
    if not config.host_bytes:
        return None
    cut = cut_host(plan, config.host_bytes)
    memory = None if card is None else CudaHostMemory(kv_bytes.device)
    shared = config.exchange is not None and config.num_ranks > 1  # the core sends and pulls all ranks' pages
    host = HostPages(cut.num_bytes, cut.slab_bytes, memory, shared=shared)
    return Transfers(kv_bytes, [group.page_bytes for group in plan.groups], host)


def _can_record(config: EngineConfig, backends: Sequence[AttentionBackend[Any]]) -> bool:
    """Whether decode steps may be made of commands of the CPU kernels alone."""
    return not config.enforce_eager and all(backend.capabilities.cpu_kernels for backend in backends)


def _mixed_sizes(
    config: EngineConfig, model: Model, plan: MemoryPlan, comm: Comm, device: torch.device
) -> tuple[int, ...]:
    """Numbers of tokens to capture mixed steps for. Ranks whose weights have other sizes capture the same. `comm` joins all that divide experts."""
    given, experts = (config.max_num_batched_tokens, config.cudagraph_capture_sizes), _experts_of(model)[1]
    if device.type != "cuda":
        return mixed_sizes(*given)
    most = _most_with_experts(config, model, plan, device) if experts else None
    weights = _layer_weights(model) * (2 if experts and config.enable_lora else 1)  # what experts' adapters add
    return tuple(union(comm, mixed_sizes(*given, weights, most_with_experts=most)))


def _most_with_experts(config: EngineConfig, model: Model, plan: MemoryPlan, device: torch.device) -> int:
    """Tokens of the largest graphs of a mixture. These hold the outputs of each token's experts, queries and values in the latent space, and matrices that they unpack: 1/128 of the device's memory.

    Few where they hold other teams' tokens, too, and where queries choose latents: these weren't compared.
    """
    active, experts = _experts_of(model)
    if any(one.method.teams > 1 for one in experts) or any(memory_form(spec) == "chosen" for spec in _specs(plan)):
        return MOST_MIXED_OF_EXPERTS
    pairs = active * config.max_num_batched_tokens
    token_bytes: int = max(active * sum(one.sizes[1:]) * one.dtype.itemsize for one in experts)
    if config.enable_lora:
        token_bytes += max(one.adapted_bytes(active) for one in experts)
    latents = [spec.latent_dim for spec in _specs(plan) if isinstance(spec, LatentKV) and spec.compression == 1]
    token_bytes += 2 * _heads_of(model) * max(latents, default=0) * experts[0].dtype.itemsize
    room: int = torch.cuda.mem_get_info(device)[1] // 128 - max(one.unpacked_bytes(pairs) for one in experts)
    return max(min(room // token_bytes, config.max_num_batched_tokens), MOST_MIXED_OF_EXPERTS)


def _most_pairs(model: Model, plan: MemoryPlan) -> int:
    """See GraphSettings. Eager steps have queries in the latent space in short rows alone, and a past in fp8 pages is copied once, as the host knows its length.

    Heads have a kernel that reads such a copy if they are of `WIDE_HEADS`.
    """
    took = [0.0]
    for spec in _specs(plan):
        if memory_form(spec) == "latent" and isinstance(spec, LatentKV):
            took.append((2 * spec.latent_dim + spec.rope_dim) / _LATENT_NUMBERS)
        elif isinstance(spec, FullKV) and spec.quantised and spec.kind == "full" and spec.head_dim in WIDE_HEADS:
            took.append((spec.head_dim + spec.value_dim) / _FP8_NUMBERS)
    pair = max(took) * _heads_of(model)
    return int(1 / pair) if pair else 0


def _heads_of(model: Model) -> int:
    """Query heads of a layer that has most of them."""
    return max((getattr(module, "num_heads", 0) for module in model.modules()), default=0)


def _specs(plan: MemoryPlan) -> list[Spec]:
    return [layer.spec for group in plan.groups for layer in group.layers]


def _layer_weights(model: Model) -> int:
    """Weights that a token is multiplied with in a layer, those of its experts among them: of several ranks with whole experts a part of these.

    Of products that round their input only two thirds count, as they take less time.
    """
    active, experts = _experts_of(model)
    linears = [one for one in model.modules() if isinstance(one, linear.Linear) and not one.plain]
    rounded = sum(one.most_weights for one in linears if any(rounds(stored, one.dtype) for stored in one.stored))
    weights = sum(one.most_weights for one in linears) - rounded // 3
    weights += sum(3 * active * one.sizes.features * one.sizes.inner // one.ranks for one in experts)
    return weights // max(sum(layer is not elsewhere for layer in model.model.layers), 1)


def _experts_of(model: Model) -> tuple[int, list[moe.Experts]]:
    """How many experts a token has in a layer, and all layers' experts."""
    modules = list(model.modules())
    active = max((one.routing.active for one in modules if isinstance(one, moe.Router)), default=0)
    return active, [one for one in modules if isinstance(one, moe.Experts)]


def _step_threads(model: Model, plan: MemoryPlan, ranks: int) -> StepThreads:
    layers = max(sum(len(group.layers) for group in plan.groups) // plan.groups[0].stages, 1)
    token_bytes = plan.request_bytes(plan.max_model_len) // plan.max_model_len
    return StepThreads(weights_bytes(model) // layers, token_bytes // layers, ranks)


def kernels_name(resolved: Resolved, stage: int = 0) -> str:
    """A name made of everything that decides which kernels a start of a `stage` needs.

    If a thing is missing here, a start compiles some kernels late.
    """
    config = resolved.config
    sizes = (config.max_num_seqs, config.max_num_batched_tokens, config.block_size, config.max_model_len)
    choices = (
        config.dtype,
        config.kv_cache_dtype,
        config.attention_backend,
        config.poison_fresh_pages,
        config.batch_invariant,
    )
    graphs = (config.enforce_eager, config.cudagraph_capture_sizes, config.speculative)
    adapters = (config.max_loras, config.max_lora_rank, config.lora_target_modules) if config.enable_lora else ()
    pages = [(group.kind, group.page_tokens) for group in resolved.plan.groups]
    model = replace(resolved.model, path="")  # where it lies changes nothing
    held = set() if model.format is None else set(tensor_dtypes(Path(resolved.model.path)).values())  # those of scales
    return repr(
        (
            model,
            (config.tensor_parallel_size, config.teams, config.distributed_executor_backend),
            (config.disable_custom_all_reduce, ranks_share_devices()),
            resolved.stages[stage],
            sorted(held),
            sizes,
            choices,
            graphs,
            adapters,
            pages,
            bool(resolved.kv_scales),
        )
    )


def reload(resolved: Resolved, fill_weights: Callable[[], None], runner: ModelRunner) -> None:
    """Read the checkpoint again, the scales of keys and values too."""
    scales = kv_scales_again(resolved)  # first, as it takes no time and may raise
    fill_weights()
    runner.set_static_scales(scales)


def make_sleeper(
    arena: Arena, card: Card | None, weights: torch.Tensor, reload: Callable[[], None], ranks: int
) -> Sleeper:
    """The sleeper of an arena. With a `card` it keeps a host copy of the weights, which begins to be made now.

    As many `ranks` make such copies at the same time, and share what memory the machine has left.
    """
    if card is None:
        return Sleeper(arena, WeightsInPlace(reload))
    make_copy = partial(HostCopy, weights, card.host, lambda: available_memory() // ranks)
    return Sleeper(arena, WeightsOnHost(reload, make_copy), card.scratch)
