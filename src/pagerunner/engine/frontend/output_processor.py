"""Engine updates to request outputs: text, stop strings, log-probabilities, and the n sequences of a request as one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pagerunner.engine.frontend.drafts import DraftLog
from pagerunner.errors import InvalidRequestError
from pagerunner.text.detokenizer import Detokenizer, TokenTable
from pagerunner.text.stop_strings import StopFinder
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import (
    CompletionOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    OutputKind,
    RequestMetrics,
    RequestOutput,
    RequestUpdate,
    TokenLogprobs,
)
from pagerunner.types.kv_transfer import KVTransferParams


class OutputProcessor:
    """Turns updates of engine sequences into outputs of requests.

    Without a tokenizer, outputs hold token ids only. `new_draft_log`: what makes a log of a request's drafts, where answers tell of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float] = time.monotonic,
        new_draft_log: Callable[[], DraftLog] | None = None,
    ) -> None:
        self._table = None if tokenizer is None else TokenTable(tokenizer)
        self._clock = clock
        self._new_draft_log = new_draft_log
        self._requests: dict[str, ClientRequest] = {}
        self._sequences: dict[str, _SequenceOutput] = {}

    def add(
        self, request_id: str, prompt: str | None, requests: list[EngineRequest], kind: OutputKind | None = None
    ) -> ClientRequest:
        """Expect updates of `requests`, the sequences of one client request, in the order of their outputs.

        Outputs are of the given kind, or else of the kind that the request asks for.

        Raises:
            InvalidRequestError: the id is in use.
        """
        if request_id in self._requests:
            raise InvalidRequestError(f"A request with the id {request_id!r} is running.", param="request_id")
        first = requests[0]
        kind = kind or first.params.output_kind
        request = ClientRequest(request_id, prompt, first.prompt_token_ids, first.arrival_time, kind, self._table)
        request.sequences = [_SequenceOutput(request, index, each) for index, each in enumerate(requests)]
        request.unfinished = len(requests)
        if self._new_draft_log is not None and len(requests) == 1:
            request.drafts = self._new_draft_log()
        self._requests[request_id] = request
        self._sequences |= {sequence.sequence_id: sequence for sequence in request.sequences}
        return request

    def process(self, updates: list[RequestUpdate]) -> tuple[list[RequestOutput], list[str]]:
        """As `take`, with the outputs of the requests that have new ones."""
        changed, to_abort = self.take(updates)
        return [request.output() for request in changed], to_abort

    def take(self, updates: list[RequestUpdate]) -> tuple[list[ClientRequest], list[str]]:
        """The requests that have something new to show; and the ids of sequences to abort, because a stop string has
        ended them.

        Updates of unknown or ended sequences come late and are dropped."""
        now = self._clock()
        changed: dict[str, ClientRequest] = {}
        to_abort: list[str] = []
        for update in updates:
            sequence = self._sequences.get(update.request_id)
            if sequence is None:
                continue
            request = sequence.request
            request.absorb(sequence, update, now)
            if sequence.take(update):
                to_abort.append(update.request_id)
            if sequence.finish_reason is not None:
                del self._sequences[update.request_id]
                request.unfinished -= 1
            if request.unfinished == 0 or request.kind != "final_only":
                changed[request.request_id] = request
            if request.unfinished == 0:
                request.finished_time = now
                del self._requests[request.request_id]
        return list(changed.values()), to_abort

    def abort(self, request_id: str) -> list[str]:
        """Forget a request; returns the ids of its unfinished sequences, for the engine to abort. Unknown: none."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        ids = [s.sequence_id for s in request.sequences if s.finish_reason is None]
        for sequence_id in ids:
            self._sequences.pop(sequence_id, None)
        return ids

    def unfinished(self, request_id: str) -> list[tuple[EngineRequest, list[int]]]:
        """The request's sequences that have not ended, each with its output tokens so far. Unknown: none."""
        request = self._requests.get(request_id)
        sequences = [] if request is None else request.sequences
        return [(one.engine_request, one.token_ids) for one in sequences if one.finish_reason is None]

    def sequences(self, request_id: str) -> list[str]:
        """The ids of all the request's sequences. Unknown: none."""
        request = self._requests.get(request_id)
        return [] if request is None else [one.sequence_id for one in request.sequences]

    def request_of(self, sequence_id: str) -> str | None:
        """The id of the client request that an unfinished sequence belongs to. Unknown: None."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else sequence.request.request_id

    @property
    def request_ids(self) -> list[str]:
        """Client requests that have not ended."""
        return list(self._requests)


@dataclass(slots=True, eq=False)
class ClientRequest:
    """A client's request: its sequences and what they share."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    arrival_time: float
    kind: OutputKind
    table: TokenTable | None
    sequences: list[_SequenceOutput] = field(default_factory=list)
    unfinished: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    pooled: list[float] | None = None
    kv_transfer_params: KVTransferParams | None = None
    drafts: DraftLog | None = None

    def absorb(self, sequence: _SequenceOutput, update: RequestUpdate, now: float) -> None:
        """Take what an update says about the request as a whole."""
        if self.first_token_time is None and update.new_token_ids:
            self.first_token_time = now
        if self.error is None:
            self.error = update.error
        if update.pooled is not None:
            self.pooled = update.pooled
        if update.drafted is not None and self.drafts is not None:
            self.drafts.steps.append(update.drafted)
        if update.kv_transfer_params is not None:
            self.kv_transfer_params = update.kv_transfer_params
        if sequence.index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
            if update.prompt_logprobs is not None:
                if self.prompt_logprobs is None:
                    self.prompt_logprobs = [None]  # nothing comes before the first token
                known = (entry for entry in update.prompt_logprobs if entry is not None)
                self.prompt_logprobs += [_logprob_dict(entry, self.table) for entry in known]

    def output(self) -> RequestOutput:
        """The request as its output kind shows it now. Deltas hold what is new since the last call."""
        if self.kind == "delta":
            outputs = [s.delta() for s in self.sequences if s.changed]
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        else:
            outputs = [s.cumulative() for s in self.sequences]
            prompt_logprobs = self.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.unfinished == 0,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finished_time=self.finished_time,
                speculative_decoding=None if self.drafts is None or self.unfinished else self.drafts.metrics(),
            ),
            error=self.error,
            pooled=self.pooled,
            kv_transfer_params=self.kv_transfer_params,
        )


