"""Renders chat templates in a process of its own: `python -m pagerunner.text.template_worker`, started by
text/template_pool.py.

A template comes with a checkpoint, and a conversation comes from a client. Either may ask for endless loops or gigabytes. Here
rendering can take no more memory than its process may have, and no longer than the process lives. Frames on standard input
and output are a length of 4 bytes and MessagePack.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any

import msgspec

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.text.chat_template import ChatTemplate

_NICENESS = 5


class Setup(msgspec.Struct, frozen=True):
    """The first frame: the checkpoint's templates, and the file that they are from."""

    templates: dict[str, str]
    where: str


class Job(msgspec.Struct, frozen=True):
    """One conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


class Done(msgspec.Struct, frozen=True):
    """The text, or why there is none. The first one says that the process is ready, and which names the templates read, or that one isn't valid."""

    text: str = ""
    variables: list[str] = []
    error: str | None = None
    param: str | None = None


def pack(value: msgspec.Struct) -> bytes:
    """A frame."""
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(4, "big") + data


def _read() -> bytes:
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        sys.exit(0)  # the parent has closed standard input: end
    return sys.stdin.buffer.read(int.from_bytes(head, "big"))


def _write(value: Done) -> None:
    sys.stdout.buffer.write(pack(value))
    sys.stdout.buffer.flush()


def _render(template: ChatTemplate, job: Job) -> Done:
    try:
        return Done(template.render(job.messages, job.tools, job.variables))
    except InvalidRequestError as error:
        return Done(error=str(error), param=error.param)


def _ready(template: ChatTemplate) -> Done:
    try:
        return Done(variables=sorted(template.variables))
    except InvalidRequestError as error:
        return Done(error=str(error))
    except (MemoryError, RecursionError):
        return Done()  # rendering will say so


def main() -> None:
    """Serve until standard input ends."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits.TEMPLATE_MEGABYTES * 2**20,) * 2)
    setup = msgspec.msgpack.decode(_read(), type=Setup)
    template = ChatTemplate(setup.templates, setup.where)
    jobs = msgspec.msgpack.Decoder(Job)
    signal.alarm(limits.TEMPLATE_SECONDS + 1)
    _write(_ready(template))
    signal.alarm(0)
    while True:
        data = _read()
        signal.alarm(limits.TEMPLATE_SECONDS + 1)  # even if the parent is gone and can't end this process
        done = _render(template, jobs.decode(data))
        signal.alarm(0)
        _write(done)


if __name__ == "__main__":
    main()
