"""Text to token ids and back, and chat messages to text, from a model directory's tokenizer files. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any, TypedDict

import msgspec
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as TokenizersTokenizer

from pagerunner.errors import CheckpointError, InvalidRequestError
from pagerunner.models.configs.fields import log_once
from pagerunner.models.configs.json_files import read_json
from pagerunner.text.chat_template import ChatTemplate
from pagerunner.text.token_bound import bytes_per_token, least_tokens, swallows_whitespace

_LONG_CHARS = 2_048
_LARGE_CHARS = 500_000  # from here on a text takes hundreds of megabytes while it is tokenised
_PIECE_CHARS = 65_536
_COMMON_CHARS_PER_TOKEN = 8  # texts of more are looked at in pieces first
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNNAMED_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = [(name, bool | None, None) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")]
_Token: Any = msgspec.defstruct("_Token", [("content", str), *_FLAGS], omit_defaults=True)
_TokenLists: Any = TypedDict(  # type: ignore[misc]  # names from tuples
    "_TokenLists",
    {"added_tokens_decoder": dict[int, _Token] | None}
    | dict.fromkeys(_UNNAMED_TOKENS, list[str | _Token | None] | dict[str, str | _Token | None] | None)
    | dict.fromkeys(_NAMED_TOKENS, str | _Token | None),
    total=False,
)


class Tokenizer:
    """A checkpoint's tokenizer. Instances are safe to use from several threads.

    `special_tokens` maps names such as "eos_token" to their texts; `chat_template` is None where there is none.
    """

    def __init__(
        self, backend: TokenizersTokenizer, special_tokens: Mapping[str, str], chat_template: ChatTemplate | None
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template

    @classmethod
    def from_path(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of the model directory `path`.

        `chat_template` replaces the checkpoint's: a Jinja text, or the path of a file that holds one.

        Raises:
            CheckpointError: tokenizer.json is missing or unreadable, or a file beside it is not JSON.
        """
        directory, file = Path(path), tokenizer_file(path)
        try:
            backend = TokenizersTokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exception for any fault in the file
            raise CheckpointError(f"{file} is not a valid tokenizer: {error}.") from None
        backend.no_padding()
        backend.no_truncation()
        config = _optional_json(directory / "tokenizer_config.json")
        lists, more = _token_lists(directory / "tokenizer_config.json", config), directory / "special_tokens_map.json"
        special = _special_tokens(_token_lists(more, _optional_json(more)), lists)
        _add_tokens(backend, lists.get("added_tokens_decoder") or {}, special)
        template = ChatTemplate.from_option(chat_template) if chat_template else ChatTemplate.find(directory, config)
        if (end := special.get("eos_token")) is not None and backend.token_to_id(end) is None:
            log_once(f"{file} has no {end!r:.80}, which the files beside it call eos_token: it ends nothing.", WARNING)
        return cls(backend, {name: special[name] for name in _NAMED_TOKENS if name in special}, template)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Tokens that have a text, counting added ones. A model's vocabulary may be padded beyond it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def eos_token_id(self) -> int | None:
        """Id of the end token, if it has one."""
        return self.token_to_id(self.special_tokens.get("eos_token"))

    def token_to_id(self, token: str | None) -> int | None:
        """The id of exactly this token, if there is one."""
        return None if token is None else self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (byte-level tokens look encoded); None beyond the vocabulary."""
        return None if token_id < 0 else self._backend.id_to_token(token_id)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """`id_to_token` of each id."""
        return [self.id_to_token(token_id) for token_id in token_ids]

    def to_json(self) -> str:
        """The whole tokenizer as the text of a tokenizer.json, with the tokens that other files add."""
        return str(self._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the checkpoint puts around a text, such as a begin token.

        Raises:
            InvalidRequestError: `text` is not a string that can be written as UTF-8.
        """
        _require_text(text)
        if len(text) < _LONG_CHARS:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # The batch call gives the same ids, lets other threads go on meanwhile, and keeps no places in the text.
        ids = list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        if len(text) > _LARGE_CHARS:
            _give_memory_back()
        return ids

    def least_tokens(self, text: str, enough: int) -> int:
        """A number of tokens that `text` has at least. The number needn't be exact beyond `enough`.

        The length and the longest token give a bound at no cost. If that bound doesn't suffice and the text is still
        suspiciously long, pieces of the text are tokenised, until they have twice as many tokens as `enough`. Cutting a
        text may add a few tokens, so `enough` tokens would not prove anything.
        """
        if len(text) < _LONG_CHARS:
            return 0
        most_bytes, without_whitespace = self._bytes_per_token
        least = 0 if most_bytes is None else least_tokens(text, most_bytes, without_whitespace)
        if least >= enough or len(text) <= max(_PIECE_CHARS, _COMMON_CHARS_PER_TOKEN * enough):
            return least
        found = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            found += len(self._backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids)
            if found > 2 * enough:
                return max(least, found // 2)
        return least

    @functools.cached_property
    def _bytes_per_token(self) -> tuple[int | None, bool]:
        text = self.to_json()
        return bytes_per_token(text, self._backend.get_vocab(with_added_tokens=True)), swallows_whitespace(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are not whole characters become U+FFFD, ids beyond the vocabulary nothing."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    @property
    def joins_bytes(self) -> bool:
        """Whether a text is its tokens' bytes, one after another, whatever the tokens are."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; it holds its special tokens, so encode it without adding others.

        `kwargs` are passed to the template; `chat_template` among them replaces the checkpoint's. `tokenize`, which transformers has,
        may be False.

        Raises:
            InvalidRequestError: there is no template, it refuses these messages, or `tokenize` is true.
        """
        if kwargs.pop("tokenize", False):
            raise InvalidRequestError(
                "tokenize=True isn't there: encode the text, with add_special_tokens=False.", param="tokenize"
            )
        override = kwargs.pop("chat_template", None)
        template = ChatTemplate({"default": override}, "chat_template") if override else self.chat_template
        if template is None:
            raise InvalidRequestError(
                "This model's tokenizer has no chat template; give one with chat_template, or use completions.",
                param="messages",
            )
        variables = {**self.special_tokens, **kwargs, "add_generation_prompt": add_generation_prompt}
        return template.render(messages, tools, variables)


def _give_memory_back() -> None:
    """Give freed memory back to the system.

    The allocator would keep more than a gigabyte after a text of some megabytes.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _require_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"prompt must be a string, got {type(text).__name__}.", param="prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"prompt holds a lone surrogate at character {error.start}, which is not valid Unicode text.",
            param="prompt",
        ) from None


def end_token_ids(model: Sequence[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a sequence: those of config.json and generation_config.json, and the tokenizer's end token.

    Published files don't always agree: some have the end of a text in config.json, and the end of a turn in the tokenizer.
    """
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys([*model, *([] if own is None else [own])]))


def tokenizer_file(path: str | Path) -> Path:
    """The tokenizer.json of a model directory. Raises CheckpointError, which says what to do, if there is none."""
    directory = Path(path)
    if (file := directory / "tokenizer.json").is_file():
        return file
    others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (directory / name).is_file()]
    if not others:
        raise CheckpointError(f"{directory} has no tokenizer.json; give a tokenizer directory, or skip_tokenizer_init.")
    raise CheckpointError(
        f"{directory} has {others[0]}, but no tokenizer.json, which is the one form that is read. Convert it once, with "
        f"transformers installed: AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained(DIRECTORY); then give that "
        "directory as tokenizer."
    )


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _token_lists(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What the file's `values` say of tokens, by the fields of `_TokenLists`. Raises CheckpointError for what can't be read."""
    try:
        return dict(msgspec.convert(values, _TokenLists, str_keys=True))
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file}: {error}.") from None


def _special_tokens(*lists: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; unnamed ones under their own text. Of equal names the last one counts."""
    found: dict[str, str] = {}
    for name, value in (item for some in lists for item in some.items()):
        if name in _UNNAMED_TOKENS:
            texts = map(_text, value.values() if isinstance(value, dict) else value or ())
            found.update({text: text for text in texts if text})
        elif name in _NAMED_TOKENS and (text := _text(value)):
            found[name] = text
    return found


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else value.content


def _add_tokens(backend: TokenizersTokenizer, listed: Mapping[int, Any], special: Mapping[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json lists, in id order, and mark the special ones."""
    missing = {token_id: token for token_id, token in listed.items() if backend.token_to_id(token.content) is None}
    for token_id, token in sorted(missing.items()):
        backend.add_tokens([AddedToken(**msgspec.to_builtins(token))])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, "
                "but in tokenizer.json that id is not the next one."
            )
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in dict.fromkeys(special.values()):
        if backend.token_to_id(text) is not None and not (text in known and known[text].special):
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
