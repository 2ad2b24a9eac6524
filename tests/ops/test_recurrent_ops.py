"""Recurrences in chunks, by steps, and token by token from their definitions in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagerunner.ops.causal_conv import causal_conv
from pagerunner.ops.gdn import gated_delta_chunks, gated_delta_step
from pagerunner.ops.mamba2 import mamba2_chunks, mamba2_step

LENGTHS = [1, 2, 63, 64, 65, 200]
CUTS = [(1, 199), (64, 136), (7, 50, 143), (128, 72)]


def delta_inputs(length: int) -> tuple[torch.Tensor, ...]:
    """q, k [L, 3, 8], v [L, 3, 5], log decay and rate [L, 3]; decays from almost none to almost all."""
    rand = torch.Generator().manual_seed(length)
    q, k = (torch.randn(length, 3, 8, generator=rand) for _ in range(2))
    v = torch.randn(length, 3, 5, generator=rand)
    log_decay = -torch.rand(length, 3, generator=rand) * torch.tensor([0.01, 1.0, 40.0])
    return q, k, v, log_decay, torch.rand(length, 3, generator=rand)


def delta_reference(inputs: tuple[torch.Tensor, ...], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: fade, correct what the state answers to the key, read."""
    q, k, v, log_decay, rate = (x.double() for x in inputs)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = state.double().clone()
    out = torch.empty(v.shape, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            state[h] *= log_decay[t, h].exp()
            change = rate[t, h] * (v[t, h] - state[h].T @ k[t, h])
            state[h] += torch.outer(k[t, h], change)
            out[t, h] = state[h].T @ q[t, h] / q.shape[-1] ** 0.5
    return out, state


def mamba_inputs(length: int) -> tuple[torch.Tensor, ...]:
    """x [L, 4, 6], dt [L, 4], a [4], b and c [L, 2, 5], d [4]."""
    rand = torch.Generator().manual_seed(length)
    x = torch.randn(length, 4, 6, generator=rand)
    dt = torch.rand(length, 4, generator=rand) * 2
    a = -torch.tensor([0.001, 0.3, 2.0, 20.0])
    b, c = (torch.randn(length, 2, 5, generator=rand) for _ in range(2))
    return x, dt, a, b, c, torch.randn(4, generator=rand)


def mamba_reference(inputs: tuple[torch.Tensor, ...], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: fade, add, read, and the skip connection. Heads 0 and 1 share the first group's vectors."""
    x, dt, a, b, c, d = (tensor.double() for tensor in inputs)
    state = state.double().clone()
    out = torch.empty(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for h in range(4):
            state[h] = state[h] * (dt[t, h] * a[h]).exp() + torch.outer(dt[t, h] * x[t, h], b[t, h // 2])
            out[t, h] = state[h] @ c[t, h // 2] + d[h] * x[t, h]
    return out, state


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), want.double(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_gated_delta_chunks_follow_the_definition(length: int) -> None:
    inputs = delta_inputs(length)
    state = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1))
    before = state.clone()
    out, last = gated_delta_chunks(*inputs, state)
    want_out, want_last = delta_reference(inputs, state)
    close(out, want_out)
    close(last, want_last)
    assert torch.equal(state, before)


@pytest.mark.parametrize("cuts", CUTS)
def test_gated_delta_does_not_depend_on_where_a_sequence_is_cut(cuts: tuple[int, ...]) -> None:
    inputs, state = delta_inputs(200), torch.zeros(3, 8, 5)
    want_out, want_last = gated_delta_chunks(*inputs, state)
    outs, first = [], 0
    for size in cuts:
        out, state = gated_delta_chunks(*(x[first : first + size] for x in inputs), state)
        outs.append(out)
        first += size
    close(torch.cat(outs), want_out)
    close(state, want_last)


def test_gated_delta_steps_of_many_rows_are_what_chunks_of_each_are() -> None:
    rows = [delta_inputs(length)[:5] for length in (30, 31, 32)]
    states = torch.zeros(3, 3, 8, 5)
    outs = []
    for t in range(30):
        out, states = gated_delta_step(*(torch.stack([row[i][t] for row in rows]) for i in range(5)), states)
        outs.append(out)
    for index, row in enumerate(rows):
        want_out, want_last = gated_delta_chunks(*(x[:30] for x in row), torch.zeros(3, 8, 5))
        close(torch.stack(outs)[:, index], want_out)
        close(states[index], want_last)


@pytest.mark.parametrize("length", LENGTHS)
def test_mamba2_chunks_follow_the_definition(length: int) -> None:
    inputs = mamba_inputs(length)
    state = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1))
    before = state.clone()
    out, last = mamba2_chunks(*inputs, state)
    want_out, want_last = mamba_reference(inputs, state)
    close(out, want_out)
    close(last, want_last)
    assert torch.equal(state, before)


@pytest.mark.parametrize("cuts", CUTS)
def test_mamba2_does_not_depend_on_where_a_sequence_is_cut(cuts: tuple[int, ...]) -> None:
    (x, dt, a, b, c, d), state = mamba_inputs(200), torch.zeros(4, 6, 5)
    want_out, want_last = mamba2_chunks(x, dt, a, b, c, d, state)
    outs, first = [], 0
    for size in cuts:
        part = slice(first, first + size)
        out, state = mamba2_chunks(x[part], dt[part], a, b[part], c[part], d, state)
        outs.append(out)
        first += size
    close(torch.cat(outs), want_out)
    close(state, want_last)


def test_mamba2_steps_of_many_rows_are_what_chunks_of_each_are() -> None:
    x, dt, a, b, c, d = mamba_inputs(90)
    rows = [slice(30 * index, 30 * index + 30) for index in range(3)]
    states = torch.zeros(3, 4, 6, 5)
    outs = []
    for t in range(30):
        at = torch.tensor([row.start + t for row in rows])
        out, states = mamba2_step(x[at], dt[at], a, b[at], c[at], d, states)
        outs.append(out)
    for index, row in enumerate(rows):
        want_out, want_last = mamba2_chunks(x[row], dt[row], a, b[row], c[row], d, torch.zeros(4, 6, 5))
        close(torch.stack(outs)[:, index], want_out)
        close(states[index], want_last)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_convolution_is_the_same_however_it_is_cut(taps: int, biased: bool) -> None:
    rand = torch.Generator().manual_seed(taps)
    x = torch.randn(2, 40, 6, generator=rand)
    weight = torch.randn(6, taps, generator=rand)
    bias = torch.randn(6, generator=rand) if biased else None
    whole, last = causal_conv(x, torch.zeros(2, taps - 1, 6), weight, bias)
    padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
    close(whole, F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=6)).transpose(1, 2))
    assert torch.equal(last, x[:, 41 - taps :])
    state, outs = torch.zeros(2, taps - 1, 6), []
    for part in x.split([1, 1, 2, 20, 16], 1):
        out, state = causal_conv(part, state, weight, bias)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-6, rtol=1e-6)
    assert torch.equal(state, last)
