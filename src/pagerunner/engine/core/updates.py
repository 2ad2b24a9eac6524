"""The core's side of weight updates: their order, and that no step runs with weights of which some are new and some aren't."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from pagerunner.engine.core.executors.base import Executor
from pagerunner.errors import EngineSleepingError, InvalidRequestError
from pagerunner.types.weights import AbortUpdate, FinishUpdate, InitTransfer, StartUpdate, UpdateWeights, WeightChange

logger = logging.getLogger(__name__)


class WeightUpdates:
    """Whether an update is under way, and whether the weights are those of one model."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._open = self._begun = self._updated = False
        self._fault = ""  # why the weights are half new

    @property
    def held(self) -> str:
        """Why no step may run; "" if steps may."""
        if self._fault:
            return (
                f"The weights are half new, as an update of them has failed: {self._fault} Send all of them again "
                "(start_weight_update to finish_weight_update), or read the checkpoint again (sleep with level 2, and wake_up)."
            )
        return "The weights are being updated; finish_weight_update lets the engine go on." if self._open else ""

    def change(self, change: WeightChange) -> None:
        """Do a part of an update.

        Raises:
            InvalidRequestError: it comes out of order; or it names what isn't the model's, before anything has changed, which ends the update.
            Others: the update has failed. Until all weights have been sent again, or read from the checkpoint, no step runs.
        """
        if isinstance(change, AbortUpdate):
            self._end(change.reason, changed=self._begun)
            return
        starts = isinstance(change, InitTransfer | StartUpdate)
        if not (starts or self._open):
            raise InvalidRequestError(
                self.held or "No update of the weights has been started; call start_weight_update first."
            )
        if isinstance(change, StartUpdate):  # also instead of an update that nobody has finished
            change = msgspec.structs.replace(change, whole=bool(self._fault) or self._begun)
        try:
            self._executor.change_weights(change)
        except BaseException as error:
            if not starts:
                changed = self._begun or not isinstance(error, InvalidRequestError)
                self._end(str(error) or type(error).__name__, changed=changed)
            raise
        if isinstance(change, StartUpdate):
            self._open, self._begun = True, change.whole
        elif isinstance(change, UpdateWeights):
            self._begun = True
        elif isinstance(change, FinishUpdate):
            self._open, self._updated, self._begun, self._fault = False, self._updated or self._begun, False, ""

    def _end(self, reason: str, *, changed: bool) -> None:
        """End the update that is open, unless none is. If weights have `changed` they are half new."""
        if self._open and changed:
            self._fault = reason
        self._open = False

    def check_sleep(self, level: int) -> None:
        """Raise EngineSleepingError while an update is under way: the weights must stay where they are."""
        if self._open and level:
            raise EngineSleepingError(self.held)

    def check_wake(self, tags: Sequence[str] | None) -> None:
        """Raise EngineSleepingError for a call that would let steps run while an update is under way. With tags it is about memory only."""
        if self._open and tags is None:
            raise EngineSleepingError(
                f'{self.held} Until then wake_up takes memory back only with tags, such as tags=["kv_cache"].'
            )

    def slept(self, level: int) -> None:
        """The engine sleeps at this level, or has failed to after its weights were dropped."""
        if level == 2:
            if self._updated:
                logger.warning("Sleep level 2 has dropped updated weights; wake_up reads those of the checkpoint.")
            self._fault, self._updated, self._begun = "", False, False

    def check_whole(self) -> None:
        """Raise EngineSleepingError after an update that has failed."""
        if self._fault:
            raise EngineSleepingError(self.held)
