"""Publishes what prompts can find in the prefix cache, in vLLM's format: routers send a prompt where its beginning lies.

A batch has three frames: the topic, its number (8 bytes, big-endian, from 0), and msgpack of [time, events, rank]. Events are maps
with their name under `type`. Who missed some asks the replay socket for all from a number on; an empty payload under the number -1 ends
the answer. A thread of its own sends, so that no step waits for a reader. When its queue is full, batches are dropped, and their numbers
with them. Readers see the gap, and the next batch begins with AllBlocksCleared and tells them everything again.
"""

from __future__ import annotations

import errno
import logging
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import zmq

from pagerunner.config import KVEventsConfig
from pagerunner.errors import ConfigError
from pagerunner.memory.events import Block, BlockLog, BlockShape, Change

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.05
"""How soon a replay is answered while nothing is published."""
END_SECONDS = 1.0
"""How long the end of an engine waits until everything is sent."""
_BINDS = ("*", "//127.", "//localhost", "//[::1]", "//[::]", "ipc://")
_Batch = tuple[int, float, list[Change | None]]


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks that follow each other, and can be found from now on. `token_ids` are all their tokens.

    `lora_name` and `lora_id` are those of the adapter of the prompt that computed them. `extra_keys` has an entry for each block: None, or what a prompt
    must have besides equal tokens, which is its adapter's name and, in its first block, its `cache_salt`.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks that can't be found any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be found any more, in any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def events_of(changes: Sequence[Change | None], shape: BlockShape) -> list[Event]:
    """The changes as events. Neighbours of one kind are one event; those that come must follow each other in a prompt."""
    events: list[Event] = []
    run: list[Change] = []
    for change, following in pairwise((*changes, None)):
        if change is None:
            events.append(AllBlocksCleared())
            continue
        run.append(change)
        if following is None or not _joins(change, following):
            events.append(_stored(run, shape) if change.here else _removed(run))
            run = []
    return events


def _joins(change: Change, following: Change) -> bool:
    alike = change.medium == following.medium and change.here is following.here
    block, behind = change.block, following.block
    return alike and (not change.here or (behind.parent is block and _name(behind) == _name(block)))


def _stored(run: Sequence[Change], shape: BlockShape) -> BlockStored:
    blocks = [change.block for change in run]
    first = blocks[0]
    return BlockStored(
        block_hashes=[_hash(block) for block in blocks],
        parent_block_hash=None if first.parent is None else _hash(first.parent),
        token_ids=[token for block in blocks for token in block.tokens],
        block_size=shape.tokens,
        lora_id=None if first.adapter is None else first.adapter.lora_int_id,
        medium=run[0].medium,
        lora_name=_name(first) or None,
        extra_keys=[_extra(block) for block in blocks] if _extra(first) else None,
        group_idx=0,
        kv_cache_spec_kind=shape.kind,
        kv_cache_spec_sliding_window=shape.window,
    )


def _removed(run: Sequence[Change]) -> BlockRemoved:
    return BlockRemoved([_hash(change.block) for change in run], run[0].medium, 0)


def _name(block: Block) -> str:
    return "" if block.adapter is None else block.adapter.name


def _extra(block: Block) -> list[str] | None:
    return [text for text in (_name(block), block.salt) if text] or None


def _hash(block: Block) -> int:
    return int.from_bytes(block.key[-8:], "big")


def offset(endpoint: str, rank: int) -> str:
    """The endpoint of one of several engines: a port goes up by the engine's number, a path gets it as a suffix."""
    if not rank:
        return endpoint
    head, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp:"):
        return f"{endpoint}_dp{rank}"
    return f"{head}{colon}{int(port) + rank}" if port.isdigit() else endpoint


