"""Adapters behind one frontend: loads that meet, and several engines of which one fails. Engines are stand-ins, which answer when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagerunner.engine.frontend.adapters import EngineAdapters
from pagerunner.engine.frontend.replicas import Replica
from pagerunner.errors import ConfigError, InvalidRequestError
from pagerunner.types.lora import AdapterInfo, LoRARequest


class Engine:
    """Reads what `disk` holds when a load begins, and answers when `gate` is open."""

    def __init__(self, disk: dict[str, str], number: int = 0) -> None:
        self.client = SimpleNamespace(death=None, who=f"The process of engine {number}")
        self.disk, self.adapters, self.reads = disk, dict[str, AdapterInfo](), list[str]()
        self.gate = asyncio.Event()
        self.gate.set()
        self.read: dict[str, AdapterInfo] = {}

    async def read_adapter(self, request: LoRARequest) -> str:
        name, found = request.lora_name, self.disk.get(request.lora_path)
        self.reads.append(request.lora_path)
        if name in self.adapters and not request.load_inplace:
            raise InvalidRequestError(f"The adapter {name} is loaded already.", "lora_name")
        if name in self.read:
            raise InvalidRequestError(f"The adapter {name} is being loaded.", "lora_name")
        await self.gate.wait()
        if found is None:
            raise ConfigError(f"{request.lora_path} has no adapter_config.json.")
        self.read[name] = AdapterInfo(name, request.lora_path, found, 4)
        return found

    async def name_adapter(self, name: str, *, drop: bool = False) -> None:
        info = self.read.pop(name)
        if not drop:
            self.adapters[name] = info

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]


async def whole(change: Coroutine[Any, Any, Any]) -> None:
    await asyncio.shield(asyncio.ensure_future(change))


def adapters_of(*engines: Engine) -> EngineAdapters:
    return EngineAdapters(cast(list[Replica], list(engines)), whole)


SQL = LoRARequest("sql", 1, "/sql")


def test_requests_that_come_together_wait_for_one_load() -> None:
    async def run() -> None:
        engine = Engine({"/sql": "v0"})
        adapters = adapters_of(engine)
        engine.gate.clear()
        first = [asyncio.ensure_future(adapters.named(SQL)) for _ in range(5)]
        other = asyncio.ensure_future(adapters.named(LoRARequest("sql", 1, "/law")))
        await asyncio.sleep(0)
        first[0].cancel()  # whoever began it may go
        engine.gate.set()
        assert await asyncio.gather(*first[1:]) == ["sql"] * 4 and engine.reads == ["/sql"]
        with pytest.raises(
            InvalidRequestError, match="sql.*was loaded from /sql, and lora_path is '/law'.*load_inplace"
        ):
            await other
        assert await adapters.named(SQL) == "sql" and await adapters.named(LoRARequest("sql")) == "sql"
        for same in ("/sql/", "/./sql//", Path("/sql")):
            assert await adapters.named(LoRARequest("sql", 1, same)) == "sql"  # type: ignore[arg-type]  # programs give paths
        for wrong in (3, b"/sql", None):
            with pytest.raises(InvalidRequestError, match="lora_path must be a text"):
                LoRARequest("sql", 1, wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="was loaded from /sql"):
            await adapters.named(LoRARequest("sql", 1, "/law"))
        assert engine.reads == ["/sql"]

    asyncio.run(run())


def test_a_load_that_fails_fails_for_all_that_wait_for_it() -> None:
    async def run() -> None:
        engine = Engine({"/law": "v0"})
        adapters = adapters_of(engine)
        engine.gate.clear()
        asked = [adapters.named(one) for one in (SQL, SQL, LoRARequest("sql", 1, "/law"))]
        found = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0)
        engine.gate.set()
        first, second, third = await found
        assert isinstance(first, ConfigError) and isinstance(second, ConfigError)
        assert third == "sql" and engine.reads == ["/sql", "/law"], "the name was free again"

    asyncio.run(run())


def test_loads_in_place_that_come_together_share_one_that_begins_later() -> None:
    """The one under way may have read before the trainer wrote."""

    async def run() -> None:
        disk = {"/sql": "v0", "/law": "w"}
        engine = Engine(disk)
        adapters = adapters_of(engine)
        now = LoRARequest("sql", 1, "/sql", load_inplace=True)
        engine.gate.clear()
        first = asyncio.ensure_future(adapters.named(now))
        while not engine.reads:
            await asyncio.sleep(0)
        disk["/sql"] = "v1"
        others = [asyncio.ensure_future(adapters.named(now)) for _ in range(20)]
        await asyncio.sleep(0)
        engine.gate.set()
        await asyncio.gather(first, *others)
        assert engine.reads == ["/sql"] * 2 and engine.adapters["sql"].digest == "v1"
        both = [adapters.named(LoRARequest("sql", 1, path, load_inplace=True)) for path in ("/sql", "/law")]
        assert await asyncio.gather(*both) == ["sql"] * 2, "two directories take turns"

    asyncio.run(run())


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("content", [None, "w"])
def test_all_engines_have_a_name_or_none(bad: int, content: str | None) -> None:
    """One engine can't read the directory, or finds other files there. The name stands for what it stood for, or for nothing."""

    async def run() -> None:
        engines = [Engine({"/sql": "v0"}, number) for number in range(3)]
        adapters = adapters_of(*engines)
        engines[bad].disk = {} if content is None else {"/sql": content}
        said = "has no adapter_config" if content is None else "different contents in /sql"
        with pytest.raises(ConfigError, match=said):
            await adapters.load(SQL)
        assert not adapters.infos and not any(one.adapters or one.read for one in engines)
        engines[bad].disk = {"/sql": "v0"}
        await adapters.load(SQL)
        for one in engines:
            one.disk = {"/sql": "v1"}
        engines[bad].disk = {} if content is None else {"/sql": content}
        with pytest.raises(ConfigError, match=said):
            await adapters.load(LoRARequest("sql", 1, "/sql", load_inplace=True))
        assert [one.adapters["sql"].digest for one in engines] == ["v0"] * 3 and not any(one.read for one in engines)

    asyncio.run(run())


def test_two_frontends_that_load_one_name_agree() -> None:
    """One of them is refused by all engines, whichever comes first."""

    async def run() -> None:
        engines = [Engine({"/sql": "v0", "/law": "w"}, number) for number in range(2)]
        one, other = adapters_of(*engines), adapters_of(*engines)
        found = await asyncio.gather(one.load(SQL), other.load(LoRARequest("sql", 1, "/law")), return_exceptions=True)
        assert sum(isinstance(error, InvalidRequestError) for error in found) == 1
        assert len({engine.adapters["sql"].digest for engine in engines}) == 1

    asyncio.run(run())


def test_a_request_does_not_go_over_all_names_of_several_engines() -> None:
    class Unlisted(dict[str, AdapterInfo]):
        def items(self) -> Any:
            raise AssertionError("of a thousand names that takes 1 ms, in which nobody else is served")

    async def run() -> None:
        engines = [Engine({"/sql": "v0"}, number) for number in range(2)]
        adapters = adapters_of(*engines)
        await adapters.load(SQL)
        for one in engines:
            one.adapters = Unlisted(one.adapters)
        assert await adapters.named(LoRARequest("sql")) == "sql" and adapters.number("sql") == 1
        engines[1].adapters.clear()
        assert adapters.get("sql") is None

    asyncio.run(run())
