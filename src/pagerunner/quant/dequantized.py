"""Weights that a checkpoint holds packed, and the model as one matrix in its dtype: they are unpacked while they are loaded.

It is how formats without kernels for a device run there. It is also how single matrices of any format are kept that take part in
products of another shape, such as the up-projection of latents.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping

import torch

from pagerunner.quant.base import Unquantized, UnquantizedExperts, WeightMethod, Weights
from pagerunner.quant.sinks import CopyWeight, Sink
from pagerunner.quant.stored import StoredMethod


class Dequantized(Unquantized):
    """One matrix in the model's dtype, whose parts a checkpoint holds in forms.

    `forms` are those of the parts by the first of their output features; a part that is not among them is held as it is.
    """

    def __init__(self, forms: Mapping[int, WeightMethod]) -> None:
        self.forms = dict(forms)

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        form, target_OI = self.forms.get(rows.start), weights["weight"][rows]
        return super().sinks(weights, rows) if form is None else _unpacked_into(form, target_OI)


class DequantizedExperts(UnquantizedExperts):
    """Matrices in the model's dtype, each of which, or all of them together, a checkpoint holds in `form`."""

    def __init__(self, form: WeightMethod) -> None:
        super().__init__()
        self.linear = _Everywhere(form)
        self.form = form

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool) -> dict[str, Sink]:
        """See ExpertMethod."""
        target_EOI = weights["weight"]

        def put(expert: int, matrix_OI: torch.Tensor) -> None:
            target_EOI[expert].copy_(matrix_OI)

        shape = (target_EOI.shape[0], target_EOI.shape[1], target_EOI.shape[2])
        return unpacking_experts(self.form, shape, target_EOI.dtype, target_EOI.device, put, transposed=transposed)

    def only_stacked(self, *, transposed: bool) -> bool:
        """See ExpertMethod."""
        return experts_only_stacked(self.form, transposed=transposed)


def unpacking_experts(
    form: WeightMethod,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    put: Callable[[int, torch.Tensor], None],
    *,
    transposed: bool,
) -> dict[str, Sink]:
    """What unpacks one matrix of all experts, of shape [E, O, I], from what a checkpoint holds of them together in `form`.

    `put(expert, matrix)` gets each expert's [O, I]. Empty for a form in which no checkpoint holds them together.
    """
    if not isinstance(form, StoredMethod):
        return {}
    experts, outputs, inputs = shape
    single = form.create(outputs, inputs, dtype)
    packed = {name: tensor.new_empty(experts, *tensor.shape) for name, tensor in single.items()}

    def fill(held: Weights) -> None:
        for expert in range(experts):
            put(expert, form.dense({name: tensor[expert] for name, tensor in held.items()}))

    return Unpacking(packed, functools.partial(form.stacked, transposed=transposed), device, fill).sinks()


def experts_only_stacked(form: WeightMethod, *, transposed: bool) -> bool:
    """See `ExpertMethod.only_stacked`, of experts that a checkpoint holds in `form`."""
    return isinstance(form, StoredMethod) and form.only_stacked(transposed=transposed)


class _Everywhere(Dequantized):
    """Every part is held in the same form."""

    def __init__(self, form: WeightMethod) -> None:
        super().__init__({})
        self.form = form

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        return _unpacked_into(self.form, weights["weight"][rows])


def _unpacked_into(form: WeightMethod, target_OI: torch.Tensor) -> dict[str, Sink]:
    outputs, inputs = target_OI.shape
    return unpacked_sinks(form, (outputs, inputs), target_OI, target_OI.copy_)


def unpacked_sinks(
    form: WeightMethod, sizes: tuple[int, int], target: torch.Tensor, put: Callable[[torch.Tensor], object]
) -> dict[str, Sink]:
    """Sinks of a matrix of these sizes, [O, I], that a checkpoint holds in `form`. `put` gets it unpacked, where `target` lies and in its dtype."""
    packed = form.create(*sizes, target.dtype)
    make_sinks = functools.partial(form.sinks, rows=slice(0, sizes[0]))
    return Unpacking(packed, make_sinks, target.device, lambda held: put(form.dense(held))).sinks()


class Unpacking:
    """Collects what a checkpoint holds of one matrix, or of all experts', and calls `fill` with it when all of it is there.

    The packed tensors lie on `device` from the first one's arrival to the last one's. `packed` are they on the meta device; `make_sinks`
    says what fills such tensors.
    """

    def __init__(
        self,
        packed: Weights,
        make_sinks: Callable[[Weights], dict[str, Sink]],
        device: torch.device,
        fill: Callable[[Weights], object],
    ) -> None:
        self._make_sinks, self._device, self._fill = make_sinks, device, fill
        self._lock = threading.Lock()
        self._packed = packed
        self._waiting: dict[str, Sink] = {}

    def sinks(self) -> dict[str, Sink]:
        """One for each tensor, by the last part of its name. Nothing waits for a tensor that is only looked at."""
        return {
            name: _PartSink(self, name, sink) if sink.fills else sink
            for name, sink in self._make_sinks(self._packed).items()
        }

    def put(self, name: str, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """Take one tensor; unpack if it was the last one. Threads may call it at the same time. Returns what its sink does."""
        with self._lock:
            if next(iter(self._packed.values())).is_meta:
                self._packed = {  # not `empty_like`: of meta tensors it imports sympy, which takes 50 MB and half a second
                    key: torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                    for key, tensor in self._packed.items()
                }
                sinks = self._make_sinks(self._packed)
                self._waiting = {key: sink for key, sink in sinks.items() if sink.fills}
            sink = self._waiting[name]
        bad = sink.put(source, copy)
        with self._lock:
            del self._waiting[name]
            if not self._waiting:
                self._fill(self._packed)
                self._packed = {}
        return bad


class _PartSink(Sink):
    def __init__(self, unpacking: Unpacking, name: str, sink: Sink) -> None:
        super().__init__(sink.shape, sink.dtypes, sink.axes)
        self._unpacking, self._name, self._sink = unpacking, name, sink

    def takes(self, shape: tuple[int, ...]) -> bool:
        return self._sink.takes(shape)

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        return self._unpacking.put(self._name, source, copy)
