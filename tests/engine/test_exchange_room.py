"""Prompts that are lent: what waits for room in host memory, what ends if its pages don't come, and what is given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.test_exchange import OTHER, PROMPT, Engine, checkpoint, own_secret
from engine.test_host_tier import LateTransfers
from helpers.adapters import load_adapters, random_adapter
from helpers.patience import until
from pagerunner import LoRARequest
from pagerunner.engine.worker import build
from pagerunner.memory.manager import KVManager
from pagerunner.memory.ownership import ExchangeState
from pagerunner.tiers import bounds
from pagerunner.tiers.policy import LOAD_FAILED
from pagerunner.types import EngineRequest, SamplingParams

pytest.importorskip("transformers")
__all__ = ["checkpoint", "own_secret"]  # fixtures


def host_of(engine: Engine) -> Any:
    return engine.core._scheduler.tiers.host


def test_of_more_prompts_than_have_room_in_host_memory_each_is_pulled_in_its_turn(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Engine(checkpoint("qwen3"), "kv_producer"), Engine(checkpoint("qwen3"), "kv_consumer")
    prompts = [[(i * j) % 480 + 5 for j in range(150)] for i in range(1, 9)]
    host = host_of(second)
    page_bytes = second.core.memory_plan.groups[0].page_bytes
    host.num_bytes = int(2 * 3.2 * (144 // 16) * page_bytes)  # half of it has room for three
    lent, made = [first.lend(prompt) for prompt in prompts], list[int]()
    usual = KVManager.chain
    monkeypatch.setattr(KVManager, "chain", lambda *given, **named: made.append(1) or usual(*given, **named))
    names = [second.add(prompt, one) for prompt, one in zip(prompts, lent, strict=True)]
    for name in names:
        second.last(name)
    assert [second.found(name) for name in names] == [144] * 8
    assert len(made) == 2 * 8, "a long prompt's hashes take milliseconds: once here, and once in the scheduler"
    stats = second.core.stats().exchange
    assert stats is not None and (stats.pulled_total, stats.failed_total) == (8, 0)
    until(lambda: not first.core._exchange.stats().loans)

    host.num_bytes = 2 * page_bytes
    name = second.add(OTHER, first.lend(OTHER))
    second.last(name)
    assert second.found(name) == 0, "it has no room even alone"
    first.close()
    second.close()


def test_a_prompt_waits_for_room_that_loads_to_the_device_hold(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of twelve have room. When they have come nothing is pulled, and loads use their pages."""
    first = Engine(checkpoint("qwen3"), "kv_producer")
    late = type("Late", (LateTransfers,), {"made": [], "lag": 60})
    monkeypatch.setattr(build, "Transfers", late)
    second = Engine(checkpoint("qwen3"), "kv_consumer", max_num_seqs=16, kv_cache_memory_bytes=8_000_000)
    prompts = [[(i * j) % 480 + 5 for j in range(150)] for i in range(1, 14)]
    until(lambda: second.core._end_transfers(0.0) or second.core._executor.host_ready >= host_of(second).num_bytes)
    host, room = host_of(second), 6 * (144 // 16)
    others = host.take([host.pool.per_slab[0] * host.pool.num_slabs - room])
    assert others is not None
    lent = [first.lend(prompt) for prompt in prompts]
    names = [second.add(prompt, one) for prompt, one in zip(prompts[:12], lent, strict=False)]
    for name in names:
        second.last(name)
    assert [second.found(name) for name in names] == [144] * 12
    stats = second.core.stats().exchange
    assert stats is not None and (stats.pulled_total, stats.failed_total) == (12, 0)

    host.num_bytes = second.core.memory_plan.groups[0].page_bytes
    second.core._scheduler.manager.reset_prefix_cache()
    monkeypatch.setattr(bounds, "LEAST_PATIENCE", 600.0)
    transfers, late.lag = late.made[-1], 10**9
    again, large = second.add(prompts[11]), second.add(prompts[12], lent[12])
    assert second.found(large) == 0 and not second.ended(again), "it has no room even alone, and waits for no load"
    transfers.late = [(0, transfer) for _, transfer in transfers.late]
    assert second.found(again) == 144
    host.release(others)
    first.close()
    second.close()


@pytest.mark.parametrize("wrong", ["expired", "torn"])
def test_pages_that_do_not_come_end_the_request_if_that_is_asked_for(
    checkpoint: Callable[[str], str], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine(checkpoint("qwen3"), "kv_producer")
    second = Engine(checkpoint("qwen3"), "kv_consumer", kv_load_failure_policy="fail")
    lent, well = first.lend(PROMPT), first.lend(OTHER)
    assert second.last(second.add(OTHER, well)).finish_reason == "length"
    if wrong == "expired":
        first.core._exchange.loans.end_all("expired")
    else:
        monkeypatch.setattr("pagerunner.tiers.loans.Loan.checksum", lambda self, name: bytes(32))
    last = second.last(second.add(PROMPT, lent))
    assert (last.finish_reason, last.error) == ("error", LOAD_FAILED)
    assert second.last(second.add(PROMPT)).finish_reason == "length"
    first.close()
    second.close()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_bad_request_beside_good_ones_fails_alone(checkpoint: Callable[[str], str], policy: str) -> None:
    """It names a loan whose prompt is longer than its own, as no engine would have told it to."""
    first = Engine(checkpoint("qwen3"), "kv_producer")
    second = Engine(checkpoint("qwen3"), "kv_consumer", kv_load_failure_policy=policy)
    bad, *good = [[(i * j) % 480 + 5 for j in range(150)] for i in range(1, 7)]
    lent = [first.lend(prompt) for prompt in (bad, *good)]
    names = [second.add(prompt, one) for prompt, one in zip((bad[:2], *good), lent, strict=True)]
    lasts = [second.last(name) for name in names]
    assert [second.found(name) for name in names] == [0, *[144] * 5]
    assert [last.finish_reason for last in lasts] == ["error" if policy == "fail" else "length", *["length"] * 5]
    stats = second.core.stats().exchange
    assert stats is not None and (stats.pulled_total, stats.failed_total) == (5, 1)
    first.close()
    second.close()


def test_a_loan_that_is_not_needed_is_given_back(checkpoint: Callable[[str], str]) -> None:
    first, second = Engine(checkpoint("qwen3"), "kv_producer"), Engine(checkpoint("qwen3"), "kv_consumer")
    lent = first.lend(PROMPT)
    assert first.core.memory_state().exchange == ExchangeState(loans=1, pulls=0, lent_total=1, pulled_total=0)
    watched = first.core.watch(0).stats.exchange  # by the page
    assert watched is not None and (watched.loans, watched.lent_total, watched.bytes_per_second) == (1, 1, 0.0)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, detokenize=False)
    second.core.add(
        EngineRequest(
            request_id="scored", prompt_token_ids=PROMPT, params=params, seed=0, max_tokens=2, kv_transfer=lent
        )
    )
    assert second.last("scored").finish_reason == "length"
    until(lambda: first.core._exchange.loans.tick() or not first.core._exchange.stats().loans)
    first.close()
    second.close()


def test_pages_go_to_prompts_with_the_same_adapter_alone(checkpoint, tmp_path: Path) -> None:
    """Names may differ on both sides; contents may not. The base's pages are there too, and are never taken for an adapter's."""
    pair = [Engine(checkpoint("qwen3"), "kv_both", enable_lora=True, max_loras=2) for _ in range(2)]
    paths = [random_adapter(Path(checkpoint("qwen3")), tmp_path / str(seed), rank=4, seed=seed) for seed in range(2)]
    for engine, names in zip(pair, (("a", "b"), ("other", "a")), strict=True):
        load_adapters(engine.core, [LoRARequest(name, 1, str(path)) for name, path in zip(names, paths, strict=True)])
    prefill, decode = pair
    wanted = {lora: prefill.tokens(prefill.add(PROMPT, lora=lora)) for lora in ("", "a", "b")}
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3
    cases = [("a", "a", 0, "b"), ("a", "other", 144, "a"), ("", "a", 0, "b"), ("b", "a", 144, "b")]
    for lent, asked, cached, tokens in cases:
        salt = lent + asked  # so that none finds what another one has left
        prefill.tokens(prefill.add(PROMPT, salt=salt))
        name = decode.add(PROMPT, prefill.lend(PROMPT, salt, lent), salt=salt, lora=asked)
        assert decode.tokens(name) == wanted[tokens], f"pages of {lent!r} for {asked!r}"
        assert decode.found(name) == cached
    for engine in pair:
        engine.close()
