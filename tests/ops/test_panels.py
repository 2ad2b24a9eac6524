"""Matrices in panels, and the CPU kernels' products with them, against the plain matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compiler import needs_compiler
from helpers.effort import effort
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.linear import Norm
from pagerunner.ops.panels import Layout, chosen_rows, panel_width, product, put_rows, put_rows_apart, rows_of


def packed(matrix_OI: torch.Tensor, width: int, sections: int = 1) -> tuple[torch.Tensor, Layout]:
    layout = Layout(width, matrix_OI.shape[0], sections)
    panels_PIN = torch.full((layout.panels, matrix_OI.shape[1], width), float("nan"))
    put_rows(panels_PIN, layout, 0, matrix_OI)
    return panels_PIN, layout


@given(st.integers(1, 60), st.sampled_from([1, 2]), st.integers(1, 5), st.sampled_from([4, 8, 16]), st.data())
def test_parts_of_any_size_fill_panels(
    section: int, sections: int, inputs: int, width: int, data: st.DataObject
) -> None:
    layout = Layout(width, sections * section, sections)
    matrix_OI = torch.arange(layout.outputs * inputs, dtype=torch.float32).view(-1, inputs)
    cuts = sorted(data.draw(st.sets(st.integers(1, layout.outputs), max_size=5)) | {layout.outputs})
    panels_PIN = torch.full((layout.panels, inputs, width), float("nan"))
    first = 0
    for last in cuts:
        put_rows(panels_PIN, layout, first, matrix_OI[first:last].double())
        first = last
    assert torch.equal(rows_of(panels_PIN, layout), matrix_OI)
    for number in range(sections):
        assert panels_PIN[number * layout.section_panels, 0, 0] == matrix_OI[number * section, 0]
    assert panels_PIN.isfinite().sum() == matrix_OI.numel()


@pytest.mark.parametrize(("section", "sections"), [(20, 2), (37, 1), (16, 2)])
def test_gates_and_ups_that_alternate_fill_panels(section: int, sections: int) -> None:
    layout = Layout(8, sections * section, sections)
    matrix_OI = torch.randn(layout.outputs, 5)
    panels_PIN = torch.full((layout.panels, 5, 8), float("nan"))
    for first in (0, 1):
        put_rows_apart(panels_PIN, layout, range(first, layout.outputs, 2), matrix_OI[first::2].double())
    assert torch.equal(rows_of(panels_PIN, layout), matrix_OI)


@needs_compiler
@pytest.mark.parametrize("outputs", [3, 16, 37, 64])
def test_rows_are_looked_up_in_panels(outputs: int) -> None:
    matrix_OI = torch.randn(outputs, 7)
    numbers = torch.tensor([0, outputs - 1, outputs // 2, 0])
    width = panel_width()
    assert width is not None
    panels, layout = packed(matrix_OI, width)
    assert torch.equal(chosen_rows(panels, layout, numbers), matrix_OI[numbers])
    assert chosen_rows(panels, layout, numbers[:0]).shape == (0, 7)
    assert torch.equal(chosen_rows(panels, layout, numbers[::2]), matrix_OI[numbers[::2]])
    for wrong in (-1, outputs, -(2**40), 2**40):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            chosen_rows(panels, layout, torch.tensor([0, wrong, 1]))


@needs_compiler
@settings(max_examples=effort(60, 400), deadline=None)
@given(
    st.integers(0, 9) | st.sampled_from([12, 13, 31, 64, 191, 193, 385]),
    st.sampled_from([1, 7, 64, 383, 385, 800]),
    st.integers(1, 300) | st.sampled_from([1, 17, 256, 272]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 100),
)
def test_equals_the_plain_product(
    tokens: int, inputs: int, section: int, sections: int, biased: bool, offset: bool, seed: int
) -> None:
    width = panel_width()
    assert width is not None
    random = torch.Generator().manual_seed(seed)
    outputs = section * sections
    x_TI = torch.randn(tokens, inputs + 3, generator=random)[:, 1 : inputs + 1]  # rows apart, not aligned
    matrix_OI = torch.randn(outputs, inputs, generator=random) * inputs**-0.5
    bias_O = torch.randn(outputs, generator=random) if biased else None
    norm = Norm(torch.rand(inputs, generator=random) + 0.5, 1e-5, offset)
    residual_TO = torch.randn(tokens, outputs, generator=random)
    panels_PIN, layout = packed(matrix_OI, width, sections)

    def close(got: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(got, want, atol=3e-5, rtol=1e-4)

    close(product(x_TI, panels_PIN, layout, bias_O), F.linear(x_TI, matrix_OI, bias_O))
    normed_TO = F.linear(norm(x_TI.contiguous()), matrix_OI, bias_O)
    close(product(x_TI, panels_PIN, layout, bias_O, norm=norm), normed_TO)
    for added_TO in (residual_TO.clone(), residual_TO.t().clone(memory_format=torch.contiguous_format).t()):
        product(x_TI, panels_PIN, layout, bias_O, norm=norm, add_to_TO=added_TO)
        close(added_TO, residual_TO + normed_TO)
    if outputs % 2 == 0:
        gated_TO = silu_and_mul(normed_TO)
        close(product(x_TI, panels_PIN, layout, bias_O, norm=norm, gate=True), gated_TO)
        out_TO = torch.zeros_like(gated_TO)
        assert product(x_TI, panels_PIN, layout, bias_O, norm=norm, gate=True, out_TO=out_TO) is out_TO
        close(out_TO, gated_TO)
        added_TO = residual_TO[:, : outputs // 2].clone()
        assert product(x_TI, panels_PIN, layout, bias_O, norm=norm, gate=True, add_to_TO=added_TO) is added_TO
        close(added_TO, residual_TO[:, : outputs // 2] + gated_TO)


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_gate_is_silu_for_numbers_of_all_sizes(tokens: int) -> None:
    width = panel_width()
    assert width is not None
    gate = torch.cat([torch.linspace(-300, 300, width - 4), torch.tensor([0.0, -0.0, 1e-20, float("nan")])])
    matrix_OI = torch.cat([gate, torch.ones(width)]).unsqueeze(-1)
    got = product(torch.ones(tokens, 1), *packed(matrix_OI, width), gate=True)
    want = silu_and_mul(matrix_OI.t()).expand(tokens, -1)
    torch.testing.assert_close(got, want, atol=1e-30, rtol=1e-5, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_gate_far_below_nought_closes(tokens: int) -> None:
    width = panel_width()
    assert width is not None
    gate = torch.tensor([-90.0, -1e4, -1e30, -3e38]).repeat(width // 4)
    matrix_OI = torch.cat([gate, torch.full((width,), 1e30)]).unsqueeze(-1)
    got = product(torch.ones(tokens, 1), *packed(matrix_OI, width), gate=True)
    assert got.abs().max() < 1e-6  # -90 / exp(90) * 1e30 is -7e-8
    matrix_OI[0] = float("nan")
    assert product(torch.ones(tokens, 1), *packed(matrix_OI, width), gate=True)[:, 0].isnan().all()


@needs_compiler
def test_what_the_kernel_would_misread_is_refused() -> None:
    width = panel_width()
    assert width is not None
    x_TI, panels_PIN, layout = torch.ones(2, 8), *packed(torch.ones(2 * width, 8), width)
    for bias_O in (torch.ones(2 * width).bfloat16(), torch.ones(4 * width)[::2], torch.ones(width)):
        with pytest.raises((TypeError, ValueError), match=r"bias.* of shape \["):
            product(x_TI, panels_PIN, layout, bias_O)
    for weight_I in (torch.ones(8).double(), torch.ones(16)[::2], torch.ones(7)):
        with pytest.raises((TypeError, ValueError), match=r"norm's weight.* of shape \["):
            product(x_TI, panels_PIN, layout, norm=Norm(weight_I, 1e-5))


@needs_compiler
def test_a_token_that_is_not_a_number_harms_no_other() -> None:
    width = panel_width()
    assert width is not None
    matrix_OI = torch.randn(4 * width, 40)
    x_TI = torch.randn(9, 40)
    want = product(x_TI, *packed(matrix_OI, width))
    x_TI[4] = float("nan")
    got = product(x_TI, *packed(matrix_OI, width))
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert got[4].isnan().all() and torch.equal(got[others], want[others])


@needs_compiler
@pytest.mark.parametrize("inputs", [40, 700])
def test_a_tokens_product_is_the_same_beside_any_others(inputs: int) -> None:
    width = panel_width()
    assert width is not None
    matrix_OI, x_TI, norm = torch.randn(150, inputs), torch.randn(300, inputs), Norm(torch.rand(inputs), 1e-5)
    panels, layout = packed(matrix_OI, width, 2)
    want = product(x_TI, panels, layout, norm=norm, gate=True)
    for count in (1, 2, 3, 4, 7, 13, 64, 193):
        assert torch.equal(product(x_TI[:count], panels, layout, norm=norm, gate=True), want[:count])
