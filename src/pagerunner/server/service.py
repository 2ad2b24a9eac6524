"""What the endpoints share: the engine, the model's names, and how a call is run and answered."""

from __future__ import annotations

import abc
import copy
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from itertools import islice
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.engine.frontend.input_processor import Truncation, check_queueable
from pagerunner.errors import InvalidRequestError, PagerunnerError
from pagerunner.server.chat.options import ChatOptions
from pagerunner.server.errors import HttpError, error_body, short
from pagerunner.server.fanout import Indexed, TokenCounter, merged
from pagerunner.server.http import EventStream, LastEvents
from pagerunner.server.protocol.answers import Usage
from pagerunner.server.protocol.requests import StreamOptions
from pagerunner.types import Pooling, RequestOutput, SamplingParams
from pagerunner.types.kv_transfer import KVTransferParams
from pagerunner.types.lora import LoRARequest

logger = logging.getLogger(__name__)

LABEL_HEADER = "X-Request-Id"
RANK_HEADER = "X-data-parallel-rank"
_MAX_ID_CHARS = 256
_FORMAT = "structured_outputs"
_ADAPTER = {"lora_request": "model"}  # a client names an adapter as its model
_SHOWN_ADAPTERS = 8
_encode = msgspec.json.Encoder().encode


class Call(msgspec.Struct, frozen=True):
    """One call's identity in its answer: an id, seconds since 1970, the model as the client named it.

    `rank` is the engine that the client wants, of several. `engine_id` is fresh. `id` may be the client's own name for its call, and two clients may choose the same name.
    """

    id: str
    created: int
    model: str
    engine_id: str
    rank: int | None = None


class Queued(Protocol):
    """What a body may say about how its call is queued."""

    @property
    def priority(self) -> int | None:
        """Lower runs first."""

    @property
    def cache_salt(self) -> str | None:
        """Only calls with the same salt share cached pages."""


class Service:
    """The engine under its served names. The first name is the one that answers carry by default."""

    def __init__(
        self, engine: AsyncEngine, model_names: Sequence[str], model_root: str, chat: ChatOptions | None = None
    ) -> None:
        self.engine = engine
        self.chat = chat if chat is not None else ChatOptions()
        self.model_names = tuple(model_names)
        self.model_root = model_root
        self.created = int(time.time())

    def begin(self, prefix: str, model: str | None, http: Request, request_id: str | None = None) -> Call:
        """A new call, which the client may have named in the header X-Request-Id or in its body.

        Raises:
            HttpError: 404 for a model that isn't served here, 400 for a name that is too long.
        """
        self.check_model(model)
        fresh = uuid.uuid4().hex
        name = http.headers.get(LABEL_HEADER) or request_id or fresh
        if len(name) > _MAX_ID_CHARS:
            raise HttpError(400, f"{LABEL_HEADER} has {len(name)} characters; at most {_MAX_ID_CHARS} are allowed.")
        model = model or self.model_names[0]
        return Call(f"{prefix}-{name}", int(time.time()), model, f"{prefix}-{fresh}", self._rank(http))

    def _rank(self, http: Request) -> int | None:
        """The engine that a client asks for in vLLM's header. Raises HttpError 400 where there is no such engine."""
        given, count = http.headers.getlist(RANK_HEADER), len(self.engine.places)
        if not given:
            return None
        if len(given) > 1 or not given[0].isdecimal() or len(given[0]) > 9:
            said = short(", ".join(given))
            raise HttpError(400, f"{RANK_HEADER} must be the number of an engine, got {said!r}.", RANK_HEADER)
        if (rank := int(given[0])) >= count:
            reason = f"as data_parallel_size is {count}; got {rank}"
            raise HttpError(400, f"{RANK_HEADER} must be in [0, {count}), {reason}.", RANK_HEADER)
        return rank

    def engine_number(self, http: Request) -> int:
        """The engine that the query names, 0 if it names none. Raises HttpError 400 where there is no such engine."""
        given, count = http.query_params.get("engine", "0"), len(self.engine.places)
        if not given.isdecimal() or len(given) > 9 or int(given) >= count:
            raise HttpError(400, f"engine must be in [0, {count}), got {short(given)!r}.", "engine")
        return int(given)

    def check_model(self, model: str | None) -> None:
        """Raise HttpError 404 for a model that isn't served here."""
        if model and model not in self.model_names and self.engine.adapters.get(model) is None:
            there = [*self.model_names, *islice(self.engine.adapters.infos, _SHOWN_ADAPTERS)]
            raise HttpError(404, f"The model {short(model)!r} does not exist; there is {', '.join(there)}.", "model")

    async def prompt(
        self, given: str | list[int], add_special_tokens: bool | None, kept: Truncation | None
    ) -> dict[str, Any]:
        """A text or token ids as the engine takes them, or what `kept` leaves of their tokens."""
        special = add_special_tokens is not False
        if not isinstance(given, str):
            return {"prompt_token_ids": given if kept is None else kept.of(given)}
        if kept is None and special:
            return {"prompt": given}
        return {"prompt_token_ids": await self.engine.encode(given, add_special_tokens=special, truncation=kept)}

    def run(
        self,
        call: Call,
        prompts: Sequence[dict[str, Any]],
        params: SamplingParams,
        request: Queued,
        pooling: Pooling | None = None,
        names: Mapping[str, str] | None = None,
        kv_transfer: KVTransferParams | None = None,
    ) -> AsyncGenerator[Indexed, None]:
        """Start when iterated, and read every prompt's outputs as one stream.

        `names` are the client's own fields, for `blaming`. `kv_transfer` goes with a single prompt.

        Raises:
            InvalidRequestError: the call is larger than the engine's queue: it would be refused whenever it comes.
        """
        names = names if names is not None else {}
        if kv_transfer and len(prompts) > 1:
            raise InvalidRequestError(
                f"kv_transfer_params goes with one prompt, and the call has {len(prompts)}.", "kv_transfer_params"
            )
        with blaming(names):  # texts are counted when they have been tokenised
            check_queueable(params.n, len(prompts), sum(len(one.get("prompt_token_ids", "")) for one in prompts))
        outputs = merged(
            [
                self.engine.generate(
                    prompt,
                    params,
                    call.engine_id if len(prompts) == 1 else f"{call.engine_id}-{index}",
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt or "",
                    pooling=pooling,
                    data_parallel_rank=call.rank,
                    kv_transfer=kv_transfer,
                    lora_request=None if call.model in self.model_names else LoRARequest(call.model),
                )
                for index, prompt in enumerate(prompts)
            ]
        )
        return self._blaming(call.model, names, outputs)

    async def _blaming(
        self, model: str, names: Mapping[str, str], outputs: AsyncGenerator[Indexed, None]
    ) -> AsyncGenerator[Indexed, None]:
        try:
            with blaming(names):
                async with aclosing(outputs):
                    async for one in outputs:
                        yield one
        except InvalidRequestError as error:
            if error.param == _ADAPTER["lora_request"]:
                self.check_model(model)  # it may have been unloaded since the call was let in
            raise


