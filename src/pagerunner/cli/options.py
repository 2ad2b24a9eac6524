"""Flags: the engine's are made from `EngineArgs` in one place, so a field and its flag can't drift apart."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin

import msgspec

from pagerunner.config import EngineArgs
from pagerunner.errors import ConfigError
from pagerunner.vllm_flags import REFUSED, screen

# In the order of --help: what most people set, then the rest by what it is about.
ENGINE_OPTIONS: dict[str, dict[str, str]] = {
    "common options": {
        "served_model_name": "name of the model in answers and metrics",
        "dtype": "what weights and activations are computed in: auto (the checkpoint's), float32, bfloat16, float16",
        "max_model_len": "longest prompt plus output in tokens; auto or -1 takes the longest that fits the memory",
        "gpu_memory_utilization": "share of the device's memory to use, if no size is given",
        "max_num_seqs": "most requests that run at the same time",
    },
    "model": {
        "tokenizer": "directory or hub name of the tokenizer, if it isn't the model's",
        "revision": "branch, tag or commit of a model on the hub",
        "tokenizer_revision": "the same for --tokenizer",
        "download_dir": "cache of what the hub sends, instead of the hub's own",
        "chat_template": "chat template, or a file with one, to use instead of the checkpoint's",
        "generation_config": "auto takes sampling defaults from the checkpoint, vllm ignores them",
        "load_format": "auto, safetensors, or dummy for small random weights",
        "quantization": "round weights in floats while loading (fp8, fp8_per_block, int8_per_channel_weight_only); or name the checkpoint's format",
        "activation_quantization": "auto rounds activations where the checkpoint's format says so, none keeps them in dtype",
        "hf_overrides": 'fields to replace in config.json: JSON such as {"rope_theta": 1000000}; null passes a field over',
        "pooler_config": 'how hidden states become embeddings, over the checkpoint\'s files: JSON such as {"pooling_type": "LAST"}',
        "seed": "seed of requests that don't bring one, and of dummy weights",
    },
    "memory": {
        "kv_cache_memory_bytes": "memory for pages, for example 10GiB or 512MiB",
        "num_gpu_blocks_override": "number of pages of the largest group; beats every other memory flag",
        "kv_cache_dtype": "what keys and values are stored in: auto (the model's), float32, bfloat16, float16, fp8 (fp8_e4m3), fp8_e5m2",
        "block_size": "tokens in a page",
        "enable_prefix_caching": "reuse the pages of a common prefix",
        "enable_sleep_mode": "keep weights and pages where sleep can free them",
        "kv_offloading_size": "GiB of host memory, of all ranks together, for pages of prompts that leave the device",
        "kv_offloading_backend": "what takes pages to host memory: native",
        "kv_transfer_config": 'the same in vLLM\'s words: JSON such as {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"cpu_bytes_to_use": 85899345920}}; PeerConnector lends pages to other engines and pulls theirs',
        "kv_cache_metrics_sample": "share of pages of which /metrics says how long they stay; --kv-cache-metrics is 0.01",
        "kv_events_config": 'publish what the prefix cache holds: JSON such as {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}',
        "poison_fresh_pages": "fill fresh pages with NaN, to prove that nothing reads them before it writes",
    },
    "scheduling": {
        "max_num_batched_tokens": "most tokens of one step",
        "enable_chunked_prefill": "run long prompts in pieces, mixed with running requests",
        "scheduling_policy": "fcfs or priority",
        "max_in_flight": "steps scheduled before the first one's tokens are read",
        "target_itl_ms": "milliseconds between tokens: pieces of prompts beside requests that generate are as long as this allows",
    },
    "execution": {
        "device": "auto, cpu or cuda",
        "tensor_parallel_size": "ranks that every layer is divided among, on GPUs one for each",
        "pipeline_parallel_size": "stages that the layers are divided among, each with tensor_parallel_size ranks",
        "enable_expert_parallel": "give each rank whole experts instead of a part of every expert",
        "distributed_executor_backend": "where ranks run: mp (processes of this machine) or ray (machines of a Ray cluster)",
        "disable_custom_all_reduce": "add up what ranks on GPUs have by NCCL alone, and not by pagerunner's own kernel",
        "data_parallel_size": "engines behind one server, each with all weights and, on GPUs, devices of its own; with --enable-expert-parallel one engine, whose experts "
        "are divided among all ranks, and as many teams of ranks, each with requests of its own",
        "batch_invariant": "make log-probabilities bitwise the same whatever else a step computes",
        "attention_backend": "attention implementation; auto takes the first that supports the model",
        "speculative_config": 'draft tokens, of which one step takes several: JSON such as {"method": "ngram", "num_speculative_tokens": 4}; '
        "--spec-method, --spec-model and --spec-tokens set a key each",
        "structured_outputs_config": 'defaults of structured outputs: JSON such as {"disable_any_whitespace": true}',
        "weight_transfer_config": 'how a trainer sends new weights: JSON, {"backend": "nccl"} or {"backend": "gloo"}',
        "enforce_eager": "don't capture CUDA graphs",
        "cudagraph_capture_sizes": "numbers of requests to capture decode steps for, for example 1,2,4,8",
    },
    "adapters": {
        "enable_lora": "let requests name LoRA adapters, see --lora-modules of serve",
        "max_loras": "adapters whose requests run at the same time",
        "max_cpu_loras": "adapters that are kept in host memory (default: as many as --max-loras)",
        "max_lora_rank": "highest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512",
        "lora_target_modules": "ends of the names of modules that adapters may have (default: all)",
    },
    "logging": {
        "disable_log_stats": "log no statistics",
        "per_request_spec_decode_metrics": "what answers tell of their drafted tokens: none, summary, or detailed (each step)",
    },
}
# Every verb needs text, or none does: that is the verb's choice and not the user's.
NO_FLAG: frozenset[str] = frozenset({"model", "skip_tokenizer_init"})
_SERVER_ONLY = frozenset(
    {
        "served_model_name",
        "pooler_config",
        "structured_outputs_config",
        "kv_cache_metrics_sample",
        "kv_events_config",
        "per_request_spec_decode_metrics",
    }
)
# What `generate`, `chat` and `eval` have no use for.
ADAPTERS = frozenset({"lora_target_modules", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"})
TEXT_EXCLUDED = _SERVER_ONLY | ADAPTERS | {"enable_sleep_mode", "weight_transfer_config"}
BENCH_EXCLUDED = (
    _SERVER_ONLY
    | ADAPTERS
    | {"weight_transfer_config", "tokenizer", "tokenizer_revision", "generation_config", "chat_template"}
)
PLAN_FIELDS = frozenset(
    """dtype max_model_len gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override kv_cache_dtype block_size
    max_num_seqs max_num_batched_tokens max_in_flight quantization hf_overrides device speculative_config tensor_parallel_size pipeline_parallel_size
    enable_expert_parallel data_parallel_size distributed_executor_backend revision download_dir kv_offloading_size kv_transfer_config
    enable_lora max_loras max_cpu_loras max_lora_rank lora_target_modules""".split()
)
# vLLM's
_SHORT: dict[str, tuple[str, ...]] = {
    "quantization": ("-q",),
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "enable_expert_parallel": ("-ep",),
    "data_parallel_size": ("-dp",),
    "speculative_config": ("-sc",),
}
SPEC_FLAGS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
"""vLLM's flags for keys of --speculative-config."""
_SPEC = "--speculative-config"
_UNITS = {"": 1}
for _power, _unit in enumerate("kmgt", 1):
    _UNITS |= {_unit: 1000**_power, _unit.upper(): 1024**_power}


