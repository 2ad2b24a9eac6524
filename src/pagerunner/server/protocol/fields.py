"""What the fields of request bodies have in common: which are refused, and which are accepted because they change nothing.

A field of a body that isn't declared is an error that names it. A declared field of type `Unsupported` is one that some
clients always send: it is accepted with a value that changes nothing (see NEUTRAL_VALUES) and refused with any other.
A field of type `Ignored` doesn't change the answer, whatever it holds. Inside messages, their parts, tools and calls, unknown
fields are passed over, as vLLM does: clients send back what other servers gave them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.types import show

Unsupported = Any
Ignored = msgspec.Raw
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Salt = Annotated[str, Meta(max_length=limits.MAX_SALT_CHARS)]

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (),
    "chat_template": (),
    "ec_transfer_params": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "routed_experts_prompt_start": (0,),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Values with which an unsupported field asks for nothing; null always does."""

WHY: dict[str, str] = {
    "best_of": "send n, and choose among the answers",
    "chat_template": "the server has one (--chat-template)",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "length_penalty": "there is no beam search",
    "prediction": "nothing is drafted here, and the answer is the same without it",
    "store": "this server keeps no answers",
    "suffix": "models here continue a text, and fill no gap",
    "thinking_token_budget": "max_tokens limits reasoning and answer together",
    "use_beam_search": "send n, with a temperature",
}
"""What to do instead, at the end of a refusal."""

RENAMED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""Fields of older vLLM releases, and what they are called within `structured_outputs`."""


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
            instead = f": {WHY[name]}" if name in WHY else ""
            raise InvalidRequestError(f"{name}={show(value)} is not supported by this server{instead}.", param=name)
