"""The core's side of adapters: what is read and brought to the device, and what has come of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from pagerunner.errors import ConfigError, InvalidRequestError, MissingAdapterError
from pagerunner.sched.adapters import Adapters
from pagerunner.types.checks import show
from pagerunner.types.lora import AdapterEnd, AdapterFill, AdapterInfo, LoRARequest

IN_VAIN = -1
"""The number of an end that is nobody's: it tells of a copy in host memory that some ranks have, and others couldn't read."""
NO_LORA = "This engine serves no adapters; start it with enable_lora=True (--enable-lora)."


class Loader(Protocol):
    """What reads adapters, and brings them to the device, on threads of its own."""

    def read(self, number: int, path: str) -> None:
        """Read a directory, and keep what it holds in host memory."""

    def fill(self, fill: AdapterFill) -> None:
        """Copy an adapter, which is kept in host memory, to pages and a slot that no step uses which is launched from now on."""

    def forget(self, digest: str) -> None:
        """Give up the copy in host memory."""

    def drain(self) -> None:
        """Have all steps that are launched from now on wait for the fills that were asked for before."""

    def ended(self, seconds: float) -> list[AdapterEnd]:
        """What has ended since the last call. With nothing, wait for up to so many seconds."""


class AdapterWork:
    """Loads that users have asked for, and what the scheduler wants to be read or filled. Host memory keeps the last `most` that were used, and those that
    unfinished sequences have and no name stands for any more."""

    def __init__(self, books: Adapters, loader: Loader, most: int) -> None:
        self.books, self._loader, self._most = books, loader, most
        self._copies: OrderedDict[str, None] = OrderedDict()  # digests in host memory; the one used last stands last
        self._forgetting = ""  # the one that is being given up
        books.copies = self._copies
        self._loads: dict[int, LoRARequest] = {}
        self._named_later: set[int] = set()
        self._read: dict[str, AdapterInfo] = {}  # by their names to be
        self.loaded: dict[int, AdapterInfo | ConfigError] = {}
        """By the numbers of loads, what has ended and was taken by nobody yet."""
        self.version = 0
        """Grows whenever a name stands for something else."""

    def begin(self, request: LoRARequest, *, named: bool = True) -> int:
        """Begin to load an adapter; the number of the load. What was loaded has the name when the load has ended, or else when it is given by `name`.

        Raises InvalidRequestError.
        """
        self.check(request)
        number = self.books.number()
        self._loads[number] = request
        if not named:
            self._named_later.add(number)
        self._loader.read(number, request.lora_path)
        return number

    def check(self, request: LoRARequest, before: Sequence[LoRARequest] = ()) -> None:
        """Raise InvalidRequestError if the load can't begin, after those `before`."""
        name = request.lora_name
        if not request.lora_path:
            raise InvalidRequestError("lora_path must be the directory of an adapter, got nothing.", "lora_path")
        if name in self.books.names and not request.load_inplace:
            raise InvalidRequestError(
                f"The adapter {show(name)} is loaded already; load_inplace=true puts what the directory holds now in its place.",
                "lora_name",
            )
        if name in self._read or any(one.lora_name == name for one in (*self._loads.values(), *before)):
            raise InvalidRequestError(f"The adapter {show(name)} is being loaded.", "lora_name")

    def under_way(self, request: LoRARequest) -> int | None:
        """The number of a load of the same directory by the same name that hasn't ended, unless the directory is to be read again."""
        same = (n for n, one in self._loads.items() if one == request and one.lora_path == request.lora_path)
        return None if request.load_inplace else next(same, None)

    def name(self, name: str) -> None:
        """Give a name to what was read for it. Raises InvalidRequestError if nothing was."""
        if (info := self._read.pop(name, None)) is None:
            raise InvalidRequestError(f"Nothing was read for the adapter {show(name)}.", "lora_name")
        self.books.names[name] = info
        self.version += 1

    def drop(self, name: str) -> None:
        """Forget what was read for a name, if anything was. What it stands for stays."""
        self._read.pop(name, None)

    def remove(self, name: str) -> None:
        """Forget a name. Requests that have its adapter go on. Raises InvalidRequestError."""
        self.books.of(name)
        del self.books.names[name]
        self.version += 1

    def fill(self) -> None:
        """Begin the reads that the scheduler wants, and its fills behind the steps that were launched."""
        for number, path in self.books.take_reads():
            self._loader.read(number, path)
        for fill in self.books.take_fills():
            if fill.digest in self._copies:
                self._copies.move_to_end(fill.digest)
            self._loader.fill(fill)

    def _keep(self, digest: str) -> None:
        self._copies[digest] = None
        self._copies.move_to_end(digest)

    def forget_some(self) -> None:
        """Give up the copies that were used longest ago, but for those that slots may be filled from, of which there are no more than `most`. Beside these there are those that a directory may not have any more: what a name stands for
        that is being loaded again, and what it stood for before, as long as sequences have that.

        Those of running sequences, which may lose their pages, go last, and so does the one used last.
        """
        if len(self._copies) <= self._most:
            return
        names = self.books.names
        loading = {one.lora_name for one in self._loads.values()} | self._read.keys()
        needed = {names[name].digest for name in loading if name in names} | self.books.without_name()
        others = [digest for digest in self._copies if digest not in needed]
        to_fill = self.books.to_fill()
        last, running = next(reversed(self._copies)), self.books.in_use()
        spare = [digest for digest in others if digest not in to_fill]
        spare.sort(key=lambda digest: digest == last or digest in running)
        for digest in spare[: max(len(others) - self._most, 0)]:
            self._forgetting = digest
            self._loader.forget(digest)
            del self._copies[digest]
            self._forgetting = ""

    def poll(self, seconds: float) -> None:
        """Take what has ended; with nothing, wait for up to so many seconds."""
        for end in self._loader.ended(seconds):
            if (request := self._loads.pop(end.number, None)) is not None:
                self._take(request, end)
            else:
                self.books.ended(end)  # nobody waits for what was begun before a sleep
            if end.digest and end.number != IN_VAIN:
                self._keep(end.digest)
            elif end.digest and end.digest not in self._copies:
                self._loader.forget(end.digest)
        self.forget_some()

    def _take(self, request: LoRARequest, end: AdapterEnd) -> None:
        later = end.number in self._named_later
        self._named_later.discard(end.number)
        error = end.error
        if not error and request.is_3d_lora_weight and end.separate:
            error = f"{request.lora_path}: is_3d_lora_weight=True is for tensors of all experts together, and here experts have tensors of their own."
        if error:
            self.loaded[end.number] = (MissingAdapterError if end.missing else ConfigError)(error)
            return
        base = request.base_model_name or ""
        info = AdapterInfo(
            request.lora_name, request.lora_path, end.digest, end.rank, base, request.lora_int_id, end.num_pages
        )
        if (refusal := self.books.manager.refusal(1, info)) is not None:
            self.loaded[end.number] = ConfigError(f"{request.lora_path}: a request with this adapter {refusal}")
            return
        self.loaded[end.number] = self._read[info.name] = info
        if not later:
            self.name(info.name)

    def restart(self) -> None:
        """An interrupt may have lost ends of loads: what is being read gets no name any more. No step that is launched from now on runs beside a fill of before."""
        for one in (self._loads, self._named_later, self._read, self.loaded):
            one.clear()
        self._loader.forget(self._forgetting)
        self._copies.pop(self._forgetting, None)
        self._loader.drain()

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._loads) or self.books.busy

    def infos(self) -> Sequence[AdapterInfo]:
        """All names, and what they stand for."""
        return list(self.books.names.values())
