"""The task generators: deterministic, disjoint from training, with right answers."""

from __future__ import annotations

import random
import re

import pytest

import demo_corpus as corpus
from pagerunner.eval.tasks import (
    ANIMALS,
    ASSISTANT,
    BOS,
    COLORS,
    END,
    EVAL,
    OBJECTS,
    RECALL_DISTANCES,
    RECALL_FACTS,
    TASKS,
    TRAIN,
    USER,
    approximate_tokens,
    chat_prompt,
    make_examples,
    split_of,
)


def user_text(prompt: str) -> str:
    match = re.fullmatch(re.escape(BOS + USER) + "(.*)" + re.escape(END + ASSISTANT), prompt, re.DOTALL)
    assert match is not None
    return match.group(1)


@pytest.mark.parametrize("task", TASKS)
def test_same_arguments_give_same_examples(task: str) -> None:
    first = make_examples(task, 20, 3)
    assert first == make_examples(task, 20, 3)
    assert first[:5] == make_examples(task, 5, 3)
    assert first != make_examples(task, 20, 4)
    assert {example.task for example in first} == {task}


@pytest.mark.parametrize("task", TASKS)
def test_examples_belong_to_the_eval_split(task: str) -> None:
    for example in make_examples(task, 30, 0):
        assert split_of(user_text(example.prompt)) == EVAL
        assert example.prompt == chat_prompt(user_text(example.prompt))


def test_training_documents_hold_no_eval_question() -> None:
    rng = random.Random(0)
    questions = 0
    for _ in range(1500):
        document = corpus.training_document(rng, rng.choice((96, 96, 96, 320, 768)))
        for text in re.findall(re.escape(USER) + "(.*?)" + re.escape(END), "".join(s.text for s in document)):
            is_task = text.startswith(("Sort", "Put these")) or "+" in text or text.count(".") >= 2
            if is_task and text.endswith(("?", ".", "=")) and re.search(r"\?$|\d", text):
                questions += 1
                assert split_of(text) == TRAIN, text
    assert questions > 500


def test_training_documents_fit() -> None:
    rng = random.Random(1)
    for budget in (96, 320, 1408):
        for _ in range(20):
            document = corpus.training_document(rng, budget)
            assert any(segment.target for segment in document)
            assert sum(approximate_tokens(segment.text) for segment in document) <= budget + 32


def test_sums_are_sums() -> None:
    for example in make_examples("addition", 200, 0):
        question = user_text(example.prompt)
        a, b = map(int, re.findall(r"\d+", question))
        assert example.answer == f"{a} + {b} = {a + b}"


def test_lists_are_sorted() -> None:
    for example in make_examples("sorting", 200, 0):
        numbers = [int(x) for x in re.findall(r"\d+", user_text(example.prompt))]
        assert example.answer == ", ".join(map(str, sorted(numbers)))
        assert len(set(numbers)) == len(numbers) >= 4


@pytest.mark.parametrize("distance", RECALL_DISTANCES)
def test_recall_answers_are_facts_and_distances_hold(distance: int) -> None:
    for example in make_examples("recall", 20, 0, distance):
        assert example.distance == distance
        text = user_text(example.prompt)
        facts = dict(re.findall(r"The (\w+) has the (\w+)\.", text))
        assert len(facts) == RECALL_FACTS
        assert set(facts) <= set(ANIMALS)
        assert set(facts.values()) <= set(OBJECTS)
        asked = text[text.rindex(":") + 2 : -1].split(", ")
        assert sorted(asked) == sorted(facts)
        assert example.answer == "They have: " + ", ".join(f"{key} {facts[key]}" for key in asked) + "."
        last = max(match.end() for match in re.finditer(r"has the \w+\.", text))
        filler = text[last : text.index("What do they have")]
        assert distance <= approximate_tokens(filler) <= distance + 32
        first = text[: text.index("has the")]
        spread = approximate_tokens(text[:last]) - approximate_tokens(first)
        assert spread >= 8 * 16, "the facts should spread over at least eight 16-token pages"


def test_recall_without_a_distance_mixes_all() -> None:
    assert {example.distance for example in make_examples("recall", 60, 0)} == set(RECALL_DISTANCES)


def test_moving_stories_answer_with_the_last_place() -> None:
    checked = 0
    for example in make_examples("sentences", 400, 0):
        text = user_text(example.prompt)
        asked = re.search(r"Where is (\w+)\?$", text)
        if asked is None:
            continue
        name = asked.group(1)
        places = re.findall(rf"{name} (?:is in|walks to|runs to|goes to) the (\w+)\.", text)
        assert example.answer == f"{name} is in the {places[-1]}."
        checked += 1
    assert checked > 30


def test_giving_stories_answer_with_the_last_owner() -> None:
    checked = 0
    for example in make_examples("sentences", 400, 0):
        text = user_text(example.prompt)
        asked = re.search(r"Who has the (\w+)\?$", text)
        if asked is None:
            continue
        thing = asked.group(1)
        owners = re.findall(rf"(\w+) has a \w+ {thing}\.", text) + re.findall(rf"gives the {thing} to (\w+)\.", text)
        assert example.answer == f"{owners[-1]} has the {thing}."
        checked += 1
    assert checked > 20


def test_colors_are_those_of_the_thing_asked_about() -> None:
    choices = 0
    for example in make_examples("sentences", 400, 0):
        text = user_text(example.prompt)
        asked = re.search(r"What color (is|was) the (\w+)\?$", text)
        if asked is None:
            continue
        verb, thing = asked.groups()
        colors = re.findall(rf" a (\w+) {thing}\.", text)
        assert len(colors) == 1
        assert example.answer == f"The {thing} {verb} {colors[0]}."
        choices += sum(f" {color} " in text for color in COLORS) == 2
    assert choices > 20, "questions that choose between two colors belong to the task"


def test_color_lessons_answer_with_the_word_before_the_thing() -> None:
    rng = random.Random(0)
    for _ in range(200):
        turn = corpus.colors_turn(rng)
        colors = {thing: color for color, thing in re.findall(r" has a (\w+) (\w+)\.", turn.user)}
        answers = dict(re.findall(r"The (\w+) is (\w+)\.", turn.assistant))
        assert answers and answers.items() <= colors.items()
        assert all(thing in turn.user[turn.user.index("What color") :] for thing in answers)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="recall, addition"):
        make_examples("poetry", 1, 0)
    with pytest.raises(ValueError, match="no distance"):
        make_examples("sorting", 1, 0, distance=64)
    with pytest.raises(ValueError, match="negative"):
        make_examples("recall", 1, 0, distance=-1)
    with pytest.raises(ValueError, match="count"):
        make_examples("recall", -1, 0)
