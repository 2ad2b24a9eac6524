"""Ranks in processes of their own: the same bits everywhere, and a sentence when one of them is gone or late."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.patience import LONG, patient
from helpers.ranks import Ranks, say
from helpers.threads_of_ranks import in_threads
from pagerunner.dist.base import Comm, CommError, sum_in_order
from pagerunner.dist.gloo import GlooComm
from pagerunner.dist.null import NullComm

pytestmark = [pytest.mark.days(2), pytest.mark.usefixtures("forked")]  # most of them start processes

SECONDS = 300.0
SHORT = 1.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)
SHAPES = ((), (1,), (3, 5), (0, 4), (2, 0), (257, 96))


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank has. Numbers of very different size, so that the order of a sum shows in its last bits."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (2 * (rank % 2))
    return x.to(dtype) if dtype.is_floating_point else (x.abs() * 50 % 100).to(dtype)


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().reshape(-1).view(torch.uint8).tolist()


def check_all(comm: Comm) -> None:
    """Every call with every dtype, in inference mode as steps run; what comes is computed from the seeds here."""
    for dtype in DTYPES:
        for shape in SHAPES:
            all_ranks = torch.stack(
                [
                    values(rank, shape, dtype).view(torch.uint8) if dtype.itemsize == 1 else values(rank, shape, dtype)
                    for rank in range(comm.size)
                ]
            ).view(dtype)
            x = values(comm.rank, shape, dtype)
            gathered = comm.all_gather(x)
            assert gathered.shape == (comm.size, *shape) and bits(gathered) == bits(all_ranks)
            rows = all_ranks.unsqueeze(-1).flatten(1).view(torch.uint8)
            given = torch.stack([rows[comm.rank] + to for to in range(comm.size)])
            given = given.view(dtype) if given.numel() else given
            assert bits(comm.all_to_all(given)) == bits(rows + comm.rank)
            if dtype.itemsize == 1 and dtype.is_floating_point:
                continue
            comm.all_reduce_(x)
            assert bits(x) == bits(sum_in_order(all_ranks)), (dtype, shape)
    columns = values(comm.rank, (6, 8), torch.float32)[:, ::2]
    comm.all_reduce_(columns)
    assert bits(columns) == bits(
        sum_in_order(torch.stack([values(r, (6, 8), torch.float32)[:, ::2] for r in range(comm.size)]))
    )
    for root in range(comm.size):
        for data in (b"", b"\x00", os.urandom(5) if root == comm.rank else b"12345", bytes(range(256)) * 4_000):
            told = comm.broadcast_bytes(data if root == comm.rank else None, root)
            assert len(told) == len(data) and (len(data) == 5 or told == data)


def listening() -> set[str]:
    """Addresses that this process listens on, in hexadecimal, with ports that belong to its file descriptors."""
    own = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    }
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1].partition(":")[0])
    return found


def work(rank: int, size: int, directory: Path) -> bool:
    comm = GlooComm(directory, rank, size, SECONDS)
    with torch.inference_mode():
        check_all(comm)
    assert listening() == {"0100007F"}  # 127.0.0.1
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_processes_get_the_same_bits(size: int, tmp_path: Path) -> None:
    with Ranks(work, size, tmp_path) as ranks:
        assert [ranks.line(rank) for rank in range(size)] == [True] * size


def test_a_group_of_one_does_nothing() -> None:
    check_all(NullComm())
    with pytest.raises(ValueError, match="no rank 1"):
        NullComm().broadcast_bytes(b"x", 1)


def test_sums_are_made_in_the_order_of_the_ranks_and_rounded_once() -> None:
    big, small = 2.0**8, 1.0  # bfloat16 has 8 bits: 256 + 1 is 256
    assert sum_in_order(torch.tensor([[big], [small], [small]]).bfloat16()).item() == 258
    huge = torch.tensor([[1e30], [-1e30], [1.0]])
    assert (sum_in_order(huge).item(), sum_in_order(huge.flip(0)).item()) == (1.0, 0.0)


def test_several_groups_stand_beside_each_other_in_a_process(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("a", "b")]
    found: dict[str, list[Any]] = {}

    def run(directory: Path) -> None:
        found[directory.name] = in_threads(
            3, directory, lambda comm: comm.all_gather(torch.tensor([comm.rank])).tolist()
        )

    threads = [threading.Thread(target=run, args=(directory,)) for directory in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": [[[0], [1], [2]]] * 3, "b": [[[0], [1], [2]]] * 3}
    assert not torch.distributed.is_initialized()


def test_a_rank_that_never_comes_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    begun = time.monotonic()
    with pytest.raises(CommError, match=r"Rank 0 of 2 has waited 1 seconds for another rank in meeting the others"):
        GlooComm(tmp_path, 0, 2, SHORT)
    assert time.monotonic() - begun < patient(10)


def test_a_rank_that_is_late_is_told_of_by_the_others(tmp_path: Path) -> None:
    done = threading.Event()

    def act(comm: GlooComm) -> None:
        if comm.rank == 1:
            done.wait(LONG)
            return
        try:
            comm.all_reduce_(torch.ones(4))
        finally:
            done.set()

    error, other = in_threads(2, tmp_path / "ranks", act, SHORT)
    assert other is None and isinstance(error, CommError)
    assert str(error).startswith("Rank 0 of 2 has waited 1 seconds for another rank in all_reduce (")


def lose_the_other(rank: int, size: int, directory: Path) -> str:
    comm = GlooComm(directory, rank, size, SECONDS)
    comm.all_reduce_(torch.ones(4))
    say("met")
    if rank == 1:
        time.sleep(3600)
    try:
        comm.all_gather(torch.ones(2**20))
    except CommError as error:
        return str(error)
    return "nothing was raised"


def test_a_killed_rank_is_noticed_at_once(tmp_path: Path) -> None:
    with Ranks(lose_the_other, 2, tmp_path) as ranks:
        assert [ranks.line(rank) for rank in range(2)] == ["met", "met"]
        begun = time.monotonic()
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        assert ranks.line(0).startswith("Rank 0 of 2 has lost another rank in all_gather (")
        assert time.monotonic() - begun < patient(3) < SECONDS


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"is open to other users \(mode 755\)"):
        GlooComm(tmp_path, 0, 2, SHORT)
    tmp_path.chmod(0o700)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        GlooComm(tmp_path, 2, 2, SHORT)


def test_bytes_come_from_one_rank(tmp_path: Path) -> None:
    def act(comm: GlooComm) -> bytes:
        return comm.broadcast_bytes(b"from each", root=0)

    found = in_threads(2, tmp_path / "ranks", act, SHORT)
    assert isinstance(found[1], ValueError) and "rank 1 has bytes, and rank 0 tells them" in str(found[1])
    assert isinstance(found[0], CommError)
