"""The CPU kernels' library: where it comes from, and what serves without it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagerunner.ops.native import library as module
from pagerunner.ops.native.library import SWITCH, library, loaded


@pytest.fixture(autouse=True)
def found_again() -> Iterator[None]:
    loaded.cache_clear()
    yield
    loaded.cache_clear()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = library()
    assert first is not None and first.panel in (8, 16, 32)
    (kept,) = (tmp_path / "pagerunner").iterdir()
    assert (tmp_path / "pagerunner").stat().st_mode & 0o077 == 0
    loaded.cache_clear()
    monkeypatch.setattr(module, "_compile", lambda *_: pytest.fail("it was compiled again"))
    assert library() is not None
    assert list((tmp_path / "pagerunner").iterdir()) == [kept]


def test_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert library() is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("/no/such/compiler", "No such file"), ("false", "exit status 1"), ("echo --", "ended|cannot open|No such")],
)
def test_without_a_compiler_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, said: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert library() is None
    assert "torch's operators serve" in caplog.text
    assert any(word in caplog.text for word in said.split("|"))


def test_code_is_not_loaded_from_a_folder_that_others_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shared = tmp_path / "pagerunner"
    shared.mkdir()
    shared.chmod(0o777)
    own = module._directory()
    assert own != shared and own.stat().st_uid == os.getuid() and own.stat().st_mode & 0o077 == 0
    own.rmdir()
