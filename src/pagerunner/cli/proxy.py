"""`pagerunner proxy`: one address for several servers."""

from __future__ import annotations

import argparse
from typing import Any

from pagerunner.cli.options import Parser, decimal, not_negative, port_number, positive
from pagerunner.logs import LOG_LEVELS, set_up_logging


def build_parser() -> Parser:
    """The verb's flags, which are vllm-router's where it has them."""
    parser = Parser("pagerunner proxy", "Share requests out among servers with OpenAI's endpoints.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port_number, default=30_000, metavar="N", help="0 takes a free one (default: %(default)s)")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "URL", "default": []}
    add("--worker-urls", **several, help="equal servers, such as http://127.0.0.1:8000")
    add("--prefill", **several, help="servers that compute prompts, for those of --decode")
    add("--decode", **several, help="servers that generate, from the prompts that those of --prefill have computed")
    switch = "vllm-router's switch, for --prefill and --decode, which mean it without it too"
    add("--vllm-pd-disaggregation", action="store_true", help=switch)
    policy_help = "cache_aware: by load and by what a server was sent before; round_robin (default: %(default)s)"
    add("--policy", default="cache_aware", metavar="NAME", help=policy_help)
    least = "shorter prompts are not given to prefill servers; by four bytes for a token (default: %(default)s)"
    add("--prefill-min-tokens", type=not_negative, default=64, metavar="N", help=least)
    times = parser.add_argument_group("times").add_argument
    for flag, default, text in (
        ("--request-timeout-secs", 21_600.0, "that a request may take in all"),
        ("--prefill-timeout-secs", 120.0, "after which the decode server computes the prompt itself"),
        ("--health-check-interval-secs", 2.0, "between two looks at a server's /health"),
        ("--health-check-timeout-secs", 5.0, "that a server may take to answer there"),
        ("--shutdown-timeout", 30.0, "after SIGTERM, that requests may go on"),
    ):
        times(flag, type=decimal, default=default, metavar="SECONDS", help=f"{text} (default: %(default)g)")
    failures = "failures in a row after which a server takes no requests (default: %(default)s)"
    times("--health-failure-threshold", type=positive, default=3, metavar="N", help=failures)
    logs = parser.add_argument_group("logging").add_argument
    logs("--log-level", type=str.lower, choices=LOG_LEVELS, default="info", metavar="LEVEL", help="(default: info)")
    logs("--disable-uvicorn-access-log", action="store_true", help="no line for each request")
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Pass requests on until interrupted."""
    from pagerunner.server.http_logs import HttpLogs
    from pagerunner.server.proxy.launch import run_proxy
    from pagerunner.server.proxy.options import ProxyOptions

    set_up_logging(namespace.log_level)
    given = vars(namespace)
    options = ProxyOptions(**{name: given[name] for name in ProxyOptions.__struct_fields__})
    access = not namespace.disable_uvicorn_access_log
    return run_proxy(options, host=namespace.host, port=namespace.port, logs=HttpLogs(access=access))
