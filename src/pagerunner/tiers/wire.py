"""The wire between engines: messages of fixed schemas over TCP, pages as bare bytes behind them, and a deadline for every wait.

A message is its length in 4 bytes (little-endian) and msgpack. Both sides prove first that they know one secret, and only then say anything else:

    client              server
    Hello       ->
                <-      Challenge
    Proof       ->                      HMAC-SHA256 of both nonces and the server's address
    Open        ->                      what the client's pages look like, field by field
                <-      Welcome, or Refused with the fields that differ

Half of a client's nonce is a proof, too: a server with too many clients closes those without it first. A client that hasn't one is served all the same.

Open and all that follows is sealed by keys made of the secret and the nonces, one for each direction: 16 bytes behind each message. Pages have
their checksums in such a message. So who stands between two engines, or relays what they prove, can't change a message, repeat one or put a page in.

Then the client asks and the server answers, one thing at a time:

    List        ->
                <-      Listed          what a loan holds
    Pull        ->
                <-      Sending         which pages the loan has, then their bytes
                <-      Sent            whether they were still lent at the end, and their checksums
    Locate      ->
                <-      Located         where they lie in the server's memory, for a client that reads it by itself (NIXL)
    Check       ->
                <-      Sent            the same, after it has
    Renew, Release ->
                <-      Done

Bytes aren't encrypted: an engine listens on loopback unless it is told otherwise, and other networks have to be private ones.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pagerunner.errors import ConfigError

VERSION = 2
MAX_GREETING = 256  # bytes of a message before the other side is known
MAX_MESSAGE = 1 << 21
MAX_PAGES = 8_192  # of one message
LONGEST_REASON = 1_024
NONCE, SEAL = 32, 16
LOOPBACK = ("127.0.0.0/8", "::1")

Key = Annotated[bytes, Meta(min_length=1, max_length=64)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Nonce = Annotated[bytes, Meta(min_length=NONCE, max_length=NONCE)]
Group = Annotated[int, Meta(ge=0, lt=1 << 16)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
Text = Annotated[str, Meta(max_length=1_024)]
Fields = Annotated[dict[Text, Text], Meta(max_length=256)]
Name = tuple[Group, Key]
Names = Annotated[list[Name], Meta(max_length=MAX_PAGES)]


class WireError(Exception):
    """The other side is gone, late, or doesn't speak as agreed. The connection is of no more use. `late`: a deadline has passed."""

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """What all messages are."""


class Hello(Message, frozen=True):
    """A client begins."""

    magic: Annotated[str, Meta(max_length=16)]
    version: Annotated[int, Meta(ge=0, lt=1 << 16)]
    nonce: Nonce


class Challenge(Message, frozen=True):
    """The server's nonce, and its proof that it knows the secret."""

    nonce: Nonce
    proof: Nonce


class Proof(Message, frozen=True):
    """The client's proof."""

    proof: Nonce


class Open(Message, frozen=True):
    """What the client's pages look like. Only an engine with equal fields may exchange pages with it."""

    fields: Fields


class Welcome(Message, frozen=True):
    """The server's pages look the same. `boot` is another one after each start of the server, and after its pages were emptied."""

    boot: Token


class Refused(Message, frozen=True):
    """The server closes the connection, and says why."""

    reason: Text


class List(Message, frozen=True):
    """Which pages does this loan hold, from number `start` on?"""

    token: Token
    start: Count = 0


class Listed(Message, frozen=True):
    """Pages of a loan, how many it has in all (0: there is no such loan any more), and after how many seconds it ends if it isn't renewed."""

    pages: Names
    total: Count
    seconds: Annotated[float, Meta(ge=0, le=1e6)]


class Pull(Message, frozen=True):
    """Send these pages of a loan, of so many bytes each."""

    token: Token
    pages: Annotated[list[tuple[Group, Key, Annotated[int, Meta(ge=0, lt=1 << 40)]]], Meta(max_length=MAX_PAGES)]


class Sending(Message, frozen=True):
    """Which of the pages the loan has, with as many bytes. They follow this message."""

    there: Annotated[list[bool], Meta(max_length=MAX_PAGES)]


class Sent(Message, frozen=True):
    """After the last byte: whether the loan still stood, and the checksum of each page that was sent."""

    held: bool
    sums: Annotated[list[Annotated[bytes, Meta(min_length=32, max_length=32)]], Meta(max_length=MAX_PAGES)]


class Locate(Pull, frozen=True):
    """Where do these pages of a loan lie?"""


class Located(Message, frozen=True):
    """Addresses, 0 of a page that the loan hasn't, and what NIXL needs to know of this engine; b"" if it has no NIXL."""

    agent: Annotated[bytes, Meta(max_length=1 << 16)]
    addresses: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 62)]], Meta(max_length=MAX_PAGES)]


class Check(Message, frozen=True):
    """These pages of a loan were read. Are they still lent, and what are their checksums?"""

    token: Token
    pages: Names


