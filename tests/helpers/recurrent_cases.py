"""Steps of recurrent layers for kernels and their twins: rows of any length, padding, states in scattered pages, saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.batch import StatePages, StepRows
from pagerunner.models.qwen3_next import GroupedGatedDeltaNet
from pagerunner.ops.state_rows import StateRows, StateSaves


@dataclass(frozen=True)
class Step:
    """Rows of `lengths` tokens, `padding` rows and tokens beyond them; saves (row, tokens of the row before them).

    With `drafts` in a journal, `accepted` is as in StepRows. A step with `stride` has so many places for each row.
    """

    lengths: tuple[int, ...]
    saves: tuple[tuple[int, int], ...] = ()
    padding: tuple[int, int] = (0, 0)
    drafts: int = 0
    accepted: tuple[int, ...] = ()
    stride: int = 0

    @property
    def tokens(self) -> int:
        """T, padding included."""
        return self.stride * (len(self.lengths) + self.padding[0]) or sum(self.lengths) + self.padding[1]

    @property
    def real(self) -> list[int]:
        """Tokens that aren't padding."""
        places = [self.stride or length for length in self.lengths]
        return [sum(places[:row]) + token for row, length in enumerate(self.lengths) for token in range(length)]


class Memory:
    """Pages of states in one pool, every element NaN; page 0 belongs to nobody, pages of rows are in random order."""

    def __init__(
        self, step: Step, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: str
    ) -> None:
        torch.manual_seed(len(step.lengths))
        rows, count = len(step.lengths), len(step.lengths) + len(step.saves) + 2
        sizes = [
            -(-torch.Size(shape).numel() * dtype.itemsize // 16) * 16
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        unit = sum(sizes) + 48
        self.pool = torch.full((count * unit,), 0xFF, dtype=torch.uint8, device=device)
        self.states = []
        offset = 16
        for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
            strides = (unit // dtype.itemsize, *torch.empty(shape, device="meta").stride())
            view = self.pool.view(dtype)
            self.states.append(view.as_strided((count, *shape), strides, offset // dtype.itemsize))
            offset += size
        pages = (torch.randperm(count - 1) + 1).tolist()
        self.entries, targets = pages[:rows], pages[rows : rows + len(step.saves)]
        for state in self.states:
            for entry in self.entries:
                state[entry] = torch.randn(state.shape[1:]).to(state)
        slots = torch.randperm(rows + 3)[:rows].tolist()
        table = torch.full((rows + 3, 2), -1, dtype=torch.int64)
        table[slots, 0] = torch.tensor(self.entries)
        pad_rows, pad_tokens = step.padding
        lengths = [*step.lengths, *[0] * pad_rows]
        starts = [
            7 + row if step.drafts else 0 for row in range(rows)
        ]  # drafts are saved at positions before a row's first
        ends = [start + length for start, length in zip(starts, step.lengths, strict=True)] + [0] * pad_rows
        rows_alone = StepRows.of(lengths, ends, [*slots, *[0] * pad_rows], device)
        ordered = sorted(zip(step.saves, targets, strict=True))
        owners = [row for (row, _), _ in ordered]
        counts = torch.bincount(torch.tensor(owners, dtype=torch.int64), minlength=len(lengths)).cumsum(0)
        saves = (
            (torch.cat((torch.zeros(1, dtype=torch.int64), counts)), torch.int32),
            ([*owners, 0], torch.int32),
            ([starts[row] + after for (row, after), _ in ordered] + [0], torch.int32),
            ([target * unit for _, target in ordered] + [0], torch.int64),
        )
        total = step.tokens
        row_T, positions_T = torch.full((total,), -1, dtype=torch.int32), torch.zeros(total, dtype=torch.int64)
        row_T[step.real], positions_T[step.real] = rows_alone.row_T.cpu(), rows_alone.positions_T.cpu()
        query_start_R1 = rows_alone.query_start_R1
        if step.stride:
            query_start_R1 = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device) * step.stride
        accepted = [*step.accepted, *[9] * pad_rows]
        self.rows = StateRows(
            replace(
                rows_alone,
                query_start_R1=query_start_R1,
                row_T=row_T.to(device),
                positions_T=positions_T.to(device),
                one_token=max(step.lengths) == 1 and pad_rows == pad_tokens and not step.stride,
                accepted_R=torch.tensor(accepted, dtype=torch.int32, device=device) if step.accepted else None,
                stride=step.stride,
            ),
            table.to(device),
            saves=StateSaves(*(torch.as_tensor(part).to(device, dtype) for part, dtype in saves))
            if step.saves
            else None,
        )


def compare(op, arguments, which: int, step: Step, shapes, dtypes, device: str, tolerance: float) -> None:
    """Run `op`'s kernel and its twin on equal memories; outputs of real tokens and all of the pool must agree.

    `arguments(states, rows)` are the call's, which uses state `which`.
    """
    found, wanted = (Memory(step, shapes, dtypes, device) for _ in range(2))
    torch.testing.assert_close(found.states[which], wanted.states[which], equal_nan=True, atol=0, rtol=0)
    out = op.kernel(*arguments(found.states[which], found.rows))
    want = op.twin(*arguments(wanted.states[which], wanted.rows))
    assert out.shape == want.shape and out.dtype == want.dtype and bool(out.isfinite().all())
    close(out[step.real], want[step.real], tolerance)
    for state, expected in zip(found.states, wanted.states, strict=True):
        empty = expected.isnan()
        assert torch.equal(state.isnan(), empty)
        for entry in range(len(state)):
            if not bool(empty[entry].any()):
                close(state[entry], expected[entry], tolerance)


def close(found: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """The error is within `tolerance` of the length."""
    found, want = found.double(), want.double()
    error = float((found - want).norm() / want.norm().clamp(min=1e-30))
    assert error <= tolerance, f"error {error:.2e}, allowed {tolerance:.0e}"


def conv_call(step: Step, channels: int, taps: int, dtype: torch.dtype, device: str, *, biased: bool):
    """Arguments of causal_conv_rows by state and rows; the inputs are a slice of wider rows."""
    torch.manual_seed(1)
    x = torch.randn(step.tokens, channels + 5).to(device, dtype)[:, 3 : 3 + channels]
    weight = torch.randn(channels, 1, taps).to(device, dtype).squeeze(1)
    bias = torch.randn(channels).to(device, dtype) if biased else None
    return lambda state, rows: (x, state, weight, bias, rows)


def delta_call(step: Step, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str):
    """Arguments of gated_delta_rows; sizes are key heads, heads, key and value size. Head 0's keys are all alike, and its
    corrections strong, which is the hardest for a solver; decays run from almost none to almost all.
    """
    key_heads, heads, key_dim, value_dim = sizes
    torch.manual_seed(2)
    mixed = torch.randn(step.tokens, 2 * key_heads * key_dim + heads * value_dim)
    keys = mixed[:, key_heads * key_dim : (key_heads + 1) * key_dim]
    keys.copy_(keys[0] + 0.1 * keys)
    rates, decays = torch.randn(2, step.tokens, heads)
    rates[:, 0] += 3
    log = torch.linspace(-4, 3, heads)
    bias = torch.randn(heads)
    tensors = [x.to(device, dtype) for x in (mixed, rates, decays, log, bias)]
    return lambda state, rows: (*tensors, state, key_heads, rows)


def mamba_call(step: Step, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str):
    """Arguments of mamba2_rows; sizes are groups, heads, head size and state size."""
    groups, heads, head_dim, state_size = sizes
    torch.manual_seed(3)
    mixed = torch.randn(step.tokens, heads * head_dim + 2 * groups * state_size)
    steps, log = torch.randn(step.tokens, heads), torch.linspace(-3, 3, heads)
    skip, bias = torch.randn(heads), torch.randn(heads)
    tensors = [x.to(device, dtype) for x in (mixed, steps, log, bias, skip)]
    return lambda state, rows: (*tensors, state, rows)


class Layer(GroupedGatedDeltaNet):
    """Qwen3-Next's, whose recurrence takes the projection ordered by key heads, if it is `grouped`."""

    grouped = False

    def takes_groups(self, batch: Any) -> bool:
        return self.grouped


def compare_orders(
    step: Step, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str, tolerance: float
) -> None:
    """A layer's outputs and states are the same with its projection ordered by key heads and by parts; sizes are as in `delta_call`."""
    key_heads, heads, key_dim, value_dim = sizes
    channels = 2 * key_heads * key_dim + heads * value_dim
    config: Any = SimpleNamespace(
        hidden_size=32, key_heads=key_heads, value_heads=heads, key_head_dim=key_dim, value_head_dim=value_dim,
        conv_channels=channels, conv_taps=4, rms_norm_eps=1e-6,
    )  # fmt: skip
    layer = Layer(config, 0, dtype)
    torch.manual_seed(4)
    for module in layer.modules():
        module.weights = {name: torch.randn(x.shape).to(device, dtype) / 4 for name, x in module.weights.items()}
    x = torch.randn(step.tokens, 32).to(device, dtype)
    stream: Any = SimpleNamespace(normed=lambda norm: x, adapters=None)
    made = []
    for layer.grouped in (False, True):
        memory = Memory(step, [(3, channels), sizes[1:]], [dtype, torch.float32], device)
        rows, backend = memory.rows, PagedRecurrentBackend()
        group = SimpleNamespace(backend=backend, page_table=rows.page_table, plan=rows.saves)
        batch: Any = SimpleNamespace(kv=[StatePages(0, tuple(memory.states))], groups=[group], rows=rows.step)
        out: torch.Tensor = layer.mix(stream, layer.norm, (None, batch, None))
        assert out.shape == (step.tokens, heads * value_dim)
        made.append([out[step.real], *(state[entry] for state in memory.states for entry in memory.entries)])
    for found, want in zip(*made, strict=True):
        close(found, want, tolerance)
