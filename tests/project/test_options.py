"""Every verb stays under its number of options, and every engine argument has a flag somewhere."""

from __future__ import annotations

import importlib

import msgspec
import pytest

from pagerunner.cli.main import VERBS
from pagerunner.cli.options import ENGINE_OPTIONS, NO_FLAG, Parser, flag_of
from pagerunner.config import EngineArgs

MAX_OPTIONS = 75


def parser_of(verb):
    return importlib.import_module(VERBS[verb][0]).build_parser()


@pytest.mark.parametrize("verb", VERBS)
def test_verb_has_fewer_options_than_the_limit(verb):
    assert 0 < len(parser_of(verb).option_names()) < MAX_OPTIONS


def test_options_are_counted():
    parser = Parser("x", "y")
    for index in range(MAX_OPTIONS):
        parser.add_argument(f"--option-{index}")
    assert len(parser.option_names()) == MAX_OPTIONS


def test_every_engine_argument_has_a_flag_and_a_help_text():
    fields = {field.name for field in msgspec.structs.fields(EngineArgs)} - NO_FLAG
    flags = {flag for verb in VERBS for flag in parser_of(verb).option_names()}
    assert {flag_of(name) for name in fields} <= flags
    assert sorted(name for options in ENGINE_OPTIONS.values() for name in options) == sorted(fields)
