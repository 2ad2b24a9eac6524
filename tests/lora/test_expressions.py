"""Regular expressions of configs: what matches is what matches for `re`, and nothing takes for ever."""

from __future__ import annotations

import random
import re

import pytest

from helpers.effort import TEST_DAY, effort
from pagerunner.lora.expressions import MAX_STEPS, Budget, Expression, ExpressionError, Patterns

ATOMS = [
    "a",
    "b",
    ".",
    r"\.",
    "[ab]",
    "[^a]",
    r"\w",
    r"\d",
    r"\b",
    r"\B",
    "^",
    "$",
    r"[a\]]",
    "[]a]",
    "_",
    "{",
    "1",
    "",
]
REPEATS = ["*", "+", "?", "*?", "+?", "{2}", "{1,2}", "{,2}", "{1,}", "{}"]


def some(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if not depth or kind < 0.3:
        return rng.choice(ATOMS)
    if kind < 0.55:
        return some(rng, depth - 1) + some(rng, depth - 1)
    if kind < 0.7:
        return f"({some(rng, depth - 1)}|{some(rng, depth - 1)})"
    if kind < 0.75:
        return f"{some(rng, depth - 1)}|{some(rng, depth - 1)}"
    return f"(?:{some(rng, depth - 1)}){rng.choice(REPEATS)}"


def test_what_matches_is_what_matches_for_re() -> None:
    rng, tried, found = random.Random(TEST_DAY), 0, 0
    while tried < effort(2_000, 40_000):
        text = some(rng, 4)
        theirs = re.compile(text)
        ours = Expression(text, Budget("a"))
        for _ in range(5):
            name = "".join(rng.choices("ab._1]{", k=rng.randint(1, 6)))
            wanted = theirs.fullmatch(name) is not None
            assert ours.matches(name) == wanted, (text, name)
            tried, found = tried + 1, found + wanted
    assert found > tried / 20


def test_the_first_pattern_counts() -> None:
    rng = random.Random(TEST_DAY)
    parts = ["q", "k.v", "kxv", "0", "a", "(q|k.v)", r"\d+", "."]
    for _ in range(effort(300, 5_000)):
        keys = [".".join(rng.choices(parts, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 12))]
        patterns = Patterns({key: number for number, key in enumerate(dict.fromkeys(keys))}, Budget("a"))
        for name in (".".join(rng.choices(["q", "k", "v", "kxv", "0", "a"], k=rng.randint(1, 4))) for _ in range(6)):
            matching = (n for n, key in enumerate(dict.fromkeys(keys)) if re.match(rf"(.*\.)?({key})$", name))
            assert patterns.of(name, -1) == patterns.of(name, -1) == next(matching, -1), (keys, name)


@pytest.mark.parametrize("text", [r"((\w|\.)+)+!", "(.*a){50}b", "(a?){900}a{900}b", "(a|a|aa)*(a|aa)*b", "(.*)*.*b"])
def test_names_take_as_many_steps_as_they_have_characters(text: str) -> None:
    budget = Budget("a")
    expression = Expression(text, budget)
    for number in range(50):
        assert not expression.matches(f"model.layers.{number}." + "a" * 300)
    assert MAX_STEPS - budget.left < MAX_STEPS / 2


def test_a_pattern_for_each_matrix_is_found_at_once() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{one}.up_proj" for layer in range(48) for one in range(128)]
    budget = Budget("a")
    patterns = Patterns({name: number for number, name in enumerate(names)}, budget)
    assert [patterns.of(name, -1) for name in names] == list(range(len(names)))
    assert MAX_STEPS - budget.left < 10 * len(names)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(", "no regular expression"),
        ("((a{60}){60}){60}", "more than 4,096 instructions"),
        ("a{5000}", "more than 4,096 instructions"),
        ("(" * 5000, "5,000 characters.*4,096"),
        ("(" * 900 + "a" + ")" * 900, "no regular expression"),
        ("(?=a)b", "looks ahead"),
        (r"(a)\1", "refers to a group"),
        ("a*+", "never gives back"),
        ("(?>a)", "never gives back"),
        ("(?i:a)", "sets a flag"),
        (r"\x41", "by its number"),
    ],
)
def test_what_is_not_matched_is_refused(text: str, said: str) -> None:
    with pytest.raises(ExpressionError, match=said):
        Expression(text, Budget("a"))
