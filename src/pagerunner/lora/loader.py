"""Brings adapters from their directories to host memory, and from there to the device, beside the steps.

Some threads read files (`lora/readers.py`), and another one copies. So a copy of 90 MB, which takes 2 ms, never waits for a directory, and nor does sleep.
On a CUDA device copies have a stream of their own. It waits for the steps that were launched before the fill was asked for, as these may still read what was in the pages.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from pagerunner.errors import ConfigError, MissingAdapterError, PagerunnerError, described
from pagerunner.lora.adapter import Targets, read_adapter
from pagerunner.lora.blocks import AdapterTable, MakeBuffer, Packed
from pagerunner.lora.readers import Readers
from pagerunner.types.checks import show
from pagerunner.types.lora import AdapterEnd, AdapterFill

logger = logging.getLogger(__name__)
MOST_SAID = 2_000
"""Characters of an error."""


class AdapterLoader:
    """The adapters of one worker. What was read is kept in host memory until it is to be forgotten. Results go to `tell`, and come by `ended` else.

    Reads end on threads of their own, so one may find a copy that the core is giving up. Its end tells the core of the copy, which must be there then.
    Hence a copy goes when the core has heard of all reads that have found it.
    """

    def __init__(
        self, targets: Targets, table: AdapterTable, make_buffer: MakeBuffer, set_threads: Callable[[int], object]
    ) -> None:
        """`set_threads` says how many threads the calling thread's operators take."""
        self._targets, self.table = targets, table
        self._make_buffer, self._set_threads = make_buffer, set_threads
        self._kept: dict[str, Packed] = {}
        self._told: Counter[str] = Counter()  # reads that have found a copy, since it was last to be forgotten
        self._seen: Counter[str] = Counter()  # those of them that `ended` has given
        self._lock = threading.Lock()  # of a copy and what was told of it
        self._ends: queue.SimpleQueue[AdapterEnd] = queue.SimpleQueue()
        self.tell: Callable[[AdapterEnd], None] = self._ends.put
        self._under_way = 0
        self._last: Future[None] | None = None
        self._readers = Readers()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="pagerunner-adapter-copies")
        device = table.blocks.pool.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, number: int, path: str) -> None:
        """Read a directory, and keep what it holds."""
        self._under_way += 1
        try:
            self._readers.begin(path, lambda: self._guarded(number, lambda: self._read(number, path)))
        except ConfigError as error:
            self.tell(AdapterEnd(number, error=str(error)))

    def fill(self, fill: AdapterFill) -> None:
        """Copy an adapter, whose copy is kept, to pages and a slot that no step uses which is launched from now on."""
        self._under_way += 1
        event: torch.cuda.Event | None = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._stream.device))
        packed = self._kept[fill.digest]
        self._last = self._copier.submit(self._guarded, fill.number, lambda: self._copy(fill, packed, event))

    def forget(self, digest: str, seen: int | None = None) -> None:
        """Give up the copy in host memory, unless a read has found it of which the core is still to hear. It has heard of `seen` since the last call, or of what `ended` has given."""
        with self._lock:
            self._told[digest] -= self._seen.pop(digest, 0) if seen is None else seen
            if not self._told[digest]:
                del self._told[digest]
                self._kept.pop(digest, None)

    def ended(self, seconds: float) -> list[AdapterEnd]:
        """What has ended since the last call. With nothing, wait for up to so many seconds."""
        found: list[AdapterEnd] = []
        while self._under_way:
            try:
                found.append(self._ends.get(timeout=0 if found else seconds) if seconds else self._ends.get_nowait())
            except queue.Empty:
                break
            self._under_way -= 1
        self._seen.update(end.digest for end in found if end.digest)
        return found

    def drain(self) -> None:
        """Wait for the fills that were asked for."""
        self._copier.submit(bool).result()  # behind them

    def lose(self) -> None:
        """Wait for the copies that are under way, and forget what is on the device."""
        self.drain()
        self.table.clear()

    def close(self) -> None:
        """End the threads. Those whose directories don't answer aren't waited for."""
        self._readers.close()
        self._copier.shutdown(wait=True, cancel_futures=True)

    @property
    def idle(self) -> bool:
        """Whether nothing is read or copied."""
        return (self._last is None or self._last.done()) and self._readers.idle

    def _guarded(self, number: int, work: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():
                work()
        except PagerunnerError as error:
            self.tell(AdapterEnd(number, error=_shown(error), missing=isinstance(error, MissingAdapterError)))
        except Exception as error:  # whatever it is, it ends the requests that want this adapter
            logger.exception("An adapter can't be loaded.")
            self.tell(AdapterEnd(number, error=f"The adapter can't be loaded: {_shown(described(error))}."))

    def _read(self, number: int, path: str) -> None:
        torch.get_num_threads()  # else this thread's first operator sets the usual number again
        self._set_threads(1)  # most operators have 200 KB: with 32 threads each, readers wait for one another
        table = self.table
        path = os.path.expanduser(path)
        check_directory(path)
        adapter = read_adapter(Path(path), self._targets, table.dtype, table.max_rank)
        if (packed := self._kept.get(adapter.digest)) is None:
            packed = table.products.pack(adapter, table.max_rank, table.dtype, table.page, self._make_buffer)
        with self._lock:
            self._kept[adapter.digest] = packed  # it may have been given up meanwhile
            self._told[adapter.digest] += 1
        self.tell(
            AdapterEnd(number, adapter.digest, adapter.rank, separate=adapter.separate, num_pages=len(packed.pages))
        )

    def _copy(self, fill: AdapterFill, packed: Packed, event: torch.cuda.Event | None) -> None:
        given = fill.slot, packed, fill.offsets, fill.missing
        if self._stream is None or event is None:
            self.table.fill(*given)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(event)
                self.table.fill(*given)
            self._stream.synchronize()
        self.tell(AdapterEnd(fill.number))


def _shown(said: object) -> str:
    """A sentence with words of a file, which may be of any length and hold halves of characters, which no message can carry."""
    text = str(said).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}..."


def check_directory(path: str) -> None:
    """Raise MissingAdapterError for what is no directory, or can't be looked into."""
    why = "is no directory"
    try:
        if Path(path).is_dir():
            os.scandir(path).close()
            return
    except (OSError, ValueError) as error:  # a ValueError of a text with a zero character
        why = f"can't be read: {error.strerror if isinstance(error, OSError) else error}"
    raise MissingAdapterError(f"lora_path {show(path)} {why} on the engine's machine.")
