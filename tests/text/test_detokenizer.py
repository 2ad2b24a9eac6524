"""Incremental text equals the whole decoded at once, and never shows what a later token changes."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from pagerunner.text.detokenizer import Detokenizer, TokenTable
from text.tokenizers_for_tests import KINDS, tokenizer


def pieces(kind: str, ids: list[int], skip: bool = True) -> list[str]:
    return pieces_of(TokenTable(tokenizer(kind)), ids, skip)


def pieces_of(table: TokenTable, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(table, skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def assert_exact(kind: str, ids: list[int], skip: bool = True) -> None:
    found = pieces(kind, ids, skip)
    whole = tokenizer(kind).decode(ids, skip)
    assert "".join(found) == whole
    shown = ""
    for place, piece in enumerate(found[:-1]):
        shown += piece
        # What is shown is the beginning of every continuation's text, so also of the whole and of a stop right here.
        assert tokenizer(kind).decode(ids[: place + 1], skip).startswith(shown)


kinds = st.sampled_from(sorted(KINDS))


@settings(max_examples=effort(133, 800), deadline=None)
@given(kind=kinds, skip=st.booleans(), data=st.data())
def test_any_tokens(kind: str, skip: bool, data: st.DataObject) -> None:
    size = tokenizer(kind).backend.get_vocab_size()  # and a few ids that have no token
    assert_exact(kind, data.draw(st.lists(st.integers(0, size + 3), max_size=80)), skip)


@settings(max_examples=effort(50, 300), deadline=None)
@given(skip=st.booleans(), ids=st.lists(st.integers(0, 300), max_size=90))
def test_any_bytes_with_few_letters_between(skip: bool, ids: list[int]) -> None:
    assert_exact("byte_fallback", ids, skip)


@settings(max_examples=effort(66, 400), deadline=None)
@given(kind=kinds, text=st.text(max_size=60))
@example("byte_level", "👩‍👩‍👧 e\u0301 ﷽ \ufffd\ufffd x")
@example("byte_fallback", "👩‍👩‍👧 the \ufffd 日本語 the  the")
@example("byte_level", "\ufffd" * 60)
def test_any_text(kind: str, text: str) -> None:
    assert_exact(kind, tokenizer(kind).encode(text))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_comes_whole(kind: str) -> None:
    ids = tokenizer(kind).encode("the 😀 end")
    found = pieces(kind, ids)
    assert "".join(found) == "the 😀 end"
    assert not any("\ufffd" in piece for piece in found)
    assert len([piece for piece in found if piece]) > 3


def test_text_is_not_delayed_without_need() -> None:
    ids = tokenizer("byte_level").encode("hello world, don't stop")
    assert all(pieces("byte_level", ids)[:-1])


def test_an_unfinished_character_comes_at_the_flush() -> None:
    ids = tokenizer("byte_level").encode("fox 😀")[:-1]
    found = pieces("byte_level", ids)
    assert "".join(found[:-1]) == "fox " and found[-1] == "\ufffd"


def test_an_invalid_byte_spoils_its_run_only() -> None:
    table = tokenizer("byte_fallback").backend.token_to_id
    ids = [table("▁a"), table("<0xE4>"), table("<0xB8>"), table("<0xAD>"), table("<0xFF>"), table("a"), table("▁the")]
    assert "".join(pieces("byte_fallback", ids)) == "a\ufffd\ufffd\ufffd\ufffda the"


@pytest.mark.parametrize("text", ["the fox and the dog ", "\ufffd", "😀"])
def test_cost_per_token_does_not_grow(text: str) -> None:
    for kind in ("byte_level", "byte_fallback") if text.isascii() else ("byte_level",):
        ids = tokenizer(kind).encode(text * 500)
        detokenizer = Detokenizer(TokenTable(tokenizer(kind)))
        widest = 0
        for token in ids:
            detokenizer.push(token)
            widest = max(widest, len(detokenizer._window))
        assert len(ids) >= 500 and widest <= 40


def test_only_tokens_with_parts_of_characters_are_decoded_each_time() -> None:
    text = "the fox and the dog 😀 " * 20
    decoder = tokenizer("byte_level")
    ids, table = decoder.encode(text), TokenTable(decoder)
    parts = sum(table.whole(token, True) is None for token in ids)
    assert "".join(pieces_of(table, ids)) == text
    before = decoder.num_decodes
    assert "".join(pieces_of(table, ids)) == text
    assert 0 < parts < len(ids) / 2 and decoder.num_decodes - before == parts


def test_own_text_of_a_token() -> None:
    for kind, name in (("byte_level", "Ġthe"), ("byte_fallback", "▁the"), ("metaspace", "▁the")):
        token = tokenizer(kind).backend.token_to_id(name)
        assert token is not None
        assert TokenTable(tokenizer(kind)).text(token) == " the"
    assert TokenTable(tokenizer("byte_level")).text(1) == "</s>"
    assert TokenTable(tokenizer("byte_level")).text(10_000) == ""
