"""The core's process holds every request to the limits itself, whatever a frontend has let through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from helpers import failing_core
from helpers.patience import LONG
from helpers.serving import write_text_side
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.client import CoreClient, launch_core
from pagerunner.errors import EngineDeadError
from pagerunner.types import EngineRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("forked")

VOCAB = 2048


def raw(name: str, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> wire.Add:
    """A request as bytes that no `EngineRequest` of this process would have become."""
    good = EngineRequest(
        request_id=name, prompt_token_ids=[5, 6], params=SamplingParams(max_tokens=None), seed=0, max_tokens=3
    )
    fields = msgspec.to_builtins(good)
    fields["params"] = {"max_tokens": None}
    change(fields, fields["params"])
    return wire.Add([name], msgspec.Raw(msgspec.msgpack.encode([fields])))


def put(where: str, name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda request, params: (request if where == "request" else params).__setitem__(name, value)


BAD: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = {
    "min_tokens without max_tokens": (put("params", "min_tokens", 1000), "min_tokens is 1000, more than the 3 tokens"),
    "min_tokens over the table": (put("params", "min_tokens", 2**40), "PAGERUNNER_LIMIT_MAX_TOKENS"),
    "max_tokens 0": (put("request", "max_tokens", 0), "max_tokens is 0"),
    "max_tokens over the table": (put("request", "max_tokens", 2**40), "PAGERUNNER_LIMIT_MAX_TOKENS"),
    "n": (put("params", "n", limits.MAX_N + 1), "PAGERUNNER_LIMIT_MAX_N "),
    "logprobs": (put("params", "logprobs", 10_000), "PAGERUNNER_LIMIT_MAX_LOGPROBS"),
    "prompt_logprobs": (put("params", "prompt_logprobs", 10_000), "PAGERUNNER_LIMIT_MAX_LOGPROBS"),
    "stop strings": (put("params", "stop", ["x"] * 65), "PAGERUNNER_LIMIT_MAX_STOP_STRINGS"),
    "a stop string": (put("params", "stop", ["x" * 2000]), "PAGERUNNER_LIMIT_MAX_STOP_STRING_CHARS"),
    "all stop strings": (put("params", "stop", ["x" * 1000] * 20), "PAGERUNNER_LIMIT_MAX_STOP_CHARS"),
    "stop ids": (put("params", "stop_token_ids", list(range(1025))), "PAGERUNNER_LIMIT_MAX_STOP_TOKEN_IDS"),
    "a stop id": (put("params", "stop_token_ids", [VOCAB]), f"stop_token_ids holds token id {VOCAB}"),
    "a negative stop id": (put("params", "stop_token_ids", [3, -1]), "stop_token_ids|-1"),
    "bad words": (put("params", "bad_words", ["x"] * 1025), "PAGERUNNER_LIMIT_MAX_BAD_WORDS"),
    "bad words' tokens": (put("request", "bad_words_ids", [[7] * 20_000]), "PAGERUNNER_LIMIT_MAX_BAD_WORD_TOKENS"),
    "a bad word's token": (put("request", "bad_words_ids", [[VOCAB]]), f"bad_words holds token id {VOCAB}"),
    "a bad word's negative token": (put("request", "bad_words_ids", [[7, -1]]), "bad_words holds token id -1"),
    "a long bad word": (put("request", "bad_words_ids", [[7] * 129]), "PAGERUNNER_LIMIT_MAX_BAD_WORD_LENGTH"),
    "an empty bad word": (put("request", "bad_words_ids", [[]]), "without tokens"),
    "logit_bias": (put("params", "logit_bias", dict.fromkeys(range(1025), 1.0)), "PAGERUNNER_LIMIT_MAX_LOGIT_BIAS"),
    "logit_bias' id": (put("params", "logit_bias", {VOCAB: 1.0}), f"logit_bias holds token id {VOCAB}"),
    "allowed id": (put("params", "allowed_token_ids", [VOCAB]), f"allowed_token_ids holds token id {VOCAB}"),
    "a negative allowed id": (put("params", "allowed_token_ids", [3, -1]), "allowed_token_ids|-1"),
    "logit_bias' negative id": (put("params", "logit_bias", {"-1": 1.0}), "logit_bias|-1"),
    "temperature": (put("params", "temperature", float("nan")), "temperature must be a finite number"),
    "prompt id": (put("request", "prompt_token_ids", [5, VOCAB]), f"prompt holds token id {VOCAB}"),
    "negative prompt id": (put("request", "prompt_token_ids", [-1, 5]), "prompt holds token id -1"),
    "long prompt": (put("request", "prompt_token_ids", [5] * 10_000), "max_model_len"),
    "salt": (put("request", "cache_salt", "x" * 1000), "PAGERUNNER_LIMIT_MAX_SALT_CHARS"),
    "priority": (put("request", "priority", 2**63), "priority|Integer value out of range"),
    "arrival": (put("request", "arrival_time", float("inf")), "arrival_time"),
    "unknown parameter": (put("params", "nonsense", 1), "nonsense"),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, wire.WireError]:
    """What one core answers to all of them, between two requests that it serves."""
    args = EngineArgs(model=str(write_text_side(tmp_path_factory.mktemp("model"))), num_gpu_blocks_override=128)
    messages: list[wire.FromCore] = []
    deaths: list[EngineDeadError] = []

    def finished(name: str) -> bool:
        updates = [one for message in messages if isinstance(message, wire.Updates) for one in message.updates]
        return any(update.request_id == name and update.finish_reason == "length" for update in updates)

    async def main() -> None:
        core = await launch_core(args, failing_core.FACTORY)
        client = CoreClient(core, receive=messages.append, died=deaths.append)
        try:
            await core.socket.send(b"\xc1 no message")
            client.send(raw("before", lambda request, params: None))
            for name, (change, _) in BAD.items():
                client.send(raw(name, change))
            client.send(raw("after", lambda request, params: None))
            async with asyncio.timeout(LONG):
                while not finished("after"):
                    await asyncio.sleep(0.01)
            assert finished("before") and not deaths
        finally:
            await client.close()

    asyncio.run(main())
    return {message.request_ids[0]: message.error for message in messages if isinstance(message, wire.Refused)}


@pytest.mark.parametrize("name", BAD)
def test_the_core_refuses(name: str, refusals: dict[str, wire.WireError]) -> None:
    error = refusals[name]
    assert error.kind == "InvalidRequestError"
    assert any(words in error.message for words in BAD[name][1].split("|")), error.message


def test_nothing_else_is_refused(refusals: dict[str, wire.WireError]) -> None:
    assert set(refusals) == set(BAD)
