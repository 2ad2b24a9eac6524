"""A client that loads a server with an OpenAI API the way `vllm bench serve` does, and measures how long its requests wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import httpx
import msgspec
import numpy as np

from pagerunner.bench.serve_data import ServeRequest
from pagerunner.errors import ConfigError

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

    @property
    def tpot(self) -> float:
        """Mean time of the tokens after the first."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def words(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning or self.delta.reasoning_content or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
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

    def body(self, request: ServeRequest) -> dict[str, Any]:
        """The JSON of one request."""
        what = {"messages": request.prompt} if self.chat else {"prompt": request.prompt}
        limit = {"max_completion_tokens" if self.chat else "max_tokens": request.output_len}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **what, **limit, **stream, **self.extra}


async def send(client: httpx.AsyncClient, target: Target, request: ServeRequest, begin: float) -> Sample:
    """Send one request and time its answer. An error of any kind becomes the sample's `error`."""
    started = last = time.perf_counter()
    sample = Sample(prompt_len=request.prompt_len, start=started - begin)
    pieces: list[str] = []
    done = False
    try:
        async with client.stream("POST", target.url, json=target.body(request)) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise _FailedError(f"HTTP {response.status_code}: {text[:_ERROR_CHARS]}")
            async for event in _events(response):
                if event == b"[DONE]":
                    done = True
                    continue
                chunk = _decode(event)
                if chunk.error is not None:
                    raise _FailedError(str(chunk.error)[:_ERROR_CHARS])
                words = "".join(choice.words() for choice in chunk.choices)
                if words:
                    now = time.perf_counter()
                    if pieces:
                        sample.itl.append(now - last)
                    else:
                        sample.ttft = now - started
                    last = now
                    pieces.append(words)
                if chunk.usage is not None:
                    sample.prompt_len, sample.output_len = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        if not done:
            raise _FailedError("The stream ended early.")
    except (httpx.HTTPError, msgspec.MsgspecError, _FailedError) as error:
        sample.error = str(error) or type(error).__name__
    if not pieces:  # tokens without text still take their time
        last = time.perf_counter()
        sample.ttft = last - started
    sample.text = "".join(pieces)
    sample.latency = last - started
    sample.output_len = sample.output_len or len(pieces)
    return sample


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for data in response.aiter_bytes():
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield event[5:].strip()


def arrivals(
    count: int,
    rate: float,
    burstiness: float,
    seed: int,
    ramp: tuple[str, float, float] | None = None,
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
    target: Target,
    requests: Sequence[ServeRequest],
    times: Iterable[float],
    *,
    headers: Mapping[str, str],
    max_concurrency: int | None,
    num_warmups: int,
    progress: Callable[[Sample], object],
) -> tuple[list[Sample], float]:
    """Send the requests at their times, at most `max_concurrency` of them at once; all samples, and the seconds it took."""
    gate: AbstractAsyncContextManager[Any] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=dict(headers), limits=limits, timeout=None) as client:
        if num_warmups:
            warm = await asyncio.gather(*(send(client, target, one, 0.0) for one in requests[:num_warmups]))
            if warm[0].error:
                raise ConfigError(f"The warm-up failed: {warm[0].error}")
        begin = time.perf_counter()

        async def one(request: ServeRequest) -> Sample:
            async with gate:
                sample = await send(client, target, request, begin)
            progress(sample)
            return sample

        async with asyncio.TaskGroup() as group:
            tasks = []
            for at, request in zip(times, requests, strict=True):
                if (wait := begin + at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(one(request)))
        return [task.result() for task in tasks], time.perf_counter() - begin


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
        rows.insert(6, ("Request goodput (req/s):", result["request_goodput"]))
    lines = [" Serving Benchmark Result ".center(50, "="), *(_row(*row) for row in rows)]
    for name in metrics:
        title, short = METRICS[name]
        lines.append(title.center(50, "-"))
        lines += [
            _row(f"{kind.capitalize()} {short} (ms):", result[f"{kind}_{name}_ms"]) for kind in ("mean", "median")
        ]
        lines += [_row(f"P{share:g} {short} (ms):", result[f"p{share:g}_{name}_ms"]) for share in percentiles]
    return "\n".join([*lines, "=" * 50])


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"
