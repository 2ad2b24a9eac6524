"""Staging: everything that a step brings from the host, packed into one pinned buffer and copied to the device at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import numpy as np
import torch

from pagerunner.ops.batch import PackedRows, even
from pagerunner.ops.host_words import from_host
from pagerunner.types import StepRow

FIRST_SIZE = 4096  # integers
Triple = tuple[int, int, int]


class Sections(NamedTuple):
    """Where the optional parts of a packed step begin, and how many integers the step has in all."""

    logits_index: int
    sampled_slots: int
    table_places: int
    table_entries: int
    setting_places: int
    settings: int
    triples: int
    size: int

    @classmethod
    def of(cls, first: int, sampled: int, writes: int, settings: int, triples: int) -> Sections:
        """The parts from index `first` on: two for sampled rows, then table writes, settings, page copies and fills. Each part
        begins at an even index."""
        starts = [first]
        for count in (sampled, sampled, writes, writes, settings, settings):
            starts.append(starts[-1] + even(count))
        return cls(*starts, starts[-1] + 3 * triples)


@dataclass(slots=True)
class StagedStep:
    """One step, on the host as lists and on the device as parts of `packed`, which is valid until the next step.

    `seq_lens` are exact for rows that compute prompts. For rows that generate they are upper bounds.

    With drafts a sampled row has `counts` of `width` places, which are `num_places` in all, and what is said of sampled rows on the device is by place. `num_writes` table entries and `num_settings` integers of slots' settings come with it.
    """

    rows: Sequence[StepRow]
    slots: tuple[int, ...]
    query_lens: list[int]
    seq_lens: list[int]
    sampled_rows: list[int]
    where: PackedRows
    packed: torch.Tensor
    sections: Sections
    width: int
    counts: list[int]
    num_places: int
    num_writes: int
    num_settings: int
    moved: tuple[Sequence[Sequence[Triple]], Sequence[Triple]]

    @property
    def logits_index_S(self) -> torch.Tensor:
        """int64 [S] on the device: the sampled rows' last tokens. Places that a row doesn't have repeat its last one."""
        return self._part(self.sections.logits_index, self.num_places)

    @property
    def samples_all(self) -> bool:
        """Whether place s is that of token s."""
        where = self.where
        return self.num_places == where.tokens and (self.width == 1 or self.num_places == sum(self.counts))

    @property
    def sampled_slots_S(self) -> torch.Tensor:
        """int64 [S] on the device, -1 at places that a row doesn't have."""
        return self._part(self.sections.sampled_slots, self.num_places)

    @property
    def table_places_N(self) -> torch.Tensor:
        """int64 [N] on the device, as from PageTables.places."""
        return self._part(self.sections.table_places, self.num_writes)

    @property
    def table_entries_N(self) -> torch.Tensor:
        """int64 [N] on the device, as from PageTables.places."""
        return self._part(self.sections.table_entries, self.num_writes)

    @property
    def setting_places_N(self) -> torch.Tensor:
        """int64 [N] on the device, as from Sampler.new_settings."""
        return self._part(self.sections.setting_places, self.num_settings)

    @property
    def settings_N(self) -> torch.Tensor:
        """int64 [N] on the device, as from Sampler.new_settings."""
        return self._part(self.sections.settings, self.num_settings)

    @property
    def copies(self) -> tuple[tuple[torch.Tensor, int], ...]:
        """By launch, in order: [n, 3] on the device and the most bytes of one range, see ops/pages.py."""
        return self._launches()[: len(self.moved[0])]

    @property
    def fills(self) -> tuple[torch.Tensor, int] | None:
        """One launch, as those of `copies`."""
        return self._launches()[-1] if self.moved[1] else None

    def _part(self, first: int, count: int) -> torch.Tensor:
        return self.packed[first : first + count]

    def _launches(self) -> tuple[tuple[torch.Tensor, int], ...]:
        copies, fills = self.moved
        return _launches(self.packed[self.sections.triples :].view(-1, 3), copies, fills) if copies or fills else ()


