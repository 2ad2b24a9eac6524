"""Whole generations with the FlashInfer backends over a stand-in for the library, eagerly and in recorded graphs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import fake_flashinfer
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_directory
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.effort import by_days
from helpers.graphs import RecordedGraphs
from pagerunner import LLM, SamplingParams
from pagerunner.attention import flashinfer_backend
from pagerunner.attention.flashinfer_backend import FlashInferBackend, FlashInferLatentBackend
from pagerunner.engine.worker import build
from pagerunner.errors import ConfigError

MODELS: dict[str, Any] = {
    "full": lambda path: make_checkpoint(path, "qwen3", head_dim=32),
    "latent": lambda path: make_latent_checkpoint(path, "deepseek_v3", tokenizer=True)[0],
    "hybrid": lambda path: make_hybrid_directory(path, "qwen3_next"),
}
PROMPTS = [{"prompt_token_ids": list(range(5 + n, 5 + 3 * n))} for n in (1, 9, 40, 17, 30)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 16)
    serve_anywhere(monkeypatch, FlashInferBackend, head_dims=frozenset({16, 32}))
    serve_anywhere(monkeypatch, FlashInferLatentBackend)


def serve_anywhere(monkeypatch: pytest.MonkeyPatch, backend: Any, **sizes: Any) -> None:
    """Let it serve what the stand-in computes."""
    small = replace(backend.capabilities, devices=None, package=None, compute_dtypes=None, same_dtype=False, **sizes)
    monkeypatch.setattr(backend, "capabilities", small)


@pytest.mark.parametrize(("family", "graphs"), by_days(MODELS, [False, True]))
def test_tokens_are_those_of_the_reference(
    family: str, graphs: bool, tmp_path: Path, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(MODELS[family](tmp_path))
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_in_flight": 2, "poison_fresh_pages": True}
    expected = LLM(path, **settings).generate(PROMPTS, PARAMS, use_tqdm=False)
    engine = RecordedGraphs()
    monkeypatch.setattr(build, "graph_engine", lambda device: engine)
    ran: list[str] = []
    original = fake_flashinfer.Wrapper.rows

    def rows(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(type(self).__name__ + " in a graph" * bool(self.buffers))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(fake_flashinfer.Wrapper, "rows", rows)
    if family == "latent":
        serve_anywhere(monkeypatch, FlashInferLatentBackend, latent_dims=latent_dims(path))
    llm = LLM(path, attention_backend="flashinfer", enforce_eager=not graphs, enable_sleep_mode=True, **settings)
    for _ in range(2):  # the second time with pages in other places
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in found] == [list(x.outputs[0].token_ids) for x in expected]
        llm.sleep(level=1)
        llm.wake_up()
    kind = "BatchMLAPagedAttentionWrapper" if family == "latent" else "BatchPrefillWithPagedKVCacheWrapper"
    assert kind + " in a graph" * graphs in ran


def latent_dims(path: str) -> tuple[int, int]:
    config = json.loads((Path(path) / "config.json").read_text())
    return config["kv_lora_rank"], config["qk_rope_head_dim"]


def test_asking_for_what_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    path = str(MODELS["full"](tmp_path))
    with pytest.raises(ConfigError, match="flashinfer.*can't serve any layer"):
        LLM(path, attention_backend="flashinfer")
