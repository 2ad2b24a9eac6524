"""One torch thread for every test: the models are tiny, and two threads on two busy cores wait for each other."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterator

if shutil.which("nvidia-smi") is None:  # Triton reads this when it is imported: kernels then run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Every httpx client reads all certificates of the system, 40 ms a time, and here is a folder without any. No test uses TLS.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

# Sockets have addresses of 108 bytes, in which a test's directory has to leave room for names.
if len(tempfile.gettempdir()) > len("/var/tmp"):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/tmp")

# A shell's background jobs ignore Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from typing import Any  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, core, settings  # noqa: E402 - torch reads the variables above when a test module imports it

from helpers import forks  # noqa: E402
from helpers.days import HELP, keep_the_days  # noqa: E402
from helpers.effort import TEST_DAY  # noqa: E402
from helpers.programs import Popen, begin_with_this_environment  # noqa: E402

# A loaded machine is not a failing test.
settings.register_profile("machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("machine")

os.environ["PAGERUNNER_TEST_DAY"] = str(TEST_DAY)  # one day for all processes, also of a run that goes on past midnight

LONG_FILES = (
    "ops/kernels/test_compiled.py", "ops/kernels/test_paged_attention.py", "engine/test_drafts.py", "engine/test_draft_models.py",
    "engine/test_tokens_equal_transformers.py", "sched/test_machine.py",
)  # fmt: skip
"""Those that take 10 s and more of a processor. They begin first, or one process would end long after the others."""
WAITING = ("project", "server", "tiers")
"""Folders whose tests wait for programs and clocks for longer than they compute. They come last, which one process begins with: see `helpers/forks.py`."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, and begin all that is random with the day: whatever machine runs a day's cases finds the same."""
    config.addinivalue_line("markers", HELP)
    if config.getoption("--hypothesis-seed", None) is None:
        core.global_force_seed = TEST_DAY


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Else what a test draws would depend on those that its process has run before."""
    number = (TEST_DAY + zlib.crc32(item.nodeid.encode())) % 2**32  # as much as numpy takes
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(number)  # `torch.manual_seed` takes an eighth of a millisecond


def pytest_addoption(parser: pytest.Parser) -> None:
    """See `helpers/forks.py`, here and twice below."""
    forks.add_option(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Import all test files."""
    with forks.rewriting_assertions(session):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests."""
    return forks.run(session)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the day's share of dear tests, and begin with the longest files.

    What chooses tests is then hidden from the programs that are tested: PAGERUNNER_ variables are settings of theirs.
    """
    keep_the_days(config, items)
    tests = config.rootpath / "tests"
    ranks = {tests / name: rank for rank, name in enumerate(LONG_FILES)}
    last = tuple(tests / name for name in WAITING)
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), item.path.parent in last))
    for name in ("PAGERUNNER_TEST_DAY", "PAGERUNNER_THOROUGH"):
        os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    """Set apart what the tests have imported: half a million objects, which each full collection of garbage would look through.

    What they have imported may have set variables, too.
    """
    begin_with_this_environment()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how to get this day's cases again."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"PAGERUNNER_TEST_DAY={TEST_DAY} tries this day's cases again.")


@pytest.fixture(scope="session")
def compiled_too(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What Triton's interpreter runs can be compiled as well: see `helpers/front_end.py`."""
    folder = forks.folder_of_all(tmp_path_factory)
    with contextlib.ExitStack() as stack:
        if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton") is not None:
            from helpers import front_end

            stack.enter_context(front_end.checked(folder))
        yield


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Python programs are forked from one that has imported torch, and not started: see `helpers/programs.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Popen)
        yield
