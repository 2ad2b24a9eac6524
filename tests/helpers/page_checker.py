"""A runner without a model that proves what the memory manager promises.

It keeps what a device would keep: tables, pages, the tokens of each slot. A token's state is an identity that depends on
all tokens before it and on what must not be shared (salt, without prefix caching the parent). After a step's
writes, every earlier position that a row could read must hold the identity of the row's own prefix: a page that is
stale, shared wrongly, owned twice or missing from a table is seen at its first use. A recurrent page holds one identity:
of the last token that its state has seen, `ZERO` when it was zeroed. Tables are rings: page n is in column n % width.

Where plans ask for drafts, each is right by chance. A row that generates begins where the device has it, which the plan's start only bounds.
Its drafts' identities are written, too, and must be overwritten before anybody reads them. Its state is that behind the row's first token; what was accepted behind
that comes with the next row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from zlib import crc32

from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.rules import ChunkedRule, GroupRule, WindowRule
from pagerunner.types import EngineRequest, Guess, PageTransfer, StateSave, StepPlan, StepResult, StepRow, TokenLogprobs

VOCAB = 61
MOST_DRAFTS = 7
ZERO = "zero"
Content = list[int | str | None]


def oldest_read(rule: GroupRule, position: int) -> int:
    """The first position that the token at `position` reads."""
    if isinstance(rule, WindowRule):
        return max(position - rule.reach + 1, 0)
    return position // rule.reach * rule.reach if isinstance(rule, ChunkedRule) else 0


def _spans(start: int, end: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The positions from `start` to `end` by pages of `size`: (page, first position, position after the last)."""
    for number in range(start // size, -(-end // size)):
        yield number, max(start, number * size), min(end, (number + 1) * size)


class PageFault(AssertionError):
    """A row would have read something that isn't its own prefix."""


def number_of(what: object) -> int:
    """The same in each process, unlike `hash` of a text or of None: a seed is to give the same traffic again."""
    return crc32(repr(what).encode())


def next_token(identity: int, seed: int) -> int:
    """The pretended model: deterministic in the prefix's identity and the request's seed."""
    return hash((identity, seed, -1)) % VOCAB


def expected_output(request: EngineRequest, max_model_len: int) -> tuple[list[int], str]:
    """What the request must produce, whatever else runs: (tokens, finish reason)."""
    identity = number_of(request.cache_salt)
    for token in request.prompt_token_ids:
        identity = hash((identity, token))
    params, output = request.params, []
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else request.eos_token_ids)}
    while True:
        token = next_token(identity, request.seed)
        output.append(token)
        identity = hash((identity, token))
        if token in stops and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) >= request.max_tokens or len(output) + len(request.prompt_token_ids) >= max_model_len:
            return output, "length"


class _Slot:
    def __init__(self, request: EngineRequest, outputs: list[int], private: object) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.model: list[int] = []  # identity after each token, as the model computes it
        self.stored: list[int] = []  # what pages must hold: also tells apart what must not be shared
        self.guesses: list[int] = []  # drafts of the next tokens
        self.in_state = self.computed = (
            0  # tokens that the state has seen, and those that it will have when this step has run
        )
        self._private = number_of(private)
        for token in [*request.prompt_token_ids, *outputs]:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.model.append(hash((self.model[-1] if self.model else number_of(self.request.cache_salt), token)))
        self.stored.append(hash((self.model[-1], self._private)))

    def guess(self, count: int, right: float) -> None:
        """Make drafts, each of which follows from the one before and is right with this probability."""
        self.guesses, identity = [], self.model[-1]
        rng = random.Random(identity)
        for _ in range(count):
            token = next_token(identity, self.request.seed)
            token = token if rng.random() < right else (token + 1) % VOCAB
            self.guesses.append(token)
            identity = hash((identity, token))

    def take(self, guess: Guess) -> None:
        """Take the host's guess as drafts, as far as it follows the last token."""
        ahead = len(self.tokens) - guess.start
        if ahead < 0:
            raise PageFault(f"slot {guess.slot} is at {len(self.tokens)}, and the guess begins at {guess.start}")
        right = not ahead or guess.tokens[ahead - 1 : ahead] == self.tokens[-1:]
        self.guesses = [*(guess.tokens[ahead:] if right else ()), *[-1] * MOST_DRAFTS]

    def share(self, row: StepRow) -> tuple[int, list[int]]:
        """Where the row begins, and what pages must hold when it is computed: everything before it, its tokens, its drafts."""
        if row.tokens:
            return row.start, self.stored[: row.start + row.num_tokens]
        start, stored, identity = len(self.tokens) - 1, list(self.stored), self.model[-1]
        if start > row.start:
            raise PageFault(f"slot {row.slot} is at {start}, and the plan says at most {row.start}")
        if row.num_tokens - 1 > len(self.guesses):
            raise PageFault(f"slot {row.slot} has no {row.num_tokens - 1} drafts")
        for token in self.guesses[: row.num_tokens - 1]:
            identity = hash((identity, token))
            stored.append(hash((identity, self._private)))
        return start, stored


