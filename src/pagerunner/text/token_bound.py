"""How many tokens a text has at least, without tokenising it. So a text that is far too long is refused at no cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

_SHRINKS = {"Prepend": 1, "ByteLevel": 1, "Lowercase": 3, "NFD": 3, "NFKD": 4, "NFC": 9, "NFKC": 36}
"""How many bytes of UTF-8 become one at most. Decomposing makes one byte of the three of a Kelvin sign, and with compatibility of
the four of a mathematical letter; composing then makes three bytes of the nine of a Hangul syllable's parts (UAX #15)."""
_WHOLE_PIECES = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"}
_MAY_DROP = {"Split", "Punctuation"}
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def bytes_per_token(tokenizer_json: str, vocabulary: Mapping[str, int]) -> int | None:
    """The most bytes of a text (in UTF-8) that one token can stand for; None where a token may stand for any number.

    Whitespace is not counted if some added token swallows what is around it; `least_tokens` leaves it out then.

    Args:
        tokenizer_json: the text of a tokenizer.json.
        vocabulary: tokens with added ones, as the tokenizer writes them.
    """
    data: dict[str, Any] = json.loads(tokenizer_json)
    shrinks = _shrinking(data.get("normalizer"))
    if shrinks is None or not _keeps_all(data.get("pre_tokenizer")) or not _knows_all(data, vocabulary):
        return None
    width = 1 if _is_byte_level(data) else 4  # bytes of a token's character
    return shrinks * width * max(map(len, vocabulary), default=1)


def swallows_whitespace(tokenizer_json: str) -> bool:
    """Whether some added token takes the white space around it along."""
    return any(
        token.get("lstrip") or token.get("rstrip") for token in json.loads(tokenizer_json).get("added_tokens") or ()
    )


def least_tokens(text: str, most_bytes: int, without_whitespace: bool) -> int:
    """The fewest tokens that the text can have."""
    counted = "".join(text.split()) if without_whitespace else text
    return math.ceil(len(counted.encode()) / most_bytes)


def _steps(part: Mapping[str, Any] | None, inner: str) -> Iterable[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for one in part[inner]:
            yield from _steps(one, inner)
    else:
        yield part


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """By what factor a normaliser can make a text shorter. None if that isn't known."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step["type"]
        if kind in _SHRINKS:
            factor *= _SHRINKS[kind]
        elif kind == "Replace" and "String" in step["pattern"]:
            if len(step["content"].encode()) < len(step["pattern"]["String"].encode()):
                return None
        else:
            return None
    return factor


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether every character reaches the model."""
    for step in _steps(pre_tokenizer, "pretokenizers"):
        kind = step["type"]
        if kind not in _WHOLE_PIECES and not (kind in _MAY_DROP and step.get("behavior") != "Removed"):
            return False
    return True


def _is_byte_level(data: Mapping[str, Any]) -> bool:
    parts = [*_steps(data.get("pre_tokenizer"), "pretokenizers"), *_steps(data.get("normalizer"), "normalizers")]
    return any(step["type"] == "ByteLevel" for step in parts)


def _knows_all(data: Mapping[str, Any], vocabulary: Mapping[str, int]) -> bool:
    """Whether every character becomes tokens: unknown ones may be dropped, or many of them become one token."""
    model = data["model"]
    if model.get("type") not in ("BPE", "Unigram"):
        return False
    if model.get("byte_fallback"):
        return vocabulary.keys() >= _BYTE_TOKENS
    return _is_byte_level(data) and sum(len(token) == 1 for token in vocabulary) >= 256
