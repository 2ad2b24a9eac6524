"""`pagerunner chat`: a conversation in the terminal, or one turn per line of stdin where there is no terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from pagerunner.cli.options import (
    TEXT_EXCLUDED,
    Parser,
    add_common_options,
    add_engine_options,
    add_sampling_options,
    sampling_values,
)
from pagerunner.cli.session import note, open_llm, resolve_model, show_progress
from pagerunner.errors import InvalidRequestError, RequestFailedError
from pagerunner.types import SamplingParams

if TYPE_CHECKING:
    from pagerunner.llm import LLM

HELP = """/reset (or /clear) forgets the conversation, /save FILE writes it as JSON, /stats says how long the last reply took,
/quit or Ctrl-D ends it, Ctrl-C stops a reply. A line that ends in a backslash goes on in the next one, and \"\"\" begins
and ends a message of several lines."""
QUIT = ("/quit", "/exit")
_QUOTES = '"""'


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser("pagerunner chat", "Talk to a model. Where stdin is no terminal, each line is one turn.")
    parser.add_argument("--model", help="model directory, hub name or a demo's (default: demo)")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the reply and leave")
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told before the conversation")
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser, without=TEXT_EXCLUDED)
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Hold the conversation."""
    params = SamplingParams(**sampling_values(namespace), output_kind="delta")
    args, _ = resolve_model(namespace)
    llm = open_llm(args, use_tqdm=show_progress(namespace))
    talk = Conversation(llm, params, namespace.system_prompt)
    if namespace.quick is not None:
        _print_reply(talk.reply(namespace.quick))
    elif sys.stdin.isatty():
        note(namespace, HELP)
        _converse(talk)
    else:
        _read_lines(talk)
    return 0


class Conversation:
    """The messages so far. A turn joins the history only when its reply is complete."""

    def __init__(self, llm: LLM, params: SamplingParams, system_prompt: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._turns: list[dict[str, str]] = []
        self._stats = "There has been no reply yet."

    @property
    def messages(self) -> list[dict[str, str]]:
        """System prompt and finished turns."""
        return [*self._system, *self._turns]

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self._turns.clear()

    @property
    def stats(self) -> str:
        """What the last reply took."""
        return self._stats

    def save(self, file: str) -> None:
        """Write the messages as JSON. Raises OSError."""
        Path(file).write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    def reply(self, text: str) -> Generator[str, None, None]:
        """Yield the reply to `text` piece by piece; closing the iterator early aborts it and forgets the turn.

        Raises:
            InvalidRequestError, RequestFailedError: the conversation is longer than the model, or the reply failed; it stays as it was.
        """
        user = {"role": "user", "content": text}
        pieces: list[str] = []
        started = first = time.perf_counter()
        prompt = cached = tokens = 0
        with closing(self._llm.stream_chat([*self.messages, user], self._params)) as outputs:
            for output in outputs:
                piece = output.outputs[0].text
                first = first if tokens else time.perf_counter()
                tokens += len(output.outputs[0].token_ids)
                prompt, cached = len(output.prompt_token_ids), max(cached, output.num_cached_tokens)
                pieces.append(piece)
                yield piece
                if output.error:
                    raise RequestFailedError(output.error)
        seconds = time.perf_counter() - first
        rate = f", {(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds else ""
        self._stats = (
            f"{tokens} tokens, the first after {1e3 * (first - started):.0f} ms{rate}; the conversation before had {prompt}, "
            f"{cached} of them in the prefix cache"
        )
        self._turns += [user, {"role": "assistant", "content": "".join(pieces)}]


def _print_reply(pieces: Iterator[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)


def _converse(talk: Conversation) -> None:
    try:
        import readline  # noqa: F401 - gives input() line editing and history
    except ImportError:
        pass
    while True:
        try:
            text = _read_message()
        except EOFError:
            print()
            return
        if text in QUIT:
            return
        if text.startswith("/"):
            _obey(talk, text)
        elif text:
            _answer(talk, text)


def _read_lines(talk: Conversation) -> None:
    """A turn or a command for each line of stdin."""
    for line in sys.stdin:
        text = line.strip()
        if text in QUIT:
            return
        if text.startswith("/"):
            _obey(talk, text)
        elif text:
            _print_reply(talk.reply(text))


def _obey(talk: Conversation, command: str) -> None:
    if command in ("/clear", "/reset"):
        talk.clear()
    elif command == "/stats":
        print(talk.stats)
    elif command.startswith("/save "):
        _save(talk, command.removeprefix("/save ").strip())
    else:
        print(HELP)


def _read_message() -> str:
    text = input("> ").strip()
    if text.startswith(_QUOTES):
        lines = [text.removeprefix(_QUOTES)]
        while not lines[-1].endswith(_QUOTES):
            lines.append(input(". "))
        return "\n".join(lines).removesuffix(_QUOTES).strip()
    while text.endswith("\\"):
        text = text[:-1] + "\n" + input(". ").rstrip()
    return text


def _save(talk: Conversation, file: str) -> None:
    try:
        talk.save(file)
    except OSError as error:
        print(f"The conversation can't be written: {error}.", file=sys.stderr)
    else:
        print(f"{len(talk.messages)} messages are in {file}.")


def _answer(talk: Conversation, text: str) -> None:
    pieces = talk.reply(text)
    try:
        _print_reply(pieces)
    except KeyboardInterrupt:
        print(" [stopped; this turn is forgotten]")
    except (InvalidRequestError, RequestFailedError) as error:
        print(f"{error} (/clear starts over)", file=sys.stderr)
    finally:
        pieces.close()
