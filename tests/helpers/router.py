"""A reader of KV events, as routers have one. What it expects is written from vLLM's documents, and not from our structs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from helpers.patience import patient


# What a reader expects, by vLLM's documents. Each event is a map with its name under "type".
class Stored(msgspec.Struct, tag="BlockStored", tag_field="type", forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", forbid_unknown_fields=True):
    pass


BATCH = msgspec.msgpack.Decoder(tuple[float, list[Stored | Removed | Cleared], int])


class Router:
    """A reader of one engine's events, as routers are: which blocks can be found, by hash, and what they begin with."""

    def __init__(self, endpoint: str, replay: str = "", topic: bytes = b"") -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.subscribe(topic)
        self.events.connect(endpoint)
        self.topic, self.replay = topic, replay
        self.next = 0
        self.gaps = 0
        self.rank = -1
        self.beginnings: dict[int, tuple[tuple[str, str], tuple[int, ...]]] = {}
        self.media: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
        self.kinds: list[str] = []

    def close(self) -> None:
        self.context.destroy(linger=0)

    def read(self, seconds: float = 0.0) -> bool:
        """Take a batch, if one comes within so many seconds."""
        if not self.events.poll(int(1000 * seconds)):
            return False
        topic, number, payload = self.events.recv_multipart()
        assert topic == self.topic and len(number) == 8
        found = int.from_bytes(number, "big")
        if found > self.next:
            self.gaps += 1
            if self.replay:
                self.ask()
        if found >= self.next:  # a replay may have brought it before
            self.take(found, payload)
        return True

    def ask(self) -> None:
        """Ask for everything that was missed."""
        asking = self.context.socket(zmq.DEALER)
        asking.connect(self.replay)
        asking.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert asking.poll(int(1000 * patient(10)))
            empty, number, payload = asking.recv_multipart()
            assert empty == b""
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                asking.close()
                return
            self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        when, events, self.rank = BATCH.decode(payload)
        assert abs(time.time() - when) < 600
        self.next = number + 1
        for event in events:
            self.kinds.append(type(event).__name__)
            if isinstance(event, Cleared):
                self.media = {"GPU": set(), "CPU": set()}
            elif isinstance(event, Removed):
                assert event.group_idx == 0
                self.media[event.medium] -= set(event.block_hashes)
            else:
                self.store(event)

    def store(self, event: Stored) -> None:
        size = event.block_size
        assert event.group_idx == 0 and (event.lora_id is None) is (event.lora_name is None)
        name = event.lora_name or ""
        assert len(event.token_ids) == size * len(event.block_hashes)
        parent: tuple[tuple[str, str], tuple[int, ...]] = (("", name), ())
        if event.parent_block_hash is not None:
            parent = self.beginnings[event.parent_block_hash]  # a router passes over blocks behind unknown ones
        for number, block in enumerate(event.block_hashes):
            keys = (event.extra_keys[number] if event.extra_keys else None) or []
            if name:  # of every block, and before the salt
                assert keys[0] == name
                keys = keys[1:]
            salt = keys[0] if keys else parent[0][0]
            parent = (salt, name), (*parent[1], *event.token_ids[number * size : (number + 1) * size])
            assert self.beginnings.setdefault(block, parent) == parent, "two beginnings with one hash"
            self.media[event.medium].add(block)

    @property
    def stored(self) -> set[int]:
        """Blocks on the device."""
        return self.media["GPU"]

    def finds(self, prompt: Sequence[int], salt: str = "", medium: str = "GPU", lora: str = "") -> int:
        """How many leading tokens of a prompt are cached, as far as the reader knows."""
        known = {self.beginnings[block] for block in self.media[medium]}
        hits = [len(tokens) for of, tokens in known if of == (salt, lora) and tuple(prompt[: len(tokens)]) == tokens]
        return max(hits, default=0)
