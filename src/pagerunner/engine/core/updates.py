"""The core's side of weight updates: their order, and that no step runs with weights of which some are new and some aren't."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from pagerunner import limits
from pagerunner.engine.core.executors.base import Executor
from pagerunner.errors import EngineSleepingError, InvalidRequestError
from pagerunner.types.weights import (
    AbortUpdate,
    FinishUpdate,
    InitTransfer,
    ReceiveWeights,
    StartUpdate,
    UpdateWeights,
    WeightChange,
)

logger = logging.getLogger(__name__)


class WeightUpdates:
    """Whether an update is under way, and whether the weights are those of one model."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._open = self._begun = self._updated = False
        self._heard_at = 0.0
        self.fault = ""
        """Why the weights are half new, and what to do; "" if they aren't."""

    @property
    def held(self) -> str:
        """Why no step may run; "" if steps may."""
        open_ = "The weights are being updated; finish_weight_update lets the engine go on." if self._open else ""
        return self.fault or open_

    def change(self, change: WeightChange) -> None:
        """Do a part of an update.

        Raises:
            InvalidRequestError: it comes out of order, or it names what isn't the model's.
            Others: the trainer is gone, or the memory doesn't suffice.

        An error ends the update, and the engine leaves the trainer. If tensors had come, no step runs until all weights have been sent
        again, or read from the checkpoint.
        """
        match change:
            case AbortUpdate(reason):
                self._end(reason)
                return
            case InitTransfer():
                self._end("init_weight_transfer_engine came before finish_weight_update.")
            case StartUpdate():  # also instead of an update that nobody has finished
                change = msgspec.structs.replace(change, whole=bool(self.fault) or self._begun)
            case _ if not self._open:
                raise InvalidRequestError(
                    self.fault or "No update of the weights has been started; call start_weight_update first."
                )
        try:
            self._executor.change_weights(change)
            if isinstance(change, UpdateWeights):
                self._begun = True
                self._executor.change_weights(ReceiveWeights())
        except BaseException as error:
            if self._open or isinstance(change, InitTransfer):
                self._end(str(error) or type(error).__name__)
            raise
        self._heard_at = time.monotonic()
        if isinstance(change, StartUpdate):
            self._open, self._begun, self.fault = True, change.whole, ""
        elif isinstance(change, FinishUpdate):
            self._open, self._updated, self._begun = False, self._updated or self._begun, False

    def _end(self, reason: str) -> None:
        """End the update that is open, if one is, and leave the trainer, so that it needn't wait."""
        if self._open:
            self._open = False
            if self._begun:
                self.fault = (
                    f"The weights are half new, as an update of them has failed: {reason} Send all of them again "
                    "(start_weight_update to finish_weight_update), or read the checkpoint again (sleep with level 2, and wake_up)."
                )
            state = (
                self.fault
                or f"An update of the weights has ended before its first tensor: {reason} The engine goes on."
            )
            logger.warning("%s", state)
        self._executor.change_weights(AbortUpdate(reason))

    @property
    def seconds_left(self) -> float | None:
        """How long an update may still wait for its trainer's next call; None if none is open."""
        return max(self._heard_at + limits.TRANSFER_SECONDS - time.monotonic(), 0.0) if self._open else None

    def end_late(self) -> None:
        """End the update that is open if its trainer hasn't called for too long."""
        if self.seconds_left == 0.0:
            limit = f"{limits.TRANSFER_SECONDS:g} seconds {limits.knob('TRANSFER_SECONDS')}"
            self._end(f"its trainer has made no call for {limit}.")

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
            self.fault, self._updated, self._begun = "", False, False

    def check_whole(self) -> None:
        """Raise EngineSleepingError after an update that has failed."""
        if self.fault:
            raise EngineSleepingError(self.held)
