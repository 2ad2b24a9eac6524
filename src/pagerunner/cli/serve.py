"""`pagerunner serve`: OpenAI's endpoints over HTTP."""

from __future__ import annotations

import argparse
import logging
import os

from pagerunner.cli.options import Parser, add_common_options, add_engine_options, parse_number, reported
from pagerunner.cli.session import one_model, resolve_model


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser("pagerunner serve", "Serve a model over HTTP with OpenAI's endpoints.")
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="model directory, or a demo's name (default: demo)"
    )
    parser.add_argument("--model", help="the same as MODEL")
    group = parser.add_argument_group("server options")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port", type=reported(_port), default=8000, metavar="N", help="0 takes a free one (default: %(default)s)"
    )
    key_help = "key that clients must send; repeatable (default: $PAGERUNNER_API_KEY)"
    group.add_argument("--api-key", action="append", metavar="KEY", help=key_help)
    chat = parser.add_argument_group("tools and reasoning")
    chat.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes calls: hermes, llama3_json, deepseek_v3, openai",
    )
    chat.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="let the model choose whether to call; needs the parser"
    )
    chat.add_argument(
        "--reasoning-parser", metavar="NAME", help="how it marks reasoning: qwen3, deepseek_r1, openai_gptoss"
    )
    chat.add_argument(
        "--reasoning-field",
        default="reasoning",
        metavar="NAME",
        help="where answers have it: reasoning, reasoning_content, both (default: %(default)s)",
    )
    add_engine_options(parser)
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Serve until interrupted."""
    namespace.model = one_model(namespace)
    args, _ = resolve_model(namespace)
    level = logging.WARNING if namespace.quiet else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from pagerunner.server.answers import ChatOptions
    from pagerunner.server.launch import run_server

    return run_server(
        args,
        host=namespace.host,
        port=namespace.port,
        api_keys=_keys(namespace),
        access_log=not namespace.quiet,
        chat=ChatOptions(
            tool_parser=namespace.tool_call_parser,
            auto_tools=namespace.enable_auto_tool_choice,
            reasoning_parser=namespace.reasoning_parser,
            reasoning_field=namespace.reasoning_field,
        ),
    )


def _keys(namespace: argparse.Namespace) -> list[str]:
    """The keys; one on the command line shows in the process list, one in the environment doesn't."""
    if namespace.api_key:
        return list(namespace.api_key)
    key = os.environ.get("PAGERUNNER_API_KEY")
    return [key] if key else []


def _port(text: str) -> int:
    value = parse_number(text)
    if not 0 <= value <= 65535:
        raise ValueError(f"must be in [0, 65535], got {value}")
    return value
