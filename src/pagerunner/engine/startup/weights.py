"""What weights take in memory, counted from a config alone, and what helps where they alone are too large.

The model is built without memory, with the forms that its weights are kept in. Its tensors are what will be allocated, so a plan, a
start and another machine's plan can't differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pagerunner.config import DTYPE_BYTES, Dtype, EngineArgs
from pagerunner.errors import ConfigError
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import Experts, ExpertSizes, Router
from pagerunner.layers.shares import numbers_of_ranks
from pagerunner.lora.blocks import Products, Whole
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import least_page
from pagerunner.memory.units import human_bytes
from pagerunner.models.checkpoint.forms import loaded_unpacked_bytes, unpacked_bytes
from pagerunner.models.checkpoint.loader import Model, build_model, checkpoint_files, weights_bytes
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.checkpoint.ranks import configs_of_ranks
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.quantization_fields import ALL
from pagerunner.ops.lora import TILE
from pagerunner.ops.native.mixture import experts_memory
from pagerunner.ops.panels import product_memory
from pagerunner.quant.expert_panels import ExpertsInPanels
from pagerunner.quant.formats import Format, Names, Scheme
from pagerunner.quant.panels import InPanels

_NONE = Names("module")
MOST_COMPARED = 2**18
"""Pairs of a slot of adapters and a row: Triton takes 2**20 numbers, and each of the two is rounded up to a power of two."""
_MANY_PAIRS = 2**17
"""Of a token and an expert, in a large step."""
_SMALLER = {
    "fp8": (Scheme("fp8", "channel"),),
    "int4": tuple(Scheme("int4", "group", (1, group), layout="compressed") for group in (128, 32)),
}
"""Forms in fewer bits, as most checkpoints have them: fp8 with a scale for each output feature; int4 with one for each 128 input
features, or for 32 where a matrix is not a multiple of 128 wide."""


class Weights(NamedTuple):
    """What a plan calls weights, their bytes, and those that a product unpacks at a time.

    `work_space`: bytes that a CPU's kernels work in for the largest product or mixture of a step, 0 without matrices in panels.
    `activations`: bytes of a step's tensors on a CPU with its kernels, at most; but for what torch's recurrences and an indexer work in.
    `drafter`: bytes of the drafter's weights, which aren't part of `size`.
    """

    name: str
    size: int
    drafter: int = 0
    unpacked: int = 0
    work_space: int = 0
    activations: int = 0

    @property
    def rows(self) -> tuple[tuple[str, int], ...]:
        """Their rows of a plan."""
        own = (self.name, self.size)
        return (own, ("weights of the drafter", self.drafter)) if self.drafter else (own,)


def count_weights(model: ModelConfig, dtype: Dtype, device: str, tokens: int, layers: range | None = None) -> Weights:
    """The weights of `model`, computing in `dtype` on `device` in steps of up to so many tokens; of a stage with these `layers` alone.

    Weights whose format isn't known count as the checkpoint's files if they are there, else as if they were in `dtype`; the name says so.
    """
    keep = device == "cuda"
    if model.format is not None:
        online = model.format.writer == "online"
        name = next(iter(model.format.schemes_said)).number if online else model.format.writer
        as_stored = "made while loading" if online else "as stored"
        made = build_model(model, dtype, keep_forms=keep, layers=layers)
        work_space = 0 if keep else _put_in_panels(made, tokens)
        kept = as_stored if keep else f"unpacked to {dtype}"
        if keep and (dense := loaded_unpacked_bytes(made.modules())):
            kept += f", {human_bytes(dense)} of them unpacked to {dtype}"
        unpacked = max(unpacked_bytes(made.modules(), tokens)) if keep else 0
        activations = _activations(made, model.hidden_size, tokens)
        return Weights(f"weights ({name}, {kept})", *_divided_bytes(made), unpacked, work_space, activations)
    if model.quantization is None:
        made = build_model(model, dtype, layers=layers)
        work_space = 0 if keep else _put_in_panels(made, tokens)  # panels may be larger than matrices
        activations = _activations(made, model.hidden_size, tokens)
        return Weights("weights", *_divided_bytes(made), work_space=work_space, activations=activations)
    method = str(model.quantization.get("quant_method", "quantised"))
    directory = Path(model.path)
    if any(directory.glob("model*.safetensors")):
        return Weights(
            f"weights ({method}, as stored)", sum(file.stat().st_size for file in checkpoint_files(directory))
        )
    made = build_model(model, dtype, layers=layers)
    return Weights(f"weights ({method}: size unknown, counted in {dtype})", *_divided_bytes(made))


def adapted_products(
    model: ModelConfig, parts: Sequence[tuple[ModelConfig, range | None]], dtype: Dtype, device: str, args: EngineArgs
) -> list[Products]:
    """The products of each rank that may have adapters; none without `enable_lora`.

    `parts` are the ranks' configs and layers. Raises ConfigError for a model without layers that take adapters.
    """
    if not args.enable_lora:
        return []
    whole, only = build_model(model, dtype, keep_forms=device == "cuda"), args.lora_target_modules
    products = [Products.of(whole, only)]
    if not products[0].sizes:
        raise ConfigError(f"enable_lora: no layer of {model.family} models takes adapters so far.")
    if parts != [(model, None)]:
        of_ranks = [build_model(own, dtype, keep_forms=device == "cuda", layers=layers) for own, layers in parts]
        products = [Products.of(own, only, Whole(whole)) for own in of_ranks]
    return products


def adapters_rows(products: Sequence[Products], args: EngineArgs, tokens: int) -> tuple[tuple[str, int], ...]:
    """A plan's rows of bytes for adapters, of the rank that needs most; none without `enable_lora`: the tables that say where they lie, and what experts'
    adapters take in a step of so many `tokens`.
    """
    tables = max((one.table_bytes(args.max_loras, args.max_lora_rank) for one in products), default=0)
    pairs = max((one.pairs_bytes(tokens) for one in products), default=0)
    return tuple(
        (name, size) for name, size in (("tables of adapters", tables), ("experts' adapters in a step", pairs)) if size
    )


def adapter_copies(products: Sequence[Products], dtype: Dtype, args: EngineArgs) -> int:
    """Bytes of host memory for `max_cpu_loras` adapters of the highest rank, on the rank where they take most."""
    elements = max((sum(map(sum, one.sizes.values())) for one in products), default=0)
    ranks = -(-args.max_lora_rank // TILE) * TILE
    return (args.max_cpu_loras or args.max_loras) * elements * ranks * DTYPE_BYTES[dtype]


def adapter_pages(products: Sequence[Products], plan: MemoryPlan, dtype: Dtype, args: EngineArgs) -> int:
    """Pages of the plan's largest group that an adapter of the highest rank takes, on the rank where it takes most; 0 without `enable_lora`.

    Raises ConfigError if the pages are too small for a block of an adapter.
    """
    if not products:
        return 0
    largest, size = plan.groups[plan.largest_group], DTYPE_BYTES[dtype]
    widest = max(one.widest for one in products) * size
    if widest > largest.page_bytes:
        growing = (group for group in plan.groups if not group.rule.snapshots)
        enough = least_page(min((-(-widest // group.page_bytes) * group.page_tokens for group in growing), default=1))
        raise ConfigError(
            f"enable_lora: {TILE} rows of an adapter's largest matrix are {widest:,} bytes, and must lie in one page of keys and values, which has "
            f"{largest.page_bytes:,} with block_size={args.block_size}; raise block_size to {enough}."
        )
    return max(one.num_pages(args.max_lora_rank, largest.page_bytes // size) for one in products)


def check_rows_of_adapters(args: EngineArgs, max_num_seqs: int, drafts: int) -> None:
    """Raise ConfigError where rows and slots of adapters, if there are any, are more than one program of a kernel compares."""
    max_loras, rows = args.max_loras, max_num_seqs * (1 + drafts)
    if args.enable_lora and max_loras * rows > MOST_COMPARED:
        with_drafts = f" times 1 + num_speculative_tokens={drafts}" if drafts else ""
        raise ConfigError(
            f"max_loras={max_loras} and max_num_seqs={max_num_seqs}{with_drafts} are {max_loras * rows:,} pairs of a slot and a row, and a step compares at "
            f"most {MOST_COMPARED:,}; lower one of them."
        )


def _divided_bytes(model: Model) -> tuple[int, int]:
    """Bytes of the model's weights and of its drafter's."""
    drafter = 0 if model.drafter is None else weights_bytes(model.drafter)
    return weights_bytes(model) - drafter, drafter


def weights_with_unpacked_experts(model: ModelConfig, dtype: Dtype) -> int | None:
    """Bytes of weights of which a CUDA device unpacks experts before a prompt's products; None if it unpacks none.

    It unpacks once for each step, so large steps are faster.
    """
    if model.format is None:
        return None
    made = build_model(model, dtype, keep_forms=True)
    unpacks = any(module.unpacked_bytes(_MANY_PAIRS) for module in made.modules() if isinstance(module, Experts))
    return weights_bytes(made) if unpacks else None


def _put_in_panels(model: Model, tokens: int) -> int:
    """Store a CPU's model as a start does. Returns the most bytes that a product or a mixture works in, for so many tokens."""
    store_in_panels(model)
    inputs, sizes, active = {0}, set[ExpertSizes](), 0
    for module in model.modules():
        if isinstance(module, Linear | Embedding) and isinstance(module.method, InPanels):
            inputs.add(module.weights["weight"].shape[1])
        elif isinstance(module, Experts) and isinstance(module.method, ExpertsInPanels):
            inputs |= {module.sizes.features, module.sizes.inner}
            sizes.add(module.sizes)
        elif isinstance(module, Router):
            active = max(active, module.routing.active)
    if not max(inputs):
        return 0
    mixtures = (experts_memory(tokens, one.features, one.inner, one.experts, active) for one in sizes)
    return max(product_memory(tokens, max(inputs)), *mixtures, 0)


