"""A Ray cluster: how an engine joins it, what its machines have, and the CUDA device for which an engine with ranks there is resolved."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import signal
import threading
from typing import Any, Literal

from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.engine.rank_host import gpus_of
from pagerunner.engine.startup.machine import CudaFacts, DeviceMemory, cuda_facts, device_memory, resolve_device
from pagerunner.engine.startup.shares import VISIBLE
from pagerunner.errors import CapacityError, ConfigError
from pagerunner.limits import knob

logger = logging.getLogger(__name__)

ADDRESS = "RAY_ADDRESS"
START_FACTOR = 10
"""A process may take so many times PAGERUNNER_LIMIT_RANK_SECONDS for its start."""
_ASKED = 'distributed_executor_backend="ray"'
_REPORT_SECONDS = 60.0
_PACKAGES = ("torch", "triton", "cuda-bindings", "transformers")


def connected() -> Any:
    """The module `ray`, connected to a cluster: the one in use, or the one at RAY_ADDRESS, or the one of this machine. None is started.

    Raises ConfigError.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f'{_ASKED} needs the package ray: pip install "pagerunner[ray]".')
    ray = importlib.import_module("ray")
    if ray.is_initialized():
        return ray
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=os.environ.get(ADDRESS) or "auto", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        how = f"`ray start --head` starts one; {ADDRESS} names one elsewhere"
        raise ConfigError(f"{_ASKED}: no Ray cluster can be reached ({str(error).splitlines()[0]}). {how}.") from error
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray takes it, and the engine's own end would be lost
    return ray


def counts(ray: Any, kind: str) -> str:
    """Of Ray's CPUs or GPUs those that are free, and how many each machine has."""
    each = [f"{node['NodeManagerAddress']} has {node['Resources'].get(kind, 0):g}" for node in _alive(ray)]
    free, there = ray.available_resources().get(kind, 0), ray.cluster_resources().get(kind, 0)
    return f"free are {free:g} of the cluster's {there:g} {kind}s ({', '.join(each)})"


def _alive(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def check_cluster(args: EngineArgs) -> None:
    """Raise ConfigError if the cluster hasn't a GPU for each rank now. A start waits for them, as clusters may grow."""
    ray = connected()
    if args.num_ranks > ray.cluster_resources().get("GPU", 0):
        raise ConfigError(f"{args.num_ranks} ranks take a GPU each, and {counts(ray, 'GPU')}.")


def cluster_device(asked: str) -> tuple[Literal["cpu", "cuda"], DeviceMemory | None]:
    """As `resolve_device`, of a machine of the cluster, with the memory of one of its CUDA devices. The engine's own machine may have none.

    Raises:
        ConfigError: no cluster can be reached, or CUDA is asked for and can't be used there.
        CapacityError: no GPU is free.
    """
    ray = connected()
    if asked == "auto" and not ray.cluster_resources().get("GPU"):
        return "cpu", None
    seconds = START_FACTOR * float(limits.RANK_SECONDS)
    if ray.available_resources().get("GPU", 0) < 1:
        logger.warning("Waiting up to %g seconds for a GPU of Ray's count: %s.", seconds, counts(ray, "GPU"))
    looked = ray.remote(num_gpus=1, num_cpus=0, max_calls=1, max_retries=0)(_look).remote()
    try:
        where, facts, memory = ray.get(looked, timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(looked)
        raise CapacityError(
            f'Ray has had no GPU for a rank in {seconds:g} seconds {knob("RANK_SECONDS")}: {counts(ray, "GPU")}. device="cpu" works without.'
        ) from None
    except ray.exceptions.RayError as error:
        raise ConfigError(
            f"A machine of the cluster can't say what its GPU is; pagerunner must be installed on all of them. {error}"
        ) from error
    try:
        return resolve_device(asked, lambda: facts), memory
    except ConfigError as error:
        raise ConfigError(f"{where}, a machine of the Ray cluster: {error}") from None


def _look() -> tuple[str, CudaFacts, DeviceMemory | None]:
    """In a process of Ray's that has a GPU: the machine's address, and what the GPU is."""
    ray = importlib.import_module("ray")
    os.environ[VISIBLE] = ",".join(gpus_of(ray.get_runtime_context()))
    facts = cuda_facts()
    memory = device_memory() if facts.fault() is None else None
    return str(ray.util.get_node_ip_address()), facts, memory


def version() -> str:
    """This package's version. Its top, which has it, stands on the engine and can't be imported here."""
    return str(importlib.import_module("pagerunner").__version__)


def machines() -> list[str]:
    """A line for each machine of the cluster at RAY_ADDRESS: what Ray counts there, and versions of packages. Raises ConfigError."""
    ray = connected()
    affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    asked = {
        node["NodeID"]: ray.remote(num_cpus=0, max_retries=0)(_versions)
        .options(scheduling_strategy=affinity(node["NodeID"], soft=False))
        .remote()
        for node in _alive(ray)
    }
    found = []
    for node in _alive(ray):
        has = ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        try:
            said = ray.get(asked[node["NodeID"]], timeout=_REPORT_SECONDS)
        except (KeyError, ray.exceptions.RayError) as error:
            said = f"can't run pagerunner: {str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)}"
        found.append(f"{node['NodeManagerAddress']}: {has}; {said}")
    return found


def _versions() -> str:
    found = [f"pagerunner {version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)
