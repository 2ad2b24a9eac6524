"""What a proxy is told."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pagerunner.errors import ConfigError

POLICIES = ("cache_aware", "round_robin")


class ProxyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The servers, and times in seconds. Names are those of vllm-router's flags.

    Raises:
        ConfigError: the servers don't go together, or a value is out of range.
    """

    worker_urls: Sequence[str] = ()
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    vllm_pd_disaggregation: bool = False
    policy: str = "cache_aware"
    request_timeout_secs: float = 21_600.0
    prefill_timeout_secs: float = 120.0
    prefill_min_tokens: int = 64
    health_check_interval_secs: float = 2.0
    health_check_timeout_secs: float = 5.0
    health_failure_threshold: int = 3
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        if bool(self.worker_urls) == bool(self.decode or self.prefill):
            raise ConfigError("Give either --worker-urls, or --prefill and --decode; see `pagerunner proxy --help`.")
        if bool(self.prefill) != bool(self.decode):
            missing = "--decode" if self.prefill else "--prefill"
            raise ConfigError(f"--prefill and --decode go together; {missing} is missing.")
        if self.vllm_pd_disaggregation and not self.prefill:
            raise ConfigError("--vllm-pd-disaggregation needs --prefill and --decode.")
        if ports := [url for url in self.prefill if url.isdecimal() or url == "none"]:
            raise ConfigError(
                f"--prefill takes URLs alone, got {ports[0]!r}. A bootstrap port is for the Mooncake connector, which isn't here."
            )
        for urls in (self.worker_urls, self.prefill, self.decode):
            if twice := [url for url in urls if list(urls).count(url) > 1]:
                raise ConfigError(f"The server {twice[0]} is named twice.")
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy must be one of {', '.join(POLICIES)}, got {self.policy!r}.")
        for name in self.__struct_fields__[5:]:
            value = getattr(self, name)
            if not 0 < value < math.inf and (name, value) != ("prefill_min_tokens", 0):
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value}.")
