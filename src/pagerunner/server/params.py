"""From HTTP fields to SamplingParams."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pagerunner import limits
from pagerunner.engine.frontend.input_processor import Truncation
from pagerunner.errors import InvalidRequestError
from pagerunner.server.protocol.fields import check_supported
from pagerunner.server.protocol.messages import MessagesRequest
from pagerunner.server.protocol.requests import ChatRequest, CompletionRequest, SampledRequest, StreamOptions
from pagerunner.types import SamplingParams, StructuredOutputsParams

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_RESERVED_KWARGS = frozenset(
    ("messages", "add_generation_prompt", "chat_template", "continue_final_message", "tokenize", "tools")
)


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Sampling parameters of a completions call.

    `defaults` are the checkpoint's. Raises InvalidRequestError that names a bad or unsupported field.
    """
    values = _shared(request, defaults)
    values["max_tokens"] = request.max_tokens if request.max_tokens is not None else defaults.max_tokens
    if scores_only(request):
        values["max_tokens"] = 1
    values["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        values.setdefault("prompt_logprobs", request.logprobs)
    params = SamplingParams(**values)
    if request.stream and params.n > 1 and params.prompt_logprobs is not None:
        raise InvalidRequestError("echo with logprobs and n > 1 is not available with stream=true.", param="echo")
    count = len(request.prompts())
    if count * params.n > limits.MAX_PROMPTS_PER_CALL:
        raise InvalidRequestError(
            f"The call asks for {count} prompts with n={params.n}; at most {limits.MAX_PROMPTS_PER_CALL} answers "
            f"are allowed in one call {limits.knob('MAX_PROMPTS_PER_CALL')}.",
            param="prompt",
        )
    return params


def scores_only(request: CompletionRequest) -> bool:
    """Whether the call wants its prompt back and no generated text.

    The engine generates one token then, which isn't shown.
    """
    return bool(request.echo) and request.max_tokens == 0


def chat_params(request: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Sampling parameters of a chat call; without a limit the answer may fill the rest of the context.

    `defaults` are the checkpoint's. Raises InvalidRequestError that names a bad or unsupported field.
    """
    values = _shared(request, defaults)
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    values["max_tokens"] = limit
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= limits.MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be in [0, {limits.MAX_LOGPROBS}], got {request.top_logprobs} "
            f"{limits.knob('MAX_LOGPROBS')}.",
            param="top_logprobs",
        )
    values["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(**values)


def structured(request: CompletionRequest | ChatRequest) -> StructuredOutputsParams | None:
    """The grammar that the text must follow. Raises InvalidRequestError when two fields give one."""
    wanted, form = request.structured_outputs, request.response_format
    if form is None or form.type == "text":
        return wanted
    if wanted is not None:
        raise InvalidRequestError("Give response_format or structured_outputs, not both.", param="response_format")
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if form.type == "structural_tag":
        parts = {"structures": form.structures, "triggers": form.triggers, "format": form.format}
        return StructuredOutputsParams(structural_tag={name: part for name, part in parts.items() if part is not None})
    if form.json_schema is None or form.json_schema.schema is None:
        raise InvalidRequestError("response_format has no json_schema.schema.", param="response_format")
    return StructuredOutputsParams(json=form.json_schema.schema)


def stream_options(request: CompletionRequest | ChatRequest) -> StreamOptions:
    """The stream's options. Raises InvalidRequestError when there are options and no stream."""
    if request.stream_options is None:
        return StreamOptions()
    if not request.stream:
        raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
    return request.stream_options


def check_template_kwargs(given: Collection[str], special_tokens: Collection[str]) -> None:
    """Raise InvalidRequestError for a variable of the chat template that isn't a client's to set."""
    for name in given:
        if name in _RESERVED_KWARGS or name in special_tokens:
            raise InvalidRequestError(f"chat_template_kwargs may not set {name}.", param="chat_template_kwargs")


def truncation(keep: int | None, side: str | None, max_model_len: int, max_tokens: int | None) -> Truncation | None:
    """What truncate_prompt_tokens=`keep` leaves of a prompt: the last tokens, with `side` "right" the first ones.

    -1 keeps as many as leave room for `max_tokens` generated ones. Raises InvalidRequestError when `keep` is no such number.
    """
    if keep is None:
        return None
    if keep == -1:
        keep = max(max_model_len - (max_tokens or 1), 1)
    if not 1 <= keep <= max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 (as many as fit) or in [1, {max_model_len}] (max_model_len), got {keep}.",
            param="truncate_prompt_tokens",
        )
    return Truncation(keep, first=side == "right")


def _shared(request: CompletionRequest | ChatRequest, defaults: SamplingParams) -> dict[str, Any]:
    check_supported(request)
    if request.spaces_between_special_tokens is False and request.skip_special_tokens is False:
        raise InvalidRequestError(
            "spaces_between_special_tokens=false is not supported with skip_special_tokens=false: special tokens are written "
            "as the tokenizer writes them.",
            param="spaces_between_special_tokens",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs is not available with stream=true.", param="prompt_logprobs")
    return {**same_named(request, defaults), "structured_outputs": structured(request)}


def same_named(request: SampledRequest | MessagesRequest, defaults: SamplingParams) -> dict[str, Any]:
    """What a request says of sampling under the names of SamplingParams, with the checkpoint's defaults beside it."""
    values: dict[str, Any] = {name: getattr(defaults, name) for name in _MODEL_DEFAULTS}
    for name in SamplingParams.__struct_fields__:
        if (value := getattr(request, name, None)) is not None:
            values[name] = value
    values["output_kind"] = "delta" if request.stream else "final_only"
    return values
