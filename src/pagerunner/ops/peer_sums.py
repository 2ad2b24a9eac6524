"""Sums of ranks by a kernel, over rooms that all devices of a machine can write."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from pagerunner.ops.linear import Norm

_PROGRAMS, _SLOT_BYTES, _UNIT = 256, 32 * 2**10, 4096
_WORD_PROGRAMS, _SLOT_WORDS = 128, 1024
_BARE_PROGRAMS = 256


class Limits(NamedTuple):
    """Largest sums in bytes, by the way they go.

    `words`: what is gathered, with the number of the round, which are twice as many bytes. `bare`: sums as bare words; up to `once` each rank sends
    all of its numbers to each other one, and larger ones go in two rounds, which only powers of two of ranks can. `most`: at all; NCCL makes larger ones,
    and gathers more than `gathered` of a rank.
    `whole`: bare words of more bytes go token by token, with a product's parts and the norm, if they don't go in two rounds.
    `places`, a power of two: those of each bare word, which rounds take in turns. A launch of fewer rounds needs no fence (`_next_round`).
    With `whole` no launch has more rounds than half of the places.
    """

    words: int
    most: int
    bare: int = 0
    once: int = 2**31
    whole: int = 2**31
    places: int = 2
    gathered: int = 2**31

    @property
    def twice(self) -> bool:
        """Whether some sums go in two rounds."""
        return self.once < self.bare


LIMITS = {
    2: Limits(2**19, 2**31, bare=2**22, whole=2**17, places=8),
    3: Limits(2**16, 2**19, bare=2**16),
    4: Limits(2**18, 2**26, bare=2**26, once=2**17, places=4, gathered=2**24),
}
"""By number of ranks. Two ranks would send as much in two rounds as in one, and leave nothing to NCCL."""
MORE_RANKS = Limits(2**16, 2**17, bare=2**16)
"""Of five to eight ranks, which haven't been measured."""


def limits_of(ranks: int) -> Limits:
    """Those of so many ranks."""
    return LIMITS.get(ranks, MORE_RANKS)


def _words_bytes(size: int) -> int:
    return 2 * 8 * _SLOT_WORDS * _WORD_PROGRAMS * size


def _bare_bytes(size: int, limits: Limits) -> int:
    return limits.places * (2 if limits.twice else 1) * 4 * _SLOT_WORDS * _BARE_PROGRAMS * size


def room_bytes(size: int, limits: Limits | None = None) -> int:
    """Of a rank's room: parts for words, for bare words and for units. Each has two halves, which rounds take in turns, of a slot for each program and
    sender. Bare words have as many such places as the limits say, and as many again for sums if some go in two rounds.

    Behind the units' slots is a flag for each program and sender. Programs count the rounds of each part by itself, so the ways may alternate.
    """
    return _words_bytes(size) + _bare_bytes(size, limits or limits_of(size)) + (2 * _SLOT_BYTES + 4) * _PROGRAMS * size


class Units(NamedTuple):
    """What `peer_units` adds up, in units of `width` numbers: `x` to `out`. With a norm a unit is a token, and `normed` gets it."""

    x: torch.Tensor
    out: torch.Tensor
    weight: torch.Tensor
    normed: torch.Tensor
    width: int
    eps: float = 0.0


