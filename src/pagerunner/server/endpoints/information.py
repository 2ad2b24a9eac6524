"""The endpoints that run nothing: what is served, whether it lives, what it does, and where the page is."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pagerunner import __version__
from pagerunner.errors import EngineDeadError
from pagerunner.server.errors import error_response
from pagerunner.server.metrics import CONTENT_TYPE, Metrics
from pagerunner.server.protocol.answers import ModelCard, ModelList
from pagerunner.server.service import Service, json_response


class Information:
    """Handlers. `load` says how many calls of clients run."""

    def __init__(self, service: Service, metrics: Metrics, load: Callable[[], int]) -> None:
        self._service = service
        self._metrics = metrics
        self._load = load

    async def models(self, request: Request) -> Response:
        """The served names, and those of adapters."""
        names = [*self._service.model_names, *self._service.engine.adapters.infos]
        return json_response(ModelList(data=[self._card(name) for name in names]))

    async def model(self, request: Request) -> Response:
        """One served name, or an adapter's."""
        name = request.path_params["model"]
        self._service.check_model(name)
        return json_response(self._card(name))

    async def health(self, request: Request) -> Response:
        """200 while the engine is alive and makes progress, else 503 with the reason. Of several engines (data_parallel_size) one is
        enough, and the body names those that are lost."""
        engine = self._service.engine
        try:
            engine.check_health()
        except EngineDeadError as error:
            return error_response(error)
        return json_response({"lost": engine.lost}) if engine.lost else Response()

    async def version(self, request: Request) -> Response:
        """The version of pagerunner."""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        """How many calls the server is answering: `server_load`, for balancers."""
        return json_response({"server_load": self._load()})

    async def metrics(self, request: Request) -> Response:
        """Metrics in the Prometheus text format."""
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def memory(self, request: Request) -> Response:
        """The memory plan, and who holds which pages between two steps. `engine` is the number of one of several, 0 by default."""
        service = self._service
        number = service.engine_number(request)
        plan = service.engine.places[number][0].memory_plan
        return json_response({"plan": plan, "state": await service.engine.memory_state(number)})

    async def to_page(self, request: Request) -> Response:
        """Lead a browser to the page."""
        return RedirectResponse("/ui")

    def _card(self, name: str) -> ModelCard:
        service = self._service
        root, parent, adapter = service.model_root, None, service.engine.adapters.get(name)
        if adapter is not None:
            root, parent = adapter.path, adapter.base_model_name or service.model_names[0]
        length = service.engine.max_model_len
        return ModelCard(id=name, created=service.created, root=root, parent=parent, max_model_len=length)
