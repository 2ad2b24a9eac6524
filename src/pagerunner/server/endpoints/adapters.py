"""The endpoints that load and forget adapters while the server runs. Bodies and statuses are vLLM's."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pagerunner.errors import ConfigError, MissingAdapterError
from pagerunner.server.errors import HttpError, short
from pagerunner.server.http import read_as
from pagerunner.server.service import Service
from pagerunner.types.lora import LoRARequest


class LoadAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter. `lora_path` is a PEFT directory on the server's machine."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/unload_lora_adapter. `lora_int_id` is vLLM's, and says nothing here."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterControl:
    """Handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def load(self, request: Request) -> Response:
        """Read an adapter, which calls may then name as their `model`. With `load_inplace` a name that is there gets what the directory holds now;
        calls that run go on with what it was."""
        asked = await read_as(request, LoadAdapterRequest)
        if asked.lora_name in self._service.model_names:
            raise HttpError(400, f"lora_name {short(asked.lora_name)!r} is the model's own name.", "lora_name")
        number = self._service.engine.adapters.number(asked.lora_name)
        how = asked.base_model_name, asked.load_inplace, asked.is_3d_lora_weight
        adapter = LoRARequest(asked.lora_name, number, asked.lora_path, *how)
        try:
            await self._service.engine.adapters.load(adapter)
        except MissingAdapterError as error:
            raise HttpError(404, str(error), "lora_path") from error
        except ConfigError as error:
            raise HttpError(400, str(error), "lora_path") from error
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Forget an adapter's name. Calls that run with it go on."""
        asked = await read_as(request, UnloadAdapterRequest)
        if self._service.engine.adapters.get(asked.lora_name) is None:
            raise HttpError(404, f"There is no adapter {short(asked.lora_name)!r}.", "lora_name")
        await self._service.engine.adapters.unload(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")
