"""`batch_invariant`: log-probabilities are bitwise the same, whatever else a step computes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec import structs

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_chunked import make_chunked_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.effort import share_of_the_day
from helpers.families import MAKERS
from helpers.quantise import CONFIGS, PACKED, quantise
from pagerunner import LLM, ConfigError, EngineArgs, SamplingParams
from pagerunner.engine.startup.exchange import page_fields
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker import build

OPTIONS: dict[str, Any] = {
    "use_tqdm": False, "dtype": "float32", "batch_invariant": True, "num_gpu_blocks_override": 400, "max_model_len": 256,
}  # fmt: skip
RANDOM = Random(5)
PROMPTS = [[RANDOM.randrange(3, 300) for _ in range(length)] for length in (131, 1, 2, 17, 40, 64, 65, 90)]
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=3)

ASKED: list[dict[str, Any]] = [
    {}, {"top_k": 5}, {"top_p": 0.8, "min_p": 0.01}, {"temperature": 0.0}, {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.7}, {"logit_bias": {5: 2.0}}, {"min_tokens": 4, "logprobs": 0},
]  # fmt: skip

Numbers = list[list[tuple[int, float]]]


def numbers(output: Any) -> Numbers:
    """A request's tokens, and the log-probabilities of the tokens that are told at each place, in full."""
    (one,) = output.outputs
    return [sorted((token, entry.logprob) for token, entry in place.items()) for place in one.logprobs]


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with biases, norms of heads, windows of 20 tokens, experts, sinks."""
    folder = tmp_path_factory.mktemp("model")
    if not request.param.startswith("qwen") or request.param.endswith("moe"):
        return make_window_checkpoint(folder, request.param)
    return make_checkpoint(folder, request.param)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(str(path), enable_prefix_caching=False, **OPTIONS)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Numbers]:
    return [numbers(llm.generate([prompt], DRAWN, False)[0]) for prompt in PROMPTS]


def generated(llm: LLM, params: SamplingParams = DRAWN) -> list[Numbers]:
    return [numbers(output) for output in llm.generate(PROMPTS, params, False)]


def test_others_change_nothing(llm: LLM, alone: list[Numbers]) -> None:
    assert generated(llm) == alone
    several = [prompt for prompt in PROMPTS for _ in range(5)]
    assert [numbers(output) for output in llm.generate(several, DRAWN, False)] == [
        one for one in alone for _ in range(5)
    ]


@pytest.mark.days(2)
def test_chunks_and_prefix_hits_change_nothing(path: Path, alone: list[Numbers]) -> None:
    chunked = LLM(str(path), max_num_batched_tokens=23, poison_fresh_pages=True, **OPTIONS)
    assert generated(chunked) == alone
    again = chunked.generate(PROMPTS, DRAWN, False)
    assert [numbers(output) for output in again] == alone and again[0].num_cached_tokens


@pytest.mark.days(2)
def test_eager_steps_and_preemption_change_nothing(path: Path, llm: LLM) -> None:
    prompts, long = (
        [[5 + n, *PROMPTS[4][1:]] for n in range(4)],
        SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, seed=1),
    )
    alone = [numbers(llm.generate([prompt], long, False)[0]) for prompt in prompts]
    pages = 24 if path.name.startswith(("gemma3", "gpt")) else 17
    tight = LLM(
        str(path), enforce_eager=True, enable_prefix_caching=False, **(OPTIONS | {"num_gpu_blocks_override": pages})
    )
    assert [numbers(output) for output in tight.generate(prompts, long, False)] == alone
    assert tight.stats().preemptions_total or path.name.startswith(
        ("gemma3", "gpt")
    )  # whose windows leave pages for all


@pytest.mark.days(2)
def test_hits_in_host_memory_change_nothing(path: Path, alone: list[Numbers]) -> None:
    llm = LLM(str(path), kv_offloading_size=0.05, max_num_batched_tokens=64, **OPTIONS)
    assert generated(llm) == alone
    llm.generate(PROMPTS[:1], DRAWN, False)  # what is to be stored, the next plan says
    llm._core._scheduler.manager.reset_prefix_cache()  # type: ignore[attr-defined]
    outputs = llm.generate(PROMPTS, DRAWN, False)
    assert [numbers(output) for output in outputs] == alone and outputs[0].num_cached_tokens
    assert llm.stats().tier.hits_total


def test_pages_of_other_machines_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk, and of other engines. Without the option last bits may differ anyway, and pages are found."""
    path, found = str(make_checkpoint(tmp_path, "qwen3")), {}
    for invariant in (False, True):
        resolved = resolve(EngineArgs(model=path, dtype="float32", batch_invariant=invariant, max_model_len=64), 10**9)
        for version in ("2.11.0", "2.12.0"):
            monkeypatch.setattr(torch, "__version__", version)
            found[invariant, version] = page_fields(resolved, resolved.plan, "weights")["batch_invariant"]
    assert found[False, "2.11.0"] == found[False, "2.12.0"] and len(set(found.values())) == 3


