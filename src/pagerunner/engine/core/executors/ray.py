"""RayPlaces: ranks on the machines of a Ray cluster.

Ray places an actor for each rank (`engine/rank_host.py`), says when it is gone, and ends it. Nothing of a step goes through Ray: plans, reports
and results have sockets of their own (`doors.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import threading
from subprocess import TimeoutExpired
from typing import Any

import msgspec

from pagerunner.children import HOST_IP, LOOPBACK, host_ip, settings_of_engine
from pagerunner.config import EngineConfig
from pagerunner.engine.core.executors.watch import LOST
from pagerunner.engine.rank_host import Place, RankHost, machine
from pagerunner.engine.worker import orders
from pagerunner.errors import CapacityError, ConfigError
from pagerunner.limits import knob

logger = logging.getLogger(__name__)

ADDRESS = "RAY_ADDRESS"
_ACTOR: dict[str, Any] = {"num_cpus": 1, "max_concurrency": 4}


class RayRank:
    """A rank's process in an actor, with the methods of a `subprocess.Popen`."""

    stdin = None

    def __init__(self, ray: Any, actor: Any, pid: int, ended: Any) -> None:
        """`pid` is the actor's process, `ended` what its `run` will return."""
        self.pid = pid
        self._ray, self._actor, self._ended = ray, actor, ended
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None as long as the rank runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        status = self._look(timeout)
        if status is None:
            raise TimeoutExpired("a rank's actor", timeout or 0.0)
        return status

    def _look(self, seconds: float | None) -> int | None:
        if (
            self._status is None and not self._ray.is_initialized()
        ):  # Ray has ended its actors, and would start a cluster if asked
            self._status = LOST
        if self._status is None:
            try:
                self._status = int(self._ray.get(self._ended, timeout=seconds))
            except self._ray.exceptions.GetTimeoutError:
                return None
            except self._ray.exceptions.RayError as error:
                logger.error("A rank's actor has failed: %s", error)
                self._status = LOST
        return self._status

    def send_signal(self, sig: int, /) -> None:
        """Send the rank a signal."""
        if self._ray.is_initialized():
            self._actor.send_signal.remote(sig)

    def kill(self) -> None:
        """End the rank."""
        self.send_signal(signal.SIGKILL)


class RayPlaces:
    """Actors for the ranks of an engine."""

    here = False

    def __init__(self, config: EngineConfig, seconds: float) -> None:
        """Place them, within so many seconds.

        Raises:
            CapacityError: the cluster doesn't have the room.
            ConfigError: Ray isn't installed, no cluster can be reached, or a rank would be on a machine that can't reach this one.
        """
        self._ray = ray = connected()
        self.host = host_ip()
        together = config.tensor_parallel_size
        fits = any(node["Alive"] and node["Resources"].get("CPU", 0) >= together for node in ray.nodes())
        # what a bundle holds is on one machine
        bundles = [{"CPU": together}] * (config.num_ranks // together) if fits else [{"CPU": 1}] * config.num_ranks
        if not fits:
            logger.warning(
                "No machine of the cluster has %d CPUs: tensor_parallel_size goes across machines.", together
            )
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        self._actors: list[Any] = []
        try:
            free = ray.available_resources().get("CPU", 0)
            if free < config.num_ranks:
                logger.warning(
                    "Waiting up to %g seconds for %d CPUs of Ray's count: %g are free.", seconds, config.num_ranks, free
                )
            if not self._group.wait(seconds):
                raise CapacityError(
                    f"Ray hasn't placed {config.num_ranks} ranks with a CPU each in {seconds:g} seconds {knob('RANK_SECONDS')}: free are "
                    f"{ray.available_resources().get('CPU', 0):g} of the cluster's {ray.cluster_resources().get('CPU', 0):g} CPUs."
                )
            strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
            for rank in range(config.num_ranks):
                place = strategy(self._group, placement_group_bundle_index=rank // together if fits else rank)
                actor = ray.remote(RankHost).options(scheduling_strategy=place, **_ACTOR)
                self._actors.append(actor.remote())
            self._check(seconds)
        except BaseException:
            self.close()
            raise

    def _check(self, seconds: float) -> None:
        try:
            places = self._ray.get([actor.place.remote() for actor in self._actors], timeout=seconds)
        except self._ray.exceptions.RayError as error:
            raise ConfigError(
                f"The ranks' Ray actors don't start; pagerunner must be installed on all machines of the cluster. {error}"
            ) from error
        self._places: list[Place] = places
        self.keys = [place.key for place in places]
        for rank, place in enumerate(places):
            if self.host == LOOPBACK and place.machine != machine():
                raise ConfigError(
                    f"Ray has placed rank {rank} of {len(places)} on another machine, and this engine listens on {LOOPBACK} only; {HOST_IP} in its "
                    "environment is the address by which other machines reach it."
                )

    def start(self, launch: orders.RankLaunch) -> RayRank:
        """Start a rank in its actor."""
        actor, place = self._actors[launch.rank], self._places[launch.rank]
        address = LOOPBACK if self.host == LOOPBACK else place.address
        ended = actor.run.remote(msgspec.json.encode(launch), settings_of_engine(), address)
        return RayRank(self._ray, actor, place.pid, ended)

    def close(self) -> None:
        """End the actors, and give back their room."""
        if self._ray.is_initialized():
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)


def connected() -> Any:
    """The module `ray`, connected to a cluster: the one in use, or the one at RAY_ADDRESS, or the one of this machine. None is started.

    Raises ConfigError.
    """
    asked = 'distributed_executor_backend="ray"'
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f'{asked} needs the package ray: pip install "pagerunner[ray]".')
    ray = importlib.import_module("ray")
    if ray.is_initialized():
        return ray
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=os.environ.get(ADDRESS) or "auto", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        how = f"`ray start --head` starts one; {ADDRESS} names one elsewhere"
        raise ConfigError(f"{asked}: no Ray cluster can be reached ({str(error).splitlines()[0]}). {how}.") from error
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray takes it, and the engine's own end would be lost
    return ray
