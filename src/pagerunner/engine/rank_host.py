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
from typing import Any, NamedTuple

import msgspec
import zmq

from pagerunner.children import HOST_IP, LOOPBACK, engine_environment, start
from pagerunner.dist.settings import nccl_settings
from pagerunner.engine.startup.shares import VISIBLE
from pagerunner.threads import thread_settings


def machine() -> str:
    """What is the same for processes that reach each other by loopback, and for no others."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"


class Place(NamedTuple):
    """Where a rank will run: see `machine`; the machine's address in the cluster; the public key of the rank; the actor's process; Ray's node, and the
    GPUs there that Ray has given to the actor.
    """

    machine: str
    address: str
    key: str
    pid: int
    node: str
    gpus: list[str]


def gpus_of(context: Any) -> list[str]:
    """The GPUs that Ray has given to the actor or task with this runtime context, as CUDA_VISIBLE_DEVICES names them on its machine."""
    return list(map(str, context.get_accelerator_ids().get("GPU", ())))


class RankHost:
    """Its methods run in threads of the actor: `run` for as long as the rank does."""

    def __init__(self) -> None:
        self._public, self._secret = zmq.curve_keypair()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def place(self) -> Place:
        """Where this is."""
        ray = importlib.import_module("ray")
        here = ray.get_runtime_context()
        address = str(ray.util.get_node_ip_address())
        return Place(machine(), address, self._public.decode(), os.getpid(), str(here.get_node_id()), gpus_of(here))

    def run(self, launch: bytes, settings: Mapping[str, str], address: str, gpus: str) -> int:
        """Run a rank, a RankLaunch in JSON, to its end. Returns its exit status.

        `settings` are the core's, over this machine's own environment. The rank listens at `address` unless that is of another machine
        than loopback, and this machine's environment names another one. The rank's secret key never leaves this machine. It sees `gpus`, those of
        all ranks of this machine in their order, as devices under the same numbers can write into each other's memory.
        """
        line = msgspec.json.decode(launch)
        line["ways"] |= {"public_key": self._public.decode(), "secret_key": self._secret.decode()}
        environment = {HOST_IP: address, **thread_settings(os.environ, reserved=0), **engine_environment(), **settings}
        if address == LOOPBACK:  # the core can't be reached from elsewhere, and nothing is to leave the machine
            environment[HOST_IP] = LOOPBACK
        environment = {**nccl_settings(environment), **environment, VISIBLE: gpus}
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
