"""From user arguments to a complete configuration and memory plan: every default and every limit is settled here."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from pagerunner import limits
from pagerunner.config import (
    DTYPE_BYTES,
    KV_DTYPE_NAMES,
    Dtype,
    EngineArgs,
    EngineConfig,
    KVDtype,
    SharedArgs,
    SpeculativeConfig,
    kv_events,
    transfer_backend,
)
from pagerunner.engine.startup.cluster import cluster_device
from pagerunner.engine.startup.cpu_memory import step_memory
from pagerunner.engine.startup.kv_transfer import KVTransfer, check_host_memory, read_kv_transfer
from pagerunner.engine.startup.machine import DeviceMemory, check_devices, device_memory, ranks_here, resolve_device
from pagerunner.engine.startup.shares import available_memory
from pagerunner.engine.startup.speculation import resolve_speculation
from pagerunner.engine.startup.weights import (
    Weights,
    adapted_products,
    adapter_copies,
    adapter_pages,
    adapters_rows,
    check_rows_of_adapters,
    count_weights,
    too_large,
    weights_with_unpacked_experts,
)
from pagerunner.errors import CapacityError, CheckpointError, ConfigError
from pagerunner.memory.events import BlockShape
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import ALIGNMENT, plan_memory, with_adapter
from pagerunner.memory.specs import Spec, with_journal
from pagerunner.memory.units import human_bytes
from pagerunner.models.checkpoint.drafters import with_draft_model
from pagerunner.models.checkpoint.kv_scales import DTYPE as STATIC_DTYPE
from pagerunner.models.checkpoint.kv_scales import Scales, read_kv_scales, with_static_scales
from pagerunner.models.checkpoint.loader import checkpoint_files
from pagerunner.models.checkpoint.ranks import LAYERS_OF_STAGES, configs_of_ranks, layers_of_stages
from pagerunner.models.configs.base import ExpertShare, ModelConfig
from pagerunner.models.configs.drafter import check_draft_length
from pagerunner.models.configs.reader import read_model_config
from pagerunner.ops.batch import StepTensors
from pagerunner.ops.lora import TILE
from pagerunner.runner.sampling.sampler import Sampler
from pagerunner.runner.spec.made import drafting_bytes
from pagerunner.tiers.host import cut_host

logger = logging.getLogger(__name__)
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_BATCHED_TOKENS = {"cpu": 2_048, "cuda": 8_192}
LARGE_STEP_TOKENS = 16_384
LARGE_STEP_ROOM = 32 * 2**30
"""Bytes beside the weights from which on offline steps that unpack experts have LARGE_STEP_TOKENS. Their activations take some GiB more than
those of other steps, and pages get the rest."""
DEFAULT_IN_FLIGHT = {"cpu": 1, "cuda": 2}
DEFAULT_CPU_KV_BYTES = 4 * 2**30  # as vLLM's CPU backend; more only when one request of full length needs it
_DTYPE_NAMES: dict[str, Dtype] = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an engine is built from. `kv_scales` are the static scales that its fp8 pages take, if any.

    `model` is the whole model. `plan` is that of each rank; all of them have equally many pages of the same sizes.
    `available`: the bytes of a CPU's memory that the plan of each rank was made for. None where a card's memory, or another machine's, was.

    With a `card` the plan comes from an upper bound. The final plan is made when everything except the pages has been
    allocated. It stays within `gpu_memory_utilization` of the card, or has exactly these pages if they are `fixed`.
    `auto_length`: max_model_len follows from the memory. `seconds`: what resolving took. `offline_tokens`: the max_num_batched_tokens that
    an engine without a server has, where this is one or a plan. `stages` are the layers of each stage.
    """

    args: EngineArgs
    config: EngineConfig
    model: ModelConfig
    plan: MemoryPlan
    stages: Sequence[range]
    card: DeviceMemory | None = None
    gpu_memory_utilization: float = 1.0
    fixed_pages: bool = False
    auto_length: bool = False
    seconds: float = 0.0
    kv_scales: Scales = field(default_factory=dict)
    available: int | None = None
    offline_tokens: int = 0


