"""How long a server takes new weights from a trainer, all of them at once: by NCCL from another device, or by gloo from the host.

    CUDA_VISIBLE_DEVICES=0,1 pagerunner serve DIR --load-format dummy --weight-transfer-config '{"backend": "nccl"}'
    CUDA_VISIBLE_DEVICES=1,0 python scripts/bench_weight_transfer.py --backend nccl

    python scripts/bench_weight_transfer.py --start        # starts the server too

Weights are random, of a Qwen3 shape, in bfloat16. They are sent three times: one set, another one, and the first again, which must give the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pagerunner.bench.shapes import SHAPES
from rl_trainer import Sender, Server
from served_shape import write_served


def weights(config: dict[str, Any], seed: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors, at random."""
    random = torch.Generator(device).manual_seed(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16) * 0.02

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", drawn(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}self_attn.{name}_proj.weight", drawn(rows, hidden)
        yield f"{at}self_attn.o_proj.weight", drawn(hidden, queries)
        for name in ("q", "k"):
            yield f"{at}self_attn.{name}_norm.weight", ones(head)
        for name in ("gate", "up"):
            yield f"{at}mlp.{name}_proj.weight", drawn(inner, hidden)
        yield f"{at}mlp.down_proj.weight", drawn(hidden, inner)
        for name in ("input", "post_attention"):
            yield f"{at}{name}_layernorm.weight", ones(hidden)
    yield "model.norm.weight", ones(hidden)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", drawn(config["vocab_size"], hidden)


def tokens(server: Server) -> Any:
    body = {
        "prompt": [*range(20, 60)],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return server("/v1/completions", body)["choices"][0]["token_ids"]


def measure(url: str, config: dict[str, Any], backend: str) -> None:
    server, device = Server(url), "cuda" if backend == "nccl" else "cpu"
    began = time.perf_counter()
    sender = Sender(server, backend)
    print(f"joined in {time.perf_counter() - began:.2f} s", flush=True)
    found = []
    for seed in (1, 2, 1):
        named = list(weights(config, seed, device))
        num_bytes = sum(tensor.numel() * tensor.itemsize for _, tensor in named)
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        sender.send(named)
        seconds = time.perf_counter() - began
        found.append(tokens(server))
        print(
            f"{num_bytes / 1e9:.2f} GB in {seconds:.2f} s, {num_bytes / 1e9 / seconds:.1f} GB/s, start to finish",
            flush=True,
        )
    same, other = found[0] == found[2], found[0] != found[1]
    print(f"the same weights give the same tokens: {same}; others give others: {other}")
    if not (same and other):
        raise SystemExit(1)


@contextlib.contextmanager
def started(directory: Path, backend: str) -> Iterator[str]:
    """A server on the last device that can be seen: this process takes the first one."""
    devices = [str(number) for number in range(torch.cuda.device_count())]
    flags = ["--load-format", "dummy", "--port", "0", "--quiet", "--max-model-len", "4096", "--max-num-seqs", "64"]
    flags += ["--device", "cuda" if backend == "nccl" else "cpu"]
    flags += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if backend == "gloo":
        flags += ["--dtype", "bfloat16", "--num-gpu-blocks-override", "512"]
    command = [sys.executable, "-m", "pagerunner", "serve", str(directory), *flags]
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(reversed(devices))} if devices else {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | seen) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().rpartition(" ")[2].strip()
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--shape", default="qwen3-8b", help="of the server's model")
    parser.add_argument("--start", action="store_true", help="start the server, on the last device that can be seen")
    parser.add_argument("--backend", default="nccl", choices=("gloo", "nccl"))
    options = parser.parse_args()
    config = SHAPES[options.shape]
    if not options.start:
        return measure(options.url, config, options.backend)
    with (
        tempfile.TemporaryDirectory() as directory,
        started(write_served(options.shape, Path(directory)), options.backend) as url,
    ):
        measure(url, config, options.backend)


if __name__ == "__main__":
    main()
