"""What a process that this package starts gets to know, and when it ends."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.patience import LONG
from helpers.processes import is_alive
from pagerunner import children, limits
from pagerunner.children import (
    command,
    engine_environment,
    exit_reason,
    helper_environment,
    private_directory,
    read_lines,
    remove_directory,
    start,
    start_async,
    with_path,
)

SECRETS = {
    "HF_TOKEN": "hf",
    "OPENAI_API_KEY": "sk",
    "PAGERUNNER_API_KEY": "own",
    "TORCH_HUB_TOKEN": "t",
    "AWS_SECRET_ACCESS_KEY": "aws",
    "DATABASE_PASSWORD": "db",
    "CUDA_PASSWORD": "c",
    "NCCL_FOO_PASS": "n",
    "TORCHX_APIKEY": "x",
    "RUST_KEYS": "k",
    "RAY_AUTH_TOKEN": "r",
}
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_NUM_THREADS": "3",
    "TRITON_CACHE_DIR": "/t",
    "LD_LIBRARY_PATH": "/l",
    "PAGERUNNER_LIMIT_MAX_N": "8",
    "LC_ALL": "C.UTF-8",
    "GCC_EXEC_PREFIX": "/opt/gcc/lib/gcc/",
    "COMPILER_PATH": "/opt/gcc/libexec",
    "NIX_CFLAGS_COMPILE_x86_64_unknown_linux_gnu": "-isystem /nix/store/glibc-dev/include",
    "NIX_LD_LIBRARY_PATH": "/nix/l",
    "RAY_USE_TLS": "1",
    "RAY_TLS_SERVER_KEY": "/tls/key.pem",
    "RAY_AUTH_TOKEN_PATH": "/ray/token",
}
OTHERS = {
    "NIX_CONFIG": "access-tokens = github.com=ghp_1",
    "EDITOR": "vi",
    "CUDAX": "1",
    "MYPATH": "x",
    "SSH_AUTH_SOCK": "/s",
}


def told(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def test_an_engine_gets_settings_of_libraries_and_nobodys_keys() -> None:
    assert engine_environment({**SECRETS, **SETTINGS, **OTHERS}) == SETTINGS


def test_a_helper_gets_the_limits_and_the_language() -> None:
    everything = {**SECRETS, **SETTINGS, **OTHERS, "PATH": "/bin"}
    assert helper_environment(everything) == {"PATH": "/bin", "LC_ALL": "C.UTF-8", "PAGERUNNER_LIMIT_MAX_N": "8"}
    all_limits = {limits.PREFIX + limit.name: "1" for limit in limits.TABLE}
    assert helper_environment(all_limits) == engine_environment(all_limits) == all_limits


def test_a_child_knows_its_first_line_its_parents_path_and_the_named_variables_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**SECRETS, **OTHERS, "NCCL_DEBUG": "WARN"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "json.py").write_text("raise RuntimeError('a module of the directory was imported')")
    monkeypatch.chdir(tmp_path)
    with start("helpers.child", engine_environment(), first_line=b"what to do\n", stdout=subprocess.PIPE) as process:
        found = told(process)
        assert process.stdin is not None
        process.stdin.close()
    assert found["line"] == "what to do"
    assert found["environment"].keys().isdisjoint(SECRETS.keys() | OTHERS.keys())
    assert found["environment"]["NCCL_DEBUG"] == "WARN"
    assert set(map(os.path.abspath, filter(None, sys.path))) <= set(found["path"])
    assert found["session"] == os.getsid(0)
    assert process.returncode == 0


def test_a_child_that_ends_at_once_is_no_error_of_its_parent() -> None:
    with start("helpers.no_such_module", {}, first_line=b"x" * 2**20 + b"\n", stderr=subprocess.DEVNULL) as process:
        assert process.wait(LONG) == 1


def test_a_child_of_an_event_loop_has_pipes_and_a_session_of_its_own() -> None:
    async def talk() -> dict[str, Any]:
        process = await start_async("helpers.child", helper_environment())
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"a line\n")
        found: dict[str, Any] = json.loads(await process.stdout.readline())
        process.stdin.close()
        assert await process.wait() == 0
        return found | {"pid": process.pid}

    found = asyncio.run(talk())
    assert (found["line"], found["session"]) == ("a line", found["pid"])
    assert set(found["environment"]) <= {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH"}


def test_a_child_whose_parent_is_killed_ends() -> None:
    program = textwrap.dedent("""
        import subprocess, time
        from pagerunner.children import engine_environment, start
        child = start("helpers.child", engine_environment(), first_line=b"\\n", stdout=subprocess.PIPE)
        child.stdout.readline()
        print(child.pid, flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], env=with_path(engine_environment()), stdout=-1)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()
    deadline = time.monotonic() + LONG
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(child)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "ended with exit status 3."),
        (-6, "was ended by SIGABRT."),
        (-40, "was ended by signal 40."),
        (-9, "was ended by SIGKILL, perhaps by the kernel"),
    ],
)
def test_the_end_of_a_process_is_a_sentence(status: int, words: str) -> None:
    """Signal 40 is one of the real-time signals, most of which have no name."""
    assert exit_reason("A rank", status).startswith(f"A rank {words}")


