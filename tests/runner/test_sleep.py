"""The sleep state machine: levels, tags, idempotence, failure."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from helpers.fake_driver import FakeDriver, FakeHost
from pagerunner.errors import CapacityError, ConfigError, EngineSleepingError
from pagerunner.runner import sleep
from pagerunner.runner.arena import CpuArena
from pagerunner.runner.cuda_arena import CudaArena
from pagerunner.runner.host_copy import HostCopy
from pagerunner.runner.sleep import Sleeper, TorchCache, WeightsInPlace, WeightsOnHost

MIB = 2**20


class _Reload:
    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None

    def __call__(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def parts() -> tuple[CpuArena, _Reload, Sleeper]:
    arena = CpuArena()
    arena.reserve("weights", 128)
    arena.reserve("kv", 256)
    reload = _Reload()
    return arena, reload, Sleeper(arena, WeightsInPlace(reload))


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


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError("the checkpoint is gone"), OSError, "gone"),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTry"),
            CapacityError,
            r"\(CUDA out of memory\)\. The engine stays",
        ),
        (
            torch.AcceleratorError("CUDA error: out of memory\nCompile"),
            CapacityError,
            r"\(CUDA error: out of memory\)\.",
        ),
    ],
)
def test_a_failed_wake_can_be_tried_again(
    parts: tuple[CpuArena, _Reload, Sleeper], error: Exception, kind: type[Exception], said: str
) -> None:
    _, reload, sleeper = parts
    sleeper.sleep(2)
    reload.error = error
    with pytest.raises(kind, match=said):
        sleeper.wake_up()
    assert sleeper.state == "failed"
    reload.error = None
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


class _Parts:
    """A card's arena with weights of 40 pages that sleep keeps on the host."""

    def __init__(self, available: int = 1 << 40) -> None:
        self.driver = FakeDriver(256 * 4096)
        self.host = FakeHost()
        self.arena = CudaArena(self.driver, 8 * 4096)
        self.weights = self.arena.reserve("weights", 40 * 4096)
        self.kv = self.arena.reserve("kv", 100 * 4096, mapped=4096)
        self.arena.grow("kv", 80 * 4096)
        self.values = torch.randint(0, 255, (40 * 4096,), dtype=torch.uint8)
        self.available = available
        self.reloads = 0
        self.weights_arrive_late = False
        self.reload()
        self.reloads = 0
        self.copies: list[HostCopy] = []
        self.scratch = _Scratch()
        self.sleeper = Sleeper(self.arena, WeightsOnHost(self.reload, self.make_copy), self.scratch)

    def reload(self) -> None:
        self.reloads += 1
        if self.weights_arrive_late:
            self.host.begun.append(lambda: self.weights.copy_(self.values))
        else:
            self.weights.copy_(self.values)

    def make_copy(self) -> HostCopy:
        self.copies.append(HostCopy(self.weights, self.host, lambda: self.available, 3 * 4096))
        return self.copies[-1]


class _Scratch:
    def __init__(self) -> None:
        self.given = 0
        self.gone = False

    def give_back(self) -> None:
        self.given += 1

    def take_again(self) -> None:
        if self.gone:
            raise CapacityError("activations don't fit.")
        self.given = 0


