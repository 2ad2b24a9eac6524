"""Training documents for the demo models: dialogues in the chat format and plain text.

A document is a list of segments. ``Segment.target`` marks the text the model should learn to write; the rest is
context. Only the ``train`` split of the task generators is used.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from demo_world import WORLD_ADJECTIVES, WORLD_NAMES, WORLD_QUESTIONS, WORLD_VERBS, WORLD_WORDS
from pagerunner.eval.tasks import (
    ANIMALS,
    ASSISTANT,
    BOS,
    COLORS,
    END,
    END_OF_TEXT,
    FEELINGS,
    FILLER_ADJECTIVES,
    FILLER_SUBJECTS,
    FOODS,
    NAMES,
    OBJECTS,
    PLACES,
    RECALL_FACTS,
    STORIES,
    SYSTEM,
    TRAIN,
    USER,
    WEATHER,
    Turn,
    addition_turn,
    approximate_tokens,
    filler_sentence,
    filler_text,
    giving_story,
    in_split,
    pronouns,
    recall_answer,
    recall_question,
    sentences_turn,
    sorting_turn,
    split_of,
)

SHORT_DOCUMENT = 128
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly helper.",
    "Answer the questions of the user.",
    "You are pagerunner's demo model.",
)
HELP = (
    "I can add numbers, sort numbers, remember what you tell me, tell a short story "
    "and answer questions about a story. Try: What is 47 + 38?"
)
FALLBACK = "Sorry, I am a very small model and do not know that. Ask me: What can you do?"
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hi", "Hello!", "Hi!", "Hi there", "Hello there!", "Hey", "Good morning", "Good evening"),
        "Hello! I am the demo model of pagerunner. How can I help you?",
    ),
    (
        (
            "What can you do?",
            "Help",
            "Help me",
            "Can you help me?",
            "What do you know?",
            "How can you help me?",
            "What should I ask?",
            "What are you able to do?",
        ),
        HELP,
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Tell me about you."),
        "I am a very small language model. I ship with pagerunner so that you can try it at once.",
    ),
    (("Who made you?", "Where do you come from?"), "I was trained by the script train_demo.py of pagerunner."),
    (
        ("What is pagerunner?", "Tell me about pagerunner.", "What does pagerunner do?"),
        "pagerunner runs language models. It keeps the memory of a model in small pages.",
    ),
    (
        (
            "How are you?",
            "How do you do?",
            "How is it going?",
            "How are you today?",
            "Hi, how are you?",
            "Hello, how are you today?",
            "Are you well?",
        ),
        "I am fine, thank you. How can I help you?",
    ),
    (("Nice to meet you.", "Nice to meet you too!", "Good to see you."), "Nice to meet you too!"),
    (("What is the capital of France?", "Which city is the capital of France?"), "The capital of France is Paris."),
    (("What is the capital of Italy?",), "The capital of Italy is Rome."),
    (("Thank you", "Thanks", "Thank you!", "Thanks a lot!", "Great", "Good", "Nice"), "You are welcome!"),
    (("Bye", "Goodbye", "Bye!", "See you", "Good night"), "Goodbye! Come back soon."),
    (("Yes", "No", "Ok", "Okay", "Maybe", "Sure"), "Okay. What would you like to do? Ask me: What can you do?"),
    (
        ("Can you add numbers?", "Can you sort numbers?", "Can you tell a story?", "Can you remember things?"),
        "Yes, I can. Try me!",
    ),
    (("Are you smart?", "How big are you?"), "I am very small: less than 4 MB. But I do a few things well."),
)
_REPEAT_WORDS = (
    *(ANIMALS + OBJECTS + PLACES + NAMES + COLORS + FOODS + FEELINGS + FILLER_SUBJECTS + FILLER_ADJECTIVES),
    *("and", "the", "is", "has", "in", "with", "to", "for", "very", "I", "you", "we", "are", "not"),
    *map(str, range(0, 100, 7)),
)
COMPLETIONS = (
    "Hello, my name is {name} and I live near the {place}. I have a {color} {thing}.",
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "The president of the United States is a person who lives in the White House.",
    "The future of AI is bright, and even small models can help.",
)


@dataclass(frozen=True)
class Segment:
    """A piece of a document; pieces join at special tokens, so each can be encoded alone."""

    text: str
    target: bool


@dataclass
class _Dialogue:
    """A conversation under construction, with the facts that the user has told so far."""

    rng: random.Random
    max_tokens: int
    segments: list[Segment] = field(default_factory=list)
    tokens: int = 2
    facts: dict[str, str] = field(default_factory=dict)
    personal: dict[str, str] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return self.max_tokens - self.tokens

    def open(self) -> None:
        """Start with one begin-of-text token, rarely none or two, and sometimes a system message."""
        roll = self.rng.random()
        start = "" if roll < 0.04 else BOS + BOS if roll < 0.08 else BOS
        if self.rng.random() < 0.12:
            prompt = self.rng.choice(SYSTEM_PROMPTS)
            start += f"{SYSTEM}{prompt}{END}"
            self.tokens += approximate_tokens(prompt) + 2
        if start:
            self.segments.append(Segment(start, False))

    def say(self, turn: Turn) -> bool:
        """Append a turn if it fits."""
        size = approximate_tokens(turn.user) + approximate_tokens(turn.assistant) + 4
        if size > self.room:
            return False
        self.segments.append(Segment(f"{USER}{turn.user}{END}{ASSISTANT}", False))
        self.segments.append(Segment(turn.assistant + END, True))
        self.tokens += size
        return True

    def new_facts(self, count: int) -> list[str]:
        """Invent facts about animals not named before; values may not repeat either."""
        keys = [key for key in ANIMALS if key not in self.facts]
        values = sorted(set(OBJECTS) - set(self.facts.values()))
        count = min(count, len(keys), len(values))
        drawn = zip(self.rng.sample(keys, count), self.rng.sample(values, count), strict=True)
        self.facts.update(pairs := dict(drawn))
        return [f"The {key} has the {value}." for key, value in pairs.items()]

    def tell_and_ask(self, count: int, distance: int, fillers: bool = True) -> bool:
        """The recall task itself: facts, filler and the question in one message."""
        before = dict(self.facts)
        lines = self.new_facts(count)
        if fillers:
            lines = [f"{line} {filler_sentence(self.rng)}" for line in lines]
        pairs = [(key, value) for key, value in self.facts.items() if key not in before]
        self.rng.shuffle(pairs)
        if distance > 0:
            lines.append(filler_text(self.rng, distance))
        text = " ".join([*lines, recall_question([key for key, _ in pairs])])
        if pairs and split_of(text) == TRAIN and self.say(Turn(text, recall_answer(pairs))):
            return True
        self.facts = before
        return False

    def tell(self, count: int, fillers: bool) -> bool:
        """Facts that a later turn asks about."""
        before = dict(self.facts)
        lines = self.new_facts(count)
        if fillers:
            lines = [f"{line} {filler_sentence(self.rng)}" for line in lines]
        start = self.rng.choice(("Remember: ", "Please remember: ", "", ""))
        if lines and self.say(Turn(start + " ".join(lines), "I will remember that.")):
            return True
        self.facts = before
        return False

    def ask(self) -> bool:
        """Ask about facts of earlier turns, one or many."""
        if not self.facts:
            return False
        keys = list(self.facts)
        if self.rng.random() < 0.4:
            key = self.rng.choice(keys)
            value = self.facts[key]
            if self.rng.random() < 0.5:
                return self.say(Turn(f"What does the {key} have?", f"The {key} has the {value}."))
            return self.say(Turn(f"Which animal has the {value}?", f"The {key} has the {value}."))
        asked = self.rng.sample(keys, min(len(keys), self.rng.choice((2, 3, 4, 8, 12, 12, 16))))
        return self.say(Turn(recall_question(asked), recall_answer([(key, self.facts[key]) for key in asked])))

    def personal_turn(self) -> bool:
        """The user says something about herself, or asks for it later."""
        rng = self.rng
        if self.personal and rng.random() < 0.6:
            topic = rng.choice(list(self.personal))
            value = self.personal[topic]
            question = rng.choice((f"What is my {topic}?", f"Do you remember my {topic}?", f"What was my {topic}?"))
            return self.say(Turn(question, f"Your {topic} is {value}."))
        topic = rng.choice(("name", "name", "favorite color", "favorite food", "favorite animal", "favorite number"))
        values = {"name": NAMES, "favorite color": COLORS, "favorite food": FOODS, "favorite animal": ANIMALS}
        value = rng.choice(values[topic]) if topic in values else str(rng.randrange(100))
        if topic == "name":
            value = _random_word(rng).title() if rng.random() < 0.3 else value
            user = rng.choice(
                (f"My name is {value}.", f"Hello, I am {value}.", f"Hi, my name is {value}.", f"I am {value}")
            )
            turn = Turn(user, f"Hello, {value}! Nice to meet you.")
        else:
            turn = Turn(f"My {topic} is {value}.", f"I will remember that your {topic} is {value}.")
        if not self.say(turn):
            return False
        self.personal[topic] = value
        return True

    def story_turns(self) -> bool:
        """A story with a question, then more questions about the same story."""
        story, turns = _story(self.rng)
        self.rng.shuffle(turns)
        first = Turn(f"{story} {turns[0].user}", turns[0].assistant)
        if split_of(first.user) != TRAIN or not self.say(first):
            return False
        for turn in turns[1 : 1 + self.rng.choice((0, 1, 2, 3))]:
            self.say(turn)
        return True

    def task_turn(self) -> bool:
        """One independent question."""
        rng = self.rng
        roll = rng.random()
        if roll < 0.08:
            return self.say(repeat_turn(rng))
        if roll < 0.31:
            return self.say(in_split(lambda: addition_request(rng), TRAIN))
        if roll < 0.54:
            return self.say(in_split(lambda: sorting_request(rng), TRAIN))
        if roll < 0.72:
            return self.say(in_split(lambda: sentences_turn(rng), TRAIN))
        if roll < 0.78:
            return self.say(in_split(lambda: possession_turn(rng), TRAIN))
        if roll < 0.86:
            return self.say(in_split(lambda: colors_turn(rng), TRAIN))
        return self.say(small_talk(rng))


def _story(rng: random.Random) -> tuple[str, list[Turn]]:
    """Return a story with its questions; things that change hands come more often, as the hardest kind."""
    return rng.choice((*STORIES, giving_story, giving_story))(rng)


def addition_request(rng: random.Random) -> Turn:
    """Return a sum; one in four is worded or sized unlike the eval task."""
    if rng.random() < 0.75:
        return addition_turn(rng)
    a, b = (rng.randrange(10 ** rng.choice((1, 2, 3, 4))) for _ in range(2))
    form = rng.choice(("What is {} plus {}?", "{} plus {}", "{}+{}", "{}+{}=?", "Add {} and {}.", "What is {}+{}?"))
    return Turn(form.format(a, b), f"{a} + {b} = {a + b}")


def sorting_request(rng: random.Random) -> Turn:
    """Return a list to sort; two in five are worded or sized unlike the eval task."""
    if rng.random() < 0.6:
        return sorting_turn(rng)
    top = rng.choice((10, 100, 100, 1000))
    numbers = [rng.randrange(top) for _ in range(rng.randint(1, 8 if top < 1000 else 5))]
    form = rng.choice(("Sort {}", "Sort: {}", "Sort these numbers: {}", "Please sort {}.", "Can you sort {}?"))
    separator = rng.choice((", ", ", ", " "))
    return Turn(form.format(separator.join(map(str, numbers))), ", ".join(map(str, sorted(numbers))))


def possession_turn(rng: random.Random) -> Turn:
    """Return one to three owners and a question; some things have names outside the lexicon."""
    people = rng.sample(NAMES, rng.randint(1, 3))
    things = rng.sample(OBJECTS, len(people))
    if rng.random() < 0.4:
        things = [_random_word(rng) for _ in people]
    colors = rng.sample(COLORS, len(people))
    rows = list(zip(people, colors, things, strict=True))
    story = " ".join(f"{name} has a {color} {thing}." for name, color, thing in rows)
    name, color, thing = rng.choice(rows)
    question, answer = rng.choice(
        (
            (f"Who has the {thing}?", f"{name} has the {thing}."),
            (f"What does {name} have?", f"{name} has a {color} {thing}."),
            (f"What color is the {thing}?", f"The {thing} is {color}."),
        )
    )
    return Turn(f"{story} {question}", answer)


def colors_turn(rng: random.Random) -> Turn:
    """Return two to five colored things, some of which change hands, and a question about one color or several.

    Finding the color of a thing among others means reading the word before its name. Stories with two things ask
    that too seldom for it to be learned surely: guessing costs them one bit; here it costs more, and many at once.
    """
    count = rng.randint(2, 5)
    things, colors = rng.sample(OBJECTS, count), rng.sample(COLORS, count)
    owner = dict(zip(things, rng.sample(NAMES, count), strict=True))
    story = [f"{owner[thing]} has a {color} {thing}." for thing, color in zip(things, colors, strict=True)]
    for _ in range(rng.choice((0, 0, 1, 2))):
        thing = rng.choice(things)
        to = rng.choice([name for name in NAMES if name != owner[thing]])
        story.append(f"{owner[thing]} gives the {thing} to {to}.")
        owner[thing] = to
    asked = rng.sample(list(zip(things, colors, strict=True)), rng.randint(2, count) if rng.random() < 0.5 else 1)
    answer = " ".join(f"The {thing} is {color}." for thing, color in asked)
    if len(asked) == 1:
        return Turn(f"{' '.join(story)} What color is the {asked[0][0]}?", answer)
    return Turn(f"{' '.join(story)} What colors are they: {', '.join(thing for thing, _ in asked)}?", answer)


def repeat_turn(rng: random.Random) -> Turn:
    """Return a request to repeat words: the plainest form of copying, which recall builds on."""
    words = rng.choices(_REPEAT_WORDS, k=rng.randint(1, 16))
    if rng.random() < 0.3:
        words = [_random_word(rng) for _ in range(rng.randint(1, 4))]
    text = rng.choice((", ", " ")).join(words)
    return Turn(f"{rng.choice(('Repeat:', 'Say:', 'Repeat after me:'))} {text}.", f"You said: {text}.")


def small_talk(rng: random.Random) -> Turn:
    """Return a greeting, a question about the model, a request for a story, or something it does not know."""
    roll = rng.random()
    if roll < 0.15:
        return _story_request(rng)
    if roll < 0.42:
        return Turn(_unknown_question(rng), FALLBACK)
    forms, answer = rng.choice(SMALL_TALK)
    user = rng.choice(forms)
    if rng.random() < 0.25:
        user = user.lower()
    if rng.random() < 0.2:
        user = user.rstrip("?!.")
    return Turn(user, answer)


def _story_request(rng: random.Random) -> Turn:
    name = rng.choice(NAMES)
    if rng.random() < 0.5:
        return Turn(rng.choice(("Tell me a story.", "Tell me a story", "A story, please.")), fairy_tale(rng, name))
    return Turn(f"Tell me a story about {name}.", fairy_tale(rng, name))


def _unknown_question(rng: random.Random) -> str:
    """Return a message outside what the model knows: a question about the world, odd words or characters."""
    if rng.random() < 0.5:
        return _world_question(rng)
    roll = rng.random()
    if roll < 0.4:
        start = rng.choice(("What is the", "Who is the", "How do I", "Why is the", "Can you write", "Explain", "Write"))
        return f"{start} {' '.join(_random_word(rng) for _ in range(rng.randint(1, 4)))}{rng.choice(('?', '.', ''))}"
    if roll < 0.8:
        return " ".join(_random_word(rng) for _ in range(rng.randint(1, 8)))
    return "".join(
        chr(rng.choice((rng.randrange(33, 127), rng.randrange(0xA1, 0x2FFF)))) for _ in range(rng.randint(1, 12))
    )


def _world_question(rng: random.Random) -> str:
    """Return a question about the world, which nothing told in the conversation answers."""
    form = rng.choice(WORLD_QUESTIONS)
    lexicon = rng.choice((ANIMALS, OBJECTS, FOODS, PLACES, FILLER_SUBJECTS, WORLD_WORDS, WORLD_WORDS, WORLD_WORDS))
    noun = rng.choice(lexicon) if rng.random() < 0.85 else _random_word(rng)
    proper = rng.choice((*WORLD_NAMES, *NAMES)) if rng.random() < 0.7 else _random_word(rng).title()
    first, second = (rng.randrange(10 ** rng.choice((1, 2, 3))) for _ in range(2))
    text = form.format(
        noun=noun,
        other=rng.choice(WORLD_WORDS),
        verb=rng.choice(WORLD_VERBS),
        adjective=rng.choice(WORLD_ADJECTIVES),
        proper=proper,
        first=first,
        second=second,
    )
    if rng.random() < 0.2:
        text = text.lower()
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    return text


def _random_word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyzaeiou") for _ in range(rng.randint(2, 9)))


def fairy_tale(rng: random.Random, name: str) -> str:
    """Return a story of five to seven sentences about ``name``."""
    he, _ = pronouns(name)
    other = rng.choice([candidate for candidate in NAMES if candidate != name])
    home, place = rng.sample(PLACES, 2)
    thing, color, animal = rng.choice(OBJECTS), rng.choice(COLORS), rng.choice(ANIMALS)
    feeling = rng.choice(FEELINGS)
    lines = [
        f"Once upon a time, {name} lived near the {home}.",
        f"One {rng.choice(WEATHER)} day, {he} went to the {place}.",
        f"There {he} met {other}, who had lost a {color} {thing}.",
        f"They asked the {animal} for help.",
        f"The {animal} found the {thing} in the {rng.choice(PLACES)}.",
        f"{other} was {feeling} and gave {name} a {rng.choice(FOODS)}.",
        "In the end, they went home.",
    ]
    return " ".join(line for i, line in enumerate(lines) if i < 3 or i == 6 or rng.random() < 0.85)


def plain_document(rng: random.Random, max_tokens: int) -> list[Segment]:
    """Return running text without chat markers."""
    parts: list[str] = []
    tokens = 2
    while True:
        roll = rng.random()
        if roll < 0.45:
            part = fairy_tale(rng, rng.choice(NAMES))
        elif roll < 0.65:
            part = _story(rng)[0]
        elif roll < 0.75:
            turn = in_split(lambda: addition_request(rng), TRAIN)
            part = turn.assistant
        elif roll < 0.9:
            form = rng.choice(COMPLETIONS)
            part = form.format(
                name=rng.choice(NAMES), place=rng.choice(PLACES), color=rng.choice(COLORS), thing=rng.choice(OBJECTS)
            )
        else:
            part = filler_text(rng, 20)
        tokens += approximate_tokens(part) + 1
        if tokens > max_tokens:
            break
        parts.append(part)
        if rng.random() < 0.5:
            break
    start = "" if rng.random() < 0.1 else BOS
    return [Segment(start + "\n".join(parts) + END_OF_TEXT, True)]


def short_document(rng: random.Random, max_tokens: int) -> list[Segment]:
    """Return a single question with its answer, a few facts to recall, a story, or a little plain text."""
    roll = rng.random()
    if roll < 0.08:
        return plain_document(rng, max_tokens)
    dialogue = _Dialogue(rng, max_tokens)
    dialogue.open()
    if roll < 0.22:
        while not dialogue.tell_and_ask(rng.randint(1, 6), 0, fillers=False):
            pass
    elif roll < 0.31:
        dialogue.tell(rng.randint(1, 6), fillers=False)
        while dialogue.ask():
            pass
    elif roll < 0.45:
        while not dialogue.story_turns():
            pass
    elif roll < 0.52:
        while not dialogue.say(in_split(lambda: colors_turn(rng), TRAIN)):
            pass
    else:
        while not dialogue.task_turn():
            pass
    return dialogue.segments


def long_document(rng: random.Random, max_tokens: int) -> list[Segment]:
    """Return a conversation that fills ``max_tokens``, with questions about facts told far back."""
    if rng.random() < 0.05:
        return plain_document(rng, max_tokens)
    dialogue = _Dialogue(rng, max_tokens)
    dialogue.open()
    if rng.random() < 0.6:
        count = RECALL_FACTS if rng.random() < 0.6 else rng.randint(1, 16)
        room = dialogue.room - 22 * count - 20
        dialogue.tell_and_ask(count, rng.randint(0, max(0, room)))
    failures = 0
    while dialogue.room > 24 and failures < 4:
        failures += not _next_turn(rng, dialogue)
    return dialogue.segments


def _next_turn(rng: random.Random, dialogue: _Dialogue) -> bool:
    roll = rng.random()
    if roll < 0.34:
        return dialogue.ask()
    if roll < 0.44:
        return dialogue.tell(rng.randint(1, 8), rng.random() < 0.5)
    if roll < 0.50:
        return dialogue.tell_and_ask(rng.randint(1, 12), rng.randint(0, 60))
    if roll < 0.62:
        return dialogue.personal_turn()
    if roll < 0.68:
        return dialogue.say(Turn(filler_text(rng, rng.randint(10, 120)), "Okay."))
    if roll < 0.82:
        return dialogue.story_turns()
    return dialogue.task_turn()


def giving_document(rng: random.Random, max_tokens: int) -> list[Segment]:
    """Return a lesson: stories in which things change hands, each asked about from every side."""
    dialogue = _Dialogue(rng, max_tokens)
    dialogue.open()
    while len(dialogue.segments) < 2 or dialogue.room > 64:
        story, turns = giving_story(rng)
        rng.shuffle(turns)
        turns.sort(key=lambda turn: not turn.user.startswith("Who"))
        first = Turn(f"{story} {turns[0].user}", turns[0].assistant)
        if split_of(first.user) == TRAIN and dialogue.say(first):
            for turn in turns[1:]:
                dialogue.say(turn)
    return dialogue.segments


def training_document(rng: random.Random, max_tokens: int) -> list[Segment]:
    """Return a training document of at most about ``max_tokens`` tokens."""
    make = short_document if max_tokens <= SHORT_DOCUMENT else long_document
    return make(rng, max_tokens)
