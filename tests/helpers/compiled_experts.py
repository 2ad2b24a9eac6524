"""Kernels of experts' products in Gluon, compiled as `helpers.compiled` says."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language._layouts import NVMMASharedLayout

from helpers.compiling import gluon
from pagerunner.ops.kernels.codes import E2M1, INT4
from pagerunner.ops.kernels.moe.moe_gluon import many_kernel
from pagerunner.ops.kernels.moe.moe_lanes import TILE, _wide
from pagerunner.ops.kernels.moe.moe_lanes_gluon import arrange_kernel, lanes_kernel
from pagerunner.ops.kernels.moe.moe_piped import COPY_REGISTERS, LAG, MULTIPLY_REGISTERS, STAGES
from pagerunner.ops.kernels.moe.moe_streams import streams_config
from pagerunner.ops.kernels.moe.moe_streams_gluon import streams_kernel

ROWS = NVMMASharedLayout(128, 16, 2)


def many(name: str, gated: bool, kind: int, bias: bool) -> dict[str, Any]:
    """Grouped products of `ops/kernels/moe/moe_piped.py`."""
    box = 128 if gated and kind != 2 else 256
    eight = name == "fp8e4nv"
    step, rows, own = (128, NVMMASharedLayout(128, 8, 2), "bf16") if eight else (64, ROWS, name)
    types = {
        "x_desc": f"tensordesc<{name}[64,{step}],{rows!r}>",
        "w_desc": f"tensordesc<{name}[{box},{step}],{rows!r}>",
        "x_ptr": "*" + name,
        "bias_ptr": "*" + own,
        "out_ptr": "*" + own,
        **dict.fromkeys(("weights_ptr", "xs_ptr", "s_ptr"), "*fp32"),
        "limit": "fp32",
        **dict.fromkeys(("order_ptr", "blocks_ptr", "starts_ptr"), "*i32"),
    }
    constants = {
        "E": 8,
        "N": 768,
        "K": 2048,
        "BOX": box,
        "STAGES": STAGES,
        "LAG": LAG,
        "BIAS": bias,
        "GATED": gated,
        "KIND": kind,
        "WEIGH": not gated,
        "REGS": MULTIPLY_REGISTERS,
        "COPY_REGS": COPY_REGISTERS,
        "PDL": True,
    }
    aligned = [name for name, type in types.items() if type[0] == "*"]
    return gluon(many_kernel, types, constants, aligned, num_warps=4, launch_pdl=True)


LANES = {
    "x_ptr": "*bf16",
    "w_ptr": "*u32",
    "s_ptr": "*u8",
    "r_ptr": "*fp32",
    "bias_ptr": "*bf16",
    "weights_ptr": "*fp32",
    "order_ptr": "*i32",
    "starts_ptr": "*i32",
    "out_ptr": "*bf16",
    "limit": "fp32",
}


def _form(form: str, inputs: int) -> tuple[str, dict[str, Any]]:
    """Scales of experts in 4 bits, and the constants that say what codes are. int4 has groups of 128, or of 32 where these aren't whole."""
    if form == "int4":
        return "*bf16", {"FORM": INT4.value, "SHARE": 1 if inputs % 128 else 4, "FACTORS": False}
    two = form == "nvfp4"  # scales of half runs are read two at a time
    return "*u16" if two else "*u8", {"FORM": E2M1.value, "SHARE": 1, "FACTORS": two}


def _lanes(kernel: Any, constants: dict[str, Any], scales: str = "*u8", **options: Any) -> dict[str, Any]:
    names = [name for name in kernel.arg_names if name not in constants]
    aligned = [name for name in names if name.endswith("expert") or LANES.get(name, "i32")[0] == "*"]
    return gluon(kernel, LANES | {"s_ptr": scales}, constants, aligned, **options)


def arrange(features: int) -> dict[str, Any]:
    """Inputs in the order of lanes."""
    constants = {"K": features, "WIDE": _wide(features), "BLOCK": 1024, "PDL": True}
    return _lanes(arrange_kernel, constants, num_warps=4)


def lanes(features: int, inner: int, kind: int, gated: bool, form: str = "mxfp4") -> dict[str, Any]:
    """Experts in 4 bits of `ops/kernels/moe/moe_lanes.py`."""
    outputs, inputs = (inner, features) if gated else (features, inner)
    constants = {
        "E": 32,
        "BE": 32,
        "N": outputs,
        "K": inputs,
        "WIDE": _wide(inputs),
        "BM": TILE.pairs,
        "BN": TILE.rows,
        "OUT": _wide(outputs) if gated else outputs,
        "STAGES": TILE.stages,
        "BIAS": True,
        "GATED": gated,
        "KIND": kind,
        "WEIGH": not gated,
        "PDL": True,
    }
    scales, own = _form(form, inputs)
    return _lanes(
        lanes_kernel, constants | {"FACTORS": own["FACTORS"]}, scales, num_warps=TILE.warps, maxnreg=TILE.registers
    )


def streams(features: int, inner: int, each: int, kind: int, gated: bool, form: str = "mxfp4") -> dict[str, Any]:
    """Experts in 4 bits of `ops/kernels/moe/moe_streams.py`, for `each` pairs an expert."""
    config = streams_config(each * 32, 32)
    assert config is not None
    outputs, inputs = (inner, features) if gated else (features, inner)
    scales, own = _form(form, inputs)
    codes = NVMMASharedLayout(64 * config.steps, 32, 2)
    box = 32 if gated and kind != 2 else 64
    types = {
        "x_desc": f"tensordesc<bf16[16,64],{ROWS!r}>",
        "w_desc": f"tensordesc<i32[{box},{16 * config.steps}],{codes!r}>",
        "s_ptr": scales,
        "r_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "weights_ptr": "*fp32",
        "order_ptr": "*i32",
        "tiles_ptr": "*i32",
        "count_ptr": "*i32",
        "out_ptr": "*bf16",
        "limit": "fp32",
    }
    constants = {
        "E": 32,
        "N": outputs,
        "K": inputs,
        "OUT": -(-outputs // 128) * 128 if gated else outputs,
        "WIDTHS": config.widths,
        "S": config.steps,
        "STAGES": config.stages,
        "BIAS": True,
        "GATED": gated,
        "KIND": kind,
        "WEIGH": not gated,
        "PDL": True,
    }
    aligned = [name for name, type in types.items() if type[0] == "*"]
    return gluon(streams_kernel, types, constants | own, aligned, num_warps=4, launch_pdl=True)
