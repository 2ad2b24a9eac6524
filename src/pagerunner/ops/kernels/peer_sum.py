"""A sum of ranks, or all their numbers, in one launch: each rank writes its numbers into other ranks' rooms, and reads what has come into its own.

`peer_words` (few numbers): each 4 bytes go with the number of the round, in one store of 8 bytes. So the numbers themselves say when they are
there: nothing is fenced, and no flag follows them. This leans on the devices more than on PTX's memory model, for which a plain store and a load in
another rank race: on NVIDIA's devices 8 aligned bytes arrive whole, and a load that asks again sees them.
`peer_units` (more numbers): 4 bytes go as 4 bytes. A flag follows a program's numbers.
`peer_sum_twice` (still more, of four ranks): in two rounds. A rank writes to each rank the part of its numbers that this one adds up, and what is
added up is written to all.

All three start before their predecessor has ended, and let their successor start at once (`kernels/launch.py`): a product behind a sum reads its first
weights while the sum waits for other ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import start_next, wait_turn

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int32: tl.float16}
"""Of the numbers in a word. Words that are only gathered have none, which nobody asks."""


@triton.jit
def _flag(flag_ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [flag_ptr], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _wait(flag_ptr, round):
    seen = round - 1
    while seen - round < 0:  # numbers wrap
        seen = _flag(flag_ptr)


@triton.jit
def _tell(flags_ptr, round, mask, PADDED: tl.constexpr):
    """Say to all ranks that this program's numbers of the round are there: one release for all of them."""
    tl.debug_barrier()
    tl.atomic_xchg(flags_ptr, tl.zeros([PADDED], tl.int32) + round, mask=mask, sem="release", scope="sys")