class Renew(Message, frozen=True):
    """Let the loan last as long again from now on."""

    token: Token


class Release(Message, frozen=True):
    """The loan isn't needed any more."""

    token: Token


class Done(Message, frozen=True):
    """Whether there was such a loan."""

    well: bool


Request = List | Pull | Locate | Check | Renew | Release
"""What a client asks for."""
Kind = TypeVar("Kind")
_encode = msgspec.msgpack.Encoder().encode


def checksum(page: memoryview) -> bytes:
    """Nobody finds another page with the same one, as he would with a CRC."""
    return hashlib.sha256(page).digest()


class _Seal:
    """Seals the messages of one direction, with their numbers, so that none can be left out or repeated."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def of(self, data: bytes | bytearray) -> bytes:
        self._number += 1
        return hashlib.blake2b(data, digest_size=SEAL, key=self._key, salt=self._number.to_bytes(16, "little")).digest()


class Line:
    """One connection. Every call ends by its deadline, a time of `time.monotonic`, or raises WireError."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._own: _Seal | None = None
        self._other: _Seal | None = None
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connecting(cls, address: tuple[str, int]) -> Line:
        """One that begins to connect; see `connected`."""
        try:
            line = cls(sock := socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET))
            sock.setblocking(False)
            if (code := sock.connect_ex(address)) not in (0, errno.EINPROGRESS):
                line.close()
                raise OSError(code, os.strerror(code))
        except OSError as error:
            raise WireError(f"can't be reached ({error})", late=True) from None
        return line

    def connected(self, deadline: float) -> None:
        """Wait until it is connected."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        poll.poll(max(1000 * (deadline - time.monotonic()), 0))
        try:
            self._sock.getpeername()
        except OSError:
            reason = os.strerror(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or errno.ETIMEDOUT)
            raise WireError(f"can't be reached ({reason})", late=True) from None
        self._sock.setblocking(True)

    def seal(self, own: bytes, other: bytes) -> None:
        """Seal all messages from now on: those sent by one key, those received by the other one."""
        self._own, self._other = _Seal(own), _Seal(other)

    def send(self, message: Message, deadline: float) -> None:
        """One message."""
        data = _encode(message)
        self.send_bytes(
            len(data).to_bytes(4, "little") + data + (self._own.of(data) if self._own is not None else b""), deadline
        )

    def send_bytes(self, data: bytes | memoryview, deadline: float) -> None:
        """Bytes as they are."""
        view, sent = memoryview(data), 0
        try:
            while sent < len(view):
                self._limit(socket.SO_SNDTIMEO, deadline)
                sent += self._sock.send(view[sent:])
        except BlockingIOError:
            raise WireError("takes its bytes too slowly", late=True) from None
        except OSError as error:
            raise WireError(f"is gone ({error})") from None

    def receive(self, kind: type[Kind], deadline: float, limit: int = MAX_MESSAGE) -> Kind:
        """One message of this type, or of one of these. A Refused that isn't among them raises WireError with the reason."""
        head = bytearray(4)
        self.receive_into(memoryview(head), deadline)
        size = int.from_bytes(head, "little")
        if size > limit:
            raise WireError(f"has announced a message of {size:,} bytes, of at most {limit:,}")
        data = bytearray(size)
        self.receive_into(memoryview(data), deadline)
        if self._other is not None:
            self.receive_into(memoryview(seal := bytearray(SEAL)), deadline)
            if not hmac.compare_digest(seal, self._other.of(data)):
                raise WireError("has sent a message that was changed on its way")
        try:
            found = _DECODERS[kind].decode(data)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise WireError(f"has sent what is no message here: {str(error)[:200]}") from None
        if isinstance(found, Refused):
            reason = "".join(
                char if char.isprintable() else " " for char in found.reason[:LONGEST_REASON]
            )  # for the log
            raise WireError(f"refuses: {reason}")
        return found  # type: ignore[no-any-return]

    def peek(self) -> bytes:
        """What has come of a first message. It stays there to be received."""
        with contextlib.suppress(OSError):
            return self._sock.recv(4 + MAX_GREETING, socket.MSG_PEEK | socket.MSG_DONTWAIT)[4:]
        return b""

    def receive_into(self, view: memoryview, deadline: float) -> None:
        """Exactly as many bytes as `view` has, which nothing writes to afterwards."""
        got, size = 0, len(view)
        try:
            while got < size:
                self._limit(socket.SO_RCVTIMEO, deadline)
                if not (count := self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)):
                    raise WireError("has closed the connection")
                got += count
        except BlockingIOError:
            raise WireError(f"is too slow: {got:,} of {size:,} bytes have come in time", late=True) from None
        except OSError as error:
            raise WireError(f"is gone ({error})") from None

    def _limit(self, option: int, deadline: float) -> None:
        """Let a call wait until the deadline. The kernel keeps the time, so a page takes one call: Python's own timeouts need three for each piece."""
        if (left := int(1e6 * (deadline - time.monotonic()))) <= 0:
            raise BlockingIOError
        self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(left, 1_000_000)))

    def stop(self) -> None:
        """Let the thread that uses it, and may wait in it, meet a WireError. Any thread may call this."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The thread that uses it has done so."""
        self._sock.close()