class PageChecker:
    """Executes plans of a scheduler over `plan`'s groups. `private(request)` is what its pages may be shared within."""

    def __init__(
        self, plan: MemoryPlan, *, prefix_caching: bool, right: float = 0.0, looks_ahead: bool = False
    ) -> None:
        """`right`: how often a draft is. `looks_ahead`: who drafts writes behind the rows' tokens, as far as there are pages."""
        self.plan, self._right, self._looks_ahead = plan, right, looks_ahead
        self.accepted = 0
        self.prefix_caching = prefix_caching
        self.slots: dict[int, _Slot] = {}
        self.tables: list[dict[int, dict[int, tuple[int, int]]]] = [
            {} for _ in plan.groups
        ]  # slot, column: page, entry
        self.pages: list[dict[int, Content]] = [{} for _ in plan.groups]  # byte offset -> identity per token
        self.outside: dict[int, Content] = {}  # what another memory holds, by place
        self.transfers: dict[int, PageTransfer] = {}  # under way
        self._begun: dict[int, list[Content]] = {}  # what the pages of stores held when they began
        self.reads_checked = 0
        self._widths = [group.rule.table_width(plan.max_model_len) for group in plan.groups]
        self._states = [number for number, group in enumerate(plan.groups) if group.rule.snapshots]
        self.contents: dict[str, str] = {}  # of requests' adapters, digests
        self._drafted = False  # whether any plan had drafts: plans know only bounds of where states are then
        self._attended = [number for number in range(len(plan.groups)) if number not in self._states]

    def _private(self, request: EngineRequest) -> object:
        parent = "" if self.prefix_caching else request.parent_id or request.request_id
        return request.cache_salt, parent, self.contents.get(request.request_id, "")

    def lose_pages(self) -> None:
        """The page memory was unmapped."""
        self.pages = [{} for _ in self.plan.groups]

    def run(self, plan: StepPlan, errors: dict[int, str] | None = None) -> StepResult:
        """Execute one plan; raises PageFault if a row would read anything but its own prefix."""
        self._drafted = self._drafted or plan.num_drafts > 0 or bool(plan.guesses)
        for start in plan.admitted:
            self.slots[start.slot] = _Slot(start.request, start.output_token_ids, self._private(start.request))
            for table in self.tables:
                table[start.slot] = {}
        for group, slot, first, entries in plan.table_writes:
            for number, entry in enumerate(entries, first):
                self.tables[group][slot][number % self._widths[group]] = (number, entry)
        for group, source, target in plan.copies:
            content = self.pages[group].get(source)
            self._page(group, target)[:] = content if content is not None else [None] * self._size(group)
        for group, offsets in enumerate(plan.zero):
            for offset in offsets:
                self._page(group, offset)[:] = [ZERO] * self._size(group)
        self.transfers |= {transfer.number: transfer for transfer in plan.transfers}
        self._write_what_arrives()
        for guess in plan.guesses:
            self.slots[guess.slot].take(guess)
        for row in plan.rows:
            self._write(row)
        for save in plan.state_saves:
            self._save(plan.rows[save.row], save)
        for row in plan.rows:
            self._read(row)
        result = self._sample(plan, errors or {})
        for row in plan.rows:
            self._advance_state(row)
        for transfer in plan.transfers:
            if not transfer.loads:
                self._begun[transfer.number] = self._contents(transfer)
        return result

    def _write_what_arrives(self) -> None:
        """Loads that haven't ended write something to their pages in every step."""
        for transfer in self.transfers.values():
            for group, offset, _ in transfer.pages if transfer.loads else ():
                self._page(group, offset)[:] = ["arriving"] * self._size(group)

    def _contents(self, transfer: PageTransfer) -> list[Content]:
        return [list(self.pages[group].get(offset, ())) for group, offset, _ in transfer.pages]

    def end_transfer(self, number: int, *, well: bool) -> None:
        """The transfer ends, with the right bytes or without.

        Raises:
            PageFault: a page changed while it was stored.
        """
        transfer = self.transfers.pop(number, None)
        if transfer is None:
            return  # no plan has begun it
        if not transfer.loads:
            found = self._contents(transfer)
            if found != self._begun.pop(number):
                raise PageFault(f"transfer {number}: a page was written while it was stored")
            for (_, _, place), content in zip(transfer.pages, found, strict=True):
                self.outside[place] = content
        elif well:
            for group, offset, place in transfer.pages:
                self._page(group, offset)[:] = self.outside[place]

    def _size(self, group: int) -> int:
        return 1 if group in self._states else self.plan.groups[group].page_tokens

    def _page(self, group: int, offset: int) -> Content:
        """The page's content for writing: whatever overlaps its bytes in another group is gone."""
        size = self.plan.groups[group].page_bytes
        if not 0 <= offset <= self.plan.kv_bytes - size:
            raise PageFault(f"page at byte {offset} lies outside the page memory")
        for other, pages in enumerate(self.pages):
            if other != group:
                reach = self.plan.groups[other].page_bytes
                for start in [start for start in pages if offset - reach < start < offset + size]:
                    del pages[start]
        return self.pages[group].setdefault(offset, [None] * self._size(group))

    def _locate(self, group: int, slot: int, number: int) -> int | None:
        """Byte offset of a page, None if the table says that the row doesn't hold it."""
        found, entry = self.tables[group][slot].get(number % self._widths[group], (-1, -1))
        if found != number:
            raise PageFault(f"slot {slot} has no table entry for its page {number} of group {group}")
        return None if entry == -1 else entry * self.plan.groups[group].unit

    def _write(self, row: StepRow) -> None:
        slot = self.slots[row.slot]
        behind = len(row.tokens) - row.num_tokens  # 1 where drafters want the token behind a piece of a prompt
        if row.tokens and (behind not in (0, 1) or row.tokens != slot.tokens[row.start : row.start + len(row.tokens)]):
            raise PageFault(f"slot {row.slot}: the plan's tokens are not the sequence's")
        begin, stored = slot.share(row)
        for group in self._attended:
            size = self._size(group)
            for number, start, end in _spans(begin, len(stored), size):
                offset = self._locate(group, row.slot, number)
                if offset is not None:
                    first = number * size
                    self._page(group, offset)[start - first : end - first] = stored[start:end]
                elif not self.plan.groups[group].rule.forgets:
                    raise PageFault(f"slot {row.slot} position {start}: no page in group {group}")

    def _read(self, row: StepRow) -> None:
        slot = self.slots[row.slot]
        begin, stored = slot.share(row)
        for group in self._attended:
            rule, size, pages = self.plan.groups[group].rule, self._size(group), self.pages[group]
            # What forgets takes the step's own tokens from the projection, not from pages, unless some are drafts.
            drafted = not row.tokens and row.num_tokens > 1
            end = begin if rule.forgets and not drafted else len(stored)
            for number, start, stop in _spans(oldest_read(rule, begin), end, size):
                offset = self._locate(group, row.slot, number)
                content = pages.get(-1 if offset is None else offset, [None] * size)
                found = content[start - number * size : stop - number * size]
                wanted = stored[start:stop]
                if found != wanted:
                    wrong = next(at for at in range(stop - start) if found[at] != wanted[at])
                    raise PageFault(f"{slot.request.request_id} position {start + wrong}: a foreign or stale page")
                self.reads_checked += stop - start
        for group in self._states:
            offset = self._locate(group, row.slot, 0)
            state = self.pages[group].get(-1 if offset is None else offset, [None])[0]
            seen = begin if row.tokens else slot.in_state
            if state != (slot.stored[seen - 1] if seen else ZERO):
                raise PageFault(f"{slot.request.request_id} position {row.start}: a foreign or stale state")
            self.reads_checked += 1
        slot.computed = row.start + row.num_tokens if row.tokens else begin + 1

    def _write_ahead(self, slot: int, start: int, count: int) -> None:
        """Somebody's guesses at positions that the next row computes anew."""
        for group in self._attended:
            size = self._size(group)
            for at in range(start, start + count):
                found, entry = self.tables[group][slot].get(at // size % self._widths[group], (-1, -1))
                if found == at // size and entry != -1:
                    self._page(group, entry * self.plan.groups[group].unit)[at % size] = "ahead"

    def _save(self, row: StepRow, save: StateSave) -> None:
        """The step that passes the position writes the page. With drafts no plan knows which one that is, so several ask for it."""
        slot = self.slots[row.slot]
        first, last = (row.start, row.start + row.num_tokens) if row.tokens else (slot.in_state, len(slot.tokens))
        passes = first < save.position <= last
        if save.group not in self._states or not (passes or (self._drafted and not row.tokens)):
            raise PageFault(f"slot {row.slot}: no state at position {save.position} in this step")
        if passes:
            self._page(save.group, save.target)[:] = [slot.stored[save.position - 1]]

    def _advance_state(self, row: StepRow) -> None:
        slot = self.slots[row.slot]
        for group in self._states:
            offset = self._locate(group, row.slot, 0)
            assert offset is not None
            self._page(group, offset)[:] = [slot.stored[slot.computed - 1]]
        slot.in_state = slot.computed

    def _sample(self, plan: StepPlan, errors: dict[int, str]) -> StepResult:
        token_ids: list[list[int]] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        drafted: dict[int, int] = {}
        for number, row in enumerate(plan.rows):
            slot = self.slots[row.slot]
            request = slot.request
            end = row.start + row.num_tokens if row.tokens else len(slot.tokens)
            if request.params.prompt_logprobs is not None and row.start + 1 < len(request.prompt_token_ids):
                prompt_logprobs[number] = [
                    TokenLogprobs(slot.tokens[at], float(at), 1, [], [])
                    for at in range(row.start + 1, min(end + 1, len(request.prompt_token_ids)))
                ]
            token_ids.append([])
            if row.samples:
                if end != len(slot.tokens):
                    raise PageFault(f"slot {row.slot} samples at {end} of {len(slot.tokens)} tokens")
                drafts = slot.guesses[: row.num_tokens - 1] if not row.tokens else []
                drafted[number] = len(drafts)
                for draft in [*drafts, None]:
                    token = next_token(slot.model[-1], request.seed)
                    slot.append(token)
                    token_ids[-1].append(token)
                    if token != draft:
                        break
                self.accepted += len(token_ids[-1]) - 1
                slot.guess(plan.num_drafts, self._right)
                if self._looks_ahead:
                    self._write_ahead(row.slot, len(slot.tokens) - 1, plan.num_drafts - 1)
        return StepResult(
            step_id=plan.step_id,
            token_ids=token_ids,
            drafted=drafted,
            drafts={row: list(self.slots[plan.rows[row].slot].guesses) for row in plan.tell_drafts},
            prompt_logprobs=prompt_logprobs,
            errors=errors,
        )
