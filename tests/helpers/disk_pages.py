"""Pages whose bytes follow from their keys, so that any process can tell a right one; and a program that writes them until it is killed.

    python -m helpers.disk_pages DIRECTORY NAME FIRST LAST MAX_BYTES [LIMIT]

It prints a line for each page that is written. LIMIT is the size that its files may have, which is how a full disk looks.
"""

from __future__ import annotations

import hashlib
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from helpers.patience import LONG, until
from pagerunner.tiers.disk import DiskStore
from pagerunner.tiers.stores import PageStore

OF = b"f" * 32
SIZES = (6000, 100)  # bytes of a page of either group


def key_of(number: int) -> bytes:
    """The key of a page."""
    return hashlib.sha256(b"%d" % number).digest()


def page_of(number: int, group: int = 0) -> bytes:
    """What the page holds."""
    seed = hashlib.sha256(b"%d %d" % (number, group)).digest()
    return (seed * (SIZES[group] // len(seed) + 1))[: SIZES[group]]


def opened(root: Path, *, max_bytes: int = 4 << 20, fingerprint: bytes = OF, rate: float | None = 1e9) -> DiskStore:
    """A store that has looked through its directory."""
    store = DiskStore(root, fingerprint, max_bytes=max_bytes, largest_page=max(SIZES), read_threads=2, rate=rate)
    until(store.ready.is_set)
    return store


def outcomes(store: PageStore) -> list[bool]:
    """Those of the one number that is under way."""
    deadline = time.monotonic() + LONG
    while not (found := store.ended()) and time.monotonic() < deadline:
        time.sleep(0.001)
    [(_, well)] = found
    return well


def write(store: PageStore, numbers: Sequence[int], group: int = 0) -> list[bool]:
    """Write the pages with these numbers."""
    store.write(1, [(group, key_of(number), memoryview(page_of(number, group))) for number in numbers])
    return outcomes(store)


def read(store: PageStore, numbers: Sequence[int], group: int = 0) -> list[bool]:
    """Read these pages. Which of them were read well. Fails if one of those isn't what was written."""
    places = [memoryview(bytearray(SIZES[group])) for _ in numbers]
    store.read(2, [(group, key_of(number), place) for number, place in zip(numbers, places, strict=True)])
    well = outcomes(store)
    for number, place, good in zip(numbers, places, well, strict=True):
        assert not good or place == page_of(number, group), f"page {number} is another one"
    return well


def found(store: PageStore, numbers: Sequence[int], group: int = 0) -> list[int]:
    """Those of the pages that the store finds."""
    there = store.find(group, [key_of(number) for number in numbers])
    return [number for number, one in zip(numbers, there, strict=True) if one]


def files(root: Path, ending: str = "") -> list[Path]:
    """The tier's files below a root, in the order of their age."""
    return sorted(path for path in (root / "pagerunner-pages").iterdir() if path.name.endswith(ending or ".pages"))


def crashed(root: Path, to: Path) -> Path:
    """What is left if the engine ends now: its files, without whatever it would do at its end."""
    shutil.copytree(root, to)
    return to


def main(root: str, first: str, last: str, max_bytes: str, limit: str = "") -> None:
    """Write pages one after another, and read each tenth of them again."""
    store = opened(Path(root), max_bytes=int(max_bytes))
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    for number in range(int(first), int(last)):
        well = write(store, [number])[0]
        print(number, int(well), flush=True)
        if number % 10 == 9:
            read(store, found(store, range(int(first), number)))
    store.close()
    print("end", store.stats().read_only or "well", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
