"""What a step brings from the host and back, while pages are copied."""

from __future__ import annotations

import pytest
import torch

from helpers.step_cases import check_host_words
from pagerunner.ops.async_copy import BestCopies, ToHost, bits_to_device, put, to_device
from pagerunner.ops.host_words import from_host, to_host
from pagerunner.runner.staging import _Buffers

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("words", [1, 500, 8_192, 700_001])
def test_words_come_from_the_host_and_go_back_as_by_the_twins(words: int) -> None:
    check_host_words(from_host, to_host, words, "cuda")


def test_every_way_to_the_device_and_back() -> None:
    assert to_device([3, -1, 2**40], torch.int64, DEVICE).tolist() == [3, -1, 2**40]
    assert to_device([], torch.int64, DEVICE).tolist() == []
    assert to_device([[1.5], [2.5]], torch.float32, DEVICE).tolist() == [[1.5], [2.5]]
    bits = bits_to_device([bytes(range(8)), bytes(8)], DEVICE)
    assert bits.cpu().numpy().tobytes() == bytes(range(8)) + bytes(8)
    there = torch.zeros(7, dtype=torch.int32, device=DEVICE)
    put(torch.arange(3, dtype=torch.int32), there[3:6])
    assert there.tolist() == [0, 0, 0, 0, 1, 2, 0]
    table = torch.arange(12, device=DEVICE).view(3, 4)
    assert ToHost((table[:, 1], table, table.float()), DEVICE).lists() == [
        [1, 5, 9],
        table.tolist(),
        table.float().tolist(),
    ]


def test_memory_isnt_handed_out_again_before_it_has_been_read() -> None:
    torch.cuda._sleep(50_000_000)
    moved = [to_device([number] * 64, torch.int64, DEVICE) for number in range(20)]
    for _ in range(20):
        torch.full((64,), -1).pin_memory()
    dropped = ToHost((torch.full((64,), 7, device=DEVICE),), DEVICE)
    del dropped
    others = [torch.full((64,), -1).pin_memory() for _ in range(20)]
    torch.cuda.synchronize()
    assert [there.tolist() for there in moved] == [[number] * 64 for number in range(20)]
    assert all(bool((other == -1).all()) for other in others)


def test_steps_dont_wait_for_pages() -> None:
    """Each step's integers and tokens are right, and all steps end before the pages have come and gone."""
    size, pages = 2**30, torch.zeros(2**30, dtype=torch.uint8, device=DEVICE)
    host, streams = torch.zeros(size, dtype=torch.uint8, pin_memory=True), [torch.cuda.Stream() for _ in range(2)]
    buffers, copies, best = _Buffers(DEVICE, 3), BestCopies(64, DEVICE), torch.zeros(64, device=DEVICE)

    def step(number: int) -> list[int]:
        buffers.take(2048)[:2048] = number + 7
        there = buffers.send(2048)
        tokens = there[:64] * 2 + there[-64:]
        return copies.copy(tokens, best).lists()[0]

    assert step(0) == [21] * 64  # compiles
    torch.cuda.synchronize()
    for stream, (target, source) in zip(streams, ((pages, host), (host, pages)), strict=True):
        with torch.cuda.stream(stream):
            for _ in range(3):
                target.copy_(source, non_blocking=True)
    for number in range(40):
        assert step(number) == [3 * (number + 7)] * 64
    assert not any(stream.query() for stream in streams), "steps have waited for pages"
    torch.cuda.synchronize()
