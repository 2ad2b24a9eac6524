"""Log-probabilities in the two formats of the OpenAI API, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pagerunner.server.protocol.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from pagerunner.types import Logprob

Position = dict[int, Logprob]


def _text(token_id: int, entry: Logprob, as_ids: bool = False) -> str:
    if as_ids:
        return f"token_id:{token_id}"
    return entry.decoded_token if entry.decoded_token is not None else f"token_id:{token_id}"


def _best(position: Position, count: int) -> list[tuple[int, Logprob]]:
    ranked = [(token_id, entry) for token_id, entry in position.items() if entry.rank is None or entry.rank <= count]
    return sorted(ranked, key=lambda item: item[1].rank or 0)[:count]


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position], top: int, as_ids: bool = False
) -> ChatLogprobs:
    """The chat format: for every token its log-probability and the `top` most likely tokens.

    With `as_ids` a token's text is "token_id:" and its number (return_tokens_as_token_ids).
    """
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = position[token_id]
        text = _text(token_id, chosen, as_ids)
        best = []
        for other, entry in _best(position, top):
            shown = _text(other, entry, as_ids)
            best.append(TopLogprob(shown, entry.logprob, list(shown.encode())))
        content.append(TokenLogprob(text, chosen.logprob, list(text.encode()), best))
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """Writes the completions format for one text, piece by piece: offsets go on where the last piece ended."""

    def __init__(self, top: int, as_ids: bool = False) -> None:
        self._top = top
        self._as_ids = as_ids
        self._offset = 0

    def write(self, token_ids: Sequence[int], positions: Sequence[Position | None]) -> CompletionLogprobs:
        """The next tokens. A position of None is the first token of a prompt: nothing predicted it.

        `top_logprobs` holds the `top` most likely tokens and the chosen one.
        """
        out = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            text = f"token_id:{token_id}" if position is None else _text(token_id, position[token_id], self._as_ids)
            self._append(out, text, token_id, position)
        return out

    def write_prompt(
        self, token_ids: Sequence[int], positions: Sequence[Position | None], first_text: str
    ) -> CompletionLogprobs:
        """A prompt's tokens; `first_text` is the text of its first one, for which no entry exists."""
        out = CompletionLogprobs([], [], [], [])
        self._append(out, f"token_id:{token_ids[0]}" if self._as_ids else first_text, token_ids[0], None)
        return joined(out, self.write(token_ids[1:], positions[1:]))

    def _append(self, out: CompletionLogprobs, text: str, token_id: int, position: Position | None) -> None:
        out.text_offset.append(self._offset)
        self._offset += len(text)
        out.tokens.append(text)
        if position is None:
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            return
        out.token_logprobs.append(position[token_id].logprob)
        best: dict[str, float] = {}
        for other, entry in _best(position, self._top):
            # Of tokens with one text, such as half characters, the best.
            best.setdefault(_text(other, entry, self._as_ids), entry.logprob)
        best.setdefault(text, position[token_id].logprob)
        out.top_logprobs.append(best)


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Two pieces of one text as one."""
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def prompt_logprobs(positions: Sequence[Position | None]) -> list[dict[str, Any] | None]:
    """vLLM's format for a prompt: token id -> {logprob, rank, decoded_token} per position, null for the first."""
    return [
        None
        if position is None
        else {str(token_id): msgspec.to_builtins(entry) for token_id, entry in position.items()}
        for position in positions
    ]
