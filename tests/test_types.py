"""SamplingParams: what it refuses, with which words, and how it normalises."""

from __future__ import annotations

import msgspec
import numpy
import pytest

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.types import RequestUpdate, SamplingParams, StructuredOutputsParams, TokenLogprobs, show

NAN = float("nan")
HUGE = 10**5000
ARRAY = numpy.array([1, 2])

BAD = [
    ({"n": 0}, "n"),
    ({"n": None}, "n"),
    ({"n": True}, "n"),
    ({"n": limits.MAX_N + 1}, "n"),
    ({"n": HUGE}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": HUGE}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": HUGE, "max_tokens": None}, "min_tokens"),
    ({"logprobs": limits.MAX_LOGPROBS + 1}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [b"x"]}, "stop"),
    ({"stop": ["\ud800"]}, "stop"),
    ({"stop": ["x"] * 200_000}, "stop"),
    ({"stop": "x" * (limits.MAX_STOP_STRING_CHARS + 1)}, "stop"),
    ({"stop": "x", "detokenize": False}, "stop"),
    ({"stop_token_ids": "12"}, "stop_token_ids"),
    ({"stop_token_ids": [1.0]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(limits.MAX_STOP_TOKEN_IDS + 1))}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": 7}, "allowed_token_ids"),
    ({"logit_bias": [1, 2]}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {1: NAN}}, "logit_bias"),
    ({"logit_bias": {1: 101}}, "logit_bias"),
    ({"logit_bias": {1: HUGE}}, "logit_bias"),
    ({"logit_bias": {-1: 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1, 1: 2}}, "logit_bias"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"output_kind": "stream"}, "output_kind"),
    *(({name: ARRAY}, name) for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "output_kind")),
]


@pytest.mark.parametrize(("kwargs", "param"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_values_are_refused_by_name(kwargs: dict, param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**kwargs)
    assert error.value.param == param
    assert str(error.value).startswith(param)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar", "json_object", "structural_tag"])
def test_an_array_says_not_what_a_text_must_be(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^structured_outputs has (no|a) .*{kind}|schema as {kind}"):
        StructuredOutputsParams(**{kind: ARRAY})


def test_one_string_and_none_are_lists() -> None:
    params = SamplingParams(stop="end", bad_words=None, stop_token_ids=None, top_k=-1)
    assert (params.stop, params.bad_words, params.stop_token_ids, params.top_k) == (("end",), (), (), 0)


def test_a_seed_of_minus_one_is_none() -> None:
    """So it is in vLLM, and user interfaces send it for "another answer each time"."""
    assert SamplingParams(seed=-1) == SamplingParams() and SamplingParams(seed=-2).seed == -2


def test_a_field_can_be_set_and_is_checked_then() -> None:
    """vLLM's examples take the checkpoint's defaults and change some of them."""
    params = SamplingParams(temperature=0.5)
    params.max_tokens, params.stop, params.top_k = 3, "end", -1
    assert params == SamplingParams(temperature=0.5, max_tokens=3, stop=["end"])
    for name, value in (("temperature", -1), ("min_tokens", 4), ("detokenize", False), ("top_k", "x")):
        with pytest.raises(InvalidRequestError, match=f"{name}|stop"):
            setattr(params, name, value)
    with pytest.raises(TypeError, match="temprature"):
        params.temprature = 1  # type: ignore[attr-defined]
    assert params == SamplingParams(temperature=0.5, max_tokens=3, stop=["end"])


def test_logit_bias_takes_the_string_keys_of_json() -> None:
    assert SamplingParams(logit_bias={"50": 1, 7: -2}).logit_bias == {50: 1.0, 7: -2.0}


def test_params_cross_a_process_boundary_unchanged_and_are_checked_there() -> None:
    params = SamplingParams(
        stop=["a", "b"], logit_bias={3: 1.5}, allowed_token_ids=[1, 2], seed=-5, output_kind="delta"
    )
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError, match="n must be in"):
        msgspec.json.decode(b'{"n": 0}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"temprature": 0}', type=SamplingParams)


def test_updates_cross_a_process_boundary_unchanged() -> None:
    update = RequestUpdate(
        request_id="a",
        new_token_ids=[1],
        logprobs=[TokenLogprobs(1, -0.5, 1, [1, 2], [-0.5, -1.0])],
        finish_reason="stop",
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=RequestUpdate) == update


def test_show_is_short_for_anything() -> None:
    assert show("a") == "'a'"
    assert len(show("a" * 1000)) == 80
    assert show(HUGE) == "int too long to show"
