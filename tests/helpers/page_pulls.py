"""Pages lent in this process, and pulled from there."""

from __future__ import annotations

from helpers.page_owner import FIELDS, SECRET, content, key
from helpers.patience import until
from pagerunner.tiers.loans import Loans
from pagerunner.tiers.page_server import PageServer
from pagerunner.tiers.peers import PeerStore

PAGES, SIZE = 12, 4_096
LENT = {(0, key(number)): memoryview(content(number, SIZE)) for number in range(PAGES)}


class Owner:
    """A server in this process."""

    def __init__(self) -> None:
        self.ends: list[tuple[bytes, str]] = []
        self.loans = Loans(lambda token, why: self.ends.append((token, why)))
        self.server = PageServer(self.loans, SECRET)
        self.server.open(FIELDS)
        self.port = self.server.address[1]


def news(store: PeerStore, number: int) -> str:
    """What becomes of a visit."""
    found: list[tuple[int, str]] = []
    until(lambda: found.extend(store.visited()) or any(at == number for at, _ in found))
    return next(text for at, text in found if at == number)


def read(store: PeerStore, number: int, names: list[tuple[int, bytes]], size: int = SIZE) -> list[bytes | None]:
    """The pages, None for those that weren't read well."""
    room = [bytearray(b"\xee" * size) for _ in names]
    store.read(number, [(group, name, memoryview(view)) for (group, name), view in zip(names, room, strict=True)])
    ended: list[tuple[int, list[bool]]] = []
    until(lambda: ended.extend(store.ended()) or ended)
    [(what, well)] = ended
    assert what == number
    return [bytes(view) if right else None for view, right in zip(room, well, strict=True)]


def pull(store: PeerStore, owner: Owner, port: int = 0) -> list[bytes | None] | str:
    """Visit a new loan and read all of it. Returns why the visit has failed, if it has."""
    token = owner.loans.lend(LENT, 30)
    owner.server._port = port or owner.port  # what it proves: a test may stand between
    store.visit(1, owner.server.address, token, owner.server.boot)
    reason = news(store, 1)
    found = reason or read(store, 1, list(LENT))
    store.leave(1)
    return found


def check(pages: list[bytes | None] | str) -> int:
    """How many pages came; those that did are right."""
    if isinstance(pages, str):
        return 0
    for number, page in enumerate(pages):
        assert page in (None, content(number, SIZE))
    return sum(page is not None for page in pages)
