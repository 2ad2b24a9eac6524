"""Suffix decoding's index by the machine's C compiler: the same drafts as `sched.suffix`, whose proposals for 64 rows would hold a step up."""

from __future__ import annotations

import ctypes
import functools
import struct
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
        self._address = ctypes.byref(self._own)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that follow."""
        given = array("i", tokens)
        self._own.end, self._own.low = self.end, self.low
        self._library.suffix_extend(self._address, _address(given), len(given))
        self.end, self.low = self._own.end, self._own.low

    def draft(self, answers: SuffixIndex | None, most: int, bounds: Bounds) -> list[int]:
        """See the twin."""
        assert most <= MOST_TOKENS and (answers is None or isinstance(answers, NativeSuffixIndex))
        there = None
        if answers is not None:
            answers._own.end, answers._own.low = answers.end, answers.low
            there = answers._address
        count = self._library.suffix_draft(self._address, there, most, _bounds(bounds), self._tokens)
        return self._tokens[:count]


@functools.cache
def _bounds(bounds: Bounds) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(struct.pack("q2d", *bounds))  # Bounds in native/suffix.h


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


def new_index() -> Callable[[int], SuffixIndex]:
    """What makes an index of so many tokens: in C if the machine can compile it."""
    found = library()
    return SuffixIndex if found is None else lambda tokens: NativeSuffixIndex(tokens, found)
