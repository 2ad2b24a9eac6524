"""What a mixture's steps read, counted while a workload runs."""

from __future__ import annotations

import json

from pagerunner.bench.experts import experts_read
from pagerunner.bench.floors import Ceilings
from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import BenchRequest
from pagerunner.cli.main import main
from pagerunner.engine.startup.step_weights import StepWeights
from pagerunner.memory.specs import ChunkedKV, FullKV, LatentKV, RecurrentState, WindowKV

LAYERS, EXPERTS, ACTIVE = 3, 8, 2
SHAPE = {
    **SHAPES["qwen3-30b-a3b"],
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


CARD = Ceilings(6400.0, 1000.0)


def request(prompt: int, output: int) -> BenchRequest:
    return BenchRequest(prompt_token_ids=[1] * prompt, output_len=output)


def test_the_floor_counts_touched_experts_and_what_every_step_reads():
    mixture = StepWeights(expert_bytes=100, other_bytes=1000, layers=2, experts=8)
    read = experts_read(mixture, 24, 8, CARD)
    assert (read.touched, read.experts, read.bytes, read.seconds) == (3.0, 8, 24 * 100 + 4 * 1000, 1.0)
    assert "touched 3.0 of a layer's 8 (37.5%)" in read.text() and "floor 1.0000 s" in read.text()
    assert "floor" not in experts_read(mixture, 24, 8, None).text()


def test_the_floor_counts_keys_and_values_and_operations():
    """A prompt of 3 tokens and an answer of 3: its second and third token read 4 and 5 tokens' keys and values."""
    mixture = StepWeights(100, 1000, 2, 8, token_weights=7, head_weights=5, operation_rate=2)
    whole = FullKV(num_kv_heads=1, head_dim=8, dtype="bfloat16")  # 32 bytes a token
    window = WindowKV(num_kv_heads=1, head_dim=8, dtype="bfloat16", window=4)
    chunk = ChunkedKV(num_kv_heads=1, head_dim=8, dtype="bfloat16", chunk=4)
    latent = LatentKV(latent_dim=8, rope_dim=8, dtype="bfloat16")
    chosen = LatentKV(latent_dim=8, rope_dim=8, dtype="bfloat16", indexer_dim=16)
    state = RecurrentState(((4, 4),), ("float32",))
    for spec, size in (
        (whole, 9 * 32),
        (window, 8 * 32),
        (chunk, 5 * 32),
        (latent, 9 * 32),
        (chosen, 0),
        (state, 2 * 64),
    ):
        assert experts_read(mixture, 0, 0, CARD, [spec], [request(3, 3)]).kv_bytes == size, spec
    read = experts_read(mixture, 24, 8, CARD, [whole, window], [request(3, 3), request(3, 3)], cached_tokens=1)
    assert read.kv_bytes == 2 * (9 + 8) * 32
    assert read.operations == 2 * (2 * 7 * 5 + 2 * 5 * 3) - 2 * 7
    assert read.seconds == (6400 + read.kv_bytes) / 6400
    assert read.operation_seconds == read.operations / 2000
    assert read.prompt_seconds == 2 * 7 * (2 * 3 - 1) / 2000
    assert f"floor {read.seconds:.4f} s" in read.text()


def test_throughput_of_a_mixture_says_what_its_steps_read(capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "mixture", SHAPE)
    words = [
        "--num-prompts",
        "1",
        "--input-len",
        "4",
        "--output-len",
        "6",
        "--num-iters",
        "1",
        "--num-iters-warmup",
        "0",
    ]
    own = [
        "--shape",
        "mixture",
        "--ceilings",
        "4.3,760",
        "--json",
        "--quiet",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "4MiB",
    ]
    assert main(["bench", "throughput", *words, *own]) == 0
    report = json.loads(capsys.readouterr().out)
    read, (touched, calls) = report["experts"], report["touched"]
    assert (read["experts"], calls) == (EXPERTS, 6 * LAYERS)  # a prompt's step and five of one token
    assert 5 * LAYERS * ACTIVE + LAYERS * ACTIVE <= touched <= 5 * LAYERS * ACTIVE + LAYERS * EXPERTS
    expert = 3 * 64 * 24 * 4
    assert read["bytes"] >= touched * expert
    assert read["kv_bytes"] == LAYERS * 2 * 2 * 16 * 4 * (5 + 6 + 7 + 8 + 9)
    assert read["seconds"] == (read["bytes"] + read["kv_bytes"]) / 4.3e12
    attention, router = 64 * 16 * (4 + 2 + 2) + 4 * 16 * 64, 0
    assert read["operations"] == 2 * LAYERS * (attention + router + ACTIVE * 3 * 64 * 24) * 9 + 2 * 512 * 64 * 6
