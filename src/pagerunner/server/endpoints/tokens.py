"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer for clients that have none."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.server.chat.turn import ChatTurn, prompt_of
from pagerunner.server.http import read_as
from pagerunner.server.protocol.fields import Unsupported, check_supported
from pagerunner.server.protocol.requests import ChatMessage
from pagerunner.server.protocol.tools import Tool
from pagerunner.server.service import Endpoint, json_response


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    chat_template: Unsupported = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=limits.MAX_TOOLS)] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """Answer of POST /tokenize; `token_strs` are the tokens as the vocabulary writes them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class Tokens(Endpoint):
    """Handlers."""

    async def tokenize(self, http: Request) -> Response:
        """The token ids of a prompt, or of a conversation in the chat template."""
        request = await read_as(http, TokenizeRequest)
        service, engine = self._service, self._service.engine
        service.check_model(request.model)
        check_supported(request)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequestError("Give either prompt or messages.", param="prompt")
        if request.messages is not None:
            turn = ChatTurn(
                messages=[message.render(index) for index, message in enumerate(request.messages)],
                params=engine.default_sampling_params,
                tools=request.tools or [],
                template_kwargs=request.chat_template_kwargs or {},
                add_generation_prompt=request.add_generation_prompt is not False,
                add_special_tokens=bool(request.add_special_tokens),
                continue_final_message=bool(request.continue_final_message),
            )
            ids = await prompt_of(service, turn)
        else:
            special = request.add_special_tokens is not False
            ids = await engine.encode(request.prompt or "", add_special_tokens=special)
        strings = engine.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return json_response(
            TokenizeAnswer(count=len(ids), max_model_len=engine.max_model_len, tokens=ids, token_strs=strings)
        )

    async def detokenize(self, http: Request) -> Response:
        """The text of token ids, special tokens included."""
        request = await read_as(http, DetokenizeRequest)
        self._service.check_model(request.model)
        return json_response({"prompt": await self._service.engine.decode(request.tokens)})

    async def info(self, http: Request) -> Response:
        """Special tokens by name, the chat template, the vocabulary's size and the longest sequence."""
        engine = self._service.engine
        tokenizer = engine.tokenizer
        templates = tokenizer.chat_template.templates if tokenizer.chat_template is not None else {}
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **tokenizer.special_tokens,
                "chat_template": templates.get("default"),
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": engine.max_model_len,
            }
        )