class UnreadableError(argparse.ArgumentTypeError, ValueError):
    """A flag's text isn't what its flag takes. argparse shows the message."""


def parse_number(text: str) -> int:
    """A whole number with an optional unit: `16`, `32k` (thousands), `32K` (1024s).

    Raises:
        UnreadableError: `text` is something else; the message says what is understood.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if match is None:
        raise UnreadableError(f"{text!r} is not a whole number such as 4096, 32k or 32K")
    return _whole(text, match[1], _UNITS[match[2]])


def parse_bytes(text: str) -> int:
    """A size in bytes: `1048576`, `512MiB`, `10GiB`, `10GB` (decimal), `10G` (binary, as in vLLM).

    Raises:
        UnreadableError: `text` is something else; the message says what is understood.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?)B|([kmgtKMGT]?)|B)", text.strip())
    if match is None:
        raise UnreadableError(f"{text!r} is not a size such as 10GiB, 512MiB or 1048576")
    number, unit, binary, short = match.groups()
    if unit is None:
        return _whole(text, number, _UNITS[short or ""])
    return _whole(text, number, _UNITS[unit.upper() if binary else unit.lower()])


def _whole(text: str, number: str, factor: int) -> int:
    if "." not in number:
        return int(number) * factor
    value = float(number) * factor
    if not value.is_integer():
        raise UnreadableError(f"{text!r} is not a whole number")
    return int(value)


