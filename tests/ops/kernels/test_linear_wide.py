"""Wide tiles of int4, as far as they can be tested without a card. Triton's interpreter doesn't know Gluon; `tests/gpu` runs the kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.stored_cases import stored
from pagerunner.ops.kernels.linear import linear_many, linear_wide
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_tiles import in_order
from pagerunner.ops.kernels.linear.linear_wide import WideConfig, has_gluon, reads, stages_of, steps_of, wide_config
from pagerunner.ops.stored import Stored4, dense, rows_of

ROOM = 227 * 1024


def as_multiplied(codes: torch.Tensor) -> torch.Tensor:
    """Nibbles [O, I] of packed codes in the order in which the kernel's operands have them: its reads, words, reshapes, and halves."""
    steps = codes.unflatten(1, (-1, 16, 4))[..., [0, 2, 1, 3]].flatten(2)  # [O, steps, 64 bytes]
    halves = torch.stack((steps & 15, steps >> 4), 2)
    return halves.unflatten(3, (4, 4, 2, 2)).permute(0, 1, 2, 4, 5, 3, 6).flatten(1)


@pytest.mark.parametrize("inputs", [128, 384])
def test_the_order_of_inputs_is_that_of_the_operands(inputs):
    matrix = stored("int4 f32 all", 24, inputs)
    x = torch.randn(5, inputs)
    got = in_order(x, matrix, pairs=True) @ (as_multiplied(matrix.codes).float() - 8.0).T * matrix.scales.T
    torch.testing.assert_close(got, x @ dense(matrix, torch.float32).T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inputs", [128, 304])
def test_the_order_of_inputs_is_that_of_the_operands_of_8_bits(inputs):
    """A half of a step is 64 columns, a thread's bytes are 16 neighbours, and numbers stay in the order of bytes."""
    matrix = stored("int8 row", 24, inputs)
    x = torch.randn(5, inputs)
    codes = torch.nn.functional.pad(matrix.codes, (0, -inputs % 64)).unflatten(1, (-1, 4, 4, 2, 2))
    multiplied = codes.permute(0, 1, 3, 4, 2, 5).flatten(1)
    got = in_order(x, matrix) @ multiplied.float().T * matrix.scales.T
    torch.testing.assert_close(got, x @ dense(matrix, torch.float32).T, atol=1e-3, rtol=1e-4)


def test_scales_of_nvfp4_are_lifted_exactly():
    """e4m3's bits in place are 2 ** -120 of the number, of any sign; two products with 2 ** 92 follow."""
    byte = torch.arange(256, dtype=torch.int32)
    byte = byte[(byte & 0x7F) != 0x7F]
    bits = (((byte & 0x7F) << 4) | ((byte & 0x80) << 8)).to(torch.int16).view(torch.bfloat16)
    factor = torch.tensor(0x6D80, dtype=torch.int16).view(torch.bfloat16)
    assert factor == 2.0**92
    want = byte.to(torch.uint8).view(torch.float8_e4m3fn).double() * 2.0**64
    assert torch.equal((bits.double() * 2.0**92).bfloat16().double() * 2.0**92, want)


def test_the_order_keeps_every_input_once_and_pads_with_zeros():
    x = torch.arange(1.0, 2 * 288 + 1).reshape(2, 288)
    ordered = in_order(x, stored("int4 f32 all", 8, 288), pairs=True)
    assert ordered.shape == (2, 384)
    assert [sorted(row.tolist()) for row in ordered] == [[0.0] * 96 + row.tolist() for row in x]
    assert ordered[0, :16].tolist() == [1, 3, 33, 35, 65, 67, 97, 99, 2, 4, 34, 36, 66, 68, 98, 100]


def test_the_conversion_is_exact_in_bfloat16():
    """n * 2 ** -133 times s * 2 ** 70, less 8 s * 2 ** -63: every factor is a bfloat16, and the result is the twin's times 2 ** -63."""
    scale = (torch.rand(4096) * 0.1).bfloat16()
    for code in range(16):
        nibble = torch.tensor(code, dtype=torch.int16).view(torch.bfloat16).double()
        assert nibble == code * 2.0**-133
        raised, taken = (scale.double() * 2.0**70).bfloat16(), (scale.double() * -8 * 2.0**-63).bfloat16()
        got = (nibble * raised.double() + taken.double()) * 2.0**63
        assert torch.equal(got.bfloat16(), ((code - 8) * scale.float()).bfloat16())


def test_the_conversion_of_the_smallest_and_largest_scales():
    """Up to 2 ** 57 and down to 2 ** -63 it is exact. Below, what is lost is nothing that an output shows."""
    code = torch.arange(16.0, dtype=torch.float64)
    for power in range(-133, 58):
        for fraction in (1.0, 1.9921875):
            scale = torch.tensor(fraction * 2.0**power, dtype=torch.float64).bfloat16().double()
            raised, taken = (scale * 2.0**70).bfloat16(), (scale * -8 * 2.0**-63).bfloat16()
            got = (code * 2.0**-133 * raised.double() + taken.double()).bfloat16().double() * 2.0**63
            want = ((code - 8) * scale).bfloat16().double()
            assert torch.equal(got, want) if power >= -63 else bool(((got - want).abs() <= 2.0**-70).all()), power


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float16)],
)
def test_int8_times_scales_of_16_bits_is_rounded_once(dtype, scales):
    """A byte in the middle of a float32 is 32,768 and the byte. What one operation takes off is no longer than a float32."""
    code = torch.arange(-128, 128, dtype=torch.int32)
    placed = (0x47000000 | ((code & 0xFF) ^ 0x80) << 8).view(torch.float32)
    assert torch.equal(placed, 32896.0 + code)
    scale = (torch.rand(512, 1) * 0.1).to(scales).float()
    taken = scale * -32896.0
    assert torch.equal(taken.double(), scale.double() * -32896)
    got = (placed.double() * scale.double() + taken.double()).float()
    assert torch.equal(got.to(dtype), (code * scale).to(dtype))


