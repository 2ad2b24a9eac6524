"""A client that loads a server with an OpenAI API the way `vllm bench serve` does, and measures how long its requests wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np

from pagerunner.bench import drafts
from pagerunner.bench.http_client import HttpClient, HttpFaultError, Timeouts
from pagerunner.bench.serve_data import ServeRequest

METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
"""Keys of a result that hold an entry per request."""
_ERROR_CHARS = 500


class Sample(msgspec.Struct, kw_only=True):
    """One request's fate. Times in seconds; `start` on the clock of the run, `error` is empty for an answer that is whole."""

    prompt_len: int
    start: float = 0.0
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = msgspec.field(default_factory=list)
    latency: float = 0.0
    text: str = ""
    error: str = ""
    retries: int = 0

    @property
    def tpot(self) -> float:
        """Mean time of the tokens after the first."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None

    def words(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning or self.delta.reasoning_content or ""


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _FailedError(Exception):
    """The server has answered, but not what was asked for."""


_decode = msgspec.json.Decoder(_Chunk).decode


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go and what they have in common; `chat` says which of the two endpoints' bodies they have."""

    url: str
    model: str
    chat: bool
    extra: dict[str, Any]

    def body(self, request: ServeRequest) -> bytes:
        """The JSON of one request."""
        what = {"messages": request.prompt} if self.chat else {"prompt": request.prompt}
        limit = {"max_completion_tokens" if self.chat else "max_tokens": request.output_len}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode({"model": self.model, **what, **limit, **stream, **self.extra})


class Planned(msgspec.Struct, frozen=True):
    """A request as it is sent, `at` seconds after the run's begin."""

    at: float
    prompt_len: int
    body: msgspec.Raw


class _Stream:
    """Reads one answer into its sample."""

    def __init__(self, sample: Sample, started: float) -> None:
        self._sample, self._started, self._last = sample, started, started
        self._status, self._rest = 0, b""
        self._pieces: list[str] = []
        self._done = False

    def __call__(self, status: int, data: bytes, now: float) -> None:
        """Take a piece of the body that came at `now`."""
        self._status = status
        self._rest += data
        if status != 200:
            return
        if b"\r" in self._rest:
            self._rest = self._rest.replace(b"\r\n", b"\n")
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                self._event(event[5:].strip(), now)

    def _event(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._done = True
            return
        chunk, sample = _decode(event), self._sample
        if chunk.error is not None:
            raise _FailedError(str(chunk.error)[:_ERROR_CHARS])
        if words := "".join([choice.words() for choice in chunk.choices]):
            if self._pieces:
                sample.itl.append(now - self._last)
            else:
                sample.ttft = now - self._started
            self._last = now
            self._pieces.append(words)
        if chunk.usage is not None:
            sample.prompt_len, sample.output_len = chunk.usage.prompt_tokens, chunk.usage.completion_tokens

    def check(self) -> None:
        """Raise _FailedError for an answer that isn't what was asked for."""
        if self._status != 200:
            raise _FailedError(f"HTTP {self._status}: {self._rest.decode(errors='replace')[:_ERROR_CHARS]}")
        if not self._done:
            raise _FailedError("The stream ended early.")

    def settle(self) -> None:
        """What the sample says of the whole answer, or of what there is of it."""
        sample = self._sample
        if not self._pieces:  # tokens without text still take their time
            self._last = time.perf_counter()
            sample.ttft = self._last - self._started
        sample.text = "".join(self._pieces)
        sample.latency = self._last - self._started
        sample.output_len = sample.output_len or len(self._pieces)


async def send(client: HttpClient, request: Planned, begin: float) -> Sample:
    """Send one request and time its answer. An error of any kind becomes the sample's `error`."""
    started = time.perf_counter()
    sample = Sample(prompt_len=request.prompt_len, start=started - begin)
    stream = _Stream(sample, started)
    try:
        sample.retries = await client.post(bytes(request.body), stream)
        stream.check()
    except (OSError, HttpFaultError, msgspec.MsgspecError, _FailedError) as error:
        sample.error = str(error) or type(error).__name__
    stream.settle()
    return sample


def arrivals(
    count: int, rate: float, burstiness: float, seed: int, ramp: tuple[str, float, float] | None = None
) -> list[float]:
    """When to send each request, in seconds from the start.

    Gaps are gamma-distributed around 1 / rate: burstiness 1 is a Poisson process, less is burstier, more evener. Without a
    ramp the last request goes at count / rate exactly. `ramp` is ("linear" or "exponential", first rate, last rate).
    """
    if ramp is None and math.isinf(rate):
        return [0.0] * count
    if ramp is None:
        rates = np.full(count, rate)
    else:
        strategy, first, last = ramp
        done = np.arange(count) / count
        rates = first + (last - first) * done if strategy == "linear" else first * (last / first) ** done
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rates * burstiness))
    times = np.cumsum(gaps)
    if ramp is None:
        times *= count / rate / times[-1]
    return [float(at) for at in times]


