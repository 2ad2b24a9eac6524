"""POST /v1/embeddings: pooled hidden states, for models that say how they are pooled."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from pagerunner import limits
from pagerunner.engine.frontend.input_processor import POOLING_PARAMS
from pagerunner.errors import InvalidRequestError
from pagerunner.server.http import read_as
from pagerunner.server.params import truncation
from pagerunner.server.protocol.fields import Priority, Salt
from pagerunner.server.protocol.requests import as_prompts
from pagerunner.server.service import Endpoint, blaming, collected, json_response

_NAMES = {"prompt": "input"}


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


class EmbeddingsEndpoint(Endpoint):
    """Answers with one vector for each input: numbers, or float32 little-endian as base64."""

    async def __call__(self, http: Request) -> Response:
        """Answer one call; raises what errors.error_response turns into an HTTP status."""
        request = await read_as(http, EmbeddingRequest)
        service = self._service
        call = service.begin("embd", request.model, http)
        pooler = service.engine.pooler
        if pooler is None:
            raise InvalidRequestError(
                f"The model {call.model!r} doesn't say how its hidden states become embeddings (it has no modules.json); "
                'start the server with --pooler-config \'{"pooling_type": "LAST"}\' (or MEAN) to say it.',
                param="model",
            )
        if request.encoding_format not in (None, "float", "base64"):
            raise InvalidRequestError(
                f"encoding_format must be float or base64, got {request.encoding_format!r}.", param="encoding_format"
            )
        pooler.check_dimensions(request.dimensions)
        inputs = as_prompts(request.input, "input")
        if len(inputs) > limits.MAX_PROMPTS_PER_CALL:
            raise InvalidRequestError(
                f"input has {len(inputs)} entries; at most {limits.MAX_PROMPTS_PER_CALL} are allowed.", param="input"
            )
        side = request.truncation_side or "right"  # unlike for generation, the first tokens are kept
        kept = truncation(request.truncate_prompt_tokens, side, service.engine.max_model_len, None)
        with blaming(_NAMES):
            prompts = [await service.prompt(one, request.add_special_tokens, kept) for one in inputs]
        outputs = service.run(call, prompts, POOLING_PARAMS, request, pooling=pooler.kind, names=_NAMES)
        results = await collected(outputs)
        vectors = [pooler.finish(result, request.dimensions) for result in results]
        as_text = request.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        count = sum(len(result.prompt_token_ids) for result in results)
        cached = {"cached_tokens": sum(result.num_cached_tokens for result in results)}
        usage = {"prompt_tokens": count, "total_tokens": count, "prompt_tokens_details": cached}
        answer = {"id": call.id, "object": "list", "created": call.created, "model": call.model}
        return json_response({**answer, "data": data, "usage": usage})
