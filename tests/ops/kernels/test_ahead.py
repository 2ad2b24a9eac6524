"""Compiling beforehand, for a device that isn't there, by a compiler that only notes what it is asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from helpers.patience import LONG, until
from helpers.processes import is_alive
from pagerunner.ops import ahead as ops
from pagerunner.ops.kernels import ahead, compilers
from pagerunner.ops.kernels.compilers import Asked, Kernel

CUDA = torch.device("cuda")


class Driver:
    """Says that the device is an H100's, and keeps the names of the kernels that launchers were made for."""

    def __init__(self):
        self.launchers = []

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata):
        self.launchers.append(metadata.name)


def _store(out_ptr, value, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0) * BLOCK, value)


def _wrong(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, BLOCK)


@pytest.fixture
def device(monkeypatch, tmp_path):
    found = Driver()
    monkeypatch.setattr(driver, "_active", found)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.compiler, "compile", compile_nothing)
    return found


def compile_nothing(source, target, options, **_):
    """As `triton.compile`, but for `_wrong`."""
    if source.name == "_wrong":
        raise ValueError("this kernel can't be compiled")
    assert target.arch == 90 and threading.current_thread().name.startswith("compile")
    return SimpleNamespace(src=source, metadata=SimpleNamespace(name=source.name))


PROCESSES = """
import json, sys, torch, triton
from triton.runtime.driver import driver
from test_ahead import Driver, _store
from pagerunner.ops.kernels import ahead
from pagerunner.ops.kernels.paged import pages

driver._active = Driver()
ahead._FEWEST_CORES = 1
found = {}
triton.knobs.compilation.listener = lambda **said: found.setdefault(said["src"].name, said["cache_hit"])
"""
COMPILED = """
def rehearse():
    pages.fill_pages(torch.empty(4, dtype=torch.int64), torch.empty(1, 3, dtype=torch.int64), 8)
    triton.jit(_store)[(1,)](torch.empty(4), 7, BLOCK=4)

ahead.start_compilers("a")
[(process, _)] = ahead._compilers
count = ahead.compile_launched(rehearse)
ahead.set_compiled("a")
ahead.start_compilers("a")
print(json.dumps([count, found, process.returncode is not None, len(ahead._compilers)]))
"""
LATE = """
ahead._PATIENCE_SECONDS = 0.05
ahead.start_compilers("b")
copy = pages._copy_pages, torch.empty(4, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
count = ahead.compile_launched(lambda: copy[0][(1,)](*copy[1:], BLOCK=64))
print(json.dumps([count, found["_copy_pages"], len(ahead._compilers)]))
"""
GIVEN_UP = """
ahead.start_compilers("c")
[(process, _)] = ahead._compilers
process.stdin.close()
print(json.dumps(process.wait(100)))
"""
BUSY = """
import os, time
from pagerunner.ops.kernels import compilers

def build(kernel):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(600)

compilers.build = build
compilers.main()
"""


