"""Patterns of a checkpoint's config: as Python matches them, and in little time whatever they are."""

from __future__ import annotations

import random
import re
import time

import pytest

from pagerunner.quant.patterns import Pattern

NAME = "model.layers.12.mlp.experts.7.gate_proj"


@pytest.mark.parametrize(
    "text",
    ["(([a-z0-9._]+)+)+!", "(.*.*.*)*x!", "(a|a)*b", ".*" * 30 + "!", "((a?){500}){500}!", "(?:(?:.?){999}){999}!"]
    + ["(?=(.+)+!)", "(?<!(.{2}){3})(.*)*!", "(?:.|..)" * 40 + "!", ".?" * 40 + "!", "(?:a|ab?|a?)" * 40 + "!"]
    + ["(?:a(?:a)?)?" * 40 + "!", "(?:^){4000000000}!", "(?:(?:(?:.{1,99}){1,99}){1,99}){1,99}!"],
)  # fmt: skip
def test_no_pattern_takes_long(text: str) -> None:
    pattern = Pattern(text)
    started = time.process_time()
    assert not pattern.match("a" * 100)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "text",
    ["(", "*", "[", "a{99999999999}", "(?P<n", "x" * 3_000, r"(.*)*(a)\1", "(?i)(.*)*b", "(.*+)*a"]
    + [r"()\1{4000000000}", "(?:){4000000000}+", "(?:" * 40 + "." + "){1,2}" * 40, "(?=.*(?=.*(?=.*(?=.*!))))"],
)
def test_what_is_no_pattern_or_can_not_be_matched_fast_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Pattern(text)


def random_pattern(draw: random.Random, depth: int = 3) -> str:
    """A random pattern over a, b, and dots."""
    if depth == 0:
        return draw.choice(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", r"\b", "$", "^", r"[a-b.]"])
    parts = [random_pattern(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    kind = draw.randrange(6)
    if kind == 0:
        return f"({'|'.join(parts)})"
    if kind == 1:
        return f"(?{draw.choice(['=', '!'])}{''.join(parts)})"
    joined = "".join(parts)
    return f"(?:{joined}){draw.choice(['*', '+', '?', '*?', '{2}', '{1,2}', '{2,}', ''])}"


def test_places_are_those_of_pythons_matcher() -> None:
    draw, careful = random.Random(3), 0
    for _ in range(1_500):
        text = "".join(random_pattern(draw) for _ in range(2))
        try:
            pattern = Pattern(text)
        except ValueError:
            continue
        careful += not pattern._quick
        for _ in range(4):
            name = "".join(draw.choice("ab.1") for _ in range(draw.randint(0, 7)))
            assert pattern.match(name) is (re.match(text, name) is not None), (text, name)
    assert careful > 300


def test_published_patterns_are_matched_by_python() -> None:
    for text in (
        r".*mlp\.gate$",
        r".*\.(?:1[89]|2\d)\..*gate.*",
        "(?!.*experts).*",
        r"model\.layers\.\d+\.mlp\.experts\.\d+\.gate",
        ".*(q|k|v)_proj.*",
        ".*(gate|up|down)_proj.*",
        r".*\.(?:1[0-9]|20)\..*",
    ):
        pattern = Pattern(text)
        assert pattern._quick is (text.count("*") < 3), text
        assert pattern.match(NAME) is (re.match(text, NAME) is not None)
