"""What a mixture's steps read: which share of a layer's experts, and the time that the bytes really read take at least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pagerunner.engine.startup.mixture import Mixture


class ExpertsRead(msgspec.Struct, frozen=True, kw_only=True):
    """One repetition: experts of a layer, how many of them a step touched on average, bytes of weights that were read, and the seconds
    which these take at the card's bandwidth (None where it isn't known). A step reads an expert's weights once if any token chose it.
    """

    experts: int
    touched: float
    bytes: int
    seconds: float | None = None

    def text(self) -> str:
        """A line for a person."""
        floor = "" if self.seconds is None else f", floor {self.seconds:.4f} s"
        return (
            f"  experts: a step touched {self.touched:.1f} of a layer's {self.experts} ({self.touched / self.experts:.1%}); "
            f"{self.bytes / 1e9:.1f} GB of weights read{floor}"
        )


def experts_read(mixture: Mixture, touched: int, calls: int, bytes_per_second: float | None) -> ExpertsRead:
    """The report for a number of experts touched in so many calls of a layer."""
    read = touched * mixture.expert_bytes + calls // mixture.layers * mixture.other_bytes
    seconds = None if bytes_per_second is None else read / bytes_per_second
    return ExpertsRead(experts=mixture.experts, touched=touched / max(calls, 1), bytes=read, seconds=seconds)
