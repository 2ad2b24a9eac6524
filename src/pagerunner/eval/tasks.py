"""Seeded generators of evaluation examples: recall, addition, sorting and short stories.

Every prompt is the full text to encode with special tokens parsed and nothing added automatically. The
expected continuation is ``Example.answer`` followed by the end-of-turn token. Examples belong to one of two
splits by a checksum of the question, so a model trained on the ``train`` split has never seen an ``eval`` one.
"""

from __future__ import annotations

import functools
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BOS = "<|bos|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (PAD, BOS, END_OF_TEXT, SYSTEM, USER, ASSISTANT, END)

TRAIN = "train"
EVAL = "eval"
RECALL_DISTANCES: tuple[int, ...] = (64, 256, 512, 1024)
RECALL_FACTS = 12


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HE = ("Tom", "Ben", "Max", "Sam", "Leo", "Finn", "Otto", "Paul")
SHE = ("Anna", "Mia", "Lily", "Rosa", "Nora", "Emma", "Ida", "Clara")
NAMES = HE + SHE
ANIMALS = _words(
    "fox owl hen cat dog pig cow goat bear wolf duck frog mouse horse sheep crow "
    "swan deer mole seal crab toad hare lion tiger snake goose robin otter camel eagle whale"
)
OBJECTS = _words(
    "lamp rope key drum bell cup kite map ring book coin hat clock chair spoon basket "
    "hammer candle mirror ladder pillow bottle ribbon button shovel bucket blanket needle feather lantern "
    "whistle compass box stone flute brush broom plate jar net wheel scarf mask knife tent boat flag nail"
)
PLACES = _words("garden kitchen barn market school forest library cellar park mill harbor castle cave tower")
COLORS = _words("red blue green yellow white black brown pink")
FOODS = _words("pear plum cake cookie carrot peach lemon melon")
WEATHER = _words("sunny cold rainy windy warm cloudy")
DAYTIMES = _words("morning day evening")
FEELINGS = _words("happy sad tired proud brave calm")
REASONS = (
    ("hungry", "ate some bread"),
    ("thirsty", "drank some water"),
    ("tired", "took a nap"),
    ("cold", "put on a coat"),
    ("bored", "read a story"),
    ("dirty", "took a bath"),
    ("lost", "asked for help"),
    ("lonely", "called a friend"),
)

FILLER_SUBJECTS = _words("river wind road hill sky rain field night sun moon snow air water grass sea light")
FILLER_ADJECTIVES = _words("quiet old long soft bright slow deep cool gentle dark")
_FILLER_VERBS = _words("was seemed stayed looked became")
_FILLER_TAILS = (
    "all day", "for a while", "that year", "at last", "in the valley", "by the bridge", "over the town",
    "near the village", "as before", "once again",
)  # fmt: skip
_TOKEN = re.compile(r"<\|\w+\|>| (?=\d)|\d|[^\W\d]+|[^\w\s]|\n")


@dataclass(frozen=True)
class Example:
    """One prompt with its only right answer; ``distance`` is the filler length in tokens (recall only)."""

    task: str
    prompt: str
    answer: str
    distance: int | None = None


@dataclass(frozen=True)
class Turn:
    """One user message and its reply."""

    user: str
    assistant: str


def approximate_tokens(text: str) -> int:
    """Count words, digits, punctuation marks and special tokens: the demo tokenizer's length for task text."""
    return len(_TOKEN.findall(text))


def chat_prompt(user: str) -> str:
    """Return the full prompt text for a single user message."""
    return f"{BOS}{USER}{user}{END}{ASSISTANT}"


def split_of(text: str) -> str:
    """Return the split (``train`` or ``eval``) that a question text belongs to."""
    return EVAL if zlib.crc32(text.encode()) % 8 == 0 else TRAIN


def filler_sentence(rng: random.Random) -> str:
    """Return a sentence that carries no fact any question asks about."""
    subject = rng.choice(FILLER_SUBJECTS)
    verb = rng.choice(_FILLER_VERBS)
    adjective = rng.choice(FILLER_ADJECTIVES)
    roll = rng.random()
    if roll < 0.4:
        return f"The {subject} {verb} {adjective}."
    if roll < 0.8:
        return f"The {subject} {verb} {adjective} {rng.choice(_FILLER_TAILS)}."
    other = rng.choice(FILLER_ADJECTIVES)
    if other == adjective:
        return f"The {subject} {verb} very {adjective} {rng.choice(_FILLER_TAILS)}."
    return f"The {subject} {verb} {adjective} and {other} {rng.choice(_FILLER_TAILS)}."


