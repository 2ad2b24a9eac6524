"""RayPlaces: ranks on the machines of a Ray cluster.

Ray places an actor for each rank (`engine/rank_host.py`), says when it is gone, and ends it. Nothing of a step goes through Ray: plans, reports
and results have sockets of their own (`doors.py`).
"""

from __future__ import annotations

import importlib
import logging
import signal
from subprocess import TimeoutExpired
from typing import Any

import msgspec

from pagerunner.children import HOST_IP, LOOPBACK, host_ip, settings_of_engine
from pagerunner.config import EngineConfig
from pagerunner.engine.core.executors.watch import LOST
from pagerunner.engine.rank_host import Place, RankHost, machine
from pagerunner.engine.startup.cluster import connected, counts
from pagerunner.engine.worker import orders
from pagerunner.errors import CapacityError, ConfigError
from pagerunner.limits import knob

logger = logging.getLogger(__name__)

_ACTORS: dict[str, dict[str, Any]] = {"CPU": {"num_cpus": 1}, "GPU": {"num_cpus": 0, "num_gpus": 1}}
_THREADS = 4


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
        # Ray has ended its actors, and would start a cluster if asked
        if self._status is None and not self._ray.is_initialized():
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
        together, kind = config.tensor_parallel_size, "GPU" if config.device == "cuda" else "CPU"
        fits = any(node["Alive"] and node["Resources"].get(kind, 0) >= together for node in ray.nodes())
        # what a bundle holds is on one machine
        bundles = [{kind: together}] * (config.num_ranks // together) if fits else [{kind: 1}] * config.num_ranks
        if not fits:
            logger.warning(
                "No machine of the cluster has %d %ss: tensor_parallel_size goes across machines.", together, kind
            )
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        self._actors: list[Any] = []
        try:
            if ray.available_resources().get(kind, 0) < config.num_ranks:
                wanted = config.num_ranks, kind, counts(ray, kind)
                logger.warning("Waiting up to %g seconds for %d %ss of Ray's count: %s.", seconds, *wanted)
            if not self._group.wait(seconds):
                raise CapacityError(
                    f"Ray hasn't placed {config.num_ranks} ranks with a {kind} each in {seconds:g} seconds {knob('RANK_SECONDS')}: "
                    f"{counts(ray, kind)}."
                )
            strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
            for rank in range(config.num_ranks):
                place = strategy(self._group, placement_group_bundle_index=rank // together if fits else rank)
                actor = ray.remote(RankHost).options(
                    scheduling_strategy=place, max_concurrency=_THREADS, **_ACTORS[kind]
                )
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
        self._actors, self._places = neighbours(self._actors, places)
        places = self._places
        self.keys = [place.key for place in places]
        addresses = [place.address for place in places]
        self.machines = addresses if len(set(addresses)) > 1 else []
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
        gpus = ",".join(gpu for other in self._places if other.node == place.node for gpu in other.gpus)
        ended = actor.run.remote(msgspec.json.encode(launch), settings_of_engine(), address, gpus)
        return RayRank(self._ray, actor, place.pid, ended)

    def close(self) -> None:
        """End the actors, and give back their room."""
        if self._ray.is_initialized():
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)


def neighbours(actors: list[Any], places: list[Place]) -> tuple[list[Any], list[Place]]:
    """Actors and their places, those of a machine one behind the other. So the ranks of a machine have consecutive numbers; see `device_of_rank`."""
    nodes = [place.node for place in places]
    order = sorted(range(len(nodes)), key=lambda rank: nodes.index(nodes[rank]))
    return [actors[rank] for rank in order], [places[rank] for rank in order]
