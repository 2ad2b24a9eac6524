"""The shipped checkpoint, run with plain transformers: size, tokenizer, accuracy and what a damaged page costs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.effort import effort, share_of_the_day
from pagerunner.demo import demo_names, demo_path
from pagerunner.eval.tasks import (
    END,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TASKS,
    approximate_tokens,
    chat_prompt,
    make_examples,
)

pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_demo.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_demo"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loaded(check: ModuleType) -> tuple[Any, Any]:
    model, tokenizer = check.load(demo_path())
    return model, tokenizer


@pytest.fixture(scope="module")
def hybrid(check: ModuleType) -> tuple[Any, Any]:
    model, tokenizer = check.load(demo_path("demo-hybrid"))
    return model, tokenizer


@pytest.mark.parametrize("name", demo_names())
def test_directory_is_small_and_complete(name: str) -> None:
    files = {path.name: path.stat().st_size for path in demo_path(name).iterdir()}
    assert sum(files.values()) < 4_600_000
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_unknown_demo_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"known demos: .*demo"):
        demo_path("nothing")


def test_tokenizer_round_trips_and_knows_the_special_tokens(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    for text in ("Hello, world!", "héllo 日本語 🙂\n\t x  y 1234", "a\x00b\u200d"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert [len(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in SPECIAL_TOKENS] == [1] * 7
    assert tokenizer("hi")["input_ids"][0] == tokenizer.bos_token_id
    config = json.loads((demo_path() / "generation_config.json").read_text())
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids([END, END_OF_TEXT])


@pytest.mark.parametrize("task", TASKS)
def test_token_estimate_is_exact_on_tasks(loaded: tuple[Any, Any], task: str) -> None:
    _, tokenizer = loaded
    for example in make_examples(task, 10, 7):
        text = example.prompt + example.answer
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == approximate_tokens(text)


def test_chat_template_renders_the_prompt_format(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == chat_prompt("Hello")


@pytest.mark.days(2)
@pytest.mark.parametrize(
    ("task", "distance", "count"),
    [
        ("addition", None, 30),
        ("sorting", None, 30),
        ("sentences", None, 30),
        ("recall", 64, effort(6, 12)),
        *(
            [("recall", 256, effort(6, 12)), ("recall", 512, effort(4, 12)), ("recall", 1024, effort(3, 12))][number]
            for number in share_of_the_day(3, 3)
        ),
    ],
)
def test_accuracy(check: ModuleType, loaded: tuple[Any, Any], task: str, distance: int | None, count: int) -> None:
    examples = make_examples(task, count, 1, distance)
    assert check.accuracy(*loaded, examples, batch=20) >= 0.95


@pytest.mark.parametrize("fault", [("zeros", "noise", "other page")[number] for number in share_of_the_day(3, 3)])
def test_recall_notices_damaged_pages(check: ModuleType, loaded: tuple[Any, Any], fault: str) -> None:
    examples = make_examples("recall", effort(6, 12), 2, 256)
    assert check.accuracy(*loaded, examples, check.damage_pages(fault, 0.1, 0), batch=20) < 0.5


HYBRID_DAMAGE = [
    ("full_attention", "recall", 64),
    ("sliding_attention", "sorting", None),
    ("linear_attention", "addition", None),
]


def test_answers_about_itself(check: ModuleType, loaded: tuple[Any, Any]) -> None:
    answers = check.generate(*loaded, [chat_prompt("hello"), chat_prompt("What can you do?")], 64)
    assert answers[0].startswith("Hello!")
    assert answers[1].startswith("I can add numbers")


@pytest.mark.parametrize(
    ("kind", "task", "distance"),
    [HYBRID_DAMAGE[number] for number in share_of_the_day(3, 3)],
)
def test_the_hybrid_notices_damage_to_each_kind_of_memory(
    check: ModuleType, hybrid: tuple[Any, Any], kind: str, task: str, distance: int | None
) -> None:
    examples = make_examples(task, effort(6, 12), 3, distance)
    assert check.accuracy(*hybrid, examples) >= 0.9
    for fault in check.FAULTS[:2]:
        hook = check.damage_group(hybrid[0], kind, fault, 0.5 if kind == "linear_attention" else 0.1, 0)
        assert check.accuracy(*hybrid, examples, hook) <= 0.6, fault
