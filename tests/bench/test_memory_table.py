"""The memory table: what published models need stays below what was promised."""

from __future__ import annotations

from types import ModuleType

import pytest

import memory_models
from helpers.published import all_published
from memory_models import ModelMemory
from pagerunner.models.configs.reader import read_model_config
from project import checks

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("model", "tokens", "most"),
    [
        (memory_models.gemma3_27b(), 131_072, 10.6 * GIB),
        (memory_models.gpt_oss_20b(), 131_072, 3.05 * GIB),
        (memory_models.deepseek_v4_flash(), 65_536, 0.6 * GIB),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_one_request_fits_into_so_much(table: ModuleType, model: ModelMemory, tokens: int, most: float) -> None:
    assert table.least_bytes(model, tokens) <= most


@pytest.mark.parametrize(
    ("model", "most"), [(memory_models.qwen3_next_80b(), 41 * MIB), (memory_models.qwen35_27b(), 156 * MIB)]
)
def test_a_short_request_holds_its_state_and_a_few_pages(table: ModuleType, model: ModelMemory, most: int) -> None:
    assert table.model_plan(model, 40 * GIB).request_bytes(100) <= most


def test_the_longest_automatic_length_of_gemma3_in_10_gib(table: ModuleType) -> None:
    assert table.model_plan(memory_models.gemma3_27b(), 10 * GIB, "auto").max_model_len >= 120_000


@pytest.mark.parametrize("model", memory_models.all_models(), ids=lambda model: model.name)
def test_no_model_wastes_more_than_4_percent_of_a_slab(table: ModuleType, model: ModelMemory) -> None:
    plan = table.model_plan(model, 40 * GIB)
    assert plan.waste <= 0.04
    assert 1 - plan.kv_bytes / plan.budget_bytes <= 0.01


def test_published_sizes_are_reproduced() -> None:
    """Bytes per token and per state as the models' own tables give them."""
    by_name = {model.name: model.specs for model in memory_models.all_models()}
    assert sum(spec.page_bytes(1) for spec in by_name["DeepSeek-V3"]) == 70_272
    assert sum(spec.page_bytes(64) for spec in by_name["DeepSeek-V3.2 (fp8)"]) == 61 * (41_984 + 8_448)
    assert by_name["Qwen3-Next-80B"][0].page_bytes(1) == 1_097_728
    assert len(by_name["Qwen3.5-27B"]) == 64 and len(by_name["Gemma-3-27B"]) == 62
    flash = by_name["DeepSeek-V4-Flash (fp8)"]
    sizes = {spec.lifetime: spec.page_bytes(256) for spec in flash if spec.kind != "recurrent"}
    assert sizes == {("window", 128): 4 * 37_376, ("latent", 4): 37_376 + 8_448, ("latent", 128): 1_168}
    states = sorted({spec.page_bytes(1) for spec in flash if spec.kind == "recurrent"})
    assert states == [8 * (8_192 + 2_048), 64 * 8_192]


def test_deepseek_v4_flash_is_what_the_engine_keeps() -> None:
    config = read_model_config(all_published()["deepseek-ai/DeepSeek-V4-Flash"].file, quantised=True)
    told, kept = memory_models.deepseek_v4_flash().specs, config.layer_specs("fp8_e4m3")
    assert [(spec.lifetime, spec.page_bytes(128)) for spec in told] == [
        (spec.lifetime, spec.page_bytes(128)) for spec in kept
    ]


def test_moving_requests_reach_the_promised_figures(table: ModuleType) -> None:
    plan, long = table.model_plan(memory_models.deepseek_v4_flash(), 40 * GIB), table.prompt_of(65_536)
    flash = table.Engine(plan).run(long)
    assert flash.peak_bytes <= 0.267 * GIB
    assert 0 < flash.cached_bytes <= 0.253 * GIB
    alone = table.Engine(plan, caches=False).run(long)
    assert alone.peak_bytes <= 0.253 * GIB and not alone.cached_bytes
    assert flash.peak_bytes - alone.peak_bytes > 11 * MIB, "a snapshot of state is counted in the step that takes it"
    hybrid = table.Engine(table.model_plan(memory_models.qwen3_next_80b(), 40 * GIB))
    prompt = table.prompt_of(10_000)
    assert hybrid.run(prompt).prefill_steps == 2, "no forward is added for the snapshot"
    assert hybrid.reachable_hit(prompt) == 9_984


def test_the_page_shows_what_the_script_prints(table: ModuleType) -> None:
    page = (checks.ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    shown = {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in page.splitlines()}
    for row in [*table.planned_rows(), *table.needs_rows()]:
        assert (row.what, row.theirs, row.ours) in shown
    assert ("20 full + 30 window layers, slots left empty", "33 %", "0%") in shown


def test_the_managers_work_stays_within_twice_the_promised_time(table: ModuleType) -> None:
    """By processor time. The page has figures of an idle machine, which are about half of what was promised."""
    assert table.hashing_seconds(131_072) <= 2 * 12e-3
    for model in (memory_models.deepseek_v4_flash(), memory_models.gemma3_27b()):
        prefill, decode = table.manager_seconds(model, 65_536)
        assert prefill <= 2 * 8e-3 and decode <= 2 * 5e-6


def test_the_table_names_every_row_and_both_engines(table: ModuleType) -> None:
    rows = [*table.planned_rows(), *table.needs_rows()]
    assert len(rows) == 7 + 12 and all(row.what and row.ours for row in rows)
    lines = table._markdown("title", rows)
    assert len({len(line) for line in lines}) == 1 and lines[0].split("|")[2].strip() == "vLLM 0.26"