async def load(
    url: str,
    headers: Mapping[str, str],
    requests: Sequence[Planned],
    *,
    begin: float,
    max_concurrency: int | None,
    progress: Callable[[int, Sample], object],
    timeouts: Timeouts,
) -> None:
    """Send the requests at their times after `begin` (time.perf_counter), at most `max_concurrency` of them at once.

    `progress` gets each request's index and sample as it ends.
    """
    gate: AbstractAsyncContextManager[Any] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    client = HttpClient(url, headers, timeouts)

    async def one(index: int, request: Planned) -> None:
        async with gate:
            sample = await send(client, request, begin)
        progress(index, sample)

    async with asyncio.TaskGroup() as group:
        for index, request in enumerate(requests):
            if (wait := begin + request.at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(index, request))
    client.close()


def summarize(
    samples: Sequence[Sample],
    seconds: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """The figures of a run under the keys of vLLM's result files. `goodput` are limits in ms by metric."""
    good = [sample for sample in samples if not sample.error]
    inputs, outputs = sum(one.prompt_len for one in good), sum(one.output_len for one in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "retried": sum(one.retries for one in samples),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_meets(one, goodput) for one in good) / seconds if goodput else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(good),
        "input_lens": [one.prompt_len for one in samples],
        "output_lens": [one.output_len for one in samples],
        "ttfts": [one.ttft for one in samples],
        "itls": [one.itl for one in samples],
        "start_times": [one.start for one in samples],
        "generated_texts": [one.text for one in samples],
        "errors": [one.error for one in samples],
    }
    for name in metrics:
        values = 1e3 * np.array(series(good, name) or [0.0])
        result |= {f"mean_{name}_ms": float(values.mean()), f"median_{name}_ms": float(np.median(values))}
        result[f"std_{name}_ms"] = float(values.std())
        result |= {f"p{share:g}_{name}_ms": float(np.percentile(values, share)) for share in percentiles}
    return result


def series(samples: Iterable[Sample], metric: str) -> list[float]:
    """A metric's seconds: one value per request, but of inter-token latencies all of them."""
    match metric:
        case "itl":
            return [gap for one in samples for gap in one.itl]
        case "tpot":
            return [one.tpot for one in samples if one.output_len > 1]
        case "ttft":
            return [one.ttft for one in samples]
        case _:
            return [one.latency for one in samples]


def _meets(sample: Sample, limits: Mapping[str, float]) -> bool:
    values = {"ttft": sample.ttft, "tpot": sample.tpot, "e2el": sample.latency}
    return all(1e3 * values[name] <= limit for name, limit in limits.items())


def _peak_tokens(samples: Sequence[Sample]) -> float:
    """Most pieces of text that came in one second of the run."""
    times = [one.start + one.ttft + np.cumsum([0.0, *one.itl]) for one in samples if one.output_len]
    return float(np.bincount(np.concatenate(times).astype(int)).max()) if times else 0.0


def _peak_requests(samples: Sequence[Sample]) -> int:
    changes = sorted([(one.start, 1) for one in samples] + [(one.start + one.latency, -1) for one in samples])
    return int(np.cumsum([0] + [change for _, change in changes]).max())


def report(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures as lines for a person, worded as vLLM words them."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Retried requests:", result["retried"]),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.insert(7, ("Request goodput (req/s):", result["request_goodput"]))
    rows.append(("Load generator's core, busy (%):", 100 * result["client_busy"]))
    if result["client_ceiling"] is not None:
        rows.append(("Load generator's ceiling (req/s):", result["client_ceiling"]))
    lines = [" Serving Benchmark Result ".center(50, "="), *(_row(*row) for row in rows)]
    for name in metrics:
        title, short = METRICS[name]
        lines.append(title.center(50, "-"))
        lines += [
            _row(f"{kind.capitalize()} {short} (ms):", result[f"{kind}_{name}_ms"]) for kind in ("mean", "median")
        ]
        lines += [_row(f"P{share:g} {short} (ms):", result[f"p{share:g}_{name}_ms"]) for share in percentiles]
    if "spec_decode_num_drafts" in result:
        lines += ["Speculative Decoding".center(50, "-"), *(_row(*row) for row in drafts.rows(result))]
    return "\n".join([*lines, "=" * 50])


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"