@pytest.mark.days(6)
def test_processes_that_compile_end_with_a_starter_that_is_killed():
    """The leash ends while all of them are busy. That is so after every start that fails with kernels to compile."""
    kernels = [Kernel("pagerunner.ops.kernels.paged.pages", "_fill_pages", str(number)) for number in range(9)]
    with subprocess.Popen(
        [sys.executable, "-c", BUSY],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        process.stdin.write(msgspec.json.encode(Asked(("cuda", 90, 32), kernels, 3)) + b"\n")
        process.stdin.flush()
        pids = [int(process.stdout.readline()) for _ in range(3)]
        process.stdin.close()
        assert process.wait(LONG) == -signal.SIGKILL
        until(lambda: not any(map(is_alive, pids)))
        assert process.stdout.read() == process.stderr.read() == b""


def test_ranks_of_a_machine_divide_its_cores(device, monkeypatch):
    monkeypatch.setattr(ahead, "_compilers", [])
    monkeypatch.setattr(ahead, "usable_cores", lambda: 12)
    monkeypatch.setattr(ahead.children, "start", lambda *_, **__: None)
    for ranks in (1, 8, 20):
        ahead.start_compilers("a", ranks)
    assert [workers for _, workers in ahead._compilers] == [12, 1, 1]


@pytest.mark.days(6)
@pytest.mark.parametrize(
    ("program", "told"),
    [
        pytest.param(COMPILED, [2, {"_fill_pages": True, "_store": False}, True, 0], id="compiled"),
        pytest.param(LATE, [1, False, 0], id="processes that take too long are ended, and threads compile"),
        pytest.param(GIVEN_UP, 0, id="the process of a start that fails ends without a word"),
    ],
)
def test_processes_compile_what_this_one_then_finds_in_the_cache(tmp_path, program, told):
    """Truly compiled, for a card that isn't there. `_store` isn't a global kernel of its module, so it is left to this process."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    said = subprocess.run(
        [sys.executable, "-c", PROCESSES + program], env=env, capture_output=True, text=True, timeout=120
    )
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == told
    assert program != GIVEN_UP or not said.stderr


TOGETHER = """
import os, sys, time
from pathlib import Path
from triton import knobs
from pagerunner.ops.kernels import compilers
from pagerunner.ops.kernels.paged import pages

def build(kernel):
    Path(knobs.cache.dir, f"begun by {first}").touch()
    found = Path(knobs.cache.dir, kernel.specialization)
    if first and kernel.specialization == sys.argv[1]:
        os._exit(1)
    if not found.exists():
        wait_for(not first)
        found.touch()
        os.write(1, f"{first} {kernel.specialization}\\n".encode())

def wait_for(other):
    while not Path(knobs.cache.dir, f"begun by {other}").exists():
        time.sleep(0.01)

compilers.build = build
kernels = [compilers.Kernel(pages.__name__, "_fill_pages", str(number)) for number in range(8)]
first = os.fork() > 0
if first:
    compilers.build_all(kernels, 3)
    os.wait()
else:
    wait_for(True)
    compilers.build_all(kernels, 3)
    assert all(Path(knobs.cache.dir, kernel.specialization).exists() for kernel in kernels)
    os._exit(0)
"""


@pytest.mark.days(6)
@pytest.mark.parametrize("fails", ["nothing", "0"])
def test_processes_that_share_a_cache_divide_the_kernels_and_end_when_all_are_there(tmp_path, fails):
    """One that is killed while it compiles leaves its kernel to the other ones."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "new"), "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", TOGETHER, fails], env=env, text=True, **pipes) as process:
        said = process.stdout.read()  # with standard input open, which is their leash
        assert process.wait(LONG) == 0 and not (errors := process.stderr.read()), errors
    built = [line.split() for line in said.splitlines() if line]
    assert sorted(number for _, number in built) == [*"01234567"]
    assert ["False", "0"] in built if fails == "0" else {who for who, _ in built} == {"True", "False"}


def test_a_process_that_was_stopped_with_a_kernels_lock_is_not_waited_for_long(monkeypatch, tmp_path):
    kernel, built, told = Kernel("module", "kernel", "a"), [], tmp_path / "told"
    monkeypatch.setattr(compilers, "_function", lambda kernel: SimpleNamespace(cache_key="key"))
    monkeypatch.setattr(compilers, "build", built.append)
    monkeypatch.setattr(compilers, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    with told.open("wb") as out:
        monkeypatch.setattr(sys, "stdout", out)
        holds, has = os.pipe()
        if (other := os.fork()) == 0:
            monkeypatch.setattr(compilers, "build", lambda kernel: [os.write(has, b"!"), time.sleep(60)])
            try:
                compilers._build_in_turn(kernel, compilers._open_locks(), 0.0)
            finally:
                os._exit(0)
        assert os.read(holds, 1) == b"!"
        todo, add = os.pipe()
        os.write(add, bytes(2))
        os.close(add)
        compilers._build_some([kernel], todo)
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    for fd in (holds, has, todo):
        os.close(fd)
    assert built == [kernel] and told.read_bytes() == compilers.BUILT


@pytest.mark.parametrize(
    "begun", ["import time; time.sleep(60)", "import sys, time; sys.stdin.readline(); time.sleep(60)"]
)
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_process_that_hangs_is_ended_and_so_is_one_whose_start_is_interrupted(
    device, monkeypatch, begun, interrupted, caplog
):
    """More than a pipe holds is written to it."""
    monkeypatch.setattr(ahead, "_PATIENCE_SECONDS", 60.0 if interrupted else 0.5)
    process = subprocess.Popen(
        [sys.executable, "-c", begun], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    monkeypatch.setattr(ahead, "_compilers", [(process, 2)])
    kernels = [Kernel("module", "kernel", "x" * 2000)] * 100
    if interrupted:
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        ahead._compile_in_processes(kernels)
    assert process.wait(LONG) == -signal.SIGKILL
    assert ("have taken 0.5 seconds and are ended" in caplog.text) is not interrupted


def test_each_kernel_that_is_launched_is_compiled_once_and_none_runs(device):
    store, out = JITFunction(_store), torch.empty(4)
    run = JITFunction.run

    def rehearse():
        for _ in range(3):
            store[(1,)](out, 7, BLOCK=4)
        store[(1,)](out.half(), 7, BLOCK=4)
        assert torch.empty(3).eq(0).all() and out.new_empty(2, 2).eq(0).all() and torch.empty_like(out).eq(0).all()

    assert ahead.compile_launched(rehearse) == 2
    assert len(store.device_caches[0][0]) == 2 and device.launchers == ["_store", "_store"]
    assert JITFunction.run is run


def test_what_can_not_be_compiled_is_left_for_its_launch(device):
    store, wrong = JITFunction(_store), JITFunction(_wrong)

    def rehearse():
        wrong[(1,)](torch.empty(4), BLOCK=4)
        store[(1,)](torch.empty(4), 7, BLOCK=4)

    ahead.compile_launched(rehearse)
    assert len(store.device_caches[0][0]) == 1 and not wrong.device_caches[0][0]


def test_launches_of_other_threads_go_on(device, monkeypatch):
    launched = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: launched.append(options["warmup"]))
    store = JITFunction(_store)

    def rehearse():
        other = threading.Thread(target=lambda: store[(1,)](torch.empty(4), 7, BLOCK=4))
        other.start()
        other.join()

    assert ahead.compile_launched(rehearse) == 0
    assert launched == [False]


def test_a_rehearsal_that_fails_changes_nothing_and_is_logged(device, monkeypatch, caplog):
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    run = JITFunction.run

    def rehearse():
        raise MemoryError("no room")

    assert ops.compile_ahead(CUDA, "a", rehearse) == 0
    assert JITFunction.run is run and "no room" in caplog.text
    assert not ahead.is_compiled("a")


def test_a_start_whose_kernels_are_there_has_no_rehearsal(device, monkeypatch):
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    rehearsals = []
    for name in ("a", "a", "b"):
        ops.compile_ahead(CUDA, name, lambda name=name: rehearsals.append(name))
    assert rehearsals == ["a", "b"]


def test_a_kernel_that_is_compiled_after_the_start_is_named_in_the_log(device, monkeypatch, caplog):
    made = SimpleNamespace(src=None, metadata=SimpleNamespace(name="_store"))
    monkeypatch.setattr(triton.compiler, "compile", lambda *args, **options: made)
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(JITFunction, "_do_compile", JITFunction._do_compile)  # restored at the end
    monkeypatch.setattr(_store, "__module__", "pagerunner.ops.kernels.stores")
    store = JITFunction(_store)

    def launch(block: int) -> str:
        caplog.clear()
        assert store.warmup(torch.empty(4), 7, BLOCK=block, grid=(1,)) is made
        return caplog.text

    assert not launch(1), "the first start"
    ops.expect_kernels(CUDA, False)
    assert "The kernel _store was compiled after the start" in launch(2)
    assert not launch(2), "it is there now"
    ops.expect_kernels(CUDA, True)
    assert not launch(4), "another engine starts"
    ops.expect_kernels(CUDA, False)
    monkeypatch.setattr(_store, "__module__", "theirs")
    assert not launch(16), "not ours"


def test_a_cpu_compiles_nothing():
    assert ops.compile_ahead(torch.device("cpu"), "a", lambda: 1 / 0) == 0
    assert ops.load_libraries(torch.device("cpu"), "a") == []
    ops.expect_kernels(torch.device("cpu"), False)
    assert JITFunction._do_compile is ahead._do_compile


def test_libraries_are_loaded_in_the_background(device, monkeypatch):
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    loaded = []
    monkeypatch.setattr(ahead, "load_driver", lambda: loaded.append("compiler"))
    monkeypatch.setattr(ahead, "start_compilers", lambda name, ranks: loaded.append(name))
    monkeypatch.setattr(ops, "_load_cudnn_attention", loaded.append)
    for thread in ops.load_libraries(CUDA, "name"):
        thread.join()
    assert sorted(map(str, loaded)) == ["compiler", str(CUDA), "name"]
