"""pagerunner behind Ray Serve: a deployment whose engine has its ranks on the machines of the cluster.

    serve run ray_serve:deployment model=Qwen/Qwen3-0.6B tensor_parallel_size=2

    curl 127.0.0.1:8000 -d '{"prompt": "Once upon a time", "max_tokens": 12}'

Requests that come at the same time are answered together. A replica whose engine has ended says so to Serve, which starts another one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from starlette.requests import Request

from pagerunner import LLM, SamplingParams
from pagerunner.errors import EngineDeadError


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=64)  # the ranks have CPUs of their own
class Completions:
    """Answers prompts."""

    def __init__(self, **settings: Any) -> None:
        """`settings` are those of `LLM`."""
        self._llm = LLM(**settings, use_tqdm=False)
        self._dead = ""

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Answer a request by HTTP."""
        return await self.answer(await request.json())

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer {"prompt": text, and fields of SamplingParams} in the form of a completion of OpenAI's API."""
        output = await self._together(body)
        return {"choices": [{"text": one.text, "finish_reason": one.finish_reason} for one in output.outputs]}

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.01)
    async def _together(self, bodies: list[dict[str, Any]]) -> list[Any]:
        prompts = [body.pop("prompt") for body in bodies]
        params = [SamplingParams(**body) for body in bodies]
        try:
            return await asyncio.to_thread(self._llm.generate, prompts, params, use_tqdm=False)
        except EngineDeadError as error:
            self._dead = str(error)
            raise

    def check_health(self) -> None:
        """Raise what has ended the engine. Serve asks every few seconds."""
        if self._dead:
            raise RuntimeError(self._dead)


def deployment(settings: dict[str, str]) -> Any:
    """What `serve run` and Serve's configuration files take; `settings` are those of `LLM`."""
    return Completions.bind(distributed_executor_backend="ray", **settings)
