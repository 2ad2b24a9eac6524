"""`pagerunner plan`: how a model would use memory, from its `config.json` alone."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pagerunner.cli.options import (
    PLAN_FIELDS,
    Parser,
    UnreadableError,
    add_common_options,
    add_engine_options,
    engine_args,
    parse_bytes,
)
from pagerunner.cli.session import demo_model_path, note, one_model
from pagerunner.demo import find_model
from pagerunner.errors import CapacityError, ConfigError, PagerunnerError
from pagerunner.memory.units import human_bytes

if TYPE_CHECKING:
    from pagerunner.engine.startup.resolve import Resolved

_MOST_MEMORY = 2**44  # the drawing keeps a number for each slab


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser("pagerunner plan", "Show how a model would use memory. Needs its config.json: no weights, no GPU.")
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="model directory, config.json, hub name or a demo's"
    )
    parser.add_argument("--model", help="the same as MODEL")
    memory_help = "memory of another machine's device, a GPU unless --device is cpu (default: this machine's)"
    parser.add_argument("--memory", type=_memory, metavar="SIZE", help=memory_help)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", metavar="FILE", help="also draw the page memory, filled with requests, into FILE")
    add_engine_options(parser, only=PLAN_FIELDS)
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Print the plan."""
    model = one_model(namespace)
    if model is None:
        note(namespace, "No model named: planning for the demo model inside the package.")
        model = str(demo_model_path())
    from pagerunner.engine.startup.hub import fetch_config, fetch_drafter

    place = fetch_config(
        find_model(model)[0], getattr(namespace, "revision", None), getattr(namespace, "download_dir", None)
    )
    with _directory(place) as directory:
        args = fetch_drafter(engine_args(namespace, directory), weights=False)
        from pagerunner.engine.startup.machine import resolve_device
        from pagerunner.engine.startup.resolve import resolve
        from pagerunner.memory.drawing import arena_svg, arena_text, packed_state
        from pagerunner.memory.report import plan_json, plan_table

        try:
            resolved = resolve(args, namespace.memory, plan_only=True)
        except CapacityError as error:
            if namespace.memory is not None or resolve_device(args.device) == "cuda":
                raise
            raise CapacityError(
                f"{error} This is for the CPU here; --memory 80GiB plans for a GPU of this size."
            ) from None
        refusal = _refusal(resolved)
        if Path(place).is_file():
            refusal = refusal.replace(str(Path(directory) / "config.json"), place)
    plan, quantization = resolved.plan, resolved.model.quantization
    state = packed_state(plan) if namespace.svg is not None or not namespace.json else None
    if namespace.svg is not None and state is not None:
        _write(namespace.svg, arena_svg(plan, state))
    if namespace.json or state is None:
        config = resolved.config
        planned = {
            "device": config.device,
            "tensor_parallel_size": config.tensor_parallel_size,
            "pipeline_parallel_size": config.pipeline_parallel_size,
            "enable_expert_parallel": config.enable_expert_parallel,
            "data_parallel_size": config.data_parallel_size,
            "dtype": config.dtype,
            "quantization": quantization,
            "refused": refusal,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_num_batched_tokens_offline": resolved.offline_tokens,
        }
        print(json.dumps({**plan_json(plan), **planned}, indent=2))
    else:
        print(f"{_heading(namespace, resolved, refusal)}\n{plan_table(plan)}\n\n{arena_text(plan, state)}")
    return 0


