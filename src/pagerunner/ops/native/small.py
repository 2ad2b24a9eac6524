"""What stands around products and attention, by the CPU kernels: rows of a table, rotary angles, norms.

They serve float32 on machines that have the kernels, see `serves`.
"""

from __future__ import annotations

import struct

import torch

from pagerunner.ops.native.calls import ANGLES, GREEDY, MAP, NORM, ROTATE, ROWS, TEMPER, address, call, empty, sized
from pagerunner.ops.native.library import library

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
    sized("ids", ids_T, None)
    features = table.shape[1]
    out_TD = empty(ids_T.shape[0], features)
    packed = _ROWS.pack(
        address("table", table, torch.float32, 3 if in_panels else 1),
        address("ids", ids_T, torch.int64, 1),
        out_TD.data_ptr(),
        ids_T.shape[0],
        rows,
        features,
        table.stride(0),
        in_panels,
    )
    call(ROWS, packed, (table, ids_T, out_TD))
    return out_TD


def rope_angles(
    positions_T: torch.Tensor, frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines as `ops.rope.rope_angles` has them, both [T, 1, D]."""
    sized("positions", positions_T, None)
    sized("frequencies", frequencies, None)
    tokens, half = positions_T.shape[0], frequencies.shape[0]
    cos_T1D, sin_T1D = empty(tokens, 1, 2 * half), empty(tokens, 1, 2 * half)
    packed = _ANGLES.pack(
        address("positions", positions_T, torch.int64, 1),
        address("frequencies", frequencies, torch.float32, 1),
        cos_T1D.data_ptr(),
        sin_T1D.data_ptr(),
        tokens,
        half,
        scale,
    )
    call(ANGLES, packed, (positions_T, frequencies, cos_T1D, sin_T1D))
    return cos_T1D, sin_T1D


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, offset: bool, residual_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """`x / rms(x) * weight` of x [T, D] or of heads [T, N, D], or `* (1 + weight)` with an offset.

    With `residual`, x [T, D] is added there, and it is the sum's norm.
    """
    (tokens, *heads, features) = x.shape
    sized("the norm's weight", weight_D, features)
    if residual_TD is not None:
        sized("the residual", residual_TD, *x.shape[:1], features)
    out = empty(*x.shape)
    packed = _NORM.pack(
        address("x", x, torch.float32, 1),
        address("the norm's weight", weight_D, torch.float32, 1),
        0 if residual_TD is None else address("the residual", residual_TD, torch.float32, 1),
        out.data_ptr(),
        tokens,
        heads[0] if heads else 1,
        features,
        x.stride(0),
        x.stride(-2),
        0 if residual_TD is None else residual_TD.stride(0),
        eps,
        offset,
    )
    call(NORM, packed, (x, weight_D, residual_TD, out))
    return out


def rope_(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor, *, adjacent: bool = False) -> None:
    """See `ops.rope.rope_`; with `adjacent` see `ops.rope.rope_pairs_`."""
    tokens, heads, features = x_TND.shape
    sized("cosines", cos_T1D, tokens, 1, features)
    sized("sines", sin_T1D, tokens, 1, features)
    packed = _ROTATE.pack(
        address("x", x_TND, torch.float32, 1),
        address("cosines", cos_T1D, torch.float32, 3),
        address("sines", sin_T1D, torch.float32, 3),
        tokens,
        heads,
        features,
        x_TND.stride(0),
        x_TND.stride(1),
        adjacent,
    )
    call(ROTATE, packed, (x_TND, cos_T1D, sin_T1D))


def temper_(x_TND: torch.Tensor, positions_T: torch.Tensor, floor: float, scale: float) -> None:
    """See `ops.rope.temper`; in place, of heads one behind another."""
    tokens, heads, features = x_TND.shape
    sized("positions", positions_T, tokens)
    packed = _TEMPER.pack(
        address("x", x_TND, torch.float32, 2),
        address("positions", positions_T, torch.int64, 1),
        tokens,
        heads * features,
        x_TND.stride(0),
        floor,
        scale,
    )
    call(TEMPER, packed, (x_TND, positions_T))


def silu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """See `ops.activation.silu_and_mul`."""
    return _map(_SILU, gate_up_T2I, gate_up_T2I.shape[1] // 2)


def gelu_tanh_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """See `ops.activation.gelu_tanh_and_mul`."""
    return _map(_GELU_TANH, gate_up_T2I, gate_up_T2I.shape[1] // 2)


def scaled(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """`x * factor`, [T, D]."""
    return _map(_SCALE, x_TD, x_TD.shape[1], factor)


def softcap_(x_TD: torch.Tensor, cap: float) -> None:
    """`cap * tanh(x / cap)` in place, of x [T, D] without gaps."""
    _map(_CAP, x_TD, x_TD.shape[1], cap, x_TD)


def _map(
    kind: int, x_TD: torch.Tensor, features: int, factor: float = 1.0, out_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """`out`: rows without gaps; it may be `x`."""
    out_TD = empty(x_TD.shape[0], features) if out_TD is None else out_TD
    place = address("x", x_TD, torch.float32, 1)
    call(
        MAP,
        _MAP.pack(place, out_TD.data_ptr(), x_TD.shape[0], features, x_TD.stride(0), factor, kind),
        (x_TD, out_TD),
    )
    return out_TD


def greedy(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row, int64 [S], and its logit, float32 [S], as `ops.sample.greedy` says."""
    rows, vocabulary = logits_SV.shape
    tokens_S, best_S = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    place = address("logits", logits_SV, torch.float32, 1)
    packed = _GREEDY.pack(place, tokens_S.data_ptr(), best_S.data_ptr(), rows, vocabulary, logits_SV.stride(0))
    call(GREEDY, packed, (logits_SV, tokens_S, best_S))
    return tokens_S, best_S
