"""Write the flag tables of docs/coming-from-vllm.md from the code: what `pagerunner serve` and `LLM` take, pass over and refuse.

    python scripts/vllm_table.py [--check]

With --check nothing is written; the exit code is 1 where the document differs. A flag that is new has to be listed here, under
SAME, DIFFERS or OWN.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pagerunner import vllm_flags
from pagerunner.cli import serve
from pagerunner.cli.options import NO_FLAG, flag_of
from pagerunner.config import EngineArgs

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "coming-from-vllm.md"
BEGIN, END = "<!-- begin: made by scripts/vllm_table.py -->", "<!-- end: made by scripts/vllm_table.py -->"

SAME = frozenset(
    """--allow-credentials --disable-fastapi-docs --chat-template --config --default-chat-template-kwargs --disable-log-stats
    --disable-uvicorn-access-log --download-dir --dtype --enable-auto-tool-choice --enable-chunked-prefill
    --enable-force-include-usage --enable-log-requests --enable-prefix-caching --enable-server-load-tracking --enable-sleep-mode
    --enforce-eager --hf-overrides --hf-token --kv-cache-memory-bytes --kv-cache-metrics-sample --log-config-file
    --long-prefill-token-threshold --max-log-len --max-num-seqs --port --return-tokens-as-token-ids
    --revision --root-path --seed --served-model-name --skip-tokenizer-init --tokenizer-revision --uvicorn-log-level
    --enable-lora --max-loras --max-cpu-loras --cudagraph-capture-sizes
    --disable-access-log-for-endpoints --per-request-spec-decode-metrics --response-role --chat-template-content-format --code-revision
    --scheduling-policy --enable-request-id-headers --enable-log-outputs --h11-max-header-count --limit-concurrency""".split()
)
"""Flags with vLLM's name and meaning, those that this parser may yet get included."""

