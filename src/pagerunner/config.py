"""Engine configuration: user arguments resolved once into one frozen value. Components get narrow values from it."""

from __future__ import annotations

import difflib
import math
import os
import types
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from pagerunner.errors import ConfigError

Option = TypeVar("Option")
Dtype = Literal["float32", "bfloat16", "float16"]
KVDtype = Literal["float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"]
TransferBackend = Literal["nccl", "gloo"]
SpeculativeMethod = Literal["ngram", "suffix", "eagle", "eagle3", "mtp", "draft_model"]
INVARIANCE = "VLLM_BATCH_INVARIANT"  # vLLM's variable for batch_invariant
MOST_LORAS = 256
"""Slots of adapters: the kernel that orders a step's tokens compares all slots with all rows at once."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES: dict[str, int] = {**DTYPE_BYTES, "fp8_e4m3": 1, "fp8_e5m2": 1}
KV_DTYPE_NAMES: dict[str, KVDtype] = {  # what kv_cache_dtype may say besides "auto"
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}


class SharedArgs(msgspec.Struct, kw_only=True, frozen=True):
    """Arguments that an engine takes as they are given; see EngineArgs."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    data_parallel_size: int = 1
    distributed_executor_backend: str = "mp"
    disable_custom_all_reduce: bool = False
    block_size: int = 16
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    seed: int = 0
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    enable_sleep_mode: bool = False
    poison_fresh_pages: bool = False
    attention_backend: str = "auto"
    kv_cache_metrics_sample: float = 0.0
    target_itl_ms: float | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    lora_target_modules: tuple[str, ...] | None = None
    batch_invariant: bool = False

    @property
    def teams(self) -> int:
        """How many teams of ranks an engine has. Each has requests and pages of its own, and the ranks of all divide the experts."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def engines(self) -> int:
        """How many engines there are, each with all weights."""
        return self.data_parallel_size // self.teams

    @property
    def num_ranks(self) -> int:
        """How many ranks an engine has."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.teams


