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
from pagerunner.ops.native.calls import CONVOLUTION, COPY, DELTA, GATE, MAMBA, address, call, empty, sized

_STATES = "4P2q"  # States in native/recurrent.h
_CONVOLUTION = struct.Struct(f"{_STATES}4P4q")  # Convolution
_DELTA = struct.Struct(f"{_STATES}6P7q")  # Delta
_MAMBA = struct.Struct(f"{_STATES}6P6q")  # Mamba
_GATE = struct.Struct("4P8qfi")  # Gate
_COPY = struct.Struct("2P6q")  # Copy
_NORM_THEN_SILU, _SILU_THEN_NORM, _SIGMOID, _ADD_SIGMOID = range(4)
_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64


class RowStates(NamedTuple):
    """Where rows' states are: page `table[slot, 0]` of `pages`, [E, ..]. Rows of length 0 are padding: theirs aren't touched."""

    pages: torch.Tensor
    table_SX: torch.Tensor
    rows: StepRows

    def packed(self, name: str, *shape: int) -> tuple[int, ...]:
        """The C structure's values. Raises TypeError or ValueError for states that it doesn't describe."""
        rows, tokens = self.rows, self.rows.slots_R.shape[0]
        sized(f"states of {name}", self.pages, None, *shape)
        sized("lengths", rows.seq_lens_R, tokens)
        return (
            address(f"states of {name}", self.pages, _F32, len(shape)),
            address("the page table", self.table_SX, _I64, 1),
            address("slots", rows.slots_R, _I32, 1),
            address("lengths", rows.seq_lens_R, _I32, 1),
            self.pages.stride(0),
            self.table_SX.stride(0),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those whose addresses `packed` has."""
        return self.pages, self.table_SX, self.rows.slots_R, self.rows.seq_lens_R


def convolution(
    x_TC: torch.Tensor, states: RowStates, weight_CW: torch.Tensor, bias_C: torch.Tensor | None
) -> torch.Tensor:
    """`ops.causal_conv.causal_conv` of a token of each row, [T, C]; states are [E, W - 1, C]."""
    (tokens, channels), taps = x_TC.shape, weight_CW.shape[1]
    _one_each(states, tokens)
    sized("the convolution's weight", weight_CW, channels, taps)
    out_TC = empty(tokens, channels)
    packed = _CONVOLUTION.pack(
        *states.packed("a convolution", taps - 1, channels),
        address("x", x_TC, _F32, 1),
        address("the convolution's weight", weight_CW, _F32, 2),
        0 if bias_C is None else _row("the convolution's bias", bias_C, channels),
        out_TC.data_ptr(),
        tokens,
        channels,
        taps,
        x_TC.stride(0),
    )
    call(CONVOLUTION, packed, (*states.tensors, x_TC, weight_CW, bias_C, out_TC))
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
    _one_each(states, tokens)
    sized("queries, keys and values", mixed_TC, tokens, 2 * key_heads * key_dim + heads * value_dim)
    sized("decays", decays_TH, tokens, heads)
    out_THV = empty(tokens, heads, value_dim)
    packed = _DELTA.pack(
        *states.packed("the gated delta rule", heads, key_dim, value_dim),
        address("queries, keys and values", mixed_TC, _F32, 2),
        address("rates", rates_TH, _F32, 1),
        address("decays", decays_TH, _F32, 1),
        _row("decays' logarithms", decay_log_H, heads),
        _row("decays' bias", decay_bias_H, heads),
        out_THV.data_ptr(),
        tokens,
        heads,
        key_heads,
        key_dim,
        value_dim,
        rates_TH.stride(0),
        decays_TH.stride(0),
    )
    given = mixed_TC, rates_TH, decays_TH, decay_log_H, decay_bias_H, out_THV
    call(DELTA, packed, (*states.tensors, *given))
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
    _one_each(states, tokens)
    sized("x, B and C", mixed_TC, tokens, heads * head_dim + 2 * groups * state_size)
    out_THP = empty(tokens, heads, head_dim)
    packed = _MAMBA.pack(
        *states.packed("Mamba-2", heads, head_dim, state_size),
        address("x, B and C", mixed_TC, _F32, 2),
        address("steps", steps_TH, _F32, 1),
        _row("decays' logarithms", decay_log_H, heads),
        _row("the steps' bias", step_bias_H, heads),
        _row("skips", skip_H, heads),
        out_THP.data_ptr(),
        tokens,
        heads,
        groups,
        head_dim,
        state_size,
        steps_TH.stride(0),
    )
    call(MAMBA, packed, (*states.tensors, mixed_TC, steps_TH, decay_log_H, step_bias_H, skip_H, out_THP))
    return out_THP


def norm_then_gate(x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`ops.norm.rms_norm_then_gate` of [T, D] or [T, H, D]."""
    return _gated(_NORM_THEN_SILU, x, gate, empty(*x.shape), weight_D, eps)


def gate_then_norm(x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`ops.norm.gate_then_rms_norm` of [T, D] or [T, H, D]."""
    return _gated(_SILU_THEN_NORM, x, gate, empty(*x.shape), weight_D, eps)


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
        to, (_, heads, features) = out[:, first : first + size], part.shape
        strides = part.stride(0), part.stride(1), out.stride(0)
        packed = _COPY.pack(address("a part", part, _F32, 1), to.data_ptr(), tokens, heads, features, *strides)
        call(COPY, packed, (part, out))
        first += size
    return out


def serves(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can be had, and take these tensors."""
    return small.serves(*tensors)


def _gated(
    kind: int,
    x: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
    weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    (tokens, *heads, features) = x.shape
    sized("the gates", gate, tokens, *heads, 1 if kind == _ADD_SIGMOID else features)
    sized("what is gated", out, *x.shape)
    packed = _GATE.pack(
        address("x", x, _F32, 1),
        address("the gates", gate, _F32, 1),
        0 if weight_D is None else _row("the norm's weight", weight_D, features),
        address("what is gated", out, _F32, len(heads) + 1),
        tokens,
        heads[0] if heads else 1,
        features,
        x.stride(0),
        x.stride(-2),
        gate.stride(0),
        gate.stride(-2),
        out.stride(0),
        eps,
        kind,
    )
    call(GATE, packed, (x, gate, weight_D, out))
    return out


def _one_each(states: RowStates, tokens: int) -> None:
    if states.rows.slots_R.shape[0] != tokens:
        raise ValueError(f"a step of {states.rows.slots_R.shape[0]} rows has {tokens} tokens; every row has one here")


def _row(name: str, x: torch.Tensor, size: int) -> int:
    sized(name, x, size)
    return address(name, x, _F32, 1)
