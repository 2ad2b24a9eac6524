"""What the proxy reads of a request's body, and how it changes one. Values that it doesn't change keep their bytes."""

from __future__ import annotations

import msgspec

from pagerunner.memory.affinity import MOST_UNITS
from pagerunner.memory.prefix import UNIT_TOKENS, PrefixChain, RecentPrompts, chain_seed
from pagerunner.server.http import decode_body

PARAMS = "kv_transfer_params"
HANDED_OVER = ("/v1/completions", "/v1/chat/completions")
"""Paths whose prompts a prefill server computes; the others' answers carry no parameters."""
_PROMPT = ("tools", "instructions", "system", "messages", "prompt", "input", "query", "text")
"""Fields that a prompt is made of, in the order in which templates write them."""
_BYTES_OF_A_TOKEN = 4
_NO_PREFILL = ("min_tokens", "min_completion_tokens", "stream_options", "best_of")
Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(Fields)
_items = msgspec.json.Decoder(list[msgspec.Raw])
_ASKED = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_EMPTY = (b"", b"null", b"false", b"{}", b"[]")


def read_fields(body: bytes) -> Fields:
    """The fields of a JSON object, unread. Raises what `decode_body` raises."""
    return decode_body(body, _fields)


def _bytes(fields: Fields, name: str) -> bytes:
    return bytes(fields.get(name, b""))


def is_set(fields: Fields, name: str) -> bool:
    """Whether a field is there and says something."""
    return _bytes(fields, name).translate(None, b" \t\r\n") not in _EMPTY


def units(fields: Fields, recent: RecentPrompts) -> list[bytes]:
    """Hashes of the units at the beginning of a prompt. Requests of other models and salts have other ones."""
    most = MOST_UNITS * UNIT_TOKENS * _BYTES_OF_A_TOKEN
    text = b"".join(_bytes(fields, name) for name in _PROMPT)[:most]
    tokens = memoryview(text)[: len(text) // _BYTES_OF_A_TOKEN * _BYTES_OF_A_TOKEN].cast("I")
    seed = chain_seed(*(_bytes(fields, name).decode("utf-8", "replace") for name in ("cache_salt", "model")))
    chain = PrefixChain(seed, recent)
    chain.cover(tokens, len(tokens))
    return chain.hashes


def needs_no_prefill(fields: Fields, min_tokens: int) -> str:
    """Why a decode server computes the prompt itself; "" if it needn't."""
    if sum(len(_bytes(fields, name)) for name in _PROMPT) < min_tokens * _BYTES_OF_A_TOKEN:
        return "short prompt"
    if is_set(fields, "prompt_logprobs") or is_set(fields, "echo") and is_set(fields, "logprobs"):
        return "prompt logprobs"
    if _bytes(fields, "prompt").startswith(b"["):
        items = _items.decode(fields["prompt"])
        if len(items) > 1 and bytes(items[0])[:1] in (b'"', b"["):
            return "several prompts"
    return ""


def prefill_body(fields: Fields) -> bytes:
    """The request for the prefill server: one token, and the parameters for whoever generates the rest."""
    one = msgspec.Raw(b"1")
    changed = {name: value for name, value in fields.items() if name not in _NO_PREFILL}
    changed |= {name: one for name in ("max_completion_tokens", "n") if name in fields}
    changed |= {"max_tokens": one, "stream": msgspec.Raw(b"false"), PARAMS: _ASKED}
    return msgspec.json.encode(changed)


def params_in(answer: bytes) -> msgspec.Raw | None:
    """The parameters in a prefill server's answer, None if it gives none. Raises what `read_fields` raises."""
    found = read_fields(answer).get(PARAMS)
    return found if found is not None and bytes(found).startswith(b"{") and bytes(found) not in _EMPTY else None


def with_params(fields: Fields, params: msgspec.Raw) -> bytes:
    """The client's request, with the parameters as they came."""
    return msgspec.json.encode({**fields, PARAMS: params})
