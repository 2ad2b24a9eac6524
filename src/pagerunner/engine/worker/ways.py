"""Ways: how a rank reaches the engine's core, by sockets in a private directory or, from another machine, by TCP with CURVE."""

from __future__ import annotations

import msgspec
import zmq


class Ways(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The addresses of the core's sockets, by their names. By TCP the core's public key, and the rank's keys, which its machine adds."""

    addresses: dict[str, str]
    core_key: str = ""
    public_key: str = ""
    secret_key: str = ""

    def connect(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Connect to the core's socket of this name."""
        if self.core_key:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.core_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key.encode())
        socket.connect(self.addresses[name])
