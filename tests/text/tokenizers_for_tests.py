"""Small real tokenizers of every decoder kind that checkpoints have, trained on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "hello world, the quick brown fox jumps over the lazy dog",
    "the world of the fox and the dog; don't stop at the end.",
    "größe und straße, naïve café, 中文 字符 日本語 テスト",
    "one two three four five six seven eight nine ten \n\n tabs\tand  spaces",
] * 5
SPECIAL = ["<s>", "</s>", "<pad>"]


class TestTokenizer:
    """The calls that the engine makes, over a `tokenizers.Tokenizer`."""

    __test__ = False

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.num_decodes = 0
        self.joins_bytes = isinstance(backend.decoder, decoders.ByteLevel)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def least_tokens(self, text: str, enough: int) -> int:
        return 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decodes += 1
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def _byte_fallback() -> Tokenizer:
    """As in Llama 2 and Mistral: spaces as a letter, 256 byte tokens for what the vocabulary lacks."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    letters = "▁abcdefghijklmnopqrstuvwxyz中é,."
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("i", "n"), ("e", "r"), ("▁", "▁")]
    tokens = ["<unk>", *SPECIAL, *bytes_, *letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def _metaspace() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    )
    return backend


def _wordpiece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    )
    return backend


KINDS = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
}


@lru_cache
def tokenizer(kind: str) -> TestTokenizer:
    return TestTokenizer(KINDS[kind]())
