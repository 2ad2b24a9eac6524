"""`batch_invariant` on the device: log-probabilities are bitwise the same, whatever else a step computes."""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.device import needs_cuda
from helpers.patience import until
from pagerunner import LLM, ConfigError, SamplingParams
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


@pytest.fixture(scope="module", params=["qwen3-0.6b", "qwen3-30b-a3b", "gpt-oss-20b"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen3-0.6B, six layers of Qwen3-30B-A3B, and four of gpt-oss-20b, which has windows and sinks, with random weights."""
    if request.param == "qwen3-0.6b":
        return str(write_model(request.param, tmp_path_factory.mktemp("model")))
    layers = 6 if request.param == "qwen3-30b-a3b" else 4
    fields = SHAPES[request.param] | {"num_hidden_layers": layers}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    return str(write_config(tmp_path_factory.mktemp(request.param), **fields))


def engine(model: str, **options: Any) -> LLM:
    pages = 2 << 30 if "30b" in model or "gpt-oss" in model else 8 << 30  # of few layers, and of all 28
    usual = {"batch_invariant": True, "max_model_len": 4096, "kv_cache_memory_bytes": pages, "max_num_seqs": 256}
    options = usual | {"cudagraph_capture_sizes": (1, 8, 32, 64, 256)} | options
    return LLM(model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **options)


def generated(llm: LLM, others: int = 0) -> list[Numbers]:
    params = [DRAWN] * len(PROMPTS) + [PLAIN] * others
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS + OTHERS[:others]], params, use_tqdm=False)
    return [numbers(output) for output in outputs[: len(PROMPTS)]]


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*workspace")  # torch's, of what users can't change
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
    [{"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 2048}, {"enforce_eager": True}],
    ids=str,
)
def test_chunks_prefix_hits_and_graphs_change_nothing(
    model: str, alone: list[Numbers], options: dict[str, Any]
) -> None:
    other = engine(model, **options)
    assert different(generated(other, 17), alone) == {}
    assert different(generated(other, 64), alone) == {}, "with prefix hits"
    assert other.stats().prefix_hits_total


def test_preemption_changes_nothing(model: str, llm: LLM) -> None:
    """Six rows begin with 19 pages each, and end with 27: there are 140."""
    long = SamplingParams(temperature=1.0, seed=4, max_tokens=120, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": PROMPTS[-1][first : first + 300]} for first in range(0, 1800, 300)]
    alone = [numbers(llm.generate(prompt, long, use_tqdm=False)[0]) for prompt in prompts]
    tight = engine(model, enable_prefix_caching=False, max_model_len=512, num_gpu_blocks_override=140)
    assert [numbers(output) for output in tight.generate(prompts, long, use_tqdm=False)] == alone
    assert tight.stats().preemptions_total or "gpt-oss" in model  # whose windows leave pages for all


def test_hits_in_host_memory_change_nothing(model: str, alone: list[Numbers]) -> None:
    other = engine(model, kv_offloading_size=1)
    tier = lambda: other.stats().tier  # noqa: E731
    until(lambda: other._core._executor.host_ready == tier().num_bytes)  # type: ignore[attr-defined]
    assert different(generated(other), alone) == {}
    # what is to be stored, the next plan says
    again = lambda: other.generate({"prompt_token_ids": PROMPTS[2]}, DRAWN, use_tqdm=False)  # noqa: E731
    until(lambda: again() and tier().store_bytes_total and not tier().stores)
    other._core._scheduler.manager.reset_prefix_cache()  # type: ignore[attr-defined]
    assert different(generated(other), alone) == {}
    assert tier().hits_total


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


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ("qwen3-0.6b", {"quantization": "fp8"}, "weights as"),
        ("qwen3-30b-a3b", {"quantization": "fp8"}, "isn't there for"),
        ("deepseek-v2-lite", {}, "latent attention"),
    ],
    ids=str,
)
def test_what_is_not_covered_is_refused_by_name(
    shape: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = str(write_config(tmp_path, **SHAPES[shape] | {"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=f"batch_invariant=True .*{words}"):
        engine(model, **options)


def test_without_it_sums_are_made_in_other_orders(model: str, alone: list[Numbers]) -> None:
    """So the tests above can fail."""
    assert different(generated(engine(model, batch_invariant=False), 64), alone)
