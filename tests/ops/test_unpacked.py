"""What a plan says that products unpack is what kernels unpack."""

from __future__ import annotations

import pytest
import torch

from helpers.stored_cases import stored
from pagerunner.ops import numerics
from pagerunner.ops.stored import Stored
from pagerunner.ops.unpacked import experts_at_once, experts_bytes, product_bytes

many = pytest.importorskip("pagerunner.ops.kernels.linear.linear_many")

BORDERS = numerics.FAST.products


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(192, 576), (24_576, 4_096), (32, 64), (248_320, 5_120), (106_496, 16_384)]
)
def test_no_number_of_tokens_unpacks_more_and_one_unpacks_as_much(outputs: int, inputs: int) -> None:
    codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta")
    scales = torch.empty(outputs, inputs // 32, dtype=torch.float16, device="meta")
    weight = stored("int4 f16 32", 32, 64)._replace(codes=codes, scales=scales, zeros=None)
    found = product_bytes(weight, torch.bfloat16, 8_192)
    sizes = {
        tokens: max(part.stop - part.start for part in many._parts(weight, torch.bfloat16, tokens)) * inputs * 2
        for tokens in (BORDERS.converted_tokens_4 + 1, BORDERS.parted_tokens - 1, BORDERS.parted_tokens, 8_192)
    }
    assert max(sizes.values()) == sizes[BORDERS.parted_tokens - 1] == found <= 2**28
    assert found == outputs * inputs * 2 or found > 2**27
    assert product_bytes(weight, torch.bfloat16, BORDERS.converted_tokens_4) == 0


def test_products_that_round_their_input_unpack_nothing() -> None:
    weight = stored("fp8 row", 32, 64)
    assert product_bytes(weight._replace(activations="token"), torch.bfloat16, 8_192) == 0
    assert product_bytes(weight._replace(activations="none"), torch.bfloat16, 8_192) == 32 * 64 * 2
    assert product_bytes(weight._replace(activations="token"), torch.float32, 8_192) == 32 * 64 * 4


def test_experts_are_unpacked_some_at_a_time_and_only_for_many_tokens() -> None:
    one = stored("int4 f16 32", 32, 64)
    weights = one._replace(
        **{n: t.expand(16, *t.shape) for n, t in one._asdict().items() if isinstance(t, torch.Tensor)}
    )
    assert experts_bytes([weights], torch.bfloat16, 96 * 16) == 0
    assert experts_bytes([weights], torch.bfloat16, 96 * 16 + 1) == 16 * 32 * 64 * 2
    whole = stored("int8 row", 32, 128)
    numbers = whole._replace(
        codes=whole.codes.expand(4, 32, 128), scales=whole.scales.expand(4, 32, 1), activations="token"
    )
    assert experts_bytes([numbers], torch.bfloat16, 8_192) == 4 * 32 * 128 * 2  # experts round to fp8 alone
    assert experts_bytes([numbers._replace(codes=numbers.codes.to(torch.float8_e4m3fn))], torch.bfloat16, 8_192) == 0
    for outputs, inputs, eight, four in (
        (5_760, 2_880, (8, 1), (4, 2)),
        (2_880, 2_880, (16, 1), (8, 2)),
        (16_384, 8_192, (4, 1), (4, 1)),
    ):
        assert experts_at_once(_meta(whole, 128, outputs, inputs), 2) == eight
        assert experts_at_once(_meta(one, 128, outputs, inputs // 2), 2) == four
    assert experts_at_once(_meta(one, 8, 5_760, 1_440), 2) == (8, 1)


def _meta(like: Stored, experts: int, outputs: int, columns: int) -> Stored:
    return like._replace(codes=torch.empty(experts, outputs, columns, dtype=like.codes.dtype, device="meta"))
