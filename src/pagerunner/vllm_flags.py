"""vLLM's flags, and arguments of its `LLM`, that this engine doesn't have.

They are refused by name, or passed over if they ask for what is done anyway.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence

from pagerunner.errors import ConfigError

logger = logging.getLogger(__name__)

_REFUSED: dict[str, str] = {
    "several devices by other flags than -tp, -pp, -dp, -ep and --distributed-executor-backend": """data-parallel-rank
        data-parallel-start-rank data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-backend
        data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb data-parallel-supervisor-port
        dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s expert-placement-strategy
        decode-context-parallel-size -dcp dcp-comm-backend dcp-kv-cache-interleave-size cp-kv-cache-interleave-size
        prefill-context-parallel-size nnodes node-rank master-addr master-port all2all-backend enable-eplb eplb-config enable-elastic-ep
        enable-ep-weight-filter enable-dbo dbo-decode-token-threshold dbo-prefill-token-threshold ubatch-size
        disable-nccl-for-dp-synchronization distributed-timeout-seconds cpu-distributed-timeout-seconds max-parallel-loading-workers
        ray-workers-use-nsight worker-cls worker-extension-cls headless""",
    "other ways to say which devices and cores are taken (CUDA_VISIBLE_DEVICES, taskset)": "device-ids numa-bind numa-bind-cpus numa-bind-nodes",
    "other choices of quantised weights and pages": """calculate-kv-scales allow-deprecated-quantization quantization-config
        kv-cache-dtype-skip-layers""",
    "other forms of adapters (those of --enable-lora are in the model's dtype)": """lora-dtype fully-sharded-loras default-mm-loras
        lora-extra-vocab-size enable-lora-bias specialize-active-lora enable-tower-connector-lora enable-moe-shared-loras""",
    "speculative decoding by other flags than --speculative-config": "num-lookahead-slots",
    "offloading of weights, and other transfers": """cpu-offload-gb cpu-offload-params offload-backend offload-group-size offload-num-in-group
        offload-params offload-prefetch-step ec-transfer-config kv-sharing-fast-prefill""",
    "images, sound and video": """limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type
        mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin
        mm-encoder-fp8-scale-save-path mm-encoder-only mm-ipc-gpu-memory-gb mm-shm-cache-max-object-size-mb mm-tensor-ipc
        media-io-kwargs allowed-local-media-path allowed-media-domains enable-mm-embeds video-pruning-rate interleave-mm-strings""",
    "prompts of vectors, and models of diffusion": "enable-prompt-embeds diffusion-config",
    "servers without texts (LLM has skip_tokenizer_init)": "skip-tokenizer-init tokens-only",
    "templates that clients send": "trust-request-chat-template",
    "other ways to download (HF_TOKEN holds the token)": """code-revision hf-token hf-config-path use-tqdm-on-load
        ignore-patterns safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads""",
    "other readers of checkpoints and tokenizers": """tokenizer-mode config-format model-impl model-class-overrides
        model-loader-extra-config pt-load-map-location renderer-num-workers runner convert task override-attention-dtype
        override-generation-config additional-config""",
    "compiled models (its kernels are compiled at start; --cudagraph-capture-sizes says which graphs there are)": """compilation-config
        -O optimization-level cuda-graph-sizes max-cudagraph-capture-size max-seq-len-to-capture cudagraph-mode
        enable-flashinfer-autotune ir-op-priority jit-monitor-mode jit-monitor-verbose""",
    "other choices of kernels (shapes choose them; --attention-backend is there)": """attention-config kernel-config performance-mode
        linear-backend moe-backend mamba-backend gdn-prefill-backend enable-bf16x3-router-gemm enable-flash-late-interaction
        use-fp64-gumbel""",
    "other schedules (long prompts run in pieces beside the others, as long as --target-itl-ms allows)": """max-num-partial-prefills
        max-long-partial-prefills long-prefill-token-threshold scheduler-cls disable-chunked-mm-input scheduler-reserve-full-isl
        max-num-scheduled-tokens prefill-schedule-interval stream-interval watermark""",
    "other choices of memory (groups and pages follow from the model)": """disable-sliding-window disable-cascade-attn
        disable-hybrid-kv-cache-manager prefix-caching-hash-algo prefix-match-unit mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size
        mamba-cache-mode mamba-cache-philox-rounds enable-mamba-cache-stochastic-rounding enable-cumem-allocator""",
    "other limits and modes of log-probabilities (at most 20 alternatives, of the raw logits)": """max-logprobs logprobs-mode
        return-tokens-as-token-ids""",
    "plug-ins": "logits-processors middleware tool-parser-plugin reasoning-parser-plugin io-processor-plugin tool-server",
    "HTTPS, CORS and mounting under a path (a proxy in front has them)": """ssl-keyfile ssl-certfile ssl-ca-certs
        ssl-cert-reqs ssl-ciphers enable-ssl-refresh allow-credentials allowed-origins allowed-methods allowed-headers
        root-path uds""",
    "other servers, and other names of limits (PAGERUNNER_LIMIT_MAX_HEADERS and such)": """grpc h11-max-header-count
        h11-max-incomplete-event-size fail-on-environ-validation""",
    "other metrics and profiles": """collect-detailed-traces cudagraph-metrics enable-layerwise-nvtx-tracing
        enable-logging-iteration-details enable-mfu-metrics enable-per-request-metrics show-hidden-metrics-for-version
        aggregate-engine-logging profiler-config""",
    "other forms of logs (--quiet leaves warnings only)": """log-config-file
        enable-log-outputs enable-log-deltas enable-log-requests max-log-len log-error-stack""",
    "other answers by default": """response-role chat-template-content-format enable-force-include-usage
        default-chat-template-kwargs exclude-tools-when-tool-choice-none enable-return-routed-experts fingerprint-mode
        fingerprint-value reasoning-config""",
}
REFUSED: dict[str, str] = {
    name if name.startswith("-") else f"--{name}": what for what, names in _REFUSED.items() for name in names.split()
}
_ONE = {"1"}
_NOTHING = {"0", "0.0"}
_EMPTY = {"{}"}
NEUTRAL: dict[str, set[str]] = {
    **dict.fromkeys(("--nnodes", "--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size"), _ONE),
    **dict.fromkeys(("--max-num-partial-prefills", "--max-long-partial-prefills", "--stream-interval"), _ONE),
    **dict.fromkeys(("--prefill-schedule-interval", "--renderer-num-workers"), _ONE),
    **dict.fromkeys(("--cpu-offload-gb", "--long-prefill-token-threshold", "--node-rank"), _NOTHING),
    **dict.fromkeys(("--data-parallel-start-rank", "--num-lookahead-slots", "--watermark"), _NOTHING),
    **dict.fromkeys(("--limit-mm-per-prompt", "--mm-processor-kwargs", "--media-io-kwargs"), _EMPTY),
    **dict.fromkeys(("--override-generation-config", "--model-loader-extra-config", "--compilation-config"), _EMPTY),
    **dict.fromkeys(("--default-chat-template-kwargs", "--additional-config"), _EMPTY),
    **dict.fromkeys(("--linear-backend", "--moe-backend"), {"auto"}),
    "--performance-mode": {"balanced"},
    **dict.fromkeys(("--mamba-cache-dtype", "--mamba-ssm-cache-dtype", "--lora-dtype"), {"auto"}),
    "--tokenizer-mode": {"auto", "hf"},
    "--config-format": {"auto", "hf"},
    "--model-impl": {"auto"},
    "--runner": {"auto", "generate"},
    "--task": {"auto", "generate"},
    "--convert": {"auto", "none"},
    "--response-role": {"assistant"},
    "--chat-template-content-format": {"auto", "string"},
    "--data-parallel-backend": {"mp"},
    "--logprobs-mode": {"raw_logprobs"},
    "--max-logprobs": {"20"},
    "--prefix-caching-hash-algo": {"builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"},
    "--mm-encoder-tp-mode": {"weights"},
}
"""Values with which a refused flag asks for nothing. `screen` knows two more, which depend on --data-parallel-size, and --limit-mm-per-prompt may have
any numbers that are 0."""
ALWAYS = frozenset(
    """--enable-prompt-tokens-details --enable-tokenizer-info-endpoint --enable-request-id-headers --async-scheduling
    --disable-log-requests --enable-server-load-tracking --enable-mixed-moe-lora-format --language-model-only --skip-mm-profiling
    --enable-offline-docs""".split()
)
"""Flags without a value that ask for what is always so."""
WARNED: dict[str, str] = {
    "--trust-remote-code": "no code of a checkpoint is run; the families that are supported need none.",
}
"""Flags without a value that change nothing here, and what is said about them."""
PASSED_OVER: dict[str, str] = {
    "--swap-space": "no request is swapped: a preempted one is computed again, less what is cached (as in vLLM since V1). Host memory for pages is --kv-offloading-size; what a preempted request had computed comes back from there.",
}
"""Flags with a value that changes nothing, here as in today's vLLM, and what is said about them."""
_METRICS, _SAMPLE = "--kv-cache-metrics", "--kv-cache-metrics-sample"
TOGETHER = frozenset((_METRICS, f"--no-{_METRICS[2:]}", "--data-parallel-size-local", "--data-parallel-rank"))
"""Flags that mean something beside others only, so that `screen` needs all words."""
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_NONE = ("false", "null", "[]", "{}")  # of files and of keyword arguments


