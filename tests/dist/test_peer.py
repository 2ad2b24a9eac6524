"""Sums of ranks by writing into each other's memory: here all rooms are one process's, and a launch sends before another one takes."""

from __future__ import annotations

import enum
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.threads_of_ranks import in_ranks
from pagerunner.dist import peer
from pagerunner.dist.base import sum_in_order
from pagerunner.dist.gloo import GlooComm
from pagerunner.dist.null import NullComm
from pagerunner.dist.peer import PeerComm
from pagerunner.dist.staged import StagedComm
from pagerunner.engine.worker import worker
from pagerunner.runner.cuda_driver import CudaDriver, DriverError

pytest.importorskip("triton")
from helpers import fast_interpreter, interpreter_floats
from pagerunner.ops import peer_sums
from pagerunner.ops.linear import Norm
from pagerunner.ops.pair_sums import PairSums
from pagerunner.ops.peer_sums import LIMITS, Limits, PeerSums, room_bytes

fast_interpreter.install()
interpreter_floats.install()
pytestmark = pytest.mark.usefixtures("compiled_too")


def ends_of(ranks: int, rooms: list[torch.Tensor], limits: Limits | None = None) -> list[PeerSums]:
    peers = torch.tensor([room.data_ptr() for room in rooms])
    return [PeerSums(peers, rank, limits) for rank in range(ranks)]


def numbers(
    choose: random.Random, ranks: int, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]
) -> torch.Tensor:
    """A part for each rank, of very different sizes, so that another order of the ranks has other bits."""
    torch.manual_seed(choose.randrange(2**31))
    shape = choose.choice(shapes)
    return (torch.randn(ranks, *shape) * 10.0 ** torch.arange(ranks).view(-1, *[1] * len(shape))).to(
        choose.choice(dtypes)
    )


