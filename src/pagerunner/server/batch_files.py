"""OpenAI batch files: lines of requests in, lines of answers out, by any server with an OpenAI API.

An answer is appended in one write as soon as it is there. So a run that was ended in any way can be started again: a line whose
custom_id has an answer is not asked again.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import msgspec

from pagerunner.errors import ConfigError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
_UNAVAILABLE = 503
_TOO_MANY = 429
_MOST_TRIES = 20
_LONGEST_PAUSE = 30.0
_CONNECT_RETRIES = 3


class BatchRequest(msgspec.Struct):
    """One line of the input; `fault` says why it can't be sent. A line without a custom_id goes by its number: "line-3", or
    "line-3'" where another line has that name."""

    custom_id: str
    url: str = ""
    body: msgspec.Raw = msgspec.Raw()
    method: str = "POST"
    fault: str = ""


class _Named(msgspec.Struct):
    custom_id: str


class _Streams(msgspec.Struct):
    stream: Any = None


class _Answered(msgspec.Struct):
    custom_id: str
    response: Any
    error: Any = None


class BatchEndedError(ConfigError):
    """The server is gone or is being stopped, or the disk is full.

    Answers so far are in the file. The other requests can be asked again."""


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The input's lines. Raises ConfigError when the file can't be read or names a custom_id twice."""
    decoder = msgspec.json.Decoder(BatchRequest)
    seen: set[str] = set()
    given: frozenset[str] | None = None
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # which editors on Windows write
                if not line.strip():
                    continue
                try:
                    request = decoder.decode(line)
                    if not bytes(request.body):
                        request.fault = "the line has no body"
                    if _streams(request.body):
                        request.fault = "a batch has whole answers, which can't be streamed; leave stream out"
                    if request.method != "POST" or request.url not in ENDPOINTS:  # no other spelling of a path
                        asked = f"{request.method[:10]} {request.url[:100]}"
                        request.fault = f"only POST to one of {', '.join(ENDPOINTS)} is answered, not {asked}"
                except msgspec.MsgspecError as error:
                    name = _name_in(line)
                    if name is None:
                        given = _names_in(path) if given is None else given
                        name = f"line-{number}"
                        while name in given:
                            name += "'"
                    request = BatchRequest(name, fault=str(error))
                if request.custom_id in seen:
                    raise ConfigError(f"{path}, line {number}: the custom_id {request.custom_id!r} is there twice.")
                seen.add(request.custom_id)
                yield request
    except OSError as error:
        raise ConfigError(f"The batch file {path} can't be read: {error}.") from error


def _name_in(line: bytes) -> str | None:
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except msgspec.MsgspecError:
        return None


def _names_in(path: Path) -> frozenset[str]:
    with path.open("rb") as lines:
        return frozenset(name for name in map(_name_in, lines) if name is not None)


def _streams(body: msgspec.Raw) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Streams).stream)
    except msgspec.MsgspecError:  # the server says what is wrong with it
        return False


class AnswerStream:
    """Standard output instead of a file: answers are written as they come, and nothing is known of earlier runs."""

    def __init__(self, target: BinaryIO) -> None:
        self.answered: set[str] = set()
        self.num_errors = 0
        self._target = target

    def append(self, answer: Mapping[str, Any]) -> None:
        """Write one answer. Raises BatchEndedError when nobody reads any more."""
        try:
            self._target.write(msgspec.json.encode(answer) + b"\n")
            self._target.flush()
        except OSError as error:
            raise BatchEndedError(f"An answer can't be written: {error}.") from error
        self.answered.add(answer["custom_id"])
        self.num_errors += answer["error"] is not None

    def close(self) -> None:
        """Nothing is left to write."""


def check_files(source: Path, target: Path | None = None) -> None:
    """Raise ConfigError unless the input is a file that can be read twice, and the output another one, or none yet."""
    for path, flag, instead in ((source, "-i", ""), (target, "-o", ", or - for standard output")):
        if path is not None and path.exists() and not path.is_file():
            raise ConfigError(f"{flag} {path} is no regular file; name one{instead}.")
    if target is not None and source.exists() and target.exists() and os.path.samefile(source, target):
        raise ConfigError(f"-i and -o name the same file, {source}; the answers need one of their own.")


_ID = "batch_req_"
_START = f'{{"id":"{_ID}'.encode()


