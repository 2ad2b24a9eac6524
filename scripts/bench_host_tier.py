"""What host memory for pages brings and costs: passes over the same prompts, one prompt's first token, decoding while pages move.

    python scripts/bench_host_tier.py qwen3-8b --host-gib 80          # with host memory
    python scripts/bench_host_tier.py qwen3-8b --host-gib 0           # beside it: the first pass alone
    python scripts/bench_host_tier.py qwen3-8b --by-copies            # what steps bring from the host goes by copy engines

Weights are random. `--config FILE` takes another shape, `--set num_experts=64` replaces a field of it.

Tokens of every prompt are compared with those of the same prompt under a salt, whose pages never leave the device, and the exit status is 1 if they are others. What
is computed has sums in another order than what is found. How far that goes is measured: a token that differs must be a near tie, as its log-probability says.
Where that goes further than a nat, as with 48 layers of random experts in bfloat16, such tokens say nothing and aren't compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pagerunner import LLM, SamplingParams
from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import write_config
from pagerunner.engine.core.garbage import seldom_collected
from pagerunner.ops import async_copy
from pagerunner.ops.host_words import from_host, to_host
from pagerunner.runner import staging

GIB = 2**30
NEAR = 8
"""Steps of requests that decode beside a transfer, and as many before and after it."""
LIKELY, TIE = 20, 0.1
"""A token that differs is a near tie if it is among so many likeliest, and at most so much less likely than the likeliest (in nats)."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--config", help="a config.json to take instead")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--pages-gib", type=float, default=8)
    parser.add_argument("--host-gib", type=float, default=80)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--block-size", type=int, default=16, help="tokens of a page; the host's part grows with the number of pages"
    )
    parser.add_argument("--seqs", type=int, default=64, help="most requests that run at once")
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
        dtype=options.dtype,
        skip_tokenizer_init=True,
        use_tqdm=False,
        max_model_len=longest,
        max_num_seqs=max(options.decoding + 1, options.seqs),  # a prompt that comes beside them has a slot
        max_num_batched_tokens=min(8_192, longest),
        kv_cache_memory_bytes=int(options.pages_gib * GIB),
        kv_offloading_size=options.host_gib or None,
        block_size=options.block_size,
    )


def prompt(seed: int, tokens: int, salt: str = "") -> dict[str, Any]:
    ids = random.Random(seed)
    named = {"cache_salt": salt} if salt else {}
    return {"prompt_token_ids": [ids.randrange(1, 1_000) for _ in range(tokens)], **named}


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


def stray(tokens: Sequence[int], output: Any, tie: float = TIE) -> str:
    """Where these tokens leave those of an output with LIKELY log-probabilities, if that is no near tie."""
    answer = output.outputs[0]
    for at, (token, other) in enumerate(zip(tokens, answer.token_ids, strict=False)):
        if token != other:
            likely = answer.logprobs[at]
            gap = likely[other].logprob - likely[token].logprob if token in likely else float("inf")
            return "" if gap <= tie else f"token {at} is {token}, and {other} is more likely by {gap:.3f} nats"
    return ""


def apart(one: Any, other: Any) -> float:
    """The most by which the first token's likeliest differ in log-probability."""
    a, b = ({token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()} for output in (one, other))
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=float("inf"))


