"""Experts' products of many tokens from matrices that are unpacked before, some experts at a time; see `ops/moe.py`.

Reading codes and writing numbers takes memory and integer units, products take matrix units. So 4 bits are unpacked beside the products of the
experts before, in two lanes. A lane is a stream and room for some experts. It unpacks them, multiplies with them, and begins again with the experts
after those of the other lane. A lane's product is launched while the other lane's still runs, so its programs follow on each multiprocessor that the
other ones leave. Example: 32 experts, 4 at a time. Lane 0 has expert 0, then 5 to 8, 13 to 16; lane 1 has 1 to 4, 9 to 12. The first product
waits for its matrices, so it has few of them.

Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.moe.moe_many import fits_dense, many_config, many_product
from pagerunner.ops.kernels.stored import unpack
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored, Stored4, Stored8
from pagerunner.ops.unpacked import EXPERTS_BYTES, experts_at_once, rooms_of

MOST_REGISTERS = 224
"""Of a thread of a product that leaves registers for unpacking beside it (`kernels/stored.py`)."""
FIRST_SHARE = 4
"""The first product of 4-bit weights has one of so many experts that there is room for."""


class UnpackedProduct(NamedTuple):
    """One of the two products: its weights, its biases, whether pairs are weighed, and the first product's activation."""

    weights: Stored
    bias_EO: torch.Tensor | None
    weigh: bool
    activation: GatedActivation | None = None


class _Part(NamedTuple):
    """Some experts of a product, and the lane that unpacks them."""

    product: int
    lane: int
    some: slice


def unpacks(x: torch.Tensor, weights: Stored) -> bool:
    """Whether `unpacked_products` serves such weights here."""
    outputs = weights.shape[1]
    if isinstance(weights, Stored8) and outputs % weights.block[0]:
        return False
    return fits_dense(x, weights.shape[2])


def unpacked_products(x: torch.Tensor, products: Sequence[UnpackedProduct], routes: Routes) -> torch.Tensor:
    """As `many_product`, one product or both in a row."""
    assert routes.order_P is not None and routes.starts_E1 is not None, "the pairs have no order"
    pairs = routes.order_P.shape[0]
    outs = []
    for product in products:
        outputs = product.weights.shape[1]
        outs.append(x.new_empty(pairs, outputs if product.activation is None else outputs // 2))
    for part, dense_EOI in _unpacked([product.weights for product in products], x):
        product, some = products[part.product], part.some
        inputs = outs[part.product - 1] if part.product else x
        experts, _, columns = product.weights.shape
        many_product(
            inputs, dense_EOI, None if product.bias_EO is None else product.bias_EO[some],
            routes._replace(starts_E1=routes.starts_E1[some.start : some.stop + 1]), product.activation, weigh=product.weigh,
            config=many_config(routes.expected, experts, columns, False, product.activation is not None), out=outs[part.product],
            registers=MOST_REGISTERS if isinstance(product.weights, Stored4) else None,
        )  # fmt: skip
    return outs[-1]


def _parts(matrices: Sequence[Stored], itemsize: int) -> list[_Part]:
    """Which experts are unpacked together, one part after another. Neighbours have different lanes where there are two."""
    parts: list[_Part] = []
    for number, weights_EOI in enumerate(matrices):
        experts = weights_EOI.shape[0]
        at_once, lanes = experts_at_once(weights_EOI, itemsize, EXPERTS_BYTES)
        first, size = 0, at_once if lanes == 1 or parts else max(1, at_once // FIRST_SHARE)
        while first < experts:
            lane = 1 - parts[-1].lane if lanes == 2 and parts else 0
            parts.append(_Part(number, lane, slice(first, min(first + size, experts))))
            first, size = first + size, at_once
    return parts


def _unpacked(matrices: Sequence[Stored], x: torch.Tensor) -> Iterator[tuple[_Part, torch.Tensor]]:
    """Parts and their matrices. While the caller has one, the stream of its lane is the current one."""
    parts = _parts(matrices, x.dtype.itemsize)
    lanes, size = rooms_of(matrices, x.dtype.itemsize, EXPERTS_BYTES)
    rooms = x.new_empty(lanes, size)
    streams = _streams(x.device, lanes)
    waits: dict[int, list[torch.cuda.Event]] = {}
    product = 0
    try:
        if lanes == 2 and streams:
            streams[1].wait_stream(streams[0])
        for number, part in enumerate(parts):
            weights_EOI = matrices[part.product]
            if part.product != product and streams:  # it reads what all lanes have written
                product = part.product
                done = [stream.record_event() for stream in streams]
                waits = {lane: [event for other, event in enumerate(done) if other != lane] for lane in range(lanes)}
            if streams:
                torch.cuda.set_stream(streams[part.lane])
            shape = part.some.stop - part.some.start, *weights_EOI.shape[1:]
            dense_EOI = rooms[part.lane, : shape[0] * shape[1] * shape[2]].view(shape)
            unpack(_flat(weights_EOI, part.some), dense_EOI.flatten(0, 1), beside=lanes == 2 and number > 0)
            for event in waits.pop(part.lane, ()):
                streams[part.lane].wait_event(event)
            yield part, dense_EOI
    finally:  # an interrupt may leave the other stream current, or rooms that it still writes
        if streams:
            torch.cuda.set_stream(streams[0])
            for stream in streams[1:]:
                streams[0].wait_stream(stream)


def _streams(device: torch.device, lanes: int) -> list[torch.cuda.Stream]:
    """The lanes' streams; none where there are no streams."""
    if device.type != "cuda":
        return []
    main = torch.cuda.current_stream(device)
    return [main, _side_stream(device, main.cuda_stream)][:lanes]


@functools.cache
def _side_stream(device: torch.device, main: int) -> torch.cuda.Stream:
    """That beside the stream `main`. Another engine's steps have another one: a graph that one captures must not take in the other's work."""
    return torch.cuda.Stream(device)


def _flat(weights: Stored, some: slice) -> Stored:
    """The matrices of some experts, one below another."""
    own = {name: part[some].flatten(0, 1) for name, part in weights._asdict().items() if isinstance(part, torch.Tensor)}
    return weights._replace(**own)
