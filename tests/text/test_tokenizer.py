"""The tokenizer against `transformers`' on the same files, chat templates, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import CHAT_TEMPLATE, make_checkpoint, write_tokenizer
from pagerunner.errors import CheckpointError, InvalidRequestError
from pagerunner.models.configs.reader import read_model_config
from pagerunner.text.tokenizer import Tokenizer, end_token_ids

TEXTS = [
    "",
    "Hello, page of memory.",
    "  two  spaces\n\ttab",
    "日本語 🙂 Grüße",
    "<|im_start|>user<|im_end|> x",
    "a" * 300,
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <hi> & 'bye'"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "more"},
]


def edit(path: Path, **changes: Any) -> None:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("has_rule", [True, False])
def test_ids_and_texts_equal_the_references(
    tmp_path: Path, family: str, flags: dict[str, bool], has_rule: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    path = make_checkpoint(tmp_path, family)
    edit(path, **flags)
    if not has_rule:
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        (path / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    reference, ours = transformers.AutoTokenizer.from_pretrained(path), Tokenizer.from_path(path)
    for text in TEXTS:
        for special in (True, False):
            ids = reference(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == reference.decode(ids, skip_special_tokens=special)
    assert ours.eos_token_id == reference.eos_token_id
    assert ours.vocab_size == len(reference)
    assert ours.convert_ids_to_tokens([0, 40, 300]) == reference.convert_ids_to_tokens([0, 40, 300])
    assert ours.apply_chat_template(CHAT) == reference.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = make_checkpoint(tmp_path, "qwen3", vocab_size=300)
    size = Tokenizer.from_path(path).vocab_size
    listed = {"0": {"content": "<|endoftext|>", "special": True}, str(size): {"content": "<tool>", "special": True}}
    edit(path, added_tokens_decoder=listed)
    ours, reference = Tokenizer.from_path(path), transformers.AutoTokenizer.from_pretrained(path)
    assert ours.encode("a<tool>b") == reference("a<tool>b").input_ids
    assert size in ours.special_ids and ours.decode([size]) == "" and ours.id_to_token(size) == "<tool>"
    edit(path, added_tokens_decoder={str(size + 5): {"content": "<far>", "special": True}})
    with pytest.raises(CheckpointError, match="<far>"):
        Tokenizer.from_path(path)


def test_named_tokens_are_special_even_where_the_file_does_not_mark_them(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<|im_end|>"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    edit(path, eos_token="<|im_end|>")
    ours = Tokenizer.from_path(path)
    assert ours.eos_token_id == 3 and 3 in ours.special_ids and ours.encode("<|im_end|>") == [3]


def test_an_end_token_that_the_tokenizer_lacks_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tokenizer(tmp_path, 300, add_bos=False)
    edit(tmp_path, eos_token="<nowhere>", pad_token="<pad>")  # a pad token pads nothing here
    assert Tokenizer.from_path(tmp_path).eos_token_id is None
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        f"{tmp_path / 'tokenizer.json'} has no '<nowhere>', which the files beside it call eos_token"
    )


def test_ids_outside_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    ours = Tokenizer.from_path(make_checkpoint(tmp_path, "qwen3"))
    assert ours.id_to_token(10**6) is None and ours.id_to_token(-1) is None
    assert ours.decode([10**6]) == ""


def test_partial_characters_decode_to_replacements(tmp_path: Path) -> None:
    ours = Tokenizer.from_path(make_checkpoint(tmp_path, "qwen3", vocab_size=260))
    ids = ours.encode("🚀")
    assert len(ids) == 4 and ours.decode(ids) == "🚀" and "\ufffd" in ours.decode(ids[:2])


@pytest.mark.parametrize("bad", ["lone \ud800 surrogate", b"bytes", None, 7])
def test_text_that_is_not_text_is_refused(tmp_path: Path, bad: Any) -> None:
    ours = Tokenizer.from_path(make_checkpoint(tmp_path, "qwen3"))
    with pytest.raises(InvalidRequestError, match="prompt"):
        ours.encode(bad)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a valid tokenizer"):
        Tokenizer.from_path(tmp_path)
    write_tokenizer(tmp_path, 300, add_bos=False)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"300": {"special": True}}}, "content"),
        ({"added_tokens_decoder": {"300": {"content": "y", "lstrip": "yes"}}}, "lstrip"),
        ({"additional_special_tokens": 3}, "additional_special_tokens"),
        ({"extra_special_tokens": ["<a>", 5]}, "extra_special_tokens"),
        ({"eos_token": ["<|im_end|>"]}, "eos_token"),  # it would end nothing
        ({"chat_template": [{"name": 5, "template": "x"}]}, "chat_template"),
    ],
)
def test_tokens_in_a_form_that_cant_be_read_are_named(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    write_tokenizer(tmp_path, 300, add_bos=False)
    names = ["tokenizer_config.json"] + ["special_tokens_map.json"] * ("special" in words or "eos" in words)
    for name in names:
        kept = (tmp_path / name).read_text() if (tmp_path / name).exists() else "{}"
        (tmp_path / name).write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=rf"{name}.*{words}"):
            Tokenizer.from_path(tmp_path)
        (tmp_path / name).write_text(kept)
    edit(
        tmp_path,
        added_tokens_decoder=None,
        extra_special_tokens={"a": None},
        additional_special_tokens=[None],
        pad_token=None,
    )
    Tokenizer.from_path(tmp_path)


def test_no_chat_template(tmp_path: Path) -> None:
    ours = Tokenizer.from_path(make_checkpoint(tmp_path, "qwen3", chat_template=None))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ours.apply_chat_template(CHAT)
    assert ours.apply_chat_template(CHAT, chat_template="{{ messages | length }}") == "4"


def test_where_templates_are_found(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", chat_template="config")

    def render() -> str:
        return Tokenizer.from_path(path).apply_chat_template(CHAT)

    assert render() == "config"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert render() == "json"
    (path / "chat_template.jinja").write_text("jinja")
    assert render() == "jinja"
    given = tmp_path / "given.txt"
    given.write_text("given")
    assert Tokenizer.from_path(path, str(given)).apply_chat_template(CHAT) == "given"
    assert Tokenizer.from_path(path, "{{ 1 + 1 }}").apply_chat_template(CHAT) == "2"
    with pytest.raises(CheckpointError, match=r"nowhere\.jinja"):
        Tokenizer.from_path(path, "nowhere.jinja")


def test_named_templates(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    edit(
        path,
        chat_template=[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools|length }}"}],
    )
    ours = Tokenizer.from_path(path)
    assert ours.apply_chat_template(CHAT) == "d"
    assert ours.apply_chat_template(CHAT, tools=[{"type": "function"}]) == "1"
    edit(path, chat_template=[{"name": "default"}])
    with pytest.raises(CheckpointError, match="chat_template"):
        Tokenizer.from_path(path)


HELPERS = """
{%- for m in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- generation %}{{ m | tojson }}{% endgeneration %}
{%- endfor %}{{ strftime_now('%Y')|length }}{{ eos_token }}{{ enable_thinking }}{{ tools }}{{ add_generation_prompt }}
"""


def test_templates_find_the_helpers_they_expect(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = make_checkpoint(tmp_path, "qwen3", chat_template=HELPERS)
    reference, ours = transformers.AutoTokenizer.from_pretrained(path), Tokenizer.from_path(path)
    got = ours.apply_chat_template(CHAT, add_generation_prompt=False, enable_thinking=True)
    assert got == reference.apply_chat_template(CHAT, tokenize=False, enable_thinking=True)
    assert "<hi> & 'bye'" in got


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "not valid"),
        ("{{ messages[0].content.missing.field }}", "refuses|fails"),
        ("{{ messages.append(1) }}", "refuses|fails"),
        ("{{ ''.__class__.__mro__ }}", "refuses|fails"),
        ("{{ messages[0]['content'] + 1 }}", "fails"),
        ("{% for i in range(10000000) %}x{% endfor %}", "fails"),
    ],
)
def test_templates_that_fail_are_the_requests_error(tmp_path: Path, template: str, words: str) -> None:
    ours = Tokenizer.from_path(make_checkpoint(tmp_path, "qwen3", chat_template=template))
    with pytest.raises(InvalidRequestError, match=words):
        ours.apply_chat_template(CHAT)


def test_bad_messages_are_the_requests_error(tmp_path: Path) -> None:
    ours = Tokenizer.from_path(make_checkpoint(tmp_path, "qwen3", chat_template=CHAT_TEMPLATE))
    for messages in ([{"role": "user", "content": "\ud800"}], [{"role": "user", "content": 3}], [{"role": "user"}]):
        with pytest.raises(InvalidRequestError):
            ours.apply_chat_template(messages)
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        ours.apply_chat_template(CHAT, continue_final_message=True)


def test_a_tokenizer_of_another_form_says_how_to_convert_it(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_path(tmp_path)
    for words in ("has tokenizer.model, but no tokenizer.json", "AutoTokenizer.from_pretrained(", "save_pretrained"):
        assert words in str(caught.value)


def test_the_tokenizers_end_token_ends_a_sequence_too(tmp_path):
    path = make_checkpoint(tmp_path, "llama", eos_token_id=[7, 9], generation_config={"eos_token_id": [9, 11]})
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": {"content": "<|im_end|>"}}))
    tokenizer = Tokenizer.from_path(path)
    ends = end_token_ids(read_model_config(path).eos_token_ids, tokenizer)
    assert ends == (7, 9, 11, tokenizer.token_to_id("<|im_end|>"))
    assert end_token_ids((7,), None) == (7,)
