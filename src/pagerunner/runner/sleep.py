"""Sleep and wake: give memory back without losing the engine.

States: running -> parking -> parked -> waking -> running; an exception while parking or waking leads to `failed`, from
which `wake_up` may be tried again. Calls are idempotent. Level 0 only pauses, level 1 frees the pages and keeps the
weights in host memory, level 2 frees both and reads the weights from the checkpoint again on waking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pagerunner.errors import ConfigError
from pagerunner.runner.arena import TAGS, Arena, Tag

SleepState = Literal["running", "parking", "parked", "waking", "failed"]
_TAG_NAMES: dict[str, Tag] = {"weights": "weights", "kv": "kv", "kv_cache": "kv"}
LEVELS = (0, 1, 2)


def parse_tags(tags: Sequence[str] | None) -> tuple[Tag, ...]:
    """Region tags from user names ("weights", "kv_cache" or "kv"); None is all of them. Raises ConfigError."""
    if tags is None:
        return TAGS
    unknown = [tag for tag in tags if tag not in _TAG_NAMES]
    if unknown:
        raise ConfigError(f"wake_up tags must be among weights and kv_cache, got {unknown[0]!r}.")
    return tuple(_TAG_NAMES[tag] for tag in tags)


class Sleeper:
    """The sleep state machine of one arena. `reload_weights` fills the weights region from the checkpoint."""

    def __init__(self, arena: Arena, reload_weights: Callable[[], None]) -> None:
        self._arena = arena
        self._reload_weights = reload_weights
        self._asleep: set[Tag] = set()
        self._weights_lost = False
        self.level: int | None = None
        self.state: SleepState = "running"

    def sleep(self, level: int) -> None:
        """Park at `level`. A deeper level while parked frees more; a lighter one changes nothing."""
        if level not in LEVELS:
            raise ConfigError(f"sleep level must be 0, 1 or 2, got {level!r}.")
        self.state = "parking"
        try:
            if level >= 1:
                self._arena.unmap("kv")
                self._asleep.add("kv")
            if level == 2:
                self._arena.unmap("weights")
                self._asleep.add("weights")
                self._weights_lost = True
        except BaseException:
            self.state = "failed"
            raise
        self.level = level if self.level is None else max(level, self.level)
        self.state = "parked"

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Map the regions `tags` (all by default) again; the engine runs when none is left asleep."""
        wanted = parse_tags(tags)
        if self.state == "running":
            return
        self.state = "waking"
        try:
            for tag in wanted:
                if tag in self._asleep:
                    self._arena.map(tag)
                    if tag == "weights" and self._weights_lost:
                        self._reload_weights()
                        self._weights_lost = False
                    self._asleep.discard(tag)
        except BaseException:
            self.state = "failed"
            raise
        self.state = "parked" if self._asleep else "running"
        if not self._asleep:
            self.level = None
