"""What a caller gets back: a request's sequences, their text and log-probabilities."""

from __future__ import annotations

import msgspec

from pagerunner.types.kv_transfer import KVTransferParams


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token, its rank in the vocabulary (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of a request's n generated sequences (or, with output_kind "delta", what was added to it)."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


class SpeculativeMetrics(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of the drafts of a request's only sequence, in vLLM's names. A histogram's place i has the steps of which i tokens were accepted.

    `num_spec_tokens` is the most that may be drafted in a step. The last two have each step with a draft, if they are asked for.
    """

    num_spec_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[int, list[int]]
    per_step_drafted: list[int] | None = None
    per_step_accepted: list[int] | None = None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Monotonic times in seconds; None where the request has not got that far.

    `speculative_decoding` comes with the end of a request of one sequence, if per_request_spec_decode_metrics asks for it.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    speculative_decoding: SpeculativeMetrics | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request's state as its caller sees it; fields are vLLM's, and `error` says why a sequence ended with "error".

    `pooled` is the vector of a pooling request, which has no text.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    pooled: list[float] | None = None
    kv_transfer_params: KVTransferParams | None = None
