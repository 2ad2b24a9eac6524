"""What importing costs: time, torch, and the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import pagerunner
from project import checks


def python(code, *argv):
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checks.PACKAGE.parent)},
        cwd=checks.ROOT,
        check=False,
    )


USUAL = (
    "import time; start = time.process_time(); import asyncio, http.server, unittest.mock, xml.dom.minidom; "
    "print(time.process_time() - start)"
)


def share_of_usual(code, runs=4):
    """Seconds that `code` prints, over those that imports of Python's own take here: a bound of it holds on any machine.

    Both are the least of measurements in turns, as noise of a busy machine only adds.
    """
    done = [(python(code), python(USUAL)) for _ in range(runs)]
    assert all(one.returncode == 0 for one, _ in done), done[0][0].stderr
    took, usual = (min(float(run.stdout.split()[-1]) for run in of) for of in zip(*done, strict=True))
    return took / usual


def test_importing_the_package_takes_little_time_and_no_torch():
    """51 ms where 100 ms are usual: 30 ms more are too many."""
    code = (
        "import sys, time; start = time.process_time(); import pagerunner; "
        "took = time.process_time() - start; assert 'torch' not in sys.modules; print(took)"
    )
    assert share_of_usual(code) < 0.8


def test_help_takes_little_time_and_no_torch():
    """79 ms, with Python's own start, where 100 ms are usual; on a busy machine up to 115."""
    code = (
        "import resource, subprocess, sys; "
        "subprocess.run([sys.executable, '-m', 'pagerunner', '--help'], check=True, stdout=subprocess.DEVNULL); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)"
    )
    assert share_of_usual(code) < 1.6


def test_small_processes_know_no_models():
    """Reading every family's config module took as long as all else that a process for templates imports."""
    code = "import pagerunner.engine.structured_output.grammar_worker, pagerunner.text.template_worker"
    found = python(f"import sys\n{code}\nsys.exit('pagerunner.models.registry' in sys.modules)")
    assert found.returncode == 0, found.stderr


def modules():
    return [checks.dotted(path) for path in checks.package_files() if path.name != "__main__.py"]


def test_torch_free_parts_load_without_torch():
    free = [m for m in modules() if checks.part(m) in checks.TORCH_FREE | {"", "cli", "eval", "bench"}]
    code = (
        "import importlib, json, sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch': raise ImportError('torch is blocked')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
    )
    assert len(free) > 10
    assert python("import sys\nsys.exit('torch' in sys.modules)").returncode == 0
    result = python(code, json.dumps(free))
    assert result.returncode == 0, result.stderr


NO_NETWORK = (
    "import importlib, json, sys\n"
    "def hook(event, args):\n"
    "    if event in ('socket.connect', 'socket.bind', 'socket.getaddrinfo', 'socket.gethostbyname'):\n"
    "        raise RuntimeError(f'network at import: {event}')\n"
    "sys.addaudithook(hook)\n"
)


def test_network_guard_catches():
    result = python(NO_NETWORK + "import socket\nsocket.socket().bind(('127.0.0.1', 0))")
    assert result.returncode != 0 and "network at import" in result.stderr


@pytest.fixture(scope="module")
def imported():
    """How a process ended that has imported every module; those in Gluon last, and until then Gluon can't be imported."""
    code = NO_NETWORK + (
        "names = json.loads(sys.argv[1])\n"
        "sys.modules['triton.experimental'] = None\n"
        "for n in names:\n"
        "    if not n.endswith('_gluon'): importlib.import_module(n)\n"
        "print('without Gluon', flush=True)\n"
        "del sys.modules['triton.experimental']\n"
        "for n in names: importlib.import_module(n)\n"
    )
    names = modules()
    assert sum(name.endswith("_gluon") for name in names) > 2
    assert sum(name.startswith("pagerunner.ops.kernels.") for name in names) > 40
    return python(code, json.dumps(names))


def test_no_module_touches_the_network_when_imported(imported):
    assert imported.returncode == 0, imported.stderr


def test_kernels_are_imported_without_gluon(imported):
    """Gluon is a part of Triton that may be another one in another version, or none. Then other kernels serve, which may need nothing of it."""
    assert "without Gluon" in imported.stdout, imported.stderr


def test_public_names_are_those_of_all():
    public = {name for name in dir(pagerunner) if not name.startswith("_")}
    submodules = {checks.part(module) for module in modules()} | {"annotations", "importlib", "TYPE_CHECKING", "Any"}
    assert public - submodules == {name for name in pagerunner.__all__ if not name.startswith("_")}
    assert sorted(set(pagerunner.__all__)) == sorted(pagerunner.__all__)


def test_every_public_name_can_be_imported():
    for name in pagerunner.__all__:
        assert getattr(pagerunner, name) is not None


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pagerunner.nothing


def test_ranks_can_be_started_before_torch_is_imported():
    """`LLM`, and the core's process, start them first, and then import what takes a second or more."""
    code = "import sys, pagerunner.llm, pagerunner.engine.core.process, pagerunner.engine.core.factory"
    found = python(f"{code}\nsys.exit('torch' in sys.modules)")
    assert found.returncode == 0, found.stderr
