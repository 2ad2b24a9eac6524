"""What kv_offloading_size and kv_transfer_config ask for: vLLM's names, each of which is taken or refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Literal

import msgspec

from pagerunner.config import DiskTierConfig, EngineArgs, ExchangeConfig, one_of, read_option
from pagerunner.errors import CapacityError, ConfigError
from pagerunner.memory.units import human_bytes
from pagerunner.tiers.nixl import check_installed
from pagerunner.tiers.wire import LOOPBACK, place

FailurePolicy = Literal["recompute", "fail"]
CONNECTORS = ("OffloadingConnector", "PeerConnector", "NixlConnector")
EXCHANGES = ("PeerConnector", "NixlConnector")
ROLES = ("kv_producer", "kv_consumer", "kv_both")
_EXAMPLE = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 85899345920}}'
_FS_EXAMPLE = '{"type": "fs", "root_dir": "/var/cache/pages", "max_bytes": 500000000000}'
_DISK = 'OffloadingConnector with secondary_tiers of type "fs" keeps pages in host memory and on a disk'
_ELSEWHERE = {
    "MultiConnector": "PeerConnector or NixlConnector with secondary_tiers is other engines, host memory and a disk in one",
    "P2pNcclConnector": "PeerConnector takes pages from engine to engine over TCP",
    "MooncakeConnector": "PeerConnector or NixlConnector takes pages from engine to engine",
    "MooncakeStoreConnector": f"{_DISK}, and PeerConnector takes them from engine to engine",
    "LMCacheConnectorV1": _DISK,
    "LMCacheMPConnector": _DISK,
    "ExampleConnector": _DISK,
    "SharedStorageConnector": _DISK,
    "SimpleCPUOffloadConnector": "OffloadingConnector keeps pages in host memory",
}
"""Connectors of vLLM, and what does here what they are for."""
_SPARE_BYTES = 2 * 2**30
"""Host memory that pages leave to the rest of the machine."""


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's fields. Those of its first connectors are taken with the values that mean nothing."""

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = {}
    kv_load_failure_policy: str = "recompute"
    engine_id: str | None = None
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_buffer_device: str | None = None
    kv_buffer_size: float = 1e9
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579


class OffloadingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """kv_connector_extra_config of OffloadingConnector."""

    cpu_bytes_to_use: int | None = None
    block_size: int | None = None
    blocks_per_chunk: int = 1
    eviction_policy: str = "lru"
    offload_prompt_only: bool = True
    store_threshold: int = 0
    spec_name: str = "CPUOffloadingSpec"
    secondary_tiers: list[dict[str, Any]] = []