def resolve(
    args: EngineArgs,
    memory_bytes: int | None = None,
    *,
    plan_only: bool = False,
    offline: bool = False,
    available: int | DeviceMemory | None = None,
) -> Resolved:
    """Settle every choice. `memory_bytes` stands for the device's available memory (measured when None).

    `plan_only`: nothing will be loaded. With `memory_bytes` the device is then another machine's, a CUDA device unless
    `args.device` is "cpu"; and weights may be stored in formats that can't be run.
    `offline`: nobody waits for single tokens, so by default steps may be larger.
    `available`: the share of this rank in what was measured once for all engines, or ranks, of the machine.

    Raises:
        ConfigError: an argument contradicts the model or another argument.
        CapacityError: the memory cannot hold one request of the wanted length.
    """
    started = time.perf_counter()
    if limits.FAULTS:
        raise ConfigError(" ".join(limits.FAULTS))
    asked = args.max_model_len if isinstance(args.max_model_len, int) and args.max_model_len > 0 else None
    model = read_model_config(args.model, asked, args.hf_overrides, quantised=plan_only, quantization=args.quantization)
    args = _without_idle_expert_parallel(args)
    model = _as_asked(model, args)
    device, card = _device(args, plan_only and memory_bytes is not None, available)
    transfer_backend(args, device)  # it may refuse
    drafts = resolve_speculation(args, model)
    model = with_draft_model(model, drafts)
    if not plan_only:
        _check_host_memory(args, available)
    # "auto" on a CPU: its kernels are fastest in float32
    dtype: Dtype = _DTYPE_NAMES.get(args.dtype, model.dtype if device == "cuda" else "float32")
    if dtype == "float16" and model.family.startswith("gemma3"):
        logger.warning(
            'Gemma 3 overflows in float16, in which the residual stream of its larger models is not finite; dtype="bfloat16" holds it.'
        )
    kv_dtype: KVDtype = dtype if args.kv_cache_dtype == "auto" else KV_DTYPE_NAMES[args.kv_cache_dtype]
    max_num_seqs = args.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    check_rows_of_adapters(args, max_num_seqs, 0 if drafts is None else drafts.num_speculative_tokens)
    wanted_length = _wanted_length(args, model)
    longest = model.max_position_embeddings if isinstance(wanted_length, str) else wanted_length
    if model.drafter is not None:
        check_draft_length(model.drafter, longest)
    if memory_bytes is not None and device == "cpu":
        memory_bytes //= args.num_ranks * args.engines  # ranks and engines on CPUs share it
    stages = _stages(args, model)
    of_ranks = _of_ranks(args, model, dtype, device, plan_only)
    if device == "cuda" and memory_bytes is None and card is None:
        card = device_memory(of_ranks=args.num_ranks > 1)
    room = DeviceMemory(memory_bytes, memory_bytes) if device == "cuda" and memory_bytes is not None else card
    large = (offline or plan_only) and room is not None and _takes_large_steps(args, model, dtype, room)
    batched_tokens = _batched_tokens(args, longest, DEFAULT_BATCHED_TOKENS[device])
    offline_tokens = _batched_tokens(args, longest, LARGE_STEP_TOKENS) if large else batched_tokens
    batched_tokens = offline_tokens if offline else batched_tokens
    kv_scales = _kv_scales(args, model, kv_dtype)
    specs = _specs(of_ranks[0], kv_dtype, kv_scales, drafts, dtype)
    if memory_bytes is None and card is None and available is None:
        available = available_memory() // (args.num_ranks * args.engines)  # this too
    available = None if isinstance(available, DeviceMemory) else available
    wish = _Wish(
        args, model, of_ranks, stages, dtype, specs, wanted_length, max_num_seqs, batched_tokens, device, available, drafts
    )  # fmt: skip
    plan = with_adapter(_plan(wish, memory_bytes if card is None else card.free, card), auto=wanted_length == "auto")
    return Resolved(
        args,
        _engine_config(wish, plan, kv_dtype),
        model,
        plan,
        stages,
        card,
        args.gpu_memory_utilization,
        fixed_pages=args.num_gpu_blocks_override is not None or args.kv_cache_memory_bytes is not None,
        auto_length=wanted_length == "auto",
        seconds=time.perf_counter() - started,
        kv_scales=kv_scales,
        available=available if memory_bytes is None and card is None else None,
        offline_tokens=offline_tokens,
    )