class _Allocator:
    """Torch with an allocator like its own on a device of 100 MiB: tensors up to 1 MiB share segments of 2 MiB."""

    uint8, OutOfMemoryError = torch.uint8, torch.OutOfMemoryError

    class _Tensor:
        pass

    def __init__(self) -> None:
        self.cuda = self
        self.others = 0
        self.reserved = {"small": 0, "large": 0}
        self.used = {"small": 0, "large": 0}

    def empty(self, size: int, **_: object) -> object:
        pool = "small" if size <= MIB else "large"
        wanted = self.used[pool] + size
        if wanted > self.reserved[pool]:
            missing = -(-(wanted - self.reserved[pool]) // (2 * MIB)) * 2 * MIB
            if sum(self.reserved.values()) + self.others + missing > 100 * MIB:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self.reserved[pool] += missing
        self.used[pool] = wanted
        tensor = self._Tensor()
        weakref.finalize(tensor, self._freed, pool, size)
        return tensor

    def _freed(self, pool: str, size: int) -> None:
        self.used[pool] -= size

    def empty_cache(self) -> None:
        self.reserved = {pool: -(-size // (2 * MIB)) * 2 * MIB for pool, size in self.used.items()}

    def memory_stats(self, _: object) -> dict[str, int]:
        return {f"reserved_bytes.{pool}_pool.current": size for pool, size in self.reserved.items()}

    def memory_reserved(self, _: object) -> int:
        return sum(self.reserved.values())

    def mem_get_info(self, _: object) -> tuple[int, int]:
        return 100 * MIB - self.others - sum(self.reserved.values()), 100 * MIB


def test_torchs_cache_is_given_back_and_taken_again_and_does_not_grow_by_sleeping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = _Allocator()
    monkeypatch.setattr(sleep, "torch", allocator)
    cache = TorchCache(torch.device("cpu"))
    kept = allocator.empty(MIB)

    def step() -> None:
        tensors = [allocator.empty(size) for size in (MIB // 2, MIB // 2, MIB, MIB, 30 * MIB, 7 * MIB)]
        del tensors

    step()
    awake = dict(allocator.reserved)
    for _ in range(3):
        cache.give_back()
        assert sum(allocator.reserved.values()) == 2 * MIB
        cache.take_again()
        step()
        assert allocator.reserved == awake
    cache.give_back()
    allocator.others = 80 * MIB
    for _ in range(2):
        with pytest.raises(CapacityError, match=r"40.00 MiB .*are wanted for the activations .*18.00 MiB of .* free"):
            cache.take_again()
    allocator.others = 0
    cache.take_again()
    assert allocator.reserved == awake
    del kept


@pytest.mark.parametrize("level", [1, 2])
def test_a_card_frees_everything_and_wakes_with_the_same_weights(level: int) -> None:
    parts = _Parts()
    free = parts.driver.memory()[0]
    parts.sleeper.sleep(level)
    assert (parts.driver.used, parts.scratch.given) == (0, 1)
    parts.sleeper.wake_up()
    assert (parts.driver.memory()[0], parts.scratch.given, parts.sleeper.state) == (free, 0, "running")
    assert torch.equal(parts.weights, parts.values)
    assert parts.reloads == (1 if level == 2 else 0)


def test_the_host_copy_is_made_once_and_given_back_by_level_2() -> None:
    parts = _Parts()
    for _ in range(3):
        parts.sleeper.sleep(1)
        parts.sleeper.wake_up()
    assert len(parts.copies) == 1 and len(parts.host.pinned) == 14
    parts.sleeper.sleep(2)
    for thread in threading.enumerate():
        if thread.name == "pagerunner-host-copy-free":
            thread.join()
    assert not parts.host.pinned
    parts.sleeper.wake_up(["weights"])
    parts.sleeper.sleep(1)
    parts.values.zero_()  # level 1 reads no files
    parts.sleeper.wake_up()
    assert len(parts.copies) == 2 and int(parts.weights.max()) > 0


def test_a_copy_that_nobody_wants_any_more_is_unlocked() -> None:
    parts = _Parts()
    parts.sleeper.sleep(1)
    assert len(parts.host.pinned) == 14
    parts.copies.clear()
    parts.sleeper = None  # type: ignore[assignment]
    gc.collect()
    assert not parts.host.pinned


def test_a_copy_is_not_begun_before_reloaded_weights_are_there() -> None:
    parts = _Parts()
    parts.sleeper.sleep(2)
    parts.weights_arrive_late = True
    parts.sleeper.wake_up()
    parts.copies[-1].finish()
    parts.host.synchronize()
    parts.sleeper.sleep(1)
    parts.sleeper.wake_up()
    assert torch.equal(parts.weights, parts.values)


def test_sleep_waits_for_a_copy_in_the_making_and_level_2_only_for_its_piece() -> None:
    parts = _Parts()
    parts.copies[0].finish()
    gate = parts.host.gate = threading.Event()
    copy = parts.make_copy()
    copy.start()
    assert not copy.complete
    threading.Timer(0.05, gate.set).start()
    copy.drop()
    copy._thread.join()  # type: ignore[union-attr]
    assert not copy.complete, "the rest of the copy is not made"


def test_too_little_host_memory_refuses_level_1_with_the_numbers_and_leaves_the_engine_running() -> None:
    parts = _Parts(available=2 * 2**30 + 100)
    with pytest.raises(CapacityError, match=r"160\.00 KiB are wanted, and 100 B can be had.*level 2"):
        parts.sleeper.sleep(1)
    assert (parts.sleeper.state, parts.driver.used) == ("running", 120 * 4096)
    parts.available = 1 << 40
    parts.sleeper.sleep(1)
    parts.sleeper.wake_up()
    assert torch.equal(parts.weights, parts.values)


def test_a_copy_that_cannot_be_locked_still_serves() -> None:
    parts = _Parts()
    parts.copies[0].finish()
    parts.host.fail_pin = 2
    copy = parts.make_copy()
    copy.finish()
    parts.weights.zero_()
    copy.restore()
    assert torch.equal(parts.weights, parts.values)
    copy.drop()


@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]])
def test_memory_that_is_gone_at_waking_leaves_the_engine_asleep_until_it_is_back(tags: list[str] | None) -> None:
    parts = _Parts()
    parts.sleeper.sleep(1)
    parts.driver.others = parts.driver.total - 30 * 4096
    for _ in range(2):
        with pytest.raises(CapacityError, match=r"120\.00 KiB of the device's .*wake_up can be tried again"):
            parts.sleeper.wake_up(tags)
        assert (parts.sleeper.state, parts.driver.used) == ("failed", 0)
    parts.driver.others = 0
    parts.sleeper.wake_up(tags)
    assert parts.sleeper.state == ("running" if tags is None else "parked")
    parts.sleeper.wake_up()
    assert torch.equal(parts.weights, parts.values)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_may_wake_when_pages_cannot_and_are_not_read_twice(level: int) -> None:
    parts = _Parts()
    parts.sleeper.sleep(level)
    parts.driver.others = parts.driver.total - 50 * 4096
    with pytest.raises(CapacityError, match="for pages"):
        parts.sleeper.wake_up()
    assert parts.arena.mapped_bytes() == {"weights": 40 * 4096, "kv": 0}
    parts.driver.others = 0
    parts.sleeper.wake_up()
    assert parts.reloads == (1 if level == 2 else 0)
    assert torch.equal(parts.weights, parts.values)


def test_activations_that_do_not_fit_are_missed_at_waking() -> None:
    parts = _Parts()
    parts.sleeper.sleep(1)
    parts.scratch.gone = True
    with pytest.raises(CapacityError, match="activations don't fit. The engine stays asleep"):
        parts.sleeper.wake_up()
    assert parts.sleeper.state == "failed"
    parts.scratch.gone = False
    parts.sleeper.wake_up()
    assert parts.sleeper.state == "running"


def test_a_deeper_level_while_asleep_discards_what_was_kept() -> None:
    parts = _Parts()
    parts.sleeper.sleep(1)
    parts.sleeper.sleep(2)
    parts.sleeper.wake_up()
    assert parts.reloads == 1 and torch.equal(parts.weights, parts.values)


@pytest.mark.parametrize("finished", [True, False])
def test_weights_that_have_changed_outlive_level_1_and_are_read_again_after_level_2(finished: bool) -> None:
    parts = _Parts()
    parts.sleeper.begin_update()
    parts.values = parts.values.flip(0).clone()
    parts.weights.copy_(parts.values)
    if finished:  # an update that fails has no end
        parts.sleeper.end_update()
    parts.sleeper.sleep(1)
    with pytest.raises(EngineSleepingError, match="weights are asleep"):
        parts.sleeper.begin_update()
    parts.sleeper.wake_up()
    assert parts.reloads == 0 and torch.equal(parts.weights, parts.values)
    parts.sleeper.sleep(2)
    parts.sleeper.wake_up()
    assert parts.reloads == 1
