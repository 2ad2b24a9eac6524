"""Fingerprints: equal in every process, and another one for whatever changes what a page holds."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from pagerunner.tiers.fingerprint import fingerprint, weights_digest


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
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {fingerprint({"names": {"a", "b", "c", "d"}}).hex() + "\n"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> list[Path]:
    torch.manual_seed(3)
    save_file({"large": torch.randn(100, 100), "norm": torch.ones(64)}, tmp_path / "model-1.safetensors")
    save_file({"other": torch.randn(8, 8)}, tmp_path / "model-2.safetensors")
    return [tmp_path / "model-2.safetensors", tmp_path / "model-1.safetensors"]


def test_every_tensor_counts_in_the_digest_of_weights(checkpoint: list[Path]) -> None:
    before = weights_digest(checkpoint)
    assert before == weights_digest(checkpoint[::-1])
    second, first = checkpoint
    size = first.stat().st_size
    starts = {
        size - 1,
        size - 64 * 4 - 1,
        size - 64 * 4 - 100 * 100 * 4,
    }  # the norm's last byte, the large one's last and first
    for place in starts:
        data = bytearray(first.read_bytes())
        data[place] ^= 1
        first.write_bytes(data)
        assert weights_digest(checkpoint) != before, place
        data[place] ^= 1
        first.write_bytes(data)
    assert weights_digest(checkpoint) == before
    save_file({"other": torch.randn(8, 8)}, second)  # a fine-tune has equal headers
    assert weights_digest(checkpoint) != before


def test_a_file_that_holds_no_weights_has_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for data in (
        b"",
        b"\0" * 8,
        (1 << 62).to_bytes(8, "little"),
        (50).to_bytes(8, "little") + b"{}",
        b"\2" + b"\0" * 7 + b"[]",
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError):
            weights_digest([path])
    with pytest.raises(OSError):
        weights_digest([tmp_path / "missing.safetensors"])
    os.truncate(path, 0)
