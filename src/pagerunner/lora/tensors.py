"""Safetensors files of adapters, read piece by piece.

They aren't mapped into memory, as a checkpoint's are. A trainer writes the next version into the same file while it may be read, and who reads
behind the end of a mapped file is ended by the system (SIGBUS), the engine with all its requests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import torch

from pagerunner.errors import CheckpointError
from pagerunner.lora.pauses import in_turns, pause

MOST_HEADER_BYTES = 2**24
"""Names and shapes of a file, which are told apart with the interpreter's lock. Those of 48 layers with 128 experts, each with tensors of its own, have 6 MB."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct, gc=False):
    """A tensor in a header."""

    dtype: str
    shape: tuple[_Whole, ...]
    data_offsets: tuple[_Whole, _Whole]


_ENTRIES = msgspec.json.Decoder(_Entry)


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a file, of which only the shape has been read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    at: int
    end: int
    file: Path
    stream: BinaryIO


def read_all(tensors: Sequence[StoredTensor]) -> torch.Tensor:
    """Tensors of a file, with one dtype and shape, one behind the other. Raises CheckpointError for no floats, or if the file has become shorter."""
    first = tensors[0]
    dtype = _DTYPES.get(first.dtype)
    if dtype is None:
        raise CheckpointError(f"{first.file}: {first.name} has dtype {first.dtype}, and floats are needed.")
    found = torch.empty((len(tensors), *first.shape), dtype=dtype)
    rest, file = memoryview(found.view(-1).view(torch.uint8).numpy()), first.stream.fileno()
    size = len(rest) // len(tensors)
    for tensor in in_turns(tensors):
        left = size
        while left:
            count = os.preadv(file, [rest[:left]], tensor.at + size - left)
            if not count:
                raise CheckpointError(
                    f"{first.file} ends within {tensor.name}: it is not complete, or is being written."
                )
            rest, left = rest[count:], left - count
    return found


@contextmanager
def stored_tensors(file: Path) -> Iterator[list[StoredTensor]]:
    """A file's tensors, in the order of their names. Raises CheckpointError if it can't be read or is damaged."""
    try:
        with file.open("rb", buffering=0) as stream:
            yield _tensors(file, stream)
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}.") from None


def _tensors(file: Path, stream: BinaryIO) -> list[StoredTensor]:
    size = int.from_bytes(stream.read(8), "little")
    if size > MOST_HEADER_BYTES:
        raise CheckpointError(f"{file} has a header of {size:,} bytes, and at most {MOST_HEADER_BYTES:,} are read.")
    try:
        words = stream.read(size)
        pause()
        header = msgspec.json.decode(words, type=dict[str, msgspec.Raw])  # 9 ms of 36,864 names
        header.pop("__metadata__", None)
        pause()
        names = sorted(header)  # 9 ms at most
        found = [_tensor(file, stream, 8 + size, name, header[name]) for name in in_turns(names)]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is not a complete safetensors file: {error!s:.200}.") from None
    last, whole = max((one.end for one in in_turns(found)), default=8 + size), os.fstat(stream.fileno()).st_size
    if whole > last:
        raise CheckpointError(
            f"{file} has {whole:,} bytes, and its last tensor ends at byte {last:,}: it isn't what was written."
        )
    return found


def _tensor(file: Path, stream: BinaryIO, start: int, name: str, words: msgspec.Raw) -> StoredTensor:
    entry = _ENTRIES.decode(words)
    shape, dtype, (first, end) = entry.shape, entry.dtype, entry.data_offsets
    itemsize = _DTYPES[dtype].itemsize if dtype in _DTYPES else 0
    if itemsize and end - first != itemsize * math.prod(shape):
        raise ValueError(f"{name} of shape {shape!s:.80} has bytes {first} to {end}")
    return StoredTensor(name, shape, dtype, start + first, start + end, file, stream)
