"""How NCCL is set. Torch-free, as ranks' processes are started before their core has imported torch."""

from __future__ import annotations

from pagerunner.children import LOOPBACK, host_ip

_SETTINGS = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def nccl_settings() -> dict[str, str]:
    """What NCCL is told unless the user says otherwise: nothing needs multicast among the devices of a machine, and nothing leaves the machine."""
    return _SETTINGS if host_ip() != LOOPBACK else {**_SETTINGS, "NCCL_SOCKET_IFNAME": "lo"}
