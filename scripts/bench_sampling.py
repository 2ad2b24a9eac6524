"""What sampling costs: greedy against drawn tokens, in turns, through one engine.

    python scripts/bench_sampling.py [--shapes qwen3-0.6b,qwen3-8b] [--rows 1,64,256] [--rounds 4]
    python scripts/bench_sampling.py --shapes qwen3-8b --quantization compressed-tensors

Requests of 32 tokens in and `--output-len` out, random weights, all rows side by side; the best of the rounds of each
way to choose tokens, and its ratio to greedy. A round runs every way once, one after the other, so that all of them meet the same
clocks. With --source DIR, the package of another checkout is measured instead (its `src`), for a comparison in one call.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "0.7, top-p 0.95, top-k 20": {"temperature": 0.7, "top_p": 0.95, "top_k": 20},
    "0.7, top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
}


def measure(llm: Any, rows: int, output_len: int, way: dict[str, Any], salt: int) -> float:
    """Seconds of one batch."""
    from pagerunner import SamplingParams

    draw = random.Random(salt)
    prompts = [{"prompt_token_ids": [draw.randrange(10, 4_000) for _ in range(32)]} for _ in range(rows)]
    params = SamplingParams(ignore_eos=True, max_tokens=output_len, detokenize=False, **way)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def run(shape: str, quantization: str | None, all_rows: list[int], rounds: int, output_len: int, label: str) -> None:
    """One engine's table."""
    from pagerunner import LLM
    from pagerunner.bench.shapes import QUANTIZED
    from pagerunner.bench.workloads import write_model

    with tempfile.TemporaryDirectory() as directory:
        model = write_model(shape, Path(directory), quantization if quantization in QUANTIZED else None)
        llm = LLM(
            str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_num_seqs=max(all_rows),
            max_model_len=min(2048, 4 * output_len),
            gpu_memory_utilization=0.6,
            quantization=quantization,
        )
        for rows in all_rows:
            best = dict.fromkeys(WAYS, float("inf"))
            for turn in range(rounds + 1):
                for name, way in WAYS.items():
                    seconds = measure(llm, rows, output_len, way, turn)
                    if turn:
                        best[name] = min(best[name], seconds)
            for name, seconds in best.items():
                print(
                    f"RESULT {label}{shape}{' ' + quantization if quantization else ''} {rows:3} rows, {name:26}: {rows * output_len / seconds:9,.0f} tok/s, "
                    f"{seconds / output_len * 1e3:6.3f} ms a step, {best['greedy'] / seconds:.3f} of greedy",
                    flush=True,
                )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument(
        "--quantization", help="fp8 rounds the random weights; compressed-tensors, mxfp4 ... are stored forms"
    )
    parser.add_argument("--source", type=Path, help="the src folder of another checkout")
    args = parser.parse_args()
    if args.source is not None:
        sys.path.insert(0, str(args.source.resolve()))
    label = "" if args.source is None else f"{args.source.parent.name}: "
    for shape in args.shapes.split(","):
        run(shape, args.quantization, [int(rows) for rows in args.rows.split(",")], args.rounds, args.output_len, label)


if __name__ == "__main__":
    main()