DIFFERS = {
    "--tensor-parallel-size": "of GPUs those of one machine, see [Several ranks](models-and-formats.md#several-ranks)",
    "--disable-custom-all-reduce": "NCCL makes all sums. It does so anyway where devices can't write into each other's memory over NVLink, and a line of the log says so",
    "--pipeline-parallel-size": "of GPUs those of one machine; `PAGERUNNER_PP_LAYER_PARTITION=9,10,9` for vLLM's `VLLM_PP_LAYER_PARTITION`",
    "--distributed-executor-backend": "`mp`, `ray` for several ranks on machines of a Ray cluster, or `uni` for one; see [Ray](ray.md)",
    "--enable-expert-parallel": "divides experts among the ranks of `--tensor-parallel-size`; with one rank it changes nothing and a line of the log says so. With `--data-parallel-size` among the ranks of all "
    "[teams](architecture/ranks.md#teams), not with stages; a model without experts is refused",
    "--api-server-count": "1 by default, and not as many as there are engines; one that crashes is started again. See "
    "[Several API processes](server.md#several-api-processes)",
    "--data-parallel-size": "independent engines behind one port, of mixtures too but for `--enable-expert-parallel`; a prompt rather goes to the engine that has computed its "
    "beginning; one engine's crash ends its requests alone. `LLM` is one engine. See [Several engines](server.md#several-engines)",
    "--host": "127.0.0.1 by default; vLLM listens on all addresses",
    "--model": "a flag here too; in vLLM's `serve` the model is the positional argument only",
    "--api-key": "repeatable as well; also in `PAGERUNNER_API_KEY`. Control endpoints need `--admin-key` beside it",
    "--tool-call-parser": "those of the models that run here, see [Tools](server.md#tools)",
    "--reasoning-parser": "those of the models that run here and a few more, see [Reasoning](server.md#reasoning)",
    "--tokenizer": "a directory or a hub name with `tokenizer.json`; other kinds of tokenizer are not read",
    "--max-model-len": "`auto` and `-1` take the longest length that fits the memory",
    "--max-num-batched-tokens": "8,192 by default, and 2,048 on a CPU; 16,384 for `LLM` with experts in 4 bits where 32 GiB are left beside the "
    "weights. `pagerunner plan` plans for the steps of `serve`, and says so where `LLM` takes larger ones",
    "--gpu-memory-utilization": "the share of the whole card that the engine takes in all, measured at start; on a CPU of the available memory",
    "--num-gpu-blocks-override": "pages of the largest memory group; other groups get their share beside it",
    "--quantization": "names a checkpoint's format, with which it must agree; floats are rounded to 8 bits by `fp8`, `fp8_per_block` and "
    "`int8_per_channel_weight_only`",
    "--kv-cache-dtype": "`fp8`, `fp8_e4m3`, `fp8_e5m2`, `float32`, `bfloat16`, `float16`; fp8 pages carry their own scales",
    "--block-size": "1, 2, 4, 8 or a multiple of 16; 16 by default on every device",
    "--load-format": "`auto`, `safetensors` or `dummy`; other formats may run code when they are read",
    "--attention-backend": "`auto`, `triton`, `cpu`, `torch_ref` or `flashinfer`; mostly `auto`",
    "--generation-config": "`auto` or `vllm`; not a directory",
    "--structured-outputs-config": "`disable_any_whitespace`; the only `backend` is `guidance`",
    "--pooler-config": "`pooling_type` (`LAST`, `MEAN`), `normalize`",
    "--weight-transfer-config": "the `backend` is `nccl`, or `gloo`, which vLLM doesn't have; see [Reinforcement learning](rl.md)",
    "--kv-offloading-size": "GiB of all ranks together; hybrids and windows too, pages go as they are; see [Host memory](offloading.md#host-memory)",
    "--kv-offloading-backend": "`native`",
    "--kv-transfer-config": "`OffloadingConnector` with `kv_role` `kv_both`; extra config `cpu_bytes_to_use`, `offload_prompt_only`, `eviction_policy` `lru`, `secondary_tiers` of type `fs` with `max_bytes`; "
    "`PeerConnector` with any role, and `peers`, `secret_file`, `kv_lease_duration`, `num_threads` besides; `NixlConnector` the same with NIXL; other names are refused, and so is `bidirectional_kv_xfer`: a prefill engine finds the turns before in its own host memory, and computes the last answer's tokens. `kv_load_failure_policy` is `recompute` by default",
    "--kv-events-config": "vLLM's fields; `endpoint` is `tcp://127.0.0.1:5557` by default and not all of the machine's addresses, and loopback addresses are bound; see "
    "[KV events](offloading.md#kv-events)",
    "--speculative-config": "vLLM's fields, each of which is taken or refused with the reason, as are methods; `--spec-method`, `--spec-model` and `--spec-tokens` are there too",
    "--lora-modules": "`name=path` or JSON with `name`, `path`, `base_model_name` and `is_3d_lora_weight`; loading at run time is behind `--admin-key` and needs no variable. See [Adapters](adapters.md)",
    "--lora-target-modules": "an adapter of another module is refused by its name",
    "--max-lora-rank": "vLLM's values; an adapter of a lower rank computes its own rank, rounded up to 16",
    "--otlp-traces-endpoint": "OTLP over HTTP; vLLM's default is gRPC",
    "--shutdown-timeout": "30 seconds by default, during which running requests go on",
}
OWN = {
    "--batch-invariant": "vLLM's variable `VLLM_BATCH_INVARIANT=1`, which is understood too; see [Batch invariance](batch-invariance.md)",
    "--admin-key": "opens control endpoints: sleep, memory, the live figures of `/ui`",
    "--allowed-origin": "instead of CORS flags: web pages that may call the server",
    "--reasoning-field": "where answers carry reasoning; vLLM has one name a version",
    "--quiet": "no notes and no progress bars",
    "--log-level": "vLLM has the variable `VLLM_LOGGING_LEVEL`",
    "--activation-quantization": "`auto` or `none`; in vLLM the kernel decides (`VLLM_TEST_FORCE_FP8_MARLIN`, `--linear-backend`)",
    "--device": "`auto`, `cpu` or `cuda`",
    "--max-in-flight": "steps that are scheduled ahead; vLLM's `--async-scheduling` is the same idea",
    "--target-itl-ms": "milliseconds that a step may take beside requests that generate: prompts are cut to fit; see [Time between tokens](server.md#time-between-tokens)",
    "--poison-fresh-pages": "a proof for tests: fresh pages are filled with NaN",
}


