"""Experts in MXFP4 by lanes: the order of inputs. Gluon has no interpreter: test_compiled.py compiles the kernels, `tests/gpu` runs them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from pagerunner.ops.kernels.codes import E2M1, INT4
from pagerunner.ops.kernels.moe import moe_lanes
from pagerunner.ops.kernels.moe.moe_lanes import serves_lanes
from pagerunner.ops.stored import Stored4, dense


@pytest.mark.parametrize("columns", [2880, 2048, 608, 352, 448, 64, 256])
def test_inputs_have_the_order_in_which_lanes_hold_weights(columns, monkeypatch):
    kernels, wide = moe_lanes._kernels(), moe_lanes._wide(columns)
    monkeypatch.setattr(kernels, "gl", SimpleNamespace(where=torch.where))
    monkeypatch.setattr(kernels, "CHUNK", moe_lanes.COLUMNS)
    assert columns <= wide < columns + 256
    places = kernels.place_of.fn(torch.arange(wide), columns)
    assert sorted(places.tolist()) == list(range(wide))
    at = torch.empty(wide, dtype=torch.long)
    at[places] = torch.arange(wide)
    for first in range(0, wide, 256):
        runs = min(wide - first, 256) // 128  # of each lane
        order = [
            first + (lane * runs + step) * 32 + half * 16 + word * 4 + second * 2 + odd
            for step in range(runs)
            for half in range(2)
            for word in range(4)
            for odd in range(2)
            for lane in range(4)
            for second in range(2)
        ]
        assert at[first : first + 128 * runs].tolist() == order


def test_only_forms_that_the_kernels_read_in_whole_tiles_are_served(monkeypatch):
    def stored(
        group: int = 32, numbers: str = "e2m1", dtype: torch.dtype = torch.uint8, outputs: int = 128, inputs: int = 64
    ):
        codes, scales = (
            torch.zeros(2, outputs, inputs // 2, dtype=torch.uint8),
            torch.zeros(2, outputs, inputs // group),
        )
        return Stored4(codes, scales.to(dtype), group, numbers)

    e4m3, rows = torch.float8_e4m3fn, torch.ones(2, 128)
    assert not serves_lanes(stored())  # not on a card
    monkeypatch.setattr(moe_lanes, "has_gluon", lambda device: True)
    assert serves_lanes(stored()) and serves_lanes(stored(dtype=torch.float8_e8m0fnu))
    assert serves_lanes(stored(16, dtype=e4m3)) and serves_lanes(stored(16, dtype=e4m3)._replace(rows=rows))
    assert not serves_lanes(stored(dtype=e4m3)) and not serves_lanes(stored(group=16))
    assert not serves_lanes(stored(outputs=96)) and not serves_lanes(stored(inputs=32))
    assert not serves_lanes(stored()._replace(rows=rows))
    assert not serves_lanes(stored(numbers="int4", dtype=torch.bfloat16))


def run(code: str, *given: torch.Tensor) -> list[torch.Tensor]:
    """What the few instructions of PTX that make numbers leave in their results, words as int64. $0 and on are results, then what is given."""
    results = len(set(re.findall(r"\$\d", code))) - len(given)
    words = {f"${results + number}": own for number, own in enumerate(given)}

    def pairs(word: torch.Tensor) -> torch.Tensor:
        return torch.stack((word & 0xFFFF, word >> 16), -1).to(torch.uint16).view(torch.bfloat16).double()

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        halves = numbers.bfloat16().view(torch.uint16).long()
        return halves[..., 0] | halves[..., 1] << 16

    ways = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shr.u32": lambda a, b: a >> b,
        "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
        "lop3.b32": lambda a, b, c, table: a & b | c if table == 0xEA else None,
        "add.rn.bf16x2": lambda a, b: packed(pairs(a) + pairs(b)),
        "mul.rn.bf16x2": lambda a, b: packed(pairs(a) * pairs(b)),
    }
    for line in code.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name and name != ".reg":
            target, *operands = (part.strip() for part in rest.split(","))
            words[target] = ways[name](*(words[o] if o in words else torch.tensor(int(o, 0)) for o in operands))
    return [words[f"${number}"] for number in range(results)]


@pytest.mark.parametrize(("form", "numbers", "group"), [(E2M1, "e2m1", 32), (E2M1, "e2m1", 16), (INT4, "int4", 32)])
def test_codes_and_scales_become_what_the_twin_has(form, numbers, group):
    """All codes in all places of a word, times scales; e2m1 lifted as its inputs are not."""
    kernels, lift = moe_lanes._kernels(), 2.0 ** moe_lanes._kernels().lift_of.fn(form.value)
    codes = torch.arange(256).repeat_interleave(16).view(-1, 16).to(torch.uint8).repeat(4, 1)
    codes[512:] = torch.randint(0, 256, (512, 16))
    scales = torch.randint(60, 190, (len(codes), 1)).to(torch.uint8)
    if numbers == "int4":
        scales = torch.randn(len(codes), 1).bfloat16()
        factors = [scales.view(torch.uint16).long().view(-1, 1) * 0x10001] * 2
    elif group == 32:
        factors = [(scales.long() + 63).clamp(max=255) * 0x800080] * 2
    else:
        scales = torch.arange(len(codes) * 2).remainder(127).to(torch.uint8).view(-1, 2).view(torch.float8_e4m3fn)
        bits = scales.view(torch.uint8).long() * 0x100010
        factors = [run(kernels.E4M3_FACTORS.value, bits[:, half : half + 1])[0] for half in range(2)]
    words = codes.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    want = dense(Stored4(codes, scales, group, numbers), torch.bfloat16).float()
    got = torch.empty_like(want)
    for half in range(2):
        own = run(kernels.numbers_of.fn(half, form.value), words, words >> 8, factors[half].expand_as(words))
        for odd, word in enumerate(own):
            found = torch.stack((word & 0xFFFF, word >> 16), -1).to(torch.uint16).view(torch.bfloat16).double() * lift
            got[:, 16 * half :].unflatten(1, (-1, 4))[:, :4, odd::2] = found.float()
    assert torch.equal(got, want)
