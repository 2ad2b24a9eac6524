"""Stored matrices: the order of their bits, and what they stand for, by plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.alive import Alive
from helpers.stored_cases import stored
from pagerunner.errors import ConfigError
from pagerunner.ops import stored as stored_ops
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.stored import Stored, Stored4, Stored8, dense, pack4, unpack4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_a_runs_bytes_hold_neighbours_of_one_half_in_their_low_nibbles():
    columns = [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        15,
        14,
        13,
        12,
        11,
        10,
        9,
        8,
        7,
        6,
        5,
        4,
        3,
        2,
        1,
        0,
    ]
    bytes_ = "f0e1d2c3b4a5968778695a4b3c2d1e0f"
    packed = pack4(torch.tensor([columns], dtype=torch.uint8))
    assert bytes(packed[0].tolist()).hex() == bytes_
    assert unpack4(packed)[0].tolist() == columns


def test_runs_follow_one_another_and_parts_are_slices():
    codes = torch.randint(0, 16, (3, 5, 96), dtype=torch.uint8)
    packed = pack4(codes)
    assert packed.shape == (3, 5, 48)
    for e, o, i in [(0, 0, 0), (2, 4, 95), (1, 3, 50), (1, 2, 63), (0, 1, 79)]:
        byte = int(packed[e, o, i // 32 * 16 + i % 16])
        assert codes[e, o, i] == (byte >> 4 if i % 32 >= 16 else byte & 15)
    assert torch.equal(unpack4(packed), codes)
    assert torch.equal(unpack4(packed[1, 2:4, 16:]), codes[1, 2:4, 32:])


def test_a_row_that_does_not_end_with_a_run_is_refused():
    with pytest.raises(ConfigError, match="has 40 input features; only multiples of 32"):
        pack4(torch.zeros(2, 40, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("block", [(1, 70), (128, 128), (4, 32)])
def test_eight_bits_by_plain_loops(dtype, block):
    codes = torch.randint(-100, 100, (2, 9, 70)).to(dtype)
    scales = torch.rand(2, -(-9 // block[0]), -(-70 // block[1]))
    stored = Stored8(codes, scales, block)
    got = dense(stored, torch.float32)
    assert got.shape == stored.shape == (2, 9, 70)
    for e in range(2):
        for o in range(9):
            for i in range(0, 70, 7):
                assert got[e, o, i] == codes[e, o, i].float() * scales[e, o // block[0], i // block[1]]


SCALES = {
    "float16": lambda shape: torch.rand(shape).half(),
    "bfloat16": lambda shape: torch.rand(shape).bfloat16(),
    "float8_e4m3fn": lambda shape: torch.rand(shape).to(torch.float8_e4m3fn),
    "e8m0": lambda shape: torch.randint(110, 140, shape, dtype=torch.uint8),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("group", [16, 32, 64, 192])
@pytest.mark.parametrize("numbers", ["int4", "zeros", "e2m1", "rows"])
def test_four_bits_by_plain_loops(numbers, group, scale):
    codes = torch.randint(0, 16, (5, 192), dtype=torch.uint8)
    scales = SCALES[scale]((5, 192 // group))
    zeros = torch.randint(0, 16, (5, 192 // group), dtype=torch.uint8) if numbers == "zeros" else None
    rows = torch.rand(5) if numbers == "rows" else None
    form = "e2m1" if numbers in ("e2m1", "rows") else "int4"
    stored = Stored4(pack4(codes), scales, group, form, zeros, rows)
    got = dense(stored, torch.float32)
    assert got.shape == stored.shape == (5, 192)
    for o in range(5):
        for i in range(0, 192, 5):
            code, raw = int(codes[o, i]), scales[o, i // group]
            value = E2M1[code] if form == "e2m1" else code - (8 if zeros is None else int(zeros[o, i // group]))
            by = 2.0 ** (int(raw) - 127) if scale == "e8m0" else float(raw)
            by *= 1.0 if rows is None else float(rows[o])
            assert float(got[o, i]) == pytest.approx(value * by, rel=1e-6)


def test_every_code_and_every_scale_byte():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(256, 32)
    stored = Stored4(pack4(codes), torch.arange(256, dtype=torch.uint8)[:, None], 32, "e2m1")
    got = dense(stored, torch.float64)
    assert torch.equal(got[127, :16], torch.tensor(E2M1, dtype=torch.float64))
    assert got[255].isnan().all()
    assert got[1, 2] == math.ldexp(1.0, -126) and got[254, 2] == math.ldexp(1.0, 127)


MATRICES: dict[str, Stored] = {
    "e4m3": Stored8(torch.randn(12, 64).to(torch.float8_e4m3fn), torch.rand(12, 1), (1, 64)),
    "int4": Stored4(pack4(torch.randint(0, 16, (12, 64), dtype=torch.uint8)), torch.rand(12, 2).half(), 32, "int4"),
}


@pytest.mark.parametrize("name", MATRICES)
def test_products_with_a_stored_matrix_are_those_of_what_it_stands_for(name):
    stored, matrix = MATRICES[name], dense(MATRICES[name], torch.float32)
    x, bias, norm = torch.randn(3, 64), torch.randn(12), Norm(torch.rand(64), 1e-6)
    assert torch.equal(linear(x, stored, bias), linear(x, matrix, bias))
    assert torch.equal(norm_linear(x, norm, stored), norm_linear(x, norm, matrix))
    assert torch.equal(norm_linear_silu(x, norm, stored, bias), norm_linear_silu(x, norm, matrix, bias))
    got, want = torch.ones(3, 12), torch.ones(3, 12)
    linear_add_(x, stored, got)
    linear_add_(x, matrix, want)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "form",
    ["fp8 row", "fp8 block 2x32", "int8 row", "int4 f16 32 zeros", "e2m1 e8m0 32", "e2m1 e4m3 16 rows"],
)
@pytest.mark.parametrize("experts", [None, 3])
def test_large_matrices_are_unpacked_some_rows_at_a_time(form, experts, monkeypatch):
    """Otherwise a thread that loads fp4 takes the matrix in float32 six times."""
    matrix = stored(form, 250, 256, experts=experts)
    whole = dense(matrix, torch.float32)
    monkeypatch.setattr(stored_ops, "_PIECE", 4096)
    with Alive() as alive:
        pieces = dense(matrix, torch.float32)
    assert torch.equal(pieces, whole) and alive.peak < 2 * whole.nbytes
