"""What adapters cost: rates with several adapters beside those of the base, first tokens of cold adapters, and a thousand in turn.

    python scripts/bench_lora.py --shape qwen3-8b [--parts base,none,one,eight,many,cold,thousand] [--json FILE]

Weights and adapters are random. `base` is an engine without adapters; all others are one engine with `--max-loras` slots of rank 16, and `none` runs in it
without an adapter. Each adapter has its own content and its own memory; their files share the bytes of one, so that they are quickly written.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagerunner import LLM, LoRARequest, SamplingParams
from pagerunner.bench.workloads import WORKLOADS, workload, write_model
from pagerunner.lora.blocks import Products
from pagerunner.models.checkpoint.loader import build_model
from pagerunner.models.configs.reader import read_model_config

RANK = 16
ALL = ("base", "none", "one", "eight", "many", "cold", "thousand")


def write_adapters(model: Path, directory: Path, count: int, layers: int | None = None) -> list[LoRARequest]:
    """Adapters of all matrices, or of those of the first `layers`, which differ in their scale."""
    config = read_model_config(str(model), None, None)
    sizes = Products.of(build_model(config, "bfloat16")).sizes
    names = [name for name in sizes if layers is None or int(name.split(".")[2]) < layers]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        outputs, inputs = sizes[name]
        tensors[f"base_model.model.{name}.lora_A.weight"] = (torch.randn(RANK, inputs) * 0.02).bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = (torch.randn(outputs, RANK) * 0.02).bfloat16()
    directory.mkdir(parents=True)
    shared = directory / "shared.safetensors"
    save_file(tensors, shared)
    made = []
    for number in range(count):
        own = directory / f"a{number}"
        own.mkdir()
        os.link(shared, own / "adapter_model.safetensors")
        asked = {"peft_type": "LORA", "r": RANK, "lora_alpha": 1 + number / 1024, "target_modules": names}
        (own / "adapter_config.json").write_text(json.dumps(asked), encoding="utf-8")
        made.append(LoRARequest(f"{directory.name}-{number}", number + 1, str(own)))
    return made


def rate(
    llm: LLM, name: str, vocab: int, adapters: Sequence[LoRARequest | None], repetitions: int, warmups: int = 1
) -> float:
    """Output tokens a second of the best run of a workload, whose requests take the adapters in turn."""
    best = float("inf")
    for salt in range(warmups + repetitions):
        requests = workload(name, vocab, salt)
        prompts = [{"prompt_token_ids": one.prompt_token_ids} for one in requests]
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=one.output_len, detokenize=False)
            for one in requests
        ]
        own = [adapters[number % len(adapters)] for number in range(len(requests))] if adapters else None
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=own)
        if salt >= warmups:
            best = min(best, time.perf_counter() - started)
    return sum(one.output_len for one in requests) / best


def load(llm: LLM, adapters: Sequence[LoRARequest]) -> None:
    """Have the adapters on the device. Loads go on beside steps: 64 of 8B took some 12 s, nearly as long as mixed256 without adapters."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1, detokenize=False)
    prompts = [{"prompt_token_ids": [400] * 32} for _ in adapters]
    llm.generate(prompts, [params] * len(prompts), use_tqdm=False, lora_request=list(adapters))


