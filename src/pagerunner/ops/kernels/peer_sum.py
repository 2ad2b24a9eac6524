"""A sum of ranks, or all their numbers, in one launch: each rank writes its numbers into other ranks' rooms, and reads what has come into its own.

`peer_words` (few numbers of all ranks, which aren't added up): each 4 bytes go with the number of the round, in one store of 8 bytes. So the numbers themselves say when they are
there: nothing is fenced, and no flag follows them. This leans on the devices more than on PTX's memory model, for which a plain store and a load in
another rank race: on NVIDIA's devices 8 aligned bytes arrive whole, and a load that asks again sees them.
`peer_bare` (sums): 4 bytes go as their complement, which is never 0. Whoever has read them puts a 0 there. So again the numbers themselves say when
they are there, in half as many bytes. A place must be clear before it gets another word: launches stand between the two, or a fence where a launch has many rounds.
`peer_bare_token` (of two ranks): the same with a token for each program, which adds up a product's parts before and computes the norm behind.
`peer_bare_twice` (larger sums, of four ranks): in two rounds. A rank writes to each rank the part of its numbers that this one adds up, and what is
added up is written to all. So a rank sends 2 (N - 1) / N of its bytes, and not N - 1 times as many.
`peer_units` (more numbers): 4 bytes go as 4 bytes. A flag follows a program's numbers.

All of them start before their predecessor has ended, and let their successor start at once (`kernels/launch.py`): a product behind a sum reads its first
weights while the sum waits for other ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.moe.pair_sums import NONE, pairs_in_order

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Of the numbers in a word."""


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
    N: tl.constexpr, W: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr,
    SEND: tl.constexpr, TAKE: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See PeerSums. `num` words of 32 bits in units of W; program p has units p, p + the number of programs, ... A unit is a round.

    Rounds are as those of `peer_units`, but counted by themselves, in a part of the room that only words use.
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
            for peer in tl.static_range(N):
                part = x
                if peer != rank:
                    part = _arrived(own + slots + peer * SLOT + at, mask, round, WAIT)
                tl.store(out_ptr + peer * num + place, part, mask=mask)
        unit += programs
        tl.debug_barrier()  # no thread sends the next round's words before all have those of this one
    if TAKE:
        tl.store(rounds_ptr + program, round)


@triton.jit
def _fence(round):
    """Give `round` back. What this thread has read and written before is behind it for all devices, and what it does from here on before it."""
    return tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [round], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _next_round(round, done, PLACES: tl.constexpr, WAIT: tl.constexpr):
    """Between two rounds of a launch, of which `done` are behind: a fence behind every PLACES - 1 of them.

    Why. A rank clears the place of round r. The next word for it is of round r + PLACES, which the sender sends when it has this rank's words of round
    r + PLACES - 1. So the clearing must come before those, which this rank sends PLACES - 1 rounds later. If they are of another launch it does: a kernel has its turn when all that
    the one before has written is there. In one launch the two are a store to this device and one to another device, which nothing keeps in their order: by
    PTX's memory model only a fence of scope sys does, as the next word comes from another device. That fence waits until all words on their way have arrived, some 3 us.
    With PLACES - 1 rounds or fewer no launch has both. Example with four places: three rounds need no fence, and six need one, behind the third.
    The barrier: no thread sends words of the next round before all have cleared those of this one.
    """
    if WAIT:
        if done % (PLACES - 1) == 0:
            round = _fence(round)
    tl.debug_barrier()
    return round


@triton.jit
def _known(words):
    """Words as they may be sent: the only one whose complement is 0 has two numbers that are none, or one, and is another such word."""
    return tl.where(words == -1, 0x7FFF7FFF, words)


@triton.jit
def _added(low, high, words, DTYPE: tl.constexpr):
    """Sums of numbers in words, with those of one more rank."""
    if DTYPE == tl.float32:
        low += words.to(tl.float32, bitcast=True)
    else:
        low += _low(words, DTYPE)
        high += _high(words, DTYPE)
    return low, high


@triton.jit
def _rounded(low, high, DTYPE: tl.constexpr):
    if DTYPE == tl.float32:
        words = low.to(tl.int32, bitcast=True)
    else:
        words = _word(low, high, DTYPE)
    return words


