"""The engine's greedy tokens and log-probabilities equal transformers' in float32, whatever the memory does."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_hybrid import HYBRID_FAMILIES, make_hybrid_directory
from helpers.checkpoints_latent import LATENT_FAMILIES, make_latent_checkpoint
from helpers.checkpoints_window import WINDOW_FAMILIES, make_window_checkpoint
from helpers.effort import TEST_DAY, effort, share_of_the_day
from pagerunner import LLM, SamplingParams

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-grouped": ("llama", {}),
    "llama-full-heads-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-3-rope-biases": ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama-linear-odd-sizes": ("llama", {"rope_parameters": LINEAR_ROPE, "vocab_size": 1013, "head_dim": 20}),
    "mistral-one-kv-head": ("mistral", {"num_key_value_heads": 1, "head_dim": 24}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-full-heads": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3-grouped": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-odd-vocab": ("qwen3", {"tie_word_embeddings": True, "vocab_size": 777}),
    "qwen3-moe": ("qwen3_moe", {}),
    "gemma-3": ("gemma3_text", {}),
    "gpt-oss": ("gpt_oss", {}),
    "deepseek-v2-lite-yarn": (
        "deepseek_v2",
        {"rope_parameters": {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": ("deepseek_v3", {}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3.5": ("qwen3_5", {}),
    "qwen3.5-moe": ("qwen3_5_moe", {}),
    "qwen3.5-windowed": ("qwen3_5_windowed", {}),
    "bamba": ("bamba", {"num_key_value_heads": 3, "mamba_d_state": 4}),
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "budget-7": {"max_num_batched_tokens": 7},
    "budget-64-two-in-flight": {"max_num_batched_tokens": 64, "max_in_flight": 2},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "no-chunked-prefill": {"enable_chunked_prefill": False},
    "tight-pool": {"num_gpu_blocks_override": 9, "max_model_len": 128},
    "tight-pool-two-in-flight": {
        "num_gpu_blocks_override": 9,
        "max_model_len": 128,
        "max_in_flight": 2,
        "max_num_batched_tokens": 64,
    },
    "page-48-poisoned": {"block_size": 48, "poison_fresh_pages": True},
    "page-1": {"block_size": 1},
    "poisoned-tight": {"num_gpu_blocks_override": 10, "max_model_len": 128, "poison_fresh_pages": True},
}
MANY_STEPS = {"budget-7": effort(12, None)}  # so few prompts where a prompt takes many steps
NEW_TOKENS = 10
# As above, where a request of 128 tokens needs pages of more than one group; the number counts pages of the larger one.
TIGHT_PAGES = {"gemma3_text": 14, "gpt_oss": 14, "qwen3_5_windowed": 13}

# One variant of each kind of memory and of each kind of layer meets every condition within five days, and each condition meets
# one or two of them on a day. The others differ from these in their config alone: with fewer prompts they meet the defaults, and
# one other condition, on each day another one.
# `make test-thorough` gives all of them all.
EVERY_CONDITION = effort(
    ("llama-grouped", "qwen3-moe", "gemma-3", "gpt-oss", "deepseek-v3", "qwen3-next", "qwen3.5-windowed", "bamba"),
    tuple(VARIANTS),
)
BATCH_SIZES = (2, 3, 8, 17, 32)


def _num_prompts(variant: str) -> int:
    return 33 if variant in EVERY_CONDITION else 12


def _batch_sizes(variant: str) -> list[int]:
    """One row, and on each day another one of the sizes that the variant has prompts for."""
    possible = [size for size in BATCH_SIZES if size <= _num_prompts(variant)]
    turn = (TEST_DAY + list(VARIANTS).index(variant)) % len(possible)
    return [1, *effort([possible[turn]], possible)]


def _conditions(variant: str) -> Sequence[str]:
    first, *others = CONDITIONS
    if variant not in EVERY_CONDITION:
        share = share_of_the_day(len(others), 9, first=list(VARIANTS).index(variant))
        return [first, *(others[number] for number in share)]
    share = share_of_the_day(len(CONDITIONS), 5, first=EVERY_CONDITION.index(variant))
    return [list(CONDITIONS)[number] for number in share]


CONDITION_CASES = [(variant, condition) for variant in VARIANTS for condition in _conditions(variant)]
assert {condition for _, condition in CONDITION_CASES} == set(CONDITIONS)
BATCH_CASES = [(variant, count) for variant in VARIANTS for count in _batch_sizes(variant)]
assert {count for _, count in BATCH_CASES} == {1, *BATCH_SIZES}


@dataclass(frozen=True)
class Oracle:
    """Prompts with what transformers makes of them: greedy tokens and their log-probabilities."""

    family: str
    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    first: list[Any]
    """What the engine made of them under the defaults."""


def _prompts(vocab_size: int, count: int) -> list[list[int]]:
    rng = random.Random(7)
    shared = [rng.randrange(4, vocab_size) for _ in range(40)]
    prompts = []
    for index in range(count):
        own = [rng.randrange(4, vocab_size) for _ in range(rng.randint(1, 50))]
        prompts.append(shared[: rng.choice((16, 33, 40))] + own if index % 3 == 0 else own)
    return prompts


def _make_checkpoint(variant: str, directory: Path) -> Path:
    family, overrides = VARIANTS[variant]
    if family in LATENT_FAMILIES:
        return make_latent_checkpoint(directory, family, tokenizer=True, **overrides)[0]
    make = make_window_checkpoint if family in WINDOW_FAMILIES else make_checkpoint
    make = make_hybrid_directory if family in HYBRID_FAMILIES else make
    return make(directory, family, **overrides)


@torch.inference_mode()
def _greedy(
    model: Any, prompts: list[list[int]], guesses: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """The most likely tokens after each prompt, one at a time, and their log-probabilities.

    The model reads prompts with guesses behind them, all at once, and every guess becomes the token that is the most likely one
    there. Right tokens stay, and at least one more is right after each round. So guesses decide the number of rounds alone.
    """
    rows = torch.arange(len(prompts))[:, None]
    places = torch.tensor([len(prompt) for prompt in prompts])[:, None] + torch.arange(NEW_TOKENS)
    ids = torch.zeros(len(prompts), int(places.max()) + 1, dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    found = torch.tensor(guesses)
    for _ in range(NEW_TOKENS + 1):
        ids[rows, places] = tokens = found
        logits = model(ids, use_cache=False).logits[rows, places - 1]
        found = logits.argmax(-1)
        if torch.equal(found, tokens):
            break
    else:
        raise AssertionError("a token depends on what stands behind it")
    logprobs = logits.float().log_softmax(-1).gather(-1, found[..., None])[..., 0]
    return found.tolist(), logprobs.tolist()


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """What transformers makes of each variant, asked once."""
    from windowed import load_model

    def ask(variant: str) -> Oracle:
        path = _make_checkpoint(variant, tmp_path_factory.mktemp("oracle"))
        model = load_model(path, dtype=torch.float32, attn_implementation="eager").eval()
        prompts = _prompts(model.config.vocab_size, _num_prompts(variant))
        _, first = _generate(path, prompts)
        tokens, logprobs = _greedy(model, prompts, [output.token_ids for output in first])
        return Oracle(VARIANTS[variant][0], path, prompts, tokens, logprobs, first)

    return functools.cache(ask)


def _generate(path: Path, prompts: list[list[int]], **conditions: Any) -> tuple[LLM, list[Any]]:
    llm = LLM(str(path), **conditions)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return llm, [output.outputs[0] for output in outputs]


@pytest.mark.parametrize(("variant", "condition"), CONDITION_CASES)
def test_tokens_and_logprobs_under_memory_conditions(
    oracles: Callable[[str], Oracle], variant: str, condition: str
) -> None:
    oracle = oracles(variant)
    conditions = dict(CONDITIONS[condition])
    if "num_gpu_blocks_override" in conditions:
        conditions["num_gpu_blocks_override"] = TIGHT_PAGES.get(oracle.family, conditions["num_gpu_blocks_override"])
    prompts = oracle.prompts[: MANY_STEPS.get(condition)]
    llm, outputs = _generate(oracle.path, prompts, **conditions) if conditions else (None, oracle.first)

    assert [output.token_ids for output in outputs] == oracle.tokens[: len(prompts)]
    for output, expected in zip(outputs, oracle.logprobs, strict=False):
        found = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        assert found == pytest.approx(expected, abs=1e-4)
    if llm is not None and "tight" in condition:
        assert llm.stats().preemptions_total > 0, "the pool was not small enough to preempt anything"


@pytest.mark.days(2)
@pytest.mark.parametrize(("variant", "count"), BATCH_CASES)
def test_tokens_for_every_batch_size(oracles: Callable[[str], Oracle], variant: str, count: int) -> None:
    oracle = oracles(variant)
    _, outputs = _generate(oracle.path, oracle.prompts[:count])

    assert [output.token_ids for output in outputs] == oracle.tokens[:count]


@pytest.mark.days(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_second_run_continues_from_the_first_ones_pages(oracles: Callable[[str], Oracle], variant: str) -> None:
    oracle = oracles(variant)
    llm, first = _generate(oracle.path, oracle.prompts)
    before = llm.stats().prefix_hits_total
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in oracle.prompts]
    second = llm.generate(prompts, params, use_tqdm=False)

    assert [output.outputs[0].token_ids for output in second] == [output.token_ids for output in first]
    assert first[0].token_ids == oracle.tokens[0]
    cells = [(len(prompt) - 1) // 16 * 16 for prompt in oracle.prompts]
    assert llm.stats().prefix_hits_total - before == sum(cells)
