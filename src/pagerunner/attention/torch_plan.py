"""How the torch backend divides a step: which queries attend to which token slots, in as few calls as is worth it.

Every row's keys are split into at most three pieces, whose results are merged by their log-sum-exps:

* a prefix of whole pages that several rows have in common, read once for all of them;
* the rest of the row's past, read from its pages;
* the tokens of this step, which a row with many of them takes straight from the projection.

Short rows (decodes above all) take the last two as one piece, padded to rows of about their length. A padded slot
repeats a slot of the same row and is masked, so nothing that was not written is ever read.

Shape letters: R rows, P pages, B rows of one call, Q queries of a row, L key slots of a row, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from pagerunner.memory.specs import Spec
from pagerunner.ops.pages import SlotLayout, slot_rows

MAX_SHORT_QUERIES = 32  # longer rows are worth calls of their own
MAX_PADDED_SLOTS = 32768  # bounds the memory that one call gathers into
MIN_SHARED_SAVING = 512  # slots that sharing a prefix must spare, to be worth two more calls
Tokens: TypeAlias = slice | torch.Tensor


@dataclass(slots=True)
class Slots:
    """Token slots as (page table entry, offset in the page); row numbers follow from a layer's layout, once a step."""

    entries_N: torch.Tensor
    offsets_N: torch.Tensor
    _rows: dict[SlotLayout, torch.Tensor] = field(default_factory=dict)

    def rows(self, layout: SlotLayout) -> torch.Tensor:
        """Row numbers for `gather_slots`."""
        rows = self._rows.get(layout)
        if rows is None:
            rows = self._rows[layout] = slot_rows(self.entries_N, self.offsets_N, layout)
        return rows


@dataclass(frozen=True, slots=True)
class NewPart:
    """`rows` adjacent rows of `queries` tokens each attend causally to their own new tokens."""

    tokens: slice
    rows: int
    queries: int
    more: bool


@dataclass(frozen=True, slots=True)
class SharedPart:
    """All of `tokens` attend to all of `slots`, without a mask. Never the first part of its tokens."""

    tokens: Tokens
    slots: Slots
    more: bool


@dataclass(slots=True)
class PaddedPart:
    """`rows` short rows attend to slots of their own, [B, L], under a mask.

    `tokens` are B * Q queries, padded with repetitions; results `kept` (None: all) go to tokens `targets`.
    """

    tokens: Tokens
    targets: Tokens
    kept: torch.Tensor | None
    rows: int
    queries: int
    slots: Slots
    allowed_BQL: torch.Tensor | None
    more: bool
    _masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """0 where a query may look and -inf elsewhere, [B, 1, group * Q or 1, L], built once a step."""
        if self.allowed_BQL is None:
            return None
        group = 1 if self.queries == 1 else group
        mask = self._masks.get((group, dtype))
        if mask is None:
            allowed = self.allowed_BQL
            zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            mask = zeros.masked_fill_(~allowed, float("-inf")).repeat(1, group, 1).unsqueeze(1)
            self._masks[group, dtype] = mask
        return mask


Part = NewPart | SharedPart | PaddedPart


@dataclass(frozen=True, slots=True)
class _Row:
    index: int
    first_token: int
    queries: int
    start: int
    base: int  # tokens that a shared part covers

    @property
    def length(self) -> int:
        return self.start + self.queries

    @property
    def keys(self) -> int:
        return self.length - self.base


def scratch_bytes(specs: Sequence[Spec], page_tokens: int, max_model_len: int) -> int:
    """The most memory that gathering one layer's keys and values takes, whatever the step."""
    slots = max(MAX_PADDED_SLOTS, max_model_len)
    sizes = [spec.page_bytes(page_tokens) for spec in specs if spec.kind != "recurrent"]
    return slots * max(sizes, default=0) // page_tokens


def make_plan(query_lens: list[int], seq_lens: list[int], table_RP: torch.Tensor, page_tokens: int) -> tuple[Part, ...]:
    """Divide the step. Rows are in table order and their tokens are adjacent.

    Parts of one token are to be merged in the order they have here; `more` says that another follows.
    """
    clusters = _clusters(query_lens, seq_lens, table_RP, page_tokens)
    bases = {row: shared for rows, shared in clusters for row in rows}
    rows, token = [], 0
    for i, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        rows.append(_Row(i, token, queries, length - queries, bases.get(i, 0)))
        token += queries
    parts: list[Part] = []
    long: list[_Row] = []
    short: list[_Row] = []
    for row in rows:
        is_long = row.queries > MAX_SHORT_QUERIES or (row.queries > 1 and row.start == row.base)
        (long if is_long else short).append(row)
    parts.extend(_new_parts(long))
    for row in long:
        if row.start > row.base:
            slots = _row_slots(row, row.base, row.start, table_RP, page_tokens)
            tokens = slice(row.first_token, row.first_token + row.queries)
            parts.append(SharedPart(tokens, slots, more=row.base > 0))
    for bucket in _buckets(short):
        parts.append(_padded_part(bucket, table_RP, page_tokens))
    for members, shared in clusters:
        one = _Row(members[0], 0, 0, shared, 0)
        slots = _row_slots(one, 0, shared, table_RP, page_tokens)
        parts.append(SharedPart(_token_index([rows[i] for i in members], table_RP.device), slots, more=False))
    return tuple(parts)


