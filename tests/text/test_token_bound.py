"""Texts that are far too long are known by their length; none that fits is ever taken for one."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from helpers.checkpoints import write_tokenizer
from pagerunner.demo import demo_path
from pagerunner.text.token_bound import bytes_per_token, least_tokens, swallows_whitespace
from pagerunner.text.tokenizer import Tokenizer

TEXTS = ["e\u0301" * 3_000, "\u1100\u1161\u11a8" * 3_000, "\u212a" * 5_000, "a" * 9_000, " " * 9_000, "日本" * 2_000]
TEXTS += ["".join(random.Random(4).choices("ab é\u0301\U0001d400\n", k=9_000))]


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Backend:
    backend = Backend(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["a" * 40, " " * 40, "\u00e9" * 20, "\uac01" * 20, "日本" * 9] * 9, trainer)
    return backend


def least(backend: Backend, text: str) -> int | None:
    data = backend.to_str()
    most = bytes_per_token(data, backend.get_vocab(with_added_tokens=True))
    return None if most is None else least_tokens(text, most, swallows_whitespace(data))


@pytest.mark.parametrize("form", [None, "NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
def test_no_text_has_fewer_tokens_than_its_length_says(form: str | None) -> None:
    backend = byte_level(None if form is None else getattr(normalizers, form)())
    for text in TEXTS:
        found = least(backend, text)
        assert found is not None and 0 < found <= len(backend.encode(text).ids)


def test_a_token_that_swallows_white_space() -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<end>", rstrip=True)])
    text = "<end>" + " " * 100_000
    assert len(backend.encode(text).ids) == 1 and least(backend, text) == 1


def test_tokenizers_in_which_a_token_may_stand_for_anything() -> None:
    for change in (
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    ):
        data = json.loads(byte_level().to_str()) | change
        assert bytes_per_token(json.dumps(data), byte_level().get_vocab()) is None
    words = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    assert least(words, "b" * 100_000) is None


def test_far_too_long_texts_cost_nothing(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300, add_bos=False)
    for tokenizer in (Tokenizer.from_path(tmp_path), Tokenizer.from_path(demo_path("demo"))):
        tokenizer.least_tokens("a" * 5_000, 1)
        start = time.process_time()
        assert tokenizer.least_tokens("e\u0301" * 2_600_000, 2_048) >= 2_048
        assert time.process_time() - start < 1
        for text in TEXTS:
            assert tokenizer.least_tokens(text, 2_048) <= len(tokenizer.encode(text))


def test_texts_whose_tokens_may_be_long_are_counted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, 300, add_bos=False)
    tokenizer = Tokenizer.from_path(tmp_path)
    tokenizer.__dict__["_bytes_per_token"] = (None, False)
    assert 1_000 < tokenizer.least_tokens("ab " * 1_000_000, 1_000) < 200_000
    assert tokenizer.least_tokens("ab " * 100, 1_000) == 0
    text = "ab " * 40_000
    assert tokenizer.least_tokens(text, len(tokenizer.encode(text)) + 1) == 0
