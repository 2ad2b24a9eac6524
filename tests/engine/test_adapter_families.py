"""Adapters of every family's matrices beside rows without one: the tokens and log-probabilities of merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.adapters import merged_checkpoint, pair, random_adapter, write_adapter
from helpers.device import as_on_cuda, counted_graphs
from helpers.effort import by_days
from helpers.families import MAKERS
from helpers.forward import load
from pagerunner import LLM, ConfigError, LoRARequest, SamplingParams
from pagerunner.lora.blocks import Products

OPTIONS: dict[str, Any] = {
    "use_tqdm": False,
    "dtype": "float32",
    "num_gpu_blocks_override": 96,
    "max_model_len": 128,
    "block_size": 32,  # a page has room for a block of any family
    "skip_tokenizer_init": True,
}
PROMPTS = [[7, 8, 9, 10 + n] * 5 for n in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1)


def made(family: str, path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    MAKERS[family](path)
    return next(found.parent for found in path.rglob("config.json"))


def answers(outputs: list[Any]) -> list[list[tuple[int, float]]]:
    return [
        [
            (token, found[token].logprob)
            for token, found in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)
        ]
        for one in outputs
    ]


@pytest.mark.days(6)
@pytest.mark.parametrize("family", sorted(set(MAKERS) - {"deepseek_v4"}))
def test_tokens_are_those_of_merged_weights(family: str, tmp_path: Path) -> None:
    base = made(family, tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "adapter", rank=6, seed=3)
    merged = merged_checkpoint(base, adapter, tmp_path / "merged")
    want = answers(LLM(str(merged), **OPTIONS).generate(PROMPTS, PARAMS, False))
    plain = answers(LLM(str(base), **OPTIONS).generate(PROMPTS, PARAMS, False))
    llm, one = LLM(str(base), enable_lora=True, **OPTIONS), LoRARequest("a", 1, str(adapter))
    got = answers(llm.generate(PROMPTS, PARAMS, False, lora_request=[one, None, one]))
    for number, expected in enumerate([want[0], plain[1], want[2]]):
        assert [token for token, _ in got[number]] == [token for token, _ in expected]
        assert [value for _, value in got[number]] == pytest.approx([value for _, value in expected], abs=2e-4)
    assert abs(want[0][0][1] - plain[0][0][1]) > 5e-4, "the adapter changes something"


KINDS = ("gemma3_text", "gpt_oss", "llama4_text", "qwen3_next", "bamba", "deepseek_v3", "deepseek_v32")


@pytest.mark.days(3)
@pytest.mark.parametrize(("family", "pages"), by_days(KINDS, ["auto", "fp8"]))
def test_prefixes_of_every_kind_of_memory_are_found_by_content(family: str, pages: str, tmp_path: Path) -> None:
    """Windows, chunks, snapshots of recurrent states, latents. Names change, and so does what one of them stands for."""
    base = made(family, tmp_path / "base")
    paths = [str(random_adapter(base, tmp_path / f"a{seed}", rank=6, seed=seed)) for seed in range(2)]
    options = OPTIONS | {"num_gpu_blocks_override": 250, "kv_cache_dtype": pages}
    options["block_size"] = {"auto": 32, "fp8": 128 if family == "qwen3_next" else 64}[pages]
    llm = LLM(str(base), enable_lora=True, max_loras=2, **options | {"max_model_len": 192})
    prompt = [(11 * n) % 400 + 5 for n in range(150)]

    def answer(lora: LoRARequest | None) -> tuple[Any, int | None]:
        [output] = llm.generate([prompt], PARAMS, False, lora_request=lora)
        assert output.error is None
        return answers([output])[0], output.num_cached_tokens

    contents = {"": None, "a": LoRARequest("a", 1, paths[0]), "b": LoRARequest("b", 2, paths[1])}
    computed = {name: answer(one) for name, one in contents.items()}
    assert not any(cached for _, cached in computed.values()), "each is another content"
    assert len({str(found) for found, _ in computed.values()}) == 3
    again = {"": None, "a": LoRARequest("c", 3, paths[0]), "b": LoRARequest("a", 1, paths[1], load_inplace=True)}
    for name, one in again.items():
        found, cached = answer(one)
        assert cached and cached >= 96
        assert [token for token, _ in found] == [token for token, _ in computed[name][0]]
        assert [score for _, score in found] == pytest.approx([score for _, score in computed[name][0]], abs=2e-3)


@pytest.mark.days(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_in_graphs(family: str, tmp_path: Path) -> None:
    """A row alone, too: kernels for one token read its experts whether or not they are computed apart."""
    base = made(family, tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "adapter", rank=6, seed=3)
    merged = merged_checkpoint(base, adapter, tmp_path / "merged")
    want = answers(LLM(str(merged), **OPTIONS).generate(PROMPTS, PARAMS, False))
    plain = answers(LLM(str(base), **OPTIONS).generate(PROMPTS, PARAMS, False))
    one = LoRARequest("a", 1, str(adapter))
    with as_on_cuda(), counted_graphs() as count:
        llm = LLM(str(base), enable_lora=True, max_num_seqs=4, max_num_batched_tokens=64, **OPTIONS)
        got = answers(llm.generate(PROMPTS, PARAMS, False, lora_request=[one, None, one]))
        got += answers(llm.generate(PROMPTS[:1], PARAMS, False, lora_request=one))
        assert any(key.adapters for key in count.replays)
        with pytest.raises(ConfigError, match="is_3d_lora_weight=True is for tensors of all experts together"):
            llm.generate(
                PROMPTS[:1], PARAMS, False, lora_request=LoRARequest("b", 2, str(adapter), is_3d_lora_weight=True)
            )
    for found, expected in zip(got, [want[0], plain[1], want[2], want[0]], strict=True):
        assert [token for token, _ in found] == [token for token, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=2e-4)


def test_slots_have_room_for_what_may_be_adapted(tmp_path: Path) -> None:
    """Experts' adapters are many times those of attention. Who has none of them leaves them out."""
    base = made("qwen3_moe", tmp_path / "base")
    model, _ = load(base)
    whole, few = Products.of(model), Products.of(model, ("q_proj", "o_proj"))
    assert few.num_pages(16, 8192) * 3 < whole.num_pages(16, 8192) and not any("experts" in name for name in few.sizes)
    llm = LLM(str(base), enable_lora=True, lora_target_modules=["q_proj", "o_proj"], **OPTIONS)
    tensors, names = {}, [name for name in few.sizes if name.endswith(("q_proj", "o_proj"))]
    for name in names:
        tensors |= pair(name, *few.sizes[name], 4)
    config = {"target_modules": ["q_proj", "o_proj"]}
    one = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", config, tensors)))
    [got, other] = answers(llm.generate(PROMPTS[:2], PARAMS, False, lora_request=[one, None]))
    assert got != answers(llm.generate(PROMPTS[:1], PARAMS, False))[0] and other
    two = LoRARequest("b", 2, str(random_adapter(base, tmp_path / "b", rank=4, seed=1)))
    with pytest.raises(ConfigError, match="can't have an adapter: lora_target_modules, q_proj, o_proj, leaves it out"):
        llm.generate(PROMPTS[:1], PARAMS, False, lora_request=two)
    k = "model.layers.0.self_attn.k_proj"  # of a layer that has room for it, as the one for q_proj
    three = write_adapter(tmp_path / "c", {"target_modules": [k]}, pair(k, *whole.sizes[k], 4))
    with pytest.raises(ConfigError, match="k_proj can't have an adapter: lora_target_modules"):
        llm.generate(PROMPTS[:1], PARAMS, False, lora_request=LoRARequest("c", 3, str(three)))
    with pytest.raises(ConfigError, match="lora_target_modules: no matrix .* is called 'qkv_proj'; there are .*q_proj"):
        LLM(str(base), enable_lora=True, lora_target_modules=["qkv_proj"], **OPTIONS)


def test_a_family_without_such_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no layer of .* takes adapters so far"):
        LLM(str(made("deepseek_v4", tmp_path)), enable_lora=True, **OPTIONS)
