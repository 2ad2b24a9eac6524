"""Adapters on several ranks in processes: tokens are those of one rank, and a load is of all ranks or of none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.adapters import random_adapter
from helpers.families import MAKERS
from pagerunner import LLM, LoRARequest, SamplingParams

pytestmark = pytest.mark.usefixtures("forked")

OPTIONS: dict[str, Any] = {
    "use_tqdm": False,
    "dtype": "float32",
    "device": "cpu",
    "num_gpu_blocks_override": 96,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "enable_lora": True,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1)
PROMPTS = [[7, 8, 9, 10 + n] * 5 for n in range(4)]


def made(family: str, path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    MAKERS[family](path)
    return next(found.parent for found in path.rglob("config.json"))


def answers(llm: LLM, wanted: list[LoRARequest | None]) -> list[list[tuple[int, Any]]]:
    outputs = llm.generate(PROMPTS[: len(wanted)], PARAMS, False, lora_request=wanted)
    assert [one.error for one in outputs] == [None] * len(wanted)
    return [
        [
            (token, found[token].logprob)
            for token, found in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)
        ]
        for one in outputs
    ]


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("qwen3", {"tensor_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("qwen3", {"pipeline_parallel_size": 2}),
        ("gpt_oss", {"tensor_parallel_size": 2}),
        ("qwen3_next", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("llama", {"tensor_parallel_size": 4}),
        ("deepseek_v3", {"tensor_parallel_size": 2}),
        ("bamba", {"pipeline_parallel_size": 2}),
    ],
)
def test_tokens_are_those_of_one_rank(family: str, ways: dict[str, Any], tmp_path: Path) -> None:
    """A row without an adapter among others is, to the bit, what it is without them."""
    base = made(family, tmp_path / "base")
    one, two = (
        LoRARequest(f"a{n}", n, str(random_adapter(base, tmp_path / f"a{n}", rank=rank, seed=n)))
        for n, rank in ((1, 6), (2, 17))
    )
    limits: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 32}
    wanted = [one, None, two, one]
    alone = answers(LLM(str(base), **OPTIONS, **limits), wanted)
    ranks = LLM(str(base), **OPTIONS, **limits, **ways)
    found = answers(ranks, wanted)
    for got, want in zip(found, alone, strict=True):
        assert [token for token, _ in got] == [token for token, _ in want]
        assert [value for _, value in got] == pytest.approx([value for _, value in want], abs=2e-4)
    ranks.reset_prefix_cache()
    plain = answers(ranks, [None] * 4)
    if "moe" not in family and family not in (
        "gpt_oss",
        "qwen3_next",
        "deepseek_v3",
    ):  # whose products go by rows' experts
        assert found[1] == plain[1]
    assert all(abs(found[n][0][1] - plain[n][0][1]) > 1e-3 for n in (0, 2, 3)), "adapters change something"