def _parse_length(text: str) -> int | str:
    return "auto" if text == "auto" else parse_number(text)


def _parse_sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(size) for size in text.split(","))


class _Sizes(argparse.Action):
    """Numbers with blanks between, as in vLLM, or commas, or both."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, tuple(size for sizes in values for size in sizes))


def positive(text: str, least: int = 1) -> int:
    """A whole number of at least `least`.

    Raises:
        UnreadableError: `text` is something else.
    """
    value = parse_number(text)
    if value < least:
        raise UnreadableError(f"must be at least {least}, got {value}")
    return value


not_negative = functools.partial(positive, least=0)


def decimal(text: str) -> float:
    """A number with or without a fraction. Raises UnreadableError for anything else."""
    try:
        return float(text)
    except ValueError:
        raise UnreadableError(f"{text!r} is not a number such as 0.9 or 30") from None


def seconds(text: str) -> float:
    """A time that can be waited for. Raises UnreadableError for anything else."""
    value = decimal(text)
    if not 0 < value < 1e9:
        raise UnreadableError(f"must be more than 0 and less than 1e9 seconds, got {text}")
    return value


def port_number(text: str) -> int:
    """A TCP port, or 0 for any that is free. Raises UnreadableError for anything else."""
    value = parse_number(text)
    if not 0 <= value <= 65535:
        raise UnreadableError(f"must be in [0, 65535], got {value}")
    return value


def _joined(words: Sequence[str], known: Collection[str]) -> list[str]:
    """vLLM's dotted flags as the JSON that they are parts of: `--flag.key.inner value`. With `key+` a value is one more of a list, or several with
    commas between. A value that isn't JSON is text.

    Raises:
        ConfigError: one has no value, or contradicts another.
    """
    kept: list[str] = []
    whole: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=")
        flag, dot, path = name.partition(".")
        flag = _dashed(flag)
        if flag in SPEC_FLAGS and _SPEC in known:
            flag, dot, path = _SPEC, ".", SPEC_FLAGS[flag]
        if word == "--":
            kept += [word, *rest]
        elif not dot or (flag not in known and flag not in REFUSED) or not flag.startswith("--"):
            kept.append(word)
        else:
            value = text if equals else next(rest, None)
            if value is None:
                raise ConfigError(f"{name} needs a value, such as {name} 1.")
            place: Any = whole.setdefault(flag, {})
            *outer, last = path.removesuffix("+").split(".")
            for key in outer:
                place = place.setdefault(key, {}) if isinstance(place, dict) else place
            if not isinstance(place, dict) or (
                last in place and not (path.endswith("+") and isinstance(place[last], list))
            ):
                more = f"one more of a list is {name.removesuffix('+')}+" if "." in name else f"it is {flag}.{path}"
                raise ConfigError(f"{name} contradicts another {flag}.; each key has one value, and {more}.")
            if path.endswith("+"):
                place.setdefault(last, []).extend(map(_json_or_text, value.split(",")))
            else:
                place[last] = _json_or_text(value)
    if _SPEC in whole:
        whole[_SPEC] = _with_json(kept, whole[_SPEC])
    for flag, keys in whole.items():
        if any(_dashed(word).partition("=")[0] == flag for word in kept):
            raise ConfigError(f"{flag} is given as JSON and by its keys ({flag}.{next(iter(keys))}); give one of them.")
    return [*(f"{flag}={json.dumps(keys)}" for flag, keys in whole.items()), *kept]


def _with_json(words: list[str], keys: dict[str, Any]) -> dict[str, Any]:
    """`keys` of --speculative-config with those of its JSON, which is taken out of `words`. vLLM lets both be given, if their keys differ."""
    for place, word in enumerate(words):
        name, equals, text = word.partition("=")
        if word == "--":
            break
        if _dashed(name) not in (_SPEC, *_SHORT["speculative_config"]):
            continue
        given = text if equals else "".join(words[place + 1 : place + 2])
        del words[place : place + 2 - len(equals)]
        whole = _json_or_text(given)
        if not isinstance(whole, dict):
            raise ConfigError(f"{_SPEC} must be JSON of keys and values, got {given!r}.")
        if twice := keys.keys() & {key.replace("-", "_") for key in whole}:
            raise ConfigError(f"{_SPEC} has {min(twice)} in its JSON and as a flag; give one of them.")
        return whole | keys
    return keys


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are `ConfigError`s of one sentence, and which names the nearest flag.

    Flags may be written with underscores, as vLLM allows; they can't be abbreviated.
    """

    def __init__(self, prog: str, description: str, **kwargs: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message} (see `{self.prog} --help`).")

    def parse(self, argv: Sequence[str], *, tell: bool = True, whole: bool = True) -> argparse.Namespace:
        """Parse `argv`; flags and positional arguments may be mixed. See `screen` for `tell` and `whole`.

        Raises:
            ConfigError: a flag is unknown, incomplete, or has a value that can't be read.
        """
        known = {option for action in self._actions for option in action.option_strings}
        words = screen([_dashed(word) for word in _joined(argv, known)], known, tell=tell, whole=whole)
        namespace, extra = self.parse_known_intermixed_args(words)
        if extra:
            self.error(self._explain(extra))
        return namespace

    def option_names(self) -> list[str]:
        """Every `--flag` of this parser that has its own meaning (`--no-` forms are left out)."""
        names = [name for action in self._actions for name in action.option_strings[:1]]
        return sorted(name for name in names if name not in ("-h", "--help"))

    def _explain(self, extra: Sequence[str]) -> str:
        flag = next((word for word in extra if word.startswith("-") and word != "-"), None)
        if flag is None:
            found = checkpoint_of(extra[0])
            model = f"; name a model with --model {found}" if found else ""
            return f"unexpected argument {extra[0]!r}{model}"
        name = flag.split("=", 1)[0]
        known = [option for action in self._actions for option in action.option_strings]
        if (joined := re.fullmatch(r"(-[a-z]+)(\d+)", name)) and joined[1] in (*known, *REFUSED):
            return f"unknown flag {name}; did you mean {joined[1]} {joined[2]}?"
        near = difflib.get_close_matches(name, known, n=1)
        return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "")


