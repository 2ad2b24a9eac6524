"""What stands around products and attention, by the CPU kernels: rows of a table, rotary angles, norms.

They serve float32 on machines that have the kernels, see `serves`. What is declared as an operation's version for CPUs (`Op.on_cpu`) looks at that
itself, and returns NotImplemented for other tensors.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from pagerunner.ops.native.calls import ANGLES, GREEDY, MAP, NORM, ROTATE, ROWS, TEMPER, call, empty, made, operand
from pagerunner.ops.native.library import library

if TYPE_CHECKING:
    from pagerunner.ops.rope import RopeAngles

_ROWS = struct.Struct("3P4qi4x")  # Rows in native/small.h
_ANGLES = struct.Struct("4P2qf4x")  # Angles
_GREEDY = struct.Struct("3P3q")  # Greedy
_NORM = struct.Struct("4P6qfi")  # Norm
_ROTATE = struct.Struct("3P5qi4x")  # Rotate
_TEMPER = struct.Struct("2P3q2f")  # Temper
_MAP = struct.Struct("2P3qfi")  # Map
_SILU, _GELU_TANH, _SCALE, _CAP = range(4)


def serves(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can be had, and take these tensors."""
    suits = all(x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1 for x in tensors)
    return suits and library() is not None


def counts(numbers_T: torch.Tensor) -> bool:
    """Whether these are ids or positions as the kernels read them."""
    return numbers_T.dim() == 1 and numbers_T.dtype == torch.int64 and numbers_T.is_contiguous()


def table_rows(ids_T: torch.Tensor, table: torch.Tensor, rows: int, *, in_panels: bool) -> torch.Tensor:
    """Rows `ids` of a table [V, D], or of panels [P, D, N] that hold `rows` of them; [T, D]. Raises IndexError for other ids."""
    tokens, features = ids_T.numel(), table.shape[1]
    out_TD = empty(tokens, features)
    operands = (
        operand("table", table, dense=3 if in_panels else 1),
        operand("ids", ids_T, None, dtype=torch.int64),
        made(out_TD),
    )
    call(ROWS, _ROWS, operands, tokens, rows, features, table.stride(0), in_panels)
    return out_TD


