"""A step's integers arrive where the step looks for them; page copies keep the order that matters."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

from pagerunner.runner.pages import Pages
from pagerunner.runner.staging import FIRST_SIZE, Staging
from pagerunner.types import PageCopy, StepRow


def test_rows_entries_and_ranges_are_all_in_one_buffer() -> None:
    rows = [StepRow(5, 10, 1, [], True), StepRow(2, 0, 4, [7, 8, 9, 6], False), StepRow(0, 3, 2, [], True)]
    copies, fills = [[(0, 16, 16), (32, 48, 16)], [(16, 64, 32)]], [(96, 16, 255), (128, 32, 0)]
    step = Staging("cpu", 3).stage(rows, {9: 90, 3: -1, 4: 40}, copies, fills)

    assert (step.slots, step.query_lens, step.seq_lens, step.sampled_rows) == ((5, 2, 0), [1, 4, 2], [11, 4, 5], [0, 2])
    where = step.where
    assert (where.rows, where.tokens, where.one_token) == (3, 7, False)
    assert step.packed[where.starts : where.starts + 3].tolist() == [-1, 0, -1], (
        "where rows that generate begin, the device knows"
    )
    assert step.packed[where.token_ids : where.token_ids + 7].tolist() == [-1, 7, 8, 9, 6, -1, -2], (
        "the last token is -1, the first draft -2"
    )
    assert step.packed[where.token_rows : where.token_rows + 7].tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert (step.logits_index_S.tolist(), step.sampled_slots_S.tolist()) == ([0, 6], [5, 0])
    assert dict(zip(step.table_places_N.tolist(), step.table_entries_N.tolist(), strict=True)) == {9: 90, 3: -1, 4: 40}
    assert [(there.tolist(), most) for there, most in step.copies] == [
        ([[0, 16, 16], [32, 48, 16]], 16),
        ([[16, 64, 32]], 32),
    ]
    assert step.fills is not None and (step.fills[0].tolist(), step.fills[1]) == ([[96, 16, 255], [128, 32, 0]], 32)


def test_settings_come_with_the_step() -> None:
    rows = [StepRow(5, 10, 1, [], True), StepRow(2, 0, 4, [7, 8, 9, 6], False), StepRow(0, 3, 2, [], True)]
    step = Staging("cpu", 3).stage(rows, {9: 90}, [], [(96, 16, 255)], {20: -5, 21: 6, 23: 2**62})
    assert (step.setting_places_N.tolist(), step.settings_N.tolist()) == ([20, 21, 23], [-5, 6, 2**62])
    assert step.table_entries_N.tolist() == [90] and step.fills is not None
    assert Staging("cpu", 3).stage(rows[:1], {}, [], []).num_settings == 0


def test_a_decode_step_sends_no_token_rows() -> None:
    rows = [StepRow(slot, slot + 3, 1, [], True) for slot in (4, 1)]
    step = Staging("cpu", 2).stage(rows, {}, [], [])
    assert step.where.one_token
    assert step.packed[step.where.token_ids : step.where.token_ids + 2].tolist() == [-1, -1]
    assert (step.logits_index_S.tolist(), step.sampled_slots_S.tolist()) == ([0, 1], [4, 1])
    assert step.copies == () and step.fills is None


def test_rows_of_one_prompt_token_may_read_each_others_pages() -> None:
    """The first completes a page that the second, admitted in the same plan, found in the index."""
    rows = [StepRow(0, 15, 1, [3], True), StepRow(1, 16, 1, [4], True), StepRow(2, 40, 1, [], True)]
    staging = Staging("cpu", 2)
    assert not staging.stage(rows, {}, [], []).where.one_token
    assert staging.stage(rows[1:], {}, [], []).where.one_token, "generated tokens are in nobody else's prefix yet"


def test_a_step_that_is_larger_than_the_buffer_gets_a_larger_one() -> None:
    staging = Staging("cpu", 2)
    tokens = list(range(3 * FIRST_SIZE))
    step = staging.stage([StepRow(1, 0, len(tokens), tokens, False)], {}, [], [])
    assert step.packed[step.where.token_ids : step.where.token_ids + len(tokens)].tolist() == tokens
    step = staging.stage([StepRow(3, 2, 1, [9], True)], {}, [], [])
    assert (step.packed[: step.where.rows].tolist(), step.packed[step.where.token_ids].item()) == ([3], 9)


def page_memory(sizes: tuple[int, ...], seed: int) -> tuple[Pages, torch.Tensor]:
    memory = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    groups = tuple(SimpleNamespace(page_bytes=size, layers=(), zero_fresh=False) for size in sizes)
    return Pages(SimpleNamespace(groups=groups), memory, poison=False), memory  # type: ignore[arg-type]


def test_copies_have_the_effect_of_their_list_order() -> None:
    """Pages of two sizes in the same bytes: copies read and overwrite what others of the list write and read."""
    rng = random.Random(4)
    sizes = (64, 160)
    launches = 0
    for seed in range(30):
        pages, memory = page_memory(sizes, seed)
        expected = memory.clone()
        copies = []
        for _ in range(8):
            group = rng.randrange(2)
            size = sizes[group]
            source, target = rng.sample(range(960 // size), 2)
            copies.append(PageCopy(group, source * size, target * size))
            expected[target * size : target * size + size] = expected[source * size : source * size + size].clone()
        waves = pages.copies(copies)
        launches += len(waves)
        for wave in waves:
            rng.shuffle(wave)
        step = Staging("cpu", 1).stage([StepRow(0, 0, 1, [1], True)], {}, waves, [])
        pages.prepare(step)
        assert torch.equal(memory, expected)
    assert 30 < launches < 240


def test_copies_that_have_nothing_to_do_with_each_other_are_one_launch() -> None:
    pages, _ = page_memory((64,), 0)
    assert len(pages.copies([PageCopy(0, 64 * i, 1024 + 64 * i) for i in range(9)])) == 1
    assert len(pages.copies([PageCopy(0, 0, 1024), PageCopy(0, 0, 2048)])) == 1
    assert pages.copies([]) == []