class EngineArgs(SharedArgs, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a user may ask of an engine. If vLLM has an argument of that name, meaning and default are vLLM's.

        `model` is a directory or a name on the Hugging Face Hub; `revision` is a branch, tag or commit there, and `download_dir`
        the cache to use instead of the hub's own.
        `max_model_len`: None takes the model's own length, "auto" or -1 the longest that one request can have in the
        memory there is. Memory for pages: `num_gpu_blocks_override` (pages of the largest group) beats
        `kv_cache_memory_bytes`, which beats `gpu_memory_utilization` (a share of the device's memory, on CPU of what is
        available). `max_in_flight` is how many steps may be scheduled before the first one's tokens are read. More than two (with stages:
        more than one for each and one) are only behind steps of up to 512 tokens.
        `max_num_batched_tokens` is 8,192 by default, and 2,048 on a CPU. For `LLM` it is 16,384 if experts are unpacked before a prompt's
        products (those in 4 bits are), and 32 GiB of the device are left beside the weights.
        `tensor_parallel_size` is the number of ranks that every layer is divided among. `pipeline_parallel_size` is the number of stages that
        the layers are divided among; each has so many ranks. With `enable_expert_parallel` each rank has whole experts, and not a part of every
        expert; of a single rank it changes nothing. `data_parallel_size` is the number of whole engines behind one server, each with its own copy of
        the weights; `AsyncEngine` has them, `LLM` is one. With `enable_expert_parallel` it is the number of teams of ranks of one engine: each team has
        requests and pages of its own, and the ranks of all teams divide the experts. `distributed_executor_backend` says where ranks run: "mp" in processes of this machine, "ray" on machines of
        a Ray cluster; "uni" is for one rank. `disable_custom_all_reduce`: ranks on CUDA devices add up by NCCL alone, and not by our own kernel.
        `quantization` names the format of a quantised checkpoint, with which it must agree, or rounds one in floats while it is loaded:
        "fp8", "fp8_per_block", "int8_per_channel_weight_only" (see docs/models-and-formats.md).
        `activation_quantization`: "auto" rounds activations to 8 bits in products of more than 16 tokens, where the checkpoint's format says
        so; "none" leaves them in `dtype` everywhere, which is slower and closer to the model in floats.
        `cudagraph_capture_sizes` are the numbers of decoding requests to capture graphs for; mixed steps have graphs up to
        the largest of them in tokens.
        `pooler_config`, a mapping or JSON, says how hidden states become embeddings where the checkpoint doesn't (see
        models/configs/pooling.py). `hf_overrides`, a mapping or JSON, replaces fields of config.json; null stands for a field
        that is not there. `structured_outputs_config`, a mapping or JSON, says how grammars are followed by default (see
        engine/structured_output/options.py). `weight_transfer_config`, a mapping or JSON, names the way by which a trainer may send new
        weights: {"backend": "nccl"}, or "gloo". `kv_offloading_size` is the host memory in GiB, of all ranks together, where pages of prompts are kept
        when they leave the device. `kv_transfer_config`, a mapping or JSON, says the same in vLLM's words, and more (see
        engine/startup/kv_transfer.py). `speculative_config`, a mapping or JSON in vLLM's words, says how tokens are drafted (see
    engine/startup/speculation.py); with `per_request_spec_decode_metrics` "summary" or "detailed" answers tell what became of them.
        `enable_lora`: requests may name adapters (docs/adapters.md). Those of `max_loras` adapters run at once, each with a rank of at most
        `max_lora_rank`; `max_cpu_loras` are kept in host memory (default: as many). With `lora_target_modules`, as ["q_proj", "o_proj"], adapters may be of
        modules alone whose names end so.
        `batch_invariant`: log-probabilities are bitwise the same whatever else a step computes (docs/batch-invariance.md).
        `target_itl_ms`: while some requests generate, steps that compute prompts beside them take about so many milliseconds
        at most; None doesn't bound them (see sched/pace.py). `kv_events_config`, a mapping or JSON, says where the prefix cache's changes are published (see
        KVEventsConfig). `kv_cache_metrics_sample` is the share of pages whose time in memory is measured,
        0 for none. `poison_fresh_pages` fills pages with NaN patterns when they are handed out, to prove that no kernel reads a
        page before it is written.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | str | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    activation_quantization: str = "auto"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    load_format: str = "auto"
    max_in_flight: int | None = None
    generation_config: str = "auto"
    chat_template: str | None = None
    pooler_config: str | dict[str, Any] | None = None
    hf_overrides: str | dict[str, Any] | None = None
    structured_outputs_config: str | dict[str, Any] | None = None
    weight_transfer_config: str | dict[str, Any] | None = None
    kv_offloading_size: float | None = None
    kv_offloading_backend: str = "native"
    kv_transfer_config: str | dict[str, Any] | None = None
    kv_events_config: str | dict[str, Any] | None = None
    speculative_config: str | dict[str, Any] | None = None
    per_request_spec_decode_metrics: str = "none"
    disable_log_stats: bool = False
    max_cpu_loras: int | None = None

    def __post_init__(self) -> None:
        self._take_types()
        one_of("dtype", self.dtype, ("auto", "half", "float16", "bfloat16", "float", "float32"))
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *KV_DTYPE_NAMES))
        one_of("activation_quantization", self.activation_quantization, ("auto", "none"))
        one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        one_of("load_format", self.load_format, ("auto", "safetensors", "dummy"))
        one_of("generation_config", self.generation_config, ("auto", "vllm"))
        detail = self.per_request_spec_decode_metrics
        one_of("per_request_spec_decode_metrics", detail, ("none", "summary", "detailed"))
        if detail != "none" and self.speculative_config is None:
            raise ConfigError(
                f"per_request_spec_decode_metrics={detail!r} tells what became of drafts, and there are none without speculative_config."
            )
        for name in (
            "kv_cache_memory_bytes", "num_gpu_blocks_override", "max_num_seqs", "max_num_batched_tokens",
            "max_in_flight", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_loras",
            "max_cpu_loras",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
        self._check_executor()
        self._check_target()
        self._check_lora()
        self._check_invariance()
        sizes = self.cudagraph_capture_sizes
        if sizes is not None and any(size < 1 for size in sizes):
            raise ConfigError(f"cudagraph_capture_sizes must be whole numbers of at least 1, got {sizes!r}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}.")
        if not 0 <= self.kv_cache_metrics_sample <= 1:
            raise ConfigError(f"kv_cache_metrics_sample must be in [0, 1], got {self.kv_cache_metrics_sample}.")
        if self.block_size not in (1, 2, 4, 8) and (self.block_size < 16 or self.block_size % 16):
            raise ConfigError(f"block_size must be 1, 2, 4, 8 or a multiple of 16, got {self.block_size}.")
        length = self.max_model_len
        if isinstance(length, int) and length < 1 and length != -1:
            raise ConfigError(
                f'max_model_len must be at least 1, or "auto" or -1 for the longest that fits, got {length!r}.'
            )

    def _check_executor(self) -> None:
        backend = self.distributed_executor_backend
        one_of("distributed_executor_backend", backend, ("mp", "ray", "uni"))
        if backend == ("ray" if self.num_ranks == 1 else "uni"):
            raise ConfigError(
                f'distributed_executor_backend="{backend}" is for {"several ranks" if backend == "ray" else "one rank"}, and tensor_parallel_size '
                f'times pipeline_parallel_size{" times data_parallel_size" if self.teams > 1 else ""} is {self.num_ranks}; "mp" is for any number.'
            )
        if self.teams > 1 and self.pipeline_parallel_size > 1:
            teams, stages, ranks = self.data_parallel_size, self.pipeline_parallel_size, self.tensor_parallel_size
            raise ConfigError(
                f"data_parallel_size={teams} with enable_expert_parallel divides experts among the ranks of all of data_parallel_size, which can't "
                f"be stages: pipeline_parallel_size={stages} must be 1. As many ranks, {self.num_ranks}, are tensor_parallel_size={ranks * stages} or "
                f"data_parallel_size={teams * stages} without stages, or tensor_parallel_size={ranks * teams} with data_parallel_size=1. Without "
                f"enable_expert_parallel there are {teams} whole engines, which may have stages."
            )

    def _check_lora(self) -> None:
        if not self.enable_lora:
            fields = zip(
                self.__struct_fields__[-len(self.__struct_defaults__) :], self.__struct_defaults__, strict=True
            )
            for name, default in fields:
                if "lora" in name and (value := getattr(self, name)) != default:
                    raise ConfigError(
                        f"{name}={value!r} says how adapters are served, which enable_lora=True (--enable-lora) asks for; add it."
                    )
            return
        one_of("max_lora_rank", self.max_lora_rank, LORA_RANKS)
        if self.max_loras > MOST_LORAS:
            raise ConfigError(
                f"max_loras must be at most {MOST_LORAS}, got {self.max_loras}; more adapters than that take turns (max_cpu_loras keeps them in host memory)."
            )
        ends = self.lora_target_modules
        if ends is not None and not all(ends or [""]):
            raise ConfigError(
                f'lora_target_modules must be a list of names such as ["q_proj", "o_proj"], got {list(ends)!r}.'
            )
        most = self.max_cpu_loras
        if most is not None and most < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras must be at least max_loras={self.max_loras}, as what is on the device was in host memory before; got {most}."
            )
        if self.enable_lora and self.teams > 1:
            raise ConfigError(
                f"enable_lora isn't there for data_parallel_size={self.teams} with enable_expert_parallel: a rank computes experts for other teams' tokens, and has its own team's adapters alone. "
                f"Leave enable_expert_parallel out, or take tensor_parallel_size={self.num_ranks} with data_parallel_size=1."
            )

    def _check_invariance(self) -> None:
        asked = os.environ.get(INVARIANCE, "0")
        one_of(INVARIANCE, asked, ("0", "1"))
        if asked == "1" and not self.batch_invariant:
            msgspec.structs.force_setattr(self, "batch_invariant", True)
        if not self.batch_invariant:
            return
        way = "batch_invariant=True" if asked == "0" else f"{INVARIANCE}=1"
        fp8, by_size = self.kv_cache_dtype.startswith("fp8"), "ranks' sums are made in other orders by size"
        for name, value, refused, why in (
            ("tensor_parallel_size", self.tensor_parallel_size, self.tensor_parallel_size > 1, by_size),
            ("pipeline_parallel_size", self.pipeline_parallel_size, self.pipeline_parallel_size > 1, by_size),
            ("enable_expert_parallel=True with data_parallel_size", self.teams, self.teams > 1, by_size),
            ("speculative_config", self.speculative_config, self.speculative_config is not None, "rows with drafts have kernels of their own"),
            ("enable_lora", True, self.enable_lora, "adapters' products are divided by the rows that have some"),
            ("kv_cache_dtype", self.kv_cache_dtype, fp8, "scales of fp8 pages follow what was stored at once"),
            ("attention_backend", self.attention_backend, self.attention_backend in ("flashinfer", "torch_ref"), "it sums by what else a step has"),
        ):  # fmt: skip
            if refused:
                raise ConfigError(f"{way} isn't there for {name}={value!r}: {why}. Leave one of them out.")

    def _check_target(self) -> None:
        target = self.target_itl_ms
        if target is None:
            return
        if target <= 0:
            raise ConfigError(f"target_itl_ms must be above 0, got {target:g}; without it prompts may hold up others.")
        if not self.enable_chunked_prefill:
            raise ConfigError(
                f"target_itl_ms={target:g} cuts prompts into pieces, which enable_chunked_prefill=False rules out; enable it or leave target_itl_ms out."
            )
        for name, several in (
            ("pipeline_parallel_size", self.pipeline_parallel_size),
            ("data_parallel_size", self.teams),
        ):
            if several > 1:
                raise ConfigError(
                    f"target_itl_ms={target:g} is for engines whose steps run one behind the other on the same ranks: {name}={several} must be 1"
                    f"{' with enable_expert_parallel' if name == 'data_parallel_size' else ''}."
                )

    def _take_types(self) -> None:
        """Every field as its declared type.

        A value of another type is converted if its meaning is clear. Examples for 8: "8", 8.0, numpy's 8. Other values are
        refused.
        """
        for field in msgspec.structs.fields(EngineArgs):
            value = getattr(self, field.name)
            taken = as_type(field.name, value, field.type)
            if taken is not value:
                msgspec.structs.force_setattr(self, field.name, taken)


