"""Page layouts that engines with one block size for everything refuse or pad: they plan and run, with the right tokens."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import unequal
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.once import made_once
from pagerunner import LLM, SamplingParams
from pagerunner.attention.calls import AttentionCall
from pagerunner.attention.capability import Capabilities
from pagerunner.batch import KVPages
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import CapacityError, InvalidRequestError
from pagerunner.models.checkpoint.loader import build_model, dummy_weights, materialize, weights_bytes
from pagerunner.models.configs.reader import read_model_config
from pagerunner.models.registry import FAMILIES

pytest.importorskip("transformers")

Tokens = list[list[int]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    layers = ["sliding_attention"] * 30
    makers: dict[str, Callable[[Path], Path]] = {
        "qwen3": lambda path: make_checkpoint(path, "qwen3"),
        "gemma-3": lambda path: make_window_checkpoint(path, "gemma3_text"),
        "1 + 30": lambda path: make_window_checkpoint(
            path, "gemma3_text", num_hidden_layers=31, layer_types=[*layers, "full_attention"]
        ),
    }
    return made_once(tmp_path_factory, makers)


def prompts(count: int = 5) -> Tokens:
    ids = random.Random(11)
    shared = [ids.randrange(4, 290) for _ in range(150)]
    lengths = [ids.randrange(3, 60) for _ in range(count)]
    return [
        shared[: 150 * (number % 2)] + [ids.randrange(4, 290) for _ in range(n)] for number, n in enumerate(lengths)
    ]


def generate(path: str, asked: Tokens, max_tokens: int = 12, **options: Any) -> Tokens:
    llm = LLM(path, skip_tokenizer_init=True, use_tqdm=False, **{"max_model_len": 384} | options)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


@functools.cache
def one_by_one(path: str) -> Tokens:
    """Tokens of four prompts that never share a step or a page."""
    return [generate(path, [prompt], enable_prefix_caching=False)[0] for prompt in prompts(4)]


# -- layers of unequal head sizes


class _Dense:
    """Causal attention over the one sequence that the step is."""

    capabilities = Capabilities(forms=frozenset({"full", "window"}))

    def __init__(self, window: int | None) -> None:
        self.window = window

    def run(self, call: AttentionCall) -> torch.Tensor:
        (q, k, v), scale = call.inputs, call.scores.scale
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (distance < 0) | (distance >= (self.window or len(q)))
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def dense_tokens(path: Path, asked: Sequence[list[int]], count: int) -> Tokens:
    """Greedy tokens of the same weights, every sequence computed whole for each of its tokens."""
    model = build_model(read_model_config(path), "float32")
    materialize(model, torch.empty(weights_bytes(model), dtype=torch.uint8))
    dummy_weights(model)
    groups = [SimpleNamespace(backend=_Dense(unequal.WINDOW if window else None)) for _, _, window in unequal.LAYERS]
    none = torch.empty(0)
    kv = [KVPages(index, none, none) for index in range(len(groups))]
    found = []
    for prompt in asked:
        tokens = list(prompt)
        for _ in range(count):
            ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
            hidden = model(SimpleNamespace(token_ids=ids, positions=positions, groups=groups, kv=kv, rows=None))  # type: ignore[arg-type]
            tokens.append(int(model.compute_logits(hidden[-1:]).argmax()))
        found.append(tokens[len(prompt) :])
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 128, "poison_fresh_pages": True},
        {"block_size": 48, "num_gpu_blocks_override": 15, "max_in_flight": 2, "poison_fresh_pages": True},
        {"block_size": 1, "max_num_batched_tokens": 33, "kv_cache_memory_bytes": 1 << 22},
    ],
    ids=["defaults", "128-poisoned", "48-tight", "1-budget-33"],
)
def test_layers_of_unequal_head_sizes_share_pages_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(FAMILIES, "unequal", unequal.FAMILY)
    path, asked = unequal.write_config(tmp_path), prompts(4)
    plan = resolve(EngineArgs(model=str(path), max_model_len=384, **options)).plan
    assert [len(group.layers) for group in plan.groups] == [3, 2]
    assert len({part.spec.value_offset(16) // part.spec.num_kv_heads for part in plan.groups[0].layers}) == 3  # type: ignore[attr-defined]
    expected = dense_tokens(path, asked, 10)
    assert generate(str(path), asked, 10, load_format="dummy", **options) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected) and len(set(sum(expected, []))) > 4


# -- 1 full + 30 window layers; 313 pages for 1,024 sequences


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "options",
    [{"block_size": 16}, {"block_size": 128, "poison_fresh_pages": True}, {"num_gpu_blocks_override": 20}],
    ids=["16", "128", "tight"],
)
def test_one_full_and_30_window_layers(checkpoints: Callable[[str], str], options: dict[str, Any]) -> None:
    path, asked = checkpoints("1 + 30"), prompts(4)
    plan = resolve(EngineArgs(model=path, max_model_len=384, **options)).plan
    assert sorted(len(group.layers) for group in plan.groups) == [1, 30] and plan.waste < 0.04
    assert generate(path, asked, **options) == one_by_one(path)


def test_313_pages_for_1024_sequences(checkpoints: Callable[[str], str]) -> None:
    path, asked = checkpoints("qwen3"), prompts(40)
    limits = {"num_gpu_blocks_override": 313, "max_num_seqs": 1024}
    llm = LLM(path, skip_tokenizer_init=True, use_tqdm=False, max_model_len="auto", **limits)
    assert llm.memory_plan.num_pages(0) == 313 and llm.memory_plan.max_num_seqs == 1024
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False)
    expected = generate(path, asked, 30, enable_prefix_caching=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    with pytest.raises(CapacityError, match=r"num_gpu_blocks_override \(to 24\)"):
        LLM(path, max_model_len=384, **limits | {"num_gpu_blocks_override": 23})
    LLM(path, max_model_len=384, skip_tokenizer_init=True, **limits | {"num_gpu_blocks_override": 24})
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        llm.generate([{"prompt_token_ids": [5] * 5008}], params, use_tqdm=False)
