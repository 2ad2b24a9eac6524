"""Changes of the weights of a running engine: what a trainer asks for, under vLLM's names.

An update is a start, any number of tensors in one or several calls, and a finish. The tensors come by another way; see `dist/transfer.py`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pagerunner.errors import InvalidRequestError

Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int64", "int32", "int8", "uint8"
]  # fmt: skip
NO_RPC = (
    "collective_rpc would run code that it is sent, which this engine never does. What it is used for has calls of its own: sleep, wake_up, "
    "pause, resume, init_weight_transfer_engine, start_weight_update, update_weights, finish_weight_update."
)
_MOST_NUMBERS = 2**48
_Size = Annotated[int, Meta(ge=0, lt=_MOST_NUMBERS)]
_Request = TypeVar("_Request")


class InitTransfer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="init"):
    """Join the trainer's group of `world_size` processes, by the store that the trainer has at this address.

    The trainer is rank 0. The engine's rank r is rank `rank_offset` + r.
    """

    master_address: Annotated[str, Meta(min_length=1, max_length=255)]
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1)] = 1
    world_size: Annotated[int, Meta(ge=2)]


class StartUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Begin an update. `whole`: it has to bring all weights, as those that are there are half new."""

    whole: bool = False


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="update"):
    """Take tensors with the names, dtypes and shapes that a checkpoint has, in this order.

    `packed`: they come as bytes, several together. A piece ends with the tensor that makes it larger than `packed_buffer_size_bytes`.
    `packed_num_buffers` is how many pieces the trainer prepares at once, which changes nothing here.
    """

    names: list[str]
    dtype_names: list[Dtype]
    shapes: list[Annotated[list[_Size], Meta(max_length=8)]]
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Meta(ge=1)] = 2**30
    packed_num_buffers: Annotated[int, Meta(ge=1)] = 2

    def __post_init__(self) -> None:
        for name in ("dtype_names", "shapes"):
            if len(getattr(self, name)) != len(self.names):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {len(self.names)} names")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if math.prod(max(size, 1) for size in shape) >= _MOST_NUMBERS:
                raise ValueError(f"shapes has {shape} for {name[:200]!r}; a tensor has fewer than 2^48 numbers")


class ReceiveWeights(msgspec.Struct, frozen=True, tag="receive"):
    """Take the tensors of the last UpdateWeights from the trainer. The core says so to its ranks when all of them can."""


class FinishUpdate(msgspec.Struct, frozen=True, tag="finish"):
    """End the update: steps run with the new weights."""


class AbortUpdate(msgspec.Struct, frozen=True, tag="abort"):
    """End the update that is open, if one is, as a rank or another engine can't go on with it, and leave the trainer. A `reason` is a sentence.

    An engine that has taken tensors has weights that are half new then.
    """

    reason: str


WeightChange = InitTransfer | StartUpdate | UpdateWeights | FinishUpdate | AbortUpdate
RankChange = WeightChange | ReceiveWeights


class WeightTransferInitRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/init_weight_transfer_engine`."""

    init_info: InitTransfer


class WeightTransferUpdateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/update_weights`."""

    update_info: UpdateWeights


def read_request(request: Any, kind: type[_Request]) -> _Request:
    """A mapping, or an object with the same attributes such as vLLM's, as `kind`. Raises InvalidRequestError that names the field."""
    try:
        return msgspec.convert(request, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{kind.__name__}: {error}.") from error
