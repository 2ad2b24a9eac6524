"""New weights for a model that has some: tensors come one by one from elsewhere, and are checked and taken as those of a checkpoint are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from pagerunner.errors import CheckpointError, InvalidRequestError
from pagerunner.layers.shares import Share
from pagerunner.models.checkpoint.loader import Copies, Filling, Model, Place, stream_of
from pagerunner.models.checkpoint.weight_copy import copy_now
from pagerunner.quant.sinks import Sink
from pagerunner.types.weights import UpdateWeights

_WHERE = Path("update_weights")  # instead of a file's name, in messages


class Claimed(NamedTuple):
    """Tensors of one call that a model can take: what the trainer calls them, their shapes, the model's names and sinks; what comes together."""

    names: list[str]
    tensors: list[torch.Tensor]
    taken: list[tuple[str, Sink | None]]
    pieces: list[range]

    def num_bytes(self, piece: range) -> int:
        """Those of a piece."""
        return sum(self.tensors[number].nbytes for number in piece)

    @property
    def largest(self) -> int:
        """Bytes of the largest piece."""
        return max(map(self.num_bytes, self.pieces), default=0)


class Update:
    """One update of a model, from its start to its finish."""

    def __init__(self, model: Model, share: Share | None, *, whole: bool, quantised: bool) -> None:
        """`whole`: all weights must come. Otherwise some may stay as they are, of a `quantised` model whole matrices with their scales."""
        self._model, self._whole, self._quantised = model, whole, quantised
        self._filling = Filling(model, share)
        self._wanted = set(self._filling.pending)

    def claim(self, asked: UpdateWeights) -> Claimed:
        """What will come with one call. Raises InvalidRequestError: a tensor isn't the model's, or has another shape or dtype."""
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for shape, dtype in zip(asked.shapes, asked.dtype_names, strict=True)
        ]
        most = asked.packed_buffer_size_bytes * asked.packed
        together = list(pieces([tensor.nbytes for tensor in tensors], most))
        return Claimed(asked.names, tensors, self._claimed(asked.names, tensors), together)

    def take(self, claimed: Claimed, receive: Callable[[int], torch.Tensor]) -> None:
        """Fill weights with tensors. `receive(num_bytes)` gives their bytes, piece by piece, each until the next one.

        Raises:
            CheckpointError: a number is NaN or infinite.
            Others: what copies raise. All pieces have been received. Or what `receive` raises.
        """
        fault: Exception | None = None
        for piece in claimed.pieces:
            received = receive(claimed.num_bytes(piece))
            try:
                if fault is None:
                    parts = [
                        (claimed.names[number], claimed.tensors[number], *claimed.taken[number]) for number in piece
                    ]
                    self._put(parts, received)
            except Exception as error:
                fault = error  # the rest is received all the same, as the trainer and other ranks go on
        receive(0)
        if fault is not None:
            raise fault

    def _put(self, tensors: list[tuple[str, torch.Tensor, str, Sink | None]], piece: torch.Tensor) -> None:
        parts = piece.split([like.nbytes for _, like, _, _ in tensors])
        with Copies(copy_now, stream_of(self._model), lambda done: None) as copies:
            for (given, like, name, sink), part in zip(tensors, parts, strict=True):
                if sink is not None:
                    # a number begins at a multiple of its size
                    held = part.clone() if part.storage_offset() % 16 else part
                    held = held.view(like.dtype).view(like.shape)
                    held = held.cpu() if self._quantised else held  # scales are looked at there
                    copies.add(sink, held, Place(_WHERE, given, name, held))

    def _claimed(self, names: list[str], tensors: list[torch.Tensor]) -> list[tuple[str, Sink | None]]:
        filling = self._filling
        try:
            if "lm_head.weight" in names and "lm_head.weight" not in filling.names:
                raise CheckpointError(
                    f"{_WHERE}: lm_head.weight is model.embed_tokens.weight in this model; leave it out."
                )
            taken = [filling.claim(_WHERE, given, tensor) for given, tensor in zip(names, tensors, strict=True)]
            filling.check_extra()
        except CheckpointError as error:
            raise InvalidRequestError(str(error), param="names") from None
        if filling.scales:
            raise InvalidRequestError(
                f"{_WHERE}: {filling.scales[0]} scales keys and values in pages, which an update can't change.",
                param="names",
            )
        return taken

    def finish(self) -> None:
        """Raise InvalidRequestError if tensors are missing: all that haven't come, or those that stand beside some that have."""
        filling = self._filling
        changed = {filling.known[name].owner for name in self._wanted - filling.pending}
        missing = [
            name
            for name in filling.pending
            if self._whole or name not in self._wanted or (self._quantised and filling.known[name].owner in changed)
        ]
        if missing:
            raise InvalidRequestError(f"The update lacks {filling.lacking(missing)}", param="names")


def pieces(sizes: list[int], most: int) -> Iterator[range]:
    """Which tensors of so many bytes come together: a piece ends with the one that makes it larger than `most` bytes."""
    begin = held = 0
    for number, size in enumerate(sizes):
        held += size
        if held > most or number == len(sizes) - 1:
            yield range(begin, number + 1)
            begin, held = number + 1, 0