def filler_text(rng: random.Random, tokens: int) -> str:
    """Return filler sentences of about ``tokens`` tokens (at most one sentence over)."""
    sentences: list[str] = []
    length = 0
    while length < tokens:
        sentence = filler_sentence(rng)
        sentences.append(sentence)
        length += approximate_tokens(sentence)
    return " ".join(sentences)


def recall_turn(rng: random.Random, distance: int, facts: int = RECALL_FACTS) -> Turn:
    """Return facts, then ``distance`` tokens of filler, then a question that needs every fact.

    A filler sentence follows each fact, so that the facts spread over about one 16-token page each.
    """
    keys = rng.sample(ANIMALS, facts)
    values = rng.sample(OBJECTS, facts)
    lines = [f"The {key} has the {value}. {filler_sentence(rng)}" for key, value in zip(keys, values, strict=True)]
    if distance > 0:
        lines.append(filler_text(rng, distance))
    pairs = list(zip(keys, values, strict=True))
    rng.shuffle(pairs)
    lines.append(recall_question([key for key, _ in pairs]))
    return Turn(" ".join(lines), recall_answer(pairs))


def recall_question(keys: Sequence[str]) -> str:
    """Return the question that asks what each of ``keys`` has, in this order."""
    return f"What do they have: {', '.join(keys)}?"


