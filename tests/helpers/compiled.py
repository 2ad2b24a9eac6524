"""Kernels compiled for an H100 that isn't there, and what the compiler says about them. Gluon has no interpreter.

    python -m helpers.compiled '[["many", ...], ...]'

Starting a process that can compile takes longer than compiling a kernel, so one process compiles all cases: [kind, arguments...].
It prints a JSON object for each case: `said`, the words of ptxas about registers and products; `faults`, what
scripts/check_compiled.py finds in the instructions; `copies`, whether lanes copy 16 bytes each; or `error`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import sys
import traceback
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon.language._layouts import NVMMASharedLayout

from helpers import compiled_experts, compiled_latents
from helpers.compiled_experts import ROWS
from helpers.compiling import gluon
from helpers.stored_cases import stored
from pagerunner.ops import numerics
from pagerunner.ops.kernels import peer_sum
from pagerunner.ops.kernels.activation import rounded
from pagerunner.ops.kernels.codes import form_of
from pagerunner.ops.kernels.launch import padded
from pagerunner.ops.kernels.linear import linear
from pagerunner.ops.kernels.linear.linear_dense import config_of, whole_gates
from pagerunner.ops.kernels.linear.linear_dense_gluon import dense_kernel
from pagerunner.ops.kernels.linear.linear_eight import EightConfig
from pagerunner.ops.kernels.linear.linear_eight_gluon import eight_kernel
from pagerunner.ops.kernels.linear.linear_gluon import wide_kernel
from pagerunner.ops.kernels.linear.linear_held import held_config
from pagerunner.ops.kernels.linear.linear_held_gluon import held_kernel
from pagerunner.ops.kernels.linear.linear_parts import halves
from pagerunner.ops.kernels.linear.linear_wide import WideConfig, scale_bytes, stages_of
from pagerunner.ops.kernels.lora import lora, lora_gluon
from pagerunner.ops.kernels.moe import moe_routing
from pagerunner.ops.kernels.paged.paged_attention import draft_tiles, few_draft_tiles, few_tiles, merged_at_once
from pagerunner.ops.kernels.paged.paged_drafts import drafts_kernel
from pagerunner.ops.kernels.paged.paged_few import few_kernel
from pagerunner.ops.kernels.paged.paged_few_drafts import few_drafts_kernel
from pagerunner.ops.kernels.paged.paged_fixed import fixed_kernel, fixed_tiles
from pagerunner.ops.kernels.recurrent import causal_conv, gdn, mamba2
from pagerunner.ops.lora import COPIES
from pagerunner.ops.numerics import FIXED
from pagerunner.ops.stored import Stored8

SHARED = 227 * 1024


def wide(name: str, form: str, size: int, groups: int) -> dict[str, Any]:
    """Wide tiles of stored weights of `ops/kernels/linear/linear_wide.py`, with all their outputs if there are three groups, else with parts."""
    matrix, (tokens, more), done = stored(form, 8, 128), halves(size), groups == 3
    codes, eight = NVMMASharedLayout(64, 8, 2), isinstance(matrix, Stored8)
    scales = {torch.float32: "fp32", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv"}
    config = WideConfig(size, groups, 1)
    most, average = config.registers
    zeros, factors = not eight and matrix.zeros is not None, "row" in form if eight else matrix.rows is not None
    types = {
        "x_desc": f"tensordesc<{name}[{tokens},64],{ROWS!r}>",
        "more_desc": f"tensordesc<{name}[{more or 8},64],{ROWS!r}>",
        "w_desc": f"tensordesc<u8[64,64],{codes!r}>",
        "s_ptr": "*" + scales.get(matrix.scales.dtype, name),
        "z_ptr": "*u8",
        "r_ptr": "*fp32",
        "bias_ptr": "*" + name,
        "y_ptr": "*" + name if done else "*fp32",
    }
    constants = {
        "G": (0 if factors else matrix.block[1]) if eight else matrix.group,
        "BO": matrix.block[0] if eight else 1,
        "BT": tokens,
        "MORE": more,
        "C": groups,
        "STAGES": stages_of(config, 32, matrix, SHARED),
        "ROOM": 32 if scale_bytes(matrix) else 1,
        "FORM": form_of(matrix),
        "ZEROS": zeros,
        "FACTORS": factors,
        "DONE": done,
        "ADD": done,
        "BIAS": done,
        "REGS": most,
        "PDL": True,
    }
    aligned = ["s_ptr", "z_ptr", "r_ptr", "bias_ptr", "y_ptr", "num_features", "y_stride"]
    return gluon(wide_kernel, types, constants, aligned, num_warps=4, maxnreg=average, launch_pdl=True)


def eight(name: str, size: int, groups: int, grouped: bool, done: bool) -> dict[str, Any]:
    """Products of rounded inputs of `ops/kernels/linear/linear_eight.py`."""
    config, codes = EightConfig(size, groups, 1, 1 if done else 2), NVMMASharedLayout(128, 8, 2)
    count, tokens, more = config.cut
    box = {"w_desc": 64, "x_desc": tokens, "more_desc": more or 8}
    types = {key: f"tensordesc<{name}[{high},128],{codes!r}>" for key, high in box.items()}
    types |= {
        "x_scales_ptr": "*fp32",
        "w_scales_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "y_ptr": "*bf16" if done else "*fp32",
    }
    (most, average), (w_stages, x_stages) = config.registers, config.stages
    constants = {"N": count, "BT": tokens, "MORE": more, "WIDE": padded(size), "C": groups, "W_STAGES": w_stages, "X_STAGES": x_stages, "GROUPED": grouped,
                 "HIGH": 128 if grouped else 1, "SERIAL": config.serial, "DONE": done, "ADD": done, "BIAS": done, "REGS": most, "PDL": True}  # fmt: skip
    aligned = ["x_scales_ptr", "w_scales_ptr", "bias_ptr", "y_ptr", "y_stride", "num_features"]
    return gluon(eight_kernel, types, constants, aligned, num_warps=4, maxnreg=average, launch_pdl=True)


def dense(
    name: str, tokens: int, groups: int, done: bool, by_token: int = 0, late: bool = False, gates: int = 0
) -> dict[str, Any]:
    """Products of `ops/kernels/linear/linear_dense.py`; of so many gates and their ups, with the gate inside."""
    config = (gates and whole_gates(64, 2 * gates, 4096, 132)) or config_of(tokens, groups, 8)
    types = {
        "w_desc": f"tensordesc<{name}[{config.high // 2 if gates else 64},64],{ROWS!r}>",
        "x_desc": f"tensordesc<{name}[{tokens},64],{ROWS!r}>",
        "bias_ptr": "*" + name,
        "y_ptr": "*" + name if done else "*fp32",
    }
    registers, average = config.registers
    constants = {
        "BT": tokens,
        "C": config.groups,
        "W_STAGES": config.w_stages,
        "X_STAGES": config.x_stages,
        "DONE": done,
        "ADD": done and not gates,
        "BIAS": done and not gates,
        "GATED": gates > 0,
        "HIGH": config.high,
        "BY_TOKEN": by_token,
        "REGS": registers,
        "LATE": late,
        "PDL": True,
    }
    aligned = ["bias_ptr", "y_ptr", "y_stride", "num_features"]
    return gluon(dense_kernel, types, constants, aligned, num_warps=4, maxnreg=average, launch_pdl=True)


def held(name: str, outputs: int, inputs: int, norm: int, gated: bool) -> dict[str, Any]:
    """Products of `ops/kernels/linear/linear_held.py`."""
    config = held_config(inputs, outputs // 2 if gated else outputs, norm > 0, gated)
    pointers = ["x_ptr", "norm_ptr", "w_ptr", "bias_ptr", "y_ptr"]
    types = dict.fromkeys(pointers, "*" + name) | {"eps": "fp32"}
    constants = {
        "K": inputs,
        "S": config.warps,
        "BM": 8,
        "BN": config.features,
        "EARLY": config.early,
        "NORM": norm,
        "GATED": gated,
        "ADD": not norm and not gated,
        "BIAS": gated,
        "PDL": True,
    }
    aligned = [*pointers, "x_stride", "y_stride"]
    options = {"num_warps": config.warps, "maxnreg": config.registers, "launch_pdl": True}
    return gluon(held_kernel, types, constants, aligned, **options) | {
        "early": config.early,
        "features": config.features,
    }


def few(group: int, dim: int, early: bool, norm: bool, parts: int = 1) -> dict[str, Any]:
    """Decode attention of few rows, `ops/kernels/paged/paged_few.py`, as it is launched for bfloat16; of a projection in so many parts."""
    tiles, half, columns = few_tiles(2 * padded(dim), group, 1), max(16, padded(dim // 2)), padded(group)
    constants = {
        "LEAST": 1,
        "UNITS": numerics.FAST.attention.few_rows,
        "ONE_TILE": False,
        "K": 2,
        "G": group,
        "M": tiles.rows,
        "D": dim,
        "HP": half,
        "PAGE": 16,
        "BN": tiles.keys,
        "RING": False,
        "NORM": norm,
        "SINKS": False,
        "SOFTCAP": False,
        "TO": tl.bfloat16,
        "GP": columns,
        "AT_ONCE": merged_at_once(columns, 2 * half),
        "PARTS": parts,
        "GROUPED": early and group <= 8,
        "PDL": True,
        "EARLY": early,
    }
    projected = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16" if parts == 1 else "*fp32")
    return _attention(few_kernel, tiles, constants, **projected)


def few_drafts(group: int, stride: int, dim: int, early: bool, norm: bool) -> dict[str, Any]:
    """The same for rows with drafts, `ops/kernels/paged/paged_few_drafts.py`."""
    tiles, half = few_draft_tiles(2 * padded(dim)), max(16, padded(dim // 2))
    constants = {
        "UNITS": numerics.FAST.attention.few_rows,
        "K": 2,
        "G": group,
        "STRIDE": stride,
        "M": tiles.rows,
        "TILES": min(-(-group * stride // tiles.rows), 2 if dim <= 128 else 1),
        "NEW": 16,
        "D": dim,
        "HP": half,
        "PAGE": 16,
        "BN": tiles.keys,
        "REACH": False,
        "NORM": norm,
        "SINKS": False,
        "SOFTCAP": False,
        "TO": tl.bfloat16,
        "AT_ONCE": merged_at_once(tiles.rows, 2 * half),
        "PDL": True,
        "EARLY": early,
    }
    return _attention(few_drafts_kernel, tiles, constants)


def _attention(kernel: Any, tiles: Any, constants: dict[str, Any], fusion: bool = True, **more: str) -> dict[str, Any]:
    """A kernel of decode attention with bfloat16 pages, or of the types `more`."""
    names = kernel.arg_names
    pointers = [name for name in names if name.endswith("_ptr")]
    types = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("eps", "scale", "softcap"), "fp32")
    types |= dict.fromkeys(("entry_ptr", "offset_ptr", "table_ptr", "position_ptr"), "*i64")
    types |= dict.fromkeys(("begin_ptr", "unit_ptr", "counter_ptr", "row_ptr", "shared_count_ptr"), "*i32")
    types |= dict.fromkeys(("part_ptr", "sums_ptr", "scales_ptr", "shared_ptr", "shared_sums_ptr"), "*fp32")
    types = {name: type for name, type in (types | more).items() if name in names}
    strides = [name for name in names if re.search("_s[tehs]$", name)]
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "maxnreg": tiles.registers, "launch_pdl": True}
    options["enable_fp_fusion"] = fusion
    return gluon(kernel, types, constants, pointers + strides, ASTSource, **options)


def drafts(group: int, stride: int, dim: int, fp8: bool, few_rows: bool) -> dict[str, Any]:
    """Decode attention of several tokens a row, `ops/kernels/paged/paged_drafts.py`, as it is launched for bfloat16."""
    tiles, count, tokens = draft_tiles(padded(dim) * (1 if fp8 else 2), group, stride, fp8, 64 if few_rows else 65)
    constants = {
        "S": 132 * tiles.programs // 8,
        "K": 8,
        "G": group,
        "STRIDE": stride,
        "TOKENS": tokens,
        "M": tiles.rows,
        "TILES": count,
        "D": dim,
        "DP": padded(dim),
        "DV": dim,
        "DVP": padded(dim),
        "PAGE": 16,
        "BN": tiles.keys,
        "REACH": False,
        "SINKS": False,
        "SOFTCAP": False,
        "FP8": tl.float8e4nv if fp8 else None,
        "TO": tl.float16 if fp8 else tl.bfloat16,
        "PDL": True,
        "EARLY": few_rows,
    }
    held = "*u8" if fp8 else "*bf16"
    return _attention(drafts_kernel, tiles, constants, kp_ptr=held, vp_ptr=held)


def fixed(group: int, dim: int, one: int, reach: bool, split: bool) -> dict[str, Any]:
    """Attention in a fixed order, `ops/kernels/paged/paged_fixed.py`, as it is launched for bfloat16."""
    tiles = fixed_tiles(padded(group), 2 * padded(dim), False, one, reach)
    constants = {
        "K": 8,
        "G": group,
        "GP": padded(group),
        "BM": tiles.rows,
        "D": dim,
        "DP": padded(dim),
        "DV": dim,
        "DVP": padded(dim),
        "PAGE": 16,
        "BN": tiles.keys,
        "PIECE": FIXED.piece,
        "ONE": one > 0,
        "REACH": reach,
        "SINKS": False,
        "SOFTCAP": False,
        "SPLIT": split,
        "TO": tl.bfloat16,
        "PDL": True,
    }
    rows = dict.fromkeys(("slots_ptr", "starts_ptr", "lengths_ptr", "tiles_ptr"), "*i32")
    return _attention(fixed_kernel, tiles, constants, **rows, values_ptr="*fp32", fusion=False)


PEERS = {
    "peer_words": {"W": 256, "SLOT": 1024},
    "peer_bare": {"W": 1024, "SLOT": 1024, "PLACES": 2, "DTYPE": tl.float32},
    "peer_bare_token": {"EACH": 2048, "PART": 2048, "SLOT": 1024, "PLACES": 8, "DTYPE": tl.bfloat16, "NORM": 1},
    "peer_bare_twice": {
        "EACH": 512,
        "PART": 512,
        "SLOT": 1024,
        "PLACES": 4,
        "DTYPE": tl.bfloat16,
        "RELAY": True,
        "NORM": 1,
    },
    "peer_units": {"W": 4096, "BLOCK": 4096, "UNITS": 2, "SLOT": 16384, "FLAGS": 2**26, "GATHER": False, "NORM": 1},
}


def peers(name: str, ranks: int, parts: int = 0, pairs: int = 0) -> dict[str, Any]:
    """Sums of ranks, `ops/kernels/peer_sum.py`, as they are launched for bfloat16, and `peer_bare` for float32. `parts`, `pairs`: what is added up comes in so many."""
    kernel = getattr(peer_sum, name)
    constants = {
        "N": ranks,
        "PADDED": padded(ranks),
        "PROGRAMS": 128,
        "ADD": True,
        "SEND": True,
        "TAKE": True,
        "WAIT": True,
        "PDL": True,
        "PARTS": parts,
        "PAIRS": pairs,
    }
    constants = {one: value for one, value in constants.items() if one in kernel.arg_names} | PEERS[name]
    pointers = [one for one in kernel.arg_names if one.endswith("_ptr")]
    types = dict.fromkeys(pointers, "*bf16" if name == "peer_units" else "*i32") | {"eps": "fp32"}
    types |= {"peers_ptr": "*i64", "rounds_ptr": "*i32"}
    if constants.get("PARTS"):
        types["x_ptr"] = "*fp32"
    return gluon(
        kernel,
        types,
        constants,
        [*pointers, *(["num"] if "num" in kernel.arg_names else []), *(["stride"] if constants.get("PARTS") else [])],
        ASTSource,
        num_warps=2 if name == "peer_words" else 8,
        launch_pdl=True,
    )


RECURRENCES = {
    "gdn": {"MOST": 8, "KEY_HEADS": 16, "HEADS": 32, "K": 128, "V": 128, "BK": 128, "LISTED": 256},
    "one gdn": {"KEY_HEADS": 16, "HEADS": 32, "K": 128, "V": 128, "BK": 128, "PDL": True},
    "one mamba2": {"GROUPS": 1, "HEADS": 128, "P": 64, "N": 128, "BN": 128, "BP": mamba2.ONE[0], "PDL": True},
    "one conv": {"TAPS": 4, "HAS_BIAS": True, "BC": 256, "PDL": True},
    "mamba2": {"MOST": 8, "GROUPS": 1, "HEADS": 128, "P": 64, "N": 128, "BN": 128, "BP": mamba2.FEW[0], "LISTED": 256},
    "conv": {"TAPS": 4, "HAS_BIAS": True, "GATES": 2, "HEADS": 32, "BH": 32, "BT": 4, "BC": 256},
}


def recurrence(name: str, state: str, journal: int) -> dict[str, Any]:
    """Rows that take one token after another, with `journal` drafts: `ops/kernels/recurrent/gdn.py`, `mamba2.py` and `causal_conv.py` at published sizes."""
    ones = {"one gdn": gdn._one, "one mamba2": mamba2._one, "one conv": causal_conv._step}
    kernel = (ones | {"gdn": gdn._few, "mamba2": mamba2._few, "conv": causal_conv._rows})[name]
    block_v, warps = gdn.ONE if name == "one gdn" else gdn.DRAFTS if journal else gdn.FEW
    own = {"BV": block_v} if "gdn" in name else {}
    own |= {"OUTPUTS": journal > 0, "GROUPS": 0, "KEY": 0, "VALUES": 0} if name == "conv" else {}
    constants = RECURRENCES[name] | own | {"HAS_SAVES": True, "ITEM": 4 if state == "fp32" else 2}
    constants |= {} if "one" in name else {"JOURNAL": journal}
    strides = [other for other in kernel.arg_names if other.endswith("stride") or other == "channels"]
    counts = ("num_rows", "num_tokens", "num_channels")
    pointers = [other for other in kernel.arg_names if other not in (*constants, *strides, *counts)]
    types = dict.fromkeys(pointers, "*bf16") | {"state": "*" + state}
    wide, narrow = ("table", "positions", "save_target"), ("slots", "query_start", "seq_lens", "accepted")
    types |= dict.fromkeys(wide, "*i64") | dict.fromkeys((*narrow, "save_start", "save_row", "save_position"), "*i32")
    types = {other: type for other, type in (types | {"long": "*i32"}).items() if other in kernel.arg_names}
    options = {
        "num_warps": {"mamba2": mamba2.FEW[1], "one mamba2": mamba2.ONE[1], "conv": 4, "one conv": 4}.get(name, warps)
    }
    if "one" in name:
        options["launch_pdl"] = True
    elif name != "conv":
        options["maxnreg"] = {"gdn": gdn.REGISTERS[journal > 0], "mamba2": mamba2.REGISTERS}[name]
    return gluon(kernel, types, constants, pointers + strides, ASTSource, **options)


def adapters(name: str, features: int) -> dict[str, Any]:
    """The two kernels of `ops/kernels/lora/lora.py` as a fused layer's with so many inputs, or outputs of a program, launches them for bfloat16."""
    kernel = {"shrink": lora._shrink, "expand": lora._expand}[name]
    own = {
        "shrink": {
            "S": lora.WARPS,
            "K": features // lora.WARPS,
            "SPREAD": True,
            "NORM": 0,
            "KNOWN": True,
        },
        "expand": {"PIECES": 8, "OUTPUTS": features, "ALIGN": 16, "NORM": False},
    }
    pointers = [one for one in kernel.arg_names if one.endswith(("_TI", "_TO", "_ptr", "_WX", "_W", "_N5"))]
    pointers += ["places", "pool", "inner"]
    types = {one: "*i32" if one.endswith(("_WX", "_W", "_N5")) else "*bf16" for one in pointers}
    types |= {"places": "*i64", "inner": "*fp32", "eps": "fp32"}
    constants = {"BLOCKS": 1, "PARTS": 3, "TILE": 16, "PDL": True} | own[name]
    aligned = [*pointers, *({"x_stride", "y_stride", "inputs"} & set(kernel.arg_names))]
    warps = lora.WARPS if name == "shrink" else lora.expand_warps(features)
    return gluon(kernel, types, constants, aligned, ASTSource, num_warps=warps, launch_pdl=True)


