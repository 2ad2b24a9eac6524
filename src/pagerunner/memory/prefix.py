"""The prefix index: chained content hashes of token prefixes, and which page holds which content.

A hash covers 16 tokens and everything before them, so equal hashes mean equal prefixes. It has 256 bits of BLAKE2b over canonical
little-endian token ids. Its seed is everything that separates requests with equal tokens (the salt). It doesn't depend on
any page size. The group's rule makes a page's key of these hashes.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import repeat

from pagerunner.types.lora import AdapterInfo

UNIT_TOKENS = 16
_UNIT_BYTES = 4 * UNIT_TOKENS
_LONG_BYTES = 64 * _UNIT_BYTES  # of a prompt's long beginning

PageKey = bytes


def chain_seed(cache_salt: str = "", parent_id: str = "", adapter: str = "") -> bytes:
    """The hash that a chain starts from: requests share pages only if all are equal. `adapter` is the digest of an adapter's content."""
    given = (cache_salt, parent_id, adapter) if adapter else (cache_salt, parent_id)
    parts = [part.encode("utf-8", "surrogatepass") for part in given]
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(framed, digest_size=32, person=b"pagerunner-v1").digest()


def _token_bytes(tokens: Sequence[int]) -> bytes:
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class RecentPrompts:
    """Hashes of the last prompts that began differently, for those that begin the same: what requests with a common system prompt, a conversation's next
    turn, or a prompt that comes again would hash again. A prompt is found by its first 16 tokens and by its first 1,024: conversations begin alike.
    """

    KEPT_TOKENS = 2**21
    """Tokens of prompts, counted for each of its two beginnings with OWN_TOKENS more. They take 9 bytes each: 19 MB of prompts that are shorter than 1,024 tokens."""
    OWN_TOKENS = 36
    """As many tokens take what a prompt takes beside its own: 320 bytes."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, tuple[bytes, list[bytes]]] = {}
        self._tokens = 0

    def hashes(self, seed: bytes, data: bytes) -> list[bytes]:
        """Those of leading units of `data` that are known."""
        known, hashes = next(filter(None, map(self._prompts.get, _beginnings(seed, data))), (b"", []))
        same, beyond = 0, min(len(known), len(data)) // _UNIT_BYTES + 1
        while beyond - same > 1:
            middle = (same + beyond) // 2
            part = slice(same * _UNIT_BYTES, middle * _UNIT_BYTES)
            same, beyond = (middle, beyond) if known[part] == data[part] else (same, middle)
        return hashes[:same]

    def keep(self, seed: bytes, data: bytes, hashes: list[bytes]) -> None:
        """Remember a prompt of whole units, in place of one that begins the same."""
        kept = data, list(hashes)
        for key in _beginnings(seed, data):
            self._forget(key)
            self._prompts[key] = kept
            self._tokens += len(data) // 4 + self.OWN_TOKENS
        while self._tokens > self.KEPT_TOKENS:
            self._forget(next(iter(self._prompts)))

    def _forget(self, key: bytes) -> None:
        if key in self._prompts:
            self._tokens -= len(self._prompts.pop(key)[0]) // 4 + self.OWN_TOKENS


def _beginnings(seed: bytes, data: bytes) -> Iterator[bytes]:
    """What a prompt is found by, the longest first."""
    if len(data) >= _LONG_BYTES:
        yield seed + data[:_LONG_BYTES]
    yield seed + data[:_UNIT_BYTES]


class PrefixChain:
    """One request's hashes: `hashes[i]` covers tokens [0, 16 * (i + 1)). Computed once and extended as tokens arrive.

    `salt` and `adapter` are the parts of the seed that readers of KV events are told.
    """

    __slots__ = ("_recent", "adapter", "hashes", "salt", "seed")

    def __init__(
        self, seed: bytes, recent: RecentPrompts | None = None, salt: str = "", adapter: AdapterInfo | None = None
    ) -> None:
        self.seed = seed
        self.salt = salt
        self.adapter = adapter
        self.hashes: list[bytes] = []
        self._recent = recent

    def cover(self, tokens: Sequence[int], limit: int) -> None:
        """Hash the whole units among the first `limit` of `tokens` that are not hashed yet.

        `tokens` must begin with the tokens of earlier calls.
        """
        done = len(self.hashes)
        units = min(limit, len(tokens)) // UNIT_TOKENS
        if units <= done:
            return
        whole = not done and limit >= len(tokens)  # a slice would look at each of its numbers twice more
        data = _token_bytes(tokens if whole else tokens[done * UNIT_TOKENS : units * UNIT_TOKENS])
        data = data[: (units - done) * _UNIT_BYTES]
        recent = None if done else self._recent
        if recent is not None:
            self.hashes += recent.hashes(self.seed, data)
        hashes = self.hashes
        last = hashes[-1] if hashes else self.seed
        for at in range((len(hashes) - done) * _UNIT_BYTES, len(data), _UNIT_BYTES):
            last = blake2b(last + data[at : at + _UNIT_BYTES], digest_size=32).digest()
            hashes.append(last)
        if recent is not None:
            recent.keep(self.seed, data, hashes)


class PrefixIndex:
    """Which page holds which content, per group. Knows nothing of reference counts: the pool asks it what is worth keeping.

    `pages[group]` maps a key to a page; `keys[group]` maps a page to its key. `epoch` counts how often everything was forgotten:
    what began in an earlier epoch publishes nothing. `adapters[group]` are the pages that hold parts of adapters, with these
    adapters' digests; `num_of_adapter` says how many there are by digest, for statistics, which are made while steps wait.
    """

    def __init__(self, num_groups: int) -> None:
        self.epoch = 0
        self.pages: list[dict[PageKey, int]] = [{} for _ in range(num_groups)]
        self.keys: list[dict[int, PageKey]] = [{} for _ in range(num_groups)]
        self.adapters: list[dict[int, str]] = [{} for _ in range(num_groups)]
        self.num_of_adapter = Counter[str]()

    def find(self, group: int, key: PageKey) -> int | None:
        """The page that holds the content."""
        return self.pages[group].get(key)

    def holds(self, group: int, page: int) -> bool:
        """Whether the page's content is findable."""
        return page in self.keys[group]

    def publish(self, group: int, key: PageKey, page: int) -> None:
        """Make a page findable. Of two pages with equal content the first stays; the second is not indexed."""
        if self.pages[group].setdefault(key, page) == page:
            self.keys[group][page] = key

    def publish_all(self, group: int, keys: Sequence[PageKey], pages: Sequence[int]) -> None:
        """As `publish`, of many pages, whose keys differ."""
        held = self.pages[group]
        if held.keys().isdisjoint(keys):
            held.update(zip(keys, pages, strict=True))
            self.keys[group].update(zip(pages, keys, strict=True))
        else:
            for key, page in zip(keys, pages, strict=True):
                PrefixIndex.publish(self, group, key, page)

    def publish_adapter(self, group: int, digest: str, keys: Sequence[PageKey], pages: Sequence[int]) -> None:
        """As `publish_all`, of pages of the adapter with this digest, of which readers of KV events aren't told. No other pages are findable under these keys."""
        PrefixIndex.publish_all(self, group, keys, pages)
        self.adapters[group].update(dict.fromkeys(pages, digest))
        self.num_of_adapter[digest] += len(pages)

    def forget(self, group: int, page: int) -> None:
        """The page's content is no longer findable."""
        key = self.keys[group].pop(page, None)
        if key is not None:
            del self.pages[group][key]
            if page in self.adapters[group]:
                self._forget_adapter(group, page)

    def forget_all(self, group: int, pages: Sequence[int]) -> None:
        """As `forget`, of many pages."""
        keys, held = self.keys[group], self.pages[group]
        for key in filter(None, map(keys.pop, pages, repeat(None))):
            del held[key]
        if adapters := self.adapters[group]:
            for page in filter(adapters.__contains__, pages):
                self._forget_adapter(group, page)

    def _forget_adapter(self, group: int, page: int) -> None:
        digest = self.adapters[group].pop(page)
        self.num_of_adapter[digest] -= 1
        if not self.num_of_adapter[digest]:
            del self.num_of_adapter[digest]

    def move(self, group: int, source: int, target: int) -> None:
        """The content of page `source` is now in page `target`."""
        key = self.keys[group].pop(source, None)
        if key is not None:
            self.pages[group][key] = target
            self.keys[group][target] = key
            if source in self.adapters[group]:
                self.adapters[group][target] = self.adapters[group].pop(source)

    def clear(self) -> None:
        """Forget everything."""
        self.epoch += 1
        for pages, keys, adapters in zip(self.pages, self.keys, self.adapters, strict=True):
            pages.clear()
            keys.clear()
            adapters.clear()
        self.num_of_adapter.clear()


class HitCounts:
    """Tokens of prompts that were looked up in the prefix index, and those that were there: in all and by group."""

    def __init__(self, groups: int) -> None:
        self.queries = 0
        self.hits = 0
        self.group_queries = [0] * groups
        self.group_hits = [0] * groups
