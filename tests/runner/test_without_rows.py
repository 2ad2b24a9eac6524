"""A plan without rows: what else it brings is done, whether other teams of ranks compute meanwhile or nobody does."""

from __future__ import annotations

from typing import cast

import pytest

from helpers.checkpoints import make_checkpoint
from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.startup.build import build_from
from pagerunner.engine.startup.resolve import resolve
from pagerunner.runner.runner import ModelRunner
from pagerunner.types import PageCopy, StepPlan, TableWrite


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    model = str(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2))
    return build_from(resolve(EngineArgs(model=model, max_num_seqs=4, max_model_len=128, kv_cache_memory_bytes=2**22)))


@pytest.mark.parametrize("most_tokens", [0, 5])
def test_pages_are_copied_and_tables_written_and_the_model_runs_only_for_others(
    core: EngineCore, most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = cast(ModelRunner, core._executor._runner)
    joined: list[int] = []
    monkeypatch.setattr(type(runner._model), "join", lambda model, tokens: joined.append(tokens))
    memory, page_bytes = runner._pages._bytes, core.memory_plan.groups[0].page_bytes
    source, target = memory[:page_bytes], memory[3 * page_bytes : 4 * page_bytes]
    source.fill_(7 + most_tokens)
    plan = StepPlan(
        step_id=0,
        rows=[],
        copies=[PageCopy(0, 0, 3 * page_bytes)],
        table_writes=[TableWrite(0, 1, 0, [40 + most_tokens])],
        most_tokens=most_tokens,
    )
    assert runner.run(plan).result().token_ids == []
    assert target.equal(source) and 40 + most_tokens in runner._tables.all.entries
    assert joined == ([5] if most_tokens else [])
