"""Prefill on one engine, decode on another: prompts' pages are lent from host memory, and pulled into it.

The engine that prefills keeps a request's last update back until the prompt's pages lie in host memory. Then it lends them, and the update
says where. The engine that decodes keeps a request back until it has pulled these pages into its own host memory. Then the request is queued
as ever, and finds them there. What doesn't come is computed: tokens are the same, whatever fails.

Example: a prompt of 8,200 tokens with pages of 16. 512 pages come, and the last 8 tokens are computed where they are decoded.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from pagerunner.config import ExchangeConfig
from pagerunner.errors import InvalidRequestError
from pagerunner.logs import SparingLog
from pagerunner.memory.manager import KVManager
from pagerunner.memory.ownership import ExchangeState
from pagerunner.memory.prefix import PageKey, PrefixChain
from pagerunner.memory.rules import joint_hit
from pagerunner.tiers.below import Arrivals, lacking
from pagerunner.tiers.loans import Loans
from pagerunner.tiers.nixl import Reader, Shared
from pagerunner.tiers.page_server import PageServer
from pagerunner.tiers.parts import Parts
from pagerunner.tiers.peers import PULL_BYTES, PeerStore
from pagerunner.tiers.policy import LOAD_FAILED, Tiering
from pagerunner.tiers.stats import ExchangeStats
from pagerunner.tiers.wire import Name
from pagerunner.types import AdapterInfo, EngineRequest, RequestUpdate
from pagerunner.types.kv_transfer import KVTransferParams

log = logging.getLogger(__name__)

STORE_SECONDS = 10.0
"""How long an answer waits for its prompt to lie in host memory. After that it says nothing of pages."""
MOST_LENT = 0.5
"""No more is lent while this share of host memory is in use: stores and pulls need the rest."""


@dataclass(slots=True, eq=False)
class _Answer:
    """A last update that waits for its prompt's pages."""

    update: RequestUpdate
    chain: PrefixChain
    tokens: int
    until: float


@dataclass(slots=True, eq=False)
class _Pull:
    """A visit to a loan that some requests wait for. `until`: how long to wait for news of it; then reading has its own patience.

    What is `known` and isn't `reading` waits for room in host memory. `could`: so many tokens of the `prompt` are found when all pages have come. Its
    `chain` is kept, as it takes milliseconds for a long one.
    """

    number: int
    token: bytes
    requests: list[EngineRequest]
    until: float
    prompt: list[int]
    chain: PrefixChain
    known: bool = False
    reading: bool = False
    could: int = 0


class Books(Protocol):
    """Whose pages are exchanged: a scheduler."""

    manager: KVManager
    tiers: Tiering | None


