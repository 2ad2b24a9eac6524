"""How NCCL is set. Torch-free, as ranks' processes are started before their core has imported torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pagerunner.children import LOOPBACK, host_ip, interface

_SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else a thread asks the trainer's store each second, and writes a trace each second once it has gone
}


def nccl_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What NCCL is told unless the user says otherwise: nothing needs multicast among the devices of a machine, and NCCL's sockets are where the
    engine's own are. Without an address of this machine nothing leaves it.
    """
    address = host_ip(environ)
    name = "lo" if address == LOOPBACK else interface(address)
    return {**_SETTINGS, "NCCL_SOCKET_IFNAME": name if name == "lo" else f"={name}"} if name else _SETTINGS
