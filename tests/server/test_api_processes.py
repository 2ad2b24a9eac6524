"""Several API processes at one port: who answers makes no difference, and the end of one is the end of its own requests."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest

from helpers import fake_core
from helpers.patience import LONG, until
from helpers.ports import free_port
from helpers.processes import children_of, is_alive
from helpers.server_process import PROGRAM, server_process, set_options
from helpers.serving import readers
from pagerunner.config import EngineArgs
from pagerunner.errors import ConfigError
from pagerunner.server import api_processes, launch
from pagerunner.server.launch import run_server
from pagerunner.server.listening import bind, claim

pytestmark = pytest.mark.usefixtures("forked")

Server = tuple[subprocess.Popen[str], str]
API = b"server.api_processes"


@pytest.fixture(scope="module")
def two(text_side: Path) -> Iterator[Server]:
    """Two API processes in front of two engines."""
    with pytest.MonkeyPatch.context() as patch:
        set_options(patch, step_seconds=0.01)
        with server_process(text_side, 5, api_server_count=2, engines=2) as found:
            yield found


def children(server: Server, module: bytes) -> list[int]:
    return children_of(server[0].pid, module)


def post(server: Server, path: str, body: Any = None, **options: Any) -> httpx.Response:
    return httpx.post(f"{server[1]}/{path}", json=body, timeout=LONG, **options)  # a connection of its own


def complete(server: Server, count: int, **body: Any) -> None:
    given = {"prompt": [40, 50], "max_tokens": 3, **body}
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: post(server, "v1/completions", given).status_code, range(count)))
    assert answers == [200] * count


def total(server: Server, name: str, label: str = "") -> float:
    """The sum of a metric's samples, of which there are some."""
    text = httpx.get(f"{server[1]}/metrics", timeout=LONG).text
    found = re.findall(rf"^{name}({{.*}})? (.+)$", text, re.MULTILINE)
    assert found, name
    return sum(float(value) for labels, value in found if label in labels)


def open_streams(server: Server, pid: int) -> int:
    """Connections that an API process has accepted."""
    links = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            links.append(os.readlink(one))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    port = f":{int(server[1].rsplit(':', 1)[1]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(line[1].endswith(port) and line[3] == "01" and line[9] in inodes for line in lines)


