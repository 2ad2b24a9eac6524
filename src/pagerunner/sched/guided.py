"""The sequences that follow a grammar. A sequence stands aside until its next mask is known."""

from __future__ import annotations

import time

from pagerunner.errors import InvalidRequestError
from pagerunner.sched.guide import MakeGuide
from pagerunner.sched.request import Sequence

GRACE_SECONDS = 0.001
"""How long a step waits, in all, for masks of running sequences that are about to be known. Most take a fiftieth of that. A row goes without the drafts whose
masks take longer."""


class GuidedSequences:
    """Sets `Sequence.blocked` of sequences with a guide. No step waits for a guide longer than GRACE_SECONDS."""

    def __init__(self, make_guide: MakeGuide | None) -> None:
        self._make_guide = make_guide
        self._all: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}  # taken out of the waiting line

    def start(self, sequence: Sequence) -> None:
        """Give a new sequence its guide, which begins to compile."""
        if self._make_guide is None:
            raise InvalidRequestError(
                "This engine has no tokenizer, which a grammar needs.", param="structured_outputs"
            )
        sequence.guide = self._make_guide(sequence.request)
        sequence.blocked = True
        self._all[sequence.request_id] = sequence

    def __bool__(self) -> bool:
        return bool(self._all)

    def drop(self, sequence: Sequence) -> None:
        """The sequence has finished."""
        if self._all.pop(sequence.request_id, None) is not None and sequence.guide is not None:
            sequence.guide.close()
        self.held.pop(sequence.request_id, None)

    def close(self) -> None:
        """Close all guides."""
        while self._all:
            _, sequence = self._all.popitem()
            if sequence.guide is not None:
                sequence.guide.close()

    def settled(self) -> list[Sequence]:
        """Sequences that were blocked and whose guide is ready now. The caller unblocks or ends each of them."""
        found = []
        deadline = 0.0
        for sequence in self._all.values():
            guide = sequence.guide
            if guide is None or not sequence.blocked or sequence.pending:
                continue
            if guide.looks_ahead and sequence.grant is not None:
                deadline = deadline or time.monotonic() + GRACE_SECONDS
                guide.wait(max(deadline - time.monotonic(), 0.0), ahead=True)
            if guide.ready:
                found.append(sequence)
        return found

    def wait(self, seconds: float) -> bool:
        """Wait for the guide of any one blocked sequence; False if there is none."""
        for sequence in self._all.values():
            if sequence.guide is not None and sequence.blocked and not sequence.pending:
                sequence.guide.wait(seconds)
                return True
        return False
