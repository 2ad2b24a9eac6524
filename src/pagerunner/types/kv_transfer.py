"""What a request says about pages of other engines (`kv_transfer_params`), under vLLM's names."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pagerunner.types.checks import require

_Text = Annotated[str, Meta(max_length=256)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class KVTransferParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """With `do_remote_decode` the prompt's pages are lent, and the answer says where. With `do_remote_prefill` that answer comes to the engine
    that decodes. `remote_lease` and `remote_boot_id` are ours: the loan's token and the lender's boot id, 32 hexadecimal digits each.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: _Text | None = None
    remote_request_id: _Text | None = None
    remote_host: _Text | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    remote_block_ids: list[_Count | list[_Count]] | None = None
    remote_num_tokens: _Count | None = None
    remote_blocks_expiry_time: float | None = None
    tp_size: _Count | None = None
    remote_lease: _Text | None = None
    remote_boot_id: _Text | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequestError for what contradicts itself, or lacks what a pull needs."""
        name = "kv_transfer_params"
        require(
            not (self.do_remote_decode and self.do_remote_prefill),
            name,
            "asks for do_remote_decode and do_remote_prefill; one request can't have both.",
        )
        if self.do_remote_prefill:
            for field, value in (("remote_host", self.remote_host), ("remote_port", self.remote_port)):
                require(value is not None, name, f"has do_remote_prefill, and lacks {field}.")
            for field, value in (("remote_lease", self.remote_lease), ("remote_boot_id", self.remote_boot_id)):
                require(_is_token(value), name, f"has do_remote_prefill, so {field} must be 32 hexadecimal digits.")

    def __bool__(self) -> bool:
        """Whether it asks for anything."""
        return self.do_remote_decode or self.do_remote_prefill


def _is_token(value: str | None) -> bool:
    return value is not None and len(value) == 32 and set(value) <= set("0123456789abcdef")
