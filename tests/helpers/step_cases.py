"""Cases for the operations that prepare a step, at tiny shapes on the CPU and at real ones on a device."""

from __future__ import annotations

import dataclasses
import random

import torch

from pagerunner.ops.batch import PackedRows, SlotState, StepTensors, TableSet, build_rows, store_tokens
from pagerunner.ops.drafting import PassTensors, build_pass, next_tokens, store_drafts
from pagerunner.ops.pages import copy_pages, fill_pages
from pagerunner.ops.tables import write_entries

DRAFTS = 3
GROUPS = ((16, 9), (3, 4), (1, 1), (48, 5))  # tokens of a page, columns of the table


def staged_rows(
    rng: random.Random, lengths: list[int], padded_rows: int, padded_tokens: int, slots: int, stride: int = 0
) -> tuple[torch.Tensor, PackedRows]:
    """Rows of these lengths in random slots at random positions, packed as for `build_rows`. Every second row generates, with as many drafts
    as there are. With a `stride` all do."""
    rows, tokens = len(lengths), sum(lengths)
    where = PackedRows(rows, tokens, padded_rows, padded_tokens, max(lengths) == 1 and not stride, stride)
    packed = torch.full((where.size + 3,), -(2**40))  # no gap between the parts may be read
    packed[:rows] = torch.tensor(rng.sample(range(slots), rows))
    packed[where.starts : where.starts + rows] = torch.tensor(
        [rng.randrange(500) if row % 2 and not stride else -1 for row in range(rows)]
    )
    packed[where.query_start : where.query_start + rows + 1] = torch.tensor([0, *lengths]).cumsum(0)
    if stride:
        return packed, where
    ids: list[int] = []
    for row, length in enumerate(lengths):
        ids += [rng.randrange(1000) if row % 2 else max(-1 - at, -1 - DRAFTS) for at in range(length)]
    packed[where.token_ids : where.token_ids + tokens] = torch.tensor(ids)
    if not where.one_token:
        packed[where.token_rows : where.token_rows + tokens] = torch.tensor(
            [row for row, length in enumerate(lengths) for _ in range(length)]
        )
    return packed, where


def slot_state(slots: int, device: str = "cpu") -> SlotState:
    """Random tokens, lengths and drafts, some of which aren't there."""
    state = SlotState.empty(slots, "cpu", DRAFTS)
    for tensor, least, most in (
        (state.tokens, 0, 1000), (state.lengths, 1, 500), (state.accepted, 0, DRAFTS + 1), (state.drafts, -1, 1000),
    ):  # fmt: skip
        tensor.copy_(torch.randint(least, most, tensor.shape))
    return moved(state, device)


def moved(state: SlotState, device: str) -> SlotState:
    """The state on another device."""
    return SlotState(*(getattr(state, field.name).to(device) for field in dataclasses.fields(state)))


def tables(slots: int, device: str) -> TableSet:
    """A table of random entries, some of them -1, for each of GROUPS."""
    shapes, first = [], 0
    for page_tokens, width in GROUPS:
        shapes.append((first, width, page_tokens))
        first += slots * width
    ends = torch.randint(0, 600, (len(GROUPS), slots), device=device)
    return TableSet(torch.randint(-1, 1000, (first,), device=device), torch.tensor(shapes, device=device), ends)


def filled(
    build, lengths: list[int], padded_rows: int, padded_tokens: int, device: str = "cpu", stride: int = 0
) -> StepTensors:
    """What `build` makes of one seeded step, in tensors larger than it that hold -7 before."""
    torch.manual_seed(len(lengths))
    slots = len(lengths) + 3
    packed, where = staged_rows(random.Random(sum(lengths)), lengths, padded_rows, padded_tokens, slots, stride)
    table, state = tables(slots, "cpu"), slot_state(slots)
    out = StepTensors.empty(padded_rows + 2, padded_tokens + 5, len(GROUPS), torch.device(device), max(stride - 1, 0))
    for field in dataclasses.fields(out):
        getattr(out, field.name).fill_(-7)
    build(
        packed.to(device),
        where,
        TableSet(table.entries.to(device), table.shapes.to(device), table.ends_GN.to(device)),
        moved(state, device),
        out,
    )
    return out


