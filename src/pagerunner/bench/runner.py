"""Run a workload several times through `LLM.generate` and report medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from pagerunner.bench.experts import ExpertsRead
from pagerunner.bench.floors import Floor
from pagerunner.bench.workloads import BenchRequest
from pagerunner.engine.core.messages import SpecCounts
from pagerunner.errors import PagerunnerError
from pagerunner.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pagerunner.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


class Draws(NamedTuple):
    """How the tokens of all requests are chosen: the most likely ones, unless there is a temperature."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def text(self) -> str:
        """For a label."""
        if not self.temperature:
            return "greedy"
        filters = (f", top-p {self.top_p:g}" if self.top_p < 1 else "") + (
            f", top-k {self.top_k}" if self.top_k else ""
        )
        return f"temperature {self.temperature:g}{filters}"


GREEDY = Draws()


class ThroughputReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repetitions, and the best of them; times in seconds, rates per second. Prefix hits are tokens of one
    repetition. `floor` is what the card allows, where that is known. `touched` are experts that the last repetition read, and calls of a
    mixture's layer; `experts` is what follows from them. `drafts`: what became of all repetitions' drafts, if the engine drafts.
    """

    label: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    seconds: list[float]
    elapsed: float
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    best: float
    best_output_tokens_per_second: float
    best_total_tokens_per_second: float
    floor: Floor | None = None
    experts: ExpertsRead | None = None
    touched: tuple[int, int] = (0, 0)
    drafts: SpecCounts | None = None

    def text(self) -> str:
        """Lines for a person."""
        floor = "" if self.floor is None else f"\n{self.floor.text()}"
        experts = "" if self.experts is None else f"\n{self.experts.text()}"
        runs = ", ".join(f"{value:.3f}" for value in self.seconds)
        return (
            f"{self.label}: {self.num_requests} requests, {self.prompt_tokens} prompt tokens "
            f"({self.cached_tokens} from the prefix cache), {self.output_tokens} output tokens\n"
            f"  seconds: best {self.best:.3f}, median {self.elapsed:.3f} ({runs})\n"
            f"  requests/s: {self.num_requests / self.best:.2f}, median {self.requests_per_second:.2f}\n"
            f"  output tokens/s: {self.best_output_tokens_per_second:.1f}, "
            f"median {self.output_tokens_per_second:.1f}\n"
            f"  total tokens/s: {self.best_total_tokens_per_second:.1f}, median {self.total_tokens_per_second:.1f}{_about(self.drafts)}{floor}{experts}"
        )


class LatencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one batch from submission to its last token. `drafts`: what became of all iterations' drafts, if the engine drafts."""

    label: str
    batch_size: int
    input_len: int
    output_len: int
    seconds: list[float]
    average: float
    percentiles: dict[int, float]
    drafts: SpecCounts | None = None

    def text(self) -> str:
        """Lines for a person."""
        lines = [
            f"{self.label}: batch of {self.batch_size}, {self.input_len} tokens in, {self.output_len} out",
            f"  average: {self.average:.4f} s over {len(self.seconds)} iterations",
        ]
        lines += [f"  {percent}% percentile: {value:.4f} s" for percent, value in self.percentiles.items()]
        return "\n".join(lines) + _about(self.drafts)


def _about(drafts: SpecCounts | None) -> str:
    """A line about drafts, after a line break; nothing without any."""
    return (
        f"\n  Mean acceptance length: {drafts.mean_acceptance_length:.2f}, {drafts.text()}"
        if drafts and drafts.num_drafts
        else ""
    )


def _drafts_since(llm: LLM, before: SpecCounts | None) -> SpecCounts | None:
    now = llm.stats().spec
    return None if now is None else now.since(before)


def throughput(
    llm: LLM,
    make: Callable[[int], Sequence[BenchRequest]],
    *,
    label: str,
    repetitions: int,
    warmups: int,
    rounds: Callable[[int], Iterable[int]] = range,
    draws: Draws = GREEDY,
    touched: Callable[[], tuple[int, int]] = lambda: (0, 0),
) -> ThroughputReport:
    """Run `make(salt)` with a fresh salt per round: `warmups` rounds unmeasured, then `repetitions` with salts from 0 on.

    `rounds` may draw a progress bar. `draws` says how tokens are chosen. `touched` counts experts, and calls of a mixture's layer, so far.
    """
    before, drafted = touched(), None
    seconds: list[float] = []
    outputs: list[RequestOutput] = []
    for index in rounds(warmups + repetitions):
        requests, before = make(_salt(index, warmups, repetitions)), touched()
        drafted = llm.stats().spec if index == warmups else drafted
        elapsed, outputs = _timed(llm, requests, draws)
        if index >= warmups:
            seconds.append(elapsed)
    after = touched()
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    median, best = statistics.median(seconds), min(seconds)
    return ThroughputReport(
        label=label,
        num_requests=len(outputs),
        prompt_tokens=prompt_tokens,
        output_tokens=generated,
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        seconds=seconds,
        elapsed=median,
        requests_per_second=len(outputs) / median,
        output_tokens_per_second=generated / median,
        total_tokens_per_second=(generated + prompt_tokens) / median,
        best=best,
        best_output_tokens_per_second=generated / best,
        best_total_tokens_per_second=(generated + prompt_tokens) / best,
        touched=(after[0] - before[0], after[1] - before[1]),
        drafts=_drafts_since(llm, drafted),
    )


def latency(
    llm: LLM,
    make: Callable[[int], Sequence[BenchRequest]],
    *,
    label: str,
    repetitions: int,
    warmups: int,
    rounds: Callable[[int], Iterable[int]] = range,
    draws: Draws = GREEDY,
) -> LatencyReport:
    """Time whole batches of equal requests, `warmups` rounds unmeasured."""
    seconds: list[float] = []
    first: Sequence[BenchRequest] = []
    drafted: SpecCounts | None = None
    for index in rounds(warmups + repetitions):
        requests = make(_salt(index, warmups, repetitions))
        first = first or requests
        drafted = llm.stats().spec if index == warmups else drafted
        elapsed, _ = _timed(llm, requests, draws)
        if index >= warmups:
            seconds.append(elapsed)
    return LatencyReport(
        label=label,
        batch_size=len(first),
        input_len=len(first[0].prompt_token_ids),
        output_len=first[0].output_len,
        seconds=seconds,
        average=statistics.fmean(seconds),
        percentiles={percent: float(np.percentile(seconds, percent)) for percent in PERCENTILES},
        drafts=_drafts_since(llm, drafted),
    )


def _salt(index: int, warmups: int, repetitions: int) -> int:
    return index - warmups if index >= warmups else repetitions + index


def _timed(llm: LLM, requests: Sequence[BenchRequest], draws: Draws) -> tuple[float, list[RequestOutput]]:
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    params = [
        SamplingParams(ignore_eos=True, max_tokens=request.output_len, detokenize=False, **draws._asdict())
        for request in requests
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    for request, output in zip(requests, outputs, strict=True):
        got, why = len(output.outputs[0].token_ids), f" ({output.error})" if output.error else ""
        if got != request.output_len:
            raise PagerunnerError(f"a request has {got} of {request.output_len} tokens{why}; no rate is reported.")
    return elapsed, outputs
