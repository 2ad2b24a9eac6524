"""Checkpoints that several tests of a module share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


def made_once(factory: pytest.TempPathFactory, makers: Mapping[str, Callable[[Path], Any]]) -> Callable[[str], str]:
    """A function from a name in `makers` to the path of its checkpoint, made at the first call."""
    return functools.cache(lambda name: str(makers[name](factory.mktemp("checkpoints"))))