def checkpoint_of(word: str) -> str | None:
    """The directory of a model that a word of a command line names, or of whose files it names one. None if there is none."""
    try:
        where = Path(word).parent if word.endswith((".json", ".safetensors")) and Path(word).is_file() else Path(word)
        return str(where) if word and (where / "config.json").is_file() else None
    except (OSError, ValueError):  # a prompt may be longer than names of files, or hold a NUL
        return None


def _dashed(word: str) -> str:
    if not re.match(r"--[a-z]", word):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def flag_of(field: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field.replace("_", "-")


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options of every verb; `--debug` is the program's own."""
    parser.add_argument("--quiet", action="store_true", help="no progress bars and no notes on stderr")


def add_engine_options(
    parser: argparse.ArgumentParser, *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> None:
    """A flag for each field of `EngineArgs` but `model`; what isn't given keeps the field's own default."""
    fields = {field.name: field for field in msgspec.structs.fields(EngineArgs)}
    for title, options in ENGINE_OPTIONS.items():
        for name, text in options.items():
            if name not in without and (only is None or name in only):
                _add_engine_option(parser, title, fields[name], text)


def _add_engine_option(
    parser: argparse.ArgumentParser, title: str, field: msgspec.structs.FieldInfo, text: str
) -> None:
    group = named_group(parser, title)
    default = "" if field.default is None else f" (default: {field.default})"
    text = (text + default).replace("%", "%%")
    flag, short = flag_of(field.name), _SHORT.get(field.name, ())
    if field.type is bool:
        group.add_argument(flag, *short, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    else:
        convert, shown = _converter(field.name, field.type)
        if field.name == "quantization" and not parser.prog.endswith(" serve"):
            short = ()  # other verbs have no -q, as --quiet would be expected of it
        several: dict[str, Any] = {"nargs": "+"} if field.name == "lora_target_modules" else {}
        if convert is _parse_sizes:
            several = {"nargs": "+", "action": _Sizes}
        group.add_argument(flag, *short, type=convert, metavar=shown, default=argparse.SUPPRESS, help=text, **several)


def add_lora_modules(parser: argparse.ArgumentParser) -> None:
    """The flag with adapters that a server loads; `parse_module` reads its values."""
    text = "adapters to load at the start: name=path, or JSON with name, path, base_model_name and is_3d_lora_weight; needs --enable-lora"
    named_group(parser, "adapters").add_argument("--lora-modules", nargs="+", default=(), metavar="MODULE", help=text)


def named_group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """The parser's group of options with this title, which is made if there is none yet."""
    found = [group for group in parser._action_groups if group.title == title]
    return found[0] if found else parser.add_argument_group(title)


def _converter(name: str, annotation: Any) -> tuple[Callable[[str], Any], str]:
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    if name == "max_model_len":
        return _parse_length, "TOKENS"
    if name.endswith("_sizes"):
        return _parse_sizes, "N,N,..."
    if name.endswith("_bytes"):
        return parse_bytes, "SIZE"
    if int in members:
        return parse_number, "N"
    if float in members:
        return decimal, "X"
    return str, "TEXT"


def engine_args(namespace: argparse.Namespace, model: str, **defaults: Any) -> EngineArgs:
    """The engine arguments that the flags in `namespace` ask for; flags beat `defaults`.

    Raises:
        ConfigError: a value is out of range.
    """
    names = {field.name for field in msgspec.structs.fields(EngineArgs)} - {"model"}
    given = {name: value for name, value in vars(namespace).items() if name in names}
    return EngineArgs(model=model, **{**defaults, **given})


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """The sampling flags of `generate` and `chat`; unset ones keep the checkpoint's or `SamplingParams`' default."""
    group = parser.add_argument_group("sampling options")
    suppress = argparse.SUPPRESS
    group.add_argument("--max-tokens", type=positive, metavar="N", default=max_tokens, help="(default: %(default)s)")
    group.add_argument(
        "--temperature", type=decimal, metavar="X", default=0.0, help="0 is greedy (default: %(default)s)"
    )
    group.add_argument(
        "--top-p", type=decimal, metavar="X", default=suppress, help="keep tokens up to this probability"
    )
    group.add_argument("--top-k", type=parse_number, metavar="N", default=suppress, help="keep N tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", default=suppress, help="stop at TEXT; repeatable")


SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "stop", "n", "ignore_eos")


def sampling_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """The `SamplingParams` fields that the flags in `namespace` set."""
    return {name: value for name, value in vars(namespace).items() if name in SAMPLING_FIELDS}
