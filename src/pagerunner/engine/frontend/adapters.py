"""Adapters as a frontend has them: what its engines know by which name, and how more are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from pagerunner.engine.frontend.replicas import Replica, answers, check_alive
from pagerunner.errors import ConfigError
from pagerunner.types.lora import AdapterInfo, LoRARequest


class _Load(NamedTuple):
    """A load that is under way, and what becomes of it: None, or its error."""

    request: LoRARequest
    ended: asyncio.Future[BaseException | None]


class EngineAdapters:
    """The adapters of all engines behind one frontend. `whole` runs a change to its end, whatever becomes of its caller."""

    def __init__(
        self, replicas: Sequence[Replica], whole: Callable[[Coroutine[Any, Any, Any]], Awaitable[None]]
    ) -> None:
        self._replicas, self._whole = replicas, whole
        self._loads: dict[str, _Load] = {}  # by name
        self._next: dict[tuple[str, str], asyncio.Future[None]] = {}  # loads in place that haven't begun

    @property
    def infos(self) -> dict[str, AdapterInfo]:
        """What requests may name, by name: what all engines that live know. It is made anew for several engines, so `get` is for one name."""
        first, *others = self._living
        if not others:
            return first
        return {name: info for name, info in first.items() if all(name in one for one in others)}

    def get(self, name: str) -> AdapterInfo | None:
        """What requests get by a name, None if they may not name it."""
        found = [infos.get(name) for infos in self._living]
        return found[0] if all(found) else None

    @property
    def _living(self) -> list[dict[str, AdapterInfo]]:
        """What each engine that lives knows; of all engines if none does."""
        return [one.adapters for one in self._replicas if one.client.death is None] or [
            one.adapters for one in self._replicas
        ]

    def number(self, name: str) -> int:
        """The lora_int_id for an adapter whose user has said none: the one that it has, or the next."""
        known = self.get(name)
        if known is not None:
            return known.lora_int_id
        return max((one.lora_int_id for one in self.infos.values()), default=0) + 1

    async def load(self, request: LoRARequest) -> None:
        """Have all engines read an adapter; requests may name it afterwards. With `load_inplace` the name gets what the directory holds now.

        Raises:
            ConfigError: the directory holds no such adapter, or the engine serves none; the message says what is wrong.
            InvalidRequestError: the name is taken, or is being loaded.
        """
        own = _Load(request, asyncio.get_running_loop().create_future())
        self._loads.setdefault(request.lora_name, own)
        await self._whole(self._load(own))

    async def _load(self, load: _Load) -> None:
        request, error = load.request, None
        try:
            await self._of_all(request)
        except BaseException as found:
            error = found
            raise
        finally:
            if self._loads.get(request.lora_name) is load:
                del self._loads[request.lora_name]
            load.ended.set_result(error)

    async def _of_all(self, request: LoRARequest) -> None:
        """All engines read, and only then the name stands for what all of them have: for one content in all of them, or for what it was.

        The first engine begins before the others. So of two frontends that load the same name one is refused by all.
        """
        name, read = request.lora_name, dict[Replica, str]()

        async def read_by(one: Replica) -> None:
            read[one] = await one.read_adapter(request)

        first, *others = check_alive(self._replicas)
        try:
            await answers([first], read_by)
            if others:
                await answers(others, read_by)
            if len(set(read.values())) > 1:
                raise ConfigError(
                    f"Engines have read different contents in {request.lora_path}: its files were written meanwhile. Load it again when they are there."
                )
        except BaseException:
            living = [one for one in read if one.client.death is None]
            await asyncio.gather(*(one.name_adapter(name, drop=True) for one in living), return_exceptions=True)
            raise
        await answers(list(read), lambda one: one.name_adapter(name))

    async def unload(self, name: str) -> None:
        """Forget an adapter's name. Requests that have it go on. Raises InvalidRequestError if there is none."""
        await self._whole(answers(self._replicas, lambda one: one.unload_adapter(name)))

    async def named(self, request: LoRARequest | None) -> str:
        """The name of an adapter, which is loaded if it isn't yet; "" for none. Requests that come meanwhile wait for the same load."""
        if request is None:
            return ""
        if request.load_inplace:
            await self._load_in_place(request)
            return request.lora_name
        while (load := self._loads.get(request.lora_name)) is not None and self.get(request.lora_name) is None:
            error = await asyncio.shield(load.ended)
            if error is not None and load.request.lora_path == request.lora_path:
                raise error
        known = self.get(request.lora_name)
        if known is not None:
            known.check(request)
        elif request.lora_path:
            await self.load(request)
        return request.lora_name

    async def _load_in_place(self, request: LoRARequest) -> None:
        """Load what the directory holds now. A load that is under way may have begun to read before: so requests that come meanwhile wait for another
        one, all for the same."""
        key = (request.lora_name, request.lora_path)
        if key not in self._next:
            self._next[key] = asyncio.ensure_future(self._load_later(request, key))
            # its callers may be gone
            self._next[key].add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._next[key])

    async def _load_later(self, request: LoRARequest, key: tuple[str, str]) -> None:
        while (load := self._loads.get(request.lora_name)) is not None:
            await asyncio.shield(load.ended)
        del self._next[key]
        await self.load(request)