def first_tokens(llm: LLM, adapters: Sequence[LoRARequest]) -> tuple[float, float]:
    """Median seconds to the first token of a prompt of 128 tokens: with adapters that are in slots, and with the same ones when they are in host memory alone."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1, detokenize=False)

    def once(adapter: LoRARequest, salt: int) -> float:
        prompt = {"prompt_token_ids": [300 + (salt * 131 + place) % 9000 for place in range(128)]}
        started = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)
        return time.perf_counter() - started

    warm, cold = [], []
    for number, adapter in enumerate(adapters):
        fills = llm.stats().lora.fills_total
        cold.append(once(adapter, 2 * number))
        assert llm.stats().lora.fills_total == fills + 1, "the adapter was in a slot"
        warm.append(once(adapter, 2 * number + 1))
    return statistics.median(warm), statistics.median(cold)


def in_turn(llm: LLM, adapters: Sequence[LoRARequest], seconds: float) -> dict[str, float]:
    """32 requests generate without an adapter. Beside them 16 short ones run or wait at any time, which take one adapter after another. Milliseconds
    between the ends of steps, in which each of the 32 gets a token, without and with the short ones.
    """
    core, process = llm._core, llm._frontend.inputs.process
    room = llm.memory_plan.max_model_len - 64
    found: dict[str, float] = {}
    for what in ("alone", "beside"):
        kept = [f"{what}-{number}" for number in range(32)]
        for name in kept:
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=room, detokenize=False)
            [request] = process({"prompt_token_ids": [300 + len(name)] * 32}, params, name)
            core.add(request)
        short = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4, detokenize=False)
        gaps: list[float] = []
        number, ended, begun = 0, 0, time.perf_counter()
        last = begun
        while last - begun < seconds:
            while what == "beside" and number - ended < 16:
                adapter = adapters[number % len(adapters)].lora_name
                [request] = process(
                    {"prompt_token_ids": [300 + number % 9000] * 32}, short, f"short-{number}", lora=adapter
                )
                core.add(request)
                number += 1
            updates = core.step()
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
            ended += sum(one.finish_reason is not None for one in updates)
        for name in [*kept, *(f"short-{one}" for one in range(max(number - 64, 0), number))]:
            core.abort([name])
        core.drain()
        gaps = sorted(gaps[16:] or gaps)
        found[f"{what}: longest"], found[f"{what}: 99.9 %"] = 1e3 * gaps[-1], 1e3 * gaps[int(0.999 * (len(gaps) - 1))]
        found[f"{what}: median"], found[f"{what}: short requests"] = 1e3 * statistics.median(gaps), ended
    return found


def resident_bytes() -> int:
    """Bytes of this process in host memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def with_adapters(llm: LLM, model: Path, folder: Path, parsed: argparse.Namespace, measure: Any, say: Any) -> None:
    """What one engine with slots does. The important figures come first, as `--seconds` may end it."""
    parts, names = parsed.parts.split(","), parsed.workloads.split(",")
    begun = time.perf_counter()
    adapters = write_adapters(model, folder / "full", parsed.max_loras)
    small = [name for name in names if name != "mixed256"]
    for name in small:
        measure(llm, "none", name, [])
    for part, used in (("one", 1), ("eight", 8), ("many", parsed.max_loras)):
        for name in small:
            if name != "decode1" or used == 1:
                measure(llm, part, name, adapters[:used])
    if "cold" in parts:
        for one in write_adapters(model, folder / "pushes", parsed.max_loras, layers=1):  # they take all slots
            params = SamplingParams(max_tokens=1, detokenize=False)
            llm.generate([{"prompt_token_ids": [400] * 32}], params, False, lora_request=one)
        warm, cold = first_tokens(llm, adapters[: min(8, parsed.max_loras)])
        say("warm first token ms", 1e3 * warm)
        say("cold first token ms", 1e3 * cold)
    if "thousand" in parts and time.perf_counter() - begun < parsed.seconds:
        many = write_adapters(model, folder / "thousand", parsed.registered, layers=4)
        at = time.perf_counter()
        numbers = llm._core.begin_adapters(many)
        while llm._core.loaded_adapters(numbers) is None:
            pass
        say("register ms", 1e3 * (time.perf_counter() - at) / len(many))
        for what, value in in_turn(llm, many[:200], parsed.turns).items():
            say(what, value)
        before, device = resident_bytes(), torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
        in_turn(llm, many[:200], parsed.turns / 2)
        say("host MiB more", (resident_bytes() - before) / 2**20)
        if torch.cuda.is_available():
            say("device MiB more", (device - torch.cuda.mem_get_info()[0]) / 2**20)
    for part, used in (("none", 0), ("eight", 8), ("many", parsed.max_loras)):
        measure(llm, part, "mixed256", adapters[:used])


def main() -> None:
    """Run the parts, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--parts", default=",".join(ALL))
    parser.add_argument("--max-loras", type=int, default=64)
    parser.add_argument("--workloads", default="decode1,decode64,mixed256")
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--turns", type=float, default=8.0, help="seconds of each half of the part thousand")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is begun later than that")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", default="{}", help="more arguments of the engine, as JSON")
    parsed = parser.parse_args()
    parts, names = parsed.parts.split(","), parsed.workloads.split(",")
    figures: dict[str, float] = {}
    started = time.perf_counter()

    def say(name: str, value: float) -> None:
        figures[name] = value
        what = name.split(" ")[-1]
        base = figures.get(f"base {what}") or figures.get(f"none {what}")
        share = f"  {100 * value / base:6.1f} %" if base and what in WORKLOADS else ""
        print(f"{name:34} {value:12.2f}{share}   at {time.perf_counter() - started:.0f} s", flush=True)

    def measure(llm: LLM, part: str, name: str, adapters: Sequence[LoRARequest]) -> None:
        if part in parts and name in names and time.perf_counter() - started < parsed.seconds:
            large = name == "mixed256"  # once, so its adapters are loaded before
            if large and adapters:
                load(llm, adapters)
            say(f"{part} {name}", rate(llm, name, vocab, adapters, 1 if large else parsed.repetitions, not large))

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(parsed.shape, Path(folder) / "model")
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 4096,
            "use_tqdm": False,
        }
        options |= json.loads(parsed.engine)
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        if "base" in parts:
            llm = LLM(str(model), **options)
            for name in names:
                measure(llm, "base", name, [])
            del llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if parts != ["base"]:
            kept = max(parsed.max_loras, 256)
            llm = LLM(
                str(model),
                enable_lora=True,
                max_loras=parsed.max_loras,
                max_cpu_loras=kept,
                max_lora_rank=RANK,
                **options,
            )
            say("start s", time.perf_counter() - started)
            with_adapters(llm, model, Path(folder), parsed, measure, say)
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
