"""Pages that have turned wrong in memory that has no checksum: who reads them ends with an error, and the same prompt is right the next time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.test_disk_tier import below, written
from engine.test_host_tier import PARAMS, PROMPTS, TIER, LateTransfers, connector, engine, nothing_held
from helpers.families import MAKERS
from helpers.once import made_once
from pagerunner import LLM
from pagerunner.engine.worker import build

pytest.importorskip("transformers")
PROMPT, OTHERS = PROMPTS[3], [prompt for prompt in PROMPTS if prompt is not PROMPTS[3]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[LateTransfers]:
    """The transfers of each engine, which end at the next look."""
    kind = type("Now", (LateTransfers,), {"made": [], "lag": 0})
    monkeypatch.setattr(build, "Transfers", kind)
    return kind


def ask(llm: LLM, prompt: list[int]) -> tuple[str, list[int], int]:
    """The error, the tokens, and how many were found. Prompts go one after the other."""
    [output] = llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
    return output.error or "", list(output.outputs[0].token_ids), output.num_cached_tokens


def push_out(llm: LLM) -> None:
    """Other prompts take the device's pages."""
    for prompt in OTHERS:
        assert not ask(llm, prompt)[0]


def names(llm: LLM) -> list[tuple[int, bytes]]:
    """Groups and keys of all pages of PROMPT."""
    manager = llm._core._scheduler.manager
    chain = manager.chain("")
    chain.cover(PROMPT, len(PROMPT))
    return list(manager.keys_from(chain, 0))


def spoil_host(llm: LLM, transfers: Any) -> None:
    """The first page of PROMPT turns into NaN in host memory."""
    host, (group, key) = llm._core._scheduler.tiers.host, names(llm)[0]
    page = host.index.find(group, key)
    assert page is not None
    [start] = host.places(group, [page])
    transfers.host.bytes[start : start + llm._core.memory_plan.groups[group].page_bytes].fill_(255)


def test_a_wrong_page_of_host_memory_costs_its_prompt_one_error(
    checkpoint: Callable[[str], str], memory: type[LateTransfers]
) -> None:
    llm = engine(checkpoint("qwen3"), **TIER)
    _, wanted, _ = ask(llm, PROMPT)
    push_out(llm)
    spoil_host(llm, memory.made[-1])
    error, _, _ = ask(llm, PROMPT)
    assert "logits hold NaN" in error
    assert ask(llm, PROMPT) == ("", wanted, 0), "no page is believed that the wrong one may have gone into"
    push_out(llm)
    error, tokens, found = ask(llm, PROMPT)
    assert (error, tokens) == ("", wanted) and found > 0, "stored anew"
    nothing_held(llm)


def test_a_wrong_page_of_the_device_costs_its_prompt_one_error(
    checkpoint: Callable[[str], str], memory: type[LateTransfers]
) -> None:
    """A page of the first chunk, which the last one reads. Host memory may have got the same bytes."""
    llm = engine(checkpoint("qwen3"), **TIER)
    _, wanted, _ = ask(llm, PROMPT)
    group, key = names(llm)[0]
    core, page = llm._core, llm._core._scheduler.manager.index.find(group, key)
    assert page is not None
    start = core.memory_plan.page_offset(group, page)
    memory.made[-1]._bytes[start : start + core.memory_plan.groups[group].page_bytes].fill_(255)
    assert "logits hold NaN" in ask(llm, PROMPT)[0]
    assert core._scheduler.manager.index.find(group, key) is None
    assert ask(llm, PROMPT) == ("", wanted, 0)


def test_what_is_distrusted_is_struck_off_the_disk(
    checkpoint: Callable[[str], str], memory: type[LateTransfers], tmp_path: Path
) -> None:
    """Whether the disk has a good copy or a bad one isn't known: the fault is found in what was computed."""
    path, root = checkpoint("qwen3"), tmp_path / "kv"

    def started(directory: Path) -> LLM:
        tiers = [{"type": "fs", "root_dir": str(directory), "max_bytes": 64_000_000}]
        return engine(path, **connector(cpu_bytes_to_use=60_000_000, secondary_tiers=tiers))

    def on_disk(llm: LLM) -> int:
        return sum(below(llm)._store.find(group, [key])[0] for group, key in names(llm))

    first = started(root)
    _, wanted, _ = ask(first, PROMPT)
    push_out(first)
    pages, held = written(first), on_disk(first)
    assert held == len(PROMPT) // 16
    spoil_host(first, memory.made[-1])
    assert "logits hold NaN" in ask(first, PROMPT)[0]
    host = first._core._scheduler.tiers.host
    assert not any(host.index.find(*name) is not None for name in names(first)) and on_disk(first) == 0
    assert written(first) == pages - held, "those of others stay"
    below(first)._store.close()
    second = started(root)
    assert ask(second, PROMPT) == ("", wanted, 0)
    assert written(second) == pages, "written again"
    nothing_held(second)