_MEANINGS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a mapping",
    tuple: "a list of whole numbers",
    list: "a list of numbers",
    types.NoneType: "None",
}


def as_type(name: str, value: Any, wanted: Any) -> Any:
    """`value` as the type `wanted`. Raises ConfigError that names the argument, what it may be, and the value."""
    kinds = get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    plain = _plain(value)
    if name == "max_model_len" and str in kinds:  # the argument may be one text, which is no number
        kinds = tuple(kind for kind in kinds if kind is not str)
        if plain == "auto":
            return plain
    try:
        if isinstance(plain, str) and str not in kinds and plain.lower() == "null":
            raise msgspec.ValidationError  # which msgspec takes for None
        taken = msgspec.convert(plain, Union[kinds], strict=False)  # noqa: UP007 - made of a tuple
        if isinstance(taken, int) and not -(2**63) <= taken < 2**63:
            raise ConfigError(f"{name} must be below 2 ** 63, got a number of {taken.bit_length()} bits.")
        if isinstance(taken, float) and not math.isfinite(taken):  # JSON, by which it goes to other processes, has none
            raise ConfigError(f"{name} must be a finite number, got {taken:g}.")
        return taken
    except msgspec.ValidationError:
        meanings = [
            "a list of names" if kind == tuple[str, ...] else _MEANINGS[get_origin(kind) or kind] for kind in kinds
        ]
        meanings += ['"auto"'] if kinds != get_args(wanted) and name == "max_model_len" else []
        raise ConfigError(f"{name} must be {' or '.join(meanings)}, got {value!r} ({type(value).__name__}).") from None