class PeerSums:
    """A rank's end of the rooms: sums, and what is gathered. `peers` int64 [size] are the addresses of all ranks' rooms, as this rank's device has them.

    A room is zero before the first sum. All ranks make the same calls in the same order, on one stream each. Tests of one process first `send`
    of all ranks, then `relay` of all, and then `take` of all. `limits` are those that the rooms were taken for; None: as LIMITS says.
    """

    def __init__(self, peers: torch.Tensor, rank: int, limits: Limits | None = None) -> None:
        self._kernels = importlib.import_module("pagerunner.ops.kernels.peer_sum")
        launch: Any = importlib.import_module("pagerunner.ops.kernels.launch")
        self._rank, self._size, self._device = rank, peers.shape[0], peers.device
        self.limits = limits or limits_of(self._size)
        self._words_part, self._bare_part = peers, peers + _words_bytes(self._size)
        self._units_part = self._bare_part + _bare_bytes(self._size, self.limits)
        self._words_rounds, self._bare_rounds, self._rounds = (
            torch.zeros(programs, dtype=torch.int32, device=peers.device)
            for programs in (_WORD_PROGRAMS, _BARE_PROGRAMS, _PROGRAMS)
        )
        self._how: dict[str, Any] = {"N": self._size, "WAIT": peers.is_cuda, **launch.dependent(peers.device)}

    @property
    def most_bytes(self) -> int:
        """The largest sum that is made here."""
        return self.limits.most

    @property
    def most_gathered(self) -> int:
        """The largest part of a rank that is gathered here."""
        return min(self.limits.most, self.limits.gathered)

    def add_(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, send: bool = True, relay: bool = True, take: bool = True
    ) -> None:  # fmt: skip
        """See Comm.all_reduce_. Sums are made in the order of the ranks in float32, and are rounded once."""
        out = x if residual is None else residual
        # all ranks must go the same way, so addresses don't count
        if x.nbytes <= self.limits.bare and x.nbytes % 4 == 0 and out.dtype == x.dtype:
            self._run_bare(x, out, ADD=residual is not None, SEND=send, RELAY=relay, TAKE=take)
            return
        kind = {"GATHER": False, "ADD": residual is not None, "NORM": 0, "SEND": send, "TAKE": take}
        self._run_units(Units(x, out, x, x, _unit(x)), kind)

    def takes_norm(self, x: torch.Tensor) -> bool:
        """Whether `add_norm_` is for `x` [T, D]: sums with flags, and those in two rounds whose programs have a token each. Others' norm follows them."""
        known = x.dim() == 2 and 0 < x.shape[1] * x.itemsize <= _SLOT_BYTES // 2
        return known and (self.limits.bare < x.nbytes or self._by_tokens(x.shape[0], x.shape[1] * x.itemsize))

    def _by_tokens(self, tokens: int, num_bytes: int) -> bool:
        """Whether a sum of so many tokens of so many bytes goes with a token as a unit. In two rounds each rank adds up as many words of it."""
        limits = self.limits
        if not min(limits.once, limits.whole) < tokens * num_bytes <= limits.bare or tokens > _BARE_PROGRAMS:
            return False
        if not limits.twice:
            return num_bytes % 16 == 0 and num_bytes <= 4 * _SLOT_WORDS * (limits.places // 2)
        each, rest = divmod(num_bytes, 16 * self._size)  # so that stores are of 16 bytes
        return rest == 0 and 4 * each <= _SLOT_WORDS

    def add_norm_(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm, *, send: bool = True, relay: bool = True, take: bool = True
    ) -> torch.Tensor:  # fmt: skip
        """Add the sum of all ranks' `x` [T, D] to `residual` in place, and return the norm of that. The bits are those of the one and then the other."""
        normed = torch.empty_like(residual)
        if self._by_tokens(x.shape[0], x.shape[1] * x.itemsize):
            self._run_bare(x, residual, norm, normed, ADD=True, SEND=send, RELAY=relay, TAKE=take)
            return normed
        kind: dict[str, Any] = {
            "GATHER": False,
            "ADD": True,
            "NORM": 2 if norm.offset else 1,
            "SEND": send,
            "TAKE": take,
        }
        self._run_units(Units(x, residual, norm.weight_I, normed, x.shape[1], norm.eps), kind)
        return normed

    def takes_parts(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        """Whether `add_parts_` is for sums of so many tokens."""
        return dtype.itemsize == 2 and self._by_tokens(tokens, features * dtype.itemsize)

    def add_parts_(
        self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None = None, *, send: bool = True, relay: bool = True,
        take: bool = True,
    ) -> torch.Tensor | None:  # fmt: skip
        """See Comm. `residual` [T, D] in 16 bits; the norm's weight has the same dtype."""
        normed = None if norm is None else torch.empty_like(residual)
        self._run_bare(parts, residual, norm, normed, ADD=True, SEND=send, RELAY=relay, TAKE=take)
        return normed

    def add_pairs_(
        self, pairs: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor, norm: Norm | None = None, *, send: bool = True, relay: bool = True,
        take: bool = True,
    ) -> torch.Tensor | None:  # fmt: skip
        """See Comm."""
        normed = None if norm is None else torch.empty_like(residual)
        self._run_bare(pairs, residual, norm, normed, experts, ADD=True, SEND=send, RELAY=relay, TAKE=take)
        return normed

    def gather(self, x: torch.Tensor, out: torch.Tensor, *, send: bool = True, take: bool = True) -> None:
        """See Comm.all_gather. `out` is [size, *x.shape], of any dtype."""
        words = torch.int32 if x.nbytes % 4 == 0 else torch.uint8
        x = x if x.data_ptr() % 4 == 0 else x.clone()
        x, out = (one.view(-1).view(torch.uint8).view(words) for one in (x, out))
        if words == torch.int32 and x.nbytes <= self.limits.words:
            self._run_words(x, out, SEND=send, TAKE=take)
        else:
            kind = {"GATHER": True, "ADD": False, "NORM": 0, "SEND": send, "TAKE": take}
            self._run_units(Units(x, out, x, x, _unit(x)), kind)

    def _run_words(self, words: torch.Tensor, out: torch.Tensor, **kind: bool) -> None:
        width = _few_words(words.numel())
        programs = min(_WORD_PROGRAMS, -(-words.numel() // width))
        self._kernels.peer_words[(programs,)](
            words, out, self._words_part, self._words_rounds, words.numel(), self._rank,
            W=width, PROGRAMS=_WORD_PROGRAMS, SLOT=_SLOT_WORDS, num_warps=max(2, width // 128), **self._how, **kind,
        )  # fmt: skip

    def _run_bare(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        norm: Norm | None = None,
        normed: torch.Tensor | None = None,
        experts: torch.Tensor | None = None,
        **kind: bool,
    ) -> None:
        """Add up to `out`, and write its norm into `normed` if there is one. With `experts` `x` has pairs of a token and one of them."""
        own, source = (one if one.data_ptr() % 4 == 0 else one.clone() for one in (out, x))
        in_parts = x.dim() == 3 and x.dtype != out.dtype
        out_words = own.view(-1).view(torch.int32)
        words = source if in_parts else source.view(-1).view(torch.int32)
        num, dtype = out_words.numel(), self._kernels.DTYPES[out.dtype]
        how = {**self._how, "PROGRAMS": _BARE_PROGRAMS, "SLOT": _SLOT_WORDS, "DTYPE": dtype, **kind}
        how["PLACES"] = self.limits.places
        rooms = (self._bare_part, self._bare_rounds, num)
        # all ranks go the same way, whether they have parts or not
        by_token = out.dim() == 2 and self._by_tokens(out.shape[0], out.shape[1] * out.itemsize)
        behind, eps, how["NORM"], how["PARTS"] = (out_words, out_words), 0.0, 0, x.shape[0] if in_parts else 0
        pairs = 0 if experts is None else experts.shape[1]
        words = (words, words if experts is None else experts)
        if norm is not None and normed is not None:
            assert norm.weight_I.dtype == out.dtype, "a norm's weights are read in words of the same numbers"
            eps, how["NORM"] = norm.eps, 2 if norm.offset else 1
            behind = norm.weight_I.view(torch.int32), normed.view(-1).view(torch.int32)
        assert not pairs or (by_token and not self.limits.twice), "one round of a token for each program adds up pairs"
        if by_token and how["ADD"] and not self.limits.twice:
            del how["RELAY"], how["ADD"]
            each = num // out.shape[0]
            part = 1 << (each - 1).bit_length()
            self._kernels.peer_bare_token[(out.shape[0],)](
                *words, out_words, *behind, *rooms[:2], x.stride(0), self._rank, eps, EACH=each, PART=part,
                PAIRS=pairs, num_warps=max(1, part // 256), **how,
            )  # fmt: skip
        elif out.nbytes <= self.limits.once:
            del how["RELAY"], how["NORM"], how["PARTS"]
            width = _bare_words(num)
            programs = min(_BARE_PROGRAMS, -(-num // width))
            self._kernels.peer_bare[(programs,)](
                words[0], out_words, *rooms, self._rank, W=width, num_warps=max(1, width // 128), **how
            )
        else:
            each = 1 << (-(-num // (_BARE_PROGRAMS // 2 * self._size)) - 1).bit_length()
            each = part = min(_SLOT_WORDS, max(256, each))
            if by_token:
                each = num // out.shape[0] // self._size
                part = 1 << (each - 1).bit_length()
            self._kernels.peer_bare_twice[(min(_BARE_PROGRAMS, -(-num // (each * self._size))),)](
                words[0], out_words, *behind, *rooms, x.stride(0), self._rank, eps, EACH=each, PART=part,
                num_warps=max(1, part // (64 if by_token else 128)), **how,
            )  # fmt: skip
        if own is not out:
            out.copy_(own)

    def _run_units(self, units: Units, kind: dict[str, Any]) -> None:
        x, out, weight, normed, width, eps = units
        num, block = x.numel(), 1 << (width - 1).bit_length()
        count = -(-num // width)
        programs = min(_PROGRAMS, count)
        each, most = 1 << (-(-count // programs) - 1).bit_length(), _SLOT_BYTES // (block * x.itemsize)
        self._kernels.peer_units[(programs,)](
            x, out, weight, normed, self._units_part, self._rounds, num, self._rank, eps,
            PADDED=1 << (self._size - 1).bit_length(), W=width, BLOCK=block, UNITS=min(each, most) if kind["NORM"] or width < _UNIT else most,
            PROGRAMS=_PROGRAMS, SLOT=_SLOT_BYTES // x.itemsize, FLAGS=2 * _SLOT_BYTES * _PROGRAMS * self._size,
            num_warps=max(4, min(16, block // 512)), **self._how, **kind,
        )  # fmt: skip


def _few_words(num: int) -> int:
    """Words of a unit, if units needn't be tokens: enough programs for few words, and few enough programs for many.

    Triton has a kernel of its own for numbers that are no multiple of 16. So that these have one, whatever the number is, all have the unit of few words.
    """
    return 256 if num <= 8192 or num % 16 else 512 if num <= 2**16 else 1024


def _bare_words(num: int) -> int:
    """The same of bare words. A program of one warp looks for its words without a barrier."""
    return 128 if num <= 128 * _BARE_PROGRAMS else _few_words(num)


def _unit(x: torch.Tensor) -> int:
    """Numbers of a unit, if units needn't be tokens. Those of few numbers and of many have a kernel each: whatever else is gathered or added up, nothing is compiled for it."""
    return 1024 if x.numel() <= 1024 * _PROGRAMS else min(_UNIT, _SLOT_BYTES // x.itemsize)
