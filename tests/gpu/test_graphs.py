"""Kernels in captured graphs whose inputs change, beside other work on the device; and what a start leaves to be compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import make_checkpoint
from helpers.device import collect, counted_graphs, device_llm
from helpers.families import MAKERS
from helpers.stored_cases import stored
from pagerunner import LLM, SamplingParams
from pagerunner.ops.activation import SILU
from pagerunner.ops.kernels.linear import linear_wide
from pagerunner.ops.linear import linear
from pagerunner.ops.moe import ExpertWeights, moe_experts
from pagerunner.ops.routing import Routes, Routing, route
from pagerunner.ops.stored import Stored

moe = pytest.importorskip("pagerunner.ops.kernels.moe.moe")
triton = pytest.importorskip("triton")
Matrices = tuple[torch.Tensor, torch.Tensor] | tuple[Stored, Stored]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of what `run` launches, after it has been compiled, and what it returned there."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    return graph, made


def mixture(form: str, experts: int, features: int, inner: int) -> Matrices:
    sizes = (2 * inner, features), (features, inner)
    if form == "bf16":
        return random(experts, *sizes[0]) * 0.05, random(experts, *sizes[1]) * 0.05
    return stored(form, *sizes[0], experts=experts, device="cuda"), stored(
        form, *sizes[1], experts=experts, device="cuda"
    )


@pytest.mark.parametrize("form", ["bf16", "fp8 row"])
@pytest.mark.parametrize("tokens", [9, 64])
def test_joint_products_beside_a_busy_stream_leave_their_counters_at_zero(form, tokens) -> None:
    """Programs of the second product wait for those of the first one, while another stream's programs take their places."""
    matrices, routing = mixture(form, 64, 1024, 512), Routing(4, normalise=True)
    x, logits = random(tokens, 1024), torch.randn(3, tokens, 64, device="cuda")
    now, square, side = logits[0].clone(), random(4096, 4096), torch.cuda.Stream()

    def run() -> tuple[torch.Tensor, Routes]:
        routes = route(now, routing)
        return moe_experts(x, routes, ExpertWeights(*matrices, SILU)), routes

    alone = []
    for one in logits:
        now.copy_(one)
        alone.append(run()[0].clone())
    graph, (out, routes) = captured(run)
    torch.cuda.synchronize()
    for number in range(100):
        with torch.cuda.stream(side):
            square @ square
        now.copy_(logits[number % 3])
        graph.replay()
        assert torch.equal(out, alone[number % 3]), number
    assert routes.tiles is not None and not routes.tiles.counts.any()


@pytest.mark.parametrize(
    ("form", "kernels", "tokens", "experts"),
    [
        ("e2m1 e8m0 32", "lanes_products", 64, 32),
        ("e2m1 e8m0 32", "streams_products", 250, 24),
        ("e2m1 e8m0 32", "streams_products", 1500, 24),
        ("bf16", "piped_product", 1333, 7),
    ],
)
def test_experts_in_gluon_follow_their_inputs_in_a_graph(form, kernels, tokens, experts, monkeypatch) -> None:
    if not linear_wide.has_gluon(torch.device("cuda", 0)):
        pytest.skip("another version of Triton, or another card")
    matrices, routing = mixture(form, experts, 704, 448), Routing(2, normalise=True)
    x, logits = random(tokens, 704), torch.randn(tokens, experts, device="cuda")
    product, calls = getattr(moe, kernels), []
    monkeypatch.setattr(moe, kernels, lambda *args, **own: calls.append(1) or product(*args, **own))

    def run() -> torch.Tensor:
        return moe_experts(x, route(logits, routing), ExpertWeights(*matrices, SILU))

    graph, out = captured(run)
    assert calls, "other kernels served"
    for _ in range(3):
        x.copy_(random(tokens, 704))
        logits.copy_(torch.randn(tokens, experts, device="cuda"))
        graph.replay()
        assert torch.equal(out, run())


@pytest.mark.parametrize("form", ["int4 bf16 128", "int4 bf16 128 zeros"])
@pytest.mark.parametrize("tokens", [24, 160])
def test_wide_products_follow_their_inputs_in_a_graph(form, tokens, monkeypatch) -> None:
    device = torch.device("cuda", 0)
    if not linear_wide.has_gluon(device):
        pytest.skip("another version of Triton, or another card")
    matrix, x = stored(form, 1000, 2048, device="cuda"), random(tokens, 2048)
    monkeypatch.setattr(linear_wide, "SMALL_WEIGHTS", 0)
    assert linear_wide.serves(tokens, torch.bfloat16, matrix, device), "other kernels serve"
    graph, out = captured(lambda: linear(x, matrix))
    for _ in range(3):
        x.copy_(random(tokens, 2048))
        graph.replay()
        assert torch.equal(out, linear(x, matrix))


GROUPS_OF_128 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.mark.alone
@pytest.mark.parametrize(
    ("quantization", "eager", "prompts"), [(None, False, (3_000,)), (GROUPS_OF_128, True, (150, 20, 40, 150))]
)
def test_a_start_leaves_nothing_to_be_compiled(
    quantization: dict[str, Any] | None, eager: bool, prompts: tuple[int, ...], tmp_path: Path, monkeypatch
) -> None:
    path = make_checkpoint(
        tmp_path,
        "llama",
        tokenizer=False,
        hidden_size=512,
        intermediate_size=1024,
        max_position_embeddings=4096,
        head_dim=64,
        num_attention_heads=8,
    )
    if quantization is not None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        (path / "model.safetensors").unlink()
    llm = LLM(
        str(path), skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=8, dtype="bfloat16", load_format="dummy",
        enforce_eager=eager, kv_cache_memory_bytes=2**28, use_tqdm=False,
    )  # fmt: skip
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **call: compiled.append(call["repr"]))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    for count in prompts:
        prompt = [number % 200 + 5 + count % 7 for number in range(count)]
        assert llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].error is None
    assert compiled == []


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_ends_of_many_prompts_run_in_graphs_of_a_mixture(family: str, tmp_path: Path) -> None:
    """30 prompts are found but for their last tokens: one step of 420."""
    path = MAKERS[family](tmp_path)
    texts = [[5 + (7 * row + 3 * at) % 200 for at in range(108 + row % 5)] for row in range(30)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False, logprobs=0)
    made = []
    for eager in (True, False):
        with counted_graphs() as graphs:
            llm = device_llm(
                path, enforce_eager=eager, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=256,
                dtype="float32", skip_tokenizer_init=True, poison_fresh_pages=True,
            )  # fmt: skip
            prompts = [{"prompt_token_ids": text} for text in texts]
            llm.generate(prompts, params, use_tqdm=False)
            graphs.replays.clear()
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(output.num_cached_tokens >= 96 for output in outputs)
        made.append([output.outputs[0] for output in outputs])
        del llm
        collect()
    assert max(key.tokens for key in graphs.replays if not key.decode) > 256
    for one, other in zip(*made, strict=True):
        assert one.token_ids == other.token_ids
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
