"""What must be equal for a page's key to mean equal bytes. A store of pages that outlives an engine, or is another one's, is opened for it.

A key says which tokens a page is of. It doesn't say by which weights, in which dtype, and how the page is laid out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import msgspec

_SAMPLES = 4
_SAMPLE_BYTES = 1024
_LONGEST_HEADER = 100_000_000  # as safetensors has it


def fingerprint(facts: Mapping[str, object]) -> bytes:
    """32 bytes of all facts, equal in every process and on every machine.

    Facts are numbers, texts, bytes, None, and mappings, sequences, sets, dataclasses and structs of such. The order of a mapping's
    or a set's entries doesn't count.

    Raises:
        TypeError: a fact is something else, which may look different in another process.
    """
    return hashlib.sha256(_canonical(facts).encode()).digest()


def _canonical(value: object) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value).__name__ + _canonical(fields)
    if isinstance(value, msgspec.Struct):
        return type(value).__name__ + _canonical(msgspec.structs.asdict(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{_canonical(name)}:{_canonical(one)}" for name, one in value.items())) + "}"
    if isinstance(value, Set):
        return "<" + ",".join(sorted(map(_canonical, value))) + ">"
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    raise TypeError(f"{value!r:.100} ({type(value).__name__}) can't be part of a fingerprint")


def weights_digest(files: Iterable[Path]) -> str:
    """A digest of a checkpoint: every file's header, and 4 KiB of every tensor, taken at its start, its end and two places between.

    Headers alone are equal for a model and its fine-tune. What a fine-tune doesn't change in the samples of any tensor isn't noticed.

    Raises:
        OSError, ValueError: a file can't be read, or isn't a safetensors file.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        with open(path, "rb", buffering=0) as file:
            length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            header = os.pread(file.fileno(), length, 8) if length <= _LONGEST_HEADER else b""
            if len(header) < length or length == 0:
                raise ValueError(f"{path} is not a safetensors file")
            digest.update(path.name.encode() + b"\0" + header)
            for begin, end in _ranges(header):
                for sample in _samples(begin + 8 + length, end + 8 + length):
                    digest.update(os.pread(file.fileno(), len(sample), sample.start))
    return digest.hexdigest()


def _ranges(header: bytes) -> list[tuple[int, int]]:
    """Where the tensors are, from the header's end on, in the order of the file."""
    tensors: dict[str, dict[str, object]] = msgspec.json.decode(header, type=dict[str, dict[str, object]])
    offsets = [tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__"]
    return sorted((begin, end) for begin, end in msgspec.convert(offsets, list[tuple[int, int]]))


def _samples(begin: int, end: int) -> list[range]:
    size = end - begin
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return [range(begin, end)]
    last = size - _SAMPLE_BYTES
    starts = [begin + last * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
    return [range(start, start + _SAMPLE_BYTES) for start in starts]
