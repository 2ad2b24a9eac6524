"""PEFT itself as the oracle, in float32: greedy tokens and log-probabilities of every family, with targets in every form."""

from __future__ import annotations

import json
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
from pagerunner import LoRARequest, SamplingParams
from pagerunner.lora.adapter import Targets
from pagerunner.models.checkpoint.loader import own_name

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

MIXTURES = {name for name in MAKERS if "deepseek" in name or "moe" in name} | {"qwen3_next"}
FAMILIES = sorted(
    set(MAKERS) - MIXTURES - {"kimi_k2"}
)  # kimi_k2 is no name of transformers, which calls it deepseek_v3
IMAGES = ("gemma3", "mistral3", "llama4", "qwen3_5", "qwen3_5_moe", "kimi_k25")
FORMS = ("list", "whole names", "an expression", "all but some", "rank-stabilised", "patterns", "one layer")


def asked(form: str, names: list[str], others: list[str]) -> dict[str, Any]:
    """A PEFT config that asks for modules of these names in one of the forms, and for none of `others`."""
    last = sorted({name.rpartition(".")[2] for name in names} - {name.rpartition(".")[2] for name in others})
    last = last or names  # a tower for images has modules of the same names
    common = {"r": 5, "lora_alpha": 12, "target_modules": last}
    return {
        "list": common,
        "whole names": {**common, "target_modules": names},
        "an expression": {**common, "target_modules": "|".join(map(re.escape, names))},
        "all but some": {**common, "target_modules": "all-linear", "exclude_modules": others},
        "rank-stabilised": {**common, "use_rslora": True},
        "patterns": {
            **common,
            "rank_pattern": {last[0]: 3, rf"layers\.1\..*{last[-1]}": 17},
            "alpha_pattern": {last[-1]: 4},
        },
        "one layer": {**common, "layers_to_transform": [1], "layers_pattern": ["layers"]},
    }[form]


@pytest.mark.days(5)
@pytest.mark.parametrize(("family", "form"), by_days(FAMILIES, FORMS))
def test_tokens_are_those_of_peft(tmp_path: Path, family: str, form: str) -> None:
    (tmp_path / "base").mkdir()
    MAKERS[family](tmp_path / "base")
    base = next(found.parent for found in (tmp_path / "base").rglob("config.json"))
    known = Targets.of(load(base)[0]).matrices
    kind = transformers.AutoModelForImageTextToText if family in IMAGES else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    taken = [name for name in linears if (own := known.get(own_name(name, known))) and not own.refused]
    tuned = peft.get_peft_model(model, peft.LoraConfig(**asked(form, taken, sorted(set(linears) - set(taken)))))
    trained(tuned)
    tuned.save_pretrained(tmp_path / "adapter")
    llm = engine(base, enable_lora=True, max_lora_rank=32)
    one = LoRARequest("a", 1, str(tmp_path / "adapter"))
    params = SamplingParams(
        temperature=0, max_tokens=6, logprobs=0, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    with_it = [{"prompt_token_ids": prompt(seed, length)} for seed, length in ((1, 20), (2, 9))]
    got = llm.generate([*with_it, with_it[0]], params, False, lora_request=[one, one, None])
    check(tuned, got[:2])
    with tuned.disable_adapter():
        check(tuned.base_model.model, got[2:])
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
