"""Fingerprints: equal in every process, and another one for whatever changes what a page holds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import msgspec
import pytest

from helpers.patience import LONG
from pagerunner.tiers.fingerprint import fingerprint


@dataclass(frozen=True)
class Config:
    layers: int
    names: frozenset[str] = frozenset({"a", "b", "c"})


class Args(msgspec.Struct):
    dtype: str = "bfloat16"


FACTS = {"model": Config(2), "args": Args(), "pages": [(0, b"\xff", 1.5, None), range(3)]}


def test_a_fingerprint_is_of_the_facts_alone() -> None:
    assert len(fingerprint(FACTS)) == 32
    assert fingerprint(FACTS) == fingerprint(dict(reversed(FACTS.items())))
    others = [
        FACTS | {"model": replace(FACTS["model"], layers=3)},
        FACTS | {"args": Args("float16")},
        FACTS | {"pages": [(0, b"\xff", 1.5, 0), range(3)]},
        FACTS | {"more": None},
        {"model": FACTS["model"]},
        FACTS | {"model": {"layers": 2, "names": {"a", "b", "c"}}},
        FACTS | {"args": ["1"]},
        FACTS | {"args": [1]},
    ]
    assert len({fingerprint(one) for one in (FACTS, *others)}) == 9
    with pytest.raises(TypeError, match="object"):
        fingerprint({"what": object()})  # its text would have an address


def test_a_fingerprint_does_not_depend_on_the_process() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; from pagerunner.tiers.fingerprint import fingerprint as f; print(f({'names': {'a', 'b', 'c', 'd'}}).hex())"
    paths = [path for path in sys.path if path.endswith("src")]
    found = {
        subprocess.run(
            [sys.executable, "-c", code, *paths],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=LONG,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {fingerprint({"names": {"a", "b", "c", "d"}}).hex() + "\n"}
