"""`pagerunner bench throughput|latency`: the fixed workloads, or requests of given lengths."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from pagerunner.bench.runner import LatencyReport, ThroughputReport, latency, throughput
from pagerunner.bench.workloads import SHAPES, WORKLOADS, BenchRequest, uniform_workload, workload, write_model
from pagerunner.cli.options import (
    BENCH_EXCLUDED,
    Parser,
    add_common_options,
    add_engine_options,
    engine_args,
    not_negative,
    positive,
    reported,
)
from pagerunner.cli.session import find_model, note, open_llm, show_progress
from pagerunner.config import EngineArgs
from pagerunner.errors import ConfigError

_DEFAULTS = {"throughput": (3, 1), "latency": (10, 3)}


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser("pagerunner bench", "Measure throughput or latency: greedy, end of sequence ignored.")
    parser.add_argument("what", metavar="throughput|latency", help="many requests at once, or one batch at a time")
    parser.add_argument("--model", help="model directory, or a demo's name (default: random weights of --shape)")
    parser.add_argument("--shape", default="tiny", help=f"{', '.join(SHAPES)} (default: %(default)s)")
    names = "; ".join(f"{name}: {text}" for name, text in WORKLOADS.items())
    parser.add_argument("--workload", metavar="NAME", help=names)
    count = reported(positive)
    parser.add_argument("--num-prompts", type=count, metavar="N", help="throughput: requests (default: 32)")
    parser.add_argument("--batch-size", type=count, metavar="N", help="latency: requests of a batch (default: 8)")
    parser.add_argument("--input-len", type=count, metavar="N", help="tokens of each prompt (default: 32)")
    parser.add_argument("--output-len", type=count, metavar="N", help="tokens to generate (default: 128)")
    parser.add_argument("--num-iters", type=count, metavar="N", help="measured repetitions (default: 3 or 10)")
    parser.add_argument("--num-iters-warmup", type=reported(not_negative), metavar="N", help="(default: 1 or 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_options(parser, without=BENCH_EXCLUDED)
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Measure and print the report."""
    if namespace.what not in _DEFAULTS:
        raise ConfigError(f"bench measures throughput or latency, not {namespace.what!r}.")
    label, source = _requests(namespace)
    with tempfile.TemporaryDirectory(prefix="pagerunner-bench-") as directory:
        args = _engine_args(namespace, Path(directory))
        vocab_size = _vocab_size(args.model)
        note(namespace, f"Loading {namespace.model or f'random weights of shape {namespace.shape}'} ...")
        llm = open_llm(args, use_tqdm=show_progress(namespace))
        measure: Callable[..., ThroughputReport | LatencyReport]
        measure = throughput if namespace.what == "throughput" else latency
        repetitions, warmups = _DEFAULTS[namespace.what]
        report = measure(
            llm,
            lambda salt: source(vocab_size, salt),
            label=f"{namespace.model or namespace.shape} {label}",
            repetitions=namespace.num_iters or repetitions,
            warmups=warmups if namespace.num_iters_warmup is None else namespace.num_iters_warmup,
            rounds=_progress(namespace),
        )
    print(msgspec.json.encode(report).decode() if namespace.json else report.text())
    return 0


def _requests(namespace: argparse.Namespace) -> tuple[str, Callable[[int, int], Sequence[BenchRequest]]]:
    lengths = {"--input-len": namespace.input_len, "--output-len": namespace.output_len}
    count_flag = "--num-prompts" if namespace.what == "throughput" else "--batch-size"
    other_flag = "--batch-size" if namespace.what == "throughput" else "--num-prompts"
    if getattr(namespace, other_flag[2:].replace("-", "_")) is not None:
        raise ConfigError(f"{other_flag} doesn't apply to bench {namespace.what}; use {count_flag}.")
    lengths[count_flag] = getattr(namespace, count_flag[2:].replace("-", "_"))
    given = [flag for flag, value in lengths.items() if value is not None]
    name = namespace.workload
    if name is not None:
        if given:
            raise ConfigError(f"--workload {name} fixes the requests; leave out {', '.join(given)}.")
        if namespace.what == "latency":
            raise ConfigError("bench latency times batches of equal requests; --workload is for bench throughput.")
        workload(name, 1000)
        return name, lambda vocab_size, salt: workload(name, vocab_size, salt)
    count = lengths[count_flag] or (32 if namespace.what == "throughput" else 8)
    input_len, output_len = namespace.input_len or 32, namespace.output_len or 128
    label = f"{count} x {input_len} in, {output_len} out"
    return label, lambda vocab_size, salt: uniform_workload(count, input_len, output_len, vocab_size, salt)


def _engine_args(namespace: argparse.Namespace, directory: Path) -> EngineArgs:
    if namespace.model is not None:
        return engine_args(namespace, find_model(namespace.model)[0], skip_tokenizer_init=True)
    model = write_model(namespace.shape, directory)
    return engine_args(namespace, str(model), load_format="dummy", skip_tokenizer_init=True)


def _vocab_size(model: str) -> int:
    from pagerunner.models.config import read_model_config

    return int(read_model_config(Path(model)).vocab_size)


def _progress(namespace: argparse.Namespace) -> Callable[[int], Iterable[int]]:
    if not show_progress(namespace):
        return range
    from tqdm import trange

    return lambda count: trange(count, desc=f"bench {namespace.what}", unit="round", leave=False)
