"""A memory checker for kernels in Triton's interpreter: every address they touch lies in a tensor that they were given.

Tensors count as their whole storage, as pages are views of one; what a kernel may read inside a storage is for tests that
fill the rest with NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


class OutOfBounds(AssertionError):
    """A kernel touched memory that it wasn't given."""


@contextmanager
def checked() -> Iterator[None]:
    """Check every launch inside."""
    ranges: list[tuple[int, int]] = []
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        found = prepare(self, args, kwargs)
        ranges[:] = []
        for given in (*found[0], *found[1].values()):
            arg = given.base if isinstance(given, TensorDescriptor) else given
            if isinstance(arg, torch.Tensor):
                storage = arg.untyped_storage()
                ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return found

    def check(kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        chosen, used = np.asarray(mask.data, dtype=bool), pointers.data
        if used.shape != chosen.shape:
            used = np.broadcast_to(used, chosen.shape)
        used = used[chosen]
        if not used.size:
            return
        first, last = int(used.min()), int(used.max()) + size
        if any(start <= first and last <= end for start, end in ranges):  # nearly always all lie in one
            return
        allowed = np.zeros(used.shape, dtype=bool)
        for start, end in ranges:
            allowed |= (used >= start) & (used + size <= end)
        if not allowed.all():
            raise OutOfBounds(f"a {kind} of {int((~allowed).sum())} elements outside of every tensor")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check("load", pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with (
        patch.object(executor, "_init_args_hst", prepared),
        patch.object(builder, "create_masked_load", checked_load),
        patch.object(builder, "create_masked_store", checked_store),
    ):
        yield
