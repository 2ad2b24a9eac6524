"""Sleep and wake: give memory back without losing the engine.

States: running -> parking -> parked -> waking -> running; an exception while parking or waking leads to `failed`, from
which `wake_up` may be tried again. Calls are idempotent. Level 0 only pauses, level 1 frees the pages and keeps the
weights in host memory, level 2 frees both and reads the weights from the checkpoint again on waking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from pagerunner.errors import CapacityError, ConfigError, EngineSleepingError
from pagerunner.memory.units import human_bytes
from pagerunner.ops.device_errors import first_line, out_of_memory
from pagerunner.runner.arena import TAGS, Arena, Tag
from pagerunner.runner.host_copy import HostCopy

SleepState = Literal["running", "parking", "parked", "waking", "failed"]
_TAG_NAMES: dict[str, Tag] = {"weights": "weights", "kv": "kv", "kv_cache": "kv"}
LEVELS = (0, 1, 2)
SMALL_TENSOR = 2**20  # bytes; torch's allocator keeps tensors up to this size in segments of twice as much


def checked_level(level: int) -> int:
    """A level to sleep at, as a plain number. Raises ConfigError for another one than 0, 1 or 2."""
    if level not in LEVELS:
        raise ConfigError(f"sleep level must be 0, 1 or 2, got {level!r}.")
    return int(level)


def parse_tags(tags: Sequence[str] | None) -> tuple[Tag, ...]:
    """Region tags from user names ("weights", "kv_cache" or "kv"); None is all of them. Raises ConfigError."""
    if tags is None:
        return TAGS
    unknown = [tag for tag in tags if tag not in _TAG_NAMES]
    if unknown:
        raise ConfigError(f"wake_up tags must be among weights and kv_cache, got {unknown[0]!r}.")
    return tuple(_TAG_NAMES[tag] for tag in tags)


class WeightsStore:
    """Where the weights are while their region is unmapped. A store that keeps nothing elsewhere has nothing to do but `reload`."""

    frees_at_level_1 = False

    def __init__(self, reload: Callable[[], None]) -> None:
        self._reload = reload

    def keep(self) -> None:
        """Make sure that `restore` can bring the present weights back."""

    def leave(self) -> None:
        """Stop reading the region. It will be unmapped, and later read from the checkpoint instead of restored."""

    def discard(self) -> None:
        """Give back what was kept, once the region is unmapped."""

    def restore(self) -> None:
        """Begin to fill the mapped region with what was kept; `wait` waits for it."""

    def reload(self) -> None:
        """Fill the mapped region from the checkpoint."""
        self._reload()
        self.renew()

    def renew(self) -> None:
        """The region has other weights than before."""

    def wait(self) -> None:
        """Wait until the region is filled."""


class WeightsInPlace(WeightsStore):
    """On a CPU the weights are in host memory anyway: level 1 leaves them where they are."""


class WeightsOnHost(WeightsStore):
    """On a device the weights are kept in a host copy, begun at once and made again whenever they were reloaded."""

    frees_at_level_1 = True

    def __init__(self, reload: Callable[[], None], make_copy: Callable[[], HostCopy]) -> None:
        """`make_copy` makes a copy, not yet begun, of the weights' region."""
        super().__init__(reload)
        self._make_copy = make_copy
        self._copy = make_copy()
        self._copy.start()
        self._left = False

    def keep(self) -> None:
        """See WeightsStore.keep. Waits for a copy that is still being made. Raises CapacityError without host memory."""
        if self._left:
            self.renew()
        self._copy.finish()

    def leave(self) -> None:
        """See WeightsStore.leave. At most one piece is waited for."""
        self._left = True
        self._copy.stop()

    def discard(self) -> None:
        """See WeightsStore.discard. The host memory goes back too."""
        self._copy.drop()

    def restore(self) -> None:
        """See WeightsStore.restore."""
        self._copy.restore()

    def renew(self) -> None:
        """See WeightsStore.renew. The next copy is made beside the stream that fills the region, so that stream is waited for."""
        self._copy.wait()
        self._copy = self._make_copy()
        self._copy.start()
        self._left = False

    def wait(self) -> None:
        """See WeightsStore.wait."""
        self._copy.wait()


class Scratch:
    """Device memory that is neither weights nor pages and that an engine asleep can do without; here nothing is cached."""

    def give_back(self) -> None:
        """Free it."""

    def take_again(self) -> None:
        """Take as much as was freed. Raises CapacityError when it can't be had."""


