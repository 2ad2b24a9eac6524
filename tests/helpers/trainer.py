"""A trainer of an LLM in the same process, in the place of a server's."""

from __future__ import annotations

from typing import Any

from helpers.scripts import script
from pagerunner import LLM


def sender_to(llm: LLM, backend: str = "gloo") -> Any:
    """`Sender` of scripts/rl_trainer.py, whose calls are the LLM's methods."""

    def call(path: str, body: Any = None, method: str = "POST") -> Any:
        found = getattr(llm, path.removeprefix("/"))(*([] if body is None else [body]))
        return {"world_size": found} if method == "GET" else {}

    return script("rl_trainer").Sender(call, backend, seconds=200)