def _activations(model: Model, hidden: int, tokens: int) -> int:
    """Bytes in float32: the stream of `hidden` features three times, the widest product's input and output, and a mixture's pairs."""
    widest, pairs, active = 0, 0, 0
    for module in model.modules():
        if isinstance(module, Linear) and not module.plain:  # output weights are, whose outputs are the logits
            widest = max(widest, module.in_features + module.out_features)
        elif isinstance(module, Experts):
            pairs = max(pairs, 4 * module.sizes.inner + 2 * module.sizes.features)
        elif isinstance(module, Router):
            active = max(active, module.routing.active)
    return 4 * tokens * (3 * hidden + widest + active * pairs)


def in_fewer_bits(
    model: ModelConfig, dtype: Dtype, size: int, parts: Sequence[range | None] = (None,)
) -> Iterator[tuple[str, int]]:
    """Forms in which weights of `size` bytes take at least a fifth less on a CUDA device, and the bytes that they take.

    Of stages with these `parts` of the layers, the largest one's count. None: all layers.
    """
    for name, schemes in _SMALLER.items():
        for scheme in schemes:
            form = Format("compressed-tensors", ((ALL, scheme),), _NONE)
            try:
                own = replace(model, format=form)
                made = (build_model(own, dtype, keep_forms=True, of_files=False, layers=layers) for layers in parts)
                taken = max(map(weights_bytes, made))
            except ConfigError:  # sizes that don't suit the form
                continue
            if taken < 0.8 * size:
                yield name, taken
            break