def _plain(value: Any) -> Any:
    """Numbers and names of other libraries as Python's own: numpy's numbers, paths, torch's dtypes."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if kind.__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "shape", ()):
        return value.item()
    return value


def one_of(name: str, value: object, allowed: tuple[str, ...] | tuple[int, ...]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}.")


def read_option(name: str, option: str | dict[str, Any] | None, kind: type[Option], example: str) -> Option:
    """An argument that is given as a mapping or JSON, as `kind`. Raises ConfigError when it isn't such JSON."""
    try:
        if isinstance(option, str):
            return msgspec.json.decode(option, type=kind)
        return msgspec.convert(option or {}, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name} must be JSON such as {example}: {error}.") from None


class WeightTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How new weights come. The names are vLLM's, but for "gloo", which is for CPUs."""

    backend: TransferBackend


def transfer_backend(args: EngineArgs, device: str) -> TransferBackend | None:
    """How new weights come to this device, None if the engine takes none. Raises ConfigError for what isn't there."""
    if args.weight_transfer_config is None:
        return None
    example = '{"backend": "nccl"}'
    backend = read_option("weight_transfer_config", args.weight_transfer_config, WeightTransferConfig, example).backend
    if backend == "nccl" and device == "cpu":
        raise ConfigError('weight_transfer_config: NCCL is for CUDA devices; on a CPU the backend is "gloo".')
    return backend


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the prefix cache's changes are published. Names and defaults are vLLM's, but for `endpoint`, which is this machine's only.

    `buffer_steps` batches can be asked for again. `hwm` batches wait for each reader, and `max_queue_size` for the thread that sends.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=0)] = 100_000
    max_queue_size: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    topic: str = ""


