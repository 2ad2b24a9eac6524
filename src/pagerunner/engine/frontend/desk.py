"""Knows which reader gets which update: the core's sequences on one side, the readers of requests on the other."""

from __future__ import annotations

import logging

from pagerunner.engine.core import messages as wire
from pagerunner.engine.frontend.observer import EngineObserver
from pagerunner.engine.frontend.output_processor import OutputProcessor
from pagerunner.engine.frontend.progress import ProgressMeter
from pagerunner.engine.frontend.stream import OutputStream
from pagerunner.errors import EngineDeadError, InvalidRequestError, PagerunnerError, RequestFailedError
from pagerunner.types import EngineRequest, RequestUpdate

logger = logging.getLogger(__name__)


class OutputDesk:
    """Routes what the core says to the readers. Sends nothing itself: methods return the sequence ids to abort."""

    def __init__(self, outputs: OutputProcessor, observer: EngineObserver) -> None:
        self.stats = wire.SchedulerStats()
        self.progress = ProgressMeter(observer)
        self._outputs = outputs
        self._observer = observer
        self._streams: dict[str, OutputStream] = {}

    def add(self, request_id: str, text: str | None, requests: list[EngineRequest], arrival: float) -> OutputStream:
        """Expect outputs of a request that is about to be sent. Raises InvalidRequestError when its id is taken."""
        request = self._outputs.add(request_id, text, requests)
        stream = self._streams[request_id] = OutputStream(request.output)
        self.progress.started(requests, arrival)
        return stream

    def __contains__(self, request_id: str) -> bool:
        """Whether a reader waits for this request, which has not ended."""
        return request_id in self._streams

    def leave(self, request_id: str) -> list[str]:
        """The reader is gone. Returns what the core must still abort: nothing when the request has finished."""
        self._streams.pop(request_id, None)
        return [one for one in self._outputs.abort(request_id) if one in self.progress]

    def sequences(self, request_id: str) -> list[str]:
        """The unfinished request's sequence ids; none when it is unknown."""
        return self._outputs.sequences(request_id)

    def all_sequences(self) -> list[str]:
        """The sequence ids of all requests that have a reader."""
        return [sequence_id for request_id in self._streams for sequence_id in self.sequences(request_id)]

    def receive(self, message: wire.FromCore) -> list[str]:
        """Take a message from the core.

        Returns sequence ids to abort: ended by a stop string, or siblings of a failed sequence.
        """
        match message:
            case wire.Updates(updates, stats):
                if stats is not None:
                    self.stats = stats
                    self._observer.on_stats(stats)
                return self._route(updates)
            case wire.Refused(sequence_ids, error):
                self.progress.dropped(sequence_ids)
                self._fail(sequence_ids, error.exception())
        return []

    def fail_all(self, error: EngineDeadError) -> None:
        """The core is gone: every reader gets the reason."""
        for request_id in list(self._streams):
            self._streams[request_id].fail(EngineDeadError(str(error)))
            self.leave(request_id)
        self.progress.clear()

    def _route(self, updates: list[RequestUpdate]) -> list[str]:
        self.progress.advanced(updates)
        to_abort: list[str] = []
        live: list[RequestUpdate] = []
        for update in updates:
            if update.error is not None:
                message = f"The request failed: {update.error}"
                blamed = update.param is not None
                failure = InvalidRequestError(message, update.param) if blamed else RequestFailedError(message)
                to_abort += self._fail([update.request_id], failure)
            else:
                live.append(update)
        for update in live:
            to_abort += self._process(update)
        return to_abort

    def _process(self, update: RequestUpdate) -> list[str]:
        try:
            changed, stopped = self._outputs.take([update])
        except Exception as error:  # an error in one request's text must not end other requests
            logger.exception("The output of request %s cannot be processed.", update.request_id)
            failure = RequestFailedError(f"The request's output cannot be processed: {error!r}.")
            return [update.request_id, *self._fail([update.request_id], failure)]
        for sequence_id in stopped:
            self.progress.stopped(sequence_id)
        for request in changed:
            self._streams[request.request_id].advance()
            if request.unfinished == 0:
                del self._streams[request.request_id]
        return stopped

    def _fail(self, sequence_ids: list[str], error: PagerunnerError) -> list[str]:
        request_id = next(filter(None, map(self._outputs.request_of, sequence_ids)), None)
        if request_id is None:
            return []
        self._streams[request_id].fail(error)
        return [one for one in self.leave(request_id) if one not in sequence_ids]