@pytest.mark.days(12)
@pytest.mark.parametrize("kind", [*CONFIGS, *PACKED, "mxfp4", "online experts", "llama4"])
def test_stored_weights_and_other_families(kind: str, tmp_path: Path) -> None:
    """On a CPU weights in few bits are unpacked at the start, and then as all others. Rows ask for many things."""
    options: dict[str, Any] = OPTIONS | {"skip_tokenizer_init": True}
    if kind == "llama4":
        path, _ = make_chunked_checkpoint(tmp_path)
    elif kind == "mxfp4":
        path = make_window_checkpoint(tmp_path, "gpt_oss", tokenizer=False)
    elif kind == "online experts":
        path, options = (
            make_window_checkpoint(tmp_path, "qwen3_moe", tokenizer=False),
            options | {"quantization": "fp8"},
        )
    else:
        path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    if kind in (*CONFIGS, *PACKED, "mxfp4"):
        quantise(path, kind)
    llm = LLM(str(path), enable_prefix_caching=False, **options)
    params = [structs.replace(DRAWN, **more) for more in ASKED]
    want = [numbers(llm.generate([prompt], own, False)[0]) for prompt, own in zip(PROMPTS, params, strict=True)]
    places = [place for place in range(len(PROMPTS)) for _ in range(20)]
    RANDOM.shuffle(places)
    found = llm.generate([PROMPTS[place] for place in places], [params[place] for place in places], False)
    assert [numbers(output) for output in found] == [want[place] for place in places]
    chunked = LLM(str(path), max_num_batched_tokens=23, **options)
    for _ in range(2):
        assert [numbers(output) for output in chunked.generate(PROMPTS, params, False)] == want


def test_prefill_is_decode(llm: LLM, alone: list[Numbers]) -> None:
    """What a trainer computes of a whole text is what was told when its tokens were drawn."""
    outputs = llm.generate(PROMPTS, DRAWN, False)
    texts = [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), False)
    for prompt, text, output, score in zip(PROMPTS, texts, outputs, scored, strict=True):
        drawn = [
            entry[token].logprob for token, entry in zip(text[len(prompt) :], output.outputs[0].logprobs, strict=True)
        ]
        told = [entry[token].logprob for token, entry in zip(text, score.prompt_logprobs or [], strict=True) if entry]
        assert told[len(prompt) - 1 :] == drawn


def test_without_it_sums_are_made_in_other_orders(path: Path, alone: list[Numbers]) -> None:
    """So the tests above can fail."""
    usual = LLM(str(path), max_num_batched_tokens=23, **(OPTIONS | {"batch_invariant": False}))
    assert generated(usual) != alone


@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN"])
def test_embeddings_too(pooling_type: str, tmp_path: Path) -> None:
    """A mean adds up in whatever pieces a prompt is computed."""
    path, pooler = str(make_checkpoint(tmp_path, "qwen3")), {"pooling_type": pooling_type}
    llm, chunked = (LLM(path, pooler_config=pooler, max_num_batched_tokens=tokens, **OPTIONS) for tokens in (1_000, 23))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    alone = [llm.embed([prompt])[0] for prompt in prompts]
    assert llm.embed([prompt for prompt in prompts for _ in range(5)]) == [one for one in alone for _ in range(5)]
    assert chunked.embed(prompts) == alone


COVERED = {"gemma3", "gemma3_text", "gpt_oss", "llama", "llama4", "llama4_text", "mistral", "mistral3", "qwen2", "qwen3", "qwen3_moe"}  # fmt: skip


@pytest.mark.parametrize("family", [sorted(MAKERS)[number] for number in share_of_the_day(len(MAKERS), 12)])
def test_a_family_is_the_same_among_256_others_or_is_refused_by_name(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MAKERS[family](tmp_path)
    path = str(next(found.parent for found in tmp_path.rglob("config.json")))
    options: dict[str, Any] = OPTIONS | {"max_num_seqs": 257, "num_gpu_blocks_override": 2_600, "device": "cpu"}
    if family not in COVERED:
        monkeypatch.setattr(build, "load_weights", None)  # it is refused before weights are read
        with pytest.raises(ConfigError, match=r"batch_invariant=True isn't there for .*([Ll]atent|recurrent)"):
            LLM(path, skip_tokenizer_init=True, **options)
        return
    llm = LLM(path, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    params = structs.replace(DRAWN, detokenize=False)
    alone = [numbers(llm.generate([{"prompt_token_ids": prompt}], params, False)[0]) for prompt in PROMPTS]
    places = [0, *(number % len(PROMPTS) for number in range(256))]
    outputs = llm.generate([{"prompt_token_ids": PROMPTS[place]} for place in places], params, False)
    assert [numbers(output) for output in outputs] == [alone[place] for place in places]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: ranks"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: ranks"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "enable_expert_parallel=True with data_parallel_size=2: ranks"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        ({"attention_backend": "flashinfer"}, "attention_backend='flashinfer'"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_refused_by_name(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        EngineArgs(model="m", batch_invariant=True, **options)


def test_layers_that_are_not_covered_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="latent"):
        LLM(str(make_latent_checkpoint(tmp_path, "deepseek_v3")[0]), skip_tokenizer_init=True, **OPTIONS)
    with pytest.raises(ConfigError, match="recurrent"):
        LLM(str(make_hybrid_checkpoint(tmp_path, "qwen3_next")[0]), skip_tokenizer_init=True, **OPTIONS)
    dense = str(make_checkpoint(tmp_path, "qwen3"))
    with pytest.raises(ConfigError, match=r"weights in bfloat16 on a CPU: .*dtype=\"float32\" and a C compiler"):
        LLM(dense, **(OPTIONS | {"dtype": "bfloat16"}))
    with pytest.raises(ConfigError, match="served by triton"):
        LLM(dense, attention_backend="triton", **OPTIONS)


def test_vllms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert EngineArgs(model="m").batch_invariant is expected
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT must be one of 0, 1, got 'yes'"):
        EngineArgs(model="m")
