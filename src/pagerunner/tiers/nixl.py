"""NIXL as the way of pages' bytes, where it is installed: one engine reads another one's host memory by itself, over RDMA where there is any.

All else is said over TCP as ever: who may read, what is where, and after the reading whether the pages were still lent, with their checksums. Pages come into a
*bounce* buffer of ours first, because NIXL has no cancel: a transfer that is given up may still write. Such a buffer is put aside until the
transfer has ended. A transfer has no deadline either, so it is looked at until ours. What NIXL can't read comes over TCP.

Whoever is let in can read all of the host memory that an engine has registered, not only what it was lent.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import mmap
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from pagerunner.errors import ConfigError

_WHEELS = ("nixl_cu13", "nixl_cu12")
_LOOK_SECONDS = 0.0002
MOST_REMOTES = 16
"""Engines that are read by NIXL. Each has a buffer here."""
MOST_PUT_ASIDE = 4
"""Buffers that an engine's transfers without an end may keep. After that it isn't read by NIXL any more."""


class NixlError(Exception):
    """Pages can't be read by NIXL, or not in time. Nothing writes to their places."""


def _api() -> Any:
    for name in _WHEELS:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    raise ConfigError(
        'NixlConnector needs NIXL, which isn\'t installed: pip install "pagerunner[nixl]". PeerConnector takes the same fields, and pages go over TCP.'
    )


def check_installed() -> None:
    """Raise ConfigError where NIXL isn't installed."""
    _api()


def address_of(view: memoryview) -> int:
    """Where a view begins."""
    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)


class _Agent:
    """An agent of NIXL and the memory that it has registered."""

    def __init__(self) -> None:
        api = _api()
        self.nixl = api.nixl_agent(f"pagerunner-{uuid.uuid4().hex}", api.nixl_agent_config(backends=["UCX"]))

    def register(self, *views: memoryview) -> Any:
        return self.nixl.register_memory([(address_of(view), len(view), 0, "") for view in views], "DRAM")


class Shared(_Agent):
    """Memory that other engines may read. `close` before it is unmapped: a read of unmapped memory would end this process."""

    def __init__(self, *views: memoryview) -> None:
        super().__init__()
        self._views, self._registered = views, self.register(*views)
        self.metadata: bytes = self.nixl.get_agent_metadata()

    def close(self) -> None:
        """Let nobody read it any more."""
        self.nixl.deregister_memory(self._registered)
        self.nixl = None  # its end closes the endpoints


class _Remote:
    """Another engine: its name at the agent, the buffer that its pages come into, and those that transfers without an end keep."""

    def __init__(self, metadata: bytes) -> None:
        self.metadata, self.lock, self.users = metadata, threading.Lock(), 0
        self.name: str | None = None
        self.buffer: tuple[memoryview, Any] | None = None
        self.aside: list[tuple[Any, tuple[memoryview, Any]]] = []


class Reader(_Agent):
    """Reads other engines' memory. Any thread may call it. Of each engine one reads at a time; the agent's calls, which are short, go one after another."""

    def __init__(self, buffer_bytes: int) -> None:
        super().__init__()
        self._size, self._lock = buffer_bytes, threading.RLock()
        self._remotes: dict[bytes, _Remote] = {}

    def read(
        self,
        metadata: bytes,
        addresses: Sequence[int],
        views: Sequence[memoryview],
        deadline: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read from these addresses of the engine with this metadata into views, of `buffer_bytes` together at most.

        Raises:
            NixlError: it can't be read, or not until the deadline, or it isn't to be read any more (`stopped`).
        """
        if (size := sum(map(len, views))) > self._size:
            raise NixlError(f"{size:,} bytes are lent at once, of at most {self._size:,}")
        remote = self._remote(metadata)
        try:
            if not remote.lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
                raise NixlError("the transfer before it hasn't ended in time")
            with contextlib.ExitStack() as stack:
                stack.callback(remote.lock.release)
                waits = lambda: time.monotonic() < deadline and not stopped()  # noqa: E731
                buffer, at = self._transfer(remote, addresses, views, waits), 0
                for view in views:
                    view[:] = buffer[at : at + len(view)]
                    at += len(view)
        except NixlError:
            raise
        except Exception as error:  # NIXL's own, of which there are many
            self._forget(remote)
            raise NixlError(f"{type(error).__name__}: {error}") from None
        finally:
            with self._lock:
                remote.users -= 1

    def _remote(self, metadata: bytes) -> _Remote:
        with self._lock:
            if metadata not in self._remotes and len(self._remotes) >= MOST_REMOTES:
                idle = (at for at, other in self._remotes.items() if not other.users and not other.aside)
                if (oldest := next(idle, None)) is None:
                    raise NixlError(f"{MOST_REMOTES} other engines are being read")
                self._forget(self._remotes.pop(oldest))
            remote = self._remotes.setdefault(metadata, _Remote(metadata))
            remote.users += 1
            return remote

    def _forget(self, remote: _Remote) -> None:
        """Close what leads to an engine. It is made again when it is read again."""
        with self._lock:
            if remote.buffer is not None:
                self.nixl.deregister_memory(remote.buffer[1])
            name, remote.name, remote.buffer = remote.name, None, None
            with contextlib.suppress(Exception):  # it is gone already
                if name is not None:
                    self.nixl.remove_remote_agent(name)

    def _transfer(
        self, remote: _Remote, addresses: Sequence[int], views: Sequence[memoryview], waits: Callable[[], bool]
    ) -> memoryview:
        """The buffer with the bytes of all views, one after another. Raises NixlError if they haven't come when nobody `waits` any more."""
        with self._lock:
            self._look_aside(remote)
            nixl = self.nixl
            if remote.name is None:
                remote.name = nixl.add_remote_agent(remote.metadata)
            if remote.buffer is None:
                fresh = memoryview(mmap.mmap(-1, self._size))
                remote.buffer = fresh, self.register(fresh)
            buffer = remote.buffer[0]
            starts = itertools.accumulate(map(len, views), initial=address_of(buffer))
            ours = [(start, len(view), 0) for start, view in zip(starts, views, strict=False)]
            theirs = [(address, len(view), 0) for address, view in zip(addresses, views, strict=True)]
            handle = nixl.initialize_xfer(
                "READ", nixl.get_xfer_descs(ours, "DRAM"), nixl.get_xfer_descs(theirs, "DRAM"), remote.name
            )
            state = nixl.transfer(handle)
        while state == "PROC" and waits():
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                state = nixl.check_xfer_state(handle)
        with self._lock:
            if state == "PROC":
                remote.aside.append((handle, remote.buffer))
                remote.buffer = None
                raise NixlError("a transfer hasn't ended in time")
            nixl.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"state {state}")
        return buffer

    def _look_aside(self, remote: _Remote) -> None:
        """Let go the buffers of transfers that have ended after all."""
        for one in remote.aside[:]:
            handle, (_, registered) = one
            try:
                state = self.nixl.check_xfer_state(handle)
            except Exception:  # the other engine is gone, and nothing writes any more
                state = "ERR"
            if state != "PROC":
                remote.aside.remove(one)
                self.nixl.release_xfer_handle(handle)
                self.nixl.deregister_memory(registered)
        if len(remote.aside) >= MOST_PUT_ASIDE:
            raise NixlError(f"{len(remote.aside)} transfers haven't ended")
