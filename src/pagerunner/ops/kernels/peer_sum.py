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
            tl.debug_barrier()
            told = tl.zeros([PADDED], tl.int32) + epoch  # one release for all peers
            tl.atomic_xchg(flags_ptr + program * N + rank, told, mask=peers < N, sem="release", scope="sys")
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
