"""vLLM's flags that this engine doesn't have.

They are refused by name, or passed over if they ask for what is done anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from pagerunner.errors import ConfigError

logger = logging.getLogger(__name__)

_REFUSED: dict[str, str] = {
    "several devices by other flags than -tp, -pp, -dp, -ep and --distributed-executor-backend": """data-parallel-rank
        data-parallel-start-rank data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-backend
        data-parallel-hybrid-lb data-parallel-external-lb expert-placement-strategy
        decode-context-parallel-size -dcp prefill-context-parallel-size nnodes node-rank master-addr
        master-port all2all-backend enable-eplb eplb-config enable-dbo max-parallel-loading-workers
        ray-workers-use-nsight worker-cls worker-extension-cls headless""",
    "other choices of quantised weights": "calculate-kv-scales allow-deprecated-quantization quantization-config",
    "other forms of adapters (those of --enable-lora are in the model's dtype)": """lora-dtype fully-sharded-loras default-mm-loras
        lora-extra-vocab-size enable-lora-bias specialize-active-lora""",
    "speculative decoding by other flags than --speculative-config": "num-lookahead-slots",
    "offloading of weights, and other transfers": "cpu-offload-gb offload-backend ec-transfer-config kv-sharing-fast-prefill",
    "images, sound and video": """limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type
        mm-encoder-tp-mode mm-encoder-attn-backend media-io-kwargs allowed-local-media-path allowed-media-domains
        skip-mm-profiling enable-mm-embeds video-pruning-rate interleave-mm-strings language-model-only""",
    "templates that clients send": "trust-request-chat-template",
    "other ways to download (HF_TOKEN holds the token)": """code-revision hf-token hf-config-path use-tqdm-on-load
        ignore-patterns safetensors-load-strategy""",
    "other readers of checkpoints and tokenizers": """tokenizer-mode config-format model-impl
        model-loader-extra-config runner convert task override-attention-dtype override-generation-config""",
    "compiled models (its kernels are compiled at start)": """compilation-config -O optimization-level cuda-graph-sizes
        max-seq-len-to-capture cudagraph-mode enable-flashinfer-autotune""",
    "other schedules (long prompts run in pieces beside the others, as long as --target-itl-ms allows)": """max-num-partial-prefills
        max-long-partial-prefills long-prefill-token-threshold scheduler-cls disable-chunked-mm-input scheduler-reserve-full-isl""",
    "other choices of memory (groups and pages follow from the model)": """disable-sliding-window disable-cascade-attn
        disable-hybrid-kv-cache-manager prefix-caching-hash-algo mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size
        mamba-cache-mode""",
    "other limits and modes of log-probabilities (at most 20 alternatives, of the raw logits)": """max-logprobs logprobs-mode
        return-tokens-as-token-ids""",
    "plug-ins": "logits-processors middleware tool-parser-plugin reasoning-parser-plugin io-processor-plugin tool-server",
    "HTTPS, CORS and mounting under a path (a proxy in front has them)": """ssl-keyfile ssl-certfile ssl-ca-certs
        ssl-cert-reqs ssl-ciphers enable-ssl-refresh allow-credentials allowed-origins allowed-methods allowed-headers
        root-path uds""",
    "other forms of logs (--quiet leaves warnings only)": """log-config-file
        enable-log-outputs enable-log-deltas enable-log-requests max-log-len log-error-stack""",
    "other answers by default": """response-role chat-template-content-format enable-force-include-usage
        default-chat-template-kwargs""",
}
REFUSED: dict[str, str] = {
    name if name.startswith("-") else f"--{name}": what for what, names in _REFUSED.items() for name in names.split()
}
_ONE = {"1"}
_NOTHING = {"0", "0.0"}
_EMPTY = {"{}"}
NEUTRAL: dict[str, set[str]] = {
    **dict.fromkeys(("--nnodes", "--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size"), _ONE),
    **dict.fromkeys(("--max-num-partial-prefills", "--max-long-partial-prefills"), _ONE),
    **dict.fromkeys(("--cpu-offload-gb", "--long-prefill-token-threshold", "--node-rank"), _NOTHING),
    **dict.fromkeys(("--data-parallel-start-rank", "--num-lookahead-slots"), _NOTHING),
    **dict.fromkeys(("--limit-mm-per-prompt", "--mm-processor-kwargs", "--media-io-kwargs"), _EMPTY),
    **dict.fromkeys(("--override-generation-config", "--model-loader-extra-config", "--compilation-config"), _EMPTY),
    "--default-chat-template-kwargs": _EMPTY,
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
"""Values with which a refused flag asks for nothing. `screen` knows two more, which depend on --data-parallel-size."""
ALWAYS = frozenset(
    """--enable-prompt-tokens-details --enable-tokenizer-info-endpoint --enable-request-id-headers --async-scheduling
    --disable-log-requests --enable-server-load-tracking --enable-mixed-moe-lora-format""".split()
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
_FALSE = ("false", "0", "no", "off")


def screen(words: Sequence[str], known: Collection[str], *, tell: bool = True) -> list[str]:
    """`words` without vLLM's flags that ask for what is done anyway. Flags in `known` are the parser's own.

    The log names flags that are passed over, if `tell`.

    vLLM's switch for sampling pages becomes vLLM's default sample, unless `words` have one.

    Raises:
        ConfigError: one asks for something that isn't there; it says what.
    """
    kept: list[str] = []
    rest = iter(words)
    engines = _engines(words)
    neutral = NEUTRAL | {"--data-parallel-size-local": {engines}}
    if engines == "1":
        neutral["--data-parallel-rank"] = {"0"}
    for word in rest:
        if word == "--":
            return [*kept, word, *rest]
        name, equals, value = word.partition("=")
        if name in (_METRICS, "--no-kv-cache-metrics") and _SAMPLE in known:
            if name == _METRICS and value.lower() not in _FALSE and not any(one.startswith(_SAMPLE) for one in words):
                kept.append(f"{_SAMPLE}=0.01")
        elif name in known or not (name in REFUSED or name in PASSED_OVER or _changes_nothing(name)):
            kept.append(word)
        elif name in PASSED_OVER:
            value = value if equals else next(rest, "")
            if tell:
                logger.warning("%s %s changes nothing: %s", name, value, PASSED_OVER[name])
        elif name in WARNED:
            if tell:
                logger.warning("%s: %s", name, WARNED[name])
        elif not _changes_nothing(name) and (
            not (wanted := neutral.get(name)) or (value if equals else next(rest, "")) not in wanted
        ):
            raise ConfigError(
                f"{name} is vLLM's flag for {REFUSED[name]}, which pagerunner doesn't have; leave it out."
            )
    return kept


def _engines(words: Sequence[str]) -> str:
    """The value of --data-parallel-size."""
    found = "1"
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name in ("--data-parallel-size", "-dp"):
            found = value if equals else following
    return found


def _changes_nothing(name: str) -> bool:
    """Whether a flag without a value changes nothing, such as the negation of a flag that is refused."""
    return name in ALWAYS or name in WARNED or (name.startswith("--no-") and f"--{name[5:]}" in REFUSED)