def recall_answer(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the full answer for (key, value) pairs in the order asked."""
    return f"They have: {', '.join(f'{key} {value}' for key, value in pairs)}."


def addition_turn(rng: random.Random) -> Turn:
    """Return a sum of two numbers below 1000."""
    a, b = (rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 3))) for _ in range(2))
    form = rng.choice(("What is {} + {}?", "{} + {}", "{} + {} =", "Add {} + {}.", "How much is {} + {}?"))
    return Turn(form.format(a, b), f"{a} + {b} = {a + b}")


def sorting_turn(rng: random.Random) -> Turn:
    """Return a list of 4 to 8 distinct two-digit numbers to sort."""
    numbers = rng.sample(range(10, 100), rng.randint(4, 8))
    form = rng.choice(("Sort these numbers: {}.", "Sort {}.", "Put these numbers in order: {}.", "Sort: {}"))
    return Turn(form.format(", ".join(map(str, numbers))), ", ".join(map(str, sorted(numbers))))


def pronouns(name: str) -> tuple[str, str]:
    """Return the subject and object pronoun for a name of the lexicon."""
    return ("he", "him") if name in HE else ("she", "her")


def _trip_story(rng: random.Random) -> tuple[str, list[Turn]]:
    """A trip with a find, a meeting and a gift; each sentence answers one or more questions."""
    name, other = rng.sample(NAMES, 2)
    he, him = pronouns(name)
    place, near = rng.sample(PLACES, 2)
    weather, daytime = rng.choice(WEATHER), rng.choice(DAYTIMES)
    color, thing, food = rng.choice(COLORS), rng.choice(OBJECTS), rng.choice(FOODS)
    feeling = rng.choice(FEELINGS)
    verb, base = rng.choice((("found", "find"), ("saw", "see"), ("bought", "buy")))
    story = [f"One {weather} {daytime}, {name} went to the {place}."]
    turns = [
        Turn(f"Where did {name} go?", f"{name} went to the {place}."),
        Turn(f"Who went to the {place}?", f"{name} went to the {place}."),
        Turn("How was the weather?", f"It was a {weather} {daytime}."),
    ]
    parts: list[tuple[str, list[Turn]]] = [
        (
            f"{he.title()} {verb} a {color} {thing}.",
            [
                Turn(f"What did {name} {base}?", f"{name} {verb} a {color} {thing}."),
                Turn(f"What color was the {thing}?", f"The {thing} was {color}."),
            ],
        ),
        (
            f"Then {he} met {other} near the {near}. {other} gave {him} a {food}.",
            [
                Turn(f"Who did {name} meet?", f"{name} met {other}."),
                Turn(f"Where did {name} meet {other}?", f"{name} met {other} near the {near}."),
                Turn(f"What did {other} give {name}?", f"{other} gave {name} a {food}."),
            ],
        ),
        (
            f"In the end, {name} was {feeling} and went home.",
            [Turn(f"How was {name} in the end?", f"{name} was {feeling}.")],
        ),
    ]
    for sentence, questions in parts:
        if rng.random() < 0.8:
            story.append(sentence)
            turns.extend(questions)
    return " ".join(story), turns


def _moving_story(rng: random.Random) -> tuple[str, list[Turn]]:
    """People walk between places; the last place counts."""
    people = rng.sample(NAMES, rng.randint(2, 3))
    where = {name: rng.choice(PLACES) for name in people}
    story = [f"{name} is in the {place}." for name, place in where.items()]
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(people)
        where[name] = rng.choice([place for place in PLACES if place != where[name]])
        story.append(f"{name} {rng.choice(('walks', 'runs', 'goes'))} to the {where[name]}.")
    return " ".join(story), [Turn(f"Where is {name}?", f"{name} is in the {place}.") for name, place in where.items()]


def giving_story(rng: random.Random) -> tuple[str, list[Turn]]:
    """Things change hands; the last owner counts."""
    people = rng.sample(NAMES, 3)
    things = rng.sample(OBJECTS, 2)
    colors = rng.sample(COLORS, 2)
    owner = dict(zip(things, people, strict=False))
    story = [f"{owner[thing]} has a {color} {thing}." for thing, color in zip(things, colors, strict=True)]
    for _ in range(rng.randint(1, 2)):
        thing = rng.choice(things)
        to = rng.choice([name for name in people if name != owner[thing]])
        story.append(f"{owner[thing]} gives the {thing} to {to}.")
        owner[thing] = to
    turns = [Turn(f"Who has the {thing}?", f"{owner[thing]} has the {thing}.") for thing in things]
    turns += [Turn(f"What color is the {t}?", f"The {t} is {c}.") for t, c in zip(things, colors, strict=True)]
    return " ".join(story), turns


def _reason_story(rng: random.Random) -> tuple[str, list[Turn]]:
    """Each person has a state that decides what the person does."""
    story: list[str] = []
    turns: list[Turn] = []
    for name, (state, action) in zip(rng.sample(NAMES, 2), rng.sample(REASONS, 2), strict=True):
        he, _ = pronouns(name)
        story.append(f"{name} was {state}, so {he} {action}.")
        turns.append(Turn(f"Why did {name} do that?", f"{name} was {state}."))
        turns.append(Turn(f"What did {name} do?", f"{name} {action}."))
    return " ".join(story), turns


STORIES = (_trip_story, _moving_story, giving_story, _reason_story)


def story_with_questions(rng: random.Random) -> tuple[str, list[Turn]]:
    """Return a short story and questions that it answers."""
    return rng.choice(STORIES)(rng)


def sentences_turn(rng: random.Random) -> Turn:
    """Return a short story with one question."""
    story, turns = story_with_questions(rng)
    turn = rng.choice(turns)
    return Turn(f"{story} {turn.user}", turn.assistant)


def in_split(draw: Callable[[], Turn], split: str) -> Turn:
    """Draw until the turn belongs to ``split``."""
    while True:
        turn = draw()
        if split_of(turn.user) == split:
            return turn


TASKS: dict[str, Callable[..., Turn]] = {
    "recall": recall_turn,
    "addition": addition_turn,
    "sorting": sorting_turn,
    "sentences": sentences_turn,
}


def make_examples(task: str, count: int, seed: int, distance: int | None = None) -> list[Example]:
    """Return ``count`` examples of ``task``, the same for the same arguments.

    ``distance`` is for recall only; without it, one of ``RECALL_DISTANCES`` is drawn for each example.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known tasks: {', '.join(TASKS)}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    if distance is not None and task != "recall":
        raise ValueError(f"task {task!r} takes no distance")
    if distance is not None and distance < 0:
        raise ValueError(f"distance must not be negative, got {distance}")
    rng = random.Random(f"{EVAL}/{task}/{seed}/{distance}")
    examples = []
    for _ in range(count):
        tokens = rng.choice(RECALL_DISTANCES) if task == "recall" and distance is None else distance
        arguments = (rng,) if tokens is None else (rng, tokens)
        turn = in_split(functools.partial(TASKS[task], *arguments), EVAL)
        examples.append(Example(task, chat_prompt(turn.user), turn.assistant, tokens))
    return examples