class Exchange:
    """Decides what is lent and pulled. One thread calls it; `wait` lets that thread wait for others' threads."""

    def __init__(
        self,
        config: ExchangeConfig,
        secret: bytes,
        scheduler: Books,
        host_bytes: Sequence[memoryview],
        fields: Callable[[], Mapping[str, str]],
    ) -> None:
        """`host_bytes`: the memory of each rank, whose places `scheduler.tiers` knows. `fields()`: what pages look like; see `wire.Open`."""
        self._config, self._fields, self._bytes = config, fields, host_bytes
        self._engine_id = config.engine_id or uuid.uuid4().hex
        self._news = threading.Event()
        self._given_back: deque[bytes] = deque()
        self.loans = Loans(partial(_on_loan_end, self._given_back, self._news))
        self._server = PageServer(self.loans, secret, config.host, config.port, config.peers) if config.lends else None
        self._shared: Shared | None = None
        self._nixl = config.nixl
        sizes = [group.page_bytes for group in scheduler.manager.plan.groups]
        reader = Reader(PULL_BYTES + max(sizes)) if config.nixl and config.pulls else None
        self._peers = PeerStore(secret, {}, config.peers, self._news.set, config.num_threads, reader)
        self._is_open = False
        self._refusals = SparingLog(log, most=5)
        self._to_lend: dict[str, tuple[EngineRequest, AdapterInfo | None]] = {}
        self._answers: list[_Answer] = []
        self._lent: dict[bytes, list[list[int]]] = {}
        self._pulls: dict[int, _Pull] = {}
        self._made = self._failed = 0
        self._no_room_at = (-1, -1)
        assert scheduler.tiers is not None
        self._parts = Parts(self._peers, host_bytes, len(sizes))
        self._arrivals = Arrivals[_Pull](self._parts, scheduler.tiers.host, range(len(host_bytes[0])), sizes)
        self.close = weakref.finalize(self, _close, self._server, self._peers)
        """End all threads and let host memory go, as when nobody has the exchange any more: threads know nothing of it."""
        self.close.atexit = False
        self._tiers, self._manager = scheduler.tiers, scheduler.manager
        self._rules = tuple(group.rule for group in self._manager.plan.groups)
        self.open()

    def open(self) -> None:
        """Lend and pull, unless that is so. Raises ConfigError for an address that can't be had."""
        if not self._is_open:
            self._peers.fields = self._fields()
            if self._server is not None:
                if self._nixl and self._shared is None:  # all of it, which takes its time
                    self._shared = Shared(*self._bytes)
                self._server.open(self._peers.fields, self._shared)
            self._is_open = True

    @property
    def busy(self) -> bool:
        """Whether somebody waits for pages to be lent or pulled, or pulled pages wait to be looked up."""
        return bool(self._answers or self._pulls or self._arrivals.busy)

    def stats(self) -> ExchangeStats:
        """Counts for the metrics."""
        loans, arrivals, peers = self.loans, self._arrivals, self._peers
        return ExchangeStats(
            loans=len(loans), lent_total=loans.num_lent, expired_total=loans.num_expired,
            pulls=len(self._pulls), pulled_total=arrivals.whole, failed_total=self._failed + arrivals.broken,
            pulled_bytes_total=peers.bytes_read, bytes_per_second=peers.bytes_per_second,
        )  # fmt: skip

    def state(self) -> ExchangeState:
        """What `GET /memory` shows."""
        stats = self.stats()
        return ExchangeState(**{name: getattr(stats, name) for name in ExchangeState.__struct_fields__})

    def wait(self, seconds: float) -> None:
        """Wait for news of another thread, for up to so many seconds."""
        self._news.wait(seconds)

    # -- requests and updates

    def take(self, request: EngineRequest, adapter: AdapterInfo | None = None) -> bool:
        """Whether a request is kept back, as its pages are to be pulled first. Raises InvalidRequestError for an engine that isn't allowed."""
        params, config = request.kv_transfer, self._config
        if params is None or request.pooling is not None:
            return False
        refused = ""
        if params.do_remote_decode and not config.lends:
            refused = "do_remote_decode, and this engine lends no pages: its kv_role is kv_consumer"
        if params.do_remote_prefill and not config.pulls:
            refused = "do_remote_prefill, and this engine pulls no pages: its kv_role is kv_producer"
        if refused:
            raise InvalidRequestError(f"kv_transfer_params has {refused}.", "kv_transfer_params")
        if not params.do_remote_prefill:
            return False
        assert params.remote_host is not None and params.remote_port is not None
        token, boot = bytes.fromhex(params.remote_lease or ""), bytes.fromhex(params.remote_boot_id or "")
        if (pull := next((one for one in self._pulls.values() if one.token == token), None)) is not None:
            pull.requests.append(request)  # a sibling
            return True
        self._made += 1
        most = len(request.prompt_token_ids) * len(self._rules) * len(self._bytes)  # pages of a token each
        self._peers.visit(self._made, (params.remote_host, params.remote_port), token, boot, most)
        if request.params.prompt_logprobs is not None:  # all of the prompt is computed, and the loan given back
            self._peers.leave(self._made)
            return False
        prompt, chain = request.prompt_token_ids, self._manager.chain(request.cache_salt, adapter=adapter)
        self._pulls[self._made] = _Pull(self._made, token, [request], time.monotonic() + STORE_SECONDS, prompt, chain)
        return True

    def queued(self, request: EngineRequest, adapter: AdapterInfo | None = None) -> None:
        """The scheduler has a request. Its last update waits if its pages are to be lent."""
        params = request.kv_transfer
        if params is not None and params.do_remote_decode and request.is_alone and request.pooling is None:
            self._to_lend[request.request_id] = request, adapter

    def hold(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        """Keep back the last updates of requests whose pages are to be lent."""
        if not self._to_lend:
            return updates
        passed = []
        for update in updates:
            found = self._to_lend.pop(update.request_id, None) if update.finish_reason else None
            if found is None or update.finish_reason not in ("stop", "length"):
                passed.append(update)
                continue
            request, adapter = found
            prompt, chain = request.prompt_token_ids, self._manager.chain(request.cache_salt, adapter=adapter)
            chain.cover(prompt, len(prompt))
            self._answers.append(_Answer(update, chain, len(prompt), time.monotonic() + STORE_SECONDS))
        return passed

    def abort(self, request_ids: Sequence[str]) -> list[RequestUpdate]:
        """End requests that are kept back. Returns their last updates."""
        gone, updates = set(request_ids), []
        for request_id in gone:
            self._to_lend.pop(request_id, None)
        for answer in self._answers:
            if answer.update.request_id in gone:
                updates.append(msgspec.structs.replace(answer.update, finish_reason="abort"))
        self._answers = [answer for answer in self._answers if answer.update.request_id not in gone]
        for pull in list(self._pulls.values()):
            mine = [request.request_id for request in pull.requests if request.request_id in gone]
            pull.requests = [request for request in pull.requests if request.request_id not in gone]
            updates += [RequestUpdate(request_id=name, new_token_ids=[], finish_reason="abort") for name in mine]
            if not pull.requests:
                self._leave(pull)
        return updates

    @property
    def request_ids(self) -> list[str]:
        """Those that are kept back."""
        held = [request.request_id for pull in self._pulls.values() for request in pull.requests]
        return held + [answer.update.request_id for answer in self._answers]

    # -- what goes on

    def poll(self, needs_pages: Callable[[str], bool]) -> tuple[list[RequestUpdate], list[EngineRequest]]:
        """Go on. Returns updates and requests that needn't be kept back any more. Requests whose pages didn't come end, if that is asked for.

        `needs_pages(request_id)`: whether a request that was queued hasn't looked for its pages yet.
        """
        self._news.clear()
        self.loans.tick()
        self.take_back()
        ready: list[EngineRequest] = []
        lost: list[EngineRequest] = []
        for number, failed in self._peers.visited():
            pull = self._pulls.get(number)
            if pull is not None and not pull.reading and failed:
                self._failed += 1
                lost += self._leave(pull)
            elif pull is not None:
                pull.known = True
        now = time.monotonic()
        for pull in [one for one in self._pulls.values() if not one.known and now > one.until]:
            self._failed += 1
            lost += self._leave(pull)
        self._arrivals.settle()
        self._arrivals.arrivals(lambda pull: self._served(pull, ready, lost, needs_pages))
        ready += self._begin_in_turn()
        updates = self._answered(now)
        if not self._config.fails:
            return updates, ready + lost
        return updates + [_failed(request) for request in lost], ready

    def take_back(self) -> None:
        """Let pages go whose loans have ended."""
        while self._given_back:
            self._tiers.host.release(self._lent.pop(self._given_back.popleft()))

    def stop(self, why: str, *, unregister: bool = False) -> tuple[list[RequestUpdate], list[EngineRequest]]:
        """Lend and pull nothing any more, until `open`. Returns what was kept back. No page of host memory is written afterwards.

        `unregister` it, too. Otherwise NIXL may still read pages, and who has done so is told that they aren't lent any more.
        """
        self._is_open = False
        if self._server is not None:
            self._server.close(why)
        if self._shared is not None and unregister:  # before the memory may go
            self._shared.close()
            self._shared = None
        ready = [request for pull in list(self._pulls.values()) for request in self._leave(pull)]
        self._peers.close()
        updates, ids = self._answered(float("inf")), {request.request_id for request in ready}
        more, rest = self.poll(lambda request_id: request_id in ids)
        return updates + more, ready + rest

    # -- lending

    def _answered(self, now: float) -> list[RequestUpdate]:
        """Updates whose prompts lie in host memory, or never will."""
        updates, waiting = [], []
        for answer in self._answers:
            if now < answer.until and self._tiers.storing(answer.chain, answer.tokens):
                waiting.append(answer)
            else:
                params = self._lend(answer) if now < float("inf") and self._server is not None else None
                updates.append(msgspec.structs.replace(answer.update, kv_transfer_params=params))
        self._answers = waiting
        return updates

    def _lend(self, answer: _Answer) -> KVTransferParams | None:
        host, chain, config = self._tiers.host, answer.chain, self._config
        hit = joint_hit(self._rules, host.index.pages, chain, answer.tokens - 1)  # the last token is computed anyway
        if not hit or self._server is None:
            return None
        if host.in_use_bytes > MOST_LENT * host.num_bytes:
            self._refusals.warn("Loans hold half of host memory: prompts are computed where they are decoded, too.")
            return None
        keys = [rule.keys(chain, *rule.hit_span(hit)) for rule in self._rules]
        pages = [host.share(group, some) for group, some in enumerate(keys)]
        token = self.loans.lend(partial(_lent_pages, self._parts, self._arrivals, keys, pages), config.seconds)
        self._lent[token] = pages
        listens, port = self._server.address
        return KVTransferParams(
            do_remote_prefill=True, remote_host=listens, remote_port=port, tp_size=config.tp_size,
            remote_engine_id=self._engine_id, remote_request_id=answer.update.request_id, remote_block_ids=[],
            remote_num_tokens=hit, remote_blocks_expiry_time=time.time() + config.seconds,
            remote_lease=token.hex(), remote_boot_id=self._server.boot.hex(),
        )  # fmt: skip

    # -- pulling

    def _begin_in_turn(self) -> list[EngineRequest]:
        """Begin to read what is known and has room, in the order of requests. Returns those that needn't wait: nothing is to be read for them.

        Who has no room waits until pages of others have gone to the device. A prompt is computed that has none although nobody else's are on their way,
        or that is too large.
        """
        ready: list[EngineRequest] = []
        room = self._arrivals.released, self._tiers.ended
        for pull in [one for one in self._pulls.values() if one.known and not one.reading]:
            may_wait = self._arrivals.busy or self._tiers.loads
            if may_wait and self._no_room_at == room:
                break
            if (begun := self._begin(pull, may_wait)) is None:
                self._no_room_at = room
                break
            if not begun:
                ready += self._leave(pull)
        return ready

    def _begin(self, pull: _Pull, may_wait: bool) -> bool | None:
        """Begin to read what the loan has and this engine hasn't. None if it is to wait for room, False if nothing is to be read."""
        chain, limit, held = pull.chain, len(pull.prompt) - 1, self._tiers.host.index.pages
        chain.cover(pull.prompt, len(pull.prompt))
        # what the first rank has: a page that another lacks is computed
        lent, near = self._peers.lent(pull.number), self._near()
        far = [ChainMap(*some.maps, lent.get(group, {})) for group, some in enumerate(near)]
        have, pull.could = joint_hit(self._rules, near, chain, limit), joint_hit(self._rules, far, chain, limit)
        if pull.could <= have:
            return False
        keys, beside = lacking(self._rules, chain, pull.could, near, held)
        pull.reading = self._arrivals.read(pull.number, pull, keys, beside)
        if not pull.reading and may_wait and not self._arrivals.too_large(keys):
            return None
        if not pull.reading:
            self._failed += 1
            self._refusals.warn(
                "A prompt's pages have no room in host memory and are computed; raise kv_offloading_size."
            )
        return pull.reading

    def _near(self) -> list[ChainMap[PageKey, int]]:
        """The pages of this engine, by group."""
        pages = zip(self._manager.index.pages, self._tiers.host.index.pages, strict=True)
        return [ChainMap(*some) for some in pages]

    def _served(
        self, pull: _Pull, ready: list[EngineRequest], lost: list[EngineRequest], needs_pages: Callable[[str], bool]
    ) -> bool:
        """Whether requests whose pages came needn't have them kept. Those that have waited until now are `ready`, or `lost` if not all have come."""
        if pull.number not in self._pulls:
            return not any(needs_pages(request.request_id) for request in pull.requests)
        fails = self._config.fails and pull.requests and not self._has(pull)
        (lost if fails else ready).extend(self._leave(pull))
        return bool(fails) or not pull.requests

    def _has(self, pull: _Pull) -> bool:
        """Whether all that was pulled is here."""
        return joint_hit(self._rules, self._near(), pull.chain, len(pull.prompt) - 1) >= pull.could

    def _leave(self, pull: _Pull) -> list[EngineRequest]:
        """Let a loan go. Returns the requests that have waited for it. A read that is under way ends soon."""
        del self._pulls[pull.number]
        self._arrivals.leave(pull)
        self._peers.leave(pull.number)
        return pull.requests


def _lent_pages(
    parts: Parts, arrivals: Arrivals[_Pull], keys: Sequence[list[PageKey]], pages: Sequence[list[int]]
) -> dict[Name, memoryview]:
    """By another thread."""
    named = [
        (group, key, page)
        for group, (some, there) in enumerate(zip(keys, pages, strict=True))
        for key, page in zip(some, there, strict=True)
    ]
    return {(group, key): view for group, key, view in parts.of(arrivals.views(named))}


def _failed(request: EngineRequest) -> RequestUpdate:
    return RequestUpdate(request_id=request.request_id, new_token_ids=[], finish_reason="error", error=LOAD_FAILED)


def _on_loan_end(given_back: deque[bytes], news: threading.Event, token: bytes, why: str) -> None:
    given_back.append(token)  # by another thread
    news.set()


def _close(server: PageServer | None, peers: PeerStore) -> None:
    if server is not None:
        server.close("the engine has ended")
    peers.close()
