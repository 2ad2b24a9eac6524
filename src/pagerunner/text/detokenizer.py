"""Token ids to text while they arrive: only text that no later token can change, at a constant cost per token."""

from __future__ import annotations

import re

from pagerunner.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_WINDOW = 32
_KEPT = (6, 24)
# Two decodings that agree on this many last characters are in the same state: UTF-8 resynchronises within three bytes.
_SYNC_CHARS = 4


class TokenTable:
    """Facts about single tokens of one tokenizer, found on first use and kept."""

    def __init__(self, decoder: Tokenizer) -> None:
        self.decoder = decoder
        self._bytes: dict[int, bool] = {}
        self._silent: tuple[dict[int, bool], dict[int, bool]] = ({}, {})
        self._texts: dict[int, str] = {}
        self.joins_bytes = decoder.joins_bytes
        self._whole: tuple[dict[int, str | None], dict[int, str | None]] = ({}, {})

    def is_byte(self, token: int) -> bool:
        """Whether the token stands for one byte of a character that the vocabulary lacks (byte fallback)."""
        known = self._bytes.get(token)
        if known is None:
            name = self.decoder.id_to_token(token)
            known = name is not None and _BYTE_TOKEN.fullmatch(name) is not None
            # A vocabulary may hold such a name without a decoder that reads it as a byte.
            known = known and self.decoder.decode([token], skip_special_tokens=False) != name
            self._bytes[token] = known
        return known

    def is_silent(self, token: int, skip_special_tokens: bool) -> bool:
        """Whether the token never gives text: special and skipped, or not in the vocabulary."""
        table = self._silent[skip_special_tokens]
        known = table.get(token)
        if known is None:
            # Twice, because a decoder may strip the only space of a text's first token.
            known = table[token] = self.decoder.decode([token, token], skip_special_tokens) == ""
        return known

    def whole(self, token: int, skip_special_tokens: bool) -> str | None:
        """What the token adds to any text of whole characters; None where that can't be said of a token alone."""
        table = self._whole[skip_special_tokens]
        try:
            return table[token]
        except KeyError:
            text = self.decoder.decode([token], skip_special_tokens) if self.joins_bytes else _REPLACEMENT
            table[token] = None if _REPLACEMENT in text else text
            return table[token]

    def text(self, token: int) -> str:
        """The token's own text in the middle of a text (with the space that a word starts with)."""
        known = self._texts.get(token)
        if known is None:
            once = self.decoder.decode([token], skip_special_tokens=False)
            twice = self.decoder.decode([token, token], skip_special_tokens=False)
            stripped = twice.startswith(once) and twice.endswith(once) and len(twice) > 2 * len(once)
            known = self._texts[token] = twice[len(once) :] if stripped else once
        return known


class Detokenizer:
    """Text of one growing token sequence: all pieces and the flush together equal the decoded whole.

    A piece ends before anything that a later token may change. In a byte-level vocabulary that is a last replacement character,
    made of the bytes of an unfinished character. With byte fallback it is a run of byte tokens. The decoder reads such a run as
    a whole, and one invalid byte at its end turns the whole run into replacement characters.
    """

    __slots__ = ("_emitted", "_skip", "_table", "_window")

    def __init__(self, table: TokenTable, skip_special_tokens: bool = True) -> None:
        self._table = table
        self._skip = skip_special_tokens
        self._window: list[int] = []  # the latest tokens; decoding starts at the first of them
        self._emitted = 0  # characters of the window's text that were given out

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        if not self._window and (whole := self._table.whole(token, self._skip)) is not None:
            return whole
        if self._table.is_silent(token, self._skip):
            return ""
        self._window.append(token)
        if self._table.is_byte(token):
            return ""
        text = self._table.decoder.decode(self._window, self._skip)
        certain = len(text)
        if text.endswith(_REPLACEMENT):
            certain -= 1
        piece = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if self._table.joins_bytes and certain == len(text):  # all characters are whole
            self._window, self._emitted = [], 0
        elif len(self._window) >= _WINDOW:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """The rest, when no token follows."""
        if not self._window:
            return ""
        text = self._table.decoder.decode(self._window, self._skip)
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece

    def _shorten(self, text: str) -> None:
        """Start the window later, where the tokens left decode to the same last characters."""
        for kept in _KEPT:
            tail = self._window[-kept:]
            tail_text = self._table.decoder.decode(tail, self._skip)
            if len(tail_text) > _SYNC_CHARS and text.endswith(tail_text[-_SYNC_CHARS:]):
                self._emitted = len(tail_text) - (len(text) - self._emitted)
                self._window = tail
                return
