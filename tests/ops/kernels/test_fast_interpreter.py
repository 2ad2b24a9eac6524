"""The faster interpreter computes an operator again as Triton's own did it the first time, and its errors stay."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from helpers.fast_interpreter import CASTS, FOUND, OPERATORS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")

DTYPES = [torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8]


@triton.jit
def _both(x, y, OP: tl.constexpr):
    if OP == 0:
        return x + y
    elif OP == 1:
        return x * y - 3
    elif OP == 2:
        return tl.maximum(x, y) + tl.minimum(x, 2)
    elif OP == 3:
        return ((x < y) | (x >= 2) & (y != 3)) ^ ((x <= y) & (x > -2) | (y == 4))
    elif OP == 4:
        return x / y
    elif OP == 5:
        return (x // y) + (x % y)
    return (x & y) | (x ^ 5) << 1 >> 1


@triton.jit
def _kernel(x_ptr, y_ptr, block_ptr, scalar_ptr, OP: tl.constexpr):
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    x, y, one = tl.load(x_ptr + rows), tl.load(y_ptr + columns), tl.load(y_ptr + 1)
    tl.store(block_ptr + rows * 8 + columns, _both(x, y, OP).to(tl.float64))
    tl.store(scalar_ptr + rows, _both(x, one, OP).to(tl.float64))


def forget() -> None:
    for known in (*FOUND.values(), CASTS):
        known.clear()


def results(left: torch.dtype, right: torch.dtype, op: int) -> tuple[torch.Tensor, torch.Tensor] | str:
    x = (
        torch.tensor([-7.0, 1.0, 2.5, 100.0]).to(left)
        if left != torch.uint8
        else torch.tensor([249, 1, 2, 100]).to(left)
    )
    y = torch.arange(1, 9).to(right)
    block, scalar = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    try:
        _kernel[(1,)](x, y, block, scalar, op)
    except Exception as error:
        return f"{type(error)}: {error}"
    return block, scalar


def same(first: tuple[torch.Tensor, torch.Tensor] | str, again: tuple[torch.Tensor, torch.Tensor] | str) -> bool:
    if isinstance(first, str) or isinstance(again, str):
        return first == again
    return all(
        torch.equal(one.view(torch.int64), other.view(torch.int64)) for one, other in zip(first, again, strict=True)
    )


@pytest.mark.parametrize("op", range(7))
def test_an_operator_does_again_what_it_did(op: int) -> None:
    own = {}
    for types in itertools.product(DTYPES, DTYPES):
        forget()
        own[types] = results(*types, op)
    assert sum(not isinstance(one, str) for one in own.values()) >= 5  # pairs of integers of one signedness
    for types in (*own, *own):  # beside what was found for other types, and again
        assert same(own[types], results(*types, op)), types


def test_most_operators_are_found_once() -> None:
    forget()
    for op, dtype in itertools.product(range(7), (torch.float32, torch.int32, torch.uint8)):
        results(dtype, dtype, op)
    missing = [name for name in OPERATORS if not any(FOUND[name].values())]
    assert missing == []


@triton.jit
def _cast_kernel(x_ptr, out_ptr, one_ptr, TO: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(TO))
    tl.store(one_ptr, tl.load(x_ptr + 1).to(TO))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "int64", "uint8"])
def test_a_cast_does_again_what_it_did(name: str) -> None:
    forget()
    to, dtype = getattr(tl, name), getattr(torch, name)
    for _ in range(3):
        for source in (*DTYPES, torch.bfloat16, torch.bool):
            if to == tl.bfloat16 and not source.is_floating_point:
                continue  # Triton's own interpreter takes the integer's bits
            x = torch.tensor([0.0, 1.0, 3.0, 100.0]).to(source)
            found, one = torch.zeros(4, dtype=dtype), torch.zeros(1, dtype=dtype)
            _cast_kernel[(1,)](x, found, one, to)
            assert torch.equal(found, x.to(dtype)) and torch.equal(one, x[1:2].to(dtype)), source
    assert any(CASTS.values())
