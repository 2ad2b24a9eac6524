"""What the disk tier brings after a restart: first tokens of prompts whose pages are on the disk, beside computing them; and their tokens.

    python scripts/bench_disk_tier.py write --root /path/on/the/disk      # an engine that computes prompts, and ends
    python scripts/bench_disk_tier.py read --root /path/on/the/disk       # another one, which finds them

Weights are random, the same in both. `read` takes each prompt once when the page cache has forgotten the files ("cold"), or holds them ("cached"). The
rule that reads only where that is faster than computing is switched off for it, and what it would decide is printed. Tokens must be those of `write` up to
near ties: the exit status is 1 if they aren't.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_disk import forget
from bench_host_tier import LIKELY, made, prompt, run, settle, stray
from pagerunner import LLM
from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import write_config

GIB, ANSWER = 2**30, 24


def engine(options: argparse.Namespace, directory: Path) -> LLM:
    fields = dict(SHAPES[options.shape])
    fields = fields.get("config", fields) | {"max_position_embeddings": options.tokens + 512}
    tier = {"type": "fs", "root_dir": str(options.root), "max_bytes": int(options.max_gib * GIB)}
    extra = {"cpu_bytes_to_use": int(options.host_gib * GIB), "secondary_tiers": [tier]}
    return LLM(
        str(write_config(directory, **fields)),
        load_format="dummy",
        skip_tokenizer_init=True,
        use_tqdm=False,
        enforce_eager=True,
        max_model_len=options.tokens + 512,
        max_num_seqs=8,
        max_num_batched_tokens=min(8_192, options.tokens + 512),
        kv_cache_memory_bytes=int(options.pages_gib * GIB),
        kv_transfer_config={
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
        },
    )  # fmt: skip


def written(llm: LLM) -> None:
    """Wait until the disk has what was stored."""
    settle(llm)
    below = llm._core._scheduler.tiers.below
    deadline = time.monotonic() + 60
    while below._writes and time.monotonic() < deadline:
        below.settle()
        time.sleep(0.01)


def write(llm: LLM, options: argparse.Namespace, kept: Path) -> None:
    seconds, tokens = [], []
    for number in range(options.prompts):
        took, _ = run(llm, [prompt(number, options.tokens)])
        seconds.append(took)
        written(llm)
        _, outputs = run(llm, [prompt(number, options.tokens)], ANSWER)
        tokens += made(outputs)
    kept.write_text(json.dumps({"seconds": statistics.median(seconds[1:]), "tokens": tokens}))
    tier = llm.stats().tier
    print(f"computed: first token after {statistics.median(seconds[1:]) * 1e3:.1f} ms; {tier.disk}", flush=True)


def read(llm: LLM, options: argparse.Namespace, kept: Path) -> None:
    before = json.loads(kept.read_text())
    tiers = llm._core._scheduler.tiers
    rates = tiers.rates
    took, _ = run(llm, [prompt(50_000, options.tokens)])  # what is made at first use
    took, _ = run(llm, [prompt(50_001, options.tokens)])
    written(llm)
    each = rates.seconds_per_token * options.tokens
    rates.computed = lambda *_: None
    rates.seconds_per_token = 0.0  # not known: reading always pays
    found: dict[str, list[float]] = {"cold": [], "cached": []}
    equal, wrong = 0, list[str]()
    start = llm.stats().tier.disk
    for number in range(options.prompts):
        how = "cold" if number % 2 == 0 else "cached"
        files = sorted(Path(options.root).rglob("*.pages"))
        if how == "cold":
            forget(files)
        else:
            for file in files:
                with open(file, "rb") as pages:
                    while pages.read(1 << 24):
                        pass
        seconds, [output] = run(llm, [prompt(number, options.tokens)])
        assert output.num_cached_tokens > options.tokens // 2, f"it was not found: {llm.stats().tier}"
        found[how].append(seconds)
        _, outputs = run(llm, [prompt(number, options.tokens)], ANSWER, logprobs=LIKELY)
        if said := stray(before["tokens"][number], outputs[0]):
            wrong.append(f"prompt {number}: {said}")
        equal += [list(one) for one in made(outputs)] == [before["tokens"][number]]
    disk = llm.stats().tier.disk
    size = (disk.read_bytes - start.read_bytes) / options.prompts
    computed = statistics.median([before["seconds"], took])
    print("| first token of a prompt | ms | pages come at, GB/s | sooner than computing |\n|---|---|---|---|")
    print(f"| computed | {computed * 1e3:.1f} | | |")
    for how, seconds in found.items():
        middle = statistics.median(seconds)
        print(
            f"| from the disk, {how} | {middle * 1e3:.1f} | {size / middle / 1e9:.2f} (with all else) | {computed / middle:.2f} |"
        )
    would = size / start.read_rate
    print(
        f"{size / 1e9:.2f} GB a prompt; measured at the start {start.read_rate / 1e9:.2f} GB/s: {would * 1e3:.0f} ms, computing {each * 1e3:.0f} ms: "
        f"the rule would {'read' if would < each else 'compute'}; tokens equal: {equal} of {options.prompts}; {disk}"
    )
    if wrong:
        sys.exit("\n".join(["TOKENS ARE OTHERS:", *wrong]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "read"))
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--pages-gib", type=float, default=10)
    parser.add_argument("--host-gib", type=float, default=20)
    parser.add_argument("--max-gib", type=float, default=24)
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        llm = engine(options, Path(directory))
    print(f"started in {time.perf_counter() - began:.1f} s; {llm.stats().tier.disk}", flush=True)
    (write if options.what == "write" else read)(llm, options, options.root / "tokens.json")


if __name__ == "__main__":
    main()
