"""Ports for programs that are told which one to take."""

from __future__ import annotations

import errno
import secrets
import socket

_FIRST, _COUNT = 20_000, 12_000
"""Linux gives those from 32,768 on to whoever asks for any port: one of them may be gone before a program has taken it."""


def free_port() -> int:
    """A port of loopback that nobody has now, and that nobody is given who doesn't ask for it."""
    while True:
        port = _FIRST + secrets.randbelow(_COUNT)  # `random` begins alike in other processes
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
