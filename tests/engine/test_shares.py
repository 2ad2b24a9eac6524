"""What each engine of a server gets of the machine."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pagerunner.config import EngineArgs
from pagerunner.engine.startup import shares as machine
from pagerunner.engine.startup.shares import EngineShare, shares
from pagerunner.errors import ConfigError
from pagerunner.llm import LLM


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB of memory and 9 cores, and devices as files are put into the directory."""
    monkeypatch.setattr(machine, "available_memory", lambda: 8 * 2**30)
    monkeypatch.setattr("pagerunner.threads.usable_cores", lambda: 9)
    monkeypatch.setattr(machine, "_DEVICE_FILES", tmp_path)
    for name in ("nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


def args(engines: int, device: str = "auto", ranks: int = 1) -> EngineArgs:
    return EngineArgs(model="m", device=device, data_parallel_size=engines, tensor_parallel_size=ranks)


def visible(found: list[EngineShare]) -> list[str | None]:
    return [one.environment.get("CUDA_VISIBLE_DEVICES") for one in found]


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_memory_and_cores_are_divided(devices: Path, engines: int) -> None:
    found = shares(args(engines), {})
    assert [one.index for one in found] == list(range(engines))
    assert {one.available for one in found} == {None if engines == 1 else 8 * 2**30 // engines}
    assert {one.environment["OMP_NUM_THREADS"] for one in found} == {str(8 // engines)}
    assert {one.environment["OMP_NUM_THREADS"] for one in shares(args(9), {})} == {"1"} or engines < 3
    assert "OMP_NUM_THREADS" not in shares(args(engines), {"OMP_NUM_THREADS": "3"})[0].environment


def test_an_engine_sees_the_devices_of_its_ranks(devices: Path) -> None:
    for number in range(5):
        (devices / f"nvidia{number}").touch()
    assert visible(shares(args(1), {})) == [None], "one engine sees all, as before"
    assert visible(shares(args(2), {})) == ["0", "1"]
    assert visible(shares(args(2, ranks=2), {})) == ["0,1", "2,3"]
    assert visible(shares(args(2, "cpu"), {})) == ["", ""]
    named = {"CUDA_VISIBLE_DEVICES": "GPU-b, 3,1,0"}
    assert visible(shares(args(2, "cuda", 2), named)) == ["GPU-b,3", "1,0"]
    assert visible(shares(args(2), {"CUDA_VISIBLE_DEVICES": "3,1,-1,0"})) == ["3", "1"], "the list ends at -1"
    of_ray = msgspec.structs.replace(args(9, "cuda", 2), distributed_executor_backend="ray")
    assert visible(shares(of_ray, named)) == [""] * 9, "Ray gives ranks theirs, and cores take none"


@pytest.mark.parametrize(
    ("engines", "device", "ranks", "environ", "there", "said"),
    [
        (3, "auto", 1, {}, 2, "data_parallel_size=3 takes 3 CUDA devices, and 2 can be seen"),
        (3, "cuda", 1, {"CUDA_VISIBLE_DEVICES": "0,1"}, 8, "data_parallel_size=3 takes 3 CUDA devices, and 2 can be"),
        (2, "cuda", 2, {}, 3, "data_parallel_size=2, each of 2 ranks, takes 4 CUDA devices, and 3"),
        (2, "auto", 1, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, 8, "takes 2 CUDA devices, and 1 can be seen"),
        (2, "cuda", 1, {}, 0, "data_parallel_size=2 takes 2 CUDA devices, and 0 can be seen"),
    ],
)
def test_too_few_devices(
    devices: Path, engines: int, device: str, ranks: int, environ: dict[str, str], there: int, said: str
) -> None:
    for number in range(there):
        (devices / f"nvidia{number}").touch()
    with pytest.raises(ConfigError, match=re.escape(said)):
        shares(args(engines, device, ranks), environ)


def test_without_devices_engines_run_on_the_cpu(devices: Path) -> None:
    assert visible(shares(args(2), {})) == ["", ""], "not both on device 0, if CUDA finds one all the same"
    for nothing in ("", "-1", "-1,0"):
        assert visible(shares(args(2), {"CUDA_VISIBLE_DEVICES": nothing})) == ["", ""]


def test_devices_that_can_not_be_counted_are_to_be_named(devices: Path) -> None:
    (devices / "dxg").touch()  # as in WSL2
    with pytest.raises(ConfigError, match=r"and 0 can be seen \(CUDA_VISIBLE_DEVICES says which ones\)"):
        shares(args(2), {})
    assert visible(shares(args(2), {"CUDA_VISIBLE_DEVICES": "0,1"})) == ["0", "1"]
    assert visible(shares(args(2, "cpu"), {})) == ["", ""]


def test_a_wrong_number_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size must be a whole number of at least 1, got 0"):
        args(0)
    with pytest.raises(ConfigError, match=r"data_parallel_size=2 is for a server or AsyncEngine.*LLM is one engine"):
        LLM("demo", data_parallel_size=2)
