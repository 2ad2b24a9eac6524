"""How the torch backend divides a step: which queries attend to which token slots, in as few calls as is worth it.

Every row's keys are split into at most three pieces, whose results are merged by their log-sum-exps:

* a prefix of whole pages that several rows have in common, read once for all of them;
* the rest of the row's past, read from its pages;
* the tokens of this step, which a row with many of them takes straight from the projection.

For short rows, decodes above all, the last two pieces are one. Such rows run together, padded to about one length. A padded
slot repeats a slot of the same row and is masked, so a slot that was not written is never read.

In groups that forget (windows, chunks) a row begins at the oldest key that it sees, and shares no prefix. A long row that
sees its whole sequence is divided as above. Any other long row is divided into bands. A band is a block of the row's
queries, with the part of the past and of the new tokens that these queries see. A row counts as short only if all of its
tokens are in pages, because tokens that no later step reads have no page.

Shape letters: R rows, P pages, B rows of one call, Q queries of a row, L key slots of a row, N slots.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from pagerunner.attention.base import Reach
from pagerunner.config import KV_DTYPE_BYTES
from pagerunner.memory.specs import FullKV, LatentKV, Spec
from pagerunner.ops.async_copy import to_device
from pagerunner.ops.pages import SlotLayout, slot_rows

MAX_SHORT_QUERIES = 32  # longer rows are worth calls of their own
MAX_PADDED_SLOTS = 32768  # bounds the memory that one call gathers into
BAND_QUERIES = 256  # queries of one band: a band sees at most so many tokens and the window
MIN_SHARED_SAVING = 512  # sharing a prefix costs two calls, and must spare reading so many slots
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
class BandPart:
    """Queries `tokens` of one row attend to past `slots` and then to the step's tokens `keys`, under a mask [Q, L]."""

    tokens: slice
    slots: Slots | None
    keys: slice
    allowed_QL: torch.Tensor
    more: bool = False
    _masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query may look and -inf elsewhere, [1, 1, Q, L], built once a step."""
        mask = self._masks.get(dtype)
        if mask is None:
            zeros = torch.zeros(self.allowed_QL.shape, dtype=dtype, device=self.allowed_QL.device)
            mask = self._masks[dtype] = zeros.masked_fill_(~self.allowed_QL, float("-inf"))[None, None]
        return mask


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


Part = NewPart | SharedPart | PaddedPart | BandPart


@dataclass(frozen=True, slots=True)
class _Row:
    index: int
    first_token: int
    queries: int
    start: int
    base: int = 0  # first position that the row reads on its own
    shared: bool = False  # whether a shared part covers what is before it
    first_page: int = 0  # page number of its table's column 0

    @property
    def length(self) -> int:
        return self.start + self.queries

    @property
    def keys(self) -> int:
        return self.length - self.base


def scratch_bytes(specs: Sequence[Spec], max_model_len: int, max_num_seqs: int, dtype: str) -> int:
    """The most memory that reading pages takes, whatever the step, where the model computes in `dtype`.

    `torch_ref.Scratch` holds that much when it has served the largest call of every layer: the slots as pages hold them,
    and once more in the model's dtype if that differs. fp8 numbers become float32 numbers in between.
    """
    pools: dict[Hashable, list[Spec]] = {}  # by backend: one for all keys and values, one for each group of latents
    for spec in specs:
        pools.setdefault(spec.lifetime if spec.kind == "latent" else "heads", []).append(spec)
    return sum(_pool_bytes(pool, max_model_len, max_num_seqs, dtype) for pool in pools.values())


def _pool_bytes(specs: Sequence[Spec], max_model_len: int, max_num_seqs: int, dtype: str) -> int:
    most: dict[tuple[int, str], int] = {}
    for spec in specs:
        slots = _most_slots(spec, max_model_len, max_num_seqs)
        for which, elements in enumerate(_slot_elements(spec)):
            held: str = spec.dtype  # type: ignore[attr-defined]
            keys = [(which, "raw" if held.startswith("fp8") else held)]
            if held.startswith("fp8"):
                keys.append((which if dtype == "float32" else 0, "float32"))
            if dtype not in (key[1] for key in keys):
                keys.append((which, dtype))
            for key in keys:
                most[key] = max(most.get(key, 0), slots * elements)
    sizes = {**KV_DTYPE_BYTES, "raw": 1}
    return sum(elements * sizes[name] for (_, name), elements in most.items())


def _most_slots(spec: Spec, max_model_len: int, max_num_seqs: int) -> int:
    """The most slots of one layer that one call gathers: one row's slots, or the slots of as many short rows as run together."""
    if isinstance(spec, LatentKV) and (spec.compression > 1 or spec.indexer_dim):
        return max_model_len // spec.compression  # row by row
    reach, row = Reach.of(spec), max_model_len
    if reach is not None:
        # A chunk's last token is read from the projection. A window's row has as many slots as tokens that are still in pages.
        short = max(reach.size, min(reach.size + MAX_SHORT_QUERIES, 2 * reach.size - 1) - 1)
        row = min(row, reach.size - 1 if reach.chunked else short)
    return max(min(MAX_PADDED_SLOTS, max_num_seqs * row), row)


