"""What each engine of a server gets of the machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from pagerunner import cgroups
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


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of which 100,000 KiB can be had; returns the directory of this process's control group, inside another one."""
    group = tmp_path / "cgroup" / "pod" / "container"
    group.mkdir(parents=True)
    for name, text in (("own", "0::/pod/container"), ("meminfo", "MemTotal: 200000 kB\nMemAvailable: 100000 kB")):
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    return group


def limit(group: Path, most: str, used: int, stat: str | None = None) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    if stat is not None:
        (group / "memory.stat").write_text(stat)


def test_memory_without_a_limit_is_the_machines(group: Path) -> None:
    assert machine.available_memory() == 102_400_000
    limit(group, "max", 5)
    assert machine.available_memory() == 102_400_000
    limit(group, "900000000000", 5)
    assert machine.available_memory() == 102_400_000


@pytest.mark.parametrize("outer", [False, True])
def test_memory_under_the_limit_of_a_group_or_of_one_around_it(group: Path, outer: bool) -> None:
    limit(group.parent if outer else group, "1000000", 300_000)
    assert machine.available_memory() == 700_000
    limit(group.parent, "600000", 500_000)
    assert machine.available_memory() == 100_000
    limit(group, "1000", 2_000)
    assert machine.available_memory() == 0


def test_files_in_the_page_cache_take_no_memory(group: Path) -> None:
    """A checkpoint that was read before counts for its group, until other memory is wanted."""
    limit(
        group, "1000000", 900_000, "anon 100000\nfile 800000\nshmem 50000\ninactive_file 600000\nactive_file 150000\n"
    )
    assert machine.available_memory() == 850_000


def test_a_group_whose_files_and_name_can_not_be_read_as_text_ends_no_start(group: Path, tmp_path: Path) -> None:
    strange = group.with_name(os.fsdecode(b"caf\xe9"))
    strange.mkdir()
    (tmp_path / "own").write_bytes(b"0::/pod/caf\xe9\n")
    limit(strange, "1000000", 900_000)
    (strange / "memory.stat").write_bytes(b"\nnothing\n\xff 5\nfile max\ninactive_file 50000\n")
    assert machine.available_memory() == 150_000
