"""A sum of ranks, or all their numbers, in one launch: each rank writes its numbers into all ranks' memory, and reads what has come into its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wait(flag_ptr, epoch):
    seen = epoch - 1
    while seen - epoch < 0:  # numbers wrap
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [flag_ptr], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _tell(flags_ptr, epoch, mask, PADDED: tl.constexpr):
    """Say to all ranks that this program's numbers of the epoch are there: one release for all of them."""
    tl.debug_barrier()
    tl.atomic_xchg(flags_ptr, tl.zeros([PADDED], tl.int32) + epoch, mask=mask, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rank"])
def peer_sum(
    x_ptr, out_ptr, peers_ptr, epochs_ptr, num, rank,
    N: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr, FLAGS: tl.constexpr,
    GATHER: tl.constexpr, ADD: tl.constexpr, SEND: tl.constexpr, TAKE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """See PeerSums. Program p of a rank speaks with programs p of the others alone.

    Each round of a program has a number, its epoch, which is counted on the device: it is the same on all ranks, in graphs and outside. A flag
    says that a rank's numbers of this epoch are there. Even and odd epochs have rooms of their own: whoever begins epoch e + 2 has seen the
    others' flags of e + 1, so they have read what came in e.
    """
    program = tl.program_id(0)
    at, peers = tl.arange(0, CHUNK), tl.arange(0, PADDED)
    element = tl.pointer_type(x_ptr.dtype.element_ty)
    epoch = tl.load(epochs_ptr + program)
    own = tl.load(peers_ptr + rank)
    flags_ptr = (tl.load(peers_ptr + peers, mask=peers < N) + FLAGS).to(tl.pointer_type(tl.int32))
    first = program * CHUNK
    while first < num:
        epoch += 1
        mask = first + at < num
        room = ((epoch & 1) * PROGRAMS + program) * N * SLOT
        if SEND:
            x = tl.load(x_ptr + first + at, mask=mask)
            for peer in tl.static_range(N):
                theirs = tl.multiple_of(tl.load(peers_ptr + peer).to(element), 16)
                tl.store(theirs + room + rank * SLOT + at, x, mask=mask)
            _tell(flags_ptr + program * N + rank, epoch, peers < N, PADDED)
        if TAKE:
            if WAIT:
                for peer in tl.static_range(N):
                    _wait((own + FLAGS).to(tl.pointer_type(tl.int32)) + program * N + peer, epoch)
            total = tl.zeros([CHUNK], tl.float32)
            for peer in tl.static_range(N):
                part = tl.load(
                    tl.multiple_of(own.to(element), 16) + room + peer * SLOT + at, mask=mask, cache_modifier=".cg"
                )
                if GATHER:
                    tl.store(out_ptr + peer * num + first + at, part, mask=mask)
                else:
                    total += part.to(tl.float32)
            if not GATHER:
                total = total.to(x_ptr.dtype.element_ty)
                if ADD:
                    total = tl.load(out_ptr + first + at, mask=mask).to(tl.float32) + total.to(tl.float32)
                tl.store(out_ptr + first + at, total.to(out_ptr.dtype.element_ty), mask=mask)
        first += PROGRAMS * CHUNK
    if TAKE:
        tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=["rank"])
def peer_sum_twice(
    x_ptr, out_ptr, peers_ptr, epochs_ptr, num, rank,
    N: tl.constexpr, PART: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr, FLAGS: tl.constexpr,
    ADD: tl.constexpr, SEND: tl.constexpr, RELAY: tl.constexpr, TAKE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """The sum of `peer_sum` in two rounds: each of N ranks, a power of two, adds up PART of a program's N * PART numbers, and sends that to all.

    So a rank sends 2 (N - 1) / N of its bytes, and not N - 1 times as many. The bits are the same.
    """
    program = tl.program_id(0)
    at, peers = tl.arange(0, PART), tl.arange(0, N)
    element = tl.pointer_type(x_ptr.dtype.element_ty)
    epoch = tl.load(epochs_ptr + program) + 1
    own = tl.load(peers_ptr + rank)
    flags_ptr = (tl.load(peers_ptr + peers) + FLAGS).to(tl.pointer_type(tl.int32)) + program * N + rank
    own_flags_ptr = (own + FLAGS).to(tl.pointer_type(tl.int32)) + program * N
    own_ptr = tl.multiple_of(own.to(element), 16)
    first_room = ((epoch & 1) * PROGRAMS + program) * N * SLOT
    second_room = ((1 - (epoch & 1)) * PROGRAMS + program) * N * SLOT
    if SEND:
        for peer in tl.static_range(N):
            place = (program * N + peer) * PART + at
            theirs = tl.multiple_of(tl.load(peers_ptr + peer).to(element), 16)
            tl.store(theirs + first_room + rank * SLOT + at, tl.load(x_ptr + place, mask=place < num), mask=place < num)
        _tell(flags_ptr, epoch, peers < N, N)
    if RELAY:
        mask = (program * N + rank) * PART + at < num
        total = tl.zeros([PART], tl.float32)
        for peer in tl.static_range(N):
            if WAIT:
                _wait(own_flags_ptr + peer, epoch)
            part = tl.load(own_ptr + first_room + peer * SLOT + at, mask=mask, cache_modifier=".cg")
            total += part.to(tl.float32)
        for peer in tl.static_range(N):
            theirs = tl.multiple_of(tl.load(peers_ptr + peer).to(element), 16)
            tl.store(theirs + second_room + rank * SLOT + at, total.to(x_ptr.dtype.element_ty), mask=mask)
        _tell(flags_ptr, epoch + 1, peers < N, N)
    if TAKE:
        for peer in tl.static_range(N):
            if WAIT:
                _wait(own_flags_ptr + peer, epoch + 1)
            place = (program * N + peer) * PART + at
            total = tl.load(own_ptr + second_room + peer * SLOT + at, mask=place < num, cache_modifier=".cg")
            if ADD:
                total = tl.load(out_ptr + place, mask=place < num).to(tl.float32) + total.to(tl.float32)
            tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=place < num)
        tl.store(epochs_ptr + program, epoch + 1)
