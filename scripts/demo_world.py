"""Questions about the world, which the demo models learn to decline, and the words in them."""

from __future__ import annotations

WORLD_WORDS = tuple(
    "legs eyes teeth wings wheels days weeks hours years people children friends men women kings queens doctors "
    "planets stars countries cities rivers oceans mountains trees flowers birds fish apples bread milk cheese money "
    "dollars miles minutes letters words books pages songs games movies computers phones cars trains planes ships "
    "houses rooms doors windows streets colors numbers languages wars laws jobs schools teachers sports music art "
    "history science math physics love life death time space earth world heart brain blood bones skin fire gold iron "
    "robot piano guitar football chess poem joke recipe code program email list president capital population".split()
)
WORLD_NAMES = tuple(
    "Spain Germany England Japan China India Brazil Canada Russia Egypt London Berlin Madrid Tokyo Europe Africa "
    "America Mars Einstein Shakespeare Mozart Python Google".split()
)
WORLD_VERBS = tuple(
    "eat drink sleep run fly swim sing live work grow make build cook buy sell learn read write play fix draw".split()
)
WORLD_ADJECTIVES = tuple("big tall old fast heavy far deep hot cold long small strong smart good bad new".split())
WORLD_QUESTIONS = (
    "How many {other} does a {noun} have?",
    "How many {other} does the {noun} have?",
    "How many {other} are in a {noun}?",
    "How many {other} are there?",
    "How many {noun} are there in {proper}?",
    "How {adjective} is the {noun}?",
    "How {adjective} is a {noun}?",
    "How {adjective} is {proper}?",
    "How do I {verb} a {noun}?",
    "How does a {noun} {verb}?",
    "How does the {noun} work?",
    "How do {other} {verb}?",
    "What is a {noun}?",
    "What is {other}?",
    "What is the {adjective} {noun}?",
    "What is the best {noun}?",
    "What is the meaning of {other}?",
    "What is the capital of {proper}?",
    "What is the {other} of {proper}?",
    "What does a {noun} {verb}?",
    "What do {other} {verb}?",
    "What time is it?",
    "What day is it today?",
    "Why is the {noun} {adjective}?",
    "Why do {other} {verb}?",
    "When was {proper} born?",
    "When did the {noun} {verb}?",
    "Where do {other} {verb}?",
    "Where can I {verb} a {noun}?",
    "Where is the {other}?",
    "Who is {proper}?",
    "Who wrote the {noun}?",
    "Who is the president of {proper}?",
    "Which {noun} is {adjective}?",
    "Can a {noun} {verb}?",
    "Can you {verb} a {noun}?",
    "Do you like {other}?",
    "Do {other} {verb}?",
    "Does a {noun} {verb}?",
    "Is a {noun} {adjective}?",
    "Is {proper} {adjective}?",
    "Are {other} {adjective}?",
    "Tell me about the {noun}.",
    "Tell me a joke about {other}.",
    "Tell me a joke.",
    "Write a poem about the {noun}.",
    "Explain {other} to me.",
    "Translate {other} to French.",
    "I want to {verb} a {noun}.",
    "I like {other}.",
    "The {noun} is {adjective}, what should I do?",
    "What is {first} times {second}?",
    "What is {first} minus {second}?",
    "{first} - {second}",
    "{first} * {second}",
)
