"""The way of new weights from a trainer to an engine: a group of torch's in which the trainer is rank 0 and broadcasts.

All meet in a TCPStore that the trainer has. What a rank sends of its own is what torch's process groups say to each other, and no object is
pickled. So a trainer needs nothing of this package; `scripts/rl_trainer.py` is one.

Before each piece the trainer broadcasts the piece's length. Gloo takes a shorter message silently, and a longer one ends the process.
"""

from __future__ import annotations

import datetime
import ipaddress
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed import BroadcastOptions, TCPStore

from pagerunner.children import HOST_IP, LOOPBACK, host_ip
from pagerunner.config import TransferBackend
from pagerunner.dist.gloo import gloo_group
from pagerunner.dist.nccl import nccl_environment, nccl_group
from pagerunner.errors import CapacityError, InvalidRequestError, RequestFailedError
from pagerunner.limits import knob
from pagerunner.memory.units import human_bytes

ANNOUNCED = "lengths"
"""A key of the trainer's store. It is there if the trainer announces lengths."""


class TransferGroup:
    """An engine's rank in a trainer's group. After an error it is of no use."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        size: int,
        backend: TransferBackend,
        device: torch.device,
        seconds: float,
    ) -> None:
        """Join the trainer, whose store is at `address`. Waits for it, and for each piece later, for up to so many seconds.

        Raises:
            InvalidRequestError: the address is another machine's, and the engine may talk to its own machine only. Or the trainer doesn't say
                how long its pieces are.
            RequestFailedError: not all of the `size` processes have come.
        """
        if host_ip() == LOOPBACK and not _is_loopback(address):
            raise InvalidRequestError(
                f"master_address={address!r} is another machine, and this engine listens on {LOOPBACK} only; {HOST_IP} in its environment "
                "is the address by which other machines reach it.",
                param="master_address",
            )
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._environment = nccl_environment if backend == "nccl" else nullcontext
        self._seconds = seconds
        self._room = torch.empty(0)
        try:
            self._length = torch.zeros(1, dtype=torch.int64, device=self._device)
            limit = datetime.timedelta(seconds=seconds)
            store = TCPStore(address, port, size, is_master=False, timeout=limit, wait_for_workers=False)
            with self._environment():
                self._group: Any = (
                    nccl_group(store, rank, size, seconds)
                    if backend == "nccl"
                    else gloo_group(store, rank, size, seconds, host_ip())
                )
            announced = store.check([ANNOUNCED])
        except RuntimeError as error:
            raise self._failed(f"could not join {size} processes at {address}:{port}", error) from error
        if not announced:
            self.leave()
            raise InvalidRequestError(
                f"The trainer at {address}:{port} doesn't say how long its pieces are: its store has no key {ANNOUNCED!r}. A trainer sets it, and "
                "broadcasts the length before each piece; docs/rl.md and scripts/rl_trainer.py show how."
            )

    def reserve(self, num_bytes: int) -> None:
        """Take memory for pieces of up to so many bytes, until `release`. Raises CapacityError."""
        try:
            self._room = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            cuda = self._device.type == "cuda"
            free = (
                f"the device has {human_bytes(torch.cuda.mem_get_info(self._device)[0])}"
                if cuda
                else "the host has less"
            )
            raise CapacityError(
                f"The largest piece of new weights takes {human_bytes(num_bytes)}, and {free}. Send smaller pieces (packed_buffer_size_bytes), "
                "or leave more memory free (gpu_memory_utilization)."
            ) from error

    def receive(self, num_bytes: int) -> torch.Tensor:
        """What the trainer broadcasts next, as uint8 [num_bytes], until the next call. A call of `/update_weights` ends with 0 bytes.

        Raises:
            InvalidRequestError: the trainer sends another number of bytes. Nothing of them is taken.
            RequestFailedError: the trainer has gone, or is late.
        """
        piece = self._room[:num_bytes]
        try:
            self._broadcast(self._length)
            comes = int(self._length.item())
            if comes == num_bytes:
                self._broadcast(piece)
        except RuntimeError as error:
            raise self._failed(f"has lost the trainer before {num_bytes:,} bytes of new weights", error) from error
        if comes != num_bytes:
            declared = f"a piece of {num_bytes:,} bytes" if num_bytes else "no more pieces"
            raise InvalidRequestError(
                f"The trainer {f'sends a piece of {comes:,} bytes' if comes else 'has sent its last piece'}, where update_weights has declared "
                f"{declared}. dtype_names, shapes, packed and packed_buffer_size_bytes must be what the trainer sends by."
            )
        return piece

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        if len(tensor):
            # only for the first one: NCCL has read it then, and other threads may be reading it
            environment, self._environment = self._environment, nullcontext
            with environment():
                work = self._group.broadcast([tensor], options)
                if work is not None:  # gloo's; NCCL's call is on the current stream
                    work.wait()

    def release(self) -> None:
        """Give the memory back to the device: the plan doesn't count it."""
        self._room = torch.empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def leave(self) -> None:
        """Close the ways to the others, which end what they wait for."""
        self._group = None
        self.release()

    def _failed(self, what: str, error: RuntimeError) -> RequestFailedError:
        limit = f"{self._seconds:g} seconds {knob('TRANSFER_SECONDS')}"
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0][:200]
        return RequestFailedError(f"The engine {what} ({reason}). It waits for a trainer for up to {limit}.")


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
