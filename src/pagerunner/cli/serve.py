"""`pagerunner serve`: OpenAI's endpoints over HTTP."""

from __future__ import annotations

import argparse
import logging
import os

from pagerunner.cli.options import add_engine_options, add_lora_modules, named_group, parse_number, port_number, seconds
from pagerunner.cli.session import one_model, resolve_model
from pagerunner.cli.settings import ConfiguredParser
from pagerunner.errors import ConfigError
from pagerunner.logs import LOG_LEVELS, set_up_logging
from pagerunner.types.lora import parse_module

logger = logging.getLogger(__name__)

_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def build_parser() -> ConfiguredParser:
    """The verb's flags."""
    parser = ConfiguredParser("pagerunner serve", "Serve a model over HTTP with OpenAI's endpoints.")
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="model directory, hub name or a demo's (default: demo)"
    )
    parser.add_argument("--model", help="the same as MODEL")
    parser.usage = "pagerunner serve [MODEL] [options]"
    common = named_group(parser, "common options")
    common.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    common.add_argument(
        "--port", type=port_number, default=8000, metavar="N", help="0 takes a free one (default: %(default)s)"
    )
    key_help = "keys of which clients must send one; in $PAGERUNNER_API_KEY the process list doesn't show it"
    common.add_argument("--api-key", action="append", nargs="+", metavar="KEY", help=key_help)
    names_help = "names of the model in answers and metrics; the first is the one that answers carry by default"
    common.add_argument("--served-model-name", nargs="+", metavar="NAME", help=names_help)
    add_engine_options(parser, without=("served_model_name", "max_in_flight", "poison_fresh_pages"))
    add_lora_modules(parser)
    _add_chat_options(named_group(parser, "tools and reasoning"))
    security = named_group(parser, "security")
    admin_help = "key for the control endpoints (sleep, memory ...); repeatable; $PAGERUNNER_ADMIN_KEY like the other"
    security.add_argument("--admin-key", action="append", metavar="KEY", help=admin_help)
    origin_help = "web page that may call the server from a browser, as https://host; repeatable (default: none)"
    security.add_argument("--allowed-origin", action="append", metavar="ORIGIN", help=origin_help)
    server = named_group(parser, "server")
    count_help = "processes that read requests and texts, in front of the same engines (default: %(default)s)"
    server.add_argument("--api-server-count", type=parse_number, default=1, metavar="N", help=count_help)
    drain_help = "after SIGTERM, how long requests may go on (default: %(default)s)"
    server.add_argument("--shutdown-timeout", type=seconds, default=30.0, metavar="SECONDS", help=drain_help)
    server.add_argument("--disable-fastapi-docs", action="store_true", help="no /docs, /redoc and /openapi.json")
    logs = named_group(parser, "logging")
    level_help = "debug, info, warning or error, of the server and its engine core (default: info)"
    logs.add_argument("--log-level", type=str.lower, choices=LOG_LEVELS, metavar="LEVEL", help=level_help)
    level_help = "least level of what the HTTP server logs: critical, error, warning, info, debug, trace"
    logs.add_argument("--uvicorn-log-level", choices=_LEVELS, metavar="LEVEL", help=level_help)
    logs.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line for each request")
    silent_help = "paths without such a line, with commas between: /health,/metrics,/ping"
    logs.add_argument("--disable-access-log-for-endpoints", type=_paths, default=(), metavar="PATHS", help=silent_help)
    traces_help = "OTLP collector that gets a span per request, such as http://127.0.0.1:4318/v1/traces"
    logs.add_argument("--otlp-traces-endpoint", metavar="URL", help=traces_help)
    logs.add_argument("--quiet", action="store_true", help="no notes, no access log, and warnings only")
    return parser


def _add_chat_options(chat: argparse._ArgumentGroup) -> None:
    chat.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="let the model choose whether to call; needs the parser"
    )
    chat.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes calls: hermes, qwen3_coder, llama3_json, mistral, kimi_k2, ..., openai",
    )
    chat.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="how it marks reasoning: qwen3, deepseek_r1, mistral, ..., openai_gptoss",
    )
    chat.add_argument(
        "--reasoning-field",
        default="reasoning",
        metavar="NAME",
        help="where answers have it: reasoning, reasoning_content, both (default: %(default)s)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Serve until interrupted."""
    namespace.model = one_model(namespace)
    names = namespace.served_model_name or []
    if "" in names or len({*names}) < len(names):
        raise ConfigError(f"--served-model-name takes each name once, and none that is empty; got {names}.")
    keys = namespace.api_key or []
    for flag, given in (("--served-model-name", names), *(("--api-key", some) for some in keys)):
        if namespace.model is None and len(given) > 1:
            raise ConfigError(f"no model is named; if the last word is it, put it before {flag}.")
    del namespace.served_model_name
    args, _ = resolve_model(namespace)
    set_up_logging(namespace.log_level or ("warning" if namespace.quiet else "info"))
    # prometheus_client reads it when it is imported
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        if os.environ.pop(name, None) is not None:
            logger.warning("%s is passed over: the server's processes count in a directory of their own.", name)
    from pagerunner.server.chat.options import ChatOptions
    from pagerunner.server.http_logs import HttpLogs
    from pagerunner.server.launch import run_server

    return run_server(
        args,
        host=namespace.host,
        port=namespace.port,
        api_server_count=namespace.api_server_count,
        api_keys=[key for some in keys for key in some],
        admin_keys=namespace.admin_key or (),
        allowed_origins=namespace.allowed_origin or (),
        drain_seconds=namespace.shutdown_timeout,
        served_model_name=names or None,
        logs=HttpLogs(
            access=not (namespace.quiet or namespace.disable_uvicorn_access_log),
            silent=namespace.disable_access_log_for_endpoints,
            level=namespace.uvicorn_log_level,
        ),
        docs=not namespace.disable_fastapi_docs,
        otlp_traces_endpoint=namespace.otlp_traces_endpoint,
        lora_modules=[parse_module(one) for one in namespace.lora_modules],
        chat=ChatOptions(
            tool_parser=namespace.tool_call_parser,
            auto_tools=namespace.enable_auto_tool_choice,
            reasoning_parser=namespace.reasoning_parser,
            reasoning_field=namespace.reasoning_field,
        ),
    )


def _paths(text: str) -> tuple[str, ...]:
    paths = tuple(path.strip() for path in text.split(",") if path.strip())
    for path in paths:
        if not path.startswith("/"):
            raise argparse.ArgumentTypeError(f"a path begins with /, got {path!r}")
    return paths
