"""The HTTP bodies: what clients may send, field by field, and what they get.

A field that isn't declared is an error that names it. A declared field of type `Unsupported` is one that some clients
always send: it is accepted with a value that changes nothing (see NEUTRAL_VALUES) and refused with any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.types import StructuredOutputsParams

Unsupported = Any
Ignored = msgspec.Raw
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Salt = Annotated[str, Meta(max_length=limits.MAX_SALT_CHARS)]

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

RENAMED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""Fields of older vLLM releases, and what they are called within `structured_outputs`."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage`: a last chunk with the token counts. `continuous_usage_stats`: counts so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A named JSON schema. It is always kept to, `strict` or not."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer must be: any "text", a "json_object", or JSON by a "json_schema"."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # sampling, under OpenAI's names
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    # sampling, under vLLM's names
    allowed_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    top_k: int | None = None
    # what the answer must be
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    # the engine
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    return_token_ids: bool | None = None
    # accepted: they don't change the answer, and are not even decoded
    metadata: Ignored = msgspec.field(default_factory=msgspec.Raw)
    prompt_cache_key: Ignored = msgspec.field(default_factory=msgspec.Raw)
    prompt_cache_retention: Ignored = msgspec.field(default_factory=msgspec.Raw)
    request_id: str | None = None
    safety_identifier: Ignored = msgspec.field(default_factory=msgspec.Raw)
    service_tier: Ignored = msgspec.field(default_factory=msgspec.Raw)
    store: Ignored = msgspec.field(default_factory=msgspec.Raw)
    user: Ignored = msgspec.field(default_factory=msgspec.Raw)
    # refused unless neutral
    best_of: Unsupported = None
    kv_transfer_params: Unsupported = None
    length_penalty: Unsupported = None
    logits_processors: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    spaces_between_special_tokens: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    use_beam_search: Unsupported = None


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Unsupported = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raises InvalidRequestError for a mixed or empty list."""
        return as_prompts(self.prompt, "prompt")


def as_prompts(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """The prompts in the field `param`, each a text or token ids. Raises InvalidRequestError for a mixed or empty list."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) != 1:
        what = "is empty" if not kinds else "mixes texts and token ids"
        raise InvalidRequestError(
            f"{param} {what}; give a text, a list of texts, token ids, or a list of token id lists.", param=param
        )
    if kinds == {int}:
        return [[item for item in given if isinstance(item, int)]]
    return [item for item in given if not isinstance(item, int)]


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One part of a message's content; only text is understood."""

    type: str
    text: str | None = None
    file: Unsupported = None
    image_url: Unsupported = None
    input_audio: Unsupported = None
    video_url: Unsupported = None


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: Annotated[str, Meta(min_length=1, max_length=limits.MAX_TOOL_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def schema(self) -> dict[str, Any]:
        """A copy of the schema of the arguments; without one there are none."""
        return dict(self.parameters or {"type": "object", "properties": {}, "additionalProperties": False})


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """Which function."""

    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """A `tool_choice` that forces a call of one tool."""

    type: Literal["function"]
    function: FunctionName


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that the model made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET

    def render(self, where: str) -> dict[str, Any]:
        """The call as templates take it, with its arguments as values. Raises InvalidRequestError."""
        try:
            arguments = msgspec.json.decode(self.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(
                f"{where} has a tool call whose arguments are no JSON object: {error}.", where
            ) from None
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a call's function: its name first, then pieces of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to call number `index`; id and type come once."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message. Clients send an assistant's answer back with its empty fields, so those are declared."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Unsupported = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None

    def render(self, index: int) -> dict[str, Any]:
        """The message as templates take it. Raises InvalidRequestError for what it can't say."""
        where = f"messages[{index}]"
        for name in ("annotations", "audio", "function_call", "refusal"):
            if getattr(self, name) not in (None, [], ""):
                raise InvalidRequestError(f"{where}.{name} is not supported; messages hold text and tool calls.", where)
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise InvalidRequestError(f"{where}.{name} belongs to a message of role {role!r}.", where)
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequestError(f"{where} is a tool's answer; it needs a tool_call_id.", where)
        message: dict[str, Any] = {"role": self.role, "content": self._text(where)}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.render(where) for call in self.tool_calls]
        if reasoning := self.reasoning or self.reasoning_content:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning, "thinking": reasoning}
        return message

    def _text(self, where: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None and self.tool_calls:
            return ""
        if self.content is None:
            raise InvalidRequestError(f"{where}.content is missing; give a text.", where)
        texts: list[str] = []
        for part in self.content:
            if part.type != "text":
                raise InvalidRequestError(
                    f"{where}.content holds a part of type {part.type!r}; this model takes text only.", where
                )
            if part.text is None:
                raise InvalidRequestError(f"{where}.content holds a text part without text.", where)
            texts.append(part.text)
        return "\n".join(texts)


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    audio: Unsupported = None
    chat_template: Unsupported = None
    continue_final_message: Unsupported = None
    documents: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    modalities: Unsupported = None
    prediction: Any = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


def check_supported(request: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL_VALUES) -> None:
    """Raise InvalidRequestError that names the first field asking for something this server can't do."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if value is not None and name in RENAMED:
            raise InvalidRequestError(
                f'{name} is now written structured_outputs={{"{RENAMED[name]}": ...}}.', param=name
            )
        if value is None or name not in neutral:
            continue
        if name == "best_of" and value == (getattr(request, "n", None) or 1):
            continue
        if value not in neutral[name]:
            raise InvalidRequestError(f"{name}={_short(value)} is not supported by this server.", param=name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class PromptTokensDetails(msgspec.Struct):
    """How many of the prompt's tokens were found in the cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts of one call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in the format of /v1/completions; the lists are aligned, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One generated text, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer, or chunk, of /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    """One likely token of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The chosen token of a position, and the likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities in the format of /v1/chat/completions."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct):
    """The assistant's message. `content` is null where there is only reasoning or calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One generated answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed /v1/chat/completions."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ErrorDetail(msgspec.Struct):
    """What went wrong; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """Every error answer."""

    error: ErrorDetail


class ModelCard(msgspec.Struct, kw_only=True):
    """One entry of /v1/models."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "pagerunner"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = []


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of /v1/models."""

    object: str = "list"
    data: list[ModelCard]
