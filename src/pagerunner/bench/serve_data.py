"""What `bench serve` sends: random tokens, ShareGPT conversations, or prompts of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pagerunner.errors import ConfigError

if TYPE_CHECKING:
    from pagerunner.text.tokenizer import Tokenizer

DATASETS = ("random", "sharegpt", "custom")
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048  # tokens of a ShareGPT conversation that is used, as elsewhere


class ServeRequest(msgspec.Struct, frozen=True):
    """A prompt (text, token ids or chat messages), its length where it is known (else 0), and tokens to generate."""

    prompt: str | list[int] | list[dict[str, Any]]
    prompt_len: int
    output_len: int


class _Turn(msgspec.Struct):
    value: Any = ""


class _Talk(msgspec.Struct):
    """One entry of ShareGPT's JSON, by either of the names that files have."""

    conversations: list[_Turn] = []
    conversation: list[_Turn] = []


def random_requests(
    coder: Tokenizer,
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    as_chat: bool,
    seed: int,
) -> list[ServeRequest]:
    """Prompts of random tokens after `prefix_len` that all share; lengths vary by up to `range_ratio` of themselves.

    With `as_chat` they are messages, whose tokens are a few more or fewer.
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {range_ratio}.")
    rng = np.random.default_rng(seed)
    ids = np.setdiff1d(np.arange(coder.vocab_size), list(coder.special_ids))
    prefix = [int(one) for one in rng.choice(ids, prefix_len)]

    def lengths(mean: int) -> Any:
        spread = int(mean * range_ratio)
        return rng.integers(max(mean - spread, 1), mean + spread, size=count, endpoint=True)

    requests = []
    for inputs, outputs in zip(lengths(input_len), lengths(output_len), strict=True):
        tokens = prefix + [int(one) for one in rng.choice(ids, inputs)]
        prompt = _message(coder.decode(tokens)) if as_chat else tokens
        requests.append(ServeRequest(prompt, len(tokens), int(outputs)))
    return requests


def sharegpt_requests(
    coder: Tokenizer, path: str, count: int, *, output_len: int | None, as_chat: bool, seed: int
) -> list[ServeRequest]:
    """The first turns of conversations in ShareGPT's JSON, shuffled; answers are as long as the recorded ones."""
    talks: list[_Talk] = _read(path, msgspec.json.Decoder(list[_Talk]).decode)
    requests: list[ServeRequest] = []
    for index in np.random.default_rng(seed).permutation(len(talks)):
        turns = talks[index].conversations or talks[index].conversation
        if len(turns) < 2 or len(requests) == count:
            continue
        prompt, answer = str(turns[0].value), str(turns[1].value)
        inputs = len(coder.encode(prompt))
        outputs = output_len or len(coder.encode(answer))
        if min(inputs, outputs) >= _SHORTEST and inputs <= _LONGEST_PROMPT and inputs + outputs <= _LONGEST:
            requests.append(ServeRequest(_message(prompt) if as_chat else prompt, inputs, outputs))
    return _enough(requests, count, path)


def custom_requests(path: str, count: int, *, output_len: int, as_chat: bool) -> list[ServeRequest]:
    """Lines of JSON with `prompt` (a text or chat messages) and perhaps `output_tokens`, in their order."""
    lines = [line for line in _read(path, str.splitlines) if line.strip()]
    requests = []
    for number, line in enumerate(lines[:count], 1):
        try:
            entry = json.loads(line)
            prompt = entry["prompt"]
            outputs = int(entry.get("output_tokens", output_len))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: a JSON object with `prompt` is needed ({error}).") from error
        if not isinstance(prompt, str | list):
            raise ConfigError(f"{path}, line {number}: a prompt is a text or chat messages, got {prompt!r:.100}.")
        if isinstance(prompt, list) and not as_chat:
            raise ConfigError(f"{path}, line {number}: chat messages need --backend openai-chat.")
        requests.append(ServeRequest(_message(prompt) if isinstance(prompt, str) and as_chat else prompt, 0, outputs))
    return _enough(requests, count, path)


def _message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _read(path: str, parse: Any) -> Any:
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"The dataset {path} can't be read: {error}.") from error


def _enough(requests: list[ServeRequest], count: int, path: str) -> list[ServeRequest]:
    """`count` requests. If there are fewer, they are repeated from the beginning."""
    if not requests:
        raise ConfigError(f"The dataset {path} has no request that can be used.")
    return [requests[index % len(requests)] for index in range(count)]
