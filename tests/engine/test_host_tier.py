"""Pages in host memory: tokens are those of an engine without it, for every kind of memory, while few pages fit on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest

from helpers.effort import by_days
from helpers.families import MAKERS
from helpers.once import made_once
from helpers.patience import until
from helpers.recount import recount, recount_pool
from pagerunner import LLM, SamplingParams
from pagerunner import llm as llm_module
from pagerunner.config import EngineArgs
from pagerunner.engine.core.executors.base import Pending
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker import build
from pagerunner.errors import CapacityError, ConfigError, InvalidRequestError
from pagerunner.memory.report import plan_json, plan_table
from pagerunner.runner.transfers import Transfers
from pagerunner.tiers import bounds
from pagerunner.tiers.host import HostTier
from pagerunner.types import EngineRequest, PageTransfer, StepPlan, TransferEnd

pytest.importorskip("transformers")

# full, window, chunks, recurrent state of three kinds, latents, latents with an indexer, compressed
KINDS = ("qwen3", "gpt_oss", "llama4_text", "qwen3_next", "bamba", "deepseek_v2", "deepseek_v32", "deepseek_v4")
PROMPTS = [[(7 * i + 3 * j * (i + 1)) % 490 + 4 for j in range(130 + 8 * i)] for i in range(8)]
LONGER = [[*prompt, 9, 9] for prompt in PROMPTS]
ROUNDS = (PROMPTS, LONGER)
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
TIER = {"kv_offloading_size": 0.06}


def connector(**extra: Any) -> dict[str, Any]:
    """The same in vLLM's words."""
    named = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": named}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


def engine(path: str, **options: Any) -> LLM:
    """An engine whose pages hold two to three of the prompts."""
    limits = {
        "max_model_len": 256,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "skip_tokenizer_init": True,
    } | options
    plan = resolve(EngineArgs(model=path, device="cpu", kv_cache_memory_bytes=2_000_000, **limits)).plan
    pages = int(2.6 * plan.request_bytes(256))
    return LLM(path, kv_cache_memory_bytes=pages, poison_fresh_pages=True, use_tqdm=False, **limits)


