"""What a look-up asks of several memories, beside the same asked key by key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagerunner.memory.prefix import PrefixChain
from pagerunner.memory.rules import RecurrentRule
from pagerunner.tiers.lookup import split, together

KEY = st.integers(0, 30).map(lambda number: bytes([number]))
KEYS = st.lists(KEY, unique=True, max_size=24)
MEMORY = st.dictionaries(KEY, st.integers(0, 9), max_size=24)


@given(keys=st.tuples(KEYS, KEYS), first=st.tuples(MEMORY, MEMORY), second=st.tuples(MEMORY, MEMORY))
def test_several_memories_are_asked_as_one(
    keys: tuple[list[bytes], ...], first: tuple[dict[bytes, int], ...], second: tuple[dict[bytes, int], ...]
) -> None:
    there, lacking = split(keys, together(first, second))
    for some, one, two, found, gone in zip(keys, first, second, there, lacking, strict=True):
        assert found == [key for key in some if key in one or key in two]
        assert gone == [key for key in some if key not in one and key not in two]


@given(keys=KEYS, first=MEMORY, second=MEMORY, limit=st.integers(0, 500))
def test_the_last_snapshot_of_several_memories_is_found(
    keys: list[bytes], first: dict[bytes, int], second: dict[bytes, int], limit: int
) -> None:
    chain = PrefixChain(b"")
    chain.hashes += keys
    (held,) = together([first], [second])
    units = [unit for unit in range(1, min(limit // 16, len(keys)) + 1) if keys[unit - 1] in {**first, **second}]
    assert RecurrentRule().longest_hit(held, chain, limit) == 16 * max(units, default=0)