def _heading(namespace: argparse.Namespace, resolved: Resolved, refusal: str) -> str:
    """What the plan is for, and what it leaves out."""
    config = resolved.config
    where = "a CUDA device" if config.device == "cuda" else "a CPU"
    memory = (
        f"{where} with {human_bytes(namespace.memory)}" if namespace.memory is not None else f"{where}, this machine's"
    )
    lines = [f"{resolved.model.family} in {config.dtype}, {config.kv_cache_dtype} pages, on {memory}"]
    shared = ", which share that memory" if config.device == "cpu" else ""
    if (several := config.data_parallel_size) > 1:
        what = f"{several} engines{shared or ', each with devices of its own'}. The numbers are those of each engine."
        if config.teams > 1:
            what = f"{several} teams, each with requests and pages of its own."
        whole = several * resolved.plan.max_concurrency
        lines.append(f"{what} All of them together hold {whole:,.2f} requests of full length.")
    if config.num_ranks > 1:
        experts = " Each has whole experts." if config.enable_expert_parallel else ""
        each = shared or ", each with a device of its own"
        lines.append(f"Divided among {config.num_ranks} ranks{each}.{experts} The numbers are those of each rank.")
        if config.device == "cuda" and namespace.memory is None:
            lines += _missing_devices(resolved)
    if len(resolved.stages) > 1:
        layers = ", ".join(f"{own.start} to {own.stop - 1}" for own in resolved.stages)
        lines.append(f"Stages have the layers {layers}. Pages and weights are planned for the largest stage.")
    if config.device == "cuda":
        lines.append("Kernels, activations and graphs are measured at start and come out of the pages' memory.")
    if resolved.offline_tokens != config.max_num_batched_tokens:
        lines.append(
            f"Steps have up to {config.max_num_batched_tokens:,} tokens, as those of `serve`. `LLM` takes steps of {resolved.offline_tokens:,} "
            f"here, which leaves less to pages: --max-num-batched-tokens {resolved.offline_tokens} plans for them."
        )
    return "\n".join([*lines, *([refusal] if refusal else []), ""])


def _missing_devices(resolved: Resolved) -> list[str]:
    """What the engine would say here, if this machine hasn't the devices."""
    from pagerunner.engine.startup.cluster import check_cluster
    from pagerunner.engine.startup.machine import check_devices

    of_ray = resolved.args.distributed_executor_backend == "ray"
    try:
        (check_cluster if of_ray else check_devices)(resolved.args)
    except ConfigError as error:
        return [f"It wouldn't start {'in this cluster' if of_ray else 'on this machine'}: {error}"]
    return []


def _refusal(resolved: Resolved) -> str:
    """What a server would say of weights that it refuses; empty where it doesn't."""
    if resolved.model.quantization is None or resolved.model.format is not None:
        return ""
    from pagerunner.models.configs.reader import read_model_config

    try:
        read_model_config(resolved.model.path)
    except PagerunnerError as error:
        return f"Memory can be planned, but these weights can't be served. {error}"
    return ""


def _memory(text: str) -> int:
    size = parse_bytes(text)
    if size > _MOST_MEMORY:
        raise UnreadableError(f"{text} is more than any device has ({human_bytes(_MOST_MEMORY)} at most)")
    if size < 2**20:
        unit = f"; {text}GiB has a unit" if text.isdecimal() and size else ""
        raise UnreadableError(f"{text} is {human_bytes(size)}, in which nothing fits{unit}")
    return size


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {file} can't be written: {error.strerror}.") from None


@contextmanager
def _ending_with_clean_up() -> Iterator[None]:
    """SIGTERM, as of `timeout`, ends what runs inside by an exception. By itself it would leave the directory there."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _directory(model: str) -> Iterator[str]:
    """The model's directory; a config file that isn't called config.json gets one for itself."""
    path = Path(model)
    if not path.is_file():
        yield model
    elif path.name == "config.json":
        yield str(path.parent)
    else:
        with _ending_with_clean_up(), tempfile.TemporaryDirectory(prefix="pagerunner-plan-") as directory:
            copy = Path(directory) / "config.json"
            shutil.copyfile(path, copy)
            second = path.parent / "hf_quant_config.json"
            if second.is_file():  # of the same repository, as read_model_config reads it
                shutil.copyfile(second, copy.with_name(second.name))
            try:
                yield directory
            except PagerunnerError as error:  # the message is to name the files that were given
                named = str(error).replace(str(copy), str(path)).replace(directory, str(path.parent))
                raise type(error)(named) from None
