"""Grouped products, as far as they can be tested without a card. Triton's interpreter doesn't know Gluon; `tests/gpu` runs the kernel."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled_code import SCAN, run_compiling
from pagerunner.ops.kernels import moe
from pagerunner.ops.kernels.moe_piped import (
    COPY_REGISTERS,
    LAG,
    MULTIPLY_REGISTERS,
    ROWS,
    STAGES,
    row_blocks,
)
from pagerunner.ops.routing import Routes, Routing, route


@pytest.mark.parametrize(("tokens", "experts", "active"), [(300, 6, 3), (1, 5, 2), (700, 32, 4), (129, 3, 1)])
def test_blocks_of_rows_are_those_of_all_experts(tokens, experts, active):
    torch.manual_seed(0)
    routes = moe._ordered(route.kernel(torch.randn(tokens, experts), Routing(active)), experts)
    table, starts = row_blocks(routes)
    want, first = [], []
    pairs = routes.starts_E1.tolist()
    for expert in range(experts):
        begin, end = pairs[expert : expert + 2]
        first.append(len(want))
        want += [[expert, first[-1], begin, end]] * -(-(end - begin) // ROWS)
    assert starts.tolist() == [*first, len(want)] and len(want) <= len(table)
    assert table[: len(want)].tolist() == want


def test_blocks_of_rows_where_one_expert_has_all_pairs_and_others_none():
    starts = torch.tensor([0, 0, 1000, 1000], dtype=torch.int32)
    routes = Routes(
        torch.rand(1000, 1), torch.ones(1000, 1, dtype=torch.int32), torch.arange(1000, dtype=torch.int32), starts
    )
    table, first = row_blocks(routes)
    assert first.tolist() == [0, 0, 8, 8] and table[:8].tolist() == 8 * [[1, 0, 0, 1000]]


def test_registers_of_all_groups_are_those_that_a_program_has():
    assert 128 * (2 * MULTIPLY_REGISTERS + COPY_REGISTERS) <= 384 * 168 <= 65536
    assert 0 < LAG <= STAGES - 2


PROGRAM = (
    """
import re, subprocess
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from pagerunner.ops.kernels.moe_gluon import many_kernel
from pagerunner.ops.kernels.moe_piped import COPY_REGISTERS, LAG, MULTIPLY_REGISTERS, STAGES
"""
    + SCAN
    + """
tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
layout = NVMMASharedLayout(128, 16, 2)
for name, gated, kind, bias in (("bf16", True, 0, False), ("fp16", False, 0, False), ("bf16", True, 2, True)):
    box = 128 if gated and kind != 2 else 256
    types = {"x_ptr": "*" + name, "x_desc": f"tensordesc<{name}[64,64],{layout!r}>", "w_desc": f"tensordesc<{name}[{box},64],{layout!r}>",
             "bias_ptr": "*" + name, "weights_ptr": "*fp32", "order_ptr": "*i32", "blocks_ptr": "*i32", "starts_ptr": "*i32", "out_ptr": "*" + name,
             "active": "i32", "programs": "i32", "limit": "fp32"}
    constants = {"E": 8, "N": 768, "K": 2048, "BOX": box, "STAGES": STAGES, "LAG": LAG, "BIAS": bias, "GATED": gated, "KIND": kind,
                 "WEIGH": not gated, "REGS": MULTIPLY_REGISTERS, "COPY_REGS": COPY_REGISTERS, "PDL": True}
    attributes = {(place,): [["tt.divisibility", 16]] for place in (0, 3, 4, 5, 6, 7, 8)}
    types.update(dict.fromkeys(constants, "constexpr"))
    values = {(list(types).index(key),): value for key, value in constants.items()}
    source = GluonASTSource(many_kernel, types, values, attributes)
    options = {"num_warps": 4, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    scanned(kernel)
    ptx = Path("kernel.ptx")
    ptx.write_text(kernel.asm["ptx"])
    command = [tools / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", "again.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert not re.search("C75[0-9][0-9]", said), said
    assert " 0 bytes spill stores" in said, said
"""
)


def test_the_compiler_keeps_products_on_their_way(tmp_path):
    """Compiled for a card that isn't there. ptxas says so (C75xx) when it runs products one by one; nothing else would show it."""
    run_compiling(PROGRAM, tmp_path)
