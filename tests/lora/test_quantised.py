"""Adapters of quantised models: what is added is added to the product of the weights that the stored ones stand for."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from helpers.adapters import merged_checkpoint, random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.engine_oracle import engine, prompt
from helpers.quantise import CONFIGS, PACKED, quantise
from pagerunner import LoRARequest, SamplingParams
from pagerunner.models.checkpoint.loader import build_model

KINDS = [*CONFIGS, *PACKED, "mxfp4"]
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True, detokenize=False)


def made(path: Path, kind: str) -> Path:
    """A base in this format. That of "mxfp4" has quantised experts alone, as gpt-oss was published."""
    if kind == "mxfp4":
        return make_window_checkpoint(path, "gpt_oss", tokenizer=False)
    return make_checkpoint(path, "qwen3", tokenizer=False)


@pytest.mark.days(6)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_merged_weights(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the base stays packed, as on a GPU. Rows without an adapter have the bits of an engine that knows of none."""
    (tmp_path / "base").mkdir()
    base = made(tmp_path / "base", kind)
    meant = quantise(base, kind)
    adapter = random_adapter(base, tmp_path / "adapter", rank=6, seed=3)
    meant_path = tmp_path / "meant"
    meant_path.mkdir()
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]
    (meant_path / "config.json").write_text(json.dumps(config))
    save_file(meant, meant_path / "model.safetensors")
    texts = [{"prompt_token_ids": prompt(seed, 16)} for seed in (1, 2, 3)]
    merged = merged_checkpoint(meant_path, adapter, tmp_path / "merged")
    want = engine(merged).generate(texts[:2], PARAMS, False)
    one = LoRARequest("a", 1, str(adapter))
    for keep in (False, True):
        if keep:
            build = functools.partial(build_model, keep_forms=True)
            monkeypatch.setattr("pagerunner.engine.worker.build.build_model", build)
        llm = engine(base, enable_lora=True, enable_prefix_caching=False)
        llm.generate(
            texts[:1], PARAMS, False, lora_request=one
        )  # from now on it is in a slot, and the three begin together
        got = llm.generate(texts, PARAMS, False, lora_request=[one, one, None])
        plain = engine(base).generate(texts, PARAMS, False)
        if kind == "mxfp4":  # a CPU's products of an expert depend on how many tokens it has
            assert got[2].outputs[0].token_ids == plain[2].outputs[0].token_ids
        else:
            assert got[2].outputs[0].logprobs == plain[2].outputs[0].logprobs
        for mine, theirs in zip(got[:2], want, strict=True):
            assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
            pairs = zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True)
            for own, other in pairs:
                assert [one.logprob for one in own.values()] == pytest.approx(
                    [one.logprob for one in other.values()], abs=2e-4
                )
        first, before = got[0].outputs[0].logprobs[0], plain[0].outputs[0].logprobs[0]
        assert first != before, "the adapter changes something"
