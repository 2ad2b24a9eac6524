"""Hyper-connections' kernels against their twins, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.launches import noted_launches
from pagerunner.ops.linear import Norm
from pagerunner.ops.streams import Gates, Left, StreamWeights, add_left, end_streams, enter_sublayer

SHAPES = [(1, 4, 70), (3, 3, 48), (19, 2, 130), (5, 1, 20)]


def weights(count: int, features: int, numbers: int) -> StreamWeights:
    fn = torch.randn(numbers, count * features) / (count * features) ** 0.5
    scale = torch.rand(3 if numbers > count else 1) + 0.5
    return StreamWeights(fn, torch.randn(numbers), scale, 1e-3, 1e-4)


def left(tokens: int, count: int, features: int, dtype: torch.dtype) -> Left:
    among = torch.rand(tokens, count, count)
    return Left(torch.randn(tokens, features).to(dtype), Gates(torch.rand(tokens, count), among / count))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    exact = want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-4 if exact else 2e-3, atol=1e-5 if exact else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_entering_a_sublayer(shape: tuple[int, int, int], first: bool, dtype: torch.dtype) -> None:
    tokens, count, features = shape
    streams = torch.randn(shape).to(dtype)
    norm = Norm(torch.rand(features).to(dtype), 1e-6)
    given = None if first else left(*shape, dtype)
    args = (streams, given, weights(count, features, (2 + count) * count), 4, norm)
    got, want = enter_sublayer.kernel(*args), enter_sublayer.twin(*args)
    for mine, other in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        close(mine, other)
    assert tuple(got[2].among_TMM.shape) == (tokens, count, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_the_end_of_the_streams(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    count, features = shape[1:]
    args = (torch.randn(shape).to(dtype), left(*shape, dtype), weights(count, features, count))
    norm = Norm(torch.rand(features).to(dtype), 1e-6)
    got, want = end_streams.kernel(*args, norm), end_streams.twin(*args, norm)
    close(got[0], want[0])
    close(got[1], want[1])


def test_rows_and_columns_sum_to_one_and_streams_take_what_is_left() -> None:
    args = (torch.randn(2, 4, 32), None, weights(4, 32, 24)._replace(eps=1e-9), 60, Norm(torch.ones(32), 1e-6))
    _, streams, gates = enter_sublayer.kernel(*args)
    for dim in (1, 2):
        torch.testing.assert_close(gates.among_TMM.sum(dim), torch.ones(2, 4), rtol=1e-3, atol=1e-3)
    y = torch.randn(2, 32)
    whole = add_left(streams, Left(y, gates))  # what is mixed keeps the streams' sum
    torch.testing.assert_close(
        whole.sum(1), streams.sum(1) + gates.out_TM.sum(1, keepdim=True) * y, rtol=1e-3, atol=1e-3
    )


def test_no_tokens() -> None:
    args = (torch.empty(0, 4, 32), None, weights(4, 32, 24), 2, Norm(torch.ones(32), 1e-6))
    x, streams, gates = enter_sublayer.kernel(*args)
    assert x.shape == (0, 32) and streams.shape == (0, 4, 32) and gates.out_TM.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("few", [0, 256], ids=["many tokens", "few"])
def test_more_parts_than_are_added_together(few: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagerunner.ops.kernels import streams

    for name, value in (
        ("BLOCK_PARTS", 2),
        ("BLOCK_FEATURES", 16),
        ("multiprocessors", lambda device: 9),
        ("FEW", few),
    ):
        monkeypatch.setattr(streams, name, value)
    shape = (67 if few == 0 else 2, 4, 70)
    norm = Norm(torch.rand(70).to(dtype), 1e-6)
    args = (torch.randn(shape).to(dtype), left(*shape, dtype), weights(4, 70, 24), 3, norm)
    got, want = enter_sublayer.kernel(*args), enter_sublayer.twin(*args)
    for mine, other in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        close(mine, other)


def test_numbers_of_tokens_that_need_the_same_kernels_are_told() -> None:
    """By `enter_sublayer_kernels`, so that a warm-up runs one of each."""
    given, norm = weights(4, 512, 24), Norm(torch.zeros(512), 1e-6)
    found: dict[Any, set[Any]] = {}
    with noted_launches() as launched:
        for tokens in (1, 16, 17, 64, 65, 128, 129, 256, 257, 1024, 4225, 8448, 8449, 20_000):
            launched.clear()
            enter_sublayer(torch.empty(tokens, 4, 512, dtype=torch.bfloat16), None, given, 3, norm)
            told = enter_sublayer.kernels_for(tokens, 512, torch.device("cpu"))
            assert found.setdefault(told, set(launched)) == launched, tokens
    assert len(found) == len({frozenset(one) for one in found.values()}) > 4
