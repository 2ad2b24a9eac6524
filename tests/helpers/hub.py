"""A stand-in for the Hugging Face Hub on loopback: what `huggingface_hub` asks of it for downloads."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """The repositories by name: their files by path. What was asked for is in `requests` as (method, path, headers).

    `gated` repositories need `token`; `private` ones are hidden without it. A file in `cut` breaks off after so many bytes,
    once, and with `dies` nothing is answered after it. `seconds` is what weights take. With `status` everything is answered with that.
    """

    repositories: dict[str, dict[str, bytes]]
    token: str = "hf_right"
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    dies: bool = False
    seconds: float = 0.0
    status: int = 0
    url: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def downloaded(self) -> list[str]:
        """Names of the files whose contents were asked for."""
        paths = [path for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]
        return sorted({path.partition("/resolve/")[2].partition("/")[2] for path in paths})


def files_of(directory: Path) -> dict[str, bytes]:
    """A directory as a repository's files."""
    return {
        str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()
    }


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, dict(self.headers)))
        if self.hub.status:
            return self._send(self.hub.status, b"trouble", {}, body)
        listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)(?:/.*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = listed or file
        if match is None:
            return self._send(404, b"", {}, body)
        name = match[1]
        allowed = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if name not in self.hub.repositories or (name in self.hub.private and not allowed):
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"}, body)
        files = self.hub.repositories[name]
        if (listed[3] if listed else match[2]) not in ("main", "v1", COMMIT):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        if listed and listed[2] == "revision":
            siblings = [{"rfilename": one} for one in files]
            found = {"id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
            return self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, body)
        if listed:
            rows = [
                {"type": "file", "path": one, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for one, data in files.items()
            ]
            return self._send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"}, body)
        if name in self.hub.gated and not allowed:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        if match[3] not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
        self._send_file(match[3], files[match[3]], body)

    def _send_file(self, name: str, data: bytes, body: bool) -> None:
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, begin = 200, 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            begin = int(asked[1])
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        part = data[begin:]
        if body and name in self.hub.cut:
            stop = self.hub.cut.pop(name)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(part))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(part[:stop])
            self.wfile.flush()
            self.hub.status = 503 if self.hub.dies else 0
            self.close_connection = True
            self.connection.shutdown(2)
            return
        if body and self.hub.seconds and name.endswith(".safetensors"):
            return self._send_slowly(part, headers)
        self._send(status, part, headers, body)

    def _send_slowly(self, data: bytes, headers: dict[str, str]) -> None:
        self._send(200, b"", {**headers, "Content-Length": str(len(data))}, False)
        piece = max(len(data) // 200, 1)
        for begin in range(0, len(data), piece):
            try:
                self.wfile.write(data[begin : begin + piece])
                self.wfile.flush()
            except OSError:
                return  # the client has left
            time.sleep(self.hub.seconds / 200)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free port of loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
