"""The CUDA device: whether it can be used, its memory and kind."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from pagerunner.attention.capability import OLDEST_DEVICE
from pagerunner.config import EngineArgs, SharedArgs
from pagerunner.errors import ConfigError
from pagerunner.memory.units import human_bytes
from pagerunner.ops.device_errors import full_device_said
from pagerunner.ops.dispatch import has_triton
from pagerunner.runner.cuda_driver import Visit

logger = logging.getLogger(__name__)

SHARE_DEVICES = "PAGERUNNER_RANKS_SHARE_DEVICES"
"""A variable of the environment: with 1 an engine may have more ranks than the machine has CUDA devices, as tests on a machine with one have."""


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What decides whether a CUDA device can be used. `reason` says why torch sees none."""

    name: str | None
    capability: tuple[int, int] = (0, 0)
    triton: bool = False
    bindings: bool = False
    reason: str = ""

    def fault(self) -> str | None:
        """What is missing, and what works without it; None if nothing is."""
        without = 'device="cpu" works without it'
        if self.name is None:
            return f"torch sees no CUDA device ({self.reason}); {without}."
        if self.capability < OLDEST_DEVICE:
            have, need = ".".join(map(str, self.capability)), ".".join(map(str, OLDEST_DEVICE))
            return f'{self.name} has compute capability {have}, and at least {need} is needed; device="cpu" works here.'
        if not self.triton:
            return f"the package triton, which compiles the kernels, is not installed; install it, or {without}."
        if not self.bindings:
            return f"the package cuda-bindings, which maps device memory, is not installed; install it, or {without}."
        return None


def cuda_facts() -> CudaFacts:
    """What the CUDA device in use now and the installed packages are."""
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        return CudaFacts(None, reason="no device or driver" if built else "this torch is built without CUDA")
    try:
        bindings = importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # there is no package cuda at all
        bindings = False
    return CudaFacts(
        torch.cuda.get_device_name(), torch.cuda.get_device_capability(), triton=has_triton(), bindings=bindings
    )


def resolve_device(asked: str, facts: Callable[[], CudaFacts] = cuda_facts) -> Literal["cpu", "cuda"]:
    """The device to run on: "auto" takes CUDA where it can be used, and says why not where there is a card.

    Raises:
        ConfigError: CUDA is asked for and can't be used; the message says what is missing.
    """
    if asked == "cpu":
        return "cpu"
    found = facts()
    fault = found.fault()
    if fault is None:
        return "cuda"
    if asked == "cuda":
        raise ConfigError(f'device="cuda" can\'t be used: {fault}')
    if found.name is not None:
        logger.warning("Running on the CPU: %s", fault)
    return "cpu"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a CUDA device: all there are, and those free before the engine takes any."""

    total: int
    free: int


def device_kind(device: str) -> str:
    """What decides which kernels run on the device in use now, and how they are divided: the same for equal devices."""
    if device != "cuda":
        return device
    properties = torch.cuda.get_device_properties()
    version = importlib.metadata.version("triton") if has_triton() else None
    return repr((properties.name, properties.major, properties.minor, properties.multi_processor_count, version))


def visible_devices() -> str:
    """The devices that this process sees, in their order. Ranks for which it is the same are on one machine, and have the same numbers for devices."""
    return " ".join(str(torch.cuda.get_device_properties(one).uuid) for one in range(torch.cuda.device_count()))


def ranks_share_devices(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether several ranks may take one CUDA device. Raises ConfigError."""
    said = environ.get(SHARE_DEVICES, "")
    if said not in ("", "0", "1"):
        raise ConfigError(f"{SHARE_DEVICES} must be 0 or 1, got {said!r}.")
    return said == "1"


def check_devices(args: EngineArgs) -> None:
    """Raise ConfigError if this machine hasn't a CUDA device for each rank, or ranks on devices can't be where they are asked for."""
    if args.distributed_executor_backend == "ray":  # which gives each rank a device, and knows how many there are
        if ranks_share_devices():
            raise ConfigError(
                f'{SHARE_DEVICES} is 1, and distributed_executor_backend="ray" gives each rank a device. Leave one of them out.'
            )
        return
    if ranks_share_devices():
        if args.disable_custom_all_reduce:
            raise ConfigError(
                f"disable_custom_all_reduce leaves sums to NCCL, which has no ranks that share a device, and {SHARE_DEVICES} is 1. "
                "Leave one of them out."
            )
        return
    asked = f"tensor_parallel_size={args.tensor_parallel_size}"
    if args.pipeline_parallel_size > 1:
        asked = f"{asked} times pipeline_parallel_size={args.pipeline_parallel_size}"
    if args.teams > 1:
        asked = f"{asked} times data_parallel_size={args.data_parallel_size} with enable_expert_parallel"
    if args.num_ranks > (count := torch.cuda.device_count()):
        raise ConfigError(
            f"{asked} takes {args.num_ranks} CUDA devices, and {count} can be seen (CUDA_VISIBLE_DEVICES says which ones). "
            'Lower it, or take device="cpu".'
        )


def device_of_rank(rank: int) -> int:
    """The number of a rank's CUDA device. All ranks see all devices, under the same numbers.

    Of several machines each has consecutive ranks, which see as many devices. Example: ranks 2 to 4 are together, and take devices 2, 0 and 1.
    """
    return rank % max(int(torch.cuda.device_count()), 1)


def ranks_here(config: SharedArgs, device: str) -> int:
    """How many ranks share this machine's memory and cores: those of all engines, or with Ray one for each device that a rank sees."""
    if config.distributed_executor_backend == "ray" and device == "cuda":
        return int(torch.cuda.device_count())
    return config.num_ranks * config.engines


def device_memory(*, of_ranks: bool = False) -> DeviceMemory:
    """The memory of the CUDA device in use now. Raises CapacityError when it is too full to begin with.

    `of_ranks`: rank 0's device. This process asks only, and takes nothing of it for good.
    """

    def full(reason: str) -> str:
        total = torch.cuda.get_device_properties().total_memory
        return (
            f"The device's {human_bytes(total)} are used up: what a process needs to begin with, some hundred MiB, can't be "
            f'had ({reason}). Free memory on it, or choose another one with CUDA_VISIBLE_DEVICES; device="cpu" works without.'
        )

    with full_device_said(full):
        free, total = Visit().memory(device_of_rank(0)) if of_ranks else torch.cuda.mem_get_info()
    return DeviceMemory(total, free)
