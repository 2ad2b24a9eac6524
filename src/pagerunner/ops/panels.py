"""Matrices in panels, as the CPU kernels read them, and products with them.

A panel holds some output features of a matrix [O, I], as many as sums fit in a processor's registers: for each input feature the
weights that multiply it, one after another. So a product reads a matrix once, from beginning to end. A matrix in panels takes the bytes
that the matrix takes.

Shape letters: T tokens, I input features, O output features, P panels, N features of a panel; O is P * N.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.linear import Norm
from pagerunner.ops.native.library import library, loaded

_PRODUCT = struct.Struct("5P5qf3i")  # Product in native/products.h


def panel_width() -> int | None:
    """N on this machine; None if it has no CPU kernels."""
    found = library()
    return None if found is None else found.panel


def put_rows(panels_PIN: torch.Tensor, first: int, rows_RI: torch.Tensor) -> None:
    """Set the output features from `first` on, converting to the panels' dtype."""
    for place, source in _pieces(panels_PIN, first, rows_RI):
        place.copy_(source)


def rows_of(panels_PIN: torch.Tensor) -> torch.Tensor:
    """The matrix [O, I], as a copy."""
    return panels_PIN.transpose(1, 2).reshape(-1, panels_PIN.shape[1])


def chosen_rows(panels_PIN: torch.Tensor, numbers_T: torch.Tensor) -> torch.Tensor:
    """The output features `numbers`, [T, I]."""
    width = panels_PIN.shape[2]
    panels_T = torch.div(numbers_T, width, rounding_mode="floor")
    return panels_PIN[panels_T, :, numbers_T - panels_T * width]


def _is_row(values: torch.Tensor, size: int) -> bool:
    return values.shape == (size,) and values.dtype == torch.float32 and values.is_contiguous()


def _pieces(panels_PIN: torch.Tensor, first: int, rows_RI: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of panels, and of the rows that belong there: the end of a panel, whole panels, the beginning of a panel."""
    width, last = panels_PIN.shape[2], first + rows_RI.shape[0]
    whole = min(-(-first // width) * width, last)
    end = max(last // width * width, whole)
    if first < whole:
        begin = first % width
        yield panels_PIN[first // width, :, begin : begin + whole - first].t(), rows_RI[: whole - first]
    if whole < end:
        places = panels_PIN[whole // width : end // width].transpose(1, 2)
        yield places, rows_RI[whole - first : end - first].unflatten(0, (-1, width))
    if end < last:
        yield panels_PIN[end // width, :, : last - end].t(), rows_RI[end - first :]


def product(
    x_TI: torch.Tensor,
    panels_PIN: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: bool = False,
    add_to_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """`norm(x) @ matrix.T + bias`, [T, O]; with `gate` the `silu_and_mul` of that. With `add_to` it is added there. All are float32."""
    kernels = loaded()
    assert kernels is not None, "there are panels without kernels"
    panels, inputs, width = panels_PIN.shape
    if gate and panels % 2:  # the up projection begins inside a panel
        gated_TO = silu_and_mul(product(x_TI, panels_PIN, bias_O, norm=norm))
        return gated_TO if add_to_TO is None else add_to_TO.add_(gated_TO)
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    tokens, outputs = x_TI.shape[0], panels * width
    assert x_TI.shape[1] == inputs and x_TI.dtype == torch.float32, "the kernel gets other numbers than it reads"
    assert panels_PIN.dtype == torch.float32 and panels_PIN.is_contiguous(), "the kernel reads whole panels of float32"
    assert bias_O is None or _is_row(bias_O, outputs), "the kernel reads a bias as float32, one after another"
    assert norm is None or _is_row(norm.weight_I, inputs), (
        "the kernel reads a norm's weight as float32, one after another"
    )
    if add_to_TO is None:
        out_TO = x_TI.new_empty(tokens, outputs // 2 if gate else outputs)
    elif add_to_TO.stride(1) != 1:
        return add_to_TO.add_(product(x_TI, panels_PIN, bias_O, norm=norm, gate=gate))
    else:
        out_TO = add_to_TO
    call = _PRODUCT.pack(
        x_TI.data_ptr(),
        panels_PIN.data_ptr(),
        0 if bias_O is None else bias_O.data_ptr(),
        out_TO.data_ptr(),
        0 if norm is None else norm.weight_I.data_ptr(),
        tokens,
        inputs,
        outputs,
        x_TI.stride(0),
        out_TO.stride(0),
        0.0 if norm is None else norm.eps,
        norm is not None and norm.offset,
        add_to_TO is not None,
        gate,
    )
    kernels.product(call)
    return out_TO