def _clusters(
    query_lens: list[int], seq_lens: list[int], table_RP: torch.Tensor, page_tokens: int
) -> list[tuple[list[int], int]]:
    """Rows whose past begins with the same pages, and how many tokens those hold."""
    if len(query_lens) < 2:
        return []
    by_page: dict[int, list[int]] = {}
    for row, entry in enumerate(table_RP[:, 0].tolist()):
        if seq_lens[row] - query_lens[row] >= page_tokens:
            by_page.setdefault(entry, []).append(row)
    found = []
    for rows in by_page.values():
        if len(rows) < 2:
            continue
        past = {row: (seq_lens[row] - query_lens[row]) // page_tokens for row in rows}
        rows.sort(key=lambda row: -past[row])
        count = max(range(2, len(rows) + 1), key=lambda n: (n - 1) * past[rows[n - 1]])
        rows = sorted(rows[:count])
        pages = min(past[row] for row in rows)
        table = table_RP[rows, :pages]
        pages = int((table == table[0]).all(0).to(torch.int32).cumprod(0).sum())
        if (len(rows) - 1) * pages * page_tokens >= MIN_SHARED_SAVING:
            found.append((rows, pages * page_tokens))
    return found


def _row_slots(row: _Row, first: int, last: int, table_RP: torch.Tensor, page_tokens: int) -> Slots:
    positions = torch.arange(first, last, device=table_RP.device)
    return Slots(table_RP[row.index].index_select(0, positions // page_tokens), positions % page_tokens)


def _new_parts(rows: list[_Row]) -> list[NewPart]:
    """One part for each run of adjacent rows that agree in length and in whether more parts follow."""
    parts: list[NewPart] = []
    for row in rows:
        last = parts[-1] if parts else None
        more, end = row.start > 0, row.first_token + row.queries
        if last and (last.tokens.stop, last.queries, last.more) == (row.first_token, row.queries, more):
            parts[-1] = NewPart(slice(last.tokens.start, end), last.rows + 1, row.queries, more)
        else:
            parts.append(NewPart(slice(row.first_token, end), 1, row.queries, more))
    return parts


def _buckets(rows: list[_Row]) -> list[list[_Row]]:
    """Groups of short rows of about one length, so that padding costs less than another call would."""
    buckets: list[list[_Row]] = []
    for row in sorted(rows, key=lambda r: (r.queries > 1, r.base > 0, -r.keys)):
        first = buckets[-1][0] if buckets else None
        if (
            first is not None
            and (first.queries > 1, first.base > 0) == (row.queries > 1, row.base > 0)
            and first.keys - row.keys <= 32 + first.keys // 4
            and first.keys * (len(buckets[-1]) + 1) <= MAX_PADDED_SLOTS
        ):
            buckets[-1].append(row)
        else:
            buckets.append([row])
    return [sorted(bucket, key=lambda r: r.index) for bucket in buckets]


def _token_index(rows: list[_Row], device: torch.device) -> Tokens:
    """The rows' tokens in order, as a slice where they are adjacent."""
    first, count = rows[0].first_token, sum(row.queries for row in rows)
    if rows[-1].first_token + rows[-1].queries == first + count:
        return slice(first, first + count)
    tokens = [token for row in rows for token in range(row.first_token, row.first_token + row.queries)]
    return torch.tensor(tokens, device=device)


def _padded_part(rows: list[_Row], table_RP: torch.Tensor, page_tokens: int) -> PaddedPart:
    device = table_RP.device
    if len(rows) == 1 and rows[0].queries == 1:
        row = rows[0]
        slots, token = _row_slots(row, row.base, row.length, table_RP, page_tokens), _token_index(rows, device)
        return PaddedPart(token, token, None, 1, 1, slots, None, row.base > 0)
    queries = max(row.queries for row in rows)
    sizes = [row.keys for row in rows]
    columns = torch.tensor(
        [[r.base, r.length, r.start, r.queries, r.index, r.first_token] for r in rows], device=device
    )
    base_B1, length_B1, start_B1, queries_B1, index_B1, first_B1 = columns.unsqueeze(-1).unbind(1)
    positions_BL = base_B1 + torch.arange(max(sizes), device=device)
    read_BL = positions_BL if min(sizes) == max(sizes) else torch.minimum(positions_BL, length_B1 - 1)
    entries_BL = table_RP[index_B1, read_BL // page_tokens]
    slots = Slots(entries_BL.flatten(), (read_BL % page_tokens).flatten())
    more = rows[0].base > 0
    targets = _token_index(rows, device)
    if queries == 1:
        allowed = None if min(sizes) == max(sizes) else (positions_BL < length_B1).unsqueeze(1)
        return PaddedPart(targets, targets, None, len(rows), 1, slots, allowed, more)
    steps_BQ = torch.minimum(torch.arange(queries, device=device), queries_B1 - 1)
    allowed = positions_BL.unsqueeze(1) <= (start_B1 + steps_BQ).unsqueeze(-1)
    if all(row.queries == queries for row in rows):
        return PaddedPart(targets, targets, None, len(rows), queries, slots, allowed, more)
    kept = (torch.arange(queries, device=device) < queries_B1).flatten().nonzero().squeeze(-1)
    return PaddedPart((first_B1 + steps_BQ).flatten(), targets, kept, len(rows), queries, slots, allowed, more)
