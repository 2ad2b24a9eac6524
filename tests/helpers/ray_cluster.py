"""Two machines of a Ray cluster, as two Ray nodes on loopback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def two_machines(cpus: int = 1) -> Iterator[Any]:
    """Connected to a cluster of two nodes with so many CPUs each, and a GPU that isn't there. The module `ray` is imported only here."""
    source = str(Path(__file__).resolve().parents[2] / "src")
    scripts = str(Path(__file__).resolve().parents[2] / "scripts")
    kept = dict(os.environ)
    os.environ |= {
        "RAY_raylet_start_wait_time_s": "120",  # the tests' machine is busy
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([source, scripts, kept.get("PYTHONPATH", "")]).strip(os.pathsep),
    }
    import ray
    from ray._private import node, services, worker
    from ray.cluster_utils import Cluster

    for module in (
        node,
        services,
        worker,
    ):  # Ray takes the machine's own address for loopback, and nothing leaves the machine here
        if hasattr(module, "resolve_ip_for_localhost"):
            module.resolve_ip_for_localhost = lambda host: LOOPBACK if host == "localhost" else host
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": cpus, "num_gpus": 1, "node_ip_address": LOOPBACK, "include_dashboard": False},
    )
    try:
        cluster.add_node(num_cpus=cpus, num_gpus=1, node_ip_address=LOOPBACK)
        ray.init(address=cluster.address, _node_ip_address=LOOPBACK, logging_level="ERROR")
        yield ray
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ |= kept