def beside(name: str) -> dict[str, Any]:
    """The kernels of `ops/kernels/lora/lora_gluon.py` as 64 rows of an 8B with an adapter each launch them."""
    kernel = getattr(lora_gluon, ("expand" if name == "expand" else "shrink") + "_kernel")
    words = {one: "*i32" for one in kernel.arg_names if one.endswith(("_WX", "_W", "_N5"))}
    types = {one: "*bf16" for one in kernel.arg_names if one.endswith(("_TI", "_TO"))} | words
    types |= {"places": "*i64", "pool": "*bf16", "inner": "*fp32"}
    if name != "expand":
        types |= {"sums": "*fp32", "bias_O": "*bf16"}
    shrink = {"PARTS": 3, "K": lora.LONG_PIECE, "STEP": lora.STEP, "S": lora.SHRINK_WARPS, "EVEN": True, "BT": 64}
    sizes = {
        "shrink": {**shrink, "SUMS": 0, "ADD": False, "BIAS": False},
        "sums": {**shrink, "SUMS": 4, "ADD": True, "BIAS": False},
        "expand": {"PARTS": 3, "PIECES": 4, "UNITS": 8 // lora.EXPAND_WARPS, "WARPS": lora.EXPAND_WARPS, "ALIGN": 16},
    }[name]
    aligned = [*types, *({"x_stride", "y_stride", "inputs", "num_outputs"} & set(kernel.arg_names))]
    warps = lora.EXPAND_WARPS if name == "expand" else lora.SHRINK_WARPS
    return gluon(kernel, types, {"BLOCKS": 1, "PDL": True} | sizes, aligned, num_warps=warps, launch_pdl=True)


def adapted_row(inputs: int, outputs: list[int], gated: bool) -> dict[str, Any]:
    """One token's product with its adapter's sums, for bfloat16."""
    kernel, config = linear._rows_kernel, linear.rows_config(inputs, sum(outputs) // (2 if gated else 1), gated)
    types = dict.fromkeys(("x_ptr", "norm_ptr", "w_ptr", "bias_ptr", "y_ptr", "pool"), "*bf16")
    types |= {"words": "*i64", "places": "*i64", "eps": "fp32"}
    sizes = {"K": inputs, "BN": config.features, "BK": config.inputs, "BLOCKS": 1, "COPIES": COPIES}
    sizes |= linear.first_programs(config, len(outputs), inputs) | {"WIDE": linear.wide_ranks(config, 1)}
    flags = {"NORM": 0, "GATED": gated, "ADD": False, "BIAS": False, "PDL": True}
    constants = sizes | flags | {"TILE": lora.TILE, "STARTS": tuple(itertools.accumulate(outputs, initial=0))}
    aligned = [name for name, type in types.items() if type[0] == "*"]
    most = linear.most_registers(inputs, config, gated)
    return gluon(kernel, types, constants, aligned, ASTSource, num_warps=config.warps, maxnreg=most, launch_pdl=True)


@triton.jit
def rounding_kernel(x_ptr, y_ptr, N: tl.constexpr):
    """Round some numbers."""
    i = tl.arange(0, N)
    tl.store(y_ptr + i, rounded(tl.load(x_ptr + i), tl.bfloat16))


def rounding(count: int) -> dict[str, Any]:
    """`ops/kernels/activation.py`'s rounding in PTX, of so many numbers."""
    source = ASTSource(rounding_kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"N": count})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return {}


def route(experts: int, active: int, tokens: int) -> dict[str, Any]:
    """The choice of experts, `ops/kernels/moe/moe_routing.py`, of a step with padding."""
    config = moe_routing.route_config(tokens, experts)
    wide = padded(experts)
    types = dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr"), "*fp32") | {"factor": "fp32"}
    types |= dict.fromkeys(("row_ptr", "experts_ptr", "order_ptr", "starts_ptr", "counts_ptr", "touched_ptr"), "*i32")
    constants = {"A": active, "E": experts, "BT": config.rows, "BE": wide, "KIND": 0, "NORMALISE": False, "BIAS": False, "GROUPS": 1, "KEPT": 1, "BG": 1,
                 "ORDER": config.at_once, "COUNT": False, "PADS": True, "HERE": experts, "ALL": experts, "BA": wide, "PDL": True}  # fmt: skip
    aligned = [name for name, type in types.items() if type[0] == "*"]
    own = {"kind": ASTSource, "num_warps": config.warps, "launch_pdl": True}
    return gluon(moe_routing._route_kernel, types, constants, aligned, **own)


if __name__ == "__main__":
    knobs.nvidia.dump_ptxas_log = True
    kinds = {**vars(compiled_latents), **vars(compiled_experts), **globals()}
    for kind, *arguments in json.loads(sys.argv[1]):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                found = kinds[kind](*arguments)
            except Exception:
                found = {"error": traceback.format_exc()}
        print(json.dumps({**found, "said": said.getvalue()}), flush=True)