def test_which_matrices_are_read():
    half, single = torch.bfloat16, torch.float16
    assert reads(half, stored("int4 bf16 128", 48, 384)) and reads(half, stored("int4 bf16 128 zeros", 48, 384))
    assert reads(single, stored("int4 f16 128", 48, 384)) and reads(half, stored("int4 bf16 all", 48, 288))
    assert not reads(half, stored("int4 f16 128", 48, 384)), "such a scale isn't a number of the activations' dtype"
    assert reads(half, stored("int4 bf16 64", 48, 384)) and reads(single, stored("int4 f16 32", 48, 384))
    assert reads(half, stored("int4 bf16 64 zeros", 48, 384)) and not reads(half, stored("int4 bf16 192", 48, 384))
    assert reads(half, stored("e2m1 e8m0 32", 48, 384)) and reads(half, stored("e2m1 e4m3 16 rows", 48, 384))
    assert not reads(single, stored("e2m1 e8m0 32", 48, 384)), "float16 has no room for scales times 2 ** 64"
    assert not reads(half, stored("e2m1 f16 32", 48, 384)) and not reads(half, stored("int4 bf16 128 rows", 48, 384))
    assert reads(half, stored("fp8 row", 48, 400)) and reads(single, stored("int8 group 128", 48, 384))
    assert reads(half, stored("fp8 block", 48, 384)) and not reads(half, stored("fp8 row", 48, 392)), (
        "the copy engine's rows are of 16 bytes"
    )
    assert reads(half, stored("int8 group 64", 48, 384)) and reads(half, stored("fp8 block 8x32", 48, 384))
    assert not reads(half, stored("int8 group 96", 48, 384)) and not reads(half, stored("int8 group 16", 48, 384))
    assert not reads(torch.float32, stored("int4 f32 128", 48, 384)) and not reads(
        torch.float32, stored("fp8 row", 48, 384)
    )
    shifted = stored("int4 bf16 128", 48, 384)
    assert not reads(half, shifted._replace(codes=shifted.codes[:, :64])), "rows lie apart"


