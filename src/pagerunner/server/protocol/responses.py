"""The bodies and events of /v1/responses, as OpenAI's clients parse them. Conventions are those of protocol.py."""

from __future__ import annotations

from typing import Any

import msgspec

from pagerunner.errors import InvalidRequestError
from pagerunner.server.protocol.answers import TokenLogprob
from pagerunner.server.protocol.fields import Priority, Salt, Unsupported
from pagerunner.server.protocol.requests import StreamOptions

LOGPROBS_ITEM = "message.output_text.logprobs"
_PLAIN = {"type": "text"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "text": ({}, {"format": _PLAIN}, {"format": _PLAIN, "verbosity": "medium"}, {"verbosity": "medium"}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}


class InputPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One part of a message; only text is understood. An answer's own parts may be sent back as they came."""

    type: str
    text: str | None = None
    annotations: Any = None
    detail: Any = None
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    filename: Any = None
    image_url: Any = None
    input_audio: Any = None
    logprobs: Any = None
    refusal: Any = None


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message. What other kinds of items have is declared, so that they are refused by name."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    id: Any = None
    phase: Any = None
    status: Any = None
    arguments: Any = None
    call_id: Any = None
    encrypted_content: Any = None
    name: Any = None
    output: Any = None
    summary: Any = None

    def render(self, index: int) -> dict[str, Any]:
        """The message as templates take it. Raises InvalidRequestError for anything but text."""
        where = f"input[{index}]"
        if self.type != "message":
            raise InvalidRequestError(f"{where} is of type {self.type!r}; only messages are supported.", where)
        if self.role is None or self.content is None:
            raise InvalidRequestError(f"{where} needs a role and a content.", where)
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        texts: list[str] = []
        for part in self.content:
            if part.type not in ("input_text", "output_text", "text") or part.text is None:
                raise InvalidRequestError(
                    f"{where}.content holds a part of type {part.type!r}; this model takes text only.", where
                )
            texts.append(part.text)
        return {"role": self.role, "content": "\n".join(texts)}


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[InputItem]
    model: str | None = None
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    # sampling and the engine, under vLLM's names
    allowed_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[int, float] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    priority: Priority | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    top_k: int | None = None
    # accepted: they don't change the answer
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    user: Any = None
    # refused unless neutral
    background: Unsupported = None
    conversation: Unsupported = None
    max_tool_calls: Unsupported = None
    parallel_tool_calls: Unsupported = None
    previous_response_id: Unsupported = None
    prompt: Unsupported = None
    reasoning: Unsupported = None
    text: Unsupported = None
    tool_choice: Unsupported = None
    tools: Unsupported = None
    truncation: Unsupported = None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation, instructions first. Raises InvalidRequestError for an empty one."""
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidRequestError("input is empty; give a text or at least one message.", param="input")
        return messages + [item.render(index) for index, item in enumerate(self.input)]


class OutputText(msgspec.Struct, kw_only=True):
    """The text of an answer."""

    type: str = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True):
    """The one item of an answer."""

    type: str = "message"
    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class ResponseBody(msgspec.Struct, kw_only=True):
    """Answer of /v1/responses, and what its first and last events carry."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    model: str
    output: list[OutputMessage] = []
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    temperature: float
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": _PLAIN})
    tool_choice: str = "auto"
    tools: list[Any] = []
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: dict[str, Any] | None = None