class Endpoint:
    """Handlers of routes, over the service that they share."""

    def __init__(self, service: Service) -> None:
        self._service = service


@contextmanager
def blaming(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors name the client's own field, `names[field]`, for a `field` of the engine.

    The engine's fields are those of SamplingParams, "prompt" and "lora_request". A name that the client and the engine share needs no entry.
    """
    try:
        yield
    except InvalidRequestError as error:
        name = (_ADAPTER | dict(names)).get(error.param or "")
        if name is None:
            raise
        blamed = copy.copy(error)  # other calls may wait for the same error
        blamed.param = name
        if error.param == _FORMAT:  # its sentences begin with the field
            blamed.args = (str(error).replace(_FORMAT, name, 1),)
        raise blamed from error


def json_response(body: Any) -> Response:
    """A 200 with this struct as JSON."""
    return Response(_encode(body), media_type="application/json")


def sse(chunk: Any) -> bytes:
    """One server-sent event that carries this struct."""
    return b"data: " + _encode(chunk) + b"\n\n"


class StreamWriter(abc.ABC):
    """Turns the outputs of one call into the events of its stream.

    Unless a subclass says otherwise, these are OpenAI's: data lines that end with [DONE]."""

    end = b"data: [DONE]\n\n"

    def encode(self, chunk: Any) -> bytes:
        """A chunk as a server-sent event."""
        return sse(chunk)

    def first(self, output: RequestOutput) -> Iterable[Any]:
        """The chunks before everything, when there is a first output."""
        return ()

    @abc.abstractmethod
    def chunks(self, index: int, output: RequestOutput) -> Iterable[Any]:
        """The chunks for one output of prompt `index`; none while text is held back because it may become a stop string,
        half a character, or a call's markup."""

    @abc.abstractmethod
    def last(self) -> Iterable[Any]:
        """The chunks after everything has been generated."""

    def failed(self, error: Exception) -> Any:
        """The chunk of a call that failed on the way."""
        return error_body(error)


async def collected(outputs: AsyncGenerator[Indexed, None]) -> list[RequestOutput]:
    """Every prompt's final output, in order."""
    last: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            last[index] = output
    return [last[index] for index in sorted(last)]


async def streamed(outputs: AsyncGenerator[Indexed, None], writer: StreamWriter, prompts: int = 1) -> Response:
    """The call as server-sent events.

    Waits for the first output, so that a call that is refused gets an HTTP status.
    """
    try:
        first = await anext(outputs)
    except BaseException:
        await outputs.aclose()
        raise
    return EventStream(_events(first, outputs, writer, prompts), outputs.aclose, begun=True)


async def _events(
    first: Indexed, outputs: AsyncGenerator[Indexed, None], writer: StreamWriter, prompts: int
) -> AsyncGenerator[bytes, None]:
    """What each output gives, as one piece of bytes; the last one with all that ends the stream."""
    encode, data = writer.encode, b""
    try:
        for chunk in writer.first(first[1]):
            data += encode(chunk)
        for chunk in writer.chunks(*first):
            data += encode(chunk)
        if prompts := prompts - first[1].finished:
            told, data = data, b""
            yield told
        async for index, output in outputs:
            for chunk in writer.chunks(index, output):
                data += encode(chunk)
            prompts -= output.finished
            if data and prompts:
                told, data = data, b""
                yield told
        for chunk in writer.last():
            data += encode(chunk)
    except Exception as error:  # the headers are sent, so the error can only go into the stream
        if not isinstance(error, PagerunnerError | HttpError):
            logger.exception("A stream failed.")
        data += encode(writer.failed(error))
    yield LastEvents(data + writer.end)


class UsageReporter(TokenCounter):
    """Decides what a stream's chunks and its end say about token counts."""

    def __init__(self, options: StreamOptions) -> None:
        super().__init__()
        self.include = bool(options.include_usage)
        self.every_chunk = self.include and bool(options.continuous_usage_stats)
        """Whether a chunk without text still tells something."""

    def in_chunk(self) -> Usage | UnsetType | None:
        """The `usage` field of an ordinary chunk: the counts so far, null, or no such field."""
        if self.every_chunk:
            return self.usage()
        return None if self.include else UNSET
