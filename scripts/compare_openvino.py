"""pagerunner against openvino-genai's continuous batching, in turn, on one exported checkpoint.

Needs two Python environments, because the peer's packages pin others:

    python -m venv peer && peer/bin/pip install msgspec openvino-genai "optimum-intel[openvino]"
    python scripts/compare_openvino.py make small work            # a random checkpoint in work/small
    peer/bin/optimum-cli export openvino --model work/small --task text-generation-with-past \
        --weight-format fp32 work/small-ov
    python scripts/compare_openvino.py run small work --peer-python peer/bin/python

Each repetition runs both engines on the same fresh prompts; ratios are medians of the repetitions' ratios. Beside tokens per second
stands the processor time (user and system) of a token, which says more on a machine that does other things too. Two threads, float32 weights and
float32 products in both engines (the peer's INFERENCE_PRECISION_HINT; its keys and values are float16, ours float32), greedy, end of sequence
ignored. With `--without-kernels` a third engine takes its turns: pagerunner without its CPU
kernels, on torch's operators.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import WORKLOADS, workload

WARM_UP_SALT = 1_000
POSITIONS = 4096
END_TOKEN = 0
"""Without one, the export's generation_config.json has none, and the peer takes -1 for a stop id, which it refuses."""


def fitting(shape: str) -> list[str]:
    """The workloads that the checkpoint's positions hold and that a CPU ends: the others are a GPU's."""

    def fits(name: str) -> bool:
        requests = workload(name, SHAPES[shape]["vocab_size"], 0)
        return all(len(one.prompt_token_ids) + one.output_len <= POSITIONS for one in requests)

    return [name for name in WORKLOADS if name.startswith("W") and fits(name)]


def make(shape: str, root: Path) -> None:
    """A checkpoint with random weights and a byte-level tokenizer that nothing uses but exporters ask for."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[shape],
        tie_word_embeddings=True,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        eos_token_id=END_TOKEN,
    )
    Qwen3ForCausalLM(config).save_pretrained(root / shape)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(root / shape)


def serve_ours(shape: str, root: Path) -> None:
    """Answer workloads named on standard input with [seconds, processor seconds, generated tokens]."""
    from pagerunner import LLM, SamplingParams

    llm = LLM(str(root / shape), skip_tokenizer_init=True, kv_cache_memory_bytes=2 * 2**30, use_tqdm=False)

    def run(requests: list[Any]) -> int:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=one.output_len, detokenize=False)
            for one in requests
        ]
        prompts = [{"prompt_token_ids": one.prompt_token_ids} for one in requests]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    _serve(shape, run)


def serve_peer(shape: str, root: Path) -> None:
    """The same for openvino-genai."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 2, True
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2048, 256
    options = {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}
    pipe = genai.ContinuousBatchingPipeline(str(root / f"{shape}-ov"), scheduler, "CPU", options)
    numbers = iter(range(1 << 30))

    def run(requests: list[Any]) -> int:
        handles = []
        for one in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = one.output_len, True, False
            config.eos_token_id = END_TOKEN
            ids = ov.Tensor(np.array([one.prompt_token_ids], dtype=np.int64))
            handles.append(pipe.add_request(next(numbers), ids, config))
        while pipe.has_non_finished_requests():
            pipe.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)

    _serve(shape, run)


def _serve(shape: str, run: Any) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        name, salt = line.split()
        requests = workload(name, SHAPES[shape]["vocab_size"], int(salt))
        started, before = time.perf_counter(), time.process_time()
        tokens = run(requests)
        print(json.dumps([time.perf_counter() - started, time.process_time() - before, tokens]), flush=True)


def compare(shape: str, root: Path, peer_python: str, repetitions: int, *, without_kernels: bool) -> None:
    """Print a line per workload and engine: medians of its speed and processor time, and of the paired ratios."""
    workers = {
        "pagerunner": _start(sys.executable, "ours", shape, root),
        "openvino-genai": _start(peer_python, "peer", shape, root),
    }
    if without_kernels:
        workers["without kernels"] = _start(sys.executable, "ours", shape, root, {"PAGERUNNER_CPU_KERNELS": "0"})
    for name in fitting(shape):
        for worker in workers.values():
            _ask(worker, name, WARM_UP_SALT)
        rounds = [[_ask(worker, name, salt) for worker in workers.values()] for salt in range(repetitions)]
        for place, worker_name in enumerate(workers):
            speed, busy = (statistics.median(one[place][which] for one in rounds) for which in (0, 1))
            said = f"{shape} {name}: {worker_name} {speed:,.1f} tokens/s, {1e3 * busy:.3f} ms of processors per token"
            if place:
                faster = statistics.median(one[0][0] / one[place][0] for one in rounds)
                cheaper = statistics.median(one[place][1] / one[0][1] for one in rounds)
                said += f"; pagerunner's speed {faster:.2f} of it, per processor time {cheaper:.2f}"
            print(said, flush=True)
    for worker in workers.values():
        worker.communicate()


def _start(
    python: str, side: str, shape: str, root: Path, settings: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    source = str(Path(__file__).resolve().parent.parent / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "2", **settings}
    command = [python, __file__, side, shape, str(root)]
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    if worker.stdout is None or not any(line.strip() == "ready" for line in worker.stdout):
        raise SystemExit(f"{' '.join(command)} did not start")
    return worker


def _ask(worker: subprocess.Popen[str], name: str, salt: int) -> tuple[float, float]:
    """Tokens per second, and processor seconds per token."""
    if worker.stdin is None or worker.stdout is None:
        raise SystemExit("the worker has no pipes")
    worker.stdin.write(f"{name} {salt}\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("["):
            seconds, busy, tokens = json.loads(line)
            return float(tokens / seconds), float(busy / tokens)
    raise SystemExit("a worker died; see its messages above")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "run", "ours", "peer"))
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("root", type=Path, help="folder of the checkpoint and its export")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--without-kernels", action="store_true", help="also run pagerunner without its CPU kernels")
    args = parser.parse_args()
    if args.action == "run":
        compare(args.shape, args.root, args.peer_python, args.repetitions, without_kernels=args.without_kernels)
    else:
        {"make": make, "ours": serve_ours, "peer": serve_peer}[args.action](args.shape, args.root)


if __name__ == "__main__":
    main()