def kv_events(args: EngineArgs) -> KVEventsConfig | None:
    """What to publish of the prefix cache, None for nothing. Raises ConfigError for what can't be published."""
    if args.kv_events_config is None:
        return None
    example = '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}'
    config = read_option("kv_events_config", args.kv_events_config, KVEventsConfig, example)
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, name)
        if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"kv_events_config: {name} must begin with tcp:// or ipc://, got {endpoint!r}.")
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    if not args.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config publishes what the prefix cache holds, and enable_prefix_caching is false. Leave one of them out."
        )
    return config


class ExchangeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine `lends` and `pulls` pages, where it listens for other engines, and which ones it knows. A loan lasts so many `seconds`.

    An engine without an `engine_id` gets one at each start. `fails`: requests whose pages don't come end with an error, and aren't computed.
    """

    lends: bool
    pulls: bool
    tp_size: int
    engine_id: str
    host: str
    port: int
    peers: tuple[str, ...]
    secret_file: str | None
    seconds: float
    num_threads: int
    nixl: bool = False
    fails: bool = False


class DiskTierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A directory below which pages are kept when the engine ends, the bytes that all files in it may have, and how many threads of a rank read and write."""

    root_dir: str
    max_bytes: int
    n_read_threads: int = 8
    n_write_threads: int = 2


DRAFT_MODELS: tuple[SpeculativeMethod, ...] = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods whose drafters are models."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine drafts tokens. Every choice is made; the names are vLLM's, but for the last.

    A row has at most `num_speculative_tokens` drafts in a step. `num_speculative_tokens_per_batch_size`, if any, fixes how many: in steps
    of `first` rows and more. `model` is the directory of the drafter's weights, the target's own for "mtp"; "" if there are none.
    `acceptance_rates`, of synthetic acceptance, has a draft's chance by its position, if all drafts before it were accepted. Without
    it a draft is accepted if it is the target's own token.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int], ...] = ()
    model: str = ""
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    acceptance_rates: tuple[float, ...] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of drafts that rows may have, but for 0. Each has graphs of its own, so there are few: of 1, 2, 3, 5, 7, 11, 15 ... those
        well below the most, and the most."""
        if self.num_speculative_tokens_per_batch_size:
            return tuple(sorted({drafts for _, drafts in self.num_speculative_tokens_per_batch_size if drafts}))
        most = self.num_speculative_tokens
        tokens = (size for power in range(1, most.bit_length() + 1) for size in (2**power, 3 * 2 ** (power - 1)))
        return (*(size - 1 for size in tokens if 4 * (size - 1) <= 3 * most), most)


class EngineConfig(SharedArgs, kw_only=True, frozen=True):
    """The result of resolving EngineArgs against a model and a machine. Every choice is made.

    `host_bytes` are those of each rank that hold pages beside the device's. With a `disk_tier` these pages go to a disk as well.
    """

    model_path: str
    tokenizer_path: str
    dtype: Dtype
    device: Literal["cpu", "cuda"]
    max_model_len: int
    kv_cache_dtype: KVDtype
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: Literal["fcfs", "priority"]
    load_format: Literal["auto", "dummy"]
    max_in_flight: int
    max_cpu_loras: int = 1
    host_bytes: int = 0
    offload_prompt_only: bool = True
    disk_tier: DiskTierConfig | None = None
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_events: KVEventsConfig | None = None
    exchange: ExchangeConfig | None = None
    speculative: SpeculativeConfig | None = None

    @property
    def adapts_drafts(self) -> bool:
        """Whether the number of drafts follows from what steps cost and how often drafts are right."""
        return self.speculative is not None and not self.speculative.num_speculative_tokens_per_batch_size

    @property
    def prices_steps(self) -> bool:
        """Whether the engine learns what steps cost."""
        return self.target_itl_ms is not None or self.adapts_drafts


def engine_args(**values: object) -> EngineArgs:
    """EngineArgs from keyword arguments. Raises ConfigError that names an unknown one and the nearest known one."""
    known = EngineArgs.__struct_fields__
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"Unknown engine argument {name!r}.{hint}")
    return EngineArgs(**values)  # type: ignore[arg-type]