class Answers:
    """How prompts go on: those that host memory has, and the same ones that it never had. What comes twice must be the same but for rounding."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.others: list[tuple[int, Sequence[int], str]] = []
        self.wrong: list[str] = []

    def note(self, what: str, outputs: list[Any], numbers: Sequence[int]) -> None:
        """Prompts of these numbers were answered so."""
        self.others += [(number, tokens, what) for number, tokens in zip(numbers, made(outputs), strict=True)]

    def find(self, llm: LLM, options: argparse.Namespace) -> None:
        """Each prompt by itself, from host memory."""
        for number in range(options.prompts):
            _, [output] = run(llm, [prompt(number, options.tokens)], 24, logprobs=LIKELY)
            self.found.append(output)
            if output.num_cached_tokens <= options.tokens // 2:
                self.wrong.append(f"prompt {number} was not found")

    def judge(self, llm: LLM, options: argparse.Namespace) -> None:
        """The same prompts under a salt, by which nothing is found: computed, and then found on the device. What is between these two is rounding."""
        rounding, away, equal, same = 0.0, [], 0, 0
        for number, found in enumerate(self.found):
            fresh = [prompt(number, options.tokens, "fresh")]
            (_, [computed]), (_, [here]) = (run(llm, fresh, 24, logprobs=LIKELY) for _ in range(2))
            rounding = max(rounding, apart(computed, here))
            away.append(apart(found, here))
            equal += made([found]) == made([here])
            same += made([computed])[0][0] == made([here])[0][0]
            self.note("found on the device", [here], [number])
            self.note("computed", [computed], [number])
        most = max(2 * rounding, 1e-3)
        self.wrong += [f"prompt {n}: first tokens are {far:.3f} nats apart" for n, far in enumerate(away) if far > TIE]
        if told := rounding < 1.0:
            for number, tokens, what in self.others:
                if said := stray(tokens, self.found[number], 2 * most):
                    self.wrong.append(f"prompt {number}, {what}: {said}")
        beside = (
            f"those of computing {rounding:.4f}"
            if told
            else f"first tokens of {same} are also those of computing: between sums in another order random weights decide otherwise, so what runs beside other rows, "
            "or is computed, isn't compared (--dtype float32 compares it)"
        )
        print(
            f"24 tokens equal those from pages that never left the device: {equal} of {options.prompts}; log-probabilities are {max(away):.4f} nats apart at most, "
            f"and {beside}",
            flush=True,
        )


def passes(llm: LLM, options: argparse.Namespace, answers: Answers) -> None:
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
    answers.note("first pass", first, range(options.prompts))
    for number in (2, 3):
        before = llm.stats().tier
        seconds, again = run(llm, prompts)
        tier = llm.stats().tier
        loaded = tier.load_bytes_total - before.load_bytes_total
        rate = max(loaded, 1) / max(tier.load_seconds_total - before.load_seconds_total, 1e-9)
        answers.note(f"pass {number}", again, range(options.prompts))
        same = sum(one == two for one, two in zip(made(first), made(again), strict=True))
        print(
            f"pass {number}, from host memory: {seconds:.3f} s; {loaded / 1e9:.2f} GB at {rate / 1e9:.1f} GB/s ({loaded / rate:.3f} s of the bus); "
            f"found {sum(one.num_cached_tokens for one in again):,} of {options.prompts * options.tokens:,} tokens; first tokens as computed: {same} of "
            f"{options.prompts}; failed {tier.failed_total}, given up {tier.given_up_total}",
            flush=True,
        )
    answers.find(llm, options)


def mixed(llm: LLM, options: argparse.Namespace, answers: Answers) -> None:
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
    answers.note("in a line with new ones", *zip(*[(one, n) for n, one in enumerate(outputs) if n % 4], strict=True))


def one_prompt(llm: LLM, options: argparse.Namespace) -> None:
    """First tokens of single prompts."""
    computed, loaded = [], []
    for number in range(3):
        seconds, _ = run(llm, [prompt(10_000 + number, options.tokens)])
        computed.append(seconds)
    settle(llm)
    for number in range(3):
        found, output = parts(llm, prompt(number, options.tokens))
        loaded.append(found)
        assert output.num_cached_tokens > options.tokens // 2, "it wasn't found"
    whole = sorted(loaded, key=sum)[len(loaded) // 2]
    a, b = statistics.median(computed), sum(whole)
    print(
        f"one prompt's first token: computed {a * 1e3:.1f} ms, from host memory {b * 1e3:.1f} ms ("
        f"{whole[0] * 1e3:.1f} until the load began, {whole[1] * 1e3:.1f} until it had ended, {whole[2] * 1e3:.1f} from there): {a / b:.1f} times sooner",
        flush=True,
    )


def decoding(llm: LLM, options: argparse.Namespace, first: int = 0) -> None:
    """Steps of requests that decode: alone, while prompts' pages are loaded, from prompt `first` on, while those of new prompts are stored, and after new prompts
    that aren't stored. Each few are compared with those right before and after them, as contexts grow.
    """
    steps: dict[str, list[float]] = {"alone": [], "loading": [], "computed": [], "storing": []}
    ratios: dict[str, list[float]] = {moves: [] for moves in steps}
    scheduler = llm._core._scheduler
    tier, groups = scheduler.tiers, scheduler.manager.plan.groups
    each = sum(group.page_bytes * (options.tokens // group.page_tokens) for group in groups if not group.rule.snapshots)
    count = max(int(options.move_gib * GIB / each), 1)
    # the first gets two tokens with every other that begins
    most = 2 * options.decoding + 100 + 3 * count * (3 * NEAR + 8)
    wanted = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False, output_kind="delta")
    streams = [llm.stream(prompt(20_000 + number, 64), wanted) for number in range(options.decoding)]
    for stream in streams:
        next(stream)

    def step(moves: str) -> float:
        began = time.perf_counter()
        llm._step()
        steps[moves].append(time.perf_counter() - began)
        # a server's core has no outputs, and garbage collections would look through these
        for arrived in llm._streams.values():
            arrived.clear()
        return steps[moves][-1]

    def step_beside(moves: str, begin: Callable[[], object]) -> None:
        near = [step("alone") for _ in range(NEAR)]
        begin()
        beside = [step(moves) for _ in range(NEAR)]
        while tier.num_transfers:
            step(moves)
        near += [step("alone") for _ in range(NEAR)]
        if (run := llm.stats().running) < options.decoding:
            sys.exit(f"{options.decoding - run} of {options.decoding} requests have ended, so these steps say nothing")
        ratios[moves].append(statistics.mean(beside) / statistics.mean(near))

    for _ in range(40):
        step("alone")
    before = tier.stats()
    for number in range(first, first + count):
        step_beside(
            "loading",
            partial(load_one, scheduler, prompt(number % options.prompts, options.tokens)["prompt_token_ids"]),
        )
    for number in range(2 * count):
        fresh = llm.stream(
            prompt(30_000 + first + number, options.tokens),
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False),
        )
        if number % 2:
            step_beside("storing", partial(list, fresh))
        else:
            tier.wish = lambda *_: None
            step_beside("computed", partial(list, fresh))
            del tier.wish
    for stream in streams:
        stream.close()
    after = tier.stats()
    moved = {
        "loading": after.load_bytes_total - before.load_bytes_total,
        "storing": after.store_bytes_total - before.store_bytes_total,
    }
    for moves, seconds in steps.items():
        mean, p99 = statistics.mean(seconds), sorted(seconds)[int(0.99 * (len(seconds) - 1))]
        near = (
            f" ({statistics.median(ratios[moves]):.3f} of those before and after, median of {count})"
            if ratios[moves]
            else ""
        )
        print(
            f"{options.decoding} requests decode, {moves:8}: a step takes {mean * 1e3:.2f} ms{near}, p99 {p99 * 1e3:.2f}, worst {max(seconds) * 1e3:.2f}; "
            f"{len(seconds)} steps, {moved.get(moves, 0) / GIB:.1f} GiB",
            flush=True,
        )


def load_one(scheduler: Any, tokens: list[int]) -> None:
    """Begin to load a prompt as for a request that waits, without one."""
    chain = scheduler.manager.chain("")
    chain.cover(tokens, len(tokens))
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
    answers = Answers()
    passes(llm, options, answers)
    if options.host_gib:
        mixed(llm, options, answers)
        one_prompt(llm, options)
        if options.decoding:
            with seldom_collected():  # as in a server: a collection of all objects stops the steps for 0.1 to 0.4 s
                decoding(llm, options)
        answers.judge(llm, options)
        print(llm.stats().tier)
    if answers.wrong:
        sys.exit("\n".join(["TOKENS ARE OTHERS:", *answers.wrong]))


if __name__ == "__main__":
    main()
