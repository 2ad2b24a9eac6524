"""Experts in MXFP4 by lanes: Gluon has no interpreter, so the kernels are compiled for a card that isn't there, and the order of inputs is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.compiled_code import SCAN, run_compiling
from pagerunner.ops.kernels import moe_lanes
from pagerunner.ops.kernels.moe_lanes import serves_lanes
from pagerunner.ops.stored import Stored4

PROGRAM = (
    """
import sys
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton import compile
from triton.experimental.gluon._runtime import GluonASTSource
from pagerunner.ops.kernels.moe_lanes import _wide, lanes_config
from pagerunner.ops.kernels.moe_lanes_gluon import arrange_kernel, lanes_kernel
"""
    + SCAN
    + """
TYPES = {"x_ptr": "*bf16", "w_ptr": "*u32", "s_ptr": "*u8", "bias_ptr": "*bf16", "weights_ptr": "*fp32", "order_ptr": "*i32",
         "starts_ptr": "*i32", "out_ptr": "*bf16", "limit": "fp32"}

def compiled(kernel, constants, **options):
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*" or name.endswith("expert")}
    source = GluonASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, aligned)
    code = scanned(compile(source, target=GPUTarget("cuda", 90, 32), options=options))
    assert "STL" not in code, "registers are spilled"
    return code

features, inner, each = (int(argument) for argument in sys.argv[1:])
compiled(arrange_kernel, {"K": features, "WIDE": _wide(features), "BLOCK": 1024, "PDL": True}, num_warps=4)
config = lanes_config(each * 32, 32)
for kind, gated in ((0, True), (2, True), (0, False)):
    N, K = (inner, features) if gated else (features, inner)
    code = compiled(
        lanes_kernel,
        {"E": 32, "BE": 32, "N": N, "K": K, "WIDE": _wide(K), "OUT": _wide(N) if gated else N, "BM": config.pairs, "BN": config.rows,
         "STAGES": config.stages, "BIAS": True, "GATED": gated, "KIND": kind, "WEIGH": not gated, "GROUPS": config.groups, "PDL": True},
        num_warps=config.warps, maxnreg=config.registers,
    )
    assert "LDGSTS.E.BYPASS.128" in code, "a copy brings 16 bytes for each lane"
"""
)


@pytest.mark.days(3)
@pytest.mark.parametrize(("features", "inner", "each"), [(2880, 2880, 20), (2048, 768, 8), (608, 352, 1)])
def test_kernels_are_compiled_without_faults(features, inner, each, tmp_path):
    run_compiling(PROGRAM, tmp_path, features, inner, each)


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
