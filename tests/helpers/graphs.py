"""Graphs without a device: an engine that records what torch is asked to do, and does exactly that again.

As with CUDA graphs, Python runs at the capture only, recorded operations work on the tensors of the capture, and whatever
needs a value on the host (`.item()`, `.tolist()`, `nonzero`) can't be recorded. An operation of `pagerunner.ops` that has
a kernel is recorded as one, whatever its twin does inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagerunner.ops.dispatch import Op
from pagerunner.ops.native import small
from pagerunner.quant import panels
from pagerunner.quant.expert_panels import ExpertsInPanels

# Of a CPU's kernels, which torch doesn't see. On a device, an experts' layer is one operation, too.
_PRODUCT, _ROWS, _EXPERTS = Op(panels.product, ""), Op(panels.chosen_rows, ""), Op(ExpertsInPanels.apply, "")
_PAIRS = Op(ExpertsInPanels.pair_products, "")
_NEEDS_THE_HOST = {"_local_scalar_dense", "nonzero", "unique_dim", "_unique2", "masked_select"}


def _storages(values: Any) -> set[int]:
    return {v.untyped_storage().data_ptr() for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.numel()}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._in_kernel = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first call, which takes 1.4 s of computing, and switches it off at each

    def kernel(self, op: Op[Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Record an operation that has a kernel."""
        if self._in_kernel:
            return op.twin(*args, **kwargs)
        self._in_kernel = True
        made = op.twin(*args, **kwargs)
        self._in_kernel = False
        self.calls.append((op.twin, args, kwargs, made))
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self._in_kernel:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _NEEDS_THE_HOST:
            raise RuntimeError(f"{name} needs the host to know a value, which no graph can")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


class RecordedGraph:
    """A list of operations. `replays` counts."""

    def __init__(self, calls: list[Any], outputs: tuple[torch.Tensor, ...]) -> None:
        self.outputs = outputs
        self.replays = 0
        self._calls = [(func, args, kwargs, _made_by(args, kwargs, made)) for func, args, kwargs, made in calls]

    @property
    def num_launches(self) -> int:
        """Operations that a device would run: those that aren't views of what they are given."""
        return sum(not (isinstance(func, OpOverload) and func.is_view) for func, *_ in self._calls)

    def replay(self) -> None:
        """Every operation again, its results put where the capture's were."""
        self.replays += 1
        # as in the capture: routes of a CPU's kernels have no padding
        with patch.object(small, "serves", lambda *tensors: False):
            for func, args, kwargs, made in self._calls:
                again = func(*args, **kwargs)
                if made:
                    leaves = tree_leaves(again)
                    for number, old in made:
                        old.copy_(leaves[number])


def _made_by(args: Any, kwargs: Any, made: Any) -> list[tuple[int, torch.Tensor]]:
    """The results of a call that are not views of what it was given, with their numbers."""
    inputs = _storages((args, kwargs))
    leaves = enumerate(tree_leaves(made))
    return [(number, one) for number, one in leaves if isinstance(one, torch.Tensor) and not _storages(one) & inputs]


class RecordedGraphs:
    """See the module. `graphs` are all that were captured."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []

    def capture(self, run: Callable[[], tuple[torch.Tensor, ...]]) -> RecordedGraph:
        """Call `run`, which does its work here, and record it."""
        with (
            _Recorder() as recorder,
            patch.object(Op, "__call__", lambda op, *a, **k: recorder.kernel(op, *a, **k)),
            patch.object(panels, "product", lambda *a, **k: recorder.kernel(_PRODUCT, *a, **k)),
            patch.object(panels, "chosen_rows", lambda *a, **k: recorder.kernel(_ROWS, *a, **k)),
            patch.object(ExpertsInPanels, "apply", lambda *a, **k: recorder.kernel(_EXPERTS, *a, **k)),
            patch.object(ExpertsInPanels, "pair_products", lambda *a, **k: recorder.kernel(_PAIRS, *a, **k)),
            patch.object(small, "serves", lambda *tensors: False),
        ):
            outputs = run()
        self.graphs.append(RecordedGraph(recorder.calls, outputs))
        return self.graphs[-1]
