"""Structural tags: free text in which a mark begins a part that follows a schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint, write_tokenizer
from pagerunner import LLM, SamplingParams
from pagerunner.engine.structured_output.grammar_door import GrammarDoor
from pagerunner.engine.structured_output.grammar_worker import grammar_text
from pagerunner.engine.structured_output.structural_tag import structural_tag_grammar
from pagerunner.errors import InvalidRequestError
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
OLD = {"triggers": ["<f"], "structures": [{"begin": "<f=weather>", "schema": SCHEMA, "end": "</f>"}]}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
NEW = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"type": "tag", "begin": "<f=weather>", "content": CONTENT, "end": "</f>"}],
    },
}


def _tokenizer(path: Path) -> Tokenizer:
    write_tokenizer(path, 512, add_bos=False)
    return Tokenizer.from_path(path)


def without(value: dict[str, Any], *path: str) -> dict[str, Any]:
    copied = json.loads(json.dumps(value))
    inner = copied
    for name in path[:-1]:
        inner = inner[name]
    inner.pop(path[-1])
    return copied


def test_both_notations_are_one_grammar() -> None:
    assert structural_tag_grammar(OLD) == structural_tag_grammar(NEW) == structural_tag_grammar(json.dumps(NEW))
    assert "TAG_TEXT <call>" in structural_tag_grammar(
        {"triggers": ["<call>"], "structures": [{"begin": "<call>", "schema": {}, "end": ""}]},
        lambda text: text == "<call>",
    )


@pytest.mark.parametrize(
    "bad",
    [
        {},
        [],
        {"structures": [], "triggers": ["<f"]},
        without(OLD, "triggers"),
        {**OLD, "triggers": ["<g"]},
        {**OLD, "triggers": "<f"},
        {**OLD, "structures": [{"begin": "<f"}]},
        {"format": {"type": "sequence"}},
        {"format": {**NEW["format"], "at_least_one": True}},  # type: ignore[dict-item]
        {"format": {**NEW["format"], "tags": [{"begin": "<f", "content": {"type": "any_text"}, "end": ""}]}},  # type: ignore[dict-item]
    ],
)
def test_what_is_no_structural_tag_is_refused(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="structural_tag|trigger|tag"):
        structural_tag_grammar(bad)
    if bad:
        door = GrammarDoor(_tokenizer(tmp_path).to_json(), 512, [0])
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            door.check(StructuredOutputsParams(structural_tag=bad))


def test_a_random_model_keeps_to_it(tmp_path: Path) -> None:
    """It says the mark only because nothing else is allowed it; then the schema is followed."""
    llm = LLM(str(make_checkpoint(tmp_path, "qwen3")), max_model_len=256, kv_cache_memory_bytes=4_000_000)
    tag = {"triggers": ["<"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
    tokenizer = llm.get_tokenizer()
    mark = tokenizer.encode("<", add_special_tokens=False)[-1]
    blank = {token: -100.0 for token in range(500) if not tokenizer.decode([token]).strip()}  # JSON allows it anywhere
    params = SamplingParams(
        max_tokens=60,
        temperature=0,
        logit_bias={mark: 100, **blank},
        structured_outputs=StructuredOutputsParams(structural_tag=tag),
    )
    [output] = llm.generate(["Weather?"], params)
    parts = output.outputs[0].text.split("<f>")[1:]
    assert parts and all(json.loads(part.partition("</f>")[0]) == {"city": "Oslo"} for part in parts if "</f>" in part)
    assert "</f>" in parts[0]


@pytest.mark.parametrize(
    ("options", "text", "fits"),
    [
        ({}, '<f=weather>{ "city": "Oslo" }</f>', True),
        ({}, '<f=weather>{\n    "city":\n    "Oslo"\n}</f>', True),
        ({}, "<f=weather>{" + "\n" * 3 + '"city": "Oslo"}</f>', False),
        ({}, "<f=weather>{" + " " * 9 + '"city": "Oslo"}</f>', False),
        ({"disable_any_whitespace": True}, '<f=weather>{"city":"Oslo"}</f>', True),
        ({"disable_any_whitespace": True}, '<f=weather>{"city": "Oslo"}</f>', False),
        ({"whitespace_pattern": "_?"}, '<f=weather>{_"city":_"Oslo"}</f>', True),
        ({"whitespace_pattern": "_?"}, '<f=weather>{ "city": "Oslo"}</f>', False),
    ],
)
@pytest.mark.parametrize("tag", [OLD, NEW])
def test_white_space_in_the_parts_is_bounded(tag: Any, options: dict[str, Any], text: str, fits: bool) -> None:
    """A model that prefers newlines could fill its limit with them."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar_text(StructuredOutputsParams(structural_tag=tag, **options)))
    assert not matcher.is_error()
    tokens = tokenizer.tokenize_str(f"Let me look. {text}")
    assert (matcher.try_consume_tokens(tokens) == len(tokens)) == fits