def run(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Tokens, and how many tokens of each prompt were found."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


def nothing_held(llm: LLM) -> None:
    """Nothing is under way, and no page is in use."""
    scheduler = llm._core._scheduler
    while llm._core.has_work:
        llm._core.step()
    below = scheduler.tiers.below
    if below is not None:  # a disk's writes hold their pages, and an engine doesn't wait for them
        until(lambda: below.settle() or not below._writes)
    recount(scheduler.manager)
    assert not any(scheduler.manager.pool.used) and not scheduler.tiers.busy
    recount_pool(scheduler.tiers.host.pool)
    assert not any(scheduler.tiers.host.pool.used)


@pytest.mark.days(4)
@pytest.mark.parametrize(("family", "dtype"), by_days(KINDS, ("auto", "fp8", "bfloat16")))
def test_tokens_are_those_of_an_engine_without_host_memory(
    checkpoint: Callable[[str], str], family: str, dtype: str
) -> None:
    path = checkpoint(family)
    without, tiered = engine(path, kv_cache_dtype=dtype), engine(path, kv_cache_dtype=dtype, **TIER)
    wanted = [run(without, prompts) for prompts in ROUNDS]
    found = [run(tiered, prompts) for prompts in ROUNDS]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    stats = tiered.stats().tier
    assert stats is not None and stats.load_bytes_total > 0 and stats.failed_total == 0
    assert sum(found[1][1]) > sum(wanted[1][1]), "prompts come back from host memory"
    nothing_held(tiered)


class LateTransfers(Transfers):
    """Transfers that do nothing for `lag` looks, but for loads, which write rubbish meanwhile. Of `bad` of them the last one fails."""

    lag, bad = 6, 0
    made: ClassVar[list[LateTransfers]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.looks = 0
        self.late: list[tuple[int, PageTransfer]] = []
        self.loads: list[int] = []
        self.made.append(self)

    def _begin(self, transfer: PageTransfer) -> None:
        self.late.append((self.looks + self.lag, transfer))
        self.loads += [transfer.number] if transfer.loads else []
        self._scribble(transfer)

    def _scribble(self, transfer: PageTransfer) -> None:
        for group, offset, _ in transfer.pages if transfer.loads else ():
            self._bytes[offset : offset + self._page_bytes[group]].fill_(0x7E)

    def drain(self) -> None:
        self.late.clear()
        super().drain()

    def ended(self, seconds: float = 0.0) -> list[TransferEnd]:
        self.looks += 1
        done = [one for when, one in self.late if when <= self.looks]
        self.late = [(when, one) for when, one in self.late if when > self.looks]
        for _, transfer in self.late:
            self._scribble(transfer)
        ends = []
        for transfer in done:
            well = not self.bad or transfer.number % self.bad != 0
            if well:
                super()._begin(transfer)
            else:
                self._scribble(transfer)
            ends.append(TransferEnd(transfer.number, well, 0.001))
        super().drain()
        return ends


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[LateTransfers]:
    kind = type("Late", (LateTransfers,), {"made": []})
    monkeypatch.setattr(build, "Transfers", kind)
    return kind


@pytest.fixture(scope="module")
def wanted(checkpoint: Callable[[str], str]) -> list[list[list[int]]]:
    llm = engine(checkpoint("qwen3"))
    return [run(llm, prompts)[0] for prompts in ROUNDS]


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_transfers_that_come_late_or_fail_cost_time_and_no_token(
    checkpoint: Callable[[str], str], late: type[LateTransfers], wanted: list[list[list[int]]], bad: int
) -> None:
    late.bad = bad
    llm = engine(checkpoint("qwen3"), **TIER)
    assert [run(llm, prompts)[0] for prompts in ROUNDS] == wanted
    stats = llm.stats().tier
    assert stats is not None and stats.load_bytes_total > 0 and bool(stats.failed_total) == bool(bad)
    nothing_held(llm)


def test_a_load_that_takes_too_long_is_given_up_and_its_late_bytes_reach_nobody(
    checkpoint: Callable[[str], str],
    late: type[LateTransfers],
    wanted: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "LEAST_PATIENCE", 0.0)
    monkeypatch.setattr(bounds, "PATIENCE", 0.0)
    late.lag = 12
    llm = engine(checkpoint("qwen3"), **TIER)
    assert [run(llm, prompts)[0] for prompts in ROUNDS] == wanted
    stats = llm.stats().tier
    assert stats is not None and stats.given_up_total > 0
    nothing_held(llm)


@pytest.mark.parametrize("how", ["bad", "late"])
@pytest.mark.parametrize("at_once", [1, 8])
def test_a_request_whose_load_goes_wrong_ends_if_that_is_asked_for(
    checkpoint: Callable[[str], str],
    late: type[LateTransfers],
    wanted: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    at_once: int,
) -> None:
    """One at a time there is always room to compute it instead."""
    llm = engine(checkpoint("qwen3"), **TIER, kv_transfer_config={"kv_load_failure_policy": "fail"})
    assert run(llm, PROMPTS)[0] == wanted[0]
    nothing_held(llm)
    loads = late.made[-1].loads
    with monkeypatch.context() as faults:
        if how == "bad":
            faults.setattr(late, "bad", 1)
        else:
            faults.setattr(bounds, "LEAST_PATIENCE", 0.0)
            faults.setattr(bounds, "PATIENCE", 0.0)
            faults.setattr(late, "lag", late.lag + len(PROMPTS))  # ends are looked for while requests are queued, too
        for begin in range(0, len(PROMPTS), at_once):
            before, some = len(loads), PROMPTS[begin : begin + at_once]
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in some], PARAMS, use_tqdm=False)
            errors = [output.error for output in outputs if output.error is not None]
            assert len(errors) == len(loads) - before
            assert all('kv_load_failure_policy is "fail"' in error for error in errors)
    assert len(loads) >= len(PROMPTS) // 2
    nothing_held(llm)
    assert run(llm, LONGER)[0] == wanted[1]