def _device(
    args: EngineArgs, is_other: bool, available: int | DeviceMemory | None
) -> tuple[Literal["cpu", "cuda"], DeviceMemory | None]:
    """What the engine runs on, and its memory where that is known. `is_other`: another machine's, as it is asked for."""
    if is_other:
        return "cpu" if args.device == "cpu" else "cuda", None
    if _of_cluster(args, available):
        return cluster_device(args.device)
    return resolve_device(args.device), available if isinstance(available, DeviceMemory) else None


def _of_cluster(args: EngineArgs, available: int | DeviceMemory | None) -> bool:
    """Whether this is the core of an engine whose devices are those of a Ray cluster. Its ranks know their device."""
    of_ray = args.distributed_executor_backend == "ray" and args.device != "cpu"
    return of_ray and not isinstance(available, DeviceMemory)


def _check_host_memory(args: EngineArgs, available: int | DeviceMemory | None) -> None:
    """Raise CapacityError if the machine hasn't the host memory for pages. Of several ranks on cards the core has looked, but for Ray's."""
    asked = read_kv_transfer(args)
    on_card = isinstance(available, DeviceMemory)
    if not asked.host_bytes or _of_cluster(args, available) or (on_card and args.distributed_executor_backend != "ray"):
        return
    if isinstance(available, int):
        each = available
    else:
        each = available_memory() // ranks_here(args, "cuda" if on_card else "cpu")
    check_host_memory(asked, args, each)


def _as_asked(model: ModelConfig, args: EngineArgs) -> ModelConfig:
    """The model's config with what the arguments say of its products."""
    if model.format is not None and args.activation_quantization == "none":
        model = replace(model, format=replace(model.format, rounds=False))
    return replace(model, expert_share=ExpertShare()) if args.enable_expert_parallel else model


def _without_idle_expert_parallel(args: EngineArgs) -> EngineArgs:
    """Without `enable_expert_parallel` where one rank has all experts. A line of the log says so, as vLLM's users start single GPUs with it, too."""
    if not args.enable_expert_parallel or args.tensor_parallel_size * args.teams > 1:
        return args
    logger.warning(
        "enable_expert_parallel divides experts among the ranks of tensor_parallel_size times data_parallel_size, which is 1."
    )
    return msgspec.structs.replace(args, enable_expert_parallel=False)


def _stages(args: EngineArgs, model: ModelConfig) -> list[range]:
    """The layers of each stage."""
    asked = os.environ.get(LAYERS_OF_STAGES, "")
    if asked and args.pipeline_parallel_size == 1:
        logger.warning("%s=%r is passed over, as pipeline_parallel_size is 1.", LAYERS_OF_STAGES, asked)
        asked = ""
    return layers_of_stages(model.num_layers, args.pipeline_parallel_size, asked)


def _of_ranks(args: EngineArgs, model: ModelConfig, dtype: Dtype, device: str, plan_only: bool) -> list[ModelConfig]:
    """The configs of the models that a stage's ranks would have of all layers, equal ones once. Raises ConfigError for what can't be divided."""
    if args.num_ranks > 1 and device == "cuda" and not plan_only:
        check_devices(args)
    ranks = args.tensor_parallel_size
    try:
        return configs_of_ranks(model, dtype, device, ranks, args.teams)
    except ConfigError as error:
        teams = f", data_parallel_size={args.teams}" if args.teams > 1 else ""
        raise ConfigError(f"tensor_parallel_size={ranks}{teams}: {error}") from None