def _slot_elements(spec: Spec) -> tuple[int, ...]:
    """Numbers of a slot's keys and values, or of its one vector and its indexer key."""
    if isinstance(spec, FullKV):
        return spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.value_dim
    return (spec.latent_dim + spec.rope_dim, spec.indexer_dim) if isinstance(spec, LatentKV) else ()


def make_plan(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table_RP: torch.Tensor,
    page_tokens: int,
    reach: Reach | None = None,
    first_pages: Sequence[int] = (),
) -> tuple[Part, ...]:
    """Divide the step. Rows are in table order and their tokens are adjacent.

    Parts of one token are to be merged in the order of this list. `more` says that another part follows. `reach` and
    `first_pages` are those of `gathered_rows`.
    """
    if reach is not None:
        return _forgetting_plan(query_lens, seq_lens, table_RP, page_tokens, reach, first_pages)
    clusters = _clusters(query_lens, seq_lens, table_RP, page_tokens)
    bases = {row: shared for rows, shared in clusters for row in rows}
    rows, token = [], 0
    for i, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        base = bases.get(i, 0)
        rows.append(_Row(i, token, queries, length - queries, base, base > 0))
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
            parts.append(SharedPart(tokens, slots, more=row.shared))
    for bucket in _buckets(short):
        parts.append(_padded_part(bucket, table_RP, page_tokens))
    for members, shared in clusters:
        one = _Row(members[0], 0, 0, shared)
        slots = _row_slots(one, 0, shared, table_RP, page_tokens)
        parts.append(SharedPart(_token_index([rows[i] for i in members], table_RP.device), slots, more=False))
    return tuple(parts)


def _forgetting_plan(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table_RP: torch.Tensor,
    page_tokens: int,
    reach: Reach,
    first_pages: Sequence[int],
) -> tuple[Part, ...]:
    whole: list[_Row] = []
    short: list[_Row] = []
    bands: list[Part] = []
    token = 0
    for i, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        start = length - queries
        row = _Row(i, token, queries, start, max(reach.oldest(start), 0), first_page=first_pages[i])
        token += queries
        in_pages = reach.oldest(length) <= start
        if in_pages and queries <= MAX_SHORT_QUERIES and (queries == 1 or start > 0):
            short.append(row)
        elif start == 0 and reach.oldest(length - 1) <= 0:
            whole.append(row)
        else:
            bands.extend(_band_parts(row, table_RP, page_tokens, reach))
    padded = [_padded_part(bucket, table_RP, page_tokens, reach) for bucket in _buckets(short)]
    return (*_new_parts(whole), *bands, *padded)


