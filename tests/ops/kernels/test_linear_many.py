"""Products for a batch of tokens against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.kernels import linear as kernels
from pagerunner.ops.kernels import linear_many as many
from pagerunner.ops.kernels.linear_many import ManyConfig
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu

TOKENS, INPUTS = 19, 40
WHOLE, HALVES, THIRDS = (
    ManyConfig(16, 16, 16, split, 1, 2) for split in (1, 2, 3)
)  # 40 inputs: the last part isn't full


@pytest.fixture
def use(monkeypatch):
    """Send float32 products of any shape to the kernel, with the given blocks; says how often it ran."""

    def choose(config):
        monkeypatch.setattr(kernels, "_fits", lambda x, weight, **_: True)
        monkeypatch.setattr(kernels, "many_config", lambda *shape: config)
        calls = []
        run = kernels.run_many
        monkeypatch.setattr(kernels, "run_many", lambda *args, **kwargs: calls.append(1) or run(*args, **kwargs))
        return calls

    return choose


def tensors(features: int, bias: bool, inputs: int = INPUTS, dtype: torch.dtype = torch.float32):
    torch.manual_seed(features)
    x = torch.randn(TOKENS, inputs + 3)[:, 1:-2].to(dtype)
    weight, bias_O = torch.randn(features, inputs).to(dtype), torch.randn(features).to(dtype)
    return x, weight, bias_O if bias else None


@pytest.mark.parametrize("config", [WHOLE, HALVES, THIRDS])
@pytest.mark.parametrize("bias", [False, True])
def test_products(use, config, bias):
    calls = use(config)
    x, weight, bias_O = tensors(21, bias)
    want = linear.twin(x, weight, bias_O)
    torch.testing.assert_close(linear.kernel(x, weight, bias_O), want, atol=1e-4, rtol=1e-5)
    residual = torch.randn(TOKENS, 22)[:, 1:]
    expected = residual + want
    linear_add_.kernel(x, weight, residual, bias_O)
    torch.testing.assert_close(residual, expected, atol=1e-4, rtol=1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("config", [WHOLE, HALVES, WHOLE._replace(norm=False)])
@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_before_and_a_gate_behind(use, config, offset):
    calls = use(config)
    x, weight, bias_O = tensors(18, True)
    norm = Norm(torch.randn(INPUTS), 1e-2, offset)
    for op in (norm_linear, norm_linear_silu):
        torch.testing.assert_close(
            op.kernel(x, norm, weight, bias_O), op.twin(x, norm, weight, bias_O), atol=1e-4, rtol=1e-4
        )
    assert len(calls) == 2


def test_half_precision_stays_within_a_rounding(use):
    use(HALVES)
    x, weight, _ = tensors(16, False, dtype=torch.float16)
    got = linear.kernel(x, weight)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, linear.twin(x, weight), atol=2e-2, rtol=5e-3)


def test_divided_inputs_leave_the_counters_as_they_were_and_repeat_to_the_bit(use):
    use(THIRDS)
    x, weight, _ = tensors(21, False)
    first = linear.kernel(x, weight)
    assert many._counters(x.device).eq(0).all()
    assert torch.equal(linear.kernel(x, weight), first)


def test_nothing_beyond_the_last_feature_and_token_is_touched():
    x, weight, _ = tensors(9, False)
    for config in (WHOLE, HALVES):
        around = torch.full((TOKENS + 1, 16), 7.0)
        many.run_many(x, weight, None, around[:TOKENS, :9], config=config)
        assert around[:, 9:].eq(7).all() and around[TOKENS].eq(7).all()


def test_only_what_was_measured_is_chosen(monkeypatch):
    """By shape and number of tokens; the rest, and float32, is the library's."""
    small = ManyConfig(64, 32, 64, 1, 4, 4)
    monkeypatch.setattr(many, "CHOSEN", {(32, 48, True): ((32, None), (64, small), (256, HALVES))})
    many.many_config.cache_clear()
    found = [many.many_config(tokens, 32, 48, True) for tokens in (16, 17, 33, 64, 65, 256, 257)]
    assert found == [None, None, small, small, HALVES, HALVES, None]
    assert many.many_config(64, 32, 48, False) is None
    weight = torch.zeros(96, 32, dtype=torch.bfloat16)
    assert kernels._fits(torch.zeros(64, 32, dtype=torch.bfloat16), weight, gated=True)
    assert not kernels._fits(torch.zeros(64, 32, dtype=torch.bfloat16), weight)
    assert not kernels._fits(torch.zeros(64, 32), weight.float(), gated=True)
    many.many_config.cache_clear()


def test_more_tiles_than_counters_are_refused():
    weight = torch.zeros(16 * (many.MAX_TILES + 1), 16)
    x = torch.zeros(1, 16)
    with pytest.raises(ValueError, match="4097 tiles"):
        many.run_many(x, weight, None, torch.empty(1, weight.shape[0]), config=HALVES)