class TorchCache(Scratch):
    """What torch's allocator keeps for the activations of later steps. Pools of captured graphs are in use and stay.

    Small tensors lie in segments of their own, and larger segments can't serve them. Taken again as one large piece, the cache
    would hold a little more after every sleep.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._small = self._large = 0  # bytes that were given back

    def give_back(self) -> None:
        """See Scratch.give_back."""
        small, large = self._reserved()
        torch.cuda.empty_cache()
        small_left, large_left = self._reserved()
        self._small += small - small_left
        self._large += large - large_left

    def take_again(self) -> None:
        """See Scratch.take_again. If memory is missing, that shows now and not in the middle of a step."""
        sizes = [SMALL_TENSOR] * (self._small // SMALL_TENSOR) + [self._large] * (self._large > 0)
        try:
            taken = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self._device)
            raise CapacityError(
                f"{human_bytes(sum(sizes))} of device memory are wanted for the activations of a step, but "
                f"{human_bytes(free)} of the device's {human_bytes(total)} are free."
            ) from error
        del taken  # into torch's cache
        self._small = self._large = 0

    def _reserved(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._device)
        small, large = (stats.get(f"reserved_bytes.{pool}_pool.current", 0) for pool in ("small", "large"))
        return small, large


class Sleeper:
    """The sleep state machine of one arena."""

    def __init__(self, arena: Arena, weights: WeightsStore, scratch: Scratch | None = None) -> None:
        self._arena = arena
        self._weights = weights
        self._scratch = scratch or Scratch()
        self._asleep: set[Tag] = set()
        self._weights_lost = False
        self.level: int | None = None
        self.state: SleepState = "running"

    def prepare(self, level: int) -> None:
        """Make sure that the weights outlive `sleep(level)`; the engine goes on.

        Raises ConfigError for another level than 0, 1 or 2, CapacityError when the weights can't be kept in host memory.
        """
        if checked_level(level) == 1 and self._weights.frees_at_level_1 and "weights" not in self._asleep:
            self._weights.keep()

    def sleep(self, level: int) -> None:
        """Park at `level`. While parked, a deeper level frees more and a lighter level changes nothing.

        Raises as `prepare`; the engine then goes on as it was.
        """
        self.prepare(level)
        self.state = "parking"
        self.level = level if self.level is None else max(level, self.level)
        try:
            self._park(level)
        except BaseException:
            self.state = "failed"
            raise
        self.state = "parked"

    def _park(self, level: int) -> None:
        losing = level == 2 and not self._weights_lost
        if losing:
            self._weights_lost = True
            self._weights.leave()
        if level >= 1:
            self._unmap("kv")
        if level == 2 or (level == 1 and self._weights.frees_at_level_1):
            self._unmap("weights")
        if level >= 1:
            self._scratch.give_back()
        if losing:
            self._weights.discard()

    def _unmap(self, tag: Tag) -> None:
        self._asleep.add(tag)
        self._arena.unmap(tag)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Map the regions `tags` (all by default) again; the engine runs when none is left asleep.

        Raises CapacityError when another process has taken the memory. Regions that could be woken stay awake, the others asleep.
        """
        wanted = parse_tags(tags)
        if self.state == "running":
            return
        self.state = "waking"
        try:
            self._wake([tag for tag in wanted if tag in self._asleep])
            if not self._asleep:
                self._scratch.take_again()
        except BaseException as error:
            self.state = "failed"
            if not isinstance(error, CapacityError) and not out_of_memory(error):
                raise
            missing = error if isinstance(error, CapacityError) else f"Out of device memory ({first_line(error)})."
            raise CapacityError(f"{missing} The engine stays asleep, and wake_up can be tried again.") from error
        self.state = "parked" if self._asleep else "running"
        if not self._asleep:
            self.level = None

    def begin_update(self) -> None:
        """The weights are about to change. Raises EngineSleepingError while their region is unmapped."""
        if "weights" in self._asleep:
            raise EngineSleepingError('The weights are asleep; wake_up(tags=["weights"]) wakes them.')
        self._weights.leave()
        self._weights.discard()

    def end_update(self) -> None:
        """The weights have changed, and don't any more."""
        self._weights.renew()

    def _wake(self, tags: Sequence[Tag]) -> None:
        """Weights first: while they are copied, the pages are mapped."""
        restoring = False
        if "weights" in tags:
            self._arena.map("weights")
            restoring = not self._weights_lost
            if restoring:
                self._weights.restore()
            else:
                self._weights.reload()
                self._weights_lost = False
                self._asleep.discard("weights")
        try:
            for tag in tags:
                if tag != "weights":
                    self._arena.map(tag)
                    self._asleep.discard(tag)
        finally:
            if restoring:
                self._weights.wait()
                self._asleep.discard("weights")
