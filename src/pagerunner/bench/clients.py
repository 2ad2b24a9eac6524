"""The load generator's processes: each sends its share of the requests, at times on the clock that all of them have."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from urllib.parse import urlsplit

import msgspec

from pagerunner import children
from pagerunner.bench.http_client import Timeouts
from pagerunner.bench.serving import Planned, Sample, load
from pagerunner.engine.core.garbage import set_apart
from pagerunner.errors import ConfigError

_LEAD_SECONDS = 0.05
CEILING_REQUESTS = 2000
_MOST_AT_ONCE = 256
_TLS_NAMES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_MODULE = "pagerunner.bench.clients"
_NULL_SERVER = "pagerunner.bench.null_server"


class ClientShare(msgspec.Struct, kw_only=True):
    """What one process sends."""

    url: str
    headers: dict[str, str]
    requests: list[Planned]
    max_concurrency: int | None
    timeouts: Timeouts = Timeouts()

    def part(self, number: int, count: int) -> ClientShare:
        """Every `count`-th request, from the `number`-th on."""
        most = self.max_concurrency
        few = None if most is None else most // count + (number < most % count)
        return msgspec.structs.replace(self, requests=self.requests[number::count], max_concurrency=few)


class Outcome(msgspec.Struct):
    """A run: samples in the requests' order, its seconds, and how busy the busiest process was (1: a core all the time)."""

    samples: list[Sample]
    seconds: float
    busy: float


_Report = tuple[int, Sample] | float
"""What a process writes, a line each: the samples of its requests, by their index, and at last how busy it was."""


def measure(share: ClientShare, num_clients: int, progress: Callable[[], object]) -> Outcome:
    """Send the requests from `num_clients` processes; from this one, if it is one. `progress` is called when a request has ended.

    Raises ConfigError: there are fewer requests than processes, or fewer may be under way; a process has ended early.
    """
    if (count := len(share.requests)) < num_clients:
        raise ConfigError(
            f"--num-clients {num_clients} needs at least {num_clients} requests, got {count}; see --num-prompts."
        )
    if (most := share.max_concurrency) is not None and most < num_clients:
        raise ConfigError(
            f"--num-clients {num_clients} needs a --max-concurrency of at least {num_clients}, got {most}."
        )
    samples: dict[int, Sample] = {}
    busy: list[float] = []

    def take(number: int, report: _Report) -> None:
        if isinstance(report, float):
            busy.append(report)
        else:
            samples[report[0] * num_clients + number] = report[1]
            progress()

    begin = time.perf_counter()
    if num_clients == 1:
        asyncio.run(_send(share, begin, lambda report: take(0, report)))
    else:
        # on an error or Ctrl-C the processes end first, and with them the threads
        with ThreadPoolExecutor(num_clients) as threads, _clients(share, num_clients) as processes:
            begin = time.perf_counter() + _LEAD_SECONDS
            work = [threads.submit(_follow, process, number, begin, take) for number, process in enumerate(processes)]
            for one in as_completed(work):
                one.result()
    seconds = time.perf_counter() - begin
    return Outcome([samples[index] for index in range(len(share.requests))], seconds, max(busy))


def ceiling(share: ClientShare, num_clients: int) -> float:
    """Requests a second that this many processes send and read, all at once, where the server answers at once.

    A few requests take hardly longer than a process needs to begin. So they are repeated until they take a second, or are CEILING_REQUESTS.
    """
    with _child(_NULL_SERVER) as (process, port):
        url = f"http://127.0.0.1:{int(port)}{urlsplit(share.url).path}"
        requests = [msgspec.structs.replace(request, at=0.0) for request in share.requests]
        most = share.max_concurrency or max(_MOST_AT_ONCE, num_clients)
        while True:
            null = ClientShare(url=url, headers={}, requests=requests, max_concurrency=most)
            seconds = measure(null, num_clients, lambda: None).seconds
            if seconds >= 1 or len(requests) >= CEILING_REQUESTS:
                return len(requests) / seconds
            requests *= min(math.ceil(1.1 / seconds), -(-CEILING_REQUESTS // len(requests)))


@contextlib.contextmanager
def _child(module: str, first_line: bytes = b"") -> Iterator[tuple[subprocess.Popen[bytes], bytes]]:
    """A process, and the line with which it says that it is ready."""
    environment = children.helper_environment() | {name: os.environ[name] for name in _TLS_NAMES if name in os.environ}
    process = children.start(module, environment, first_line=first_line, stdout=subprocess.PIPE, own_session=True)
    try:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise _ended(process)
        yield process, line
    finally:
        children.end({module: process})


def _ended(process: subprocess.Popen[bytes]) -> ConfigError:
    return ConfigError(children.exit_reason("A process of the load generator", process.wait()))


@contextlib.contextmanager
def _clients(share: ClientShare, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    with contextlib.ExitStack() as stack:
        lines = [msgspec.json.encode(share.part(number, count)) + b"\n" for number in range(count)]
        with ThreadPoolExecutor() as threads:  # a process takes a second to start, so they do it side by side
            processes = list(threads.map(lambda line: stack.enter_context(_child(_MODULE, line))[0], lines))
        yield processes


def _follow(process: subprocess.Popen[bytes], number: int, begin: float, take: Callable[[int, _Report], None]) -> None:
    """Thread: tell a process when to begin, and take what it reports."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"%r\n" % begin)
    process.stdin.flush()
    for line in process.stdout:
        report: _Report = msgspec.json.decode(line, type=_Report)
        take(number, report)
        if isinstance(report, float):
            return
    raise _ended(process)


async def _send(share: ClientShare, begin: float, hand_on: Callable[[_Report], object]) -> None:
    computed = time.process_time()
    await load(
        share.url,
        share.headers,
        share.requests,
        begin=begin,
        max_concurrency=share.max_concurrency,
        progress=lambda index, sample: hand_on((index, sample)),
        timeouts=share.timeouts,
    )
    hand_on((time.process_time() - computed) / (time.perf_counter() - begin))


def _hand_on(report: _Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_parent(parent: int) -> None:
    children.wait_for_parents_end(parent)
    os._exit(0)


def main() -> None:
    """Entry point of a process: a share comes on the first line of standard input, the run's begin on the second."""
    parent = os.getppid()
    lines = children.read_lines(_MODULE)
    share = msgspec.json.decode(next(lines), type=ClientShare)
    print("ready", flush=True)
    if not (begin := next(lines, b"")):
        return  # nobody waits for it any more
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with set_apart():
        asyncio.run(_send(share, float(begin), _hand_on))


if __name__ == "__main__":
    main()
