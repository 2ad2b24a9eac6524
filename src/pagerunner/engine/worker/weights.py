"""A rank's side of weight updates: it joins the trainer's group, takes its share of what comes, and keeps the host copy true."""

from __future__ import annotations

import torch

from pagerunner import limits
from pagerunner.config import transfer_backend
from pagerunner.dist.transfer import TransferGroup
from pagerunner.engine.startup.resolve import Resolved
from pagerunner.errors import ConfigError, InvalidRequestError
from pagerunner.layers.shares import Share
from pagerunner.memory.units import human_bytes
from pagerunner.models.checkpoint.digest import weights_digest
from pagerunner.models.checkpoint.loader import Model, stored_tensors
from pagerunner.models.checkpoint.updates import Claimed, Update
from pagerunner.runner.sleep import Sleeper
from pagerunner.types.weights import (
    AbortUpdate,
    FinishUpdate,
    InitTransfer,
    RankChange,
    ReceiveWeights,
    StartUpdate,
    UpdateWeights,
)


class WorkerWeights:
    """What a rank does of a weight update."""

    def __init__(self, model: Model, share: Share | None, rank: int, resolved: Resolved) -> None:
        self._model, self._share = model, share
        self._rank, self._ranks = rank, resolved.config.num_ranks
        self._quantised = resolved.model.format is not None
        self._device = resolved.config.device
        self._backend = transfer_backend(resolved.args, self._device)
        self._group: TransferGroup | None = None
        self._update: Update | None = None
        self._claimed: Claimed | None = None
        self._digest: str | None = None

    def digest(self) -> str:
        """See Executor.weights_digest. It is kept until weights may have changed."""
        if self._digest is None:
            self._digest = weights_digest(stored_tensors(self._model))
        return self._digest

    def lost(self) -> None:
        """The weights will be read from the checkpoint again, which may have others by then."""
        self._digest = None

    def change(self, change: RankChange, sleeper: Sleeper) -> None:
        """See Executor.change_weights. Calls come in an order that the core has checked."""
        group, update = self._group, self._update
        self._digest = None
        match change:
            case InitTransfer():
                self._leave()
                self._group = self._join(change)
            case AbortUpdate():
                self._leave()
            case StartUpdate(whole=whole):
                if group is None:
                    raise InvalidRequestError("No trainer is known; call init_weight_transfer_engine first.")
                sleeper.begin_update()
                self._update = Update(self._model, self._share, whole=whole, quantised=self._quantised)
            case UpdateWeights() if group is not None and update is not None:
                self._claimed = claimed = update.claim(change)
                _check_size(claimed.largest, change)
                group.reserve(claimed.largest)
            case ReceiveWeights() if group is not None and update is not None and self._claimed is not None:
                claimed, self._claimed = self._claimed, None
                try:
                    update.take(claimed, group.receive)
                except BaseException:
                    self._leave()  # other ranks, and the trainer, may wait for this one
                    raise
                group.release()
            case FinishUpdate() if update is not None:
                update.finish()
                sleeper.end_update()
            case _:
                raise RuntimeError(f"{type(change).__name__} comes out of order")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = self._update = self._claimed = None

    def _join(self, info: InitTransfer) -> TransferGroup:
        if self._backend is None:
            raise ConfigError(
                "This engine takes no new weights; it was started without weight_transfer_config "
                """(--weight-transfer-config '{"backend": "nccl"}')."""
            )
        if info.world_size < info.rank_offset + self._ranks:
            raise InvalidRequestError(
                f"world_size={info.world_size} is too small: rank_offset={info.rank_offset} and the engine's {self._ranks} ranks make "
                f"{info.rank_offset + self._ranks}.",
                param="world_size",
            )
        device = torch.device("cuda", torch.cuda.current_device()) if self._device == "cuda" else torch.device("cpu")
        seconds = float(limits.TRANSFER_SECONDS)
        return TransferGroup(
            info.master_address,
            info.master_port,
            info.rank_offset + self._rank,
            info.world_size,
            self._backend,
            device,
            seconds,
        )


def _check_size(largest: int, asked: UpdateWeights) -> None:
    if largest > limits.TRANSFER_MEGABYTES * 2**20:
        raise InvalidRequestError(
            f"The largest piece of new weights has {human_bytes(largest)}, more than the {limits.TRANSFER_MEGABYTES:,} MiB that are taken at "
            f"once {limits.knob('TRANSFER_MEGABYTES')}. A piece ends with the tensor that makes it larger than packed_buffer_size_bytes="
            f"{asked.packed_buffer_size_bytes * asked.packed:,}.",
            param="packed_buffer_size_bytes",
        )
