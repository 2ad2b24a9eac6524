"""Brings adapters from their directories to host memory, and from there to the device, beside the steps.

Some threads read files (`lora/readers.py`), and another one copies. So a copy of 90 MB, which takes 2 ms, never waits for a directory, and nor does sleep:
what is read afterwards is kept, but comes to no slot. On a CUDA device copies have a stream of their own. It waits for the steps that were launched before the fill was asked for, as these may still read what was in the slot.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from pagerunner.errors import ConfigError, MissingAdapterError, PagerunnerError, described
from pagerunner.lora.adapter import Adapter, Targets, read_adapter
from pagerunner.lora.readers import Readers
from pagerunner.lora.region import MakeBuffer, Packed, Region, plain_buffer
from pagerunner.types.checks import show
from pagerunner.types.lora import AdapterEnd, AdapterFill

logger = logging.getLogger(__name__)
MOST_SAID = 2_000
"""Characters of an error."""


class AdapterLoader:
    """The adapters of one worker. What was read is kept in host memory until it is to be forgotten. Results go to `tell`, and come by `ended` else."""

    def __init__(
        self,
        targets: Targets,
        region: Region,
        dtype: torch.dtype,
        make_buffer: MakeBuffer = plain_buffer,
    ) -> None:
        self._targets, self.region, self._dtype = targets, region, dtype
        self._make_buffer = make_buffer
        self._kept: dict[str, Packed] = {}
        self._ends: queue.SimpleQueue[AdapterEnd] = queue.SimpleQueue()
        self.tell: Callable[[AdapterEnd], None] = self._ends.put
        self._under_way = 0
        self._lock = threading.Lock()
        self._latest: dict[int, int] = {}  # by slot, the number of its last fill
        self._copies: set[Future[None]] = set()
        self._readers = Readers()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="pagerunner-adapter-copies")
        device = region.blocks.pool.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, number: int, path: str) -> None:
        """Read a directory, and keep what it holds."""
        self._under_way += 1
        self._begin(number, path, lambda: self._read(number, path))

    def fill(self, fill: AdapterFill) -> None:
        """Bring an adapter to a slot that no step uses which is launched from now on."""
        self._under_way += 1
        self._latest[fill.slot] = fill.number
        event: torch.cuda.Event | None = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._stream.device))
        if (packed := self._kept.get(fill.digest)) is not None:
            self._begin_copy(fill, packed, event)
        else:
            self._begin(fill.number, fill.path, lambda: self._read_again(fill, event))

    def forget(self, digest: str) -> None:
        """Give up the copy in host memory."""
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
        return found

    def lose(self) -> None:
        """Wait for the copies that are under way, and forget what is on the device."""
        with self._lock:
            self._latest.clear()
        while self._copies:
            wait(list(self._copies))
        self.region.clear()

    def close(self) -> None:
        """End the threads. Those whose directories don't answer aren't waited for."""
        self._readers.close()
        self._copier.shutdown(wait=True, cancel_futures=True)

    @property
    def idle(self) -> bool:
        """Whether nothing is read or copied."""
        return not self._copies and self._readers.idle

    def _begin(self, number: int, path: str, read: Callable[[], None]) -> None:
        try:
            self._readers.begin(path, lambda: self._guarded(number, read))
        except ConfigError as error:
            self.tell(AdapterEnd(number, error=str(error)))

    def _begin_copy(self, fill: AdapterFill, packed: Packed, event: torch.cuda.Event | None) -> None:
        copy = self._copier.submit(self._guarded, fill.number, lambda: self._copy(fill, packed, event))
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)

    def _guarded(self, number: int, work: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():
                work()
        except PagerunnerError as error:
            self.tell(AdapterEnd(number, error=_shown(error), missing=isinstance(error, MissingAdapterError)))
        except Exception as error:  # whatever it is, it ends the requests that want this adapter
            logger.exception("An adapter can't be loaded.")
            self.tell(AdapterEnd(number, error=f"The adapter can't be loaded: {_shown(described(error))}."))

    def _keep(self, path: str, wanted: str = "") -> tuple[Adapter, Packed]:
        """What is in a directory, which must have this digest unless that is ""."""
        region = self.region
        check_directory(path)
        adapter = read_adapter(Path(path), self._targets, self._dtype, region.max_rank)
        if wanted and adapter.digest != wanted:
            raise ConfigError(
                f"The adapter in {path} has changed since it was loaded; load it again (load_inplace=true). "
                "Of those that are on no slot of the device, host memory keeps max_cpu_loras."
            )
        packed = self._kept.get(adapter.digest)
        if packed is None:
            packed = region.products.pack(adapter, region.max_rank, self._dtype, self._make_buffer)
            self._kept[adapter.digest] = packed
        return adapter, packed

    def _read(self, number: int, path: str) -> None:
        adapter, _ = self._keep(path)
        self.tell(AdapterEnd(number, adapter.digest, adapter.rank, adapter.base, separate=adapter.separate))

    def _read_again(self, fill: AdapterFill, event: torch.cuda.Event | None) -> None:
        _, packed = self._keep(fill.path, fill.digest)
        with self._lock:
            if self._latest.get(fill.slot) == fill.number:
                self._begin_copy(fill, packed, event)
                return
        self.tell(AdapterEnd(fill.number, fill.digest))  # the slot may be another's by now

    def _copy(self, fill: AdapterFill, packed: Packed, event: torch.cuda.Event | None) -> None:
        if self._stream is None or event is None:
            self.region.fill(fill.slot, packed)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(event)
                self.region.fill(fill.slot, packed)
            self._stream.synchronize()
        self.tell(AdapterEnd(fill.number, fill.digest, num_bytes=packed.elements.nbytes))


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
