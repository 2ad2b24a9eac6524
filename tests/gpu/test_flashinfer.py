"""The FlashInfer backends over the library itself, where it is installed. Kernels that aren't there yet are built first,
which takes minutes.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import latent_cases
from helpers.attention_cases import Case, plain, run
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.graph_cases import replayed
from pagerunner import LLM, SamplingParams
from pagerunner.attention.base import GraphShape
from pagerunner.attention.flashinfer_backend import FlashInferBackend, FlashInferLatentBackend
from pagerunner.attention.paged_mla import PagedLatentBackend
from pagerunner.attention.paired import PairedBackend
from pagerunner.runner.graphs import CudaGraphs

pytest.importorskip("flashinfer")
HALF = torch.bfloat16
STEPS = {
    "decode": (plain(1500, 1), plain(0, 1), plain(64, 1), plain(63, 1)),
    "mixed": (plain(300, 1), plain(0, 90), plain(40, 17)),
    "long": (plain(0, 700), plain(200, 300), plain(10, 1)),
}


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 4), (2, 1)])
def test_equals_attention_row_by_row(rows, kv_heads: int, group: int) -> None:
    case = Case(rows, 16, kv_heads, group, 128, gap=64, lead=8, dtype=HALF, kv_dtype=HALF)
    got, want = run(case, FlashInferBackend(), "cuda")
    assert (got - want).norm() < 1e-2 * want.norm()


DECODES = [
    (plain(1500, 1), plain(0, 1), plain(64, 1), plain(63, 1)),
    (plain(31, 1),),
    (plain(1000, 1), plain(0, 1), plain(16, 1), plain(900, 1), plain(47, 1), plain(5, 1)),
    (plain(1, 1), plain(15, 1)),
]
MIXED = [(plain(300, 1), plain(0, 90), plain(40, 17)), (plain(0, 120),), (plain(64, 1), plain(900, 2)), *DECODES]


@pytest.mark.parametrize(("kv_heads", "group"), [(8, 4), (2, 1)])
def test_replays_are_planned_anew(kv_heads: int, group: int) -> None:
    for steps, shapes in (
        (DECODES, (GraphShape(8, 8, 2048), GraphShape(6, 6, 2048))),
        (MIXED, (GraphShape(8, 128, 2048), GraphShape(128, 128, 2048))),
    ):
        case = Case(steps[0], 32, kv_heads, group, 128, gap=64, lead=8, dtype=HALF, kv_dtype=HALF)
        engine = CudaGraphs(torch.device("cuda"))
        for got, want in replayed(FlashInferBackend(), case, steps, shapes, engine, "cuda"):
            assert (got - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("heads", [16, 128])
def test_latents(heads: int) -> None:
    rows = tuple(latent_cases.RowCase(start, 1) for start in (1500, 0, 64, 63))
    sizes = {"key_dim": 128, "rope_dim": 64, "value_dim": 128, "latent_dim": 512, "gap": 64}
    case = latent_cases.Case(rows, page_tokens=64, heads=heads, dtype=HALF, compute=HALF, **sizes)
    backend = PairedBackend(FlashInferLatentBackend(), PagedLatentBackend())
    for mixed in (case, replace(case, rows=(*rows, latent_cases.RowCase(30, 9)))):
        got, want = latent_cases.run(mixed, backend, "cuda")
        assert (got - want).norm() < 1e-2 * want.norm()


MODELS = {
    "full": lambda path: make_checkpoint(path, "qwen3", head_dim=128, num_attention_heads=8, hidden_size=256),
    "latent": lambda path: make_latent_checkpoint(
        path,
        "deepseek_v3",
        tokenizer=True,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_attention_heads=16,
        num_key_value_heads=16,
        first_k_dense_replace=3,  # no experts, of which others would be chosen for small differences
    )[0],
}
PROMPTS = [{"prompt_token_ids": [10 + (7 * i + n) % 200 for i in range(n)]} for n in (1, 9, 300, 40, 17, 129)]
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, allowed_token_ids=[7], logprobs=1)


def logprobs(path: str, **settings) -> torch.Tensor:
    """Of the one token that may be drawn, in every place after every prompt; steps of all kinds have made them."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 320, "max_model_len": 512, "kv_cache_memory_bytes": 2**28}
    limits["enable_prefix_caching"] = False  # which would make the steps of a second generation other ones
    llm = LLM(path, **limits, device="cuda", dtype="bfloat16", poison_fresh_pages=True, **settings)
    found = []
    for level in (None, 1, 2, None):  # plans made on the host before are of no use afterwards
        outputs = llm.generate(PROMPTS, ONE_TOKEN, use_tqdm=False)
        found.append(torch.tensor([[place[7].logprob for place in x.outputs[0].logprobs] for x in outputs]))
        if level is not None and settings.get("enable_sleep_mode"):
            llm.sleep(level)
            llm.wake_up()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    assert all(torch.equal(other, found[0]) for other in found[1:]), (
        "sleep, wake, or pages in other places changed something"
    )
    return found[0]


@pytest.mark.parametrize("family", MODELS)
def test_an_engine_finds_what_it_finds_without_flashinfer(family: str, tmp_path: Path) -> None:
    path = str(MODELS[family](tmp_path))
    want = logprobs(path, attention_backend="triton", enforce_eager=True)
    for eager in (True, False):
        got = logprobs(path, attention_backend="flashinfer", enforce_eager=eager, enable_sleep_mode=True)
        assert (got - want).abs().mean() < 0.03, f"eager: {eager}"
