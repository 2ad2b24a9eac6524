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
from starlette.responses import JSONResponse

from pagerunner import LLM, SamplingParams
from pagerunner.errors import EngineDeadError, InvalidRequestError


@serve.deployment(
    ray_actor_options={"num_cpus": 0}, max_ongoing_requests=64
)  # the ranks have GPUs or CPUs of their own
class Completions:
    """Answers prompts."""

    def __init__(self, **settings: Any) -> None:
        """`settings` are those of `LLM`."""
        self._llm = LLM(**settings, use_tqdm=False)
        self._dead = ""

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer a request by HTTP."""
        try:
            return JSONResponse(await self.answer(await request.json()))
        except (InvalidRequestError, ValueError) as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer {"prompt": text, and fields of SamplingParams} in the form of a completion of OpenAI's API.

        Raises InvalidRequestError or ValueError.
        """
        if not isinstance(body, dict) or not isinstance(prompt := body.pop("prompt", None), str):
            raise ValueError('the body must be a JSON object with a text as its "prompt".')
        try:
            params = SamplingParams(**body)
        except TypeError as error:
            raise ValueError(f"the body has a field that SamplingParams hasn't: {error}.") from error
        output = await self._together((prompt, params))
        if isinstance(output, InvalidRequestError):
            raise output
        return {"choices": [{"text": one.text, "finish_reason": one.finish_reason} for one in output.outputs]}

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.01)
    async def _together(self, asked: list[tuple[str, SamplingParams]]) -> list[Any]:
        return await asyncio.to_thread(self._generate, asked)

    def _generate(self, asked: list[tuple[str, SamplingParams]]) -> list[Any]:
        try:
            return self._llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
        except EngineDeadError as error:
            self._dead = str(error)
            raise
        except InvalidRequestError as error:  # of one of them
            return [error] if len(asked) == 1 else [one for each in asked for one in self._generate([each])]

    def check_health(self) -> None:
        """Raise what has ended the engine. Serve asks every few seconds."""
        if self._dead:
            raise RuntimeError(self._dead)


def deployment(settings: dict[str, str]) -> Any:
    """What `serve run` and Serve's configuration files take; `settings` are those of `LLM`."""
    return Completions.bind(distributed_executor_backend="ray", **settings)
