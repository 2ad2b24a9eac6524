"""The line about rates that the server logs every few seconds. Programs that read vLLM's line can read this one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pagerunner.server.metrics import Metrics
from pagerunner.tiers.stats import TierStats

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0


class StatsLog:
    """Compares what the metrics count with what they counted the last time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._at = time.monotonic()
        self._tokens = metrics.tokens
        self._stats = metrics.last

    def lines(self) -> list[str]:
        """Rates since the last call, the device's idle share among them (which becomes a metric), and what became of drafts. Empty if nothing went on."""
        metrics, before, (old_prompt, old_generated) = self._metrics, self._stats, self._tokens
        now, stats = time.monotonic(), metrics.last
        seconds = max(now - self._at, 1e-9)
        prompt, generated = metrics.tokens[0] - old_prompt, metrics.tokens[1] - old_generated
        idle = min(max(1 - (stats.busy_seconds - before.busy_seconds) / seconds, 0.0), 1.0)
        metrics.set_idle(idle)
        self._at, self._tokens, self._stats = now, metrics.tokens, stats
        if not (prompt or generated or stats.running or stats.waiting):
            return []
        queries = stats.prefix_queries_total - before.prefix_queries_total
        hits = stats.prefix_hits_total - before.prefix_hits_total
        below = ""
        if (tier := stats.tier) is not None:
            old = before.tier or TierStats()
            asked, loaded = tier.queries_total - old.queries_total, tier.hits_total - old.hits_total
            below = f"External prefix cache hit rate: {loaded / max(asked, 1):.1%}, "
        waits = f" (for {stats.waiting_for})" if stats.waiting and stats.waiting_for else ""
        rates = (
            f"Engine {metrics.engine:03}: Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {stats.running} reqs, Waiting: {stats.waiting} reqs{waits}, "
            f"GPU KV cache usage: {stats.kv_usage:.1%}, "
            f"Prefix cache hit rate: {hits / max(queries, 1):.1%}, {below}Device idle: {idle:.1%}"
        )
        if stats.spec is None or not (drafts := stats.spec.since(before.spec)).num_drafts:
            return [rates]
        return [
            rates,
            f"Engine {metrics.engine:03}: SpecDecoding metrics: Mean acceptance length: {drafts.mean_acceptance_length:.2f}, "
            f"Accepted throughput: {drafts.num_accepted_tokens / seconds:.2f} tokens/s, "
            f"Drafted throughput: {drafts.num_draft_tokens / seconds:.2f} tokens/s, "
            f"Accepted: {drafts.num_accepted_tokens} tokens, Drafted: {drafts.num_draft_tokens} tokens, {drafts.text()}",
        ]


@asynccontextmanager
async def logged_stats(engines: Sequence[Metrics], *, quiet: bool, seconds: float = LOG_SECONDS) -> AsyncIterator[None]:
    """Meanwhile measure, and log a line for each engine unless `quiet`, every `seconds`."""
    logs = [StatsLog(metrics) for metrics in engines]
    task = asyncio.create_task(_log(logs, quiet, seconds), name="pagerunner-stats-log")
    try:
        yield
    finally:
        task.cancel()


async def _log(logs: Sequence[StatsLog], quiet: bool, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        for line in [line for log in logs for line in log.lines()]:
            if not quiet:
                logger.info(line)
