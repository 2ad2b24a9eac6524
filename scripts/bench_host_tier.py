"""What host memory for pages brings and costs: passes over the same prompts, one prompt's first token, decoding while pages move.

    python scripts/bench_host_tier.py qwen3-8b --host-gib 80          # with host memory
    python scripts/bench_host_tier.py qwen3-8b --host-gib 0           # beside it: the first pass alone
    python scripts/bench_host_tier.py qwen3-8b --by-copies            # what steps bring from the host goes by copy engines

Weights are random. `--config FILE` takes another shape, `--set num_experts=64` replaces a field of it. The tokens of prompts that come from host memory are
compared with those of the same prompts found on the device, which compute the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pagerunner import LLM, SamplingParams
from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import write_config
from pagerunner.ops import async_copy
from pagerunner.ops.host_words import from_host, to_host
from pagerunner.runner import staging

GIB = 2**30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--config", help="a config.json to take instead")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--pages-gib", type=float, default=8)
    parser.add_argument("--host-gib", type=float, default=80)
    parser.add_argument("--decoding", type=int, default=64, help="requests that decode while pages move; 0 for none")
    parser.add_argument("--move-gib", type=float, default=10)
    parser.add_argument(
        "--by-copies", action="store_true", help="steps bring and give back by copy engines, and not by a kernel"
    )
    return parser.parse_args()


def engine(options: argparse.Namespace, directory: Path) -> LLM:
    fields = json.loads(Path(options.config).read_text()) if options.config else dict(SHAPES[options.shape])
    fields = fields.get("config", fields)
    fields |= {name: json.loads(value) for name, value in (one.split("=", 1) for one in options.set)}
    longest = options.tokens + 512
    fields["max_position_embeddings"] = max(fields.get("max_position_embeddings", 0), longest)
    return LLM(
        str(write_config(directory, **fields)),
        load_format="dummy",
        skip_tokenizer_init=True,
        use_tqdm=False,
        max_model_len=longest,
        max_num_seqs=max(options.decoding, 8),
        max_num_batched_tokens=min(8_192, longest),
        kv_cache_memory_bytes=int(options.pages_gib * GIB),
        kv_offloading_size=options.host_gib or None,
    )


def prompt(seed: int, tokens: int) -> dict[str, Any]:
    ids = random.Random(seed)
    return {"prompt_token_ids": [ids.randrange(1, 1_000) for _ in range(tokens)]}


def run(llm: LLM, prompts: list[dict[str, Any]], tokens: int = 1, **params: Any) -> tuple[float, list[Any]]:
    wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **params)
    began = time.perf_counter()
    outputs = llm.generate(prompts, wanted, use_tqdm=False)
    return time.perf_counter() - began, outputs


def settle(llm: LLM) -> None:
    """Let stores end."""
    while llm._core.has_work:
        llm._core.step()


def lock(llm: LLM) -> None:
    """Wait until all host memory that can be locked is."""
    core, began = llm._core, time.perf_counter()
    ready, since = 0, began
    while ready < core._scheduler.tiers.host.num_bytes and time.perf_counter() - since < 5:
        time.sleep(0.01)
        if (now := core._executor.host_ready) > ready:
            ready, since = now, time.perf_counter()
    print(f"locked: {ready / GIB:.1f} GiB, {since - began:.1f} s after the start", flush=True)


def parts(llm: LLM, wanted: dict[str, Any]) -> tuple[list[float], Any]:
    """Seconds of a prompt's first token: until its load began, while it was under way as the core sees it, and from then on. Also the output."""
    core, marks = llm._core, list[float]()
    run_plan, end = core._executor.run, core._scheduler.end_transfer

    def noted_run(plan: Any) -> Any:
        begun = run_plan(plan)
        if any(transfer.loads for transfer in plan.transfers):
            marks.append(time.perf_counter())
        return begun

    def noted_end(ended: Any) -> None:
        end(ended)
        marks.append(time.perf_counter())

    core._executor.run, core._scheduler.end_transfer = noted_run, noted_end
    began = time.perf_counter()
    try:
        seconds, [output] = run(llm, [wanted])
    finally:
        del core._executor.run, core._scheduler.end_transfer
    begun, ended = marks[:2]
    return [begun - began, ended - begun, began + seconds - ended], output