def _engine_config(wish: _Wish, plan: MemoryPlan, kv_dtype: KVDtype) -> EngineConfig:
    args = wish.args
    events = kv_events(args)
    if events is not None:
        BlockShape.of(plan)  # it may refuse the model
    return EngineConfig(
        **{name: getattr(args, name) for name in SharedArgs.__struct_fields__},
        model_path=str(args.model),
        tokenizer_path=str(args.tokenizer or args.model),
        dtype=wish.dtype,
        device=wish.device,
        max_model_len=plan.max_model_len,
        kv_cache_dtype=kv_dtype,
        max_num_seqs=wish.max_num_seqs,
        max_num_batched_tokens=wish.batched_tokens,
        scheduling_policy="priority" if args.scheduling_policy == "priority" else "fcfs",
        load_format="dummy" if args.load_format == "dummy" else "auto",
        max_in_flight=wish.in_flight,
        max_cpu_loras=args.max_cpu_loras or args.max_loras,
        host_bytes=wish.kv_transfer.host_bytes,
        offload_prompt_only=wish.kv_transfer.prompts_only,
        disk_tier=wish.kv_transfer.disk,
        kv_load_failure_policy=wish.kv_transfer.load_failure,
        kv_events=events,
        exchange=wish.kv_transfer.exchange,
        speculative=wish.drafts,
    )


def _specs(
    model: ModelConfig, kv_dtype: KVDtype, kv_scales: Scales, drafts: SpeculativeConfig | None, dtype: Dtype
) -> tuple[Spec, ...]:
    """What a rank's layers keep, with static scales where there are some and journals where there are drafts."""
    found = with_static_scales(model.specs(kv_dtype), kv_scales)
    return with_journal(found, drafts.num_speculative_tokens if drafts is not None else 0, dtype)


def _kv_scales(args: EngineArgs, model: ModelConfig, kv_dtype: KVDtype) -> Scales:
    """The scales that the checkpoint has for the pages' dtype; none if there are only a config and no weights."""
    directory = Path(model.path)
    if args.load_format == "dummy" or not any(directory.glob("model.safetensors*")):
        return {}
    found = read_kv_scales(checkpoint_files(directory), model.layer_specs(kv_dtype))
    if found and kv_dtype != STATIC_DTYPE:
        logger.info("The checkpoint's scales are for fp8_e4m3; kv_cache_dtype=%s makes no use of them.", kv_dtype)
        return {}
    if found:
        logger.info("fp8 pages take the checkpoint's scales, of %d layers.", len(found))
    return found


def kv_scales_again(resolved: Resolved) -> Scales:
    """The scales that the checkpoint has now, for the engine of `resolved`; its layers had some at its start, or had none.

    Raises:
        CheckpointError: the layers' pages were laid out for static scales, and there are none now, or a scale is damaged.
    """
    config, before = resolved.config, resolved.kv_scales
    directory = Path(config.model_path)
    if config.load_format == "dummy" or config.kv_cache_dtype != STATIC_DTYPE:
        return {}
    found = read_kv_scales(checkpoint_files(directory), resolved.model.layer_specs(config.kv_cache_dtype))
    if before and not found:
        layer, (key, value) = next(iter(before.items()))
        raise CheckpointError(
            f"{directory} holds no scales of keys and values, but held some when the engine started: those of layer {layer}, {key:g} and "
            f"{value:g} for one. Put them back, or start the engine again."
        )
    if found and not before:
        logger.warning(
            "%s holds scales of keys and values now, but held none when the engine started. Its pages go on with scales of their own.",
            directory,
        )
        return {}
    return found