def _band_parts(row: _Row, table_RP: torch.Tensor, page_tokens: int, reach: Reach) -> list[Part]:
    parts: list[Part] = []
    for first in range(row.start, row.length, BAND_QUERIES):
        last = min(first + BAND_QUERIES, row.length)
        oldest = max(reach.oldest(first), 0)
        slots = None if oldest >= row.start else _row_slots(row, oldest, row.start, table_RP, page_tokens)
        queries_Q1 = torch.arange(first, last, device=table_RP.device).unsqueeze(-1)
        keys_L = torch.arange(oldest, last, device=table_RP.device)
        allowed = (keys_L <= queries_Q1) & (keys_L >= reach.oldest(queries_Q1))
        shift = row.first_token - row.start
        tokens, keys = slice(first + shift, last + shift), slice(max(oldest, row.start) + shift, last + shift)
        parts.append(BandPart(tokens, slots, keys, allowed))
    return parts


def _clusters(
    query_lens: Sequence[int], seq_lens: Sequence[int], table_RP: torch.Tensor, page_tokens: int
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
    columns = positions // page_tokens - row.first_page
    return Slots(table_RP[row.index].index_select(0, columns), positions % page_tokens)


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
    for row in sorted(rows, key=lambda r: (r.queries > 1, r.shared, -r.keys)):
        first = buckets[-1][0] if buckets else None
        if (
            first is not None
            and (first.queries > 1, first.shared) == (row.queries > 1, row.shared)
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
    return to_device(tokens, torch.int64, device)


def _padded_part(rows: list[_Row], table_RP: torch.Tensor, page_tokens: int, reach: Reach | None = None) -> PaddedPart:
    device = table_RP.device
    if len(rows) == 1 and rows[0].queries == 1:
        row = rows[0]
        slots, token = _row_slots(row, row.base, row.length, table_RP, page_tokens), _token_index(rows, device)
        return PaddedPart(token, token, None, 1, 1, slots, None, row.shared)
    queries = max(row.queries for row in rows)
    sizes = [row.keys for row in rows]
    columns = torch.tensor(
        [[r.base, r.length, r.start, r.queries, r.index, r.first_token, r.first_page] for r in rows], device=device
    )
    base_B1, length_B1, start_B1, queries_B1, index_B1, first_B1, page_B1 = columns.unsqueeze(-1).unbind(1)
    positions_BL = base_B1 + torch.arange(max(sizes), device=device)
    read_BL = positions_BL if min(sizes) == max(sizes) else torch.minimum(positions_BL, length_B1 - 1)
    pages_BL = read_BL // page_tokens
    entries_BL = table_RP[index_B1, pages_BL if reach is None else pages_BL - page_B1]
    slots = Slots(entries_BL.flatten(), (read_BL % page_tokens).flatten())
    more = rows[0].shared
    targets = _token_index(rows, device)
    if queries == 1:
        allowed = None if min(sizes) == max(sizes) else (positions_BL < length_B1).unsqueeze(1)
        return PaddedPart(targets, targets, None, len(rows), 1, slots, allowed, more)
    steps_BQ = torch.minimum(torch.arange(queries, device=device), queries_B1 - 1)
    queries_BQ1 = (start_B1 + steps_BQ).unsqueeze(-1)
    allowed = positions_BL.unsqueeze(1) <= queries_BQ1
    if reach is not None:
        allowed &= positions_BL.unsqueeze(1) >= reach.oldest(queries_BQ1)
    if all(row.queries == queries for row in rows):
        return PaddedPart(targets, targets, None, len(rows), queries, slots, allowed, more)
    kept = (torch.arange(queries, device=device) < queries_B1).flatten().nonzero().squeeze(-1)
    return PaddedPart((first_B1 + steps_BQ).flatten(), targets, kept, len(rows), queries, slots, allowed, more)
