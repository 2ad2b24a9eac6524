"""Any JSON, under any of our field names, is either understood or refused with a sentence; nothing else comes out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from pagerunner.errors import InvalidRequestError
from pagerunner.server.http import decode_body
from pagerunner.server.params import chat_params, completion_params, stream_options
from pagerunner.server.protocol.requests import ChatRequest, CompletionRequest
from pagerunner.types import SamplingParams

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("1"), inner, max_size=3),
    max_leaves=6,
)


def bodies(kind: type[msgspec.Struct], required: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = st.dictionaries(st.sampled_from(kind.__struct_fields__) | st.text(max_size=4), VALUES, max_size=4)
    return st.builds(lambda some, keep: {**(required if keep else {}), **some}, fields, st.booleans())


def refuse_or_accept(work: Any) -> None:
    try:
        work()
    except InvalidRequestError as error:
        assert str(error)
        msgspec.json.encode(error.param)


@settings(max_examples=effort(50, 300), deadline=None)
@given(body=bodies(CompletionRequest, {"prompt": "abc"}))
def test_completions(body: dict[str, Any]) -> None:
    def work() -> None:
        request = decode_body(json.dumps(body).encode(), msgspec.json.Decoder(CompletionRequest))
        params = completion_params(request, SamplingParams())
        stream_options(request)
        assert request.prompts()
        msgspec.msgpack.encode(params)

    refuse_or_accept(work)


@settings(max_examples=effort(50, 300), deadline=None)
@given(body=bodies(ChatRequest, {"messages": [{"role": "user", "content": "a"}]}))
def test_chat(body: dict[str, Any]) -> None:
    def work() -> None:
        request = decode_body(json.dumps(body).encode(), msgspec.json.Decoder(ChatRequest))
        msgspec.msgpack.encode(chat_params(request, SamplingParams()))
        stream_options(request)
        for index, message in enumerate(request.messages):
            message.render(index)

    refuse_or_accept(work)


@settings(max_examples=effort(33, 200), deadline=None)
@given(body=st.binary(max_size=60))
def test_bytes(body: bytes) -> None:
    refuse_or_accept(lambda: decode_body(body, msgspec.json.Decoder(CompletionRequest)))


def test_a_good_body_is_accepted() -> None:
    """So that the tests above don't pass because everything is refused."""
    body = {"prompt": "abc", "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}, "user": "me"}
    request = decode_body(json.dumps(body).encode(), msgspec.json.Decoder(CompletionRequest))
    params = completion_params(request, SamplingParams())
    assert (params.temperature, params.stop, params.logit_bias) == (0.5, ("x",), {5: 1})
    with pytest.raises(InvalidRequestError):
        decode_body(b"{", msgspec.json.Decoder(CompletionRequest))
