"""What the fields of request bodies have in common: how unsupported ones are told from those that change nothing.

A field that isn't declared is an error that names it. A declared field of type `Unsupported` is one that some clients
always send: it is accepted with a value that changes nothing (see NEUTRAL_VALUES) and refused with any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pagerunner import limits
from pagerunner.errors import InvalidRequestError

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