def rope_angles(
    positions_T: torch.Tensor, frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines as `ops.rope.rope_angles` has them, both [T, 1, D]."""
    tokens, half = positions_T.numel(), frequencies.numel()
    cos_T1D, sin_T1D = empty(tokens, 1, 2 * half), empty(tokens, 1, 2 * half)
    operands = (
        operand("positions", positions_T, None, dtype=torch.int64),
        operand("frequencies", frequencies, None),
        made(cos_T1D),
        made(sin_T1D),
    )
    call(ANGLES, _ANGLES, operands, tokens, half, scale)
    return cos_T1D, sin_T1D


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool = False) -> torch.Tensor:
    """See `ops.norm.rms_norm`, of x [T, D] or of heads [T, N, D]."""
    if x.dim() not in (2, 3) or not serves(x, weight_D):
        return NotImplemented
    return _norm(x, None, weight_D, eps, offset)


def add_rms_norm_(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool = False
) -> torch.Tensor:
    """See `ops.norm.add_rms_norm_`."""
    if x_TD.dim() != 2 or not serves(x_TD, residual_TD, weight_D):
        return NotImplemented
    return _norm(x_TD, residual_TD, weight_D, eps, offset)


def add_normed_rms_norm_(
    x_TD: torch.Tensor,
    x_weight_D: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: bool = False,
) -> torch.Tensor:
    """See `ops.norm.add_normed_rms_norm_`."""
    normed_TD = rms_norm(x_TD, x_weight_D, eps, offset)
    return normed_TD if normed_TD is NotImplemented else add_rms_norm_(normed_TD, residual_TD, weight_D, eps, offset)


def _norm(
    x: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float, offset: bool
) -> torch.Tensor:
    (tokens, *heads, features) = x.shape
    out = empty(*x.shape)
    operands = (
        operand("x", x),
        operand("the norm's weight", weight_D, features),
        operand("the residual", residual_TD, *x.shape[:1], features),
        made(out),
    )
    sizes = tokens, heads[0] if heads else 1, features, x.stride(0), x.stride(-2)
    call(NORM, _NORM, operands, *sizes, 0 if residual_TD is None else residual_TD.stride(0), eps, offset)
    return out


def rope_(x_TND: torch.Tensor, angles: RopeAngles) -> None:
    """See `ops.rope.rope_`."""
    return _rotate(x_TND, angles, adjacent=False)


def rope_pairs_(x_TND: torch.Tensor, angles: RopeAngles) -> None:
    """See `ops.rope.rope_pairs_`."""
    return _rotate(x_TND, angles, adjacent=True)


def _rotate(x_TND: torch.Tensor, angles: RopeAngles, *, adjacent: bool) -> None:
    cos_T1D, sin_T1D = angles
    dense = cos_T1D.is_contiguous() and sin_T1D.is_contiguous()
    if x_TND.dim() != 3 or x_TND.shape[2] % 2 or not dense or not serves(x_TND, cos_T1D, sin_T1D):
        return NotImplemented  # type: ignore[return-value]
    tokens, heads, features = x_TND.shape
    operands = (
        operand("x", x_TND),
        operand("cosines", cos_T1D, tokens, 1, features, dense=3),
        operand("sines", sin_T1D, tokens, 1, features, dense=3),
    )
    call(ROTATE, _ROTATE, operands, tokens, heads, features, x_TND.stride(0), x_TND.stride(1), adjacent)
    return None


def temper(x_TND: torch.Tensor, positions_T: torch.Tensor, floor: float, scale: float) -> torch.Tensor:
    """See `ops.rope.temper`; in place, of heads one behind another."""
    if x_TND.stride(1) != x_TND.shape[2] or not serves(x_TND) or not counts(positions_T):
        return NotImplemented
    tokens, heads, features = x_TND.shape
    operands = operand("x", x_TND, dense=2), operand("positions", positions_T, tokens, dtype=torch.int64)
    call(TEMPER, _TEMPER, operands, tokens, heads * features, x_TND.stride(0), floor, scale)
    return x_TND


def silu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """See `ops.activation.silu_and_mul`."""
    return _gated(_SILU, gate_up_T2I)


def gelu_tanh_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """See `ops.activation.gelu_tanh_and_mul`."""
    return _gated(_GELU_TANH, gate_up_T2I)


def _gated(kind: int, gate_up_T2I: torch.Tensor) -> torch.Tensor:
    if gate_up_T2I.dim() != 2 or gate_up_T2I.shape[1] % 2 or not serves(gate_up_T2I):
        return NotImplemented
    return _map(kind, gate_up_T2I, gate_up_T2I.shape[1] // 2)


def scaled(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """`x * factor`, [T, D]."""
    return _map(_SCALE, x_TD, x_TD.shape[1], factor)


def softcap_(x_TD: torch.Tensor, cap: float) -> torch.Tensor:
    """See `ops.activation.softcap_`, of x [T, D] without gaps."""
    if x_TD.dim() != 2 or not x_TD.is_contiguous() or not serves(x_TD):
        return NotImplemented
    return _map(_CAP, x_TD, x_TD.shape[1], cap, x_TD)


def _map(
    kind: int, x_TD: torch.Tensor, features: int, factor: float = 1.0, out_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """`out`: rows without gaps; it may be `x`."""
    out_TD = empty(x_TD.shape[0], features) if out_TD is None else out_TD
    call(MAP, _MAP, (operand("x", x_TD), made(out_TD)), x_TD.shape[0], features, x_TD.stride(0), factor, kind)
    return out_TD


def greedy(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row, int64 [S], and its logit, float32 [S], as `ops.sample.greedy` says."""
    rows, vocabulary = logits_SV.shape
    tokens_S, best_S = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    operands = operand("logits", logits_SV), made(tokens_S), made(best_S)
    call(GREEDY, _GREEDY, operands, rows, vocabulary, logits_SV.stride(0))
    return tokens_S, best_S
