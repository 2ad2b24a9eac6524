"""One token of every row of a recurrence, by the CPU kernels, and the gates around it. All is float32.

Shape letters: T tokens, one of each row, C channels, W taps, H heads, G groups of heads that share keys, K elements of a key, V of a value, P
of a head, N of a state, D of a head at a gate, E page table entries.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagerunner.batch import StepRows
from pagerunner.ops.native import small
from pagerunner.ops.native.calls import CONVOLUTION, COPY, DELTA, GATE, MAMBA, Operand, call, empty, made, operand

_STATES = "4P2q"  # States in native/recurrent.h
_CONVOLUTION = struct.Struct(f"{_STATES}4P4q")  # Convolution
_DELTA = struct.Struct(f"{_STATES}6P7q")  # Delta
_MAMBA = struct.Struct(f"{_STATES}6P6q")  # Mamba
_GATE = struct.Struct("4P8qfi")  # Gate
_COPY = struct.Struct("2P6q")  # Copy
_NORM_THEN_SILU, _SILU_THEN_NORM, _SIGMOID, _ADD_SIGMOID = range(4)


class RowStates(NamedTuple):
    """Where rows' states are: page `table[slot, 0]` of `pages`, [E, ..]. Rows of length 0 are padding: theirs aren't touched."""

    pages: torch.Tensor
    table_SX: torch.Tensor
    rows: StepRows

    def operands(self, name: str, tokens: int, *shape: int) -> tuple[Operand | int, ...]:
        """The C structure's values, of a step of so many tokens. Raises TypeError or ValueError for states that it doesn't describe."""
        slots_R, lengths_R = self.rows.slots_R, self.rows.seq_lens_R
        if slots_R.shape[0] != tokens:
            raise ValueError(f"a step of {slots_R.shape[0]} rows has {tokens} tokens; every row has one here")
        return (
            operand(f"states of {name}", self.pages, None, *shape, dense=len(shape)),
            operand("the page table", self.table_SX, dtype=torch.int64),
            operand("slots", slots_R, dtype=torch.int32),
            operand("lengths", lengths_R, tokens, dtype=torch.int32),
            self.pages.stride(0),
            self.table_SX.stride(0),
        )


def convolution(
    x_TC: torch.Tensor, states: RowStates, weight_CW: torch.Tensor, bias_C: torch.Tensor | None
) -> torch.Tensor:
    """`ops.causal_conv.causal_conv` of a token of each row, [T, C]; states are [E, W - 1, C]."""
    (tokens, channels), taps = x_TC.shape, weight_CW.shape[1]
    out_TC = empty(tokens, channels)
    operands = (
        *states.operands("a convolution", tokens, taps - 1, channels),
        operand("x", x_TC),
        operand("the convolution's weight", weight_CW, channels, taps, dense=2),
        operand("the convolution's bias", bias_C, channels),
        made(out_TC),
    )
    call(CONVOLUTION, _CONVOLUTION, operands, tokens, channels, taps, x_TC.stride(0))
    return out_TC


def gated_delta(
    mixed_TC: torch.Tensor,
    rates_TH: torch.Tensor,
    decays_TH: torch.Tensor,
    decay_log_H: torch.Tensor,
    decay_bias_H: torch.Tensor,
    states: RowStates,
    key_heads: int,
) -> torch.Tensor:
    """The gated delta rule (`ops.gdn`) for a token of each row, [T, H, V]; states are [E, H, K, V], rates and decays their logits."""
    tokens, heads = rates_TH.shape
    key_dim, value_dim = states.pages.shape[2:]
    features = 2 * key_heads * key_dim + heads * value_dim
    out_THV = empty(tokens, heads, value_dim)
    operands = (
        *states.operands("the gated delta rule", tokens, heads, key_dim, value_dim),
        operand("queries, keys and values", mixed_TC, tokens, features, dense=2),
        operand("rates", rates_TH),
        operand("decays", decays_TH, tokens, heads),
        operand("decays' logarithms", decay_log_H, heads),
        operand("decays' bias", decay_bias_H, heads),
        made(out_THV),
    )
    sizes = tokens, heads, key_heads, key_dim, value_dim
    call(DELTA, _DELTA, operands, *sizes, rates_TH.stride(0), decays_TH.stride(0))
    return out_THV


def mamba2(
    mixed_TC: torch.Tensor,
    steps_TH: torch.Tensor,
    decay_log_H: torch.Tensor,
    step_bias_H: torch.Tensor,
    skip_H: torch.Tensor,
    states: RowStates,
    groups: int,
) -> torch.Tensor:
    """Mamba-2's recurrence (`ops.mamba2`) for a token of each row, [T, H, P]; states are [E, H, P, N]."""
    tokens, heads = steps_TH.shape
    head_dim, state_size = states.pages.shape[2:]
    features = heads * head_dim + 2 * groups * state_size
    out_THP = empty(tokens, heads, head_dim)
    operands = (
        *states.operands("Mamba-2", tokens, heads, head_dim, state_size),
        operand("x, B and C", mixed_TC, tokens, features, dense=2),
        operand("steps", steps_TH),
        operand("decays' logarithms", decay_log_H, heads),
        operand("the steps' bias", step_bias_H, heads),
        operand("skips", skip_H, heads),
        made(out_THP),
    )
    call(MAMBA, _MAMBA, operands, tokens, heads, groups, head_dim, state_size, steps_TH.stride(0))
    return out_THP


