"""RankHost: the Ray actor that holds the process of one rank, on the machine where Ray has placed it.

The rank isn't in the actor's own process: nothing but the end of its process frees a rank that waits in a sum, and its exit status says how it
ended. The rank's standard input is its leash: it ends with its actor. `engine/core/executors/ray.py` is the core's side.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from pagerunner.children import HOST_IP, LOOPBACK, engine_environment, start
from pagerunner.threads import thread_settings


def machine() -> str:
    """What is the same for processes that reach each other by loopback, and for no others."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"


class Place(NamedTuple):
    """Where a rank will run: see `machine`; the machine's address in the cluster; the public key of the rank; the actor's process."""

    machine: str
    address: str
    key: str
    pid: int


class RankHost:
    """Its methods run in threads of the actor: `run` for as long as the rank does."""

    def __init__(self) -> None:
        self._public, self._secret = zmq.curve_keypair()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def place(self) -> Place:
        """Where this is."""
        address: str = importlib.import_module("ray").util.get_node_ip_address()
        return Place(machine(), address, self._public.decode(), os.getpid())

    def run(self, launch: bytes, settings: Mapping[str, str], address: str) -> int:
        """Run a rank, a RankLaunch in JSON, to its end. Returns its exit status.

        `settings` are the core's, over this machine's own environment. The rank listens at `address` unless that is of another machine
        than loopback, and this machine's environment names another one. The rank's secret key never leaves this machine.
        """
        line = msgspec.json.decode(launch)
        line["ways"] |= {"public_key": self._public.decode(), "secret_key": self._secret.decode()}
        environment = {HOST_IP: address, **thread_settings(os.environ, reserved=0), **engine_environment(), **settings}
        if address == LOOPBACK:  # the core can't be reached from elsewhere, and nothing is to leave the machine
            environment[HOST_IP] = LOOPBACK
        self._process = start(
            "pagerunner.engine.rank", environment, first_line=msgspec.json.encode(line) + b"\n", own_session=True
        )
        if self._killed:
            self._process.kill()
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send the rank a signal. A SIGKILL that comes before the rank ends it too."""
        self._killed = self._killed or number == signal.SIGKILL
        if self._process is not None:
            self._process.send_signal(number)