class _Buffers:
    """Host buffers in turn, each written again only when its copy has been made, and their place on the device.

    On the CPU there is one buffer and no copy.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._depth = depth if device.type == "cuda" else 1
        self._next = 0
        self._grow(FIRST_SIZE)

    def _grow(self, size: int) -> None:
        """Make larger buffers, when no copy reads the others any more."""
        cuda = self._device.type == "cuda"
        with torch.inference_mode(False):
            hosts = [torch.empty(size, dtype=torch.int64, pin_memory=cuda) for _ in range(self._depth)]
            events = [torch.cuda.Event() for _ in hosts] if cuda else []  # type: ignore[no-untyped-call]
            there = torch.empty(size, dtype=torch.int64, device=self._device) if cuda else hosts[0]
        self._hosts, self._events, self._there = hosts, events, there
        self._arrays = [host.numpy() for host in hosts]
        self._size = size  # last: an interrupt before it lets the next step grow again

    def take(self, size: int) -> np.ndarray:
        """A host buffer of at least `size` integers. Waits if the copy of the buffer's last use isn't done."""
        if size > self._size:
            if self._events:
                torch.cuda.current_stream().synchronize()  # never in the course of decoding
            self._grow(1 << size.bit_length())
        self._next = (self._next + 1) % self._depth
        if self._events:
            self._events[self._next].synchronize()
        return self._arrays[self._next]

    def send(self, size: int) -> torch.Tensor:
        """The buffer last taken, on the device."""
        there = self._there[:size]
        if self._events:
            from_host(there, self._hosts[self._next][:size])
            self._events[self._next].record()
        return there


class Staging:
    """Packs steps for one device. With `depth` buffers, that many steps may be on their way at once."""

    def __init__(self, device: torch.device | str, depth: int) -> None:
        self._buffers = _Buffers(torch.device(device), depth)

    def stage(
        self,
        rows: Sequence[StepRow],
        table_entries: dict[int, int],
        copies: Sequence[Sequence[Triple]],
        fills: Sequence[Triple],
        settings: dict[int, int] | None = None,
        *,
        width: int = 1,
        strided: bool = False,
    ) -> StagedStep:
        """Pack a step: its rows, if it has any, table entries by place, page copies and fills, and slots' settings by place.

        No row has more drafts than `width` - 1. A `strided` step has rows of that width, all of which generate.
        """
        slots, starts, query_lens, known, samples = zip(*rows, strict=True) if rows else ((),) * 5
        num_rows, num_tokens = len(rows), sum(query_lens)
        from_host = any(known)
        # Of two rows that compute prompts, one may read what the other writes. Kernels for one token a row don't wait for that.
        one_token = (
            num_tokens == num_rows and max(query_lens, default=1) == 1 and not (from_host and sum(map(bool, known)) > 1)
        )
        stride = width if strided else 0
        where = PackedRows(num_rows, num_tokens, num_rows, num_tokens, one_token and not strided, stride)
        sampled_rows = list(range(num_rows)) if all(samples) else [row for row, wanted in enumerate(samples) if wanted]
        sampled, settings = len(sampled_rows), settings or {}
        triples = [*(triple for wave in copies for triple in wave), *fills]
        sections = Sections.of(where.size, sampled * width, len(table_entries), len(settings), len(triples))

        packed = self._buffers.take(sections.size)
        packed[:num_rows] = slots
        packed[where.starts : where.starts + num_rows] = _starts(starts, known) if from_host else -1
        query_start = packed[where.query_start : where.query_start + num_rows + 1]
        if one_token:
            query_start[:] = np.arange(num_rows + 1)
        else:
            query_start[0] = 0
            np.cumsum(query_lens, out=query_start[1:])
        if not strided:
            one_each = num_tokens == num_rows and not from_host
            packed[where.token_ids : where.token_ids + num_tokens] = -1 if one_each else _token_ids(known, query_lens)
        if not (one_token or strided):
            packed[where.token_rows : where.token_rows + num_tokens] = np.repeat(np.arange(num_rows), query_lens)
        counts: list[int] = []
        if sampled and width > 1:
            counts = [1 if known[row] else query_lens[row] for row in sampled_rows]
            _put_places(packed, sections, query_start[1:][sampled_rows], packed[:num_rows][sampled_rows], counts, width)
        elif sampled:
            rows_of = slice(num_rows) if sampled == num_rows else sampled_rows
            last_tokens = query_start[1:][rows_of] - 1
            _put(packed, sections.logits_index, last_tokens)
            _put(packed, sections.sampled_slots, packed[:num_rows][rows_of])
        if table_entries:
            _put(packed, sections.table_places, list(table_entries.keys()))
            _put(packed, sections.table_entries, list(table_entries.values()))
        if settings:
            _put(packed, sections.setting_places, list(settings.keys()))
            _put(packed, sections.settings, list(settings.values()))
        if triples:
            _put(packed, sections.triples, [value for triple in triples for value in triple])
        return StagedStep(
            rows=rows,
            slots=slots,
            query_lens=list(query_lens),
            seq_lens=list(map(add, starts, query_lens)),
            sampled_rows=sampled_rows,
            where=where,
            packed=self._buffers.send(sections.size),
            sections=sections,
            width=width,
            counts=counts,
            num_places=sampled * width,
            num_writes=len(table_entries),
            num_settings=len(settings),
            moved=(copies, fills),
        )


def _put(packed: np.ndarray, first: int, values: np.ndarray | list[int]) -> None:
    packed[first : first + len(values)] = values


def _put_places(
    packed: np.ndarray, sections: Sections, ends: np.ndarray, slots: np.ndarray, counts: list[int], width: int
) -> None:
    """What is said of sampled rows, by place: of each row the first `counts` of `width`."""
    has_S1, places_W = np.array(counts)[:, None], np.arange(width)
    tokens_SW = ends[:, None] - has_S1 + np.minimum(places_W, has_S1 - 1)
    _put(packed, sections.logits_index, tokens_SW.ravel())
    _put(packed, sections.sampled_slots, np.where(places_W < has_S1, slots[:, None], -1).ravel())


def _starts(starts: Sequence[int], known: Sequence[list[int]]) -> list[int]:
    """The rows' first positions, -1 for rows that generate: only the device knows theirs."""
    return [start if tokens else -1 for start, tokens in zip(starts, known, strict=True)]


def _token_ids(known: Sequence[list[int]], query_lens: Sequence[int]) -> list[int]:
    """The tokens' ids. Of rows that generate only the device knows them: -1 is the slot's last token, then come -2, -3, ... for its drafts."""
    ids: list[int] = []
    for tokens, length in zip(known, query_lens, strict=True):
        ids += tokens[:length] if tokens else range(-1, -1 - length, -1)
    return ids


def _launches(
    there_N3: torch.Tensor, copies: Sequence[Sequence[Triple]], fills: Sequence[Triple]
) -> tuple[tuple[torch.Tensor, int], ...]:
    """The triples on the device by launch, with the largest size of each."""
    found = []
    at = 0
    for triples, size_column in [*((wave, 2) for wave in copies), *([(fills, 1)] if fills else [])]:
        most = max(triple[size_column] for triple in triples)
        found.append((there_N3[at : at + len(triples)], most))
        at += len(triples)
    return tuple(found)
