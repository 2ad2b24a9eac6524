"""The composition root of an engine: workers, the plan of their memory, and the core with its scheduler.

On a CPU the memory plan is made first. On a CUDA device the final plan is made last:

1. Each worker reserves addresses for an upper bound, loads its weights, and maps one slab of pages.
2. It warms up the largest step, and captures its graphs.
3. The memory that is really free on the fullest device then decides how many pages there are, on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pagerunner.config import DRAFT_MODELS, EngineArgs, EngineConfig
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors.base import LoadedRanks
from pagerunner.engine.core.executors.places import EarlyRanks
from pagerunner.engine.core.executors.process import load_ranks
from pagerunner.engine.core.kv_events import Publisher
from pagerunner.engine.startup.disk_tier import MakeBelow, open_disk
from pagerunner.engine.startup.exchange import check_exchange, make_exchange
from pagerunner.engine.startup.measure import final_plan
from pagerunner.engine.startup.resolve import Resolved, resolve
from pagerunner.engine.structured_output.grammar import Guides, guide_tokenizer
from pagerunner.engine.worker.build import Progress
from pagerunner.engine.worker.card import Card
from pagerunner.engine.worker.worker import load_worker
from pagerunner.errors import ConfigError
from pagerunner.memory.events import BlockShape
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.report import plan_table
from pagerunner.memory.residency import PageSampler
from pagerunner.ops.native.suffix import new_index
from pagerunner.sched.adapters import Adapters
from pagerunner.sched.costs import CostModel
from pagerunner.sched.draft_length import AdaptiveLength, DraftLength, LengthByRows
from pagerunner.sched.guide import MakeGuide
from pagerunner.sched.scheduler import Scheduler
from pagerunner.sched.suffix import SuffixDrafter
from pagerunner.sched.teams import TeamsScheduler
from pagerunner.text.tokenizer import Tokenizer, end_token_ids
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.policy import Tiering

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)


def build_core(
    args: EngineArgs,
    progress: Progress | None = None,
    available: int | None = None,
    engine: int = 0,
    early: EarlyRanks | None = None,
) -> EngineCore:
    """An engine core ready to run. `progress(done_bytes, total_bytes)` is called while weights load.

    `available`: the share of the host's memory of this `engine`, where several are behind a server. `early` are processes for its ranks.

    Raises:
        ConfigError, CapacityError, CheckpointError: the sentence says what to change.
    """
    if available is not None:
        available //= args.num_ranks
    resolved = resolve(args, available=available)
    check_exchange(resolved.config.exchange)
    return build_from(resolved, progress, engine=engine, early=early)


def build_from(
    resolved: Resolved,
    progress: Progress | None = None,
    card: Card | None = None,
    engine: int = 0,
    early: EarlyRanks | None = None,
) -> EngineCore:
    """An engine core from a resolved configuration. A single rank is in this process, several are in processes of their own.

    `card` is the CUDA device for which it was resolved, if there is one. `engine` is its number among those behind a server.
    `early` are processes for its ranks that have been started already.

    Raises:
        CapacityError, CheckpointError, ConfigError: of several ranks it names the one that can't come up.
        EngineDeadError: another rank has ended, or hangs.
    """
    publishers = _publishers(resolved, engine)
    try:
        if resolved.config.num_ranks > 1:
            return build_on(resolved, load_ranks(resolved, progress, early=early), publishers)
        return build_on(resolved, load_worker(resolved, progress, card), publishers)
    except BaseException:
        for publisher in publishers:
            publisher.close()
        raise


def _publishers(resolved: Resolved, engine: int) -> list[Publisher]:
    """One for each team of ranks, as each has pages of its own; none without `kv_events_config`."""
    config = resolved.config
    if config.kv_events is None:
        return []
    shape = BlockShape.of(resolved.plan)
    made: list[Publisher] = []
    try:
        for team in range(config.teams):
            made.append(Publisher(config.kv_events, shape, engine + team))
    except ConfigError:
        for publisher in made:
            publisher.close()
        raise
    return made


def build_on(resolved: Resolved, ranks: LoadedRanks, publishers: Sequence[Publisher] = ()) -> EngineCore:
    """An engine core over ranks that are loaded. One plan is made for all of them.

    Raises:
        CapacityError: what is left on the fullest of the devices can't hold what was asked for.
    """
    executor = None
    try:
        plan = final_plan(
            resolved.plan,
            ranks.facts,
            resolved.gpu_memory_utilization,
            fixed=resolved.fixed_pages,
            auto=resolved.auto_length,
        )
        config = msgspec.structs.replace(resolved.config, max_model_len=plan.max_model_len)
        executor, startup = ranks.take_pages(plan.kv_bytes)
        below = open_disk(resolved, plan, executor)
    except BaseException:
        (executor or ranks).close()
        raise
    logger.info("memory plan:\n%s\n%s", plan_table(plan), startup.text())
    costs = CostModel(startup.steps, key_bytes(plan)) if config.prices_steps else None
    adapters = Adapters(config.max_loras) if config.enable_lora else None
    build = partial(build_scheduler, costs=costs, adapters=adapters) if config.teams == 1 else build_teams
    return EngineCore(
        partial(build, config, plan, _make_guides(resolved), below),
        executor,
        plan,
        vocab_size=resolved.model.vocab_size,
        max_in_flight=config.max_in_flight,
        stages=config.pipeline_parallel_size,
        enable_sleep_mode=config.enable_sleep_mode,
        host_tier=config.host_bytes > 0,
        make_exchange=make_exchange(resolved, plan, executor),
        startup=startup,
        publishers=publishers,
        adapters=adapters,
        max_cpu_loras=config.max_cpu_loras,
    )


def _draft_length(config: EngineConfig, costs: CostModel | None) -> DraftLength | None:
    """What chooses the number of drafts; None if there are no drafts."""
    asked = config.speculative
    if asked is None:
        return None
    if not config.adapts_drafts:
        return LengthByRows(asked.num_speculative_tokens_per_batch_size)
    assert costs is not None, "an engine that adapts the number of drafts prices its steps"
    return AdaptiveLength(costs, asked.lengths, _seconds(config.target_itl_ms))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _host_drafter(config: EngineConfig) -> SuffixDrafter | None:
    """What drafts on the host, if that is where drafts are made."""
    asked = config.speculative
    return SuffixDrafter(asked, new_index()) if asked is not None and asked.method == "suffix" else None


def key_bytes(plan: MemoryPlan) -> int:
    """Bytes that a generated token reads for each token before it, in the layers that see all of them."""
    return sum(
        group.useful_page_bytes // group.page_tokens for group in plan.groups if group.kind in ("full", "latent")
    )


def _make_guides(resolved: Resolved) -> MakeGuide | None:
    """The maker of guides, which follow grammars. It reads the tokenizer when the first grammar comes."""
    config, model = resolved.config, resolved.model
    if config.skip_tokenizer_init:
        return None

    def load() -> LLTokenizer:
        tokenizer = Tokenizer.from_path(config.tokenizer_path)
        ends = end_token_ids(model.eos_token_ids, tokenizer)
        return guide_tokenizer(tokenizer.to_json(), max(model.vocab_size, tokenizer.vocab_size), ends)

    return Guides(load)


def build_teams(
    config: EngineConfig, plan: MemoryPlan, make_guide: MakeGuide | None = None, below: MakeBelow | None = None
) -> TeamsScheduler:
    """One scheduler for several teams of ranks. Each has as many pages, slots and tokens of a step as an engine of one team."""
    return TeamsScheduler([build_scheduler(config, plan, make_guide, below, team) for team in range(config.teams)])


def build_scheduler(
    config: EngineConfig,
    plan: MemoryPlan,
    make_guide: MakeGuide | None = None,
    below: MakeBelow | None = None,
    team: int = 0,
    costs: CostModel | None = None,
    adapters: Adapters | None = None,
) -> Scheduler:
    """The scheduler and its memory manager: everything of an engine, or of a `team`, that needs no device. `below` is a store below its host memory."""
    sample = config.kv_cache_metrics_sample
    manager = KVManager(
        plan,
        enable_prefix_caching=config.enable_prefix_caching,
        list_fresh_pages=config.poison_fresh_pages,
        sampler=PageSampler(sample) if sample else None,
        log_events=config.kv_events is not None,
    )
    tiers = None
    if config.host_bytes:
        host = HostTier(plan, config.host_bytes, manager.events)
        tiers = Tiering(manager, host, below and below(host, team), prompts_only=config.offload_prompt_only)
    return Scheduler(
        manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        max_in_flight=config.max_in_flight,
        make_guide=make_guide,
        stages=config.pipeline_parallel_size,
        tiers=tiers,
        load_failure=config.kv_load_failure_policy,
        draft_length=_draft_length(config, costs),
        host_drafter=_host_drafter(config),
        looks_ahead=config.speculative is not None and config.speculative.method in DRAFT_MODELS,
        costs=costs,
        adapters=adapters,
        target_itl=_seconds(config.target_itl_ms),
    )