ALL = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.days(2)
@pytest.mark.parametrize(
    ("ranks", "calls", "bare", "once"),
    [
        (2, 6, 0, 0),
        (3, 5, 0, 0),
        (4, 4, 700, 700),
        (2, 6, 2**20, 2**20),
        (3, 6, 2**20, 2**20),
        (5, 3, 2**20, 2**20),
        (8, 2, 2**20, 2**20),
        (2, 6, 2**20, 0),
        (4, 8, 9000, 1000),
    ],
)
def test_sums_of_mixed_sizes_are_the_twins_bits(
    ranks: int, calls: int, bare: int, once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few programs, so that a program has several rounds; rooms keep what earlier calls have left. Sums of up to `bare` bytes go as bare words, those of
    up to `once` bytes not in two rounds."""
    monkeypatch.setattr(peer_sums, "_PROGRAMS", 3)
    places = 4 if once < bare else 2
    monkeypatch.setattr(
        peer_sums, "_BARE_PROGRAMS", 20 // places
    )  # which have as many rounds as places: a phase sends all of them
    monkeypatch.setattr(peer_sums, "_SLOT_BYTES", 4096)
    limits = Limits(0, 2**31, bare, once, places=places)
    rooms = [torch.zeros(room_bytes(ranks, limits), dtype=torch.uint8) for _ in range(ranks)]
    ends = ends_of(ranks, rooms, limits)
    choose = random.Random(ranks + bare)
    shapes: list[tuple[int, ...]] = [(1,), (2,), (3, 40), (2, 1024), (5, 1000), (17, 256), (1, 5000)]
    for call in range(calls):
        x = numbers(choose, ranks, shapes, ALL)
        residual = torch.randn(x.shape[1:]).to(x.dtype) if choose.random() < 0.5 else None
        total = sum_in_order(x)
        wanted = total if residual is None else residual + total
        parts = list(x.clone().unbind(0))
        residuals = [None if residual is None else residual.clone() for _ in range(ranks)]
        for phase in (0, 1, 2):
            for end, part, own in zip(ends, parts, residuals, strict=True):
                end.add_(part, own, send=phase == 0, relay=phase == 1, take=phase == 2)
        for part, own in zip(parts, residuals, strict=True):
            assert torch.equal(part if own is None else own, wanted), (call, x.shape, x.dtype)
        for room in rooms:  # on devices a rank waits until all flags of a program are of its round
            flags = room[-4 * 3 * ranks :].view(torch.int32).view(3, ranks)
            assert torch.equal(flags, ends[0]._rounds[:, None].expand(3, ranks))
    for end in ends:
        assert end._rounds.tolist() == ends[0]._rounds.tolist()
        assert end._bare_rounds.tolist() == ends[0]._bare_rounds.tolist()
    rounds = int(ends[0]._rounds[0] + ends[0]._bare_rounds[0])
    assert rounds > calls or bare, "a program has had several rounds"


@pytest.mark.days(2)
@pytest.mark.parametrize(
    ("ranks", "limits"),
    [
        (2, LIMITS[2]._replace(bare=0)),
        (3, LIMITS[3]._replace(bare=0)),
        (4, Limits(0, 2**31, 2**20, 200)),
        (2, Limits(0, 2**31, 2**20, whole=200, places=8)),
    ],
)
def test_a_sum_with_the_norm_behind_it_is_the_one_and_then_the_other(
    ranks: int, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens whose features aren't a power of two, too. The sum's bits are the twin's; a norm's sum of squares has another order."""
    monkeypatch.setattr(peer_sums, "_PROGRAMS", 3)
    monkeypatch.setattr(peer_sums, "_BARE_PROGRAMS", 9)
    rooms = [torch.zeros(room_bytes(ranks, limits), dtype=torch.uint8) for _ in range(ranks)]
    ends = ends_of(ranks, rooms, limits)
    choose = random.Random(ranks)
    joined = 0
    for call in range(7 if limits.bare else 5):
        x = numbers(
            choose,
            ranks,
            [
                (5, 96),
                (3, 1000),
                (9, 128),
                *((2, 1024), (9, 320)) * bool(limits.bare),
                *((1, 64), (4, 77)) * (not limits.bare),
            ],
            ALL,
        )
        residual, weight = torch.randn(x.shape[1:]).to(x.dtype), torch.randn(x.shape[-1]).to(x.dtype)
        norm = Norm(weight, 1e-6, offset=call % 2 == 1)
        total = residual + sum_in_order(x)
        joined += ends[0].takes_norm(x[0])
        residuals = [residual.clone() for _ in range(ranks)]
        for phase in (0, 1, 2):
            how = {"send": phase == 0, "relay": phase == 1, "take": phase == 2}
            found = [end.add_norm_(part, own, norm, **how) for end, part, own in zip(ends, x, residuals, strict=True)]
        for own, normed in zip(residuals, found, strict=True):
            assert torch.equal(own, total) and torch.equal(normed, found[0])
            steps = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[x.dtype]
            assert torch.allclose(normed.float(), norm(total).float(), rtol=steps, atol=1e-6), (call, x.shape, x.dtype)
    assert joined >= 5


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("ranks", "limits"), [(4, Limits(0, 2**31, 2**20, 200)), (2, Limits(0, 2**31, 2**20, whole=200, places=8))]
)
def test_a_sum_reads_what_a_rank_has_in_parts(
    ranks: int, limits: Limits, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts in float32 are added up in their order and rounded, as a kernel before the sum would do. Tiles have more tokens than there are."""
    monkeypatch.setattr(peer_sums, "_SLOT_WORDS", 100 if ranks == 2 else 1024)  # a token fills two slots
    rooms = [torch.zeros(room_bytes(ranks, limits), dtype=torch.uint8) for _ in range(ranks)]
    ends = ends_of(ranks, rooms, limits)
    for tokens, features, parts in ((5, 96, 3), (2, 320, 4), (9, 128, 1)):
        assert ends[0].takes_parts(tokens, features, torch.bfloat16)
        sums = torch.randn(ranks, parts, 16, features) * 10.0 ** torch.arange(ranks).view(ranks, 1, 1, 1)
        sums[:, :, tokens:] = torch.nan
        own = sums[:, 0].clone()
        for part in range(1, parts):
            own += sums[:, part]
        residual, weight = torch.randn(tokens, features).bfloat16(), torch.randn(features).bfloat16()
        total = residual + sum_in_order(own[:, :tokens].bfloat16())
        norm = Norm(weight, 1e-6) if normed else None
        residuals = [residual.clone() for _ in range(ranks)]
        for phase in (0, 1, 2):
            how = {"send": phase == 0, "relay": phase == 1, "take": phase == 2}
            found = [end.add_parts_(one, own, norm, **how) for end, one, own in zip(ends, sums, residuals, strict=True)]
        for own, one in zip(residuals, found, strict=True):
            assert torch.equal(own, total)
            assert one is None or torch.allclose(one.float(), Norm(weight, 1e-6)(total).float(), rtol=2**-7, atol=1e-6)
    assert not ends[0].takes_parts(9, 128, torch.float32) and not ends[0].takes_parts(1, 96, torch.bfloat16)


@pytest.mark.parametrize(
    ("ranks", "limits"), [(4, Limits(0, 2**31, 2**20, 200)), (2, Limits(0, 2**31, 2**20, whole=200, places=8))]
)
def test_a_rank_with_parts_and_others_without_add_up_one_sum(ranks: int, limits: Limits) -> None:
    """Ranks whose shares of a product differ may have kernels of different kinds, also where no norm follows: behind a stage's last layer."""
    rooms = [torch.zeros(room_bytes(ranks, limits), dtype=torch.uint8) for _ in range(ranks)]
    first, *others = ends_of(ranks, rooms, limits)
    x = (torch.randn(ranks, 5, 320) * 10.0 ** torch.arange(ranks).view(ranks, 1, 1)).bfloat16()
    parts, residual = torch.stack((x[0].float(), torch.zeros(5, 320))), torch.randn(5, 320).bfloat16()
    residuals = [residual.clone() for _ in range(ranks)]
    for phase in (0, 1, 2):
        how = {"send": phase == 0, "relay": phase == 1, "take": phase == 2}
        first.add_parts_(parts, residuals[0], **how)
        for end, part, own in zip(others, x[1:], residuals[1:], strict=True):
            end.add_(part.clone(), own, **how)
    assert all(torch.equal(own, residual + sum_in_order(x)) for own in residuals)


@pytest.mark.parametrize("normed", [False, True])
def test_a_sum_of_two_ranks_adds_up_pairs_before(normed: bool) -> None:
    """The bits are those of the kernel that does it alone, and of the twin. What pairs without an expert have isn't read."""
    ranks, limits = 2, Limits(0, 2**31, 2**20, whole=200, places=8)
    rooms = [torch.zeros(room_bytes(ranks, limits), dtype=torch.uint8) for _ in range(ranks)]
    ends = ends_of(ranks, rooms, limits)
    for tokens, features, active in ((5, 96, 3), (2, 320, 4), (9, 128, 1)):
        pairs = (
            torch.randn(ranks, tokens * active, features) * 10.0 ** torch.randint(-3, 3, (ranks, tokens * active, 1))
        ).bfloat16()
        experts = torch.randint(-1, 4, (ranks, tokens, active), dtype=torch.int32)
        pairs[experts.flatten(1) < 0] = torch.nan
        residual, weight = torch.randn(tokens, features).bfloat16(), torch.randn(features).bfloat16()
        own = torch.stack([PairSums(*one).total() for one in zip(pairs, experts, strict=True)])
        total, norm = residual + sum_in_order(own), Norm(weight, 1e-6) if normed else None
        residuals = [residual.clone() for _ in range(ranks)]
        for phase in (0, 1, 2):
            how = {"send": phase == 0, "relay": phase == 1, "take": phase == 2}
            given = zip(ends, pairs, experts, residuals, strict=True)
            found = [end.add_pairs_(*one, mine, norm, **how) for end, *one, mine in given]
        for own, one in zip(residuals, found, strict=True):
            assert torch.equal(own, total)
            assert (one is not None) == normed
            assert one is None or torch.allclose(one.float(), Norm(weight, 1e-6)(total).float(), rtol=2**-7, atol=1e-6)
        twin = residual.clone()
        NullComm().add_pairs_(pairs[0], experts[0], twin)
        assert torch.equal(twin, residual + PairSums(pairs[0], experts[0]).total())


def test_numbers_that_begin_within_a_word_are_added_up_and_gathered_too() -> None:
    """All ranks must take the same way, wherever their numbers lie."""
    rooms = [torch.zeros(room_bytes(2), dtype=torch.uint8) for _ in range(2)]
    ends = ends_of(2, rooms)
    x = torch.arange(2 * 9.0).to(torch.bfloat16).view(2, 9)
    parts = [x[0, 1:], x[1, :8].clone()]
    residuals = [torch.ones(9, dtype=torch.bfloat16)[1:] for _ in range(2)]
    wanted = residuals[0] + (parts[0] + parts[1])
    for phase in ({"take": False}, {"send": False}):
        for end, part, residual in zip(ends, parts, residuals, strict=True):
            end.add_(part, residual, **phase)
    assert all(torch.equal(residual, wanted) for residual in residuals)
    found = [torch.empty(2, 8, dtype=torch.bfloat16) for _ in range(2)]
    for phase in ({"take": False}, {"send": False}):
        for end, part, out in zip(ends, parts, found, strict=True):
            end.gather(part, out, **phase)
    assert all(torch.equal(out, torch.stack(parts)) for out in found)


def test_words_are_sent_with_the_round_to_its_half_of_the_room() -> None:
    """`test_peer_waits.py` takes them."""
    rooms = [torch.zeros(room_bytes(2), dtype=torch.uint8) for _ in range(2)]
    one, two = ends_of(2, rooms)
    ones = torch.ones(512, dtype=torch.bfloat16)
    for end in (one, two):
        end.gather(ones.clone(), torch.empty(2, 512, dtype=torch.bfloat16), take=False)
    slots = rooms[0][: 2 * 8 * 1024 * 128 * 2].view(torch.int32).view(2, 128, 2, 1024, 2)
    marks = slots[1, 0, 1, :256, 1]
    assert (marks == 1).all() and not slots[1, 0, 0].any() and not slots[0].any() and not slots[1, 1:].any()
    assert (slots[1, 0, 1, :256, 0] == ones.view(torch.int32)).all()


def test_numbers_of_words_that_are_no_multiple_of_16_have_one_kernel() -> None:
    """The keys of 217 rows are 8,246 words: no graph has such a number, and only steps of one to seven rows have met it before the first request."""
    odd = {peer_sums._few_words(words) for words in range(1, 2**17, 38) if words % 16}
    assert odd == {peer_sums._few_words(38)}
    assert len({peer_sums._few_words(words) for words in range(16, 2**17, 16)}) == 3


def test_large_sums_of_four_ranks_go_in_two_rounds() -> None:
    """They would send three times their bytes in one; of two ranks, as many as in two."""
    launched: list[tuple[int, str]] = []

    class Kernel:
        def __init__(self, *said: Any) -> None:
            self._said = said

        def __getitem__(self, grid: tuple[int]) -> Any:
            assert grid[0] <= 256
            return lambda *_, **__: launched.append(self._said)

    a_round = 4 * peer_sums._SLOT_WORDS * peer_sums._BARE_PROGRAMS
    assert 2 * LIMITS[2].bare / a_round <= LIMITS[2].places, (
        "no launch has a fence, and none uses places of the one before"
    )
    for ranks, limits in LIMITS.items():
        end = PeerSums(torch.zeros(ranks, dtype=torch.int64), 0)
        names = "peer_units", "peer_bare", "peer_bare_twice"
        end._kernels = SimpleNamespace(**{name: Kernel(ranks, name) for name in names}, DTYPES={torch.bfloat16: None})
        for num_bytes in (2**13, 2**18, 2**18 + 2, limits.most):
            end.add_(torch.empty(num_bytes // 2, dtype=torch.bfloat16))
    units, bare, twice = names
    assert launched == [
        *[(2, bare)] * 2, *[(2, units)] * 2, (3, bare), *[(3, units)] * 3, (4, bare), (4, twice), (4, units), (4, twice),
    ]  # fmt: skip


def test_what_the_kernel_can_not_do_is_left_to_nccl() -> None:
    most = 2**20
    made: dict[str, Any] = {}

    class Memory:
        def share(self, size: int) -> tuple[int, bytes]:
            made["size"] = size
            return 8192, b"mine"

        def open_shared(self, handle: bytes) -> int:
            return {b"theirs": 4096}[handle]

    done: list[tuple[str, int]] = []
    named = lambda name: SimpleNamespace(  # noqa: E731
        rank=1,
        size=2,
        add_=lambda x, _: done.append((name, x.nbytes)),
        all_reduce_=lambda x, _: done.append((name, x.nbytes)),
        gather=lambda x, out: done.append((name, out.nbytes)),
        all_gather=lambda x: done.append((name, x.nbytes)),
        all_to_all=lambda x: done.append((name, x.nbytes)),
        most_bytes=most,
        most_gathered=most // 2,
    )

    def sums(rooms: list[int], rank: int) -> Any:
        assert (rooms, rank) == ([4096, 8192], 1)
        return named("peers")

    told = iter([b"theirs", b""])
    host: Any = SimpleNamespace(
        rank=1, size=2, calls=0, broadcast_bytes=lambda data, root: data if root else next(told)
    )
    looking = [False]
    nccl: Any = named("nccl")
    nccl.rehearsing = lambda: looking[0]
    comm = peer.PeerComm(host, nccl, Memory(), lambda ranks: 64 * ranks, sums)
    assert made["size"] == 128
    for x, residual in (
        (torch.empty(most // 2, dtype=torch.bfloat16), None),
        (torch.empty(most // 2 + 1, dtype=torch.bfloat16), None),
        (torch.empty(4, 4), torch.empty(4, 4).T),
        (torch.empty(4, 4).T, None),
        (torch.empty(4, dtype=torch.float64), None),
        (torch.empty(0, 4), None),
        (torch.empty(4, 4), torch.empty(4, 4)),
    ):
        comm.all_reduce_(x, residual)
    names = ["peers", "nccl", "peers", "peers", "nccl", "peers"]  # there is nothing to add up of no numbers
    assert [name for name, _ in done] == names and host.calls == names.count("peers")
    assert comm.all_gather(torch.empty(0, 4)).shape == (2, 0, 4) and comm.all_to_all(torch.empty(2, 0)).shape == (2, 0)
    assert len(done) == len(names), "nothing is sent of no numbers, which a graph couldn't record by way of the host"
    assert comm.all_gather(torch.empty(4, 4).T).shape == (2, 4, 4) and done.pop() == ("peers", 128)
    comm.all_gather(torch.empty(most // 2 + 1, dtype=torch.uint8))
    assert done.pop() == ("nccl", most // 2 + 1), "what is gathered has a limit of its own"
    comm.all_gather(torch.empty(most + 1, dtype=torch.uint8))
    comm.all_to_all(torch.empty(2, most, dtype=torch.uint8))
    assert done.pop() == ("nccl", 2 * most)
    assert done.pop() == ("nccl", most + 1) and host.calls == names.count("peers") + 1
    looking[0] = True
    host.calls = names.count("peers")
    comm.all_reduce_(torch.empty(4, 4))
    assert len(done) == len(names) + 1 and host.calls == names.count("peers"), (
        "another rank may have nothing to compile"
    )


class OneProcess:
    """Sums of two ranks: what the other one has is known."""

    most_bytes = most_gathered = 2**31

    def __init__(self, theirs: torch.Tensor) -> None:
        self.theirs = theirs

    def add_(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        assert x.is_contiguous()
        total = x + self.theirs
        x.copy_(total) if residual is None else residual.add_(total)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out[0], out[1] = x, self.theirs


def test_two_ranks_need_nobody_else() -> None:
    """Numbers that aren't dense, and what each rank has for each."""
    theirs = torch.arange(6.0).view(2, 3)
    host: Any = SimpleNamespace(rank=0, size=2, calls=0, broadcast_bytes=lambda data, root: data or b"")
    memory: Any = SimpleNamespace(share=lambda size: (8, b"own"), open_shared=lambda handle: 16)
    nobody: Any = SimpleNamespace(rank=0, size=2, rehearsing=lambda: False)
    told = iter([b"theirs", b""])
    host.broadcast_bytes = lambda data, root: data if root == 0 else next(told)
    comm = peer.PeerComm(host, nobody, memory, lambda ranks: 64, lambda rooms, rank: OneProcess(theirs))
    x = torch.ones(3, 2).T
    comm.all_reduce_(x)
    assert torch.equal(x, theirs + 1)
    residual = torch.zeros(3, 2).T
    comm.all_reduce_(torch.ones(2, 3), residual)
    assert torch.equal(residual, theirs + 1)
    given = torch.full((2, 3), 7.0)
    assert torch.equal(comm.all_to_all(given), torch.stack([given[0], theirs[0]])), "what the other one has for rank 0"


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_numbers_of_all_ranks_are_gathered_to_the_bit(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between sums, as rooms are the same. NaNs keep their bits."""
    monkeypatch.setattr(peer_sums, "_PROGRAMS", 2)
    monkeypatch.setattr(peer_sums, "_WORD_PROGRAMS", 5)
    rooms = [torch.zeros(room_bytes(ranks), dtype=torch.uint8) for _ in range(ranks)]
    ends = ends_of(ranks, rooms, Limits(9000, 2**31))
    for shape, dtype in (
        ((3, 700), torch.float32),
        ((5,), torch.bfloat16),
        ((2000,), torch.int64),
        ((2, 3), torch.int8),
    ):
        num_bytes = torch.empty(shape, dtype=dtype).nbytes
        x = torch.randint(256, (ranks, num_bytes), dtype=torch.uint8).view(dtype).view(ranks, *shape)
        found = [torch.empty_like(x) for _ in range(ranks)]
        for phase in ({"take": False}, {"send": False}):
            for end, own, out in zip(ends, x, found, strict=True):
                end.gather(own, out, **phase)
        for out in found:
            assert torch.equal(out.view(torch.uint8), x.view(torch.uint8)), (shape, dtype)
        ones = torch.ones(ranks, 40)
        for phase in ({"take": False}, {"send": False}):
            for end, own in zip(ends, ones, strict=True):
                end.add_(own, **phase)
        assert (ones == ranks).all()


class Shared:
    """A rank's memory: its room is at 100 times its number, and others have it a little higher. `held` is what is taken or open."""

    def __init__(self, rank: int, *, shares: bool = True, opens: bool = True, fault: Exception | None = None) -> None:
        self._rank, self._shares, self._opens, self._fault = rank, shares, opens, fault
        self.held: list[int] = []

    def share(self, size: int) -> tuple[int, bytes]:
        if self._fault is not None:
            raise self._fault
        if not self._shares:
            raise DriverError("cuMemAlloc failed: no memory")
        self.held.append(100 * self._rank)
        return 100 * self._rank, str(self._rank).encode()

    def open_shared(self, handle: bytes) -> int:
        if not self._opens and handle == b"2":
            raise DriverError("device 1 has no way to device 2")
        self.held.append(100 * int(handle) + 1)
        return self.held[-1]

    def close_shared(self, address: int) -> None:
        assert address % 100
        self.held.remove(address)

    def unshare(self, address: int) -> None:
        self.held.remove(address)


def test_ranks_have_all_rooms_or_all_have_none(tmp_path: Path) -> None:
    def act(host: GlooComm) -> tuple[Any, Any]:
        host.broadcast_bytes(b"" if host.rank == 0 else None)
        memory = Shared(host.rank, **({faulty: how} if host.rank == 1 and faulty else {}))
        try:
            return peer.take_rooms(host, memory, 64), memory.held
        except peer.NoRoomsError as error:
            return str(error), memory.held

    faulty, how = "", None
    assert [rooms for rooms, _ in in_ranks(3, tmp_path / "all", act)] == [
        [100 * rank + (rank != own) for rank in range(3)] for own in range(3)
    ]
    for number, (faulty, how, why) in enumerate(  # noqa: B007  `act` reads them
        (
            ("shares", False, "cuMemAlloc failed: no memory"),
            ("opens", False, "device 1 has no way to device 2"),
            ("fault", RuntimeError(), "RuntimeError()"),
            ("fault", OSError("no such device"), "no such device"),
        )
    ):
        found = in_ranks(3, tmp_path / str(number), act)
        assert found == [(f"rank 1 of 3 can't share memory with the others ({why}).", [])] * 3


@pytest.mark.parametrize(
    ("by_kernel", "opens", "machines", "ways", "said"),
    [
        (True, True, 1, PeerComm, 0),
        (True, False, 1, SimpleNamespace, 1),
        (False, True, 1, SimpleNamespace, 0),
        (True, True, 2, SimpleNamespace, 0),
    ],
)
def test_all_ranks_add_up_in_the_same_way(
    by_kernel: bool, opens: bool, machines: int, ways: type, said: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    ranks = iter([1, 2])
    monkeypatch.setattr(worker, "NcclComm", lambda host, *_: SimpleNamespace(rank=host.rank, size=host.size))
    monkeypatch.setattr(worker, "CudaDriver", lambda _: Shared(next(ranks), opens=opens))
    sees = iter(["GPU-a GPU-b", "GPU-a GPU-b" if machines == 1 else "GPU-c"])
    monkeypatch.setattr(worker, "visible_devices", lambda: next(sees))
    found = in_ranks(
        2, tmp_path / "meeting", lambda host: worker._joined(host, torch.device("cpu"), by_kernel=by_kernel)
    )
    assert [type(comm) for comm in found] == [ways] * 2
    told = [record.getMessage() for record in caplog.records if record.name == worker.__name__]
    assert len(told) == said
    assert not told or told[0].startswith("NCCL makes all sums of ranks, as with disable_custom_all_reduce=True: rank ")


class AskedDriver:
    """The calls of `cuda.bindings.driver` with which memory is shared. Devices have atomic operations on each other's memory, or not."""

    CUresult = enum.IntEnum(
        "CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_OUT_OF_MEMORY": 2, "CUDA_ERROR_NOT_SUPPORTED": 801}
    )
    CUdevice_P2PAttribute = SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=3)
    CUipcMemHandle = SimpleNamespace

    def __init__(self, *, atomics: int = 1, handles: bool = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._results = {
            "cuDeviceGetP2PAttribute": (0, atomics),
            "cuMemAlloc": (0, 4096),
            "cuIpcGetMemHandle": (0, SimpleNamespace(reserved=b"handle")) if handles else (801,),
            "cuIpcOpenMemHandle": (0, 8192),
        }

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            status, *values = self._results.get(name, (0,))
            return self.CUresult(status), *values

        return call


def driver_of(device: int, calls: AskedDriver) -> CudaDriver:
    driver = CudaDriver.__new__(CudaDriver)
    driver._cu, driver._device = calls, device
    return driver


def test_memory_is_opened_only_where_atomic_operations_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    _, handle = driver_of(2, AskedDriver()).share(64)
    calls = AskedDriver()
    assert driver_of(0, calls).open_shared(handle) == 8192
    (asked, *pair), (opened, what, how) = calls.calls
    assert (asked, pair, opened, what.reserved, how) == (
        "cuDeviceGetP2PAttribute",
        [3, 0, 2],
        "cuIpcOpenMemHandle",
        b"handle",
        1,
    )
    calls = AskedDriver(atomics=0)
    with pytest.raises(
        DriverError, match="^device 0 has no atomic operations on the memory of device 2, as .* NVLink$"
    ):
        driver_of(0, calls).open_shared(handle)
    assert [name for name, *_ in calls.calls] == ["cuDeviceGetP2PAttribute"]
    assert driver_of(2, AskedDriver(atomics=0)).open_shared(handle) == 8192, "ranks that share a device"
    calls = AskedDriver(handles=False)
    with pytest.raises(DriverError, match="^cuIpcGetMemHandle failed: CUDA_ERROR_NOT_SUPPORTED$"):
        driver_of(2, calls).share(64)
    assert calls.calls[-1] == ("cuMemFree", 4096)


def test_ranks_that_share_a_device_send_through_the_host(tmp_path: Path) -> None:
    def act(host: GlooComm) -> tuple[Any, ...]:
        looking = [False]
        comm = StagedComm(host, lambda: looking[0])
        x = torch.tensor([256.0, 1.0], dtype=torch.bfloat16) * (host.rank + 1)
        gathered, residual = comm.all_gather(x), torch.ones_like(x)
        comm.all_reduce_(x.clone(), residual)
        comm.all_reduce_(x)
        assert comm.all_to_all(torch.arange(2) + 10 * host.rank).tolist() == [host.rank, 10 + host.rank]
        looking[0] = True
        assert host.rank or comm.all_to_all(x).shape == (2,)
        shape = (
            comm.all_gather(x).shape if host.rank else (2, 2)
        )  # nothing is sent: another rank may have nothing to compile
        return (
            gathered.tolist(),
            x.tolist(),
            residual.tolist(),
            comm.broadcast_bytes(b"ab" if host.rank else None, 1),
            tuple(shape),
        )

    one, other = in_ranks(2, tmp_path / "meeting", act)
    assert one == other == ([[256, 1], [512, 2]], [768, 3], [768, 4], b"ab", (2, 2))
