"""What crosses between the scheduler and the runner: the plan of a step, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Literal, NamedTuple

import msgspec

from pagerunner.types.lora import AdapterMove
from pagerunner.types.request import EngineRequest, TokenLogprobs

NO_TOKEN_ALLOWED = (
    "No token can be sampled: structured_outputs, allowed_token_ids, bad_words, min_tokens and logit_bias "
    "together exclude every token."
)
"""In StepResult.errors, what the request itself is to blame for."""


class SlotInit(msgspec.Struct, frozen=True):
    """A request takes a slot: what the runner must know until the slot is released.

    `output_token_ids` are the tokens a preempted request had already generated (penalties count them). `adapter` is the slot of the request's
    adapter, -1 if it has none.
    """

    slot: int
    request: EngineRequest
    output_token_ids: list[int]
    adapter: int = -1


class StepRow(NamedTuple):
    """One request's share of a step: `num_tokens` tokens from position `start` on.

    `tokens` are the ids of a prompt's part; where drafters ask for it, one more follows if the prompt goes on. A row that generates has none: the device knows the slot's last token, where that is, and the
    drafts that follow it, of which the row has `num_tokens` - 1. Its `start` is the latest that is possible. With `samples` the last position's
    logits are sampled; of a row with drafts those of all positions, up to the first draft that isn't the token sampled before it.
    """

    slot: int
    start: int
    num_tokens: int
    tokens: list[int]
    samples: bool


class Guess(NamedTuple):
    """How a slot's text may go on from position `start`, as the host guesses from what it knows.

    The slot's row of the plan takes as its drafts what follows its last token here. If that is another one than was guessed, the row has none.
    """

    slot: int
    start: int
    tokens: list[int]


class TableWrite(NamedTuple):
    """Entries for pages `first`, `first` + 1, ... of the request in a slot, in the page table of a group.

    An entry is a page's address in the group's units. An entry of -1 stands for a page that was not allocated, because no later
    step reads its tokens.
    """

    group: int
    slot: int
    first: int
    entries: list[int]


class PageCopy(NamedTuple):
    """Copy one page of `group` from byte offset `source` to byte offset `target` of the KV region."""

    group: int
    source: int
    target: int


class PageTransfer(NamedTuple):
    """Copy pages between the page memory and another one, beside the steps. `number` names the transfer when it has ended.

    Byte offsets of pages by group: in the KV region, and `places` in the other memory. The transfer `loads` pages, or stores them.
    """

    number: int
    loads: bool
    offsets: list[list[int]]
    places: list[list[int]]

    @property
    def pages(self) -> Iterator[tuple[int, int, int]]:
        """One page after another: group, offset, place."""
        both = zip(self.offsets, self.places, strict=True)
        return chain.from_iterable(zip(repeat(group), *pair, strict=False) for group, pair in enumerate(both))


class TransferEnd(NamedTuple):
    """Transfer `number` of a `team` of ranks neither reads nor writes any more. It took so many `seconds`, and went `well` on all ranks or not."""

    number: int
    well: bool
    seconds: float = 0.0
    team: int = 0


class StateSave(NamedTuple):
    """Within the forward pass, copy row `row`'s recurrent state after the token at `position - 1` to a page of `group`.

    `target` is the page's byte offset. `position` lies in (row.start, row.start + row.num_tokens].
    """

    row: int
    position: int
    group: int
    target: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the runner does in one step, in this order: slots, table writes, copies (in list order), zeroing, forward,
    sampling.

    A request may be admitted steps before its first row: its first pages are copies of what this step computes, or its adapter is being filled.
    `zero` lists the byte offsets of fresh pages, one list per group, for groups that ask for it. A fresh page may have
    been the source of one of the step's copies, so copies come first.
    `masks` has bitmasks of some of the rows that sample, one for each place of the row: a bit for each token that the row may take there, lowest bit
    first, or None where it may take any. `tell_drafts` are rows whose new drafts the result tells.
    `transfers` begin with the step and end whenever they do, in any order: pages are loaded once the step has copied and zeroed,
    and stored once its forward has run. No step touches pages that are loaded, and none writes pages that are stored. A plan
    without rows is made where only transfers are to begin, or fills of adapters behind it. `adapter_moves` say where pages of adapters lie from this step on.
    Rows may share pages that another row of the same step writes: within a layer all writes precede all reads.
    After the step, `num_drafts` drafts are made for each slot that samples, for its next row. Where the host drafts, rows have `guesses` instead.
    Where there are several teams of ranks, `most_tokens` are those of the team that has most of them in this step, and `graphs` says which graphs
    suit the rows of all. So all ranks choose alike. A team's plan has no rows if others alone have something to do.
    """

    step_id: int
    rows: list[StepRow]
    admitted: list[SlotInit] = []
    table_writes: list[TableWrite] = []
    zero: list[list[int]] = []
    copies: list[PageCopy] = []
    state_saves: list[StateSave] = []
    transfers: list[PageTransfer] = []
    adapter_moves: list[AdapterMove] = []
    masks: dict[int, list[bytes | None]] = {}
    tell_drafts: list[int] = []
    num_drafts: int = 0
    guesses: list[Guess] = []
    most_tokens: int = 0
    graphs: Literal["none", "mixed", "decode"] = "none"

    @property
    def num_tokens(self) -> int:
        """The tokens of all rows."""
        return sum(row.num_tokens for row in self.rows)


class TeamsPlan(StepPlan, frozen=True, kw_only=True):
    """What several teams of ranks do in one step: the plan of each. `rows` are those of all teams, one team's behind another's."""

    teams: list[StepPlan]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step produced. Lists are aligned with `plan.rows`; rows that don't sample have an empty list. A row with drafts has one
    token and as many more as drafts were right. `drafted`, by row of a step in which any row has drafts: how many there were. `drafts`: those made
    for the next rows of the plan's `tell_drafts`.

    `prompt_logprobs[i]` covers positions start+1 .. start+num_tokens of row i (the token after each computed position
    that is still a prompt token). `pooled` holds the vectors of rows that ended a pooling request's prompt. `errors` maps a
    row index to the sentence that ends only that request. `timed` are steps that the device's clock has timed since the result before: their
    numbers, and the seconds from their first work on the device to their last. A result doesn't wait for its own.
    """

    step_id: int
    token_ids: list[list[int]]
    drafted: dict[int, int] = {}
    drafts: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    pooled: dict[int, list[float]] = {}
    errors: dict[int, str] = {}
    timed: list[tuple[int, float]] = []


class TeamsResult(StepResult, frozen=True, kw_only=True):
    """What each team of ranks has produced in a step of a `TeamsPlan`."""

    teams: list[StepResult]