def check_build_rows(
    build, lengths: list[int], padded_rows: int, padded_tokens: int, device: str = "cpu", stride: int = 0
) -> None:
    """`build` fills the same as the twin, and nothing beyond the padding."""
    expected = filled(build_rows.twin, lengths, padded_rows, padded_tokens, stride=stride)
    found = filled(build, lengths, padded_rows, padded_tokens, device, stride)
    for field in dataclasses.fields(expected):
        assert torch.equal(getattr(found, field.name).cpu(), getattr(expected, field.name)), field.name


def check_store_tokens(store, count: int, device: str = "cpu") -> None:
    """Slots of -1 store nowhere; what belongs to no slot may hold anything."""
    slots = torch.randperm(count * 2)[:count]
    slots[::3] = -1
    tokens = torch.arange(count) + 100
    expected = slot_state(2 * count)
    found = moved(SlotState(*(getattr(expected, field.name).clone() for field in dataclasses.fields(expected))), device)
    store_tokens.twin(slots, tokens, 2 * tokens, expected)
    store(slots.to(device), tokens.to(device), 2 * tokens.to(device), found)
    for field in dataclasses.fields(found):
        assert torch.equal(getattr(found, field.name)[:-1].cpu(), getattr(expected, field.name)[:-1])
    at = slots[1]
    assert (expected.tokens[at], expected.lengths[at], expected.accepted[at]) == (101, 203, 0)


def check_write_entries(write, count: int, device: str = "cpu") -> None:
    """Every entry is in its place."""
    places, entries = torch.randperm(count * 3)[:count], torch.randint(-1, 2**40, (count,))
    expected = torch.zeros(count * 3, dtype=torch.int64)
    write_entries.twin(expected, places, entries)
    found = torch.zeros(count * 3, dtype=torch.int64, device=device)
    write(found, places.to(device), entries.to(device))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(expected[places], entries)


def check_pages(fill, copy, sizes: list[int], device: str = "cpu") -> None:
    """Pages of different sizes, filled with zeros and with ones and copied, between bytes that must not change."""
    starts = torch.tensor([0, *[2 * size + 16 for size in sizes]]).cumsum(0).tolist()
    before = torch.randint(0, 256, (starts[-1],), dtype=torch.uint8)
    fills = torch.tensor(
        [(start, size, 255 * (i % 2)) for i, (start, size) in enumerate(zip(starts, sizes, strict=False))]
    )
    copies = torch.tensor([(start, start + size, size) for start, size in zip(starts, sizes, strict=False)])
    expected, found = before.clone(), before.clone().to(device)
    for memory, place, do_fill, do_copy in (
        (expected, "cpu", fill_pages.twin, copy_pages.twin),
        (found, device, fill, copy),
    ):
        do_copy(memory, copies.to(place), max(sizes))
        do_fill(memory, fills.to(place), max(sizes))
    assert torch.equal(found.cpu(), expected)
    first, size = starts[0], sizes[0]
    assert expected[first : first + size].eq(0).all()
    assert torch.equal(expected[first + size : first + 2 * size], before[first : first + size])


def check_host_words(from_host, to_host, words: int, device: str = "cpu") -> None:
    """What comes and goes is right, and words beside it stay as they are. `from_host` and `to_host` as in ops/host_words.py."""
    values, pinned = torch.arange(2 * words, dtype=torch.int64) * 2**31 - 5, device != "cpu"
    odd = torch.randn(words + 1)
    for first in (0, 1):  # places that Triton would take for aligned ones, and others
        here, there = values.clone(), torch.zeros(2 * words, dtype=torch.int64, device=device)
        part, rest = slice(first, first + words), [*range(first), *range(first + words, 2 * words)]
        here = here.pin_memory() if pinned else here
        from_host(there[part], here[part])
        assert torch.equal(there[part].cpu(), values[part]) and not there[rest].any()
        back, odd_back = (
            torch.zeros(2 * words, dtype=torch.int64, pin_memory=pinned),
            torch.zeros(words + 1, pin_memory=pinned),
        )
        to_host(there[part], back[part], odd[first:].to(device), odd_back[first:])
        if pinned:
            torch.cuda.synchronize()
        assert torch.equal(back[part], values[part]) and not back[rest].any()
        assert torch.equal(odd_back[first:], odd[first:]) and not odd_back[:first].any()
        back.zero_()
        to_host(there[part], back[part])
        if pinned:
            torch.cuda.synchronize()
        assert torch.equal(back[part], values[part]) and not back[rest].any()


