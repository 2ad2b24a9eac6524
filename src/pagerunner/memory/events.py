"""What prompts can find, and what not any more, block by block: for routers, which send a prompt where its beginning lies.

A block has as many tokens as prefix hits are multiples of. Its hash stands for it and all before it, so a reader needs no more than the
hashes: a prompt's leading blocks that it knows are the hit. A block is told when all groups that keep every token have its pages.

With recurrent state that isn't enough: a hit ends at a snapshot. So a block is told while its own snapshot is there, or a next block is told.
Example: blocks 0 to 9 have pages, and the only snapshot is block 6's. Blocks 0 to 6 are told. The snapshot is evicted, and none is.

Pages that no request of this engine has computed have no tokens yet (they were loaded). They are told when a prompt has found them.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagerunner.errors import ConfigError
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import UNIT_TOKENS, PageKey, PrefixChain, PrefixIndex
from pagerunner.memory.rules import GroupRule, LatentRule, WindowRule
from pagerunner.types.lora import AdapterInfo

_HASH_BYTES = 32  # a page of fewer than 16 tokens has its place behind the hash of its unit


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What blocks are with a memory plan: so many `tokens`, in pages of all `groups`, which have `rules`.

    `kind` is vLLM's word for how readers find a hit, and `window` its size. `state` is the group with snapshots, or -1.
    """

    tokens: int
    groups: tuple[int, ...]
    rules: tuple[GroupRule, ...]
    state: int
    kind: str
    window: int | None = None

    @classmethod
    def of(cls, plan: MemoryPlan) -> BlockShape:
        """Raises ConfigError for a model that has no blocks which a reader could count."""
        rules = [group.rule for group in plan.groups]
        kept = [number for number, rule in enumerate(rules) if not rule.forgets and not rule.snapshots]
        window = rules[0].reach if len(rules) == 1 and isinstance(rules[0], WindowRule) else None
        if not kept and window is None:
            names = ", ".join(group.name for group in plan.groups)
            raise ConfigError(
                "kv_events_config: events tell of layers that keep every token, or of windows of one size. This model's layers keep "
                f"others ({names}); leave kv_events_config out."
            )
        groups = tuple(kept or [0])
        kind = "mla_attention" if all(isinstance(rules[group], LatentRule) for group in groups) else "full_attention"
        return cls(
            tokens=plan.hit_granularity,
            groups=groups,
            rules=tuple(rules[group] for group in groups),
            state=next((number for number, rule in enumerate(rules) if rule.snapshots), -1),
            kind="sliding_window" if window is not None else kind,
            window=window,
        )

    def key(self, chain: PrefixChain, number: int) -> bytes:
        """The hash of block `number`, and of all before it."""
        return chain.hashes[(number + 1) * self.tokens // UNIT_TOKENS - 1]

    @property
    def divided(self) -> bool:
        """Whether a block is more than one page."""
        return len(self.groups) > 1 or any(rule.complete(self.tokens) > 1 for rule in self.rules)

    def pages(self, chain: PrefixChain, number: int) -> list[tuple[int, PageKey]]:
        """Group and key of every page of block `number`."""
        end = (number + 1) * self.tokens
        return [
            (group, key)
            for group, rule in zip(self.groups, self.rules, strict=True)
            for key in rule.keys(chain, rule.complete(end - self.tokens), rule.complete(end))
        ]


class Block:
    """The `tokens` of a block and, by its `parent`, all before them. `key` is the hash of both, and `pages` are groups and keys.

    `salt` is that of the prompts that may find it; only first blocks have it. `adapter` is that of the prompt that has named it; others with the same
    content may have other names. `uses`: media that hold it, and next blocks.
    """

    __slots__ = ("adapter", "key", "pages", "parent", "salt", "tokens", "uses")

    def __init__(
        self,
        key: bytes,
        pages: list[tuple[int, PageKey]],
        parent: Block | None,
        tokens: array[int],
        salt: str,
        adapter: AdapterInfo | None = None,
    ) -> None:
        self.adapter = adapter
        self.key = key
        self.pages = pages
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.uses = 0

    def inside(self) -> set[bytes]:
        """The hashes before its own at which a page ends."""
        return {key[:_HASH_BYTES] for _, key in self.pages} - {self.key}


class Change(NamedTuple):
    """A block can be found in a medium (`here`), or can't any more."""

    medium: str
    block: Block
    here: bool


class BlockLog:
    """Collects changes until they are taken. The first one, None, says that nothing can be found: readers may know an earlier engine's blocks.

    `blocks` are those that a medium holds, and all before them, by hash. `parts` has blocks by the hashes inside them at which pages end, too:
    where groups have pages of different sizes.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.shape = BlockShape.of(plan)
        self._divided = self.shape.divided
        self.blocks: dict[bytes, Block] = {}
        self.parts: dict[bytes, list[Block]] = {}
        self.changes: list[Change | None] = [None]
        self._media: list[Medium] = []

    def medium(self, name: str, pages: Sequence[Container[PageKey]]) -> Medium:
        """A memory that readers know by this name: "GPU", "CPU" (the host's), "FS" (files). `pages` always has, by group, the keys in it."""
        self._media.append(Medium(self, name, pages))
        return self._media[-1]

    def take(self) -> list[Change | None]:
        """The changes since the last call. None stands for: nothing can be found in any medium."""
        changes, self.changes = self.changes, []
        return changes

    def retell(self) -> None:
        """Begin again with all that can be found, as changes have been lost."""
        self.changes = [None]
        for medium in self._media:
            medium.tell_all()

    def name(self, chain: PrefixChain, tokens: Sequence[int], end: int) -> None:
        """The chain is that of these `tokens`, and its blocks up to position `end` may hold pages that nobody has named yet."""
        shape, blocks = self.shape, self.blocks
        last = end // shape.tokens - 1
        if last < 0 or shape.key(chain, last) in blocks:
            return
        first, parent = last, None
        while first and (parent := blocks.get(shape.key(chain, first - 1))) is None:
            first -= 1
        for number in range(first, last + 1):
            parent = self._add(chain, tokens, number, parent)
        assert parent is not None
        if not parent.uses:  # no medium holds the last one
            parent.uses = 1
            self.drop(parent)

    def _add(self, chain: PrefixChain, tokens: Sequence[int], number: int, parent: Block | None) -> Block:
        shape = self.shape
        size, key = shape.tokens, shape.key(chain, number)
        pages = shape.pages(chain, number) if self._divided else [(shape.groups[0], key)]
        part = array("I", tokens[number * size : (number + 1) * size])
        block = self.blocks[key] = Block(key, pages, parent, part, "" if number else chain.salt, chain.adapter)
        if parent is not None:
            parent.uses += 1
        if self._divided:
            for hash_ in block.inside():
                self.parts.setdefault(hash_, []).append(block)
        for medium in self._media:
            medium.settle(block)
        return block

    def drop(self, block: Block | None) -> None:
        """A medium, or the next block, is done with the block."""
        while block is not None:
            block.uses -= 1
            if block.uses:
                return
            del self.blocks[block.key]
            if self._divided:
                for hash_ in block.inside():
                    self.parts[hash_].remove(block)
                    if not self.parts[hash_]:
                        del self.parts[hash_]
            block = block.parent

    def cleared(self, medium: Medium) -> None:
        """A medium has lost everything."""
        if any(other.held for other in self._media if other is not medium):
            medium.forget()
            return
        self.blocks.clear()
        self.parts.clear()
        medium.held.clear()
        self.changes = [None]  # what was to be told before is of no use to anybody


class _Held:
    """Of a block of which a medium has some pages: whether it can be found (`told`), and how many next blocks can."""

    __slots__ = ("following", "told")

    def __init__(self) -> None:
        self.following = 0
        self.told = False


class Medium:
    """One kind of memory. Whoever changes its `pages` says so afterwards."""

    def __init__(self, log: BlockLog, name: str, pages: Sequence[Container[PageKey]]) -> None:
        self._log, self._state, self._name, self._pages = log, log.shape.state, name, pages
        self.held: dict[Block, _Held] = {}

    def changed(self, key: PageKey) -> None:
        """A page has come or gone."""
        hash_, parts = key[:_HASH_BYTES], self._log.parts
        if (block := self._log.blocks.get(hash_)) is not None:
            self.settle(block)
        for block in tuple(parts.get(hash_, ())) if parts else ():
            self.settle(block)

    def clear(self) -> None:
        """All pages have gone."""
        self._log.cleared(self)

    def forget(self) -> None:
        """Say of each block that it has gone."""
        gone, self.held = self.held, {}
        self._log.changes += [Change(self._name, block, False) for block, held in gone.items() if held.told]
        for block in gone:
            self._log.drop(block)

    def tell_all(self) -> None:
        """Tell of every block that can be found, parents first."""
        done: set[Block] = set()
        for block in self.held:
            path = []
            at: Block | None = block
            while at is not None and at not in done and at in self.held:
                done.add(at)
                path.append(at)
                at = at.parent
            self._log.changes += [Change(self._name, one, True) for one in reversed(path) if self.held[one].told]

    def settle(self, block: Block) -> None:
        """Note whether the block can be found, and with recurrent state the blocks before it, which depend on it."""
        state, pages, held, changes = self._state, self._pages, self.held, self._log.changes
        at, by, first = block, 0, len(changes)
        while True:
            there = 0
            for group, key in at.pages:
                there += key in pages[group]
            known = held.get(at)
            if known is None:
                if not there and not by:
                    break
                known = held[at] = _Held()
                at.uses += 1
            known.following += by
            can = there == len(at.pages) and (state < 0 or known.following > 0 or at.key in pages[state])
            by = can - known.told
            known.told = can
            if by:
                changes.append(Change(self._name, at, can))
            emptied, parent = not there and not known.following, at.parent
            if emptied:
                del held[at]
                self._log.drop(at)
            if not by or state < 0 or parent is None:
                break
            at = parent
        if len(changes) > first + 1:
            changes[first:] = reversed(changes[first:])  # a reader must know a block before the next one


class LoggedIndex(PrefixIndex):
    """A prefix index of a medium whose changes are logged. Moves change nothing for readers."""

    def __init__(self, num_groups: int, log: BlockLog, medium: str) -> None:
        super().__init__(num_groups)
        self._medium = log.medium(medium, self.pages)

    def publish(self, group: int, key: PageKey, page: int) -> None:
        """See PrefixIndex."""
        super().publish(group, key, page)
        self._medium.changed(key)

    def forget(self, group: int, page: int) -> None:
        """See PrefixIndex."""
        key = self.keys[group].get(page)
        super().forget(group, page)
        if key is not None:
            self._medium.changed(key)

    def publish_all(self, group: int, keys: Sequence[PageKey], pages: Sequence[int]) -> None:
        """See PrefixIndex."""
        super().publish_all(group, keys, pages)
        for key in keys:
            self._medium.changed(key)

    def forget_all(self, group: int, pages: Sequence[int]) -> None:
        """See PrefixIndex."""
        for page in pages:
            self.forget(group, page)

    def clear(self) -> None:
        """See PrefixIndex."""
        super().clear()
        self._medium.clear()