def norm_then_gate(x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.norm.rms_norm_then_gate`, of [T, D] or [T, H, D]."""
    return _normed(_NORM_THEN_SILU, x, gate, weight_D, eps)


def gate_then_norm(x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.norm.gate_then_rms_norm`, of [T, D] or [T, H, D]."""
    return _normed(_SILU_THEN_NORM, x, gate, weight_D, eps)


def _normed(kind: int, x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dim() not in (2, 3) or not small.serves(x, gate, weight_D):
        return NotImplemented
    return _gated(kind, x, gate, empty(*x.shape), weight_D, eps)


def sigmoid_gated(x_THD: torch.Tensor, gate_THD: torch.Tensor) -> torch.Tensor:
    """`ops.activation.sigmoid_gated`."""
    return _gated(_SIGMOID, x_THD, gate_THD, empty(*x_THD.shape))


def add_sigmoid_gated_(x_TD: torch.Tensor, gate_T1: torch.Tensor, residual_TD: torch.Tensor) -> None:
    """`ops.activation.add_sigmoid_gated_`."""
    _gated(_ADD_SIGMOID, x_TD, gate_T1, residual_TD)


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts [T, G, n] one behind another, [T, sum of G * n]."""
    tokens, sizes = parts[0].shape[0], [part.shape[1] * part.shape[2] for part in parts]
    out, first = empty(tokens, sum(sizes)), 0
    for part, size in zip(parts, sizes, strict=True):
        to, strides = out[:, first : first + size], (part.stride(0), part.stride(1), out.stride(0))
        call(COPY, _COPY, (operand("a part", part), Operand(to.data_ptr(), out)), tokens, *part.shape[1:], *strides)
        first += size
    return out


def _gated(
    kind: int,
    x: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
    weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    (tokens, *heads, features) = x.shape
    operands = (
        operand("x", x),
        operand("the gates", gate, tokens, *heads, 1 if kind == _ADD_SIGMOID else features),
        operand("the norm's weight", weight_D, features),
        operand("what is gated", out, *x.shape, dense=len(heads) + 1),
    )
    sizes = tokens, heads[0] if heads else 1, features
    strides = x.stride(0), x.stride(-2), gate.stride(0), gate.stride(-2), out.stride(0)
    call(GATE, _GATE, operands, *sizes, *strides, eps, kind)
    return out