def check_drafting(follow, build, store, rows: list[int], padding: int, device: str = "cpu") -> None:
    """Tokens behind a step's, a pass' rows, and drafts, of rows with so many tokens: as by the twins, which do what plain loops say."""
    torch.manual_seed(sum(rows))
    count, slots = len(rows), len(rows) + 3
    state, table = slot_state(slots), tables(slots, "cpu")
    slots_R = torch.randperm(slots)[: count + padding].to(torch.int32)
    row_T = torch.tensor(
        [row for row, length in enumerate(rows) for _ in range(length)] + [-1] * padding, dtype=torch.int32
    )
    computed = [int(torch.randint(length + 1, ())) for length in rows]  # of a row's tokens
    starts = [int(state.lengths[slots_R[row]]) - computed[row] for row in range(count)]
    positions_T = torch.tensor(
        [starts[row] + place for row, length in enumerate(rows) for place in range(length)] + [0] * padding
    )
    ids_T = torch.randint(1, 1000, row_T.shape)
    expected = next_tokens.twin(ids_T, row_T, positions_T, slots_R, state)
    first = 0
    for row, length in enumerate(rows):
        last = int(state.tokens[slots_R[row]])
        wanted = [int(ids_T[first + place + 1]) if place + 1 < computed[row] else last for place in range(length)]
        assert expected[first : first + length].tolist() == wanted
        first += length
    there = moved(state, device)
    found = follow(*(x.to(device) for x in (ids_T, row_T, positions_T, slots_R)), there)
    assert torch.equal(found.cpu(), expected)

    slots_S = torch.cat((slots_R[:count].long(), torch.full((padding,), -1)))
    strided = slots_S[:, None].repeat(1, 3)  # rows that had drafts have their slot at every place
    held = TableSet(table.entries.to(device), table.shapes.to(device), table.ends_GN.to(device))
    for ahead, last in ((1, 10**6), (3, 250)):
        made = [PassTensors.empty(count + padding + 2, len(GROUPS), torch.device(where)) for where in ("cpu", device)]
        own = tuple(range(len(GROUPS)))[1:]
        build_pass.twin(slots_S, ahead, last, table, own, state, made[0])
        build(strided.to(device)[:, 0], ahead, last, held, own, there, made[1])
        for field in dataclasses.fields(made[0]):
            assert torch.equal(getattr(made[1], field.name).cpu(), getattr(made[0], field.name)), field.name
        for row in range(count):
            slot = int(slots_S[row])
            wanted, end = min(int(state.lengths[slot]) - 1 + ahead, last), int(table.ends_GN[list(own), slot].min())
            position = min(wanted, max(end - 1, 0))
            assert (made[0].positions_S[row], made[0].seq_lens_S[row]) == (position, position + 1)
            for group, (page_tokens, width) in enumerate(GROUPS):
                at = int(table.shapes[group, 0]) + slot * width + position // page_tokens % width
                assert made[0].write_entry_GS[group, row] == (table.entries[at] if wanted < end else -1)
        assert made[0].query_start_S1[: count + padding + 1].tolist() == [
            min(i, count) for i in range(count + padding + 1)
        ]

    drafts_S = torch.randint(1000, slots_S.shape)
    store_drafts.twin(slots_S, drafts_S, 1, state)
    store(strided.to(device)[:, 0], drafts_S.to(device), 1, there)
    assert torch.equal(there.drafts[:-1].cpu(), state.drafts[:-1])
    assert torch.equal(state.drafts[slots_R[:count].long(), 1], drafts_S[:count])
