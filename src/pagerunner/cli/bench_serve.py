"""`pagerunner bench serve`: load a server that has an OpenAI API, with vLLM's flags."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from pagerunner.bench.clients import ClientShare, Outcome, ceiling, measure
from pagerunner.bench.drafts import draft_counts
from pagerunner.bench.http_client import Timeouts
from pagerunner.bench.serve_data import DATASETS, ServeRequest, custom_requests, random_requests, sharegpt_requests
from pagerunner.bench.serving import DETAILS, METRICS, Planned, Sample, Target, arrivals, report, series, summarize
from pagerunner.cli.options import (
    Parser,
    add_common_options,
    decimal,
    not_negative,
    parse_number,
    port_number,
    positive,
    seconds,
)
from pagerunner.cli.session import note, server_url, show_progress
from pagerunner.demo import find_model
from pagerunner.errors import ConfigError

_SAMPLING = {
    "--top-p": decimal,
    "--top-k": parse_number,
    "--min-p": decimal,
    "--frequency-penalty": decimal,
    "--presence-penalty": decimal,
    "--repetition-penalty": decimal,
}
BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_RAMPS = ("linear", "exponential")
_GOODPUT = ("ttft", "tpot", "e2el")
_BUSY = 0.8
_ERRORS_NAMED = 3


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser("pagerunner bench serve", "Load a server with an OpenAI API, greedily unless told otherwise.")
    add = parser.add_argument
    add("--backend", default="openai", help="openai (completions; also called vllm) or openai-chat (default: openai)")
    add("--base-url", metavar="URL", help="the server (default: http://HOST:PORT)")
    add("--host", default="127.0.0.1", help="(default: %(default)s)")
    add("--port", type=port_number, default=8000, help="(default: %(default)s)")
    add("--endpoint", metavar="PATH", help="(default: the backend's)")
    add("--model", help="model directory, demo or served name (default: the first that the server names)")
    add("--served-model-name", metavar="NAME", help="name in requests, where it isn't --model")
    add("--lora-modules", nargs="+", default=[], metavar="NAME", help="adapters of the server; each request takes one")
    add("--tokenizer", metavar="DIR", help="tokenizer of random and sharegpt prompts (default: the model's)")
    add("--seed", type=not_negative, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    data = parser.add_argument_group("requests").add_argument
    data("--dataset-name", default="random", help=f"{', '.join(DATASETS)} (default: %(default)s)")
    data("--dataset-path", metavar="FILE", help="sharegpt: JSON; custom: lines of JSON with `prompt`")
    data("--num-prompts", type=positive, default=1000, metavar="N", help="(default: %(default)s)")
    data("--random-input-len", type=positive, default=1024, metavar="N", help="(default: %(default)s)")
    data("--random-output-len", type=positive, default=128, metavar="N", help="(default: %(default)s)")
    data("--input-len", type=positive, metavar="N", help="the same as --random-input-len")
    data("--output-len", type=positive, metavar="N", help="the output length of each data set")
    data("--random-range-ratio", type=decimal, default=0.0, metavar="X", help="lengths vary by this share (default: 0)")
    data("--random-prefix-len", type=not_negative, default=0, metavar="N", help="that all share (default: 0)")
    data("--sharegpt-output-len", type=positive, metavar="N", help="(default: as long as the recorded answers)")
    data("--custom-output-len", type=positive, default=256, metavar="N", help="(default: %(default)s)")
    data("--ignore-eos", action="store_true", help="generate up to the limit")
    data("--temperature", type=decimal, default=0.0, metavar="X", help="(default: 0, greedy)")
    for flag, convert in _SAMPLING.items():
        data(flag, type=convert, metavar="X", help="(default: the server's)")
    data("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields of every request")
    when = parser.add_argument_group("arrivals").add_argument
    when("--request-rate", type=decimal, default=math.inf, metavar="X", help="requests per second (default: inf)")
    when("--burstiness", type=decimal, default=1.0, metavar="X", help="1: Poisson, less: burstier (default: 1)")
    when("--max-concurrency", type=positive, metavar="N", help="most requests at once")
    when("--ramp-up-strategy", choices=_RAMPS, help="let the rate grow over the run")
    when("--ramp-up-start-rps", type=decimal, metavar="X", help="the rate at first")
    when("--ramp-up-end-rps", type=decimal, metavar="X", help="the rate at last")
    when("--num-clients", type=positive, default=1, metavar="N", help="processes that send them (default: 1)")
    when("--first-byte-timeout", type=seconds, default=3_600.0, metavar="S", help="of each request (default: 3600)")
    when("--request-timeout", type=seconds, default=21_600.0, metavar="S", help="of each request (default: 21600)")
    when("--num-warmups", type=not_negative, default=0, metavar="N", help="requests before (default: 0)")
    out = parser.add_argument_group("results").add_argument
    out("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=f"limits of {', '.join(_GOODPUT)} to count under")
    out("--ceilings", action="store_true", help="say what the clients reach with a server that answers at once")
    out("--percentile-metrics", default=",".join(METRICS), metavar="NAMES", help="(default: %(default)s)")
    out("--metric-percentiles", default="99", metavar="N,N,...", help="(default: %(default)s)")
    out("--save-result", action="store_true", help="write a JSON file with vLLM's keys")
    out("--save-detailed", action="store_true", help="with an entry for each request in it")
    out("--result-dir", default=".", metavar="DIR", help="(default: %(default)s)")
    out("--result-filename", metavar="FILE", help="(default: from backend, rate, model and time)")
    out("--plot", metavar="FILE", help="draw the latencies as SVG")
    out("--disable-tqdm", action="store_true", help="no progress bar")
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Send the requests, print the figures, write what was asked for. Raises ConfigError where no request was answered."""
    metrics, percentiles, goodput = _measures(namespace)
    namespace.random_input_len = namespace.input_len or namespace.random_input_len
    if namespace.output_len is not None:
        for name in ("random_output_len", "sharegpt_output_len", "custom_output_len"):
            setattr(namespace, name, namespace.output_len)
    times = _times(namespace)
    if namespace.backend not in BACKENDS:
        raise ConfigError(f"--backend must be one of {', '.join(BACKENDS)}, got {namespace.backend!r}.")
    _make_places(namespace)
    base = server_url(namespace.base_url or f"http://{namespace.host}:{namespace.port}")
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("PAGERUNNER_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    model, root = _find_model(namespace, base, headers)
    requests = _requests(namespace, [namespace.tokenizer, namespace.model, root])
    extra: dict[str, Any] = {"temperature": namespace.temperature, **namespace.extra_body}
    asked = {name: getattr(namespace, name) for name in (flag[2:].replace("-", "_") for flag in _SAMPLING)}
    extra |= {name: value for name, value in asked.items() if value is not None}
    if namespace.ignore_eos:
        extra["ignore_eos"] = True
    target = Target(
        url=base + (namespace.endpoint or BACKENDS[namespace.backend]),
        model=model,
        chat=namespace.backend == "openai-chat",
        extra=extra,
    )
    targets = _targets(namespace, target, len(requests))
    planned = [
        Planned(at, request.prompt_len, msgspec.Raw(own.body(request)))
        for at, request, own in zip(times, requests, targets, strict=True)
    ]
    timeouts = Timeouts(first_byte=namespace.first_byte_timeout, whole=namespace.request_timeout)
    most = namespace.max_concurrency
    share = ClientShare(url=target.url, headers=headers, requests=planned, max_concurrency=most, timeouts=timeouts)
    _warm_up(namespace, share)
    before = draft_counts(base, headers)
    outcome = _measured(namespace, share)
    after = draft_counts(base, headers)
    samples = outcome.samples
    if all(sample.error for sample in samples):
        raise ConfigError(f"No request was answered; the first failed with: {samples[0].error}")
    result = summarize(samples, outcome.seconds, metrics=metrics, percentiles=percentiles, goodput=goodput)
    if before is not None and after is not None:
        result |= after.since(before).result()
    result["client_busy"] = outcome.busy
    result["client_ceiling"] = ceiling(share, namespace.num_clients) if namespace.ceilings else None
    print(report(result, metrics, percentiles))
    if outcome.busy > _BUSY:
        note(
            namespace,
            f"The load generator computed {outcome.busy:.0%} of the time; more --num-clients may measure more.",
        )
    _write(namespace, model, result, [sample for sample in samples if not sample.error])
    if result["failed"]:
        for error, count in Counter(sample.error for sample in samples if sample.error).most_common(_ERRORS_NAMED):
            note(namespace, f"{count} of {len(samples)} requests failed: {error}")
    return 0


def _targets(namespace: argparse.Namespace, target: Target, count: int) -> list[Target]:
    """One for each request: the model, or one of the adapters at random."""
    if not namespace.lora_modules:
        return [target] * count
    own = random.Random(namespace.seed)
    return [msgspec.structs.replace(target, model=own.choice(namespace.lora_modules)) for _ in range(count)]


def _warm_up(namespace: argparse.Namespace, share: ClientShare) -> None:
    if namespace.num_warmups:
        first = [msgspec.structs.replace(one, at=0.0) for one in share.requests[: namespace.num_warmups]]
        warm = measure(msgspec.structs.replace(share, requests=first), 1, lambda: None)
        if warm.samples[0].error:
            raise ConfigError(f"The warm-up failed: {warm.samples[0].error}")


def _measured(namespace: argparse.Namespace, share: ClientShare) -> Outcome:
    shown = show_progress(namespace) and not namespace.disable_tqdm
    with tqdm(total=len(share.requests), desc="Requests", unit="req", disable=not shown) as bar:
        return measure(share, namespace.num_clients, lambda: bar.update())


def _measures(namespace: argparse.Namespace) -> tuple[list[str], list[float], dict[str, float]]:
    metrics = [name.strip() for name in namespace.percentile_metrics.split(",")]
    if unknown := sorted(set(metrics) - METRICS.keys()):
        raise ConfigError(f"--percentile-metrics: there are {', '.join(METRICS)}, not {unknown[0]!r}.")
    goodput: dict[str, float] = {}
    try:
        percentiles = [float(share) for share in namespace.metric_percentiles.split(",")]
        for pair in namespace.goodput:
            name, _, limit = pair.partition(":")
            goodput[name] = float(limit)
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles are like 50,99 and --goodput like ttft:200: {error}.") from error
    if not all(0 <= share <= 100 for share in percentiles) or not all(limit > 0 for limit in goodput.values()):
        raise ConfigError("--metric-percentiles lie in [0, 100], and limits of --goodput above 0.")
    if unknown := sorted(goodput.keys() - set(_GOODPUT)):
        raise ConfigError(f"--goodput: there are {', '.join(_GOODPUT)}, not {unknown[0]!r}.")
    return metrics, percentiles, goodput


def _times(namespace: argparse.Namespace) -> list[float]:
    if not namespace.request_rate > 0 or not 0 < namespace.burstiness < math.inf:
        raise ConfigError("--request-rate and --burstiness must be above 0.")
    ramp = None
    first, last = namespace.ramp_up_start_rps, namespace.ramp_up_end_rps
    if namespace.ramp_up_strategy is not None:
        if first is None or last is None or not (0 < first < math.inf and 0 < last < math.inf):
            raise ConfigError("A ramp needs --ramp-up-start-rps and --ramp-up-end-rps above 0.")
        if namespace.request_rate != math.inf:
            raise ConfigError("--ramp-up-strategy replaces --request-rate; leave one out.")
        ramp = (namespace.ramp_up_strategy, first, last)
    elif first is not None or last is not None:
        raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
    return arrivals(namespace.num_prompts, namespace.request_rate, namespace.burstiness, namespace.seed, ramp)


def _find_model(namespace: argparse.Namespace, base: str, headers: dict[str, str]) -> tuple[str, str | None]:
    """The name to send, and the directory that the server says the model is in."""
    import httpx

    try:
        response = httpx.get(f"{base}/v1/models", headers=headers, timeout=30)
        if response.status_code in (401, 403):
            raise ConfigError(f"The server at {base} wants a key; set OPENAI_API_KEY.")
        response.raise_for_status()
        cards = response.json()["data"]
        root = next((card.get("root") for card in cards if not card.get("parent")), None)
        # an adapter's is its base's
        names = {card["id"]: root if card.get("parent") else card.get("root") for card in cards}
        first = cards[0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"No model server answers at {base}/v1/models: {error}") from error
    name = namespace.served_model_name or namespace.model or first
    known = ", ".join(names)
    if others := [one for one in namespace.lora_modules if one not in names]:
        raise ConfigError(f"--lora-modules: the server serves {known}, not {others[0]}.")
    if name not in names:
        raise ConfigError(f"The server serves {known}, not {name}; say so with --served-model-name.")
    return name, names[name]


def _requests(namespace: argparse.Namespace, places: Sequence[str | None]) -> list[ServeRequest]:
    name, count, path = namespace.dataset_name, namespace.num_prompts, namespace.dataset_path
    as_chat = namespace.backend == "openai-chat"
    if name not in DATASETS:
        raise ConfigError(f"--dataset-name must be one of {', '.join(DATASETS)}, got {name!r}.")
    if name != "random" and path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path.")
    if name == "custom":
        return custom_requests(path, count, output_len=namespace.custom_output_len, as_chat=as_chat)
    from pagerunner.text.tokenizer import Tokenizer

    found = [find_model(place)[0] for place in places if place is not None]
    directory = next((place for place in found if (Path(place) / "tokenizer.json").is_file()), None)
    if directory is None:
        raise ConfigError(f"--dataset-name {name} needs the model's tokenizer; name its directory with --tokenizer.")
    coder = Tokenizer.from_path(directory)
    if name == "sharegpt":
        wanted = namespace.sharegpt_output_len
        return sharegpt_requests(coder, path, count, output_len=wanted, as_chat=as_chat, seed=namespace.seed)
    return random_requests(
        coder,
        count,
        input_len=namespace.random_input_len,
        output_len=namespace.random_output_len,
        range_ratio=namespace.random_range_ratio,
        prefix_len=namespace.random_prefix_len,
        as_chat=as_chat,
        seed=namespace.seed,
    )


def _make_places(namespace: argparse.Namespace) -> None:
    """Make the directory of results, and see that files can be made there and beside the plot: after the requests it is too late."""
    saved = Path(namespace.result_dir) / (namespace.result_filename or "result")
    places = [saved.parent] if namespace.save_result or namespace.save_detailed else []
    drawn = [Path(namespace.plot).parent] if namespace.plot and not Path(namespace.plot).exists() else []
    try:
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        for place in [*places, *drawn]:
            tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ConfigError(f"The result can't be written to {place}: {error.strerror}.") from error


def _write(namespace: argparse.Namespace, model: str, result: dict[str, Any], samples: list[Sample]) -> None:
    rate = "inf" if math.isinf(namespace.request_rate) else namespace.request_rate
    date = time.strftime("%Y%m%d-%H%M%S")
    facts = {
        "date": date,
        "backend": namespace.backend,
        "endpoint_type": namespace.backend,
        "model_id": model,
        "tokenizer_id": namespace.tokenizer or model,
        "num_prompts": namespace.num_prompts,
        "request_rate": rate,
        "burstiness": namespace.burstiness,
        "max_concurrency": namespace.max_concurrency,
        "num_clients": namespace.num_clients,
    }
    kept = {name: value for name, value in result.items() if namespace.save_detailed or name not in DETAILS}
    limit = f"-concurrency{namespace.max_concurrency}" if namespace.max_concurrency else ""
    name = f"{namespace.backend}-{rate}qps{limit}-{Path(model).name}-{date}.json"
    try:
        if namespace.save_result or namespace.save_detailed:
            file = Path(namespace.result_dir) / (namespace.result_filename or name)
            file.write_text(json.dumps({**facts, **kept}), encoding="utf-8")
            note(namespace, f"Wrote {file}.")
        if namespace.plot:
            from pagerunner.bench.latency_plot import latency_svg

            panels = {METRICS[one][0]: series(samples, one) for one in METRICS}
            title = f"{model}: {result['completed']:,} requests at {rate}/s{limit.replace('-', ', ')}"
            Path(namespace.plot).write_text(latency_svg(title, panels), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The result can't be written: {error}.") from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