class AnswerFile:
    """The output file: knows which requests are answered, and appends. A last line that was cut off is removed when the
    file is opened.

    With `retry_errors` answers that are errors are taken out, to be asked again. Raises ConfigError when the file can't be
    used, or another run is using it.
    """

    def __init__(self, path: Path, *, retry_errors: bool = False) -> None:
        self.answered: set[str] = set()
        self.num_errors = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"The answers can't be written to {path}: {error}.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = self._read(path)
            os.ftruncate(self._file, end)
            if retry_errors and self.num_errors:
                self._drop_errors(path)
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, BlockingIOError):
                raise ConfigError(f"Another run is writing to {path}.") from error
            raise

    def append(self, answer: Mapping[str, Any]) -> None:
        """Write one answer, whole or not at all. Raises BatchEndedError when it can't be written."""
        line = msgspec.json.encode(answer) + b"\n"
        before = os.fstat(self._file).st_size
        try:
            whole = os.write(self._file, line) == len(line)
        except OSError as error:
            raise BatchEndedError(f"An answer can't be written: {error}.") from error
        if not whole:
            os.ftruncate(self._file, before)
            raise BatchEndedError("The disk is full.")
        self.answered.add(answer["custom_id"])
        self.num_errors += answer["error"] is not None

    def close(self) -> None:
        """Make sure that it is on the disk."""
        os.fsync(self._file)
        os.close(self._file)

    def _read(self, path: Path) -> int:
        end = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    if line.startswith(_START[: len(line)]):
                        break
                    raise ConfigError(f"{path}, line {number}, is no answer (it has no end); name another file.")
                try:
                    entry = msgspec.json.decode(line, type=_Answered)
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{path}, line {number}, is no answer ({error}); name another file.") from error
                self.answered.add(entry.custom_id)
                self.num_errors += entry.error is not None
                end += len(line)
        return end

    def _drop_errors(self, path: Path) -> None:
        """Replace the file, in one operation, by a file without errors. A link stays one."""
        path = path.resolve()
        kept = path.with_name(f"{path.name}.kept")
        with path.open("rb") as lines, kept.open("wb") as target:
            for line in lines:
                entry = msgspec.json.decode(line, type=_Answered)
                if entry.error is None:
                    target.write(line)
                else:
                    self.answered.remove(entry.custom_id)
        new = os.open(kept, os.O_RDWR | os.O_APPEND)
        fcntl.flock(new, fcntl.LOCK_EX)
        os.replace(kept, path)
        os.close(self._file)
        self._file, self.num_errors = new, 0


async def answer_all(
    base_url: str,
    headers: Mapping[str, str],
    requests: Iterable[BatchRequest],
    append: Callable[[Mapping[str, Any]], None],
    *,
    max_concurrency: int,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Ask the server for every request's answer, `max_concurrency` at a time, and append them as they come.

    Raises BatchEndedError when the server is gone; and when `stopping` is set, after the running requests have been answered.
    """
    todo = iter(requests)
    limits = httpx.Limits(max_connections=max_concurrency, max_keepalive_connections=max_concurrency)
    transport = httpx.AsyncHTTPTransport(retries=_CONNECT_RETRIES, limits=limits)
    async with httpx.AsyncClient(base_url=base_url, headers=dict(headers), transport=transport, timeout=None) as client:
        faults: list[Exception] = []

        async def work() -> None:
            for request in todo:
                try:
                    if stopping():
                        raise BatchEndedError("The run was stopped.")
                    append(await _answer(client, request))
                except Exception as error:
                    faults.append(error)
                if faults:  # the first failure of any worker; every worker finishes its request
                    return

        await asyncio.gather(*(work() for _ in range(max_concurrency)))
    if faults:
        raise faults[0]


async def _answer(client: httpx.AsyncClient, request: BatchRequest) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": f"{_ID}{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": None}
    if request.fault:
        return {**answer, "error": {"code": "invalid_line", "message": request.fault}}
    response = await _post(client, request)
    try:
        body = response.json()
    except ValueError:  # something that isn't our kind of server
        if response.status_code == httpx.codes.OK:  # which would say that there is an answer
            return {**answer, "error": {"code": "invalid_answer", "message": "The server's answer is not JSON."}}
        body = {"error": {"message": "The server's answer is not JSON.", "code": response.status_code}}
    if response.status_code == _UNAVAILABLE:
        raise BatchEndedError(f"The server answers no more: {response.text[:300]}")
    failed = None
    if isinstance(body, dict):
        failed = body.get("error")  # of /v1/responses null in a good answer
        if failed is None and response.status_code != httpx.codes.OK:
            failed = {"message": str(body), "code": response.status_code}
    identity = body.get("id") if isinstance(body, dict) else None
    found = {"status_code": response.status_code, "request_id": identity or answer["id"], "body": body}
    return {**answer, "response": found, "error": failed}


async def _post(client: httpx.AsyncClient, request: BatchRequest) -> httpx.Response:
    """The server's answer; while its queue is full, it is asked again."""
    for tries in range(1, _MOST_TRIES + 1):
        try:
            content = bytes(request.body)
            response = await client.post(request.url, content=content, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            raise BatchEndedError(f"The server is gone ({error or type(error).__name__}).") from error
        pause = response.headers.get("Retry-After", "")
        if response.status_code != _TOO_MANY or not pause.isdecimal() or tries == _MOST_TRIES:
            break
        await asyncio.sleep(min(float(pause), _LONGEST_PAUSE))
    return response
