"""What the scheduler knows about one sequence between its arrival and its last token."""

from __future__ import annotations

from pagerunner.memory.grant import Grant
from pagerunner.memory.prefix import PrefixChain
from pagerunner.sched.guide import Guide
from pagerunner.sched.suffix import SuffixIndex
from pagerunner.types import EngineRequest, FinishReason, StepRow, TokenLogprobs
from pagerunner.types.lora import AdapterInfo


class Sequence:
    """One request's progress. Plain attributes: the scheduler is the only writer.

    `tokens` are prompt and output as far as the host knows them. Plans in flight have sampled or will sample `pending` more.
    Positions below `scheduled` are in a plan; with `drafts` of plans in flight only some of these become tokens, and `scheduled` is the most that
    there can be. The device has up to `drafts` guesses of what its next row computes. Positions below `refill` get their token from `tokens`; later positions get the
    token that the device sampled. `in_flight` counts the plans with a row of this sequence. A `blocked` sequence can't be
    scheduled: its `guide` doesn't know the next mask, which may depend on a token of a plan in flight. While it waits, `looked_up` says that
    no other memory need be asked for its pages, and `awaits_transfer` that pages are on their way. Of its `cached_tokens` those whose pages came
    from another memory are `external_tokens`. It has the content of its `adapter` to its end; see `sched/adapters.py`.
    """

    __slots__ = (
        "adapter", "adapter_slot", "admitted_time", "awaits_adapter", "awaits_transfer", "blocked", "cached_tokens", "chain", "drafts", "external_tokens", "fetched", "finished", "found", "grant", "guide", "host_drafts", "in_flight", "key", "looked_up",
        "max_total",
        "min_total", "parent_id", "passed", "pending",
        "preemptions", "prompt_len", "prompt_logprobs", "refill", "reported", "request", "request_id", "retry_budget",
        "retry_version", "sampled_in", "scheduled",
        "shares", "stop_ids", "text", "tokens", "wants_prompt_logprobs",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        chain: PrefixChain,
        *,
        shares: bool,
        max_model_len: int,
        arrival: int,
        adapter: AdapterInfo | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.chain = chain
        self.shares = shares
        self.adapter = adapter
        self.adapter_slot = -1
        self.awaits_adapter = False  # it was admitted, and its adapter's pages are being filled
        self.passed = 0  # how many went before it while it waited for a slot of adapters
        # of a request that has siblings
        self.parent_id = "" if request.is_alone or not shares else request.parent_id
        self.key = (request.priority, request.arrival_time, arrival)
        self.tokens = list(request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        self.max_total = min(self.prompt_len + request.max_tokens, max_model_len)
        self.min_total = self.prompt_len + params.min_tokens
        eos = () if params.ignore_eos else request.eos_token_ids
        self.stop_ids = frozenset((*eos, *(params.stop_token_ids or ())))
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs] = []  # of positions 1, 2, ...
        self.grant: Grant | None = None
        self.guide: Guide | None = None
        self.blocked = False
        self.scheduled = 0
        self.pending = 0
        self.sampled_in = -1  # the number of the last step that samples for it
        self.in_flight = 0
        self.refill = self.drafts = 0
        self.cached_tokens = -1  # unknown before the first admission
        self.external_tokens, self.found = 0, (0, 0)
        self.admitted_time = 0.0  # monotonic, of the first admission
        self.retry_version = -1  # `KVManager.version` at which it didn't fit
        self.retry_budget = 0  # tokens a step must have left for it
        self.looked_up = self.fetched = False
        self.awaits_transfer = False
        self.preemptions = 0
        self.reported = False
        self.finished = False
        self.text: SuffixIndex | None = None  # where the host drafts, from the first draft on
        self.host_drafts: list[int] = []  # of its next row, if it has a guide

    def hit_limit(self) -> int:
        """How many leading tokens may come from the prefix index: all but the last, whose logits are needed.

        With prompt log-probabilities, a token whose logits are still to be reported is computed. For a mean, all tokens are.
        """
        if self.request.pooling == "mean":
            return 0
        most = len(self.tokens) - 1
        have = len(self.prompt_logprobs)
        return have if self.wants_prompt_logprobs and have < self.prompt_len - 1 else most

    def add_prompt_logprobs(self, row: StepRow, entries: list[TokenLogprobs]) -> None:
        """Keep the log-probabilities of positions row.start + 1 and later that an earlier run had not reported yet."""
        skip = len(self.prompt_logprobs) - row.start
        self.prompt_logprobs += entries[skip:] if skip >= 0 else []

    def finish_reason(self, token: int) -> tuple[FinishReason | None, int | None]:
        """Whether `token`, just appended, ends the sequence: (reason, the stop token's id if it was asked for by id)."""
        total = len(self.tokens)
        if token in self.stop_ids and total >= self.min_total:
            is_eos = token in self.request.eos_token_ids and not self.request.params.ignore_eos
            return "stop", None if is_eos else token
        return ("length", None) if total >= self.max_total else (None, None)
