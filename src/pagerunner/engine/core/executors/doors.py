"""Doors: where the core's sockets for its ranks are, in a private directory or, for other machines, on TCP.

On TCP everything is encrypted (CURVE), with keys that are made for each start. Only the ranks' own keys are let in. The kernel chooses the ports.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pagerunner.children import HOST_IP
from pagerunner.engine.worker.ways import Ways
from pagerunner.errors import ConfigError


class Doors:
    """Binds the core's sockets."""

    def __init__(self, directory: Path, host: str | None = None, keys: Collection[str] = ()) -> None:
        """In `directory`, or at the address `host` for ranks with these public keys."""
        self._directory, self._host = directory, host
        self._keys = frozenset(key.encode() for key in keys)
        self._addresses: dict[str, str] = {}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance() if host is None else zmq.Context()
        self._public, self._secret = (b"", b"") if host is None else zmq.curve_keypair()
        self._guard: ThreadAuthenticator | None = None
        if host is not None:
            self._guard = ThreadAuthenticator(self.context)
            self._guard.start()
            self._guard.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer with this public key is let in, for pyzmq's authenticator."""
        return key in self._keys

    def bind(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Bind the socket of this name. Raises ConfigError for an address that isn't this machine's."""
        if self._host is None:
            socket.bind(f"ipc://{self._directory}/{name}")
        else:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
            try:
                socket.bind(f"tcp://{self._host}:0")
            except zmq.ZMQError as error:
                raise ConfigError(f"{HOST_IP}={self._host}: this machine can't listen there ({error}).") from error
        self._addresses[name] = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def ways(self) -> Ways:
        """What a rank has to know to come in."""
        return Ways(addresses=self._addresses, core_key=self._public.decode())

    def close(self) -> None:
        """Let nobody in any more."""
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
            self.context.destroy(0)
