"""How fast pages come from another engine on loopback, by page size, beside plain sockets: all in turns, between two processes.

    python scripts/bench_peers.py --threads 1

A page is checked at both ends, and answered for. `sendall` and `sendfile` send as many bytes and check nothing; the other end receives them as the store does.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pagerunner.tiers import wire
from pagerunner.tiers.loans import Loans
from pagerunner.tiers.page_server import PageServer
from pagerunner.tiers.peers import PeerStore

SECRET, FIELDS = b"s" * 32, {"page": "bytes"}
SIZES = (64 << 10, 384 << 10, 1 << 20, 4 << 20, 32 << 20)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def send(total: int, mode: str) -> None:
    """The other process: plain bytes, each time that it is asked."""
    data, file = memoryview(os.urandom(1 << 20) * (total >> 20)), os.memfd_create("pages")
    at = 0
    while at < total:
        at += os.write(file, data[at:])
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        sock = server.accept()[0]
    while sock.recv(1):
        at = 0
        while mode == "sendfile" and at < total:
            at += os.sendfile(sock.fileno(), file, at, total - at)
        if mode == "sendall":
            sock.sendall(data)


def lend(total: int, size: int) -> None:
    """The other process: pages that are lent."""
    data = memoryview(os.urandom(1 << 20) * (total >> 20))
    loans = Loans(lambda token, why: None)
    server = PageServer(loans, SECRET)
    server.open(FIELDS)
    token = loans.lend({(0, key(at // size)): data[at : at + size] for at in range(0, total, size)}, 3_600)
    print(server.address[1], token.hex(), server.boot.hex(), flush=True)
    sys.stdin.read()


def plain(total: int, told: list[str]) -> Callable[[], None]:
    sock = socket.create_connection(("127.0.0.1", int(told[0])))
    room = memoryview(bytearray(total))

    def once() -> None:
        sock.sendall(b"x")
        at = 0
        while at < total:
            at += sock.recv_into(room[at:], 0, socket.MSG_WAITALL)

    return once


def pulled(total: int, size: int, threads: int, told: list[str]) -> Callable[[], None]:
    news = threading.Event()
    store = PeerStore(SECRET, FIELDS, wire.LOOPBACK, news.set, threads)
    store.visit(1, ("127.0.0.1", int(told[0])), bytes.fromhex(told[1]), bytes.fromhex(told[2]))
    while not store.visited():
        news.wait()
    room = memoryview(bytearray(total))
    pages = [(0, key(at // size), room[at : at + size]) for at in range(0, total, size)]

    def once() -> None:
        news.clear()
        store.read(1, pages)
        while not (ended := store.ended()):
            news.wait()
            news.clear()
        assert all(ended[0][1])

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1, help="connections that pages come by")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--other", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    total = options.mib << 20
    if options.other:
        what = options.other[0]
        return lend(total, int(what)) if what.isdecimal() else send(total, what)
    processes: list[subprocess.Popen[str]] = []

    def other(what: str) -> list[str]:
        command = [sys.executable, __file__, "--mib", str(options.mib), "--other", what]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, **pipes))
        return processes[-1].stdout.readline().split()  # type: ignore[union-attr]

    ways = {mode: plain(total, other(mode)) for mode in ("sendfile", "sendall")}
    ways |= {
        f"pages of {size >> 10} KiB": pulled(total, size, options.threads, other(str(size)))
        for size in SIZES
        if size <= total
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, once in ways.items():
            began = time.perf_counter()
            once()
            took[name].append(time.perf_counter() - began)
    least = statistics.median(took["sendfile"])
    for name, seconds in took.items():
        median = statistics.median(seconds)
        print(f"{name:20} {total / median / 1e9:5.2f} GB/s, {least / median:4.2f} of sendfile")
    for process in processes:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
