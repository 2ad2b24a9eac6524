"""PEFT itself as the oracle, in float32: greedy tokens and log-probabilities of every family, with targets in every form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.adapters import trained
from helpers.effort import by_days
from helpers.engine_oracle import check, engine, prompt
from helpers.families import MAKERS
from helpers.forward import load
from pagerunner import ConfigError, LoRARequest, SamplingParams
from pagerunner.lora.adapter import Targets
from pagerunner.models.checkpoint.loader import own_name

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

FAMILIES = sorted(
    set(MAKERS) - {"deepseek_v4", "kimi_k2"}
)  # kimi_k2 is no name of transformers, which calls it deepseek_v3
OTHERS = ("qwen3_next", "gpt_oss", "llama4", "llama4_text", "kimi_k25")
empty = torch.empty(0)
IMAGES = ("gemma3", "mistral3", "llama4", "qwen3_5", "qwen3_5_moe", "kimi_k25")
MIXTURES = sorted(name for name in FAMILIES if "deepseek" in name or "moe" in name or name in OTHERS)
FORMS = ("list", "whole names", "an expression", "all but some", "rank-stabilised", "patterns", "one layer")


def asked(form: str, names: list[str], others: list[str]) -> dict[str, Any]:
    """A PEFT config that asks for modules of these names in one of the forms, and for none of `others`."""
    last = sorted({name.rpartition(".")[2] for name in names} - {name.rpartition(".")[2] for name in others})
    last = last or names  # a tower for images has modules of the same names
    # PEFT makes one parameter's patterns of those of experts' matrices, and sorts them in the file, so that others count when it is read
    some = [name for name in last if not name.endswith(("gate_proj", "up_proj", "down_proj"))]
    some = some if len(some) > 1 else last
    common = {"r": 5, "lora_alpha": 12, "target_modules": last}
    return {
        "list": common,
        "whole names": {**common, "target_modules": names},
        "an expression": {**common, "target_modules": "|".join(map(re.escape, names))},
        "all but some": {**common, "target_modules": "all-linear", "exclude_modules": others},
        "rank-stabilised": {**common, "use_rslora": True},
        "patterns": {
            **common,
            "rank_pattern": {some[0]: 3, rf"layers\.1\..*{some[-1]}": 17},
            "alpha_pattern": {some[-1]: 4},
        },
        "one layer": {**common, "layers_to_transform": [1], "layers_pattern": ["layers"]},
    }[form]


def models(path: Path, family: str) -> tuple[Path, Any]:
    """A tiny checkpoint, and transformers' model of it."""
    path.mkdir()
    MAKERS[family](path)
    base = next(found.parent for found in path.rglob("config.json"))
    kind = transformers.AutoModelForImageTextToText if family in IMAGES else transformers.AutoModelForCausalLM
    return base, kind.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


def compare(base: Path, model: Any, config: dict[str, Any], path: Path) -> None:
    """Save what PEFT makes of the config, and compare rows with the adapter, and one without it."""
    tuned = peft.get_peft_model(model, peft.LoraConfig(**config))
    trained(tuned)
    tuned.save_pretrained(path)
    if "gate.weight" in (tuned.peft_config["default"].target_parameters or ()):
        with pytest.raises(ConfigError, match=r"mlp\.gate can't have an adapter: it is a router"):
            engine(base, enable_lora=True, block_size=32).generate([[1]], lora_request=LoRARequest("a", 1, str(path)))
        return
    llm = engine(base, enable_lora=True, max_lora_rank=32, block_size=32)
    one = LoRARequest("a", 1, str(path), is_3d_lora_weight="target_parameters" in config)
    params = SamplingParams(
        temperature=0, max_tokens=6, logprobs=0, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    texts = [{"prompt_token_ids": prompt(seed, length)} for seed, length in ((1, 20), (2, 9))]
    got = llm.generate([*texts, texts[0]], params, False, lora_request=[one, one, None])
    check(tuned, got[:2])
    with tuned.disable_adapter():
        check(tuned.base_model.model, got[2:])
    changed = [output.prompt_logprobs[1:] for output in (got[0], got[2])]
    assert changed[0] != changed[1], "the adapter changes something"


@pytest.mark.days(5)
@pytest.mark.parametrize(("family", "form"), by_days(FAMILIES, FORMS))
def test_tokens_are_those_of_peft(tmp_path: Path, family: str, form: str) -> None:
    base, model = models(tmp_path / "base", family)
    known = Targets.of(load(base)[0]).matrices
    matrices = [name for name, module in model.named_modules() if getattr(module, "weight", empty).dim() == 2]
    linears = [name for name in matrices if isinstance(model.get_submodule(name), torch.nn.Linear)]
    taken = [name for name in linears if (own := known.get(own_name(name, known))) and not own.refused]
    compare(base, model, asked(form, taken, sorted(set(matrices) - set(taken))), tmp_path / "adapter")


@pytest.mark.days(3)
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("matrix", ["gate_up_proj", "down_proj", "both"])
def test_experts_tokens_are_those_of_peft(tmp_path: Path, family: str, matrix: str) -> None:
    """All experts' matrices are one parameter in transformers 5, and PEFT has a pair of tensors for it."""
    base, model = models(tmp_path / "base", family)
    found = [f"experts.{one}" for one in ("gate_up_proj", "down_proj") if matrix in (one, "both")]
    assert any(name.endswith(tuple(found)) and one.dim() == 3 for name, one in model.named_parameters())
    config = {"r": 3, "lora_alpha": 12, "target_modules": ["o_proj"], "exclude_modules": ".*vision.*"}
    config |= {"target_parameters": found, "use_rslora": True}
    compare(base, model, config, tmp_path / "adapter")
