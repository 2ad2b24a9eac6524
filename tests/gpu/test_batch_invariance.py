"""`batch_invariant` on the device: log-probabilities are bitwise the same, whatever else a step computes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from helpers.device import needs_cuda
from pagerunner import LLM, SamplingParams
from pagerunner.bench.workloads import SHAPES, write_config, write_model

pytestmark = needs_cuda
RANDOM = Random(5)
LENGTHS = (1, 2, 17, 300, 513, 1100, 2049)
PROMPTS = [[RANDOM.randrange(300, 9000) for _ in range(length)] for length in LENGTHS]
OTHERS = [[RANDOM.randrange(300, 9000) for _ in range(RANDOM.randrange(1, 400))] for _ in range(256)]
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, logprobs=3, detokenize=False)
PLAIN = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)

Numbers = list[list[tuple[int, float]]]


def numbers(output: Any) -> Numbers:
    """A request's tokens, and the log-probabilities of the tokens that are told at each place, in full."""
    (one,) = output.outputs
    return [sorted((token, entry.logprob) for token, entry in place.items()) for place in one.logprobs]


@pytest.fixture(scope="module", params=["qwen3-0.6b", "qwen3-30b-a3b"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen3-0.6B, and six layers of Qwen3-30B-A3B, with random weights."""
    if request.param == "qwen3-0.6b":
        return str(write_model(request.param, tmp_path_factory.mktemp("model")))
    fields = SHAPES[request.param] | {"num_hidden_layers": 6}
    return str(write_config(tmp_path_factory.mktemp("model"), **fields))


def engine(model: str, **options: Any) -> LLM:
    usual = {"batch_invariant": True, "max_model_len": 4096, "kv_cache_memory_bytes": 8 << 30, "max_num_seqs": 256}
    options = usual | {"cudagraph_capture_sizes": (1, 8, 32, 64, 256)} | options
    return LLM(model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **options)


def generated(llm: LLM, others: int = 0) -> list[Numbers]:
    params = [DRAWN] * len(PROMPTS) + [PLAIN] * others
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS + OTHERS[:others]], params, use_tqdm=False)
    return [numbers(output) for output in outputs[: len(PROMPTS)]]


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return engine(model, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Numbers]:
    return [numbers(llm.generate({"prompt_token_ids": ids}, DRAWN, use_tqdm=False)[0]) for ids in PROMPTS]


def different(found: list[Numbers], want: list[Numbers]) -> dict[int, int]:
    """By length of prompt, the first place that differs."""
    return {
        length: next(at for at, both in enumerate(zip(one, two, strict=True)) if both[0] != both[1])
        for length, one, two in zip(LENGTHS, found, want, strict=True)
        if one != two
    }


@pytest.mark.parametrize("others", [0, 2, 17, 64, 249])
def test_others_change_nothing(llm: LLM, alone: list[Numbers], others: int) -> None:
    assert different(generated(llm, others), alone) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 2048},
        {"enforce_eager": True},
        {"num_gpu_blocks_override": 300, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_chunks_prefix_hits_graphs_and_preemption_change_nothing(
    model: str, alone: list[Numbers], options: dict[str, Any]
) -> None:
    other = engine(model, **options)
    assert different(generated(other, 17), alone) == {}
    assert different(generated(other, 64), alone) == {}, "with prefix hits"


def test_prefill_is_decode(llm: LLM) -> None:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], DRAWN, use_tqdm=False)
    texts = [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    told = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": ids} for ids in texts], told, use_tqdm=False)
    for prompt, text, output, score in zip(PROMPTS, texts, outputs, scored, strict=True):
        drawn = [
            entry[token].logprob for token, entry in zip(text[len(prompt) :], output.outputs[0].logprobs, strict=True)
        ]
        found = [entry[token].logprob for token, entry in zip(text, score.prompt_logprobs or [], strict=True) if entry]
        assert found[len(prompt) - 1 :] == drawn, len(prompt)


def test_without_it_sums_are_made_in_other_orders(model: str, alone: list[Numbers]) -> None:
    """So the tests above can fail."""
    assert different(generated(engine(model, batch_invariant=False), 64), alone)
