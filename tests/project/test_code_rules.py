"""Layers, sizes, docstrings and safety of the code; every rule is first shown to catch a planted fault."""

from __future__ import annotations

import gc

import pytest

from project import checks


@pytest.fixture(scope="module", autouse=True)
def no_garbage():
    """All trees are kept, and collections of garbage would go through them again and again: two thirds of the time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def read(path):
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("module", "snippet"),
    [
        ("pagerunner.memory.x", "from pagerunner.sched import queue"),
        ("pagerunner.layers.x", "def f():\n    from pagerunner.runner.arena import Arena"),
        ("pagerunner.ops.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pagerunner.models.llama"),
        ("pagerunner.ops.x", "from ..engine import core"),
        ("pagerunner.llm", "from pagerunner import cli"),
        ("pagerunner.cli.x", "from pagerunner.runner.runner import ModelRunner"),
        ("pagerunner.models.x", "import pagerunner.novelty"),
        ("pagerunner.novelty", ""),
    ],
)
def test_layer_rule_catches(module, snippet):
    assert checks.layer_faults(snippet, module)


def test_layer_rule_lets_imports_point_down():
    assert not checks.layer_faults("import os\nfrom pagerunner.memory import planner", "pagerunner.sched.scheduler")
    assert not checks.layer_faults(
        "from pagerunner import limits\nfrom . import base", "pagerunner.attention.torch_ref"
    )


def test_imports_point_down():
    faults = [f for path in checks.package_files() for f in checks.layer_faults(read(path), checks.dotted(path))]
    assert not faults, "\n".join(faults)


def test_torch_rule_catches():
    assert checks.torch_imports("def f():\n    import torch.nn as nn", "m")
    assert checks.torch_imports("from safetensors.torch import load_file", "m")


def test_lower_layers_are_torch_free():
    files = [path for path in checks.package_files() if checks.part(checks.dotted(path)) in checks.TORCH_FREE]
    assert files
    faults = [f for path in files for f in checks.torch_imports(read(path), checks.dotted(path))]
    assert not faults, "\n".join(faults)


def test_size_rule_catches():
    assert checks.size_faults("x = 1\n" * (checks.MAX_FILE_LINES + 1), "m")
    assert checks.size_faults("async def f():\n" + "    x = 1\n" * checks.MAX_FUNCTION_LINES, "m")
    assert not checks.size_faults("def f():\n" + "    x = 1\n" * (checks.MAX_FUNCTION_LINES - 1), "m")


def test_every_folder_of_tests_is_collected(pytestconfig):
    """Of its own accord pytest passes over folders with some names, such as `dist`."""
    folders = {path.parent for path in (checks.ROOT / "tests").rglob("test_*.py")}
    asked = pytestconfig.hook.pytest_ignore_collect
    assert not [folder for folder in folders if asked(collection_path=folder, config=pytestconfig)]


def test_files_and_functions_stay_small():
    package = set(checks.package_files())  # whose trees other rules read too; those of tests aren't kept
    for path in checks.python_files():
        source = read(path)
        assert not checks.size_faults(source, path.name, checks.parsed(source) if path in package else None)


def test_package_stays_small():
    assert sum(checks.code_lines(read(path)) for path in checks.package_files()) < checks.MAX_CODE_LINES
    told = f"{checks.MAX_FILE_LINES} lines a file, {checks.MAX_FUNCTION_LINES} a function, 74 options a verb, {checks.MAX_CODE_LINES:,} lines of code in all"
    assert told in read(checks.ROOT / "docs" / "architecture.md")


def test_lines_of_code_are_counted_without_prose():
    source = '"""Module."""\n\n# why\ndef f():\n    """Doc\n    string."""\n    return (\n        1\n    )\n'
    assert checks.code_lines(source) == 4


@pytest.mark.parametrize(
    "snippet",
    [
        "x = 1",
        '"""m"""\ndef f():\n    pass',
        '"""m"""\nclass C:\n    """c"""\n    async def m(self):\n        pass',
        '"""m"""\nclass C:\n    """c"""\n    @property\n    def p(self):\n        return 1',
    ],
)
def test_docstring_rule_catches(snippet):
    assert checks.docstring_faults(snippet, "m")


def test_docstring_rule_leaves_private_names_alone():
    assert not checks.docstring_faults('"""m"""\ndef _f():\n    pass\nclass _C:\n    def m(self):\n        pass', "m")


def test_public_names_have_docstrings():
    faults = [f for path in checks.package_files() for f in checks.docstring_faults(read(path), checks.dotted(path))]
    assert not faults, "\n".join(faults)


def test_weights_rule_catches():
    assert checks.weight_faults('def f(self):\n    return self.norm.weights["weight"]\n', "m")
    assert not checks.weight_faults('def f(self):\n    return self.weights["weight"]\n', "m")


def test_weights_are_read_by_the_module_that_holds_them():
    paths = [
        path for path in checks.package_files() if checks.part(checks.dotted(path)) in {"layers", "models", "runner"}
    ]
    paths.remove(checks.PACKAGE / "models/checkpoint/loader.py")  # gives memory to all of them
    faults = [f for path in paths for f in checks.weight_faults(read(path), checks.dotted(path))]
    assert not faults, "\n".join(faults)


def test_all_rule_catches():
    assert checks.all_faults('__all__ = ["gone"]', "m")
    assert checks.all_faults('x = 1\n__all__ = ["x", "x"]', "m")
    assert not checks.all_faults('from a import x\n__all__ = ["x"]', "m")


def test_all_lists_what_is_there():
    faults = [f for path in checks.package_files() for f in checks.all_faults(read(path), checks.dotted(path))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle",
        "def f():\n    from cloudpickle import loads",
        "import dill as d",
        "import marshal",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "exec('1')",
        "socket.recv_pyobj()",
        "f(trust_remote_code=True)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "host = '0.0.0.0'",
        "url = 'tcp://*:5555'",
        "url = 'tcp://10.0.0.1:5555'",
    ],
)
def test_safety_rule_catches(snippet):
    assert checks.unsafe_faults(snippet, "m")


def test_safety_rule_allows_loopback_and_ordinary_calls():
    assert not checks.unsafe_faults(
        "url = 'tcp://127.0.0.1:0'\nre.compile('x')\nmodel.eval()\nrun(x, shell=False)", "m"
    )


@pytest.mark.parametrize(
    "snippet",
    [
        "import subprocess\nsubprocess.Popen(['ls'])",
        "import subprocess\nsubprocess.run(['ls'])",
        "from subprocess import Popen\nPopen(['ls'])",
        "import asyncio\nasyncio.create_subprocess_exec('ls')",
        "import os\nos.posix_spawn('ls', [], {})",
        "import multiprocessing",
        "def f():\n    from torch import multiprocessing\n    from multiprocessing import Process",
    ],
)
def test_process_rule_catches(snippet):
    assert checks.child_faults(snippet, "pagerunner.engine.x")


def test_process_rule_lets_types_be_named():
    assert not checks.child_faults("import subprocess\nprocess: subprocess.Popen[bytes]", "pagerunner.engine.x")


def test_one_module_starts_processes():
    faults = [f for path in checks.package_files() for f in checks.child_faults(read(path), checks.dotted(path))]
    assert not faults, "\n".join(faults)


def test_package_uses_nothing_unsafe():
    faults = [f for path in checks.package_files() for f in checks.unsafe_faults(read(path), checks.dotted(path))]
    assert not faults, "\n".join(faults)


KERNEL = """
@triton.jit
def kernel(x, at, n, first):
    begin = first
    for save in range(n):
        upto = tl.load(at + save)
        for token in range(BOUNDS):
            x += token
        LAST
