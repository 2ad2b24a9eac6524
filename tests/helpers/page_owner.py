"""An engine that lends pages, in a process of its own: prints its port, its boot id, and tokens of as many loans as asked for.

    python page_owner.py PORT LOANS PAGES PAGE_BYTES SECONDS

Page i of a loan has the key `key(i)` and the bytes `content(i, size)`. Lines on standard input: "lend" prints another token, "sleep" and
"wake" close and open the server, "loans" prints how many there are.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

SECRET = b"s" * 32
FIELDS = {"kv_cache_dtype": "bfloat16", "page_bytes": "4096"}


def key(number: int) -> bytes:
    """The key of page `number`."""
    return number.to_bytes(32, "big")


def content(number: int, size: int) -> bytes:
    """Its bytes."""
    return random.Random(number).randbytes(size)


def main() -> None:
    """See above."""
    from pagerunner.tiers.loans import Loans
    from pagerunner.tiers.page_server import PageServer

    port, loans, pages, size = map(int, sys.argv[1:5])
    seconds = float(sys.argv[5])
    lent = {(0, key(number)): memoryview(content(number, size)) for number in range(pages)}
    book = Loans(lambda token, why: None)
    server = PageServer(book, SECRET, port=port)
    server.open(FIELDS)
    print(server.address[1], server.boot.hex(), *(book.lend(lent, seconds).hex() for _ in range(loans)), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "lend":
                print(book.lend(lent, seconds).hex(), flush=True)
            case "sleep":
                server.close("sleep")
                print("asleep", flush=True)
            case "wake":
                server.open(FIELDS)
                print(server.boot.hex(), flush=True)
            case "loans":
                print(len(book), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    main()