_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind | Refused)
    for kind in (Hello, Challenge, Proof, Open, Welcome, Request, Listed, Sending, Sent, Located, Done)
}
"""Made once, when this is imported: threads that work out the fields of a type at the same time can end the process."""


def client_nonce(secret: bytes, at: tuple[str, int], fresh: bytes) -> bytes:
    """Random bytes, and as many that only who knows the secret can make of them."""
    return fresh + _Keys(secret, at, fresh).of(b"client begins")[: NONCE - len(fresh)]


def begins_well(begin: bytes, secret: bytes, at: tuple[str, int]) -> bool:
    """Whether these bytes are a Hello of a client that knows the secret. Who has heard one can repeat it, but not go on."""
    try:
        hello = _DECODERS[Hello].decode(begin)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False
    nonce = hello.nonce if isinstance(hello, Hello) else b""
    return hmac.compare_digest(nonce, client_nonce(secret, at, nonce[: NONCE // 2]))


def greet(line: Line, secret: bytes, at: tuple[str, int], fields: Mapping[str, str], deadline: float) -> bytes:
    """The client's part of the handshake with the server that listens `at` this address. Returns the server's boot id."""
    nonce = client_nonce(secret, at, secrets.token_bytes(NONCE // 2))
    line.send(Hello("pagerunner-kv", VERSION, nonce), deadline)
    challenge = line.receive(Challenge, deadline, MAX_GREETING)
    key = _Keys(secret, at, nonce + challenge.nonce)
    if not hmac.compare_digest(challenge.proof, key.of(b"server")):
        raise WireError("doesn't know the secret, or has another kv_ip and kv_port than those dialled")
    line.send(Proof(key.of(b"client")), deadline)
    line.seal(key.of(b"from client"), key.of(b"from server"))
    line.send(Open(dict(fields)), deadline)
    return line.receive(Welcome, deadline).boot


def welcome(
    line: Line,
    secret: bytes,
    at: tuple[str, int],
    fields: Mapping[str, str],
    boot: bytes,
    deadline: float,
    first: float = math.inf,
) -> None:
    """The server's part, which listens `at` this address. Raises WireError about a client that can't be served.

    The client's first message has to come by `first`.
    """
    hello = line.receive(Hello, min(first, deadline), MAX_GREETING)
    if hello.magic != "pagerunner-kv":
        raise WireError("has begun with another protocol")
    if hello.version != VERSION:
        reason = f"it speaks version {VERSION} of the protocol, and this engine version {hello.version}"
        line.send(Refused(reason), deadline)
        raise WireError(f"speaks version {hello.version} of the protocol, and this engine version {VERSION}")
    nonce = secrets.token_bytes(NONCE)
    key = _Keys(secret, at, hello.nonce + nonce)
    line.send(Challenge(nonce, key.of(b"server")), deadline)
    proof = line.receive(Proof, deadline, MAX_GREETING)
    if not hmac.compare_digest(proof.proof, key.of(b"client")):
        raise WireError("doesn't know the secret, or has dialled another address")
    line.seal(key.of(b"from server"), key.of(b"from client"))
    other = line.receive(Open, deadline).fields
    if reason := differences(fields, other):
        line.send(Refused(f"its pages are others: {differences(other, fields)}"[:LONGEST_REASON]), deadline)
        raise WireError(f"has other pages: {reason}")
    line.send(Welcome(boot), deadline)


def differences(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The fields that differ, with both values: "kv_cache_dtype is bfloat16 there and fp8_e4m3 here"; "" if none does."""
    names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    return "; ".join(
        f"{name} is {other.get(name, 'absent')} there and {own.get(name, 'absent')} here" for name in names
    )


class _Keys:
    """Proofs and keys of one connection. They are of the address too: a stranger elsewhere who relays the handshake proves nothing."""

    def __init__(self, secret: bytes, at: tuple[str, int], nonces: bytes) -> None:
        self._secret, self._of = secret, nonces + f"{ipaddress.ip_address(at[0])} {at[1]}".encode()

    def of(self, use: bytes) -> bytes:
        return hmac.digest(self._secret, use.ljust(16, b"\0") + self._of, hashlib.sha256)


def place(entry: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, int]:
    """The network of an entry of `peers`, and its port, 0 for any. Raises ConfigError for what is none."""
    host, port = entry, "0"
    if entry.count(":") == 1 or "]:" in entry:
        host, _, port = entry.rpartition(":")
    try:
        return ipaddress.ip_network(host.strip("[]")), int(port)
    except ValueError:
        raise ConfigError(
            f'kv_connector_extra_config: peers holds {entry!r}; an entry is an IP address, one with a port ("10.0.0.7:14579"), or a network.'
        ) from None
