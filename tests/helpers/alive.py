"""How many bytes torch's tensors take at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """The most bytes that tensors made inside hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in helpers/graphs.py

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in given:
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, size: int) -> None:
        self.now -= size
