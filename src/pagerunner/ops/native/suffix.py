"""Suffix decoding's index by the machine's C compiler: the same drafts as `sched.suffix`, whose proposals for 64 rows would hold a step up."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

from pagerunner.ops.native.library import Library, library
from pagerunner.sched.suffix import LENGTHS, MOST_TOKENS, Bounds, SuffixIndex

_Pointers = ctypes.c_void_p * len(LENGTHS)


class _Suffixes(ctypes.Structure):  # Suffixes in native/suffix.h
    _fields_ = (
        ("mask", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("low", ctypes.c_int64),
        ("text", ctypes.c_void_p),
        ("hashes", _Pointers),
        ("latest", _Pointers),
        ("before", _Pointers),
    )


class NativeSuffixIndex(SuffixIndex):
    """The twin's arrays, which C reads and writes."""

    def __init__(self, tokens: int, found: Library) -> None:
        super().__init__(tokens)
        self._library = found
        arrays = [_Pointers(*map(_address, part)) for part in (self._hashes, self._latest, self._before)]
        self._own = _Suffixes(self._mask, 0, 0, _address(self._text), *arrays)
        self._tokens = (ctypes.c_int32 * MOST_TOKENS)()
        self._count = ctypes.c_long()
        self._address = ctypes.byref(self._own)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that follow."""
        given = array("i", tokens)
        self._own.end, self._own.low = self.end, self.low
        self._library.suffix_extend(self._address, _address(given), len(given))
        self.end, self.low = self._own.end, self._own.low

    def best(self, text: SuffixIndex, most: int, above: float, bounds: Bounds) -> tuple[float, list[int]]:
        """See the twin."""
        assert isinstance(text, NativeSuffixIndex) and most <= MOST_TOKENS
        self._own.end, self._own.low = self.end, self.low
        score = self._library.suffix_best(
            self._address, text._address, most, above, *bounds, self._tokens, ctypes.byref(self._count)
        )
        return score, self._tokens[: self._count.value]


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


def new_index() -> Callable[[int], SuffixIndex]:
    """What makes an index of so many tokens: in C if the machine can compile it."""
    found = library()
    return SuffixIndex if found is None else lambda tokens: NativeSuffixIndex(tokens, found)