"""


@pytest.mark.parametrize(
    ("bounds", "last", "wrong"),
    [
        ("begin, upto", "begin = upto", True),
        ("begin // 64, upto // 64", "begin = tl.maximum(begin, upto)", True),
        ("upto, first", "first += 1", True),
        ("begin, upto", "x += upto", False),
        ("tl.load(at + save - 1), upto", "begin = upto", False),
    ],
)
def test_loop_rule_catches(bounds, last, wrong):
    source = KERNEL.replace("BOUNDS", bounds).replace("LAST", last)
    assert bool(checks.loop_faults(source, "m")) == wrong
    assert not checks.loop_faults(source.replace("for save in range", "for save in tl.static_range"), "m")


def test_inner_loops_of_kernels_have_bounds_that_no_outer_loop_carries():
    faults = [f for path in checks.package_files() for f in checks.loop_faults(read(path), checks.dotted(path))]
    assert not faults, "\n".join(faults)


def test_messages_in_the_troubleshooting_page_are_the_codes():
    """It stands here as this file's process has all trees."""
    literals = [one for path in checks.package_files() for one in checks.text_literals(read(path))]
    document = read(checks.ROOT / "docs" / "troubleshooting.md")
    assert document.count("\n> ") > 25
    assert checks.unknown_messages(document, literals) == []