def _by_ranks(model: ModelConfig, dtype: Dtype, parts: Sequence[range | None], teams: int) -> Iterator[tuple[int, int]]:
    """Numbers of ranks that the whole `model` can be divided among, and the most bytes of weights that one of them has on a CUDA device."""
    for number in numbers_of_ranks(build_model(model, dtype, keep_forms=True).checkpoint()):
        try:
            of_ranks = configs_of_ranks(model, dtype, "cuda", number, teams)
        except ConfigError:  # fewer experts than ranks
            continue
        made = (build_model(own, dtype, keep_forms=True, layers=layers) for own in of_ranks for layers in parts)
        yield number * len(parts) * teams, max(map(weights_bytes, made))


def too_large(
    weights: tuple[str, int],
    total: int,
    free: str,
    args: EngineArgs,
    models: tuple[ModelConfig, ModelConfig],
    dtype: Dtype,
    device: str,
    stages: Sequence[range],
) -> str:
    """The sentence for a user whose weights alone are larger than the memory. It names only what can help.

    `weights` are a rank's. `total` are the device's bytes, `free` what to say of them. `models` are the whole one's config and the rank's.
    """
    (model, own), utilization, ranks = models, args.gpu_memory_utilization, args.num_ranks
    name, size = weights
    form = f" in {dtype}" if name == "weights" else ""
    parts: Sequence[range | None] = stages if len(stages) > 1 else (None,)
    limit = int(total * utilization)
    said = (
        f"The {name}{f' of each of {ranks} ranks' if ranks > 1 else ''} alone take {human_bytes(size)}{form}. That is {human_bytes(size - limit)} more than "
        f"gpu_memory_utilization={utilization} of the {human_bytes(total)} there are{free.rstrip(',')}, which is {human_bytes(limit)}."
    )
    advice = [f"a device with at least {human_bytes(int(size / utilization))} and room for pages", "a smaller model"]
    smaller = dict(in_fewer_bits(own, dtype, size, parts)) if device == "cuda" else {}
    if fitting := [f"{bits} ({human_bytes(taken)})" for bits, taken in smaller.items() if taken <= limit]:
        advice.insert(0, f"a checkpoint of this model whose weights are in {' or '.join(fitting)}")
    if model.quantization is None and model.format is None and smaller.get("fp8", size) <= limit:
        advice.insert(0, 'quantization="fp8", which rounds them to 8 bits while they are loaded')
    if dtype == "float32" and size // 2 < limit:
        advice.insert(0, 'dtype="bfloat16", which halves them')
    if size < total:
        advice.insert(0, "a larger gpu_memory_utilization")
    said = f"{said} What helps: {', or '.join(advice)}."
    if device == "cpu" or model.quantization is not None and model.format is None:  # ranks share a CPU's memory
        return said
    divided = list(_by_ranks(model, dtype, parts, args.teams))
    forms = {"": size} | {f" in {bits}": taken for bits, taken in smaller.items() if taken > limit}
    enough = {
        bits: next((number for number, most in divided if most * taken <= limit * size), 0)
        for bits, taken in forms.items()
    }
    found = [f"{number}{bits}" for bits, number in enough.items() if number]
    most = divided[-1][0]
    if not found:
        return f"{said} Divided among {most} ranks, the most that work, they are still too large for each."
    return (
        f"{said} So many ranks with such a device each would hold them (tensor_parallel_size): {', or '.join(found)}."
    )