def test_loads_begin_while_prompts_are_queued_and_nothing_is_computed_before_all_are(
    checkpoint: Callable[[str], str],
    wanted: list[list[list[int]]],
    late: type[LateTransfers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = engine(checkpoint("qwen3"), **TIER)
    assert run(llm, PROMPTS)[0] == wanted[0]
    nothing_held(llm)
    core, done = llm._core, list[str]()
    add, launch = core.add, core._executor.run

    def noted_run(plan: StepPlan) -> Pending:
        done.append("step" if plan.rows else "loads" if any(one.loads for one in plan.transfers) else "")
        return launch(plan)

    monkeypatch.setattr(core, "add", lambda *args, **kwargs: (done.append("add"), add(*args, **kwargs)))
    monkeypatch.setattr(core._executor, "run", noted_run)
    monkeypatch.setattr(llm_module, "_QUEUED_AT_ONCE", 1)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        run(llm, [*PROMPTS, [10**6]])
    assert done.count("add") == len(PROMPTS) and "step" not in done
    assert done.index("loads") < 2, "the first prompt's pages come while the second one is read"
    nothing_held(llm)
    done.clear()
    assert run(llm, LONGER)[0] == wanted[1]
    assert done[: done.index("step")].count("add") == len(LONGER)
    nothing_held(llm)


def test_requests_that_are_gone_and_sleep_leave_no_transfer_behind(
    checkpoint: Callable[[str], str], late: type[LateTransfers], wanted: list[list[list[int]]]
) -> None:
    llm = engine(checkpoint("qwen3"), **TIER, enable_sleep_mode=True)
    assert run(llm, PROMPTS)[0] == wanted[0]
    nothing_held(llm)
    core, late.lag = llm._core, 50
    core.add(EngineRequest(request_id="gone", prompt_token_ids=PROMPTS[0], params=PARAMS, seed=0, max_tokens=4))
    while not core._scheduler.num_transfers:
        core.step()
    assert core.abort(["gone"])
    nothing_held(llm)
    for level, found in ((1, True), (2, False)):
        run(llm, [[level, *prompt] for prompt in PROMPTS])
        assert core._scheduler.num_transfers, "a store is under way"
        llm.sleep(level)
        assert core._scheduler.num_transfers == 0
        llm.wake_up()
        tokens, cached = run(llm, PROMPTS)
        assert tokens == wanted[0] and (sum(cached) > 0) is found
    nothing_held(llm)
    llm._core.reset_prefix_cache()
    assert run(llm, PROMPTS) == (wanted[0], [0] * len(PROMPTS))


@pytest.mark.days(3)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("qwen3_next", {"tensor_parallel_size": 2}),
        ("gpt_oss", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_ranks_stages_and_teams_have_the_same_places(
    checkpoint: Callable[[str], str], family: str, ways: dict[str, Any]
) -> None:
    path, prompts = checkpoint(family), [*PROMPTS, *([1, *prompt] for prompt in PROMPTS)]
    tokens = run(engine(path), prompts)[0]
    llm = engine(path, **ways, **TIER)
    for _ in range(3):
        assert run(llm, prompts)[0] == tokens
    scheduler = llm._core._scheduler
    while llm._core.has_work:
        llm._core.step()
    stats = llm.stats().tier
    assert stats is not None and stats.load_bytes_total > 0 and stats.failed_total == 0
    for team in getattr(scheduler, "teams", [scheduler]):
        assert not any(team.manager.pool.used) and not any(team.tiers.host.pool.used)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_offloading_size": -1}, r"kv_offloading_size must be a number of GiB above 0, got -1"),
        ({"kv_offloading_size": 1e-6}, r"less than a slab of pages .* Raise kv_offloading_size to at least"),
        ({"kv_offloading_backend": "lmcache"}, "kv_offloading_backend must be one of native, got 'lmcache'"),
        ({**TIER, "enable_prefix_caching": False}, "kv_offloading_size needs enable_prefix_caching=True"),
        ({"kv_transfer_config": "{"}, 'kv_transfer_config must be JSON such as {"kv_connector": "OffloadingConnector"'),
        ({"kv_transfer_config": {"kv_conector": "x"}}, "unknown field `kv_conector`"),
        (
            {"kv_transfer_config": {"kv_connector": "MoRIIO", "kv_role": "kv_both"}},
            "must be one of OffloadingConnector, PeerConnector, NixlConnector, got 'MoRIIO'",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "MultiConnector", "kv_role": "kv_both"}},
            "'MultiConnector' .* isn't there; PeerConnector or NixlConnector with secondary_tiers",
        ),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "kv_role of OffloadingConnector"),
        (connector(), "doesn't say how much of it: give cpu_bytes_to_use"),
        (connector(cpu_bytes_to_use=0), "cpu_bytes_to_use must be at least 1, got 0"),
        ({**connector(cpu_bytes_to_use=2**26), **TIER}, "say the same thing; give one of them"),
        (connector(num_cpu_blocks=7), "OffloadingConnector knows cpu_bytes_to_use, block_size"),
        (connector(cpu_bytes_to_use=2**26, eviction_policy="arc"), "eviction_policy must be one of lru, got 'arc'"),
        (connector(cpu_bytes_to_use=2**26, block_size=64), "block_size=64 would join pages on their way"),
        (connector(cpu_bytes_to_use=2**26, store_threshold=2), "store_threshold=2 would store a prompt when"),
        (connector(cpu_bytes_to_use=2**26, store_threshold=-3), "store_threshold must be 0 or 1, got -3"),
        ({"kv_offloading_size": 1e9}, r"got 1e\+09 \(and below 1,048,576\)"),
        (
            {"kv_transfer_config": "{}"},
            "kv_transfer_config asks for nothing: kv_connector is missing. Give JSON such as",
        ),
        ({"kv_transfer_config": "/tmp/kv.json"}, "kv_transfer_config must be JSON such as .*kv_connector"),
        ({"kv_transfer_config": {"kv_load_failure_policy": "retry"}}, "must be one of recompute, fail, got 'retry'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    checkpoint: Callable[[str], str], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((ConfigError, CapacityError), match=sentence):
        resolve(EngineArgs(model=checkpoint("qwen3"), device="cpu", max_model_len=256, **options))


def test_more_host_memory_than_there_is_and_vllms_words(checkpoint: Callable[[str], str]) -> None:
    args = EngineArgs(model=checkpoint("qwen3"), device="cpu", max_model_len=256, tensor_parallel_size=2, **TIER)
    with pytest.raises(
        CapacityError,
        match=r"asks for 61.44 MiB .* 32.00 MiB can be had .*; lower it to 0.03 \(GiB\), or .* to 33554432\.",
    ):
        resolve(args, available=2**30 + 2**24)
    large = msgspec.structs.replace(args, kv_offloading_size=5_000)
    with pytest.raises(CapacityError, match=r"host memory for pages 2\.44 TiB.* lower kv_offloading_size"):
        resolve(large, 2**33, plan_only=True)
    resolved = resolve(args, available=2**33)
    assert resolved.config.host_bytes == int(0.06 * 2**30) // 2
    assert dict(resolved.plan.other)["host memory for pages"] == resolved.plan.host_bytes
    assert resolved.plan.host_bytes == HostTier(resolved.plan, resolved.config.host_bytes).num_bytes, "what there is"
    assert 0 <= resolved.config.host_bytes - resolved.plan.host_bytes < 2 * resolved.plan.groups[0].page_bytes
    assert "host memory" in plan_table(resolved.plan) and plan_json(resolved.plan)["host_tokens"] > 10_000
    same = connector(cpu_bytes_to_use=int(0.06 * 2**30), offload_prompt_only=False)
    other = resolve(msgspec.structs.replace(args, kv_offloading_size=None, **same), available=2**33)
    assert other.config.host_bytes == resolved.config.host_bytes and not other.config.offload_prompt_only


def test_the_state_of_memory_says_what_lies_where(checkpoint: Callable[[str], str], late: type[LateTransfers]) -> None:
    llm = engine(checkpoint("gpt_oss"), **TIER)
    run(llm, PROMPTS)
    nothing_held(llm)
    host = llm.memory_state()["host"]
    assert (
        host["used_bytes"] > 0
        and host["num_bytes"] == host["ready_bytes"]
        and (host["loads"], host["stores"]) == (0, 0)
    )
    assert all(
        group["cached"] > 0 and group["in_use"] == group["arriving"] == group["kept"] == 0 for group in host["groups"]
    )
    core, late.lag = llm._core, 3
    core.add(EngineRequest(request_id="one", prompt_token_ids=PROMPTS[0], params=PARAMS, seed=0, max_tokens=4))
    core.step()
    state = llm.memory_state()
    host, asked = state["host"], sum(map(len, PROMPTS))
    assert (state["prefix_queries_total"], state["prefix_hits_total"]) == (asked, 0)
    assert host["queries_total"] > host["hits_total"] > len(PROMPTS[0]) // 2
    assert host["loads"] == 1 and all(group["arriving"] == group["in_use"] > 0 for group in host["groups"])
    assert llm.stats().waiting_for == "transfer"
    nothing_held(llm)


def test_books_that_are_made_again_begin_with_empty_host_memory(
    checkpoint: Callable[[str], str], late: type[LateTransfers], wanted: list[list[list[int]]]
) -> None:
    llm = engine(checkpoint("qwen3"), **TIER)
    run(llm, PROMPTS)
    nothing_held(llm)
    core, late.lag = llm._core, 50
    request = EngineRequest(request_id="on", prompt_token_ids=PROMPTS[0], params=PARAMS, seed=0, max_tokens=4)
    core.add(request)
    while not core._scheduler.num_transfers:
        core.step()
    stored = core.stats().tier.store_bytes_total
    core.recover([(request, [])])
    assert not core._scheduler.num_transfers and core.stats().tier.used_bytes == 0
    assert core.stats().tier.store_bytes_total == stored
    tokens: list[int] = []
    late.lag = 3
    while core.has_work:
        tokens += [token for update in core.step() for token in update.new_token_ids]
    assert tokens == wanted[0][0]
    assert run(llm, PROMPTS)[0] == wanted[0]
    nothing_held(llm)