def _wanted_length(args: EngineArgs, model: ModelConfig) -> int | str:
    if args.max_model_len in ("auto", -1):
        return "auto"
    if args.max_model_len is None:
        return model.max_position_embeddings
    length = int(args.max_model_len)
    if length > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={length} is more than the model's max_position_embeddings="
            f"{model.max_position_embeddings}; lower max_model_len."
        )
    return length


def _takes_large_steps(args: EngineArgs, model: ModelConfig, dtype: Dtype, card: DeviceMemory) -> bool:
    """Whether larger steps are faster, and leave enough of the card for pages."""
    if args.max_num_batched_tokens is not None:
        return False
    weights = weights_with_unpacked_experts(model, dtype)
    room = min(card.free, int(card.total * args.gpu_memory_utilization))
    return weights is not None and room - weights >= LARGE_STEP_ROOM


def _batched_tokens(args: EngineArgs, max_model_len: int, default: int) -> int:
    if args.enable_chunked_prefill:
        return args.max_num_batched_tokens or default
    tokens = args.max_num_batched_tokens or max(default, max_model_len)
    if tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is less than max_model_len={max_model_len}, and with "
            "enable_chunked_prefill=False a prompt must fit in one step; raise the first, lower the second, "
            "or enable chunked prefill."
        )
    return tokens


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a plan is made for. `of_ranks` are the configs of the ranks' models, equal ones once.

    `stages` are the layers of each stage. `available` is a CPU's memory for each rank, where no other memory is given.
    """

    args: EngineArgs
    model: ModelConfig
    of_ranks: list[ModelConfig]
    stages: Sequence[range]
    dtype: Dtype
    specs: tuple[Spec, ...]
    length: int | str
    max_num_seqs: int
    batched_tokens: int
    device: Literal["cpu", "cuda"]
    available: int | None
    drafts: SpeculativeConfig | None

    @property
    def kv_transfer(self) -> KVTransfer:
        """What goes to host memory."""
        return read_kv_transfer(self.args)

    @property
    def parts(self) -> list[tuple[ModelConfig, range | None]]:
        """The configs of ranks' models, with the layers of each stage if there are several."""
        layers: list[range | None] = [*self.stages] if len(self.stages) > 1 else [None]
        return [(own, of_stage) for own in self.of_ranks for of_stage in layers]

    @property
    def spec_stages(self) -> list[int]:
        """By which stage each of the specs' layers is run; a drafter's are behind the others, and there is one stage then."""
        layers = self.model.spec_layers
        of_layers = [stage for layer in layers for stage, own in enumerate(self.stages) if layer in own]
        return of_layers + [0] * (len(self.specs) - len(layers))

    @property
    def in_flight(self) -> int:
        """How many steps may be under way: one in each stage, and one more that waits for the first. Of several ranks' short steps another one, as plans go to
        other processes: while all rows get a page, devices would wait. Not with drafts, for which rows would keep more room.
        """
        stages, several = len(self.stages), self.args.tensor_parallel_size > 1 and self.args.teams == 1
        more = several and self.drafts is None and self.device == "cuda"
        return self.args.max_in_flight or (stages + 1 if stages > 1 else DEFAULT_IN_FLIGHT[self.device] + more)

    def memory(self, given: int | None) -> int:
        """Bytes of the memory that is planned for."""
        found = self.available if given is None else given
        assert found is not None
        return found


def _most_weights(wish: _Wish) -> Weights:
    """The weights of the rank and stage with most of them."""
    return max(
        (
            count_weights(own, wish.dtype, wish.device, wish.batched_tokens * wish.args.teams, layers)
            for own, layers in wish.parts
        ),
        key=lambda weights: weights.size + weights.drafter,
    )


