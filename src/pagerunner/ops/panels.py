"""Matrices in panels, as the CPU kernels read them, and products with them.

A panel holds some output features of a matrix [O, I], as many as sums fit in a processor's registers: for each input feature the
weights that multiply it, one after another. So a product reads a matrix once, from beginning to end. The output features of a matrix may
be two sections, such as gates and ups. Each section begins with a panel, and its last panel may be partly empty. Example: two sections
of 20 features in panels of 16 are four panels, of 16, 4, 16 and 4 features.

Shape letters: T tokens, I input features, O output features, P panels, N features of a panel.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.linear import Norm
from pagerunner.ops.native import small
from pagerunner.ops.native.calls import PRODUCT, Commands, call, empty, memory_of, operand
from pagerunner.ops.native.library import library

_PRODUCT = struct.Struct("5P5qf4i4x")  # Product in native/products.h


def panel_width() -> int | None:
    """N on this machine; None if it has no CPU kernels."""
    found = library()
    return None if found is None else found.panel


class Layout(NamedTuple):
    """How a matrix stands in panels: N, O, and of how many sections of equal size O is made, 1 or 2."""

    width: int
    outputs: int
    sections: int = 1

    @property
    def section(self) -> int:
        """Output features of a section."""
        return self.outputs // self.sections

    @property
    def section_panels(self) -> int:
        """Panels of a section."""
        return -(-self.section // self.width)

    @property
    def panels(self) -> int:
        """P."""
        return self.sections * self.section_panels


def product_memory(tokens: int, inputs: int) -> int:
    """Bytes that the largest product of so many tokens and input features works in."""
    width = panel_width()
    assert width is not None, "there are no panels without kernels"
    return memory_of(PRODUCT, _PRODUCT.pack(0, 0, 0, 0, 1, tokens, inputs, width, inputs, width, 0.0, 0, 0, 0, 1))


def put_rows(panels_PIN: torch.Tensor, layout: Layout, first: int, rows_RI: torch.Tensor) -> None:
    """Set the output features from `first` on, converting to the panels' dtype."""
    for place, source in _pieces(panels_PIN, layout, first, rows_RI):
        place.copy_(source)


def put_rows_apart(panels_PIN: torch.Tensor, layout: Layout, numbers: range, rows_RI: torch.Tensor) -> None:
    """Set the output features `numbers`, converting to the panels' dtype."""
    sections = [divmod(number, layout.section) for number in numbers]
    panels = torch.tensor([section * layout.section_panels + place // layout.width for section, place in sections])
    columns = torch.tensor([place % layout.width for _, place in sections])
    panels_PIN[panels, :, columns] = rows_RI.to(panels_PIN.dtype)


def rows_of(panels_PIN: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The matrix [O, I], as a copy."""
    rows = panels_PIN.transpose(1, 2).reshape(layout.sections, -1, panels_PIN.shape[1])
    return rows[:, : layout.section].reshape(layout.outputs, -1)


def chosen_rows(panels_PIN: torch.Tensor, layout: Layout, numbers_T: torch.Tensor) -> torch.Tensor:
    """The output features `numbers` of a matrix of one section, [T, I]. Raises IndexError for others than [0, O)."""
    assert layout.sections == 1, "no table has sections"
    return small.table_rows(numbers_T.contiguous(), panels_PIN, layout.outputs, in_panels=True)


def _pieces(
    panels_PIN: torch.Tensor, layout: Layout, first: int, rows_RI: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of panels, and of the rows that belong there: of each section the end of a panel, whole panels, the beginning of a panel."""
    done, last = 0, first + rows_RI.shape[0]
    while first + done < last:
        section, place = divmod(first + done, layout.section)
        count = min(layout.section - place, last - first - done)
        own_PIN = panels_PIN[section * layout.section_panels : (section + 1) * layout.section_panels]
        yield from _pieces_of_section(own_PIN, place, rows_RI[done : done + count])
        done += count


def _pieces_of_section(
    panels_PIN: torch.Tensor, first: int, rows_RI: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
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
    layout: Layout,
    bias_O: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: bool = False,
    add_to_TO: torch.Tensor | None = None,
    out_TO: torch.Tensor | None = None,
    commands: Commands | None = None,
) -> torch.Tensor:
    """`norm(x) @ matrix.T + bias`, [T, O]; with `gate` the `silu_and_mul` of that. All are float32.

    With `add_to` it is added there. With `out`, whose rows have no gaps, it is stored there. With `commands` it is there once they
    have run.

    Raises:
        TypeError: a tensor has another dtype, or gaps that the kernel doesn't step over.
        ValueError: a shape doesn't fit; there are both `add_to` and `out`; or the product is put off, and torch is to compute with
            it: a gate of one section, or `add_to` whose columns are apart.
    """
    width, outputs, sections = layout
    if add_to_TO is not None and out_TO is not None:
        raise ValueError("a product is added to a tensor or stored in one, and not both")
    gate_behind = gate and sections != 2  # the up projection may begin inside a panel
    if gate_behind or (add_to_TO is not None and add_to_TO.stride(1) != 1):
        if commands is not None:
            raise ValueError("torch computes with this product at once, so it can't wait for other commands")
        made_TO = product(x_TI, panels_PIN, layout, bias_O, norm=norm, gate=gate and not gate_behind)
        if gate_behind:
            made_TO = silu_and_mul(made_TO)
        if add_to_TO is not None:
            return add_to_TO.add_(made_TO)
        return made_TO if out_TO is None else _stored(made_TO, out_TO)
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    tokens, inputs = x_TI.shape
    out_features = outputs // 2 if gate else outputs
    if add_to_TO is not None:
        out_TO = add_to_TO
    elif out_TO is None:
        out_TO = empty(tokens, out_features)
    weight_I, eps, offset = (None, 0.0, False) if norm is None else norm
    operands = (
        operand("x", x_TI),
        operand("panels", panels_PIN, layout.panels, inputs, width, dense=3),
        operand("the bias", bias_O, outputs),
        operand("the product", out_TO, tokens, out_features),
        operand("the norm's weight", weight_I, inputs),
    )
    sizes = tokens, inputs, outputs, x_TI.stride(0), out_TO.stride(0)
    flags = offset, add_to_TO is not None, gate, sections
    call(PRODUCT, _PRODUCT, operands, *sizes, eps, *flags, commands=commands)
    return out_TO


def _stored(made_TO: torch.Tensor, out_TO: torch.Tensor) -> torch.Tensor:
    operand("the product", out_TO, *made_TO.shape)  # it refuses what the kernel would
    return out_TO.copy_(made_TO)
