"""What a mixture's steps read, counted while a workload runs."""

from __future__ import annotations

import json

from pagerunner.bench.experts import experts_read
from pagerunner.bench.shapes import SHAPES
from pagerunner.cli.main import main
from pagerunner.engine.startup.mixture import Mixture

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


def test_the_floor_counts_touched_experts_and_what_every_step_reads():
    mixture = Mixture(expert_bytes=100, other_bytes=1000, layers=2, experts=8)
    read = experts_read(mixture, touched=24, calls=8, bytes_per_second=6400)
    assert (read.touched, read.experts, read.bytes, read.seconds) == (3.0, 8, 24 * 100 + 4 * 1000, 1.0)
    assert "touched 3.0 of a layer's 8 (37.5%)" in read.text() and "floor 1.0000 s" in read.text()
    assert "floor" not in experts_read(mixture, 24, 8, None).text()


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
    assert read["bytes"] >= touched * expert and read["seconds"] == read["bytes"] / 4.3e12
