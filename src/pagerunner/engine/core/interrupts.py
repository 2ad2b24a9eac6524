"""Ctrl-C while an engine in the caller's process works: noted at once, and raised when the step is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class HeldInterrupts:
    """`with HeldInterrupts():` puts a Ctrl-C off until the end of the block. A second Ctrl-C is not put off.

    The program's own SIGINT handler is called at the end of the block. Python runs signal handlers in the main thread only, so
    there is nothing to hold in another thread. A handler that isn't Python's (SIG_IGN, SIG_DFL, one set by C) is left alone.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._frame: FrameType | None = None
        self._noted = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        left = getattr(handler, "__self__", None)
        if isinstance(left, HeldInterrupts):  # an earlier block, whose end an interrupt of another kind has cut off
            handler = left._handler
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._noted:
            self._handler(signal.SIGINT, self._frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            self._noted = False
            self._handler(number, frame)
            return
        self._noted, self._frame = True, frame