class UnlistedFlag(Exception):
    """A flag that this script has no word on."""


def flags() -> list[str]:
    """What `pagerunner serve` and `LLM` know: serve's flags, then those of engine arguments that only `LLM` takes."""
    known = [name for name in serve.build_parser().option_names() if name.startswith("--")]
    names = (field.name for field in msgspec.structs.fields(EngineArgs))
    return known + [flag for name in names if name not in NO_FLAG and (flag := flag_of(name)) not in known]


def compared(flag: str) -> tuple[str, str]:
    """A flag beside vLLM's, in a word and a sentence. Raises UnlistedFlag."""
    if flag in DIFFERS:
        return "differs", DIFFERS[flag]
    if flag in OWN:
        return "ours", OWN[flag]
    if flag in SAME:
        return "same", ""
    raise UnlistedFlag(
        f"{flag} is new: say in scripts/vllm_table.py under SAME, DIFFERS or OWN how it compares with vLLM's."
    )


def lines() -> Iterator[str]:
    """The tables."""
    served = set(serve.build_parser().option_names())
    yield "### Flags and arguments that are here"
    yield ""
    yield "`LLM(...)` takes the engine's as keyword arguments: `--max-model-len` is `max_model_len`."
    yield ""
    yield "| Flag | Beside vLLM's | |"
    yield "|---|---|---|"
    for flag in flags():
        word, note = compared(flag)
        where = "" if flag in served else f"{'; ' if note else ''}an argument of `LLM`, not a flag of `serve`"
        yield f"| `{flag}` | {word} | {note}{where} |"
    yield ""
    yield "### Flags that are passed over"
    yield ""
    yield (
        "They ask for what is always so, or have a value with which they ask for nothing; so does `--no-` before any that is "
        "refused. `--trust-remote-code` is passed over with a warning: no code of a checkpoint is run; so is `--no-async-scheduling`, and `--no-` before "
        "any other of these: it is always so. `LLM(...)` takes their names as keyword arguments, too."
    )
    yield ""
    neutral = [f"`{flag} {value}`" for flag, values in vllm_flags.NEUTRAL.items() for value in sorted(values)]
    yield (
        ", ".join([f"`{flag}`" for flag in sorted(vllm_flags.ALWAYS | vllm_flags.WARNED.keys())] + sorted(neutral))
        + ". So are `--limit-mm-per-prompt` with numbers that are 0, `--data-parallel-size-local` with the value of `--data-parallel-size`, and `--data-parallel-rank 0` where that is 1."
    )
    yield ""
    yield "These take any value and change nothing; a line in the log says so:"
    yield ""
    for flag, why in vllm_flags.PASSED_OVER.items():
        yield f"- `{flag}`: {why}"
    yield ""
    yield "### Flags that are refused"
    yield ""
    yield "Each is refused by name with the reason, before anything is loaded, also in a file, as `--flag.key`, and as a keyword argument of `LLM(...)`."
    yield ""
    yield "| What isn't there | Flags |"
    yield "|---|---|"
    grouped: dict[str, list[str]] = defaultdict(list)
    for flag, what in vllm_flags.REFUSED.items():
        grouped[what].append(f"`{flag}`")
    for what, names in grouped.items():
        yield f"| {what} | {', '.join(names)} |"


def written(document: str) -> str:
    """The document with its tables made anew."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT} has no lines {BEGIN} and {END}.")
    return "\n".join([before + begin, *lines(), end + after])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the flag tables of docs/coming-from-vllm.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the document differs")
    options = parser.parse_args(argv)
    before = DOCUMENT.read_text(encoding="utf-8")
    after = written(before)
    if options.check:
        return int(before != after)
    DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