def made(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def passes(llm: LLM, options: argparse.Namespace) -> None:
    prompts = [prompt(seed, options.tokens) for seed in range(options.prompts)]
    seconds, first = run(llm, prompts)
    print(f"first pass: {seconds:.3f} s", flush=True)
    tier = llm.stats().tier
    if tier is None:
        print("tokens", hash(tuple(made(first))))
        return
    settle(llm)
    stored = llm.stats().tier
    print(
        f"stored: {stored.store_bytes_total / GIB:.2f} GiB at {stored.store_bytes_total / max(stored.store_seconds_total, 1e-9) / 1e9:.1f} GB/s, "
        f"skipped {stored.stores_skipped_total}, locked {stored.ready_bytes / GIB:.1f} GiB; tokens {hash(tuple(made(first)))}"
    )
    for number in (2, 3):
        before = llm.stats().tier
        seconds, again = run(llm, prompts)
        tier = llm.stats().tier
        loaded = tier.load_bytes_total - before.load_bytes_total
        rate = loaded / max(tier.load_seconds_total - before.load_seconds_total, 1e-9)
        same = sum(one == two for one, two in zip(made(first), made(again), strict=True))
        print(
            f"pass {number}, from host memory: {seconds:.3f} s; {loaded / 1e9:.2f} GB at {rate / 1e9:.1f} GB/s ({loaded / rate:.3f} s of the bus); "
            f"found {sum(one.num_cached_tokens for one in again):,} of {options.prompts * options.tokens:,} tokens; first tokens as computed: {same} of "
            f"{options.prompts}; failed {tier.failed_total}, given up {tier.given_up_total}",
            flush=True,
        )


def mixed(llm: LLM, options: argparse.Namespace) -> None:
    """A line in which every fourth prompt is new, and must be computed."""
    line = [prompt(number + 30_000 * (number % 4 == 0), options.tokens) for number in range(options.prompts)]
    before = llm.stats().tier
    seconds, outputs = run(llm, line)
    tier, known = llm.stats().tier, sum(number % 4 != 0 for number in range(options.prompts))
    print(
        f"a line with {options.prompts - known} new prompts among {known} that host memory has: {seconds:.3f} s; {(tier.load_bytes_total - before.load_bytes_total) / 1e9:.2f} GB "
        f"loaded, found {sum(one.num_cached_tokens for one in outputs):,} of {known * options.tokens:,} tokens",
        flush=True,
    )


def one_prompt(llm: LLM, options: argparse.Namespace) -> None:
    """First tokens of single prompts, and whether those from host memory go on as those from the device."""
    computed, loaded, equal = [], [], 0
    for number in range(3):
        seconds, _ = run(llm, [prompt(10_000 + number, options.tokens)])
        computed.append(seconds)
    settle(llm)
    for number in range(3):
        found, output = parts(llm, prompt(number, options.tokens))
        loaded.append(found)
        assert output.num_cached_tokens > options.tokens // 2, "it wasn't found"
    for number in range(3, 6):
        wanted = [prompt(number, options.tokens)]
        _, from_host = run(llm, wanted, 24, logprobs=1)
        _, from_device = run(llm, wanted, 24, logprobs=1)
        same = made(from_host) == made(from_device) and [
            {token: entry.logprob for token, entry in one.items()} for one in from_host[0].outputs[0].logprobs
        ] == [{token: entry.logprob for token, entry in one.items()} for one in from_device[0].outputs[0].logprobs]
        equal += same
    whole = sorted(loaded, key=sum)[len(loaded) // 2]
    a, b = statistics.median(computed), sum(whole)
    print(
        f"one prompt's first token: computed {a * 1e3:.1f} ms, from host memory {b * 1e3:.1f} ms ("
        f"{whole[0] * 1e3:.1f} until the load began, {whole[1] * 1e3:.1f} until it had ended, {whole[2] * 1e3:.1f} from there): {a / b:.1f} times sooner; 24 tokens and "
        f"log-probabilities equal those from the device's own pages: {equal} of 3",
        flush=True,
    )


def decoding(llm: LLM, options: argparse.Namespace, first: int = 0) -> None:
    """Steps of requests that decode: alone, while prompts' pages are loaded, from prompt `first` on, and while those of new prompts are stored."""
    core = llm._core
    steps: dict[str, list[float]] = {"alone": [], "loading": [], "storing": []}
    wanted = SamplingParams(temperature=0, max_tokens=440, ignore_eos=True, detokenize=False)
    streams = [llm.stream(prompt(20_000 + number, 64), wanted) for number in range(options.decoding)]
    for stream in streams:
        next(stream)
    scheduler = core._scheduler
    tier, groups = scheduler.tiers, scheduler.manager.plan.groups
    each = sum(group.page_bytes * (options.tokens // group.page_tokens) for group in groups if not group.rule.snapshots)
    count = max(int(options.move_gib * GIB / each), 1)

    def step(moves: str) -> None:
        began = time.perf_counter()
        llm._step()
        steps[moves].append(time.perf_counter() - began)

    def step_beside(moves: str) -> None:
        while True:
            step(moves if tier.num_transfers else "alone")
            if not tier.num_transfers:
                return

    for _ in range(60):
        step("alone")
    before = tier.stats()
    for number in range(first, first + count):
        chain = scheduler.manager.chain("")
        tokens = prompt(number % options.prompts, options.tokens)["prompt_token_ids"]
        chain.cover(tokens, len(tokens))
        load_one(scheduler, chain, tokens)
        step_beside("loading")
    for number in range(count):
        fresh = prompt(30_000 + first + number, options.tokens)
        list(llm.stream(fresh, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)))
        step_beside("storing")
    for _ in range(30):
        step("alone")
    for stream in streams:
        stream.close()
    after = tier.stats()
    moved = {
        "loading": after.load_bytes_total - before.load_bytes_total,
        "storing": after.store_bytes_total - before.store_bytes_total,
    }
    usual = statistics.mean(steps["alone"])
    for moves, seconds in steps.items():
        if not seconds:
            print(f"{options.decoding} requests decode, {moves}: no step")
            continue
        mean, p99 = statistics.mean(seconds), sorted(seconds)[int(0.99 * (len(seconds) - 1))]
        print(
            f"{options.decoding} requests decode, {moves:7}: a step takes {mean * 1e3:.2f} ms ({mean / usual:.3f}), p99 {p99 * 1e3:.2f}, "
            f"worst {max(seconds) * 1e3:.2f}; {len(seconds)} steps, {moved.get(moves, 0) / GIB:.1f} GiB",
            flush=True,
        )


def load_one(scheduler: Any, chain: Any, tokens: list[int]) -> None:
    """Begin to load a prompt as for a request that waits, without one."""
    request = type(
        "Waiting",
        (),
        {
            "chain": chain,
            "tokens": tokens,
            "shares": True,
            "grant": None,
            "finished": False,
            "looked_up": False,
            "hit_limit": lambda self: len(tokens) - 1,
        },
    )()
    scheduler.tiers.look_up(request)
    request.finished = True  # what has come is cache at once


def main() -> None:
    options = parse()
    if options.by_copies:
        staging.from_host = async_copy.from_host = from_host.twin
        async_copy.to_host = to_host.twin
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        llm = engine(options, Path(directory))
    print(f"started in {time.perf_counter() - began:.1f} s")
    if options.host_gib:
        lock(llm)
    run(llm, [prompt(99_999, options.tokens)])  # what is made at first use
    passes(llm, options)
    if options.host_gib:
        mixed(llm, options)
        one_prompt(llm, options)
        if options.decoding:
            decoding(llm, options)
        print(llm.stats().tier)


if __name__ == "__main__":
    main()
