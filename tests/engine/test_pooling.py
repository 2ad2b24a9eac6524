"""Embeddings are transformers' final hidden states, whatever memory does meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from helpers.checkpoints import make_checkpoint
from helpers.graphs import RecordedGraphs
from pagerunner import LLM, SamplingParams
from pagerunner.engine.worker import build
from pagerunner.errors import ConfigError, InvalidRequestError, RequestFailedError

SHARED = [7, 300, 21, 9, 110] * 8
PROMPTS = [{"prompt_token_ids": SHARED[: 8 * (n % 4)] + [4 + n, 60 + n, 33] * (1 + 5 * n)} for n in range(7)]
CONDITIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "chunks": {"max_num_batched_tokens": 24, "max_in_flight": 2},
    "tight": {"num_gpu_blocks_override": 9, "max_model_len": 128, "max_num_batched_tokens": 48, "max_in_flight": 2},
    "no cache": {"enable_prefix_caching": False},
    "poison": {"poison_fresh_pages": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pooling"), "qwen3")


@pytest.fixture(scope="module")
def hidden(model: Path) -> list[np.ndarray]:
    """Of each prompt, [T, D]."""
    oracle = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [oracle(torch.tensor([p["prompt_token_ids"]])).last_hidden_state[0].numpy() for p in PROMPTS]


def start(model: Path, pooling: str, **settings: Any) -> LLM:
    settings = {"max_model_len": 256, "max_num_seqs": 4, "dtype": "float32", **settings}
    return LLM(str(model), use_tqdm=False, pooler_config={"pooling_type": pooling}, **settings)


def expected(hidden: list[np.ndarray], pooling: str) -> list[np.ndarray]:
    vectors = [states[-1] if pooling == "LAST" else states.mean(0) for states in hidden]
    return [vector / np.linalg.norm(vector) for vector in vectors]


def close(found: list[list[float]], wanted: list[np.ndarray]) -> bool:
    return all(np.abs(np.array(one) - other).max() < 1e-5 for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_embeddings_equal_the_oracles(model: Path, hidden: list[np.ndarray], pooling: str, condition: str) -> None:
    llm = start(model, pooling, **CONDITIONS[condition])
    wanted = expected(hidden, pooling)
    assert close(llm.embed(PROMPTS, use_tqdm=False), wanted)
    assert close(llm.embed(PROMPTS, use_tqdm=False), wanted)  # now their pages are cached
    assert llm.memory_state()["requests"] == []


def test_steps_of_graphs_give_way(model: Path, hidden: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "graph_engine", lambda device: RecordedGraphs())
    llm = start(model, "MEAN", max_num_batched_tokens=64, attention_backend="triton")
    assert close(llm.embed(PROMPTS, use_tqdm=False), expected(hidden, "MEAN"))


def test_no_token_is_generated_and_others_are_left_alone(model: Path) -> None:
    llm = start(model, "LAST")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [alone] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    before = llm.stats().generation_tokens_total
    stream = llm.stream(PROMPTS[0], params)
    next(stream)
    llm.embed(PROMPTS, use_tqdm=False)
    assert list(stream)[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert llm.stats().generation_tokens_total == before + 6
    assert llm.stats().prompt_tokens_total == sum(len(p["prompt_token_ids"]) for p in [*PROMPTS, *PROMPTS[:1] * 2])


def test_who_does_not_say_how_is_asked(model: Path) -> None:
    llm = LLM(str(model), use_tqdm=False, max_model_len=64)
    with pytest.raises(ConfigError, match="pooler_config"):
        llm.embed("a text")
    with pytest.raises(InvalidRequestError, match="at most 255"):
        start(model, "LAST").embed({"prompt_token_ids": [5] * 300})


def test_an_embedding_model_saved_without_its_head(model: Path, hidden: list[np.ndarray], tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(model / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in ("Pooling", "Normalize")]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}', encoding="utf-8")
    llm = LLM(str(tmp_path), use_tqdm=False, max_model_len=256, dtype="float32")
    assert close(llm.embed(PROMPTS, use_tqdm=False), expected(hidden, "LAST"))


def test_a_prompt_without_a_vector_is_an_error_that_says_why(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "damaged")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][300] = 3e38
    save_file(weights, tmp_path / "damaged" / "model.safetensors")
    with pytest.raises(RequestFailedError, match=r"A prompt of 3 tokens has no vector.*NaN or infinity"):
        start(tmp_path / "damaged", "MEAN").embed({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