@triton.jit
def _with_old(total, old, DTYPE: tl.constexpr):
    """Words whose numbers are the sums of both."""
    low, high = tl.zeros_like(total).to(tl.float32), tl.zeros_like(total).to(tl.float32)
    low, high = _added(low, high, total, DTYPE)
    low, high = _added(low, high, old, DTYPE)
    return _rounded(low, high, DTYPE)


@triton.jit
def _look(slots, own_words, mask, rank, N: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """What all ranks' words add up to, in the order of the ranks, and whether all of them were there: they are asked for at once."""
    there = tl.zeros_like(own_words) == 0
    low, high = tl.zeros_like(own_words).to(tl.float32), tl.zeros_like(own_words).to(tl.float32)
    for peer in tl.static_range(N):
        got = tl.load(slots + peer * STEP, mask=mask & (peer != rank), other=-1, volatile=True)
        there = there & (got != 0)
        low, high = _added(low, high, tl.where(peer == rank, own_words, ~got), DTYPE)
    return low, high, tl.min(there.to(tl.int32))


@triton.jit
def _all_there(
    slots, own_words, mask, rank, N: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr, WAIT: tl.constexpr
):
    """The sum of all ranks' words, once they are there, as words. Their places are free again."""
    low, high, there = _look(slots, own_words, mask, rank, N, STEP, DTYPE)
    if WAIT:
        while there == 0:
            low, high, there = _look(slots, own_words, mask, rank, N, STEP, DTYPE)
    for peer in tl.static_range(N):
        tl.store(slots + peer * STEP, tl.zeros_like(own_words), mask=mask & (peer != rank))
    return _known(_rounded(low, high, DTYPE))


@triton.jit
def _rooms(peers_ptr, rank, N: tl.constexpr):
    """The addresses of all ranks' rooms, from this rank's own on: each sends to the next one first, so that none gets the words of all at once."""
    rooms = ()
    for step in tl.static_range(N):
        room = tl.load(peers_ptr + (rank + step) % N).to(tl.pointer_type(tl.int32))
        rooms = rooms + (tl.multiple_of(room, 16),)
    return rooms


@triton.jit(do_not_specialize=["rank"])
def peer_bare(
    x_ptr, out_ptr, peers_ptr, rounds_ptr, num, rank,
    N: tl.constexpr, W: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr, PLACES: tl.constexpr, DTYPE: tl.constexpr,
    ADD: tl.constexpr, SEND: tl.constexpr, TAKE: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See PeerSums. Units and rounds are those of `peer_words`, in a part of the room that only bare words use.

    A rank clears a word when it has it. The sender's next word for this place is of PLACES rounds later, which it begins when it has all words
    of the round before. These were sent behind the clearing: see `_next_round`. As in `peer_words`, words themselves are plain stores and loads.
    """
    start_next(PDL)
    program, programs, at = tl.program_id(0), tl.num_programs(0), tl.arange(0, W)
    rooms = _rooms(peers_ptr, rank, N)
    own = rooms[0]
    wait_turn(PDL)
    round = tl.load(rounds_ptr + program)
    unit, done = program, 0
    while unit * W < num:
        round += 1
        place = unit * W + at
        mask = place < num
        slots = ((round & (PLACES - 1)) * PROGRAMS + program) * N * SLOT
        x = _known(tl.load(x_ptr + place, mask=mask, other=0))
        if SEND:
            for step in tl.static_range(1, N):
                tl.store(rooms[step] + slots + rank * SLOT + at, ~x, mask=mask)
        if TAKE:
            if ADD:
                old = tl.load(out_ptr + place, mask=mask, other=0)
            total = _all_there(own + slots + at, x, mask, rank, N, SLOT, DTYPE, WAIT)
            if ADD:
                total = _with_old(total, old, DTYPE)
            tl.store(out_ptr + place, total, mask=mask)
        unit, done = unit + programs, done + 1
        if unit * W < num:
            round = _next_round(round, done, PLACES, WAIT)
    if TAKE:
        tl.store(rounds_ptr + program, round)


@triton.jit
def _normed(words, weights, eps, features, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """The norm of a token's numbers in words, as words. Words of nothing are 0."""
    if DTYPE == tl.float32:
        x = words.to(tl.float32, bitcast=True)
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / features + eps)
        y = _scaled(x, scale, weights.to(tl.float32, bitcast=True), DTYPE, OFFSET).to(tl.int32, bitcast=True)
    else:
        low, high = _low(words, DTYPE), _high(words, DTYPE)
        scale = 1.0 / tl.sqrt_rn(tl.sum(low * low + high * high, 0) / features + eps)
        low = _scaled(low, scale, _low(weights, DTYPE), DTYPE, OFFSET)
        y = _word(low, _scaled(high, scale, _high(weights, DTYPE), DTYPE, OFFSET), DTYPE)
    return y


@triton.jit
def _given(
    x_ptr, experts_ptr, unit, first, num, stride, PART: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr,
    PARTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """EACH words of a unit of UNIT words, from its word `first` on. PARTS: two numbers of 16 bits are the sums of so many float32, which are `stride` apart.

    PAIRS: a unit is a token, whose numbers are the sums of so many experts' outputs (`kernels/moe/pair_sums.py`).
    """
    at = tl.arange(0, PART)
    if PAIRS > 0:
        BA: tl.constexpr = triton.next_power_of_2(PAIRS)
        keys = pairs_in_order(experts_ptr, unit, PAIRS, BA)
        low, high = tl.zeros([PART], tl.float32), tl.zeros([PART], tl.float32)
        for a in tl.static_range(PAIRS):
            place = (unit * PAIRS + keys[a] % BA) * UNIT + first + at
            low, high = _added(low, high, tl.load(x_ptr + place, mask=(at < EACH) & (keys[a] < NONE), other=0), DTYPE)
        words = _rounded(low, high, DTYPE)
    elif PARTS == 0:
        place = unit * UNIT + first + at
        words = tl.load(x_ptr + place, mask=(at < EACH) & (place < num), other=0)
    else:
        both = tl.arange(0, 2 * PART)
        total = tl.zeros([2 * PART], tl.float32)
        for part in tl.static_range(PARTS):
            place = part * stride + unit * 2 * UNIT + 2 * first + both
            total += tl.load(x_ptr + place, mask=both < 2 * EACH, other=0.0)
        low, high = tl.split(tl.reshape(total, [PART, 2]))
        words = _word(low, high, DTYPE)
    return words


@triton.jit(do_not_specialize=["rank", "eps"])
def peer_bare_token(
    x_ptr, experts_ptr, out_ptr, weight_ptr, normed_ptr, peers_ptr, rounds_ptr, stride, rank, eps,
    N: tl.constexpr, EACH: tl.constexpr, PART: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr, PLACES: tl.constexpr, DTYPE: tl.constexpr,
    NORM: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr, SEND: tl.constexpr, TAKE: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`peer_bare` with a token of EACH words for each program, which adds up parts or pairs before and computes the norm behind. NORM and PARTS as in `peer_bare_twice`, PAIRS as in `_given`.

    A token is as many rounds as it fills slots, all at once. Nothing is fenced: with those of the launch before they are at most PLACES, so that
    no place gets a word right after the launch that cleared it, see `_next_round`.
    """
    start_next(PDL)
    program, at = tl.program_id(0), tl.arange(0, PART)
    mask = at < EACH
    rooms = _rooms(peers_ptr, rank, N)
    if NORM != 0:
        weights = tl.load(weight_ptr + at, mask=mask, other=0)
    wait_turn(PDL)
    round = tl.load(rounds_ptr + program) + 1
    slots = (((round + at // SLOT) & (PLACES - 1)) * PROGRAMS + program) * N * SLOT + at % SLOT
    x = _known(
        _given(x_ptr, experts_ptr, program, 0, (program + 1) * EACH, stride, PART, EACH, EACH, DTYPE, PARTS, PAIRS)
    )
    out_ptr += program * EACH + at
    old = tl.load(out_ptr, mask=mask, other=0)
    if SEND:
        for step in tl.static_range(1, N):
            tl.store(rooms[step] + slots + rank * SLOT, ~x, mask=mask)
    if TAKE:
        total = _with_old(_all_there(rooms[0] + slots, x, mask, rank, N, SLOT, DTYPE, WAIT), old, DTYPE)
        tl.store(out_ptr, total, mask=mask)
        if NORM != 0:
            features: tl.constexpr = EACH * (4 // (DTYPE.primitive_bitwidth // 8))
            normed = _normed(total, weights, eps, features, DTYPE, NORM == 2)
            tl.store(normed_ptr + program * EACH + at, normed, mask=mask)
        tl.store(rounds_ptr + program, round + (EACH - 1) // SLOT)


@triton.jit(do_not_specialize=["rank", "eps"])
def peer_bare_twice(
    x_ptr, out_ptr, weight_ptr, normed_ptr, peers_ptr, rounds_ptr, num, stride, rank, eps,
    N: tl.constexpr, EACH: tl.constexpr, PART: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr, PLACES: tl.constexpr, DTYPE: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, SEND: tl.constexpr, RELAY: tl.constexpr, TAKE: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of `peer_bare` in two rounds: each of N ranks, a power of two, adds up EACH of a unit's N * EACH words, and sends that to all, itself too.

    What is added up goes to PLACES more of the program's slots. The bits are the same. PART is the power of two from EACH on. NORM as in
    `peer_units`; a unit is a token then, and the norm's weight has the same dtype. PARTS: what is added up comes in so many parts of float32, see `_given`.
    """
    start_next(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    at, every = tl.arange(0, PART), tl.arange(0, N * PART)
    of_every = every // PART * EACH + every % PART
    rooms = _rooms(peers_ptr, rank, N)
    own = rooms[0]
    if NORM != 0:
        weights = tl.load(weight_ptr + of_every, mask=every % PART < EACH, other=0)
    wait_turn(PDL)
    round = tl.load(rounds_ptr + program)
    unit, done = program, 0
    while unit * N * EACH < num:
        round += 1
        slots = ((round & (PLACES - 1)) * PROGRAMS + program) * N * SLOT
        sums = slots + PLACES * PROGRAMS * N * SLOT
        first = unit * N * EACH
        if SEND:
            parts = ()
            for step in tl.static_range(1, N):  # all are asked for before the first is sent
                theirs = (rank + step) % N * EACH
                given = _given(x_ptr, x_ptr, unit, theirs, num, stride, PART, EACH, N * EACH, DTYPE, PARTS, 0)
                parts = parts + (given,)
            for step in tl.static_range(1, N):
                peer = (rank + step) % N
                mask = (at < EACH) & (first + peer * EACH + at < num)
                tl.store(rooms[step] + slots + rank * SLOT + at, ~_known(parts[step - 1]), mask=mask)
        if RELAY:
            place = first + rank * EACH + at
            mask = (at < EACH) & (place < num)
            mine = rank * EACH
            x = _known(_given(x_ptr, x_ptr, unit, mine, num, stride, PART, EACH, N * EACH, DTYPE, PARTS, 0))
            total = _all_there(own + slots + at, x, mask, rank, N, SLOT, DTYPE, WAIT)
            for step in tl.static_range(N):
                tl.store(rooms[step] + sums + rank * SLOT + at, ~total, mask=mask)
        if TAKE:
            mask = (every % PART < EACH) & (first + of_every < num)
            if ADD:
                old = tl.load(out_ptr + first + of_every, mask=mask, other=0)
            slot = own + sums + every // PART * SLOT + every % PART
            got = tl.load(slot, mask=mask, other=-1, volatile=True)
            if WAIT:
                while tl.min((got != 0).to(tl.int32)) == 0:
                    got = tl.load(slot, mask=mask, other=-1, volatile=True)
            tl.store(slot, tl.zeros_like(got), mask=mask)
            total = ~got
            if ADD:
                total = _with_old(total, old, DTYPE)
            tl.store(out_ptr + first + of_every, total, mask=mask)
            if NORM != 0:
                features: tl.constexpr = N * EACH * (4 // (DTYPE.primitive_bitwidth // 8))
                normed = _normed(total, weights, eps, features, DTYPE, NORM == 2)
                tl.store(normed_ptr + first + of_every, normed, mask=mask)
        unit, done = unit + programs, done + 1
        if unit * N * EACH < num:
            round = _next_round(round, done, PLACES, WAIT)
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
