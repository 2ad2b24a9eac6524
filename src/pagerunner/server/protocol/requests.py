"""The bodies of /v1/completions and /v1/chat/completions: what clients may send, field by field. See fields.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.server.protocol.fields import Ignored, Neutral, Priority, Salt, Unsupported
from pagerunner.server.protocol.tools import NamedToolChoice, Tool, ToolCall
from pagerunner.text.chat_template import joined_text
from pagerunner.types import StructuredOutputsParams
from pagerunner.types.kv_transfer import KVTransferParams

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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
    """What the answer must be: any "text", a "json_object", JSON by a "json_schema", or text with parts in a "structural_tag"."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class SampledRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the bodies of completions, chat and responses have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # sampling, under OpenAI's names
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
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
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    top_k: int | None = None
    # the engine
    cache_salt: Salt | None = None
    priority: Priority | None = None
    request_id: str | None = None


class _Request(SampledRequest, kw_only=True):
    max_tokens: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    # what the answer must be
    response_format: ResponseFormat | None = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    # the engine
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    kv_transfer_params: KVTransferParams | None = None
    # accepted: they don't change the answer, and are not even decoded
    metadata: Ignored = msgspec.field(default_factory=msgspec.Raw)
    prompt_cache_key: Ignored = msgspec.field(default_factory=msgspec.Raw)
    prompt_cache_retention: Ignored = msgspec.field(default_factory=msgspec.Raw)
    safety_identifier: Ignored = msgspec.field(default_factory=msgspec.Raw)
    service_tier: Ignored = msgspec.field(default_factory=msgspec.Raw)
    session_id: Ignored = msgspec.field(default_factory=msgspec.Raw)
    user: Ignored = msgspec.field(default_factory=msgspec.Raw)
    # refused unless neutral
    best_of: Unsupported = None
    ec_transfer_params: Annotated[Any, Neutral({})] = None
    length_penalty: Annotated[Any, Neutral(1)] = None
    logits_processors: Annotated[Any, Neutral([])] = None
    logprob_token_ids: Unsupported = None
    prediction: Unsupported = None
    repetition_detection: Unsupported = None
    return_prompt_text: Annotated[Any, Neutral(False)] = None
    routed_experts_prompt_start: Annotated[Any, Neutral(0)] = None
    store: Annotated[Any, Neutral(False)] = None
    stream_interval: Annotated[Any, Neutral(1)] = None
    thinking_token_budget: Unsupported = None
    use_beam_search: Annotated[Any, Neutral(False)] = None
    vllm_xargs: Annotated[Any, Neutral({})] = None
    watermarking: Annotated[Any, Neutral(False)] = None


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Annotated[Any, Neutral("")] = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raises InvalidRequestError for a mixed or empty list."""
        return as_prompts(self.prompt, "prompt")


def as_prompts(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """The prompts in the field `param`, each a text or token ids. Raises InvalidRequestError for a mixed or empty list."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if len(kinds) != 1:
        what = "is empty" if not kinds else "mixes texts and token ids"
        raise InvalidRequestError(
            f"{param} {what}; give a text, a list of texts, token ids, or a list of token id lists.", param=param
        )
    if kinds == {int}:
        return [cast("list[int]", given)]  # there may be a million
    return cast("list[str | list[int]]", given)


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content; only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message. Clients send an assistant's answer back with its empty fields, so those are declared."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    audio: Any = None
    function_call: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None

    def render(self, index: int) -> dict[str, Any]:
        """The message as templates take it. Raises InvalidRequestError for what it can't say."""
        where = f"messages[{index}]"
        for name in ("audio", "function_call"):
            if getattr(self, name) is not None:
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
        if self.content is None and self.role == "assistant":  # it has called, thought or refused
            return self.refusal or ""
        if self.content is None:
            raise InvalidRequestError(f"{where}.content is missing; give a text.", where)
        return text_of(self.content, f"{where}.content", ("text", "input_text", "output_text"))


def text_of(parts: list[ContentPart], where: str, kinds: tuple[str, ...]) -> str:
    """The texts of parts of these `kinds`, and refusals, a line each. Raises InvalidRequestError for another part."""
    return joined_text(((one.type, one.text, one.refusal) for one in parts), where, where.split(".")[0], kinds)


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
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    # refused unless neutral
    audio: Unsupported = None
    chat_template: Unsupported = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
    functions: Annotated[Any, Neutral([])] = None
    media_io_kwargs: Annotated[Any, Neutral({})] = None
    mm_processor_kwargs: Annotated[Any, Neutral({})] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    web_search_options: Unsupported = None