class FsTier(DiskTierConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of secondary_tiers."""

    type: str


class PeerConfig(OffloadingConfig, frozen=True, forbid_unknown_fields=True):
    """kv_connector_extra_config of PeerConnector, which has the host memory of OffloadingConnector. `peers`: other engines' addresses."""

    peers: list[str] | None = None
    secret_file: str | None = None
    kv_lease_duration: float = 30.0
    num_threads: int = 4
    backends: list[str] | None = None


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """What was asked for. `host_bytes` are those of each rank, 0 for no host memory; those of the `disk` are all ranks' together."""

    host_bytes: int = 0
    prompts_only: bool = True
    disk: DiskTierConfig | None = None
    load_failure: FailurePolicy = "recompute"
    exchange: ExchangeConfig | None = None


def read_kv_transfer(args: EngineArgs) -> KVTransfer:
    """What the arguments ask for. Raises ConfigError for what isn't there, with the names that are."""
    one_of("kv_offloading_backend", args.kv_offloading_backend, ("native",))
    config = read_option("kv_transfer_config", args.kv_transfer_config, KVTransferConfig, _EXAMPLE)
    if args.kv_transfer_config is not None:
        _check(config)
    failure: FailurePolicy = "fail" if config.kv_load_failure_policy == "fail" else "recompute"
    extra = _offloading(config, args)
    size = args.kv_offloading_size
    if size is not None and not 0 < size < 2**20:
        raise ConfigError(f"kv_offloading_size must be a number of GiB above 0, got {size:g} (and below 1,048,576).")
    asked = extra.cpu_bytes_to_use
    if size is not None and asked is not None:
        raise ConfigError(
            f"kv_offloading_size={size:g} (GiB) and cpu_bytes_to_use={asked} say the same thing; give one of them."
        )
    if asked is not None and asked < 1:
        raise ConfigError(f"cpu_bytes_to_use must be at least 1, got {asked}.")
    total = int(size * 2**30) if size is not None else asked or 0
    if config.kv_connector is not None and not total:
        more = ", and secret_file, as other engines read that memory" if config.kv_connector == "NixlConnector" else ""
        raise ConfigError(
            f"{config.kv_connector} takes pages to host memory, and kv_connector_extra_config doesn't say how much of it: give "
            f"cpu_bytes_to_use (bytes of all ranks together), or kv_offloading_size (GiB){more}."
        )
    if total and not args.enable_prefix_caching:
        raise ConfigError(
            "Pages in host memory are found by their prefixes: kv_offloading_size needs enable_prefix_caching=True."
        )
    exchange = _exchange(config, extra, args) if isinstance(extra, PeerConfig) else None
    disk = _disk_tier(extra)
    return KVTransfer(total // args.num_ranks, extra.offload_prompt_only, disk, failure, exchange)


def _disk_tier(extra: OffloadingConfig) -> DiskTierConfig | None:
    """The one secondary tier that there is. Raises ConfigError for others."""
    tiers = extra.secondary_tiers
    if not tiers:
        if extra.spec_name == "TieringOffloadingSpec":
            raise ConfigError(f"TieringOffloadingSpec needs secondary_tiers, such as [{_FS_EXAMPLE}].")
        return None
    one_of("type of secondary_tiers", tiers[0].get("type"), ("fs",))
    if len(tiers) > 1:
        raise ConfigError(f"secondary_tiers has {len(tiers)} entries; there can be one, a directory on a disk.")
    try:
        asked = msgspec.convert(tiers[0], type=FsTier)
    except msgspec.ValidationError as error:
        known = ", ".join(FsTier.__struct_fields__)
        raise ConfigError(
            f"secondary_tiers: {error}. An entry of type fs has {known}, such as {_FS_EXAMPLE}."
        ) from None
    if not asked.root_dir:
        raise ConfigError("root_dir of secondary_tiers must name a directory, got ''.")
    for name in ("max_bytes", "n_read_threads", "n_write_threads"):
        most = 2**62 if name == "max_bytes" else 256
        if not 0 < (value := getattr(asked, name)) <= most:
            raise ConfigError(f"{name} of secondary_tiers must be from 1 to {most:,}, got {value}.")
    return DiskTierConfig(
        root_dir=asked.root_dir, max_bytes=asked.max_bytes,
        n_read_threads=asked.n_read_threads, n_write_threads=asked.n_write_threads,
    )  # fmt: skip


def _check(config: KVTransferConfig) -> None:
    if config == KVTransferConfig():
        raise ConfigError(
            f"kv_transfer_config asks for nothing: kv_connector is missing. Give JSON such as {_EXAMPLE}."
        )
    exchanges = config.kv_connector in EXCHANGES
    if config.kv_connector is not None or config.kv_role is not None or config.kv_connector_extra_config:
        if (here := _ELSEWHERE.get(config.kv_connector or "")) is not None:
            raise ConfigError(f"kv_connector={config.kv_connector!r} of kv_transfer_config isn't there; {here}.")
        one_of("kv_connector in kv_transfer_config", config.kv_connector, CONNECTORS)
        one_of(f"kv_role of {config.kv_connector}", config.kv_role, ROLES if exchanges else ("kv_both",))
    one_of("kv_load_failure_policy", config.kv_load_failure_policy, ("recompute", "fail"))
    if config.kv_connector_module_path is not None:
        raise ConfigError(
            f"kv_connector_module_path={config.kv_connector_module_path!r} names code to run, which a configuration can't "
            f"here; the connectors are {', '.join(CONNECTORS)}."
        )
    for name in "enable_permute_local_kv kv_buffer_device kv_buffer_size kv_parallel_size kv_ip kv_port".split():
        if exchanges and name in ("kv_ip", "kv_port"):
            continue
        default = next(field.default for field in msgspec.structs.fields(config) if field.name == name)
        if (value := getattr(config, name)) not in (default, "cuda" if name == "kv_buffer_device" else default):
            raise ConfigError(
                f"{name}={value!r} in kv_transfer_config changes nothing with {config.kv_connector}; leave it out."
            )


def _offloading(config: KVTransferConfig, args: EngineArgs) -> OffloadingConfig:
    kind = PeerConfig if config.kv_connector in EXCHANGES else OffloadingConfig
    try:
        extra = msgspec.convert(_whole(config.kv_connector_extra_config), type=kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"kv_connector_extra_config: {error}. {config.kv_connector} knows {known}.") from None
    one_of("eviction_policy", extra.eviction_policy, ("lru",))
    one_of("spec_name", extra.spec_name, ("CPUOffloadingSpec", "TieringOffloadingSpec"))
    if extra.block_size not in (None, args.block_size) or extra.blocks_per_chunk != 1:
        name, value = "blocks_per_chunk", extra.blocks_per_chunk
        if value == 1:
            name, value = "block_size", extra.block_size or 0
        raise ConfigError(
            f"kv_connector_extra_config: {name}={value} would join pages on their way; a page of block_size={args.block_size} tokens goes to host "
            "memory as it is, with all its layers. Leave it out."
        )
    if extra.store_threshold < 0:
        raise ConfigError(f"store_threshold must be 0 or 1, got {extra.store_threshold}.")
    if extra.store_threshold > 1:
        raise ConfigError(
            f"store_threshold={extra.store_threshold} would store a prompt when it has come so many times; prompts are stored the "
            "first time. Leave it out."
        )
    return extra


def _whole(value: Any) -> Any:
    """JSON with whole numbers as such: some writers have 3e7 for 30000000."""
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return list(map(_whole, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _exchange(config: KVTransferConfig, extra: PeerConfig, args: EngineArgs) -> ExchangeConfig:
    if args.data_parallel_size > 1:
        raise ConfigError(
            f"{config.kv_connector} is for one engine without teams: data_parallel_size={args.data_parallel_size} must be 1. For several engines start "
            "several servers, and pagerunner proxy before them."
        )
    if args.distributed_executor_backend == "ray":
        raise ConfigError(
            f'{config.kv_connector} needs all ranks on one machine, where the engine\'s core has their host memory; distributed_executor_backend="ray" '
            'must be "mp".'
        )
    for name, value, least, most in (
        ("kv_port", config.kv_port, 1, 65_535),
        ("kv_lease_duration", extra.kv_lease_duration, 1, 3_600),
        ("num_threads", extra.num_threads, 1, 64),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{name} in kv_transfer_config must be in [{least}, {most}], got {value:g}.")
    if nixl := config.kv_connector == "NixlConnector":
        check_installed()
    if extra.backends not in ((None, ["UCX"]) if nixl else (None,)):
        raise ConfigError(
            f'kv_connector_extra_config: backends={extra.backends!r} must be ["UCX"], and goes with NixlConnector alone; leave it out.'
        )
    peers = tuple(LOOPBACK if extra.peers is None else extra.peers)
    for entry in peers:
        place(entry)
    try:
        own = ip_address(config.kv_ip)
    except ValueError:
        own = None
    if own is None or own.is_unspecified:
        raise ConfigError(
            f"kv_ip={config.kv_ip!r} in kv_transfer_config must be the IP address that other engines reach this one by, such as 10.0.0.7: "
            "answers name it as remote_host."
        )
    if nixl and extra.secret_file is None:
        raise ConfigError(
            "NixlConnector lets other engines read all of the host memory for pages: give secret_file in kv_connector_extra_config, a file of at "
            "least 32 random bytes that all engines have and only their user can read."
        )
    if not own.is_loopback and extra.secret_file is None:
        raise ConfigError(
            f"kv_ip={config.kv_ip!r} is open to other machines: give secret_file in kv_connector_extra_config, a file of at least 32 random "
            "bytes that all engines have and only their user can read."
        )
    return ExchangeConfig(
        lends=config.kv_role != "kv_consumer", pulls=config.kv_role != "kv_producer",
        tp_size=args.tensor_parallel_size,
        engine_id=config.engine_id or "", host=config.kv_ip, port=config.kv_port, peers=peers,
        secret_file=extra.secret_file, seconds=extra.kv_lease_duration, num_threads=extra.num_threads, nixl=nixl,
        fails=config.kv_load_failure_policy == "fail",
    )  # fmt: skip


def check_host_memory(asked: KVTransfer, args: EngineArgs, available: int) -> None:
    """Raise CapacityError if the machine hasn't so much host memory for pages. `available`: for each rank."""
    room = max(available - _SPARE_BYTES // args.num_ranks, 0)
    if asked.host_bytes > room:
        raise CapacityError(
            f"kv_offloading_size or cpu_bytes_to_use asks for {human_bytes(asked.host_bytes * args.num_ranks)} of host memory for pages, and "
            f"{human_bytes(room * args.num_ranks)} can be had beside {human_bytes(_SPARE_BYTES)} for the rest of the machine; lower it to "
            f"{math.floor(room * args.num_ranks / 2**30 * 100) / 100:g} (GiB), or cpu_bytes_to_use to {room * args.num_ranks}."
        )