def screen(words: Sequence[str], known: Collection[str], *, tell: bool = True, whole: bool = True) -> list[str]:
    """`words` without vLLM's flags that ask for what is done anyway. Flags in `known` are the parser's own.

    The log names flags that are passed over, if `tell`. Without `whole` there may be other words elsewhere.

    vLLM's switch for sampling pages becomes vLLM's default sample, unless `words` have one. Where it is off, nothing is sampled.

    Raises:
        ConfigError: one asks for something that isn't there; it says what.
    """
    kept: list[str] = []
    rest = iter(words)
    sampled: bool | None = None
    engines = _engines(words)
    neutral = {"--data-parallel-size-local": engines, "--data-parallel-rank": "0" if engines == "1" else None}
    for word in rest:
        if word == "--":
            rest = iter((word, *rest))
            break
        name, equals, value = word.partition("=")
        name = "-O" if word.startswith("-O") else name  # -O3
        if name in (_METRICS, _negated(_METRICS)) and _SAMPLE in known:
            if equals and value.lower() not in (*_TRUE, *_FALSE):
                raise ConfigError(f"{name} must be true or false, got {value!r}.")
            sampled = (name == _METRICS) != (value.lower() in _FALSE)
        elif name in known or not (name in REFUSED or name in PASSED_OVER or _without_value(name)):
            kept.append(word)
        elif _without_value(name):
            _tell(name, _negated(name) if value.lower() in _FALSE else name, tell)
        else:
            value = value if equals or name == "-O" else next(rest, "")
            if name in PASSED_OVER:
                if not equals and (not value or value.startswith("--")):
                    raise ConfigError(f"argument {name}: expected one argument.")
                _tell(f"{name} {value}", name, tell)
            elif neutral.get(name) != value and not _asks_for_nothing(name, value) and (whole or name not in neutral):
                raise _refusal(name, name)
    if sampled is not None and not (sampled and any(word.startswith(_SAMPLE) for word in words)):
        kept.append(f"{_SAMPLE}={0.01 if sampled else 0}")
    return [*kept, *rest]


