"""/v1/embeddings with the unmodified openai package. The fake core's vectors are (length, first, last token, 2 for a mean)."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import fake_core
from helpers.serving import MODEL, RunningServer, running_server, write_text_side
from pagerunner.config import EngineArgs
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import RequestOutput


@pytest.fixture(scope="module")
def pooling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = write_text_side(tmp_path_factory.mktemp("pooling"), matryoshka_dimensions=[2, 3])
    args = EngineArgs(model=str(path), pooler_config='{"pooling_type": "MEAN", "normalize": false}')
    with running_server(args) as running:
        yield running


def test_texts(pooling_server: RunningServer, text_side: Path) -> None:
    tokenizer = Tokenizer.from_path(str(text_side))
    ids = [tokenizer.encode(text) for text in ("hello, world", "a")]
    for encoding in ({}, {"encoding_format": "float"}):  # without one, the client asks for base64 and decodes it
        answer = pooling_server.openai().embeddings.create(model=MODEL, input=["hello, world", "a"], **encoding)
        assert [one.index for one in answer.data] == [0, 1]
        assert [one.embedding for one in answer.data] == [[len(x), x[0], x[-1], 2] for x in ids]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (sum(map(len, ids)),) * 2


def test_token_ids_and_base64(pooling_server: RunningServer) -> None:
    body = {"input": [[5, 6, 7], [9]], "encoding_format": "base64"}
    data = pooling_server.post("/v1/embeddings", body).json()["data"]
    vectors = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in data]
    assert vectors == [[3, 5, 7, 2], [1, 9, 9, 2]]
    assert pooling_server.post("/v1/embeddings", {"input": [5, 6]}).json()["data"][0]["embedding"] == [2, 5, 6, 2]


def test_dimensions(pooling_server: RunningServer) -> None:
    answer = pooling_server.openai().embeddings.create(model=MODEL, input=[5, 6], dimensions=3)
    assert answer.data[0].embedding == [2, 5, 6]


def test_counts_reach_the_metrics(pooling_server: RunningServer) -> None:
    before = pooling_server.metric("prompt_tokens_total"), pooling_server.metric("generation_tokens_total")
    pooling_server.post("/v1/embeddings", {"input": [[5] * 11]})
    after = pooling_server.metric("prompt_tokens_total"), pooling_server.metric("generation_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (11, 0)


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"dimensions": 4}, "dimensions", 400),
        ({"dimensions": 0}, "dimensions", 400),
        ({"encoding_format": "int8"}, "encoding_format", 400),
        ({"input": []}, "input", 400),
        ({"input": ["a", 3]}, "input", 400),
        ({"input": [[1]] * 3000}, "input", 400),
        ({"input": ""}, "input", 400),
        ({"input": [10**9]}, "input", 400),
        ({"input": "word " * 5000}, "input", 400),
        ({"input": "a" * 100_000, "add_special_tokens": False}, "input", 400),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", 400),
        ({"model": "other"}, "model", 404),
        ({"nonsense": 1}, "nonsense", 400),
        ({"input": [[5], [fake_core.FAIL_ONE, fake_core.BREAK_ADD]]}, None, 500),
    ],
)
def test_what_is_refused(pooling_server: RunningServer, fields: dict[str, Any], param: str | None, status: int) -> None:
    response = pooling_server.post("/v1/embeddings", {"input": "hello", **fields})
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_a_model_that_does_not_say_how_is_a_400(server: RunningServer) -> None:
    error = server.post("/v1/embeddings", {"input": "hello"}).json()["error"]
    assert error["code"] == 400 and "--pooler-config" in error["message"]


def test_a_request_that_is_ended_has_no_vector(pooling_server: RunningServer) -> None:
    async def ended(*_: Any, **__: Any) -> Any:
        yield RequestOutput(request_id="1", prompt=None, prompt_token_ids=[5], outputs=[], finished=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling_server.engine, "generate", ended)
        response = pooling_server.post("/v1/embeddings", {"input": "hello"})
    assert response.status_code == 500 and "was ended" in response.json()["error"]["message"]
