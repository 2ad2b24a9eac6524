"""The sleep state machine: levels, tags, idempotence, failure."""

from __future__ import annotations

import pytest

from pagerunner.errors import ConfigError
from pagerunner.runner.arena import CpuArena
from pagerunner.runner.sleep import Sleeper


class _Reload:
    def __init__(self) -> None:
        self.calls = 0
        self.fails = False

    def __call__(self) -> None:
        self.calls += 1
        if self.fails:
            raise OSError("the checkpoint is gone")


@pytest.fixture
def parts() -> tuple[CpuArena, _Reload, Sleeper]:
    arena = CpuArena()
    arena.reserve("weights", 128)
    arena.reserve("kv", 256)
    reload = _Reload()
    return arena, reload, Sleeper(arena, reload)


@pytest.mark.parametrize(
    ("level", "mapped"),
    [(0, {"weights": 128, "kv": 256}), (1, {"weights": 128, "kv": 0}), (2, {"weights": 0, "kv": 0})],
)
def test_levels_free_what_they_say(
    parts: tuple[CpuArena, _Reload, Sleeper], level: int, mapped: dict[str, int]
) -> None:
    arena, reload, sleeper = parts
    sleeper.sleep(level)
    assert (sleeper.state, sleeper.level, arena.mapped_bytes()) == ("parked", level, mapped)
    sleeper.wake_up()
    assert (sleeper.state, sleeper.level, arena.mapped_bytes()) == ("running", None, {"weights": 128, "kv": 256})
    assert reload.calls == (1 if level == 2 else 0)


def test_tags_wake_one_region_at_a_time(parts: tuple[CpuArena, _Reload, Sleeper]) -> None:
    arena, reload, sleeper = parts
    sleeper.sleep(2)
    sleeper.wake_up(["weights"])
    assert sleeper.state == "parked"
    assert arena.mapped_bytes() == {"weights": 128, "kv": 0}
    sleeper.wake_up(["kv_cache"])
    assert sleeper.state == "running"
    assert reload.calls == 1


def test_calls_are_idempotent_and_deeper_levels_free_more(parts: tuple[CpuArena, _Reload, Sleeper]) -> None:
    arena, _, sleeper = parts
    sleeper.wake_up()
    sleeper.sleep(1)
    sleeper.sleep(1)
    sleeper.sleep(2)
    sleeper.sleep(1)
    assert sleeper.level == 2
    assert arena.mapped_bytes() == {"weights": 0, "kv": 0}


def test_a_failed_wake_can_be_tried_again(parts: tuple[CpuArena, _Reload, Sleeper]) -> None:
    _, reload, sleeper = parts
    sleeper.sleep(2)
    reload.fails = True
    with pytest.raises(OSError, match="gone"):
        sleeper.wake_up()
    assert sleeper.state == "failed"
    reload.fails = False
    sleeper.wake_up()
    assert sleeper.state == "running"
    assert reload.calls == 2


def test_bad_levels_and_tags_are_named(parts: tuple[CpuArena, _Reload, Sleeper]) -> None:
    _, _, sleeper = parts
    with pytest.raises(ConfigError, match="3"):
        sleeper.sleep(3)
    with pytest.raises(ConfigError, match="'gpu'"):
        sleeper.wake_up(["gpu"])
    assert sleeper.state == "running"
