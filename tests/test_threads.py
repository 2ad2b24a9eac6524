"""How many threads an engine on a CPU takes, and that a user's own settings stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagerunner import cgroups, threads
from pagerunner.threads import thread_settings, usable_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores; returns the directory of this process's control group, inside another one."""
    group = tmp_path / "cgroup" / "pod" / "container"
    group.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/pod/container\n")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_OWN", own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return group


def test_without_a_quota_all_cores_are_used_but_the_reserved(machine: Path) -> None:
    (machine / "cpu.max").write_text("max 100000\n")
    assert usable_cores() == 8
    assert thread_settings({}, reserved=0) == {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE"}
    assert thread_settings({}, reserved=1)["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("own", "outer", "cores"),
    [("250000 100000", "max 100000", 3), ("max 100000", "400000 100000", 4), ("50000 100000", None, 1)],
)
def test_a_containers_quota_counts(machine: Path, own: str, outer: str | None, cores: int) -> None:
    (machine / "cpu.max").write_text(own + "\n")
    if outer is not None:
        (machine.parent / "cpu.max").write_text(outer + "\n")
    assert usable_cores() == cores


@pytest.mark.parametrize(("cores", "threads_left"), [(1, "1"), (2, "1"), (3, "2"), (4, "3")])
def test_a_core_is_reserved_where_one_remains(monkeypatch: pytest.MonkeyPatch, cores: int, threads_left: str) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    assert thread_settings({}, reserved=1)["OMP_NUM_THREADS"] == threads_left


def test_what_the_user_has_set_stays(machine: Path) -> None:
    assert thread_settings({"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "ACTIVE"}, reserved=1) == {}
    assert thread_settings({"MKL_NUM_THREADS": "5"}, reserved=1) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert list(thread_settings({"GOMP_SPINCOUNT": "7"}, reserved=1)) == ["OMP_NUM_THREADS"]


AT_TORCHS_IMPORT = """
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            say()
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Watch())
from pagerunner import LLM
LLM("demo", device="cpu")
"""
AFTER_TORCHS_IMPORT = """
import types
class Name(types.ModuleType):  # importing the true one takes two seconds
    def __getattr__(self, name):
        raise ImportError(f"there is no torch.{name}")
sys.modules["torch"] = Name("torch")
try:
    from pagerunner import LLM
except ImportError as error:
    assert "torch." in str(error), error
say()
"""


@pytest.mark.parametrize("torch_first", [False, True])
def test_llm_settles_them_before_torch_is_imported_and_not_after(torch_first: bool) -> None:
    program = "import json, os, sys\ndef say():\n    print(json.dumps(os.environ.get('OMP_WAIT_POLICY')))\n"
    program += AFTER_TORCHS_IMPORT if torch_first else AT_TORCHS_IMPORT
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    made = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(made.stdout) == (None if torch_first else "PASSIVE")
