"""Triton's compiler refuses kernels that its interpreter runs: here it is asked, too.

Example: a variable that is 16 numbers before a loop and 8 in it. The interpreter doesn't mind, and on a card the first launch fails. So each launch
in the interpreter is noted: the kernel, its constants, and its arguments' types. After the last test of all processes two programs take what
was noted up to Triton's own intermediate code, for an H100 that isn't there. That takes 0.1 s, and 84 kernels are launched in 1,300 ways: each
day compiles each kernel, and each way has its turn within 20 days.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import interpreter
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, create_function_from_signature, serialize_specialization_data

from helpers.effort import share_of_the_day
from helpers.programs import run_python
from pagerunner.ops.kernels.compilers import _TargetAlone

Noted = tuple[str, str, str]
"""A kernel's module, its name, and what it is compiled for, as Triton writes that."""
ON_A_CARD = dict.fromkeys(("PDL", "WAIT", "SEND", "RELAY", "TAKE"), True)
"""Constants that differ there: kernels may begin early; ranks wait for each other, and do in one launch what is three in the interpreter."""
TARGET = GPUTarget("cuda", 90, 32)
_DAYS = 20
_PROGRAMS = 2
_PROGRAM = "import os; del os.environ['TRITON_INTERPRET']; from helpers import front_end; front_end.main()"


@functools.cache
def _on_a_card(kernel: Any) -> tuple[Any, Any, Any]:
    function, backend = JITFunction(kernel.fn, **kernel.kwargs), make_backend(TARGET)
    return function, backend, create_function_from_signature(function.signature, function.params, backend)


def noted(kernel: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Noted:
    """What a launch needs compiled. Alignment of arguments changes nothing here, and is left out."""
    function, backend, bind = _on_a_card(kernel)
    given = given | {name: value for name, value in ON_A_CARD.items() if name in given}
    bound, sorts, options = bind(*args, **given, debug=False)
    options, signature, constants, _ = function._pack_args(backend, options, bound, sorts, options)
    text = serialize_specialization_data(function._fn_name, signature, constants, {}, options, "")
    return kernel.fn.__module__, kernel.fn.__name__, text


@contextmanager
def checked(folder: Path) -> Iterator[None]:
    """Compile what the package launches inside, or the day's share of it. Processes that test at the same time have one folder: the last of them
    compiles for all, as most kernels are launched by several.

    Raises:
        AssertionError: a kernel can't be compiled.
    """
    found: set[Noted] = set()
    run = interpreter.InterpretedFunction.run

    def noting(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        if self.fn.__module__.startswith("pagerunner."):
            found.add(noted(self, args, given))
        run(self, *args, grid=grid, warmup=warmup, **given)

    with (folder / f"launches{os.getpid()}").open("w+") as own:
        fcntl.flock(own, fcntl.LOCK_EX)  # as long as this process runs
        with patch.object(interpreter.InterpretedFunction, "run", noting):
            yield
        kernels = _handed_in(folder, own, found)
    ways = [list(ways) for _, ways in itertools.groupby(kernels, lambda one: one[:2])]
    todo = [own[turn] for own in ways for turn in share_of_the_day(len(own), min(_DAYS, len(own)))]
    with ThreadPoolExecutor(_PROGRAMS) as programs:
        said = [*itertools.chain(*programs.map(refused, (todo[part::_PROGRAMS] for part in range(_PROGRAMS))))]
    if said:
        raise AssertionError("Kernels that ran in Triton's interpreter can't be compiled:\n\n" + "\n\n".join(said))


def _handed_in(folder: Path, own: Any, found: set[Noted]) -> list[Noted]:
    """What all processes have launched, if none of them runs any more but this one; else nothing."""
    with (folder / "handing in").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        json.dump(sorted(found), own)
        own.flush()
        fcntl.flock(own, fcntl.LOCK_UN)  # a program that the process has forked may have the file, too
        paths = [*folder.glob("launches*")]
        with contextlib.ExitStack() as files:
            for path in paths:
                try:
                    fcntl.flock(files.enter_context(path.open()), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return []
            known = found.union(*(map(tuple, json.loads(path.read_text() or "[]")) for path in paths))
        for path in paths:
            path.unlink()
    return sorted(known)


def refused(kernels: Sequence[Noted]) -> list[str]:
    """What a process that doesn't interpret says of kernels that it can't compile."""
    if not kernels:
        return []
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump(kernels, file)
        file.flush()
        done = run_python(_PROGRAM, [file.name], dict(os.environ), timeout=1200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _take_to_intermediate_code(source: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
    """In the place of `triton.compile`."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    return source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


def main() -> None:
    """Entry point of the process: a file's kernels, whose faults are printed."""
    driver.set_active(_TargetAlone(TARGET))
    triton.compiler.compile = _take_to_intermediate_code
    for module, name, text in json.loads(Path(sys.argv[1]).read_text()):
        function = getattr(importlib.import_module(module), name)
        try:
            function.preload(text)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            what = json.loads(text)
            places = list(what["signature"])
            constants = {
                places[place]: value
                for [place], value in zip(what["constant_keys"], what["constant_vals"], strict=True)
            }
            print(json.dumps(f"{module}.{name} for {constants}: {type(cause).__name__}: {cause}"), flush=True)


@triton.jit
def grows_kernel(out_ptr, N: tl.constexpr, LESS: tl.constexpr):
    """What the interpreter runs and the compiler refuses, unless N is LESS."""
    place = tl.arange(0, N)
    tl.store(out_ptr + place, place)
    for i in range(tl.sum(place, 0)):
        place = tl.arange(0, LESS)
        tl.store(out_ptr + place, i)
