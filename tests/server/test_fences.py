"""A fault planted in the text side of one request: it gets a 500 (or an error event), and its neighbours their answers."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from helpers import fake_core
from helpers.patience import LONG
from helpers.serving import RunningServer

WORD = "victim"


def raising(original: Any) -> Any:
    def planted(value: Any, *args: Any, **kwargs: Any) -> Any:
        if WORD in str(value):
            raise ZeroDivisionError("planted")
        return original(value, *args, **kwargs)

    return planted


class Neighbour(threading.Thread):
    """Streams an answer meanwhile."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__()
        self.server = server
        self.tokens = 0
        self.begun = threading.Event()

    def run(self) -> None:
        body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, timeout=LONG) as response:
            for line in response.iter_lines():
                self.begun.set()
                if line.startswith("data: {"):
                    self.tokens += len(json.loads(line[6:])["choices"][0].get("token_ids", []))


def both(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    """The answer to `body`, while a neighbour streams to its end undisturbed."""
    neighbour = Neighbour(server)
    neighbour.start()
    assert neighbour.begun.wait(LONG)
    response = server.post(path, body)
    neighbour.join(LONG)
    assert neighbour.tokens == 300
    server.wait_idle()
    assert server.get("/health").status_code == 200
    return response


def test_in_the_tokeniser(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.engine._frontend.require_tokenizer()
    monkeypatch.setattr(tokenizer, "encode", raising(tokenizer.encode))
    for body in ({"prompt": WORD}, {"prompt": ["fine", WORD]}, {"prompt": WORD, "stream": True}):
        response = both(server, "/v1/completions", body)
        assert response.status_code == 500 and "ZeroDivisionError" in response.json()["error"]["message"]


def test_in_the_template(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = server.engine._renderer
    monkeypatch.setattr(renderer, "render", raising(renderer.render))
    response = both(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": WORD}]})
    assert response.status_code == 500


def test_in_the_core(server: RunningServer) -> None:
    for token in (fake_core.BREAK_ADD, fake_core.FAIL_ONE):
        assert both(server, "/v1/completions", {"prompt": [token]}).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_detokeniser(stream: bool, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.engine._frontend.require_tokenizer()
    original = tokenizer.decode

    def planted(ids: Any, *args: Any, **kwargs: Any) -> str:
        if 333 in ids:
            raise ZeroDivisionError("planted")
        return original(ids, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "decode", planted)
    prompt = [40, 41, 42, 43, 333]  # its answer repeats it
    response = both(server, "/v1/completions", {"prompt": prompt, "max_tokens": 20, "stream": stream})
    if stream:
        assert response.status_code == 200 and '"code":500' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 500
    assert "cannot be processed" in response.text
