"""Experts in MXFP4 by lanes: the order of inputs. Gluon has no interpreter: test_compiled.py compiles the kernels, `tests/gpu` runs them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pagerunner.ops.kernels import moe_lanes
from pagerunner.ops.kernels.moe_lanes import serves_lanes
from pagerunner.ops.stored import Stored4


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


def test_only_mxfp4_of_whole_tiles_is_served(monkeypatch):
    def stored(
        group: int = 32, numbers: str = "e2m1", dtype: torch.dtype = torch.uint8, outputs: int = 128, inputs: int = 64
    ):
        codes, scales = (
            torch.zeros(2, outputs, inputs // 2, dtype=torch.uint8),
            torch.zeros(2, outputs, inputs // group),
        )
        return Stored4(codes, scales.to(dtype), group, numbers)

    assert not serves_lanes(stored())  # not on a card
    monkeypatch.setattr(moe_lanes, "has_gluon", lambda device: True)
    assert serves_lanes(stored()) and serves_lanes(stored(dtype=torch.float8_e8m0fnu))
    assert not serves_lanes(stored(dtype=torch.float8_e4m3fn)) and not serves_lanes(stored(group=16))
    assert not serves_lanes(stored(numbers="int4")) and not serves_lanes(stored(outputs=96))
    assert not serves_lanes(stored(inputs=32))
    assert not serves_lanes(stored()._replace(rows=torch.ones(2, 128)))
