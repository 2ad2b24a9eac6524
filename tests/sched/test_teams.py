"""Teams of ranks: what one scheduler has to do is a step of all, whatever the others have to do."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.page_checker import PageChecker
from helpers.plans import one_group
from pagerunner.memory.manager import KVManager
from pagerunner.sched.scheduler import Scheduler
from pagerunner.sched.teams import TeamsScheduler
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.policy import Tiering
from pagerunner.types import EngineRequest, SamplingParams, TeamsPlan, TeamsResult


def test_a_team_that_only_begins_a_transfer_takes_its_part_in_a_step_and_goes_on() -> None:
    plan = one_group(20)
    managers = [KVManager(plan) for _ in range(2)]
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": plan.max_model_len, "max_in_flight": 1}
    scheduler = TeamsScheduler([Scheduler(manager, **sizes) for manager in managers])
    checkers = [PageChecker(plan, prefix_caching=True) for _ in managers]

    def request(name: str, prompt: list[int]) -> EngineRequest:
        own = {"params": SamplingParams(max_tokens=None), "seed": 0, "max_tokens": 2, "data_parallel_rank": 0}
        return EngineRequest(request_id=name, prompt_token_ids=prompt, **own)

    def step() -> TeamsPlan | None:
        if (found := scheduler.schedule()) is not None:
            results = [checker.run(own) for checker, own in zip(checkers, found.teams, strict=True)]
            scheduler.commit(found, TeamsResult(step_id=found.step_id, token_ids=[], teams=results))
        return found

    scheduler.add(request("first", list(range(64))))
    while scheduler.has_work:
        assert step() is not None
    keys = list(managers[0].index.pages[0])
    lease = managers[0].store([keys], [[1 + number for number, _ in enumerate(keys)]])
    alone = step()
    assert alone is not None
    assert [len(own.transfers) for own in alone.teams] == [1, 0]
    managers[0].end_transfer(lease.number, well=True)
    scheduler.add(request("second", list(range(100, 120))))
    while scheduler.has_work:
        assert step() is not None


def test_each_team_notes_its_own_tokens_of_a_step() -> None:
    """Else computing a token seems to take a share of what it takes, and loading pages doesn't pay."""
    plan = one_group(2_000, model_max_len=4_096)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 2_048, "max_model_len": plan.max_model_len}
    managers = [KVManager(plan) for _ in range(3)]
    tiers = [Tiering(manager, HostTier(plan, 2**24)) for manager in managers]
    scheduler = TeamsScheduler([Scheduler(one, tiers=own, **sizes) for one, own in zip(managers, tiers, strict=True)])
    for rank, tokens in enumerate((1_000, 800, 300)):
        scheduler.add(
            EngineRequest(
                request_id=f"{rank}",
                prompt_token_ids=list(range(tokens)),
                params=SamplingParams(max_tokens=None),
                seed=0,
                max_tokens=2,
                data_parallel_rank=rank,
            )
        )
    step = scheduler.schedule()
    assert step is not None
    scheduler.note_step(step, 0.1)
    assert [own.rates.seconds_per_token for own in tiers] == pytest.approx([0.1 / 1_000, 0.1 / 800, 0.0])


def test_a_team_is_chosen_by_the_beginning_of_a_prompt_and_by_no_prefix_that_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = one_group(1_500, model_max_len=32_768)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 2_048, "max_model_len": plan.max_model_len}
    scheduler = TeamsScheduler([Scheduler(KVManager(plan), **sizes) for _ in range(2)])
    prompt = list(range(1_024))

    def given(name: str, tokens: list[int], **own: Any) -> int:
        params = SamplingParams(max_tokens=None, **own.pop("params", {}))
        scheduler.add(
            EngineRequest(request_id=name, prompt_token_ids=tokens, params=params, seed=0, max_tokens=2, **own)
        )
        return [name in team for team in scheduler.teams].index(True)

    assert given("first", prompt, data_parallel_rank=1) == 1
    scheduler.schedule()
    assert given("scored", prompt, params={"prompt_logprobs": 0}) == 0, "it computes its whole prompt anyway"
    scheduler.abort(["scored"])
    assert given("again", prompt) == 1, "64 units there count more than the request that runs there"
    looked, real = [], KVManager.cached_tokens
    monkeypatch.setattr(
        KVManager, "cached_tokens", lambda self, chain, tokens: looked.append(len(tokens)) or real(self, chain, tokens)
    )
    given("long", [*prompt, *range(20_000)])
    assert looked == [8_192, 8_192]
