"""What stands around products and attention, by the CPU kernels: rows of a table, rotary angles, norms.

They serve float32 on machines that have the kernels, see `serves`.
"""

from __future__ import annotations

import struct

import torch

from pagerunner.ops.native.calls import ANGLES, GREEDY, NORM, ROWS, address, call, empty, sized
from pagerunner.ops.native.library import library

_ROWS = struct.Struct("3P4qi4x")  # Rows in native/small.h
_ANGLES = struct.Struct("4P2qf4x")  # Angles
_GREEDY = struct.Struct("3P3q")  # Greedy
_NORM = struct.Struct("3P3qfi")  # Norm


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


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, offset: bool) -> torch.Tensor:
    """`x / rms(x) * weight`, or `* (1 + weight)` with an offset, [T, D]."""
    tokens, features = x_TD.shape
    sized("the norm's weight", weight_D, features)
    out_TD = empty(tokens, features)
    packed = _NORM.pack(
        address("x", x_TD, torch.float32, 1),
        address("the norm's weight", weight_D, torch.float32, 1),
        out_TD.data_ptr(),
        tokens,
        features,
        x_TD.stride(0),
        eps,
        offset,
    )
    call(NORM, packed, (x_TD, weight_D, out_TD))
    return out_TD


def greedy(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row, int64 [S], and its logit, float32 [S], as `ops.sample.greedy` says."""
    rows, vocabulary = logits_SV.shape
    tokens_S, best_S = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    place = address("logits", logits_SV, torch.float32, 1)
    packed = _GREEDY.pack(place, tokens_S.data_ptr(), best_S.data_ptr(), rows, vocabulary, logits_SV.stride(0))
    call(GREEDY, packed, (logits_SV, tokens_S, best_S))
    return tokens_S, best_S
