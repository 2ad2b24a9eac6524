"""What decides how long a step takes, and what was measured of that at the start."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagerunner.types.plan import StepPlan


class StepShape(NamedTuple):
    """The size of a step in all that costs time.

    `keys` are the tokens whose keys and values the rows that generate read. `pairs` are those of a prompt's tokens and the tokens each of them sees:
    100 tokens after 1,000 others make 105,000. If `decode`, all rows generate, each with up to `drafts` drafts behind its last token.
    """

    rows: int
    tokens: int
    keys: int
    pairs: int
    drafts: int = 0
    decode: bool = True

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """The size of a plan's step."""
        keys = pairs = tokens = prompts = 0
        most = 1
        for _, start, count, known, _ in plan.rows:
            tokens += count
            if known:
                prompts += 1
                pairs += pairs_of(start, count)
            else:
                keys += start + count
                most = max(most, count)
        return cls(len(plan.rows), tokens, keys, pairs, most - 1, not prompts)


def pairs_of(start: int, count: int) -> int:
    """Pairs of `count` tokens from position `start` on and the tokens that each of them sees."""
    return count * (2 * start + count + 1) // 2


class MeasuredSteps(msgspec.Struct, frozen=True):
    """How long some steps took at the start, each with its shape, and which graphs there are.

    `decode_graphs` are numbers of rows by number of drafts, `mixed_graphs` numbers of tokens. The device reads `bytes_per_second` of its memory.
    """

    steps: list[tuple[StepShape, float]] = []
    decode_graphs: dict[int, list[int]] = {}
    mixed_graphs: list[int] = []
    bytes_per_second: float = 0.0