class Publisher:
    """Sends batches of events from a thread, until it is closed or nobody has it any more. `rank` is the engine's number, or its team's.

    `endpoint` and `replay_endpoint` are where it can be reached. `dropped` counts the batches for which the queue had no room.

    Raises:
        ConfigError: an endpoint can't be opened.
    """

    def __init__(self, config: KVEventsConfig, shape: BlockShape, rank: int = 0) -> None:
        self._most = config.max_queue_size
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._next = self.dropped = 0
        self._lost = False
        sender = _Sender(config, shape, rank, self._queue)
        self.endpoint, self.replay_endpoint = sender.endpoint, sender.replay_endpoint
        thread = threading.Thread(target=sender.run, name="kv-events", daemon=True)
        self.close = weakref.finalize(self, _end, self._queue, thread)
        thread.start()
        replay = f", replay at {self.replay_endpoint}" if self.replay_endpoint else ""
        logger.info("KV events: blocks of %d tokens at %s%s.", shape.tokens, self.endpoint, replay)

    def tell(self, log: BlockLog) -> None:
        """Publish what has changed. Never waits."""
        full = self._queue.qsize() >= self._most
        if self._lost and not full:
            self._lost = False
            log.retell()
        if not log.changes:
            return
        number, self._next = self._next, self._next + 1
        changes = log.take()
        if not full:
            self._queue.put((number, time.time(), changes))
            return
        self.dropped += 1
        if not self._lost:
            self._lost = True
            logger.warning(
                "KV events: batch %d is dropped, as %d batches wait to be sent (max_queue_size). Readers will be told everything again.",
                number,
                self._most,
            )


def _end(batches: queue.SimpleQueue[_Batch | None], thread: threading.Thread) -> None:
    batches.put(None)
    if thread is not threading.current_thread():
        thread.join(END_SECONDS)


class _Sender:
    """The thread's side: the sockets, and the batches of which a replay is possible."""

    def __init__(
        self, config: KVEventsConfig, shape: BlockShape, rank: int, batches: queue.SimpleQueue[_Batch | None]
    ) -> None:
        self._topic, self._shape, self._rank, self._batches = config.topic.encode(), shape, rank, batches
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._out, self.endpoint = self._open("endpoint", config.endpoint, zmq.PUB, config.hwm)
        self._replay, self.replay_endpoint = None, ""
        if config.replay_endpoint:
            # room for one whole answer to each reader: what doesn't fit is dropped without a word
            most = config.buffer_steps + 1
            self._replay, self.replay_endpoint = self._open("replay_endpoint", config.replay_endpoint, zmq.ROUTER, most)

    def _open(self, name: str, asked: str, kind: int, most: int) -> tuple[zmq.Socket[bytes], str]:
        """Bind, or connect where vLLM does: to a host that is neither all of this machine's nor its loopback."""
        endpoint = offset(asked, self._rank)
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.LINGER, int(1000 * END_SECONDS))
        opened.setsockopt(zmq.SNDHWM, most)
        try:
            if kind == zmq.PUB and not any(part in endpoint for part in _BINDS):
                opened.connect(endpoint)
                return opened, endpoint
            if _answers(endpoint):
                raise zmq.ZMQError(errno.EADDRINUSE)
            opened.bind(endpoint)
            return opened, opened.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raised = f" ({asked!r} is raised by the engine's number)" if self._rank else ""
            raise ConfigError(
                f"kv_events_config: {name} {endpoint!r}{raised} can't be opened: {error}. Choose another one."
            ) from None

    def run(self) -> None:
        """Send what comes, until the end of it."""
        seconds = None if self._replay is None else POLL_SECONDS
        try:
            while True:
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
                try:
                    batch = self._batches.get(timeout=seconds)
                except queue.Empty:
                    continue
                if batch is None:
                    return
                number, when, changes = batch
                payload = msgspec.msgpack.encode([when, events_of(changes, self._shape), self._rank])
                self._sent.append((number, payload))
                self._out.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
        except Exception:
            logger.exception("KV events end here: their thread has failed. The engine goes on.")
        finally:
            self._context.destroy()

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        who, *frames = replay.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            logger.warning(
                "KV events: a replay is asked for by an empty frame and 8 bytes; %d frames came.", len(frames)
            )
            return
        first = int.from_bytes(frames[1], "big")
        for number, payload in self._sent:
            if number >= first:
                replay.send_multipart([who, b"", number.to_bytes(8, "big"), payload])
        replay.send_multipart([who, b"", (-1).to_bytes(8, "big", signed=True), b""])


def _answers(endpoint: str) -> bool:
    """Whether somebody listens at a path: ZeroMQ would take it from him."""
    if not endpoint.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            return False
    return True