def screen_arguments(values: Mapping[str, object], known: Collection[str]) -> dict[str, object]:
    """Keyword arguments without those of vLLM's `LLM` that ask for what is done anyway. `known` are this engine's own.

    Raises:
        ConfigError: one asks for something that isn't there; it says what.
    """
    kept = {}
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if name in known or not (flag in REFUSED or flag in PASSED_OVER or _without_value(flag)):
            kept[name] = value
        elif value is not None and (flag in PASSED_OVER or _without_value(flag)):
            _tell(f"{name}={value!r}", flag if value else _negated(flag), tell=True)
        elif not _asks_for_nothing(flag, value if isinstance(value, str) else json.dumps(value, default=repr)):
            raise _refusal(name, flag)
    return kept


def _engines(words: Sequence[str]) -> str:
    """The value of --data-parallel-size."""
    found = "1"
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name in ("--data-parallel-size", "-dp"):
            found = value if equals else following
    return found


def _negated(flag: str) -> str:
    return f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"


def _without_value(flag: str) -> bool:
    """Whether a flag has no value and changes nothing, such as the negation of a flag that is refused."""
    return any(one in ALWAYS or one in WARNED for one in (flag, _negated(flag))) or (
        flag.startswith("--no-") and _negated(flag) in REFUSED
    )


def _asks_for_nothing(flag: str, value: str) -> bool:
    if flag == "--limit-mm-per-prompt":
        try:
            limits = json.loads(value)
        except ValueError:
            return False
        return not (any(limits.values()) if isinstance(limits, dict) else limits)
    switch = flag.startswith(("--enable-", "--disable-"))
    return value.lower() in (*_NONE, *(_FALSE if switch else ())) or value in NEUTRAL.get(flag, ())


def _tell(given: str, flag: str, tell: bool) -> None:
    """Log what is to be said of a flag that is passed over, if anything is."""
    why = WARNED.get(flag) or PASSED_OVER.get(flag) or (_negated(flag) in ALWAYS and "it is always so.")
    if why and tell:
        logger.warning("%s changes nothing: %s", given, why)


def _refusal(given: str, flag: str) -> ConfigError:
    return ConfigError(f"{given} is vLLM's flag for {REFUSED[flag]}, which pagerunner doesn't have; leave it out.")
