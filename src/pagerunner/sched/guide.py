"""What the scheduler needs of whoever follows a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pagerunner.types import EngineRequest


class Guide(Protocol):
    """Follows one sequence.

    It works in the background: after `advance` the guide isn't `ready` until the next mask is known. Masks behind drafts come after it, one by one.
    """

    @property
    def ready(self) -> bool:
        """Whether the other properties can be read without waiting; also when compiling took too long."""

    @property
    def masks(self) -> Sequence[bytes | None]:
        """What may come next, and then what may follow each of the drafts that may come, as far as that is known: a bit per token, lowest first; None
        where everything is allowed. Only while `error` is None and not `finished`."""

    @property
    def looks_ahead(self) -> bool:
        """Whether `masks` are still to come."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can follow."""

    @property
    def error(self) -> str | None:
        """Why the grammar can't be followed."""

    def advance(self, token_ids: list[int], drafts: Sequence[int] = ()) -> None:
        """The sequence got these tokens, and its next row may have these drafts. The guide must be ready."""

    def wait(self, seconds: float, *, ahead: bool = False) -> None:
        """Return when the guide is ready, and with `ahead` when it doesn't look ahead any more, or after that time."""

    def close(self) -> None:
        """The sequence has ended, and the guide may stop."""


MakeGuide = Callable[[EngineRequest], Guide]