def test_the_disk_has_given_all_that_metrics_are_mapped_in(two: Server) -> None:
    """A page that it had no room for would end the process by SIGBUS."""
    post(two, "v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2})
    for pid in children(two, API):
        maps = Path(f"/proc/{pid}/maps").read_text()
        found = {Path(line.split()[-1]) for line in maps.splitlines() if line.endswith(("_1.db", "_2.db"))}
        assert {path.name[: -len("_1.db")] for path in found} <= set(api_processes._METRICS) and found
        for path in found:
            assert path.stat().st_blocks * 512 >= path.stat().st_size >= 4 * 4096, path


def test_without_room_for_metrics_a_process_says_where_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    (tmp_path / "counter_2.db").write_bytes(bytes(8))
    monkeypatch.setattr(prometheus_client.values, "ValueClass", None)  # is set for the process, and this is another one

    def allocate(file: int, start: int, size: int) -> None:
        given.append(file)
        if len(given) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    sentence = rf"API process 2 needs 2.00 MiB for its metrics in {tmp_path}, .*No space left.*set TMPDIR"
    with pytest.raises(SystemExit, match=sentence):
        api_processes.reserve_metrics(2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["counter_2.db"], "what the process before has counted stays"


def test_whichever_process_answers_metrics_are_those_of_all(two: Server) -> None:
    assert len(children(two, API)) == 2 and len(children(two, b"core.process")) == 2
    before = {name: total(two, name) for name in ("vllm:request_success_total", "vllm:generation_tokens_total")}
    complete(two, 40)
    for _ in range(8):  # each is another connection
        until(lambda: total(two, "vllm:request_success_total") == before["vllm:request_success_total"] + 40)
        assert total(two, "vllm:generation_tokens_total") == before["vllm:generation_tokens_total"] + 120
        assert total(two, "vllm:gpu_cache_usage_perc") == 0
        assert total(two, "pagerunner:engine_up") == 2
        assert "\nprocess_open_fds" not in httpx.get(f"{two[1]}/metrics", timeout=LONG).text, (
            "of which of them, nobody could say"
        )
        assert total(two, "vllm:time_per_output_token_seconds_count") == total(
            two, "vllm:inter_token_latency_seconds_count"
        )
    assert min(total(two, "vllm:request_success_total", f'engine="{engine}"') for engine in (0, 1)) > 0


def test_both_serve_and_load_is_that_of_both(two: Server) -> None:
    streams = readers(two[1], 12, prompt="abc", max_tokens=1900, extra_body={"ignore_eos": True})
    counts = [open_streams(two, pid) for pid in children(two, API)]
    assert sum(counts) >= 12 and min(counts) > 0, "the kernel shares connections out"
    until(
        lambda: httpx.get(f"{two[1]}/load", timeout=LONG).json() == {"server_load": 12}
    )  # connections are counted before requests
    for _ in range(4):
        assert httpx.get(f"{two[1]}/load", timeout=LONG).json() == {"server_load": 12}
    until(lambda: total(two, "vllm:num_requests_running") == 12)
    assert post(two, "pause?mode=abort").json() == {"status": "paused"}
    for reader in streams:
        reader.join(LONG)
        assert reader.reason == "abort", reader.error
    for _ in range(6):
        assert httpx.get(f"{two[1]}/is_paused", timeout=LONG).json() == {"is_paused": True}
    assert post(two, "resume").status_code == 200
    for _ in range(6):
        until(lambda: httpx.get(f"{two[1]}/is_paused", timeout=LONG).json() == {"is_paused": False})
    complete(two, 8)


def two_but(server: Server, killed: set[int]) -> set[int]:
    """The two API processes, when none of them is one that was killed: in one look, as a killed one is seen for a moment."""
    found: set[int] = set()

    def look() -> bool:
        found.clear()
        found.update(children(server, API))
        return len(found) == 2 and not killed & found

    until(look)
    return found


@pytest.mark.days(3)
def test_a_crashed_process_is_started_again_and_others_requests_go_on(
    text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with server_process(text_side, 5, api_server_count=2) as server:
        complete(server, 10)
        streams = readers(server[1], 8, prompt="abc", max_tokens=400, extra_body={"ignore_eos": True})
        lost, kept = (open_streams(server, pid) for pid in children(server, API))
        assert not any(reader.ended_at for reader in streams), "connections are counted, and those of ended streams too"
        victim, other = children(server, API)
        os.kill(victim, signal.SIGKILL)
        killed = {victim}
        [second] = two_but(server, killed) - {other}
        os.kill(second, signal.SIGKILL)  # before it serves
        killed.add(second)
        assert other in two_but(server, killed)
        until(lambda: total(server, "vllm:num_requests_running") == kept)
        for reader in streams:
            reader.join(LONG)
        assert sum(reader.error is not None for reader in streams) == lost
        assert all((reader.error is None) == (len(reader.text) == 400) for reader in streams), (
            "none that was cut looks whole"
        )
        assert sum(reader.reason == "length" for reader in streams) == kept
        until(lambda: total(server, "vllm:request_success_total") == 10 + kept)
        assert total(server, "pagerunner:http_calls_running") == 0
        until(lambda: serves(server, children(server, API)))
        complete(server, 20)


def test_the_server_ends_where_none_has_served(text_side: Path) -> None:
    """On a busy machine one may serve before the other one is killed. Then the server goes on and says where it serves, and the case is tried again."""
    said = next(filter(None, (ends_before_it_serves(text_side) for _ in range(5))))
    assert "Neither it nor another one had begun to serve" in said


def ends_before_it_serves(text_side: Path) -> str:
    """Kill an API process when there are two. What the server said at its end, which has status 1; "" if it came to serve."""
    command = [sys.executable, "-c", PROGRAM, str(text_side), "5", '{"api_server_count": 2}']
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        try:
            server = process, ""
            until(lambda: len(children(server, API)) == 2)
            os.kill(children(server, API)[0], signal.SIGKILL)
            assert process.stdout is not None and process.stderr is not None
            if process.stdout.readline():
                return ""
            assert process.wait(LONG) == 1
            return process.stderr.read()
        finally:
            process.kill()


def serves(server: Server, pids: list[int]) -> bool:
    """Whether all of them accept connections."""
    with (
        httpx.Client(timeout=LONG) as first,
        httpx.Client(timeout=LONG) as second,
        httpx.Client(timeout=LONG) as third,
        httpx.Client(timeout=LONG) as fourth,
    ):
        for client in (first, second, third, fourth):
            client.get(f"{server[1]}/health")
        return all(open_streams(server, pid) for pid in pids)


@pytest.mark.days(3)
def test_a_process_that_was_stopped_is_replaced_and_its_successor_counts_on(
    text_side: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that the kernel has given it are closed. Files of metrics don't get more."""
    monkeypatch.setenv("PAGERUNNER_LIMIT_RANK_SECONDS", "3")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with server_process(text_side, 20, api_server_count=2) as server:
        complete(server, 10)
        files = sorted(tmp_path.glob("pagerunner-run-*/*.db"))
        victim, other = children(server, API)
        os.kill(victim, signal.SIGSTOP)
        with httpx.Client(timeout=LONG) as waits, contextlib.suppress(httpx.TransportError):
            waits.get(f"{server[1]}/health", timeout=LONG)
        assert other in two_but(server, {victim})
        until(lambda: serves(server, children(server, API)))
        complete(server, 10)
        until(lambda: total(server, "vllm:request_success_total") == 20)
        assert sorted(tmp_path.glob("pagerunner-run-*/*.db")) == files and len(files) <= 8


@pytest.mark.days(3)
def test_a_core_that_is_killed_is_known_to_all_and_the_last_one_ends_the_server(
    text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with server_process(text_side, 5, api_server_count=2, engines=2, stall_seconds=2) as server:
        cores = children(server, b"core.process")
        os.kill(cores[1], signal.SIGSTOP)  # nobody has asked it for anything
        for _ in range(6):  # each is another connection
            until(lambda: '{"lost":{"' in httpx.get(f"{server[1]}/health", timeout=LONG).text)
        os.kill(cores[1], signal.SIGCONT)
        for _ in range(6):
            until(lambda: httpx.get(f"{server[1]}/health", timeout=LONG).content == b"")
        os.kill(cores[1], signal.SIGKILL)
        for _ in range(6):
            until(lambda: "SIGKILL" in httpx.get(f"{server[1]}/health", timeout=LONG).text)
            assert httpx.get(f"{server[1]}/health", timeout=LONG).status_code == 200
        complete(server, 12)
        assert total(server, "pagerunner:engine_up") == 1
        [reader] = readers(server[1], 1, prompt="abc", max_tokens=1900)
        response = post(server, "v1/completions", {"prompt": [fake_core.CRASH]})
        assert response.status_code == 503 and "was told to crash" in response.text
        reader.join(LONG)
        assert "was told to crash" in str(reader.error), "all frontends hear the core's own reason"
        assert server[0].wait(LONG) == 1


@pytest.mark.days(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_drain_all_processes(number: signal.Signals, text_side: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, step_seconds=0.01)
    with server_process(text_side, 20, api_server_count=2) as server:
        pids = children(server, API) + children(server, b"core.process")
        short = readers(server[1], 4, prompt="ab", max_tokens=60)
        server[0].send_signal(number)
        for reader in short:
            reader.join(LONG)
            assert reader.error is None and reader.reason == "length"
        assert server[0].wait(LONG) == 0
        until(lambda: not any(map(is_alive, pids)))


@pytest.mark.days(3)
def test_when_the_supervisor_is_killed_nothing_is_left(
    text_side: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with server_process(text_side, 5, api_server_count=2) as server:
        complete(server, 4)
        assert len([*tmp_path.glob("pagerunner-run-*/*.db")]) > 1
        pids = children(server, API) + children(server, b"core.process")
        server[0].kill()
        until(lambda: not any(map(is_alive, pids)))
        assert not [*tmp_path.glob("pagerunner-run-*")]


@pytest.mark.days(3)
def test_what_is_left_when_all_are_killed_at_once_goes_with_the_next_start(
    text_side: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("t")  # the directory of a server that runs is beside it
    monkeypatch.setenv("TMPDIR", str(place))
    with server_process(text_side, 5) as beside:
        (used,) = place.glob("pagerunner-run-*")
        with server_process(text_side, 5, api_server_count=2) as server:
            pids = [server[0].pid, *children(server, API), *children(server, b"core.process")]
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    os.kill(pid, number)
            until(lambda: not any(map(is_alive, pids)))
        left = {*place.glob("pagerunner-run-*")} - {used}
        assert len(left) == 2, "of the core's sockets and of the metrics"
        with server_process(text_side, 5):
            assert used.exists() and not any(one.exists() for one in left)
        complete(beside, 1)


def test_wrong_numbers_and_ports(text_side: Path) -> None:
    args = EngineArgs(model=str(text_side))
    for count in (0, -1, 65):
        with pytest.raises(ConfigError, match=rf"api_server_count must be in \[1, 64\], got {count} .*MAX_API_SERVERS"):
            run_server(args, api_server_count=count)
    for before, after in itertools.product((False, True), repeat=2):
        port = port_in_time_wait(shared=before)
        bind("127.0.0.1", port).close()  # as run_server does first
        bind("127.0.0.1", port, shared=after).close()
    with bind("127.0.0.1", 0, shared=True) as other:
        other.listen()
        with pytest.raises(ConfigError, match="is in use"):
            run_server(args, port=other.getsockname()[1], api_server_count=2)


@pytest.mark.parametrize("count", [1, 2])
def test_the_port_of_a_server_that_still_loads_is_in_use(count: int, text_side: Path) -> None:
    """Nobody listens there yet, so the kernel would let two servers have it."""
    with bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with claim(other), pytest.raises(ConfigError, match=rf"^Port {port} on 127\.0\.0\.1 is in use"):
            run_server(EngineArgs(model=str(text_side)), port=port, api_server_count=count)
        claim(other).close()


def test_a_port_at_which_another_program_listens_when_the_model_is_loaded_is_in_use(
    text_side: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(args: EngineArgs, listener: socket.socket, **_: Any) -> int:
        with bind("127.0.0.1", listener.getsockname()[1]) as other:
            other.listen()
            listener.listen()
        return 0

    monkeypatch.setattr(launch, "serve", serve)
    port = free_port()
    with pytest.raises(ConfigError, match=rf"^Port {port} on 127\.0\.0\.1 is in use"):
        run_server(EngineArgs(model=str(text_side)), port=port)


def port_in_time_wait(*, shared: bool) -> int:
    """The port of a server that has ended, after it had closed a connection."""
    with bind("127.0.0.1", 0, shared=shared) as listener:
        listener.listen()
        address = listener.getsockname()
        with socket.create_connection(address) as client:
            listener.accept()[0].close()
            client.recv(1)
    return int(address[1])
