"""The CPU kernels' library: where it comes from, and what serves without it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.compiler import needs_compiler
from helpers.programs import run_python
from pagerunner.ops.native import library as module
from pagerunner.ops.native.library import SWITCH, library, loaded

STUB = """
long pagerunner_threads(const char *commands, long bytes, long most) { return most; }
long pagerunner_bytes(long kind) { return kind; }
long pagerunner_scratch(const char *commands, long bytes, long threads) { return 0; }
long pagerunner_run(const char *commands, long bytes, float *scratch, long threads) { return 0; }
void pagerunner_suffix_extend(void) {}
long pagerunner_suffix_draft(void) { return 0; }
int pagerunner_init(void *parallel, void *thread, void *threads) { return 8; }
"""


def stub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Compile a library that computes nothing: the kernels themselves take a second, and these tests are about files."""
    source = folder / "stub.c"
    source.write_text(STUB)
    monkeypatch.setattr(module, "SOURCES", (str(source),))


def fast(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Compile a stub, into a folder in this one."""
    folder.mkdir(exist_ok=True)
    stub(monkeypatch, folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(autouse=True)
def found_again() -> Iterator[None]:
    loaded.cache_clear()
    yield
    loaded.cache_clear()


@needs_compiler
def test_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch, tmp_path)
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


@pytest.mark.parametrize("compiler", ['gcc "x', "gcc 'y"])
def test_a_compiler_that_is_no_command_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert library() is None
    assert "torch's operators serve" in caplog.text and f"CC is {compiler!r}" in caplog.text


@needs_compiler
@pytest.mark.parametrize("left", [0, 20, 4096, -1])
def test_a_damaged_library_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stub(monkeypatch, tmp_path)
    monkeypatch.setattr(module, "Library", lambda path: path)  # to map a damaged file could end the tests
    kept = module._found_or_made()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:left])
    assert module._found_or_made() == kept
    assert module._is_whole(kept) and len(kept.read_bytes()) == len(whole)


@needs_compiler
def test_a_cache_whose_files_cannot_be_run_is_not_compiled_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def mapped(path: Path) -> Path:
        if path.is_relative_to(tmp_path / "cache"):
            raise OSError("failed to map segment from shared object")
        return path

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stub(monkeypatch, tmp_path)
    monkeypatch.setattr(module, "Library", mapped)
    compiled = module._compile
    monkeypatch.setattr(module, "_compile", lambda *given: (made.append(given[2]), compiled(*given)))
    first = loaded()
    loaded.cache_clear()
    assert loaded() == first == made[1] and first.parent == tmp_path / f"pagerunner-{os.getuid()}"
    assert len(made) == 2


def test_a_user_without_a_home_has_one_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert module._cache() is None
    own = module._temporary()
    assert own is not None and own.stat().st_mode & 0o077 == 0
    assert module._temporary() == own and list(tmp_path.iterdir()) == [own]


def test_code_is_not_loaded_from_a_folder_that_others_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, found in (("pagerunner", module._cache), (f"pagerunner-{os.getuid()}", module._temporary)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
        assert found() is None


def test_a_link_in_the_temporary_directory_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / f"pagerunner-{os.getuid()}").symlink_to(tmp_path / "other")
    assert module._temporary() is None


@needs_compiler
def test_without_a_folder_to_keep_it_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_cache", lambda: None)
    monkeypatch.setattr(module, "_temporary", lambda: None)
    stub(monkeypatch, tmp_path)
    assert library() is not None
    assert [left.name for left in tmp_path.iterdir()] == ["stub.c"]


@needs_compiler
def test_old_libraries_leave_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch, tmp_path)
    folder = tmp_path / "pagerunner"
    folder.mkdir(mode=0o700)
    for age in range(20):
        old = folder / f"kernels-{age:032x}.so"
        old.write_bytes(b"")
        os.utime(old, (10_000 - age, 10_000 - age))
    (folder / "notes.txt").write_text("mine")
    assert library() is not None
    left = sorted(file.name for file in folder.glob("kernels-*.so"))
    assert len(left) == module.KEPT
    assert [int(name[8:-3], 16) for name in left if int(name[8:-3], 16) < 20] == list(range(module.KEPT - 1))
    assert (folder / "notes.txt").exists()


@needs_compiler
def test_a_library_in_use_counts_as_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch, tmp_path)
    assert library() is not None
    (kept,) = (tmp_path / "pagerunner").iterdir()
    os.utime(kept, (1, 1))
    loaded.cache_clear()
    assert library() is not None
    assert kept.stat().st_mtime > 1


@needs_compiler
def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; import pagerunner.ops.native.library as module; module.FLAGS += ('-O0',); "
        "sys.exit(module.library() is None)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda _: run_python(code, (), environment), range(2)))
    assert [one.returncode for one in both] == [0, 0], both
    (kept,) = (tmp_path / "pagerunner").iterdir()
    assert module._is_whole(kept)


def read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make a folder refuse what a read-only file system refuses; permissions don't bind root."""
    made = tempfile.TemporaryDirectory

    def refuse(*given: object, **options: object) -> object:
        if Path(str(options.get("dir", "/"))).is_relative_to(folder):
            raise OSError(errno.EROFS, "Read-only file system", str(options["dir"]))
        return made(*given, **options)  # type: ignore[call-overload]

    def no_time(target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(target))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(module.os, "utime", no_time)


@needs_compiler
@pytest.mark.parametrize("filled", [True, False])
def test_a_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: bool) -> None:
    """What it holds is used; what it lacks is compiled beside it."""
    fast(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if filled:
        assert library() is not None
    read_only(monkeypatch, tmp_path / "cache")
    loaded.cache_clear()
    assert library() is not None
    assert any(tmp_path.glob(f"pagerunner-{os.getuid()}/*.so")) is not filled


@needs_compiler
def test_a_compiler_may_write_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    script = tmp_path / "cc"
    script.write_text(f'#!/bin/sh\necho "warning: a note"\necho "warning: \377 $(seq 20000)" >&2\nexec {real} "$@"\n')
    script.chmod(0o755)
    fast(monkeypatch, tmp_path)
    monkeypatch.setenv("CC", str(script))
    with caplog.at_level(logging.WARNING):
        assert library() is not None
    assert not caplog.records


def test_without_any_compiler_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert library() is None
    assert "there is no C compiler (cc, gcc or clang); Debian's package is gcc with libc6-dev" in caplog.text
