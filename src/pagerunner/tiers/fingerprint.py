"""What must be equal for a page's key to mean equal bytes. A store of pages that outlives an engine, or is another one's, is opened for it.

A key says which tokens a page is of. It doesn't say by which weights, in which dtype, and how the page is laid out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Set

import msgspec


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