def _plan(wish: _Wish, memory_bytes: int | None, card: DeviceMemory | None) -> MemoryPlan:
    """The plan for `memory_bytes` (None: what this machine has available); for a `card`, an upper bound of it."""
    args, model, max_num_seqs, specs = wish.args, wish.model, wish.max_num_seqs, wish.specs
    longest = model.max_position_embeddings if isinstance(wish.length, str) else wish.length
    counted = _most_weights(wish)
    measured = card is not None or wish.device == "cpu"  # by a warm-up, or counted as activations
    unpacked = (("weights of a product, unpacked", counted.unpacked),) if counted.unpacked and not measured else ()
    products = adapted_products(model, wish.parts, wish.dtype, wish.device, args)
    copies = adapter_copies(products, wish.dtype, args)
    num_groups = len({spec.lifetime for spec in specs})
    host_bytes = wish.kv_transfer.host_bytes
    num_drafts = wish.drafts.num_speculative_tokens if wish.drafts is not None else 0

    def other(length: int, table_width: int) -> tuple[tuple[str, int], ...]:
        always = (
            *counted.rows,
            ("page tables", 8 * max_num_seqs * table_width),
            (
                "step inputs",
                StepTensors.num_bytes(max_num_seqs, max(max_num_seqs, wish.batched_tokens), num_groups, num_drafts),
            ),
            *adapters_rows(products, args, 0 if measured else wish.batched_tokens),
            ("sampling state", Sampler.state_bytes(max_num_seqs, model.vocab_size)),
            ("logits of one step", 4 * max_num_seqs * (1 + num_drafts) * model.vocab_size),
            *drafting_bytes(wish.drafts, max_num_seqs, length, num_groups),
            *unpacked,
        )
        if wish.device == "cuda":
            return always
        steps = step_memory(
            specs,
            args.attention_backend,
            wish.dtype,
            model.attention_scores,
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            tokens=wish.batched_tokens,
            heads=getattr(wish.of_ranks[0], "num_heads", 0),
            work_space=counted.work_space,
            eager=args.enforce_eager or args.num_ranks > 1,
        )
        held = ("host memory for pages", host_bytes), ("adapters that are kept", copies)
        host = tuple((name, size) for name, size in held if size)
        return (*always, ("activations", counted.activations), *steps, *_told_by_ranks(wish), *host)

    def plan(budget: int | None) -> MemoryPlan:
        return plan_memory(
            specs,
            page_tokens=args.block_size,
            budget_bytes=budget,
            num_pages_override=args.num_gpu_blocks_override,
            max_model_len=wish.length,
            model_max_len=model.max_position_embeddings,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=wish.batched_tokens,
            max_in_flight=wish.in_flight,
            num_drafts=num_drafts,
            stages=wish.spec_stages,
            chunked_prefill=args.enable_chunked_prefill,
            page_unit=TILE * DTYPE_BYTES[wish.dtype] if products else ALIGNMENT,
        )

    if (asked := args.num_gpu_blocks_override) is not None:
        made = plan(None)
        _check_fixed(made, "num_gpu_blocks_override", asked, counted.size + counted.drafter, wish.memory(memory_bytes))
    elif args.kv_cache_memory_bytes is not None:
        made = plan(args.kv_cache_memory_bytes)
        if card is not None:  # on a CPU the arena says it, so that plans for other machines can be made
            asked = args.kv_cache_memory_bytes
            _check_fixed(
                made, "kv_cache_memory_bytes", asked, counted.size + counted.drafter, wish.memory(memory_bytes)
            )
    else:
        widest = num_groups * -(-longest // args.block_size)
        made = _plan_in(memory_bytes, card, wish, other(longest, widest), longest, plan)
    width = sum(group.table_width for group in made.groups)
    if host_bytes:
        host_bytes = cut_host(made, host_bytes).num_bytes  # it may refuse
    made = replace(made, adapter_pages=adapter_pages(products, made, wish.dtype, args), adapter_copies=copies)
    return replace(made, other=other(made.max_model_len, width), host_bytes=host_bytes, disk_bytes=_disk_bytes(wish))


def _disk_bytes(wish: _Wish) -> int:
    """Those of one rank."""
    disk = wish.kv_transfer.disk
    return 0 if disk is None else disk.max_bytes // wish.args.num_ranks


def _told_by_ranks(wish: _Wish) -> tuple[tuple[str, int], ...]:
    """What a rank on a CPU takes to add up the others' parts of a step's outputs, to gather their logits, and for what it has sent to the next
    stage, which may be steps behind.
    """
    ranks, tokens = wish.args.tensor_parallel_size, max(wish.batched_tokens, wish.max_num_seqs)
    hidden = tokens * wish.model.hidden_size * 4
    found: list[tuple[str, int]] = []
    if (teams := wish.args.teams) > 1:  # as they come and apart, their experts' outputs, and those of all ranks
        found.append(("tokens of all teams", teams * (3 + ranks * teams) * hidden))
    if ranks > 1:
        found.append(("sums of all ranks", (ranks + 1) * hidden))
        found.append(("logits of all ranks", 2 * 4 * wish.max_num_seqs * wish.model.vocab_size))
    if len(wish.stages) > 1:
        found.append(("streams to the next stage", wish.in_flight * hidden * getattr(wish.model, "streams", 1)))
    return tuple(found)


def _check_fixed(plan: MemoryPlan, name: str, asked: int, weights: int, total: int) -> None:
    """Refuse more pages than `total` bytes hold beside the weights; argument `name` asked for them with `asked`."""
    room = total - weights
    if plan.kv_bytes <= room:
        return
    most = max(room, 0) * asked // plan.kv_bytes
    advice = f"lower it to {most}" if most else "take a machine with more memory"
    raise CapacityError(
        f"{name}={asked} asks for {plan.kv_bytes / 2**30:.2f} GiB of pages, but of the "
        f"{total / 2**30:.2f} GiB there are, {max(room, 0) / 2**30:.2f} GiB are left beside the weights; {advice}."
    )


def _plan_in(
    memory_bytes: int | None,
    card: DeviceMemory | None,
    wish: _Wish,
    other: Sequence[tuple[str, int]],
    longest: int,
    plan: Callable[[int | None], MemoryPlan],
) -> MemoryPlan:
    """The plan for `memory_bytes` of device memory, or for this machine's: then modest unless a length needs more."""
    total = wish.memory(memory_bytes)
    utilization = wish.args.gpu_memory_utilization
    needed, of_host = sum(size for _, size in other), wish.kv_transfer.host_bytes > 0 and wish.device == "cpu"
    room, free = int(total * utilization) - needed, ""
    if card is not None:  # the free memory limits it too, but the share is a share of the whole card
        room = min(card.free, int(card.total * utilization)) - needed
        total, free = card.total, f", {human_bytes(card.free)} of which are free,"
    if other[0][1] > min(int(total * utilization), memory_bytes or total):
        raise CapacityError(
            too_large(
                other[0], total, free, wish.args, (wish.model, wish.of_ranks[0]), wish.dtype, wish.device, wish.stages
            )
        )
    if room <= 0:
        raise CapacityError(
            f"What is not pages ({', '.join(f'{name} {human_bytes(size)}' for name, size in other)}) needs "
            f"{human_bytes(needed)}, and gpu_memory_utilization={utilization} of the "
            f"{human_bytes(total)} there are{free} is {human_bytes(int(total * utilization))}; raise gpu_memory_utilization, "
            f"lower {'kv_offloading_size (or cpu_bytes_to_use), ' * of_host}max_num_seqs, max_num_batched_tokens or max_model_len, or take a machine with more memory."
        )
    usual = DEFAULT_CPU_KV_BYTES // wish.args.num_ranks
    if memory_bytes is not None or room <= usual:
        return plan(room)
    try:
        modest = plan(usual)
    except CapacityError:
        return plan(room)
    return modest if modest.max_model_len == longest else plan(room)
