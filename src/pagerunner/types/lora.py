"""Adapters as users name them, and as they cross between the frontend and the core."""

from __future__ import annotations

from pathlib import PurePath

import msgspec

from pagerunner.errors import ConfigError, InvalidRequestError
from pagerunner.types.checks import is_int, refuse, require, show

MAX_NAME_CHARS = 256
MAX_BASE_CHARS = 1024


class LoRARequest(msgspec.Struct, frozen=True, eq=False):
    """An adapter to generate with, under vLLM's names. Two are equal if their names are, as in vLLM.

    `lora_path` is a PEFT directory on the engine's machine. `lora_int_id` is vLLM's number of it, which nothing here depends on. With `load_inplace` the
    directory is read again, and what it holds then has the name from now on. `is_3d_lora_weight` is vLLM's word for tensors of all experts together. Tensors tell
    it, so it is needed nowhere; with it an adapter whose experts have tensors of their own is refused.

        >>> llm.generate("Hello", lora_request=LoRARequest("sql", 1, "/adapters/sql"))
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        check_name(self.lora_name)
        if not isinstance(path := self.lora_path, str | PurePath):
            refuse("lora_path", f"must be a text, got {show(path)}.")
        if path:  # in one spelling: /a/b/ is /a/b
            msgspec.structs.force_setattr(self, "lora_path", str(PurePath(path)))
        base = self.base_model_name
        if base is not None and not is_base_name(base):
            refuse(
                "base_model_name", f"must be a printable text of at most {MAX_BASE_CHARS} characters, got {show(base)}."
            )
        if not is_int(self.lora_int_id) or self.lora_int_id < 1:
            refuse("lora_int_id", f"must be a whole number of at least 1, got {show(self.lora_int_id)}.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


def check_name(name: object) -> None:
    """Raise InvalidRequestError for what can't be an adapter's name."""
    good = isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and "," not in name
    said = f"must be a text of 1 to {MAX_NAME_CHARS} printable characters without a comma, which divides names in metrics, got {show(name)}."
    require(good, "lora_name", said)


def is_base_name(name: object) -> bool:
    """Whether a base model may be called so in lists of models."""
    return isinstance(name, str) and len(name) <= MAX_BASE_CHARS and name.isprintable()


class _Module(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    path: str
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


def parse_module(text: str) -> LoRARequest:
    """An adapter as --lora-modules has it: `name=path`, or JSON such as {"name": "sql", "path": "/adapters/sql"}. Raises ConfigError."""
    if text.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(text, type=_Module)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f'--lora-modules: JSON such as {{"name": "sql", "path": "/adapters/sql"}} is wanted: {error}.'
            ) from None
    else:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--lora-modules must be name=path or JSON with name and path, got {show(text)}.")
        module = _Module(name, path)
    form = module.is_3d_lora_weight
    return LoRARequest(module.name, 1, module.path, module.base_model_name, is_3d_lora_weight=form)


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter that has been read: its name, where from, the digest of its content, its highest rank, what its user calls its base, its user's number of it, and the
    pages that it takes on the device.
    """

    name: str
    path: str
    digest: str
    rank: int
    base_model_name: str = ""
    lora_int_id: int = 1
    num_pages: int = 0

    def check(self, request: LoRARequest) -> None:
        """Raise InvalidRequestError for a request that means another directory by this name."""
        if request.lora_path and request.lora_path != self.path:
            raise InvalidRequestError(
                f"The adapter {show(self.name)} was loaded from {self.path}, and lora_path is {show(request.lora_path)}; "
                "load_inplace=True puts the other one in its place.",
                param="lora_request",
            )


class AdapterEnd(msgspec.Struct, frozen=True):
    """Work number `number` on adapters has ended: with the `digest` and `rank` of what was read, or with an `error`, which may be that the directory is `missing`.

    What was read takes `num_pages`, of several ranks on the one where it takes most. `separate`: experts have tensors of their own.
    """

    number: int
    digest: str = ""
    rank: int = 0
    error: str = ""
    num_pages: int = 0
    missing: bool = False
    separate: bool = False


class AdapterFill(msgspec.Struct, frozen=True):
    """Bring the adapter of this content, of which host memory has a copy, to a slot of the device. Its pages lie at `offsets` of the page memory, in bytes. The
    `missing` ones of them are to be copied; the others hold what they should.
    """

    number: int
    slot: int
    digest: str
    offsets: list[int]
    missing: list[int]


class AdapterMove(msgspec.Struct, frozen=True, array_like=True):
    """The pages of a slot's adapter lie at these offsets from this step on."""

    slot: int
    offsets: list[int]


class LoraStats(msgspec.Struct, frozen=True):
    """Adapters of requests that run and that wait, by name; how many may run at once, how many are registered, and how many are on the device whole.

    `num_bytes` are those of the page memory that hold adapters, and running requests use `used_bytes` of them. So far `hits_total` admissions found the adapter in pages or on
    its way; for others there were `fills_total`, with `fill_bytes_total`.
    """

    max_loras: int
    running: list[str]
    waiting: list[str]
    registered: int
    resident: int
    num_bytes: int
    used_bytes: int
    hits_total: int
    fills_total: int
    fill_bytes_total: int