@triton.jit
def _arrived(place, mask, round, WAIT: tl.constexpr):
    """The words of a slot, once all of them are those of the round. Without WAIT they are known to be there."""
    got = tl.load(place, mask=mask, other=0, volatile=True)
    if WAIT:
        while tl.min(((got >> 32).to(tl.int32) == round).to(tl.int32) | (1 - mask.to(tl.int32))) == 0:
            got = tl.load(place, mask=mask, other=0, volatile=True)
    return got.to(tl.int32)


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    return words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, DTYPE: tl.constexpr):
    return (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _word(low, high, DTYPE: tl.constexpr):
    """Two numbers in 16 bits as one of 32."""
    low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _scaled(x, scale, weight, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """A norm's last step, as `kernels/norm.py` rounds it."""
    y = x * scale
    if OFFSET:
        return y + y * weight
    return y.to(DTYPE).to(tl.float32) * weight


@triton.jit(do_not_specialize=["rank"])
def peer_words(
    x_ptr, out_ptr, peers_ptr, rounds_ptr, num, rank,
    N: tl.constexpr, W: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr, DTYPE: tl.constexpr,
    GATHER: tl.constexpr, ADD: tl.constexpr, SEND: tl.constexpr, TAKE: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See PeerSums. `num` words of 32 bits in units of W; program p has units p, p + the number of programs, ... A unit is a round.

    Rounds are as those of `peer_units`, but counted by themselves, in a part of the room that only words use. A sum is of two numbers of DTYPE in a word.
    """
    start_next(PDL)
    program, programs, at = tl.program_id(0), tl.num_programs(0), tl.arange(0, W)
    own = tl.multiple_of(tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int64)), 16)
    wait_turn(PDL)
    round = tl.load(rounds_ptr + program)
    unit = program
    while unit * W < num:
        round += 1 + 2 * (round == -1).to(tl.int32)  # never 0, as where nobody has written; odd and even ones alternate
        place = unit * W + at
        mask = place < num
        slots = ((round & 1) * PROGRAMS + program) * N * SLOT
        x = tl.load(x_ptr + place, mask=mask, other=0)
        if SEND:
            marked = (x.to(tl.int64) & 0xFFFFFFFF) | (round.to(tl.int64) << 32)
            for peer in tl.static_range(N):
                if peer != rank:
                    theirs = tl.multiple_of(tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64)), 16)
                    tl.store(theirs + slots + rank * SLOT + at, marked, mask=mask)
        if TAKE:
            if ADD:
                old = tl.load(out_ptr + place, mask=mask, other=0)
            low, high = tl.zeros([W], tl.float32), tl.zeros([W], tl.float32)
            for peer in tl.static_range(N):
                part = x
                if peer != rank:
                    part = _arrived(own + slots + peer * SLOT + at, mask, round, WAIT)
                if GATHER:
                    tl.store(out_ptr + peer * num + place, part, mask=mask)
                else:
                    low += _low(part, DTYPE)
                    high += _high(part, DTYPE)
            if not GATHER:
                total = _word(low, high, DTYPE)
                if ADD:
                    total = _word(_low(total, DTYPE) + _low(old, DTYPE), _high(total, DTYPE) + _high(old, DTYPE), DTYPE)
                tl.store(out_ptr + place, total, mask=mask)
        unit += programs
        tl.debug_barrier()  # no thread sends the next round's words before all have those of this one
    if TAKE:
        tl.store(rounds_ptr + program, round)


@triton.jit(do_not_specialize=["rank", "eps"])
def peer_units(
    x_ptr, out_ptr, weight_ptr, normed_ptr, peers_ptr, rounds_ptr, num, rank, eps,
    N: tl.constexpr, PADDED: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr, PROGRAMS: tl.constexpr,
    SLOT: tl.constexpr, FLAGS: tl.constexpr, GATHER: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, SEND: tl.constexpr,
    TAKE: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See PeerSums. Program p of a rank speaks with programs p of the others alone, about units p, p + the number of programs, ... of W numbers.

    Each round of a program is of up to UNITS units and has a number, which is counted on the device: it is the same on all ranks, in graphs and
    outside. A flag says that a rank's numbers of this round are there. Even and odd rounds have halves of the room of their own: whoever begins
    round r + 2 has seen the others' flags of r + 1, so they have read what came in r. NORM: 1 is a norm behind the sum, 2 one whose weight counts
    from 1; a unit is a token then.
    """
    start_next(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    at, peers = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    element = tl.pointer_type(x_ptr.dtype.element_ty)
    own = tl.load(peers_ptr + rank)
    flags_ptr = (tl.load(peers_ptr + peers, mask=peers < N) + FLAGS).to(tl.pointer_type(tl.int32))
    own_flags_ptr = (own + FLAGS).to(tl.pointer_type(tl.int32)) + program * N
    own_ptr = tl.multiple_of(own.to(element), 16)
    if NORM != 0:
        weight = tl.load(weight_ptr + at, mask=at < W, other=0.0).to(tl.float32)
    wait_turn(PDL)
    round = tl.load(rounds_ptr + program)
    first = program.to(tl.int64)
    while first * W < num:
        round += 1
        slots = ((round & 1) * PROGRAMS + program).to(tl.int64) * N * SLOT
        if SEND:
            for k in range(UNITS):
                place = (first + k * programs) * W + at
                mask = (at < W) & (place < num)
                x = tl.load(x_ptr + place, mask=mask)
                for peer in tl.static_range(N):
                    if peer != rank:
                        theirs = tl.multiple_of(tl.load(peers_ptr + peer).to(element), 16)
                        tl.store(theirs + slots + rank * SLOT + k * BLOCK + at, x, mask=mask)
            _tell(flags_ptr + program * N + rank, round, peers < N, PADDED)
        if TAKE:
            if WAIT:
                for peer in tl.static_range(N):
                    _wait(own_flags_ptr + peer, round)
            for k in range(UNITS):
                place = (first + k * programs) * W + at
                mask = (at < W) & (place < num)
                total = tl.zeros([BLOCK], tl.float32)
                for peer in tl.static_range(N):
                    if peer == rank:
                        part = tl.load(x_ptr + place, mask=mask, other=0)
                    else:
                        slot_ptr = own_ptr + slots + peer * SLOT + k * BLOCK
                        part = tl.load(slot_ptr + at, mask=mask, other=0, cache_modifier=".cg")
                    if GATHER:
                        tl.store(out_ptr + peer * num + place, part, mask=mask)
                    else:
                        total += part.to(tl.float32)
                if not GATHER:
                    total = total.to(x_ptr.dtype.element_ty)
                    if ADD:
                        total = tl.load(out_ptr + place, mask=mask, other=0).to(tl.float32) + total.to(tl.float32)
                    total = total.to(out_ptr.dtype.element_ty)
                    tl.store(out_ptr + place, total, mask=mask)
                    if NORM != 0:
                        x = total.to(tl.float32)
                        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) * (1.0 / W) + eps)
                        y = _scaled(x, scale, weight, normed_ptr.dtype.element_ty, NORM == 2)
                        tl.store(normed_ptr + place, y.to(normed_ptr.dtype.element_ty), mask=mask)
        first += UNITS * programs
    if TAKE:
        tl.store(rounds_ptr + program, round)


@triton.jit(do_not_specialize=["rank"])
def peer_sum_twice(
    x_ptr, out_ptr, peers_ptr, rounds_ptr, num, rank,
    N: tl.constexpr, PART: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr, FLAGS: tl.constexpr,
    ADD: tl.constexpr, SEND: tl.constexpr, RELAY: tl.constexpr, TAKE: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of `peer_units` in two rounds: each of N ranks, a power of two, adds up PART of a program's N * PART numbers, and sends that to all.

    So a rank sends 2 (N - 1) / N of its bytes, and not N - 1 times as many. The bits are the same.
    """
    start_next(PDL)
    program = tl.program_id(0)
    at, peers = tl.arange(0, PART), tl.arange(0, N)
    element = tl.pointer_type(x_ptr.dtype.element_ty)
    wait_turn(PDL)
    round = tl.load(rounds_ptr + program) + 1
    own = tl.load(peers_ptr + rank)
    flags_ptr = (tl.load(peers_ptr + peers) + FLAGS).to(tl.pointer_type(tl.int32)) + program * N + rank
    own_flags_ptr = (own + FLAGS).to(tl.pointer_type(tl.int32)) + program * N
    own_ptr = tl.multiple_of(own.to(element), 16)
    first_slots = ((round & 1) * PROGRAMS + program) * N * SLOT
    second_slots = ((1 - (round & 1)) * PROGRAMS + program) * N * SLOT
    if SEND:
        for peer in tl.static_range(N):
            place = (program * N + peer) * PART + at
            theirs = tl.multiple_of(tl.load(peers_ptr + peer).to(element), 16)
            tl.store(
                theirs + first_slots + rank * SLOT + at, tl.load(x_ptr + place, mask=place < num), mask=place < num
            )
        _tell(flags_ptr, round, peers < N, N)
    if RELAY:
        mask = (program * N + rank) * PART + at < num
        total = tl.zeros([PART], tl.float32)
        for peer in tl.static_range(N):
            if WAIT:
                _wait(own_flags_ptr + peer, round)
            part = tl.load(own_ptr + first_slots + peer * SLOT + at, mask=mask, cache_modifier=".cg")
            total += part.to(tl.float32)
        for peer in tl.static_range(N):
            theirs = tl.multiple_of(tl.load(peers_ptr + peer).to(element), 16)
            tl.store(theirs + second_slots + rank * SLOT + at, total.to(x_ptr.dtype.element_ty), mask=mask)
        _tell(flags_ptr, round + 1, peers < N, N)
    if TAKE:
        for peer in tl.static_range(N):
            if WAIT:
                _wait(own_flags_ptr + peer, round + 1)
            place = (program * N + peer) * PART + at
            total = tl.load(own_ptr + second_slots + peer * SLOT + at, mask=place < num, cache_modifier=".cg")
            if ADD:
                total = tl.load(out_ptr + place, mask=place < num).to(tl.float32) + total.to(tl.float32)
            tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=place < num)
        tl.store(rounds_ptr + program, round + 1)
