"""`pagerunner bench throughput|latency|startup|sleep`: the fixed workloads, or requests of given lengths; or the engine itself."""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagerunner.bench.ceilings import measure_ceilings
from pagerunner.bench.experts import experts_read
from pagerunner.bench.floors import Ceilings, DenseModel
from pagerunner.bench.runner import Draws, LatencyReport, ThroughputReport, latency, throughput
from pagerunner.bench.shapes import QUANTIZED, SHAPES
from pagerunner.bench.sleep import SleepReport, device_free_bytes, measure_sleep
from pagerunner.bench.startup import StartupReport, measure_startup
from pagerunner.bench.workloads import WORKLOADS, BenchRequest, uniform_workload, workload, write_model
from pagerunner.cli.options import (
    BENCH_EXCLUDED,
    Parser,
    add_common_options,
    add_engine_options,
    decimal,
    engine_args,
    not_negative,
    positive,
)
from pagerunner.cli.session import fetched, note, open_llm, show_progress
from pagerunner.config import EngineArgs
from pagerunner.demo import find_model
from pagerunner.errors import ConfigError
from pagerunner.types import SamplingParams

if TYPE_CHECKING:
    from pagerunner.llm import LLM

Report = ThroughputReport | LatencyReport | StartupReport | SleepReport
_MEASURES = ("throughput", "latency", "startup", "sleep")
_DEFAULTS = {"throughput": (3, 1), "latency": (10, 3), "startup": (1, 0)}
_LENGTHS = (32, 128)  # of a prompt and of what is generated
# Which measures a flag of requests is for.
_REQUEST_FLAGS = {
    "workload": ("throughput",),
    "num_prompts": ("throughput",),
    "batch_size": ("latency",),
    "input_len": ("throughput", "latency"),
    "output_len": ("throughput", "latency"),
    "num_iters": ("throughput", "latency", "startup"),
    "num_iters_warmup": ("throughput", "latency"),
    "ceilings": ("throughput",),
    "temperature": ("throughput", "latency"),
    "top_p": ("throughput", "latency"),
    "top_k": ("throughput", "latency"),
}


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser(
        "pagerunner bench", "Measure throughput, latency, start-up or sleep; the end of a sequence is ignored."
    )
    what = "many requests at once, one batch at a time, fresh processes, sleep and wake; or a server's (`bench serve --help`)"
    parser.add_argument("what", metavar=f"{'|'.join(_MEASURES)}|serve", help=what)
    parser.add_argument("--model", help="model directory, hub name or a demo's (default: random weights of --shape)")
    shape_help = f"{', '.join(SHAPES)} (default: tiny); --quantization {' or '.join(QUANTIZED)} stores its weights so"
    parser.add_argument("--shape", help=shape_help)
    names = "; ".join(f"{name}: {text}" for name, text in WORKLOADS.items())
    parser.add_argument("--workload", metavar="NAME", help=names)
    parser.add_argument("--num-prompts", type=positive, metavar="N", help="throughput: requests (default: 32)")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="latency: requests of a batch (default: 8)")
    parser.add_argument("--input-len", type=positive, metavar="N", help="tokens of each prompt (default: 32)")
    parser.add_argument("--output-len", type=positive, metavar="N", help="tokens to generate (default: 128)")
    parser.add_argument("--num-iters", type=positive, metavar="N", help="measured repetitions (default: 3, 10 or 1)")
    parser.add_argument("--num-iters-warmup", type=not_negative, metavar="N", help="(default: 1 or 3)")
    parser.add_argument("--temperature", type=decimal, metavar="T", help="draw tokens at random (default: 0, greedy)")
    parser.add_argument(
        "--top-p", type=decimal, metavar="P", help="draw from the likeliest tokens that weigh P together"
    )
    parser.add_argument("--top-k", type=positive, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--ceilings", metavar="TB/S,TFLOP/S", help="what the device does at best (default: measured)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_options(parser, without=BENCH_EXCLUDED)
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Measure and print the report."""
    if namespace.what not in _MEASURES:
        raise ConfigError(f"bench measures {', '.join(_MEASURES[:-1])} or {_MEASURES[-1]}, not {namespace.what!r}.")
    for name, measures in _REQUEST_FLAGS.items():
        if getattr(namespace, name) is not None and namespace.what not in measures:
            raise ConfigError(_wrong_flag(name, namespace.what))
    if namespace.model and namespace.shape:
        raise ConfigError(f"--model {namespace.model} and --shape {namespace.shape} name two models; give one of them.")
    namespace.shape = namespace.shape or "tiny"
    if namespace.ceilings is not None:  # before anything is measured
        namespace.ceilings = Ceilings.parse(namespace.ceilings)
    with tempfile.TemporaryDirectory(prefix="pagerunner-bench-") as directory:
        args = _engine_args(namespace, Path(directory))
        report: Report
        if namespace.what == "startup":
            report = _startup(namespace, args)
        elif namespace.what == "sleep":
            report = _sleep(namespace, args)
        else:
            report = _requests_report(namespace, args)
    print(msgspec.json.encode(report).decode() if namespace.json else report.text())
    return 0


def _wrong_flag(name: str, what: str) -> str:
    flag = "--" + name.replace("_", "-")
    instead = {"num_prompts": "--batch-size", "batch_size": "--num-prompts"}.get(name)
    if instead is not None and what in ("throughput", "latency"):
        return f"{flag} doesn't apply to bench {what}; use {instead}."
    if name == "workload" and what == "latency":
        return "bench latency times batches of equal requests; --workload is for bench throughput."
    return f"{flag} doesn't apply to bench {what}; leave it out."


def _startup(namespace: argparse.Namespace, args: EngineArgs) -> StartupReport:
    note(namespace, "Starting with empty kernel caches, then with warm ones ...")
    values = {name: getattr(args, name) for name in args.__struct_fields__}
    return measure_startup(
        values, label=_model_name(namespace), repetitions=namespace.num_iters or _DEFAULTS["startup"][0]
    )


def _sleep(namespace: argparse.Namespace, args: EngineArgs) -> SleepReport:
    llm = _open(namespace, msgspec.structs.replace(args, enable_sleep_mode=True))
    devices = functools.partial(device_free_bytes, args.num_ranks)
    free = devices if llm.device == "cuda" else _host_free_bytes
    return measure_sleep(llm, free, label=_model_name(namespace))


def _host_free_bytes() -> int:
    from pagerunner.engine.startup.shares import available_memory

    return available_memory()


def _requests_report(namespace: argparse.Namespace, args: EngineArgs) -> ThroughputReport | LatencyReport:
    if namespace.what == "latency":
        return _measured(namespace, args, latency)
    from pagerunner.engine.startup.step_weights import counting

    with counting():
        return _measured(namespace, args, throughput)


def _measured(
    namespace: argparse.Namespace, args: EngineArgs, measure: Callable[..., ThroughputReport | LatencyReport]
) -> ThroughputReport | LatencyReport:
    label, source = _requests(namespace)
    draws = _draws(namespace)
    vocab_size = _vocab_size(args)
    llm = _open(namespace, args)
    need, most = (
        (namespace.input_len or _LENGTHS[0]) + (namespace.output_len or _LENGTHS[1]),
        llm.memory_plan.max_model_len,
    )
    if namespace.workload is None and need > most:  # before they are drawn
        raise ConfigError(
            f"--input-len and --output-len make {need:,} tokens, more than max_model_len, which is {most:,}."
        )
    if measure is throughput and args.num_ranks == 1:  # ranks are other processes
        from pagerunner.engine.startup.step_weights import touched_so_far

        measure = functools.partial(throughput, touched=lambda: touched_so_far(llm.device))
    repetitions, warmups = _DEFAULTS[namespace.what]
    report = measure(
        llm,
        lambda salt: source(vocab_size, salt),
        label=f"{_model_name(namespace)} ({_held(llm, args)}) {label}, {draws.text()}",
        repetitions=namespace.num_iters or repetitions,
        warmups=warmups if namespace.num_iters_warmup is None else namespace.num_iters_warmup,
        rounds=_progress(namespace),
        draws=draws,
    )
    if isinstance(report, ThroughputReport):
        return _with_limits(namespace, args, llm, report, source(vocab_size, 0))
    return report


def _draws(namespace: argparse.Namespace) -> Draws:
    """How tokens are chosen; `--seed` seeds them."""
    given = {name: getattr(namespace, name) for name in Draws._fields if getattr(namespace, name) is not None}
    draws = Draws(**given)
    if not draws.temperature and len(given) > ("temperature" in given):
        raise ConfigError("--top-p and --top-k need a --temperature above 0: without one the likeliest token is taken.")
    SamplingParams(**draws._asdict())  # whose sentence says what is out of range
    return draws


def _with_limits(
    namespace: argparse.Namespace,
    args: EngineArgs,
    llm: LLM,
    report: ThroughputReport,
    requests: Sequence[BenchRequest],
) -> ThroughputReport:
    """The report with what bounds it.

    That is the share of experts that a mixture's steps touched; and what the card allows, if there is a card, or ceilings are given.
    """
    from pagerunner.engine.startup.step_weights import StepWeights, step_bytes

    bounded, ranks = namespace.ceilings is not None or llm.device == "cuda", args.num_ranks
    specs = [part.spec for group in llm.memory_plan.groups for part in group.layers]
    touched, calls = report.touched
    mixture = StepWeights.read(args, llm.dtype, llm.device) if calls else None
    config: dict[str, Any] = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))
    dense = None
    if bounded:
        token_bytes = args.tensor_parallel_size * sum(spec.page_bytes(16) for spec in specs) // 16
        dense = DenseModel.read(config, step_bytes(args, llm.dtype, llm.device), token_bytes)
    if mixture is None and dense is None:
        return report
    ceilings = None
    if bounded:
        ceilings = namespace.ceilings or measure_ceilings()
        ceilings = ceilings.times(ranks) if llm.device == "cuda" else ceilings  # a device each; on a CPU they share it
    if mixture is not None:
        cached = report.cached_tokens
        experts = experts_read(mixture, touched, calls, ceilings, specs, requests, cached)
        report = msgspec.structs.replace(report, experts=experts)
    if dense is not None and ceilings is not None:
        floor = dense.floor(requests, report.cached_tokens, ceilings, report.best)
        report = msgspec.structs.replace(report, floor=floor)
    return report


def _open(namespace: argparse.Namespace, args: EngineArgs) -> LLM:
    note(namespace, f"Loading {namespace.model or f'random weights of shape {namespace.shape}'} ...")
    return open_llm(args, use_tqdm=show_progress(namespace))


def _held(llm: LLM, args: EngineArgs) -> str:
    """What the figures are of: the device, or ranks on devices, the dtype, and the format that was asked for."""
    sizes = {"tp": args.tensor_parallel_size, "pp": args.pipeline_parallel_size, "dp": args.teams}
    divided = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join([llm.device, *divided, llm.dtype, *([args.quantization] if args.quantization else [])])


def _model_name(namespace: argparse.Namespace) -> str:
    return str(namespace.model or namespace.shape)


def _requests(namespace: argparse.Namespace) -> tuple[str, Callable[[int, int], Sequence[BenchRequest]]]:
    count_flag = "--num-prompts" if namespace.what == "throughput" else "--batch-size"
    lengths = {
        "--input-len": namespace.input_len,
        "--output-len": namespace.output_len,
        count_flag: namespace.num_prompts if namespace.what == "throughput" else namespace.batch_size,
    }
    given = [flag for flag, value in lengths.items() if value is not None]
    name = namespace.workload
    if name is not None:
        if given:
            raise ConfigError(f"--workload {name} fixes the requests; leave out {', '.join(given)}.")
        if name not in WORKLOADS:
            raise ConfigError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}.")
        return name, lambda vocab_size, salt: workload(name, vocab_size, salt)
    count = lengths[count_flag] or (32 if namespace.what == "throughput" else 8)
    input_len, output_len = namespace.input_len or _LENGTHS[0], namespace.output_len or _LENGTHS[1]
    label = f"{count} x {input_len} in, {output_len} out"
    return label, lambda vocab_size, salt: uniform_workload(count, input_len, output_len, vocab_size, salt)


def _engine_args(namespace: argparse.Namespace, directory: Path) -> EngineArgs:
    if namespace.model is not None:
        return fetched(namespace, engine_args(namespace, find_model(namespace.model)[0], skip_tokenizer_init=True))
    model = write_model(namespace.shape, directory, getattr(namespace, "quantization", None))
    return engine_args(namespace, str(model), load_format="dummy", skip_tokenizer_init=True)


def _vocab_size(args: EngineArgs) -> int:
    from pagerunner.models.configs.reader import read_model_config

    return int(read_model_config(Path(args.model), hf_overrides=args.hf_overrides).vocab_size)


def _progress(namespace: argparse.Namespace) -> Callable[[int], Iterable[int]]:
    if not show_progress(namespace):
        return range
    from tqdm import trange

    return lambda count: trange(count, desc=f"bench {namespace.what}", unit="round", leave=False)
