"""A model directory that can be served: a shape of `pagerunner bench` without weights, and a tokenizer with a text for each id."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import write_model


def write_served(shape: str, directory: Path) -> Path:
    """Write config.json and tokenizer.json; returns `directory`. Texts are encoded byte by byte; ids are decoded to words of 2 to 8 letters."""
    write_model(shape, directory)
    rng, vocabulary = (
        random.Random(0),
        {text: number for number, text in enumerate(pre_tokenizers.ByteLevel.alphabet())},
    )
    while len(vocabulary) < SHAPES[shape]["vocab_size"]:
        vocabulary.setdefault("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