@dataclass(slots=True, eq=False)
class _SequenceOutput:
    """One sequence: its tokens, its text as far as it may be shown, and how it ended."""

    request: ClientRequest
    index: int
    engine_request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    text_at_end: bool = False
    detokenizer: Detokenizer | None = None
    finder: StopFinder | None = None
    changed: bool = False
    sent_tokens: int = 0
    sent_chars: int = 0

    def __post_init__(self) -> None:
        params, table = self.engine_request.params, self.request.table
        if params.logprobs is not None:
            self.logprobs, self.cumulative_logprob = [], 0.0
        if params.stop:
            self.finder = StopFinder(tuple(params.stop), params.include_stop_str_in_output)
        if params.detokenize and table is not None:
            # If no reader sees the text before its end, and no stop string is looked for, the text is decoded once.
            self.text_at_end = self.request.kind == "final_only" and not params.stop
            self.detokenizer = None if self.text_at_end else Detokenizer(table, params.skip_special_tokens)

    @property
    def sequence_id(self) -> str:
        return self.engine_request.request_id

    def take(self, update: RequestUpdate) -> bool:
        """Add an update. Returns whether a stop string ended the sequence while the engine still runs it."""
        self.changed = True
        tokens = update.new_token_ids
        # The text of an eos or stop token is no part of the answer.
        by_token = (
            update.finish_reason == "stop"
            and bool(tokens)
            and not self.engine_request.params.include_stop_str_in_output
        )
        stop, used = None, len(tokens)
        if self.detokenizer is not None:
            stop, used = self._extend_text(self.detokenizer, tokens, len(tokens) - by_token)
        self.token_ids += tokens if stop is None else tokens[:used]
        if self.logprobs is not None and update.logprobs is not None:
            self._extend_logprobs(update.logprobs[:used])
        if stop is None and update.finish_reason is not None:
            self.stop_reason = update.stop_reason
            stop = self._finish_text(by_token)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            return update.finish_reason is None
        self.finish_reason = update.finish_reason
        return False

    def cumulative(self) -> CompletionOutput:
        """Everything so far."""
        return self._output(0, 0)

    def delta(self) -> CompletionOutput:
        """What came since the last call."""
        output = self._output(self.sent_tokens, self.sent_chars)
        self.sent_tokens, self.sent_chars, self.changed = len(self.token_ids), len(self.text), False
        return output

    def _output(self, tokens_from: int, chars_from: int) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text[chars_from:],
            token_ids=self.token_ids[tokens_from:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[tokens_from:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _extend_text(self, detokenizer: Detokenizer, tokens: list[int], num_shown: int) -> tuple[str | None, int]:
        """Add the first `num_shown` tokens' text. Returns the stop string met, and how many tokens there are then."""
        for place in range(num_shown):
            piece = detokenizer.push(tokens[place])
            if self.finder is not None and piece:
                armed = len(self.token_ids) + place + 1 > self.engine_request.params.min_tokens
                piece, stop = self.finder.feed(piece, armed)
                if stop is not None:
                    self.text += piece
                    return stop, place + 1
            self.text += piece
        return None, len(tokens)

    def _finish_text(self, by_token: bool) -> str | None:
        """Add what was held back. Returns a stop string that this completed."""
        if self.text_at_end and self.request.table is not None:
            shown = self.token_ids[:-1] if by_token else self.token_ids
            self.text = self.request.table.decoder.decode(shown, self.engine_request.params.skip_special_tokens)
        if self.detokenizer is None:
            return None
        piece = self.detokenizer.flush()
        if self.finder is None:
            self.text += piece
            return None
        piece, stop = self.finder.feed(piece, len(self.token_ids) > self.engine_request.params.min_tokens)
        self.text += piece
        if stop is None:
            self.text += self.finder.flush()
        return stop

    def _extend_logprobs(self, entries: list[TokenLogprobs]) -> None:
        logprobs, total = self.logprobs or [], self.cumulative_logprob or 0.0
        for entry in entries:
            logprobs.append(_logprob_dict(entry, self.request.table))
            total += entry.logprob
        self.logprobs, self.cumulative_logprob = logprobs, total


def _logprob_dict(entry: TokenLogprobs, table: TokenTable | None) -> dict[int, Logprob]:
    """The chosen token first, then the alternatives, best first."""
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, _own_text(entry.token_id, table))}
    for place, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True)):
        if token not in found:
            found[token] = Logprob(logprob, place + 1, _own_text(token, table))
    return found


def _own_text(token: int, table: TokenTable | None) -> str | None:
    return None if table is None else table.text(token)
