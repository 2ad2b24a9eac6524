"""NIXL as the way of pages' bytes, where it is installed: one engine reads another one's host memory by itself, over RDMA where there is any.

All else is said over TCP as ever: who may read, what is where, and after the reading whether the pages were still lent, with their checksums. Pages come into a
*bounce* buffer of ours first, because NIXL has no cancel: a transfer that is given up may still write. Such a buffer is put aside until the
transfer has ended. A transfer has no deadline either, so it is looked at until ours.

Whoever is let in can read all of the host memory that an engine has registered, not only what it was lent.
"""

from __future__ import annotations

import importlib
import mmap
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from pagerunner.errors import ConfigError
from pagerunner.tiers.wire import WireError

_WHEELS = ("nixl_cu13", "nixl_cu12")
_LOOK_SECONDS = 0.0002
MOST_PUT_ASIDE = 4
"""Buffers that transfers without an end may keep. After that nothing is read by NIXL any more."""


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

    def register(self, view: memoryview) -> Any:
        return self.nixl.register_memory([(address_of(view), len(view), 0, "")], "DRAM")


class Shared(_Agent):
    """Memory that other engines may read. `close` before it is unmapped: a read of unmapped memory would end this process."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view, self._registered = view, self.register(view)
        self.metadata: bytes = self.nixl.get_agent_metadata()

    def close(self) -> None:
        """Let nobody read it any more."""
        self.nixl.deregister_memory(self._registered)
        self.nixl = None  # its end closes the endpoints


class Reader(_Agent):
    """Reads other engines' memory. Any thread may call it; one reads at a time, as an agent isn't made for more."""

    def __init__(self, buffer_bytes: int) -> None:
        super().__init__()
        self._size, self._lock = buffer_bytes, threading.Lock()
        self._buffer = self._new_buffer()
        self._aside: list[tuple[Any, memoryview]] = []
        self._names: dict[bytes, str] = {}

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
            WireError: it can't be read, or not until the deadline, or it isn't to be read any more (`stopped`). Nothing writes to the views then.
        """
        with self._lock:
            self._look_aside()
            at, pieces, base = 0, [], address_of(self._buffer)
            for view in views:
                pieces.append((base + at, len(view), 0))
                at += len(view)
            if at > self._size:
                raise WireError(f"lends {at:,} bytes at once, of at most {self._size:,}")
            theirs = [(address, len(view), 0) for address, view in zip(addresses, views, strict=True)]
            try:
                self._transfer(metadata, pieces, theirs, deadline, stopped)
            except WireError:
                raise
            except Exception as error:  # NIXL's own, of which there are many
                self.forget(metadata)
                raise WireError(f"can't be read by NIXL ({type(error).__name__}: {error})") from None
            at = 0
            for view in views:
                numpy.copyto(
                    numpy.frombuffer(view, numpy.uint8),
                    numpy.frombuffer(self._buffer[at : at + len(view)], numpy.uint8),
                )
                at += len(view)

    def forget(self, metadata: bytes) -> None:
        """Close what leads to an engine."""
        if (name := self._names.pop(metadata, None)) is not None:
            try:
                self.nixl.remove_remote_agent(name)
            except Exception:  # it is gone already
                return

    def _transfer(
        self, metadata: bytes, ours: list[Any], theirs: list[Any], deadline: float, stopped: Callable[[], bool]
    ) -> None:
        nixl = self.nixl
        if (name := self._names.get(metadata)) is None:
            name = self._names[metadata] = nixl.add_remote_agent(metadata)
        handle = nixl.initialize_xfer(
            "READ", nixl.get_xfer_descs(ours, "DRAM"), nixl.get_xfer_descs(theirs, "DRAM"), name
        )
        state = nixl.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline and not stopped():
            time.sleep(_LOOK_SECONDS)
            state = nixl.check_xfer_state(handle)
        if state == "PROC":
            self._aside.append((handle, self._buffer))
            self._buffer = self._new_buffer()
            raise WireError("is too slow: a transfer of NIXL hasn't ended in time", late=True)
        nixl.release_xfer_handle(handle)
        if state != "DONE":
            self.forget(metadata)
            raise WireError(f"can't be read by NIXL (state {state})")

    def _look_aside(self) -> None:
        """Let go the buffers of transfers that have ended after all."""
        left = []
        for handle, buffer in self._aside:
            try:
                state = self.nixl.check_xfer_state(handle)
            except Exception:  # the other engine is gone, and nothing writes any more
                state = "ERR"
            if state == "PROC":
                left.append((handle, buffer))
            else:
                self.nixl.release_xfer_handle(handle)
        self._aside = left
        if len(left) >= MOST_PUT_ASIDE:
            raise WireError(f"isn't read by NIXL: {len(left)} transfers haven't ended")

    def _new_buffer(self) -> memoryview:
        buffer = memoryview(mmap.mmap(-1, self._size))
        self.register(buffer)
        return buffer
