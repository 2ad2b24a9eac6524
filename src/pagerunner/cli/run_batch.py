"""`pagerunner run-batch`: answer an OpenAI batch file, with a model of one's own or a server's."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pagerunner.cli.options import Parser, add_common_options, add_engine_options, add_lora_modules, flag_of, positive
from pagerunner.cli.session import note, resolve_model, server_url, show_progress
from pagerunner.config import EngineArgs
from pagerunner.errors import ConfigError
from pagerunner.types.lora import LoRARequest, parse_module

if TYPE_CHECKING:
    from pagerunner.engine.frontend.async_engine import AsyncEngine
    from pagerunner.server.batch_files import AnswerFile, AnswerStream
    from pagerunner.server.listening import StopSignals

_INTERRUPTED = 130
Answering = Callable[[str, Mapping[str, str], Callable[[], bool]], Any]


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser("pagerunner run-batch", "Answer the requests of an OpenAI batch file.")
    add = parser.add_argument
    add("-i", "--input-file", required=True, metavar="FILE", help="lines of JSON: custom_id, method, url, body")
    add(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="gets a line per answer; what is in it is not redone; - is standard output",
    )
    add("--model", help="model directory, hub name or a demo's (default: demo)")
    add("--base-url", metavar="URL", help="ask this server instead of loading a model")
    add("--max-concurrency", type=positive, default=256, metavar="N", help="requests at once (default: %(default)s)")
    add("--retry-errors", action="store_true", help="take the answers that are errors out of the output and ask again")
    add_engine_options(parser, without=("enable_sleep_mode", "kv_cache_metrics_sample"))
    add_lora_modules(parser)
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Answer what the output doesn't have yet."""
    from pagerunner.server.batch_files import BatchEndedError, answer_all, read_requests

    source = Path(namespace.input_file)
    _check_words(namespace, source)
    names = {request.custom_id for request in read_requests(source)}
    answers = _open_answers(namespace)
    known = frozenset(answers.answered)
    todo = (request for request in read_requests(source) if request.custom_id not in known)
    total, left = len(names), len(names - known)
    with tqdm(
        total=total, initial=total - left, desc="Requests", unit="req", disable=not show_progress(namespace)
    ) as bar:

        def append(answer: Mapping[str, Any]) -> None:
            answers.append(answer)
            bar.update()

        async def answering(url: str, headers: Mapping[str, str], stopping: Callable[[], bool]) -> None:
            limit = namespace.max_concurrency
            await answer_all(url, headers, todo, append, max_concurrency=limit, stopping=stopping)

        try:
            interrupted = bool(left) and asyncio.run(_serve(namespace, answering))
        except BatchEndedError as error:
            raise ConfigError(f"{error} {_count(answers.answered - known, left)}; run it again to go on.") from error
        finally:
            answers.close()
    done = _count(answers.answered - known, left)
    note(namespace, f"{done}, {total - left} were there before; {answers.num_errors} of all are errors.")
    return _INTERRUPTED if interrupted else 0


def _check_words(namespace: argparse.Namespace, source: Path) -> None:
    from pagerunner.server.batch_files import check_files

    if namespace.input_file == "-":
        raise ConfigError("-i is read twice, which standard input can't be; name a file.")
    to_stdout = namespace.output_file == "-"
    if to_stdout and namespace.retry_errors:
        raise ConfigError("--retry-errors needs the answers of earlier runs, so a file as -o, not standard output.")
    ours = [
        name
        for name in ("lora_modules", *EngineArgs.__struct_fields__)
        if getattr(namespace, name, None) not in (None, ())
    ]
    if namespace.base_url is not None and ours:
        raise ConfigError(
            f"{flag_of(ours[0])} is for a model of one's own, and --base-url names a server, which has its own; leave one out."
        )
    check_files(source, None if to_stdout else Path(namespace.output_file))


def _open_answers(namespace: argparse.Namespace) -> AnswerFile | AnswerStream:
    from pagerunner.server.batch_files import AnswerFile, AnswerStream

    if namespace.output_file == "-":
        return AnswerStream(sys.stdout.buffer)
    return AnswerFile(Path(namespace.output_file), retry_errors=namespace.retry_errors)


def _count(done: set[str], left: int) -> str:
    return f"{len(done)} of {left} requests have been answered"


async def _serve(namespace: argparse.Namespace, answering: Answering) -> bool:
    """Run `answering` against the named server or one of our own; whether the user interrupted it."""
    if namespace.base_url is not None:
        key = os.environ.get("OPENAI_API_KEY") or os.environ.get("PAGERUNNER_API_KEY")
        await answering(
            server_url(namespace.base_url), {"Authorization": f"Bearer {key}"} if key else {}, lambda: False
        )
        return False
    from pagerunner.server.launch import check_modules

    args, _ = resolve_model(namespace)
    modules = [parse_module(one) for one in namespace.lora_modules]
    check_modules(args, {"lora_modules": modules})
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("pagerunner.server").setLevel(logging.ERROR)  # refusals are in the output
    return await _with_own_server(args, answering, modules)


async def _with_own_server(args: EngineArgs, answering: Answering, modules: list[LoRARequest]) -> bool:
    from pagerunner.server.batch_files import BatchEndedError
    from pagerunner.server.http_logs import HttpLogs
    from pagerunner.server.launch import serve
    from pagerunner.server.listening import bind

    key = secrets.token_hex(16)
    ready: asyncio.Future[StopSignals] = asyncio.get_running_loop().create_future()

    def on_ready(engine: AsyncEngine, stop: StopSignals) -> None:
        ready.set_result(stop)

    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(
        serve(args, listener, api_keys=[key], logs=HttpLogs(access=False), lora_modules=modules, on_ready=on_ready)
    )
    try:
        either: list[asyncio.Future[Any]] = [serving, ready]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await serving  # raises the server's error, if there is one; else it was stopped while it was loading
            return True
        stop = ready.result()
        try:
            await answering(url, {"Authorization": f"Bearer {key}"}, stop.asked.is_set)
        except BatchEndedError:
            if not stop.asked.is_set():
                raise
        interrupted = stop.asked.is_set()
        if not interrupted:
            stop.ask()
        await serving
        return interrupted
    finally:
        if not serving.done():
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        listener.close()
