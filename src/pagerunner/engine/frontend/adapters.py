"""Adapters as a frontend has them: what its engines know by which name, and how more are loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from pagerunner.engine.frontend.replicas import Replica, answers
from pagerunner.types.lora import AdapterInfo, LoRARequest


class EngineAdapters:
    """The adapters of all engines behind one frontend. `whole` runs a change to its end, whatever becomes of its caller."""

    def __init__(
        self, replicas: Sequence[Replica], whole: Callable[[Coroutine[Any, Any, Any]], Awaitable[None]]
    ) -> None:
        self._replicas, self._whole = replicas, whole

    @property
    def infos(self) -> dict[str, AdapterInfo]:
        """What requests may name, by name: what all engines that live know."""
        first, *others = [one for one in self._replicas if one.client.death is None] or self._replicas
        if not others:
            return first.adapters
        return {name: info for name, info in first.adapters.items() if all(name in one.adapters for one in others)}

    def number(self, name: str) -> int:
        """The lora_int_id for an adapter whose user has said none: the one that it has, or the next."""
        infos = self.infos
        known = infos.get(name)
        return max((one.lora_int_id for one in infos.values()), default=0) + 1 if known is None else known.lora_int_id

    async def load(self, request: LoRARequest) -> None:
        """Have all engines read an adapter; requests may name it afterwards. With `load_inplace` the name gets what the directory holds now.

        Raises:
            ConfigError: the directory holds no such adapter, or the engine serves none; the message says what is wrong.
            InvalidRequestError: the name is taken.
        """
        await self._whole(answers(self._replicas, lambda one: one.load_adapter(request)))

    async def unload(self, name: str) -> None:
        """Forget an adapter's name. Requests that have it go on. Raises InvalidRequestError if there is none."""
        await self._whole(answers(self._replicas, lambda one: one.unload_adapter(name)))

    async def named(self, request: LoRARequest | None) -> str:
        """The name of an adapter, which is loaded if it isn't yet; "" for none."""
        if request is None:
            return ""
        if request.load_inplace or (request.lora_path and request.lora_name not in self.infos):
            await self.load(request)
        return request.lora_name
