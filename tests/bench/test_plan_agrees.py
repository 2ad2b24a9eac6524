"""One capacity formula: whoever says how much fits says the same, to the page, for every published model."""

from __future__ import annotations

import json
import logging
import re
from types import ModuleType

import pytest

import memory_models
from helpers.recount import recount
from memory_models import ModelMemory
from pagerunner.cli.main import main
from pagerunner.cli.session import demo_model_path
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.build import build_from
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import CapacityError
from pagerunner.memory.drawing import arena_text, packed_state
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.report import plan_json, plan_table
from pagerunner.server.launch import describe_cache
from pagerunner.server.metrics import Metrics

GIB = 1 << 30
MODELS = memory_models.all_models()


def plan_of(model: ModelMemory, **wanted: object) -> MemoryPlan:
    limits = {"page_tokens": 16, "model_max_len": model.length, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    return plan_memory(model.specs, **{"budget_bytes": None, "max_model_len": "auto"} | limits | wanted)  # type: ignore[arg-type]


def tight_budget(model: ModelMemory) -> int:
    """Memory for about a third of the model's own length."""
    plan = plan_of(model, budget_bytes=64 * GIB)
    return plan.request_bytes(model.length // 3)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_auto_fit_admission_and_the_check_of_a_given_length_agree_to_the_token(
    model: ModelMemory, chunked: bool
) -> None:
    steps = (
        {"chunked_prefill": chunked} if chunked else {"chunked_prefill": False, "max_num_batched_tokens": model.length}
    )
    budget = tight_budget(model)
    plan = plan_of(model, budget_bytes=budget, **steps)
    longest = plan.max_model_len
    assert (0.25 if chunked else 0.1) * model.length < longest < model.length
    manager = KVManager(plan)
    assert manager.refusal(longest) is None
    refusal = manager.refusal(longest + 1)
    assert refusal is not None and refusal.needed > refusal.available
    given = plan_of(model, budget_bytes=budget, max_model_len=longest, **steps)
    assert KVManager(given).refusal(longest) is None
    with pytest.raises(CapacityError) as caught:
        plan_of(model, budget_bytes=budget, max_model_len=longest + 1, **steps)
    assert f"longest length that fits is {longest:,}:" in str(caught.value)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_bytes_and_the_override_that_a_refusal_names_would_do(model: ModelMemory) -> None:
    with pytest.raises(CapacityError) as caught:
        plan_of(model, budget_bytes=tight_budget(model), max_model_len=model.length)
    need = re.search(r"\(([\d,]+) bytes:", str(caught.value))
    override = re.search(r"num_gpu_blocks_override \(to (\d+)\)", str(caught.value))
    assert need is not None and override is not None
    assert plan_of(model, budget_bytes=int(need[1].replace(",", "")), max_model_len=model.length).num_slabs
    plan = plan_of(model, num_pages_override=int(override[1]), max_model_len=model.length)
    assert plan.num_gpu_blocks == int(override[1])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_report_names_the_same_pages_length_and_concurrency(model: ModelMemory) -> None:
    plan = plan_of(model, budget_bytes=40 * GIB)
    values, text = json.loads(json.dumps(plan_json(plan))), plan_table(plan)
    metrics = Metrics("m")
    describe_cache(metrics, EngineArgs(model="m"), values, plan.max_model_len)
    info = next(line for line in metrics.render().decode().splitlines() if line.startswith("vllm:cache_config_info{"))
    assert f'num_gpu_blocks="{plan.num_gpu_blocks}"' in info and f'max_model_len="{plan.max_model_len}"' in info
    assert values["num_gpu_blocks"] == plan.num_gpu_blocks
    assert f"{plan.max_concurrency:,.2f} requests" in text and values["max_concurrency"] == plan.max_concurrency
    manager = KVManager(plan)
    for number, group in enumerate(plan.groups):
        pages = manager.pool.num_slabs * manager.pool.per_slab[number]
        assert pages == plan.num_pages(number) == values["groups"][number]["num_pages"]
        assert re.search(rf"^{group.name} .* {plan.num_pages(number):,} ", text, re.MULTILINE)
    same = plan_of(model, num_pages_override=plan.num_gpu_blocks)
    assert same.num_gpu_blocks == plan.num_gpu_blocks
    assert same.max_concurrency == pytest.approx(plan.max_concurrency, rel=0.04)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_request_of_the_longest_length_really_runs_in_the_memory_that_was_found_enough(
    table: ModuleType, model: ModelMemory
) -> None:
    plan = plan_of(model, budget_bytes=tight_budget(model))
    engine = table.Engine(plan)
    ran = engine.run(table.prompt_of(plan.max_model_len - 1))
    assert engine.scheduler.stats().preemptions_total == 0
    assert ran.peak_bytes <= plan.kv_bytes
    recount(engine.manager)


def test_as_many_requests_as_the_plan_promises_fit_into_the_drawn_arena() -> None:
    for model in MODELS:
        plan = plan_of(model, budget_bytes=40 * GIB)
        state = packed_state(plan)
        requests = {owner for pages in state.page_owner for owner in pages.values()}
        assert plan.max_concurrency - 1 <= len(requests) + 1 and len(requests) <= max(plan.max_concurrency, 1)
        assert all(group.name in arena_text(plan, state) for group in plan.groups)


def test_the_log_line_and_the_verb_print_the_plan_that_runs(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    args = EngineArgs(model=str(demo_model_path()), num_gpu_blocks_override=313, max_num_seqs=1024)
    resolved = resolve(args)
    with caplog.at_level(logging.INFO):
        core = build_from(resolved)
    assert core.memory_plan is resolved.plan and plan_table(resolved.plan) in caplog.text
    words = ["plan", args.model, "--num-gpu-blocks-override", "313", "--max-num-seqs", "1024", "--json"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == plan_json(resolved.plan) | {
        "device": resolved.config.device,
        "dtype": resolved.config.dtype,
        "quantization": None,
        "refused": "",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "max_num_batched_tokens": resolved.config.max_num_batched_tokens,
        "max_num_batched_tokens_offline": resolved.config.max_num_batched_tokens,
    }
    assert resolved.plan.num_gpu_blocks == 313 and resolved.config.max_model_len == 2048


def test_an_override_beyond_the_memory_is_refused_with_the_number_that_would_do() -> None:
    args = EngineArgs(model=str(demo_model_path()), num_gpu_blocks_override=10**6)
    with pytest.raises(CapacityError, match="num_gpu_blocks_override=1000000 asks for") as caught:
        resolve(args, memory_bytes=GIB)
    most = re.search(r"lower it to (\d+)", str(caught.value))
    assert most is not None
    for pages, fits in ((int(most[1]), True), (int(most[1]) + 1, False)):
        args = EngineArgs(model=str(demo_model_path()), num_gpu_blocks_override=pages)
        if fits:
            assert resolve(args, memory_bytes=GIB).plan.num_gpu_blocks == pages
        else:
            with pytest.raises(CapacityError):
                resolve(args, memory_bytes=GIB)
