"""The CUDA device of a worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagerunner.engine.startup.machine import DeviceMemory
from pagerunner.memory.units import human_bytes
from pagerunner.ops.device_errors import full_device_said
from pagerunner.runner.cuda_driver import CudaDriver, Driver
from pagerunner.runner.host_copy import CudaHostMemory, HostMemory
from pagerunner.runner.sleep import Scratch, TorchCache


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device as start-up and sleep use it."""

    driver: Driver
    host: HostMemory
    scratch: Scratch

    @classmethod
    def of(cls, index: int, memory: DeviceMemory) -> Card:
        """The card that torch counts as number `index`. Raises CapacityError when the card has not even memory for a stream."""
        device = torch.device("cuda", index)
        with full_device_said(
            lambda reason: (
                f"Out of device memory before anything is loaded ({reason}): {human_bytes(memory.free)} of the device's "
                f"{human_bytes(memory.total)} were free; free memory on the device."
            )
        ):
            return cls(CudaDriver(index), CudaHostMemory(device), TorchCache(device))
