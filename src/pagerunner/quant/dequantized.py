"""Weights that a checkpoint holds packed, and the model as one matrix in its dtype: they are unpacked while they are loaded.

It is how formats without kernels for a device run there. It is also how single matrices of any format are kept that take part in
products of another shape, such as the up-projection of latents.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from pagerunner.quant.base import Unquantized, UnquantizedExperts, WeightMethod, Weights
from pagerunner.quant.sinks import CopyWeight, Sink


class Dequantized(Unquantized):
    """One matrix in the model's dtype, whose parts a checkpoint holds in forms.

    `forms` are those of the parts by the first of their output features; a part that is not among them is held as it is.
    """

    def __init__(self, forms: Mapping[int, WeightMethod]) -> None:
        self.forms = dict(forms)

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        form = self.forms.get(rows.start)
        if form is None:
            return super().sinks(weights, rows)
        return Unpacking(form, weights["weight"][rows]).sinks()


class DequantizedExperts(UnquantizedExperts):
    """Matrices in the model's dtype, each of which a checkpoint holds in `form`."""

    def __init__(self, form: WeightMethod) -> None:
        super().__init__()
        self.linear = _Everywhere(form)

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool) -> dict[str, Sink]:
        """No checkpoint holds all experts together in such a form."""
        return {}


class _Everywhere(Dequantized):
    """Every part is held in the same form."""

    def __init__(self, form: WeightMethod) -> None:
        super().__init__({})
        self.form = form

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        return Unpacking(self.form, weights["weight"][rows]).sinks()


class Unpacking:
    """Collects what a checkpoint holds of one matrix, and fills `target_OI` when all of it is there.

    The packed tensors lie where the target does, from the first one's arrival to the last one's.
    """

    def __init__(self, form: WeightMethod, target_OI: torch.Tensor) -> None:
        self._form, self._target_OI = form, target_OI
        self._rows = slice(0, target_OI.shape[0])
        self._lock = threading.Lock()
        outputs, inputs = target_OI.shape
        self._packed: Weights = form.create(outputs, inputs, target_OI.dtype)  # on the meta device
        self._waiting = form.sinks(self._packed, self._rows)

    def sinks(self) -> dict[str, Sink]:
        """One for each tensor, by the last part of its name."""
        return {name: _PartSink(self, name, sink) for name, sink in self._waiting.items()}

    def put(self, name: str, source: torch.Tensor, copy: CopyWeight) -> None:
        """Take one tensor; unpack if it was the last one. Threads may call it at the same time."""
        with self._lock:
            if next(iter(self._packed.values())).is_meta:
                device = self._target_OI.device
                self._packed = {key: torch.empty_like(tensor, device=device) for key, tensor in self._packed.items()}
                self._waiting = self._form.sinks(self._packed, self._rows)
            sink = self._waiting[name]
        sink.put(source, copy)
        with self._lock:
            del self._waiting[name]
            if not self._waiting:
                self._target_OI.copy_(self._form.dense(self._packed))
                self._packed = {}


class _PartSink(Sink):
    def __init__(self, unpacking: Unpacking, name: str, sink: Sink) -> None:
        super().__init__(sink.shape, sink.dtypes, sink.axes)
        self._unpacking, self._name, self._sink = unpacking, name, sink

    def takes(self, shape: tuple[int, ...]) -> bool:
        return self._sink.takes(shape)

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        self._unpacking.put(self._name, source, copy)