def test_only_measured_versions_and_devices_run_it(monkeypatch):
    matrix = stored("int4 bf16 128", 48, 384)
    monkeypatch.setattr(linear_wide, "SMALL_WEIGHTS", 48 * 384)
    assert not linear_wide.serves(64, torch.bfloat16, matrix, torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    card = torch.device("cuda", 0)
    for version, capability, want in (("3.6.0", (9, 0), True), ("3.7.0", (9, 0), False), ("3.6.1", (10, 0), False)):
        monkeypatch.setattr(linear_wide.triton, "__version__", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        has_gluon.cache_clear()
        assert linear_wide.serves(64, torch.bfloat16, matrix, card) is want
        assert not linear_wide.serves(linear_wide.MAX_TOKENS + 1, torch.bfloat16, matrix, card)
        monkeypatch.setattr(linear_wide, "SMALL_WEIGHTS", 48 * 384 + 1)
        assert not linear_wide.serves(64, torch.bfloat16, matrix, card), "tiles are faster"
        assert linear_wide.serves(32, torch.bfloat16, matrix, card) is want
        monkeypatch.setattr(linear_wide, "SMALL_WEIGHTS", 48 * 384)
    has_gluon.cache_clear()


def test_parts_fill_the_multiprocessors(monkeypatch):
    monkeypatch.setattr(linear_wide, "multiprocessors", lambda device: 132)
    device = torch.device("cpu")
    for outputs, inputs in ((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (576, 2880), (48, 128)):
        matrix = stored("int4 bf16 all", 8, 128)._replace(codes=torch.empty(outputs, inputs // 2, dtype=torch.uint8))
        for tokens in (17, 48, 100, 160, 200, 256):
            config = wide_config(tokens, matrix, device)
            tiles = -(-tokens // config.tokens) * -(-outputs // config.features)
            assert config.parts == 1 or tiles * config.parts <= 132
            steps = -(-inputs // 128)
            assert 1 <= config.parts <= max(1, steps // linear_wide.PART_STEPS)


@pytest.mark.parametrize("tokens", [32, 64, 96, 128, 160, 192])
def test_steps_in_flight_fit_into_shared_memory(tokens):
    config = WideConfig(tokens, 3, 1)
    for steps, zeros in ((4, False), (16, True), (32, False), (34, True)):
        stages = stages_of(config, steps, stored("int4 bf16 128 zeros" if zeros else "int4 bf16 128", 8, 128), ROOM)
        used = stages * (256 * tokens + 64 * 192) + -(-steps // 32) * 32 * 192 * (4 if zeros else 2)
        assert 2 <= stages <= 12 and used < ROOM - 8 * 1024


@pytest.mark.parametrize(
    ("outputs", "inputs", "want"),
    [
        (24_576, 4096, [(24_576, 3, 1)]), (28_672, 4096, [(25_344, 3, 1), (3328, 2, 5)]), (34_816, 5120, [(33_792, 2, 1), (1024, 2, 10)]),
        (51_200, 5120, [(50_688, 3, 1), (512, 2, 10)]), (43_008, 5376, [(43_008, 3, 1)]), (6144, 4096, [(6144, 2, 2)]),
    ],
)  # fmt: skip
def test_what_is_left_of_whole_rounds_has_a_launch_of_its_own(outputs, inputs, want, monkeypatch):
    """Gates and ups of Qwen3-8B, Llama-3.1-8B, Qwen3-14B and 32B, and Gemma-3-27B: features, groups and parts. Together they are all output features, once."""
    monkeypatch.setattr(linear_wide, "multiprocessors", lambda device: 132)
    matrix = stored("int4 bf16 all", 8, 128)._replace(codes=torch.empty(outputs, inputs // 2, dtype=torch.uint8))
    found = linear_wide.pieces(72, matrix, torch.device("cpu"))
    assert [rows.start for rows in found] == [0, *(rows.stop for rows in found)][:-1] and found[-1].stop == outputs
    configs = [wide_config(72, rows_of(matrix, rows.start, rows.stop), torch.device("cpu")) for rows in found]
    assert [(rows.stop - rows.start, *config[1:]) for rows, config in zip(found, configs, strict=True)] == want
    assert len(linear_wide.pieces(256, matrix, torch.device("cpu"))) == 1


def test_pieces_are_multiplied_by_their_own_rows(monkeypatch):
    """Each launch has its rows' codes, scales, zero points, bias and outputs."""
    monkeypatch.setattr(linear_many.linear_wide, "has_gluon", lambda device: True)
    monkeypatch.setattr(linear_many.linear_wide, "pieces", lambda *_: [slice(0, 32), slice(32, 48)])
    monkeypatch.setattr(linear_many.linear_wide, "run_wide", run_by_tiles)
    for form in ("int4 f16 128 zeros", "int8 group 128"):
        matrix, x, bias = stored(form, 48, 384), torch.randn(20, 384).half(), torch.randn(48).half()
        want = x.float() @ dense(matrix, torch.float32).T + bias.float()
        assert float((linear_many.linear(x, matrix, bias).float() - want).norm() / want.norm()) < 3e-3
        residual = torch.randn(20, 48).half()
        want += residual.float()
        linear_many.linear_add_(x, matrix, residual, bias)
        assert float((residual.float() - want).norm() / want.norm()) < 3e-3


def run_by_tiles(product: Product, config: WideConfig) -> None:
    """The twin of `run_wide`."""
    pairs = isinstance(product.weight_OI, Stored4)
    order = in_order(torch.arange(384.0)[None], product.weight_OI, pairs=pairs)[0].long()
    x = torch.empty_like(product.x_TI)
    x[:, order] = product.x_TI
    y = (x.float() @ dense(product.weight_OI, torch.float32).T).half()
    y = y if product.bias_O is None else y + product.bias_O
    product.out_TO.copy_(product.out_TO + y if product.add else y)


def test_parts_have_an_even_number_of_steps():
    assert [steps_of(inputs, parts) for inputs, parts in ((4096, 1), (4096, 4), (4096, 6), (2880, 1), (160, 1))] == [
        32,
        8,
        6,
        24,
        2,
    ]


@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens"), [(12_288, 28_672, 192), (8192, 49_152, 250), (16_384, 53_248, 160)]
)
def test_long_rows_leave_room_for_two_steps(outputs, inputs, tokens, monkeypatch):
    """Down projections of Mistral-Large, Qwen1.5-110B and Llama-3.1-405B in AWQ: scales and zero points of a whole row would fill the memory."""
    monkeypatch.setattr(linear_wide, "multiprocessors", lambda device: 132)
    matrix = stored("int4 bf16 128 zeros", 8, 128)._replace(codes=torch.empty(outputs, inputs // 2, dtype=torch.uint8))
    config = wide_config(tokens, matrix, torch.device("cpu"))
    steps = steps_of(inputs, config.parts)
    assert config.parts > 132 // (-(-tokens // config.tokens) * -(-outputs // config.features))
    stages = stages_of(config, steps, matrix, ROOM)
    assert stages >= 2
    used = stages * (256 * config.tokens + 64 * config.features) + linear_wide.room_of(steps) * config.features * 4
    assert used < ROOM - 8 * 1024


class Tensor:
    """A tensor of the device for Gluon's functions as Python runs them: notes which elements are loaded."""

    def __init__(self, seen: list[Any], at: Any = 0) -> None:
        self.seen, self.at = seen, at

    def __add__(self, more: Any) -> Tensor:
        return Tensor(self.seen, self.at + more)


def as_python(function: Any, **known: Any) -> Callable[..., Any]:
    """A function in Gluon as one in Python, with `known` in place of what its module knows."""
    code: FunctionType = function.fn
    return FunctionType(code.__code__, {**code.__globals__, **known})


@pytest.mark.parametrize(
    ("inputs", "group"), [(384, 128), (896, 128), (2880, 2880), (2816, 256), (512, 128), (160, 160)]
)
@pytest.mark.parametrize("parts", [1, 2])
def test_nothing_beyond_the_scales_is_read(inputs, group, parts):
    """A part's steps are an even number, so the last one may have no columns and no scales."""
    from pagerunner.ops.kernels.linear import linear_gluon

    def load(at: Tensor) -> torch.Tensor:
        at.seen.append(at.at)
        return torch.zeros(64)

    def smaller(one: Any, other: Any) -> Any:
        return min(one, other) if isinstance(one, int) else one.clamp(max=other)

    language = SimpleNamespace(
        arange=lambda first, last, layout: torch.arange(first, last), minimum=smaller, static_range=range, load=load,
        int64=torch.int64, float32=torch.float32, uint16=torch.uint16, thread_barrier=lambda: None,
    )  # fmt: skip
    room = SimpleNamespace(dtype=torch.float16, index=lambda place: SimpleNamespace(store=lambda values: None))
    load_scales = as_python(linear_gluon._load_scales, gl=language, LINE=None, BATCH=16)
    features, groups, total, steps = 48, -(-inputs // group), -(-inputs // 128), steps_of(inputs, parts)
    seen: list[torch.Tensor] = []
    for first in range(0, total, steps):
        own = min(steps, total - first)
        load_scales(Tensor(seen), None, room, None, 0, 0, first, own + own % 2, features, groups, group, 2, True, False)
    assert max(int(at.max()) for at in seen) == features * groups - 1
    assert {int(place) for at in seen for place in at} == set(range(features * groups))


def test_many_tokens_take_it_where_it_serves(monkeypatch):
    """`linear_many` hands it the inputs in its order, and the warm-up knows its kernels."""
    seen = []
    monkeypatch.setattr(linear_many.linear_wide, "has_gluon", lambda device: True)
    monkeypatch.setattr(linear_many.linear_wide, "run_wide", lambda *given: seen.append(given))
    matrix = stored("int4 bf16 128", 48, 384)
    x, stream = torch.randn(20, 384).bfloat16(), torch.zeros(20, 48).bfloat16()
    linear_many.linear_add_(x, matrix, stream)
    product, config = seen.pop()
    assert torch.equal(product.x_TI, in_order(x, matrix, pairs=True))
    assert (
        product[2:3] == (None,)
        and product[4:] == (None, False, True)
        and product.out_TO.data_ptr() == stream.data_ptr()
    )
    assert torch.equal(product.weight_OI.codes, matrix.codes) and torch.equal(product.weight_OI.scales, matrix.scales)
    assert linear_many.kernels_of(20, torch.bfloat16, matrix, x.device) == (config, 1)
    linear_many.linear_add_(x.float(), matrix, stream.float())
    assert not seen