def test_a_child_that_a_user_starts_by_hand_says_so() -> None:
    done = subprocess.run(
        command("helpers.child"),
        env=with_path(engine_environment()),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "helpers.child is started by the engine, not by hand." in done.stderr


def test_lines_that_come_together_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a core may be told to a process that hasn't read yet what it is to do."""
    ours, theirs = os.pipe()
    with open(ours, "rb") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(theirs, b"launch\nend 0\nend")
        lines = read_lines("x")
        assert [next(lines), next(lines)] == [b"launch\n", b"end 0\n"]
        os.write(theirs, b" 1\n")
        os.close(theirs)
        assert [*lines] == [b"end 1\n"]


HOLDS = "import time; from pagerunner.children import private_directory; print(private_directory(), flush=True); time.sleep(60)"


@pytest.fixture
def own_tmp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files, in which this process hasn't looked."""
    tmp_path = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children._remove_left_ones.cache_clear()
    return tmp_path


def test_what_a_killed_process_has_left_is_removed_and_what_is_in_use_stays(own_tmp: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        left, used = (Path(one.stdout.readline().strip()) for one in both if one.stdout is not None)
        (left / "core0").touch()
        both[0].kill()
        both[0].wait()
        target, link = own_tmp / "target", own_tmp / "pagerunner-run-link"
        target.mkdir()
        link.symlink_to(target)
        other = own_tmp / "pagerunner-bench-x"
        other.mkdir()
        mine = private_directory()
        assert sorted(own_tmp.iterdir()) == sorted([used, target, link, other, mine])
        remove_directory(mine)
        assert not mine.exists() and mine not in children._LOCKS
    finally:
        for one in both:
            one.kill()
            one.communicate()


def test_what_another_user_has_left_stays(own_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (theirs := own_tmp / "pagerunner-run-theirs").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    remove_directory(private_directory())
    assert theirs.exists()


def test_a_directory_that_another_process_takes_for_a_left_one_is_made_again(
    own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock: the other one has locked it, has removed it, or removes it once it gives way."""
    locked, held = children._locked, []

    def late(directory: Path) -> int:
        held.append(directory)
        if len(held) == 1:
            raise BlockingIOError
        if len(held) == 2:
            directory.rmdir()
        lock = locked(directory)
        if len(held) == 3:
            directory.rmdir()
        return lock

    monkeypatch.setattr(children, "_remove_left_ones", lambda: None)  # it looks into the system's /tmp, too
    monkeypatch.setattr(children, "_locked", late)
    mine = private_directory()
    assert held[3:] == [mine] and mine.exists()
    remove_directory(mine)


def test_without_locks_directories_have_a_name_that_nobody_removes(
    own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    mine = private_directory()
    children._remove_left_ones.cache_clear()
    children._remove_left_ones()
    assert [*own_tmp.iterdir()] == [mine] and not mine.name.startswith("pagerunner-run-")
    remove_directory(mine)
