"""The few answers of the Hugging Face Hub that models and datasets ask for, from a server on this machine."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """``repos`` of the server are files by repository; ``asked`` what was asked for; ``cut`` breaks off once, ``broken``
    always. The repository rejected does not take the token, and gated refuses its files."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append((self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        parts = self.path.split("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        start = 2 if api else int(parts[0] == "datasets")
        kind, rest = "".join(parts[start + 1 : start + 2]), parts[start + 2 :]
        if kind == "rejected" or (kind == "gated" and not api):
            code, name = (401, "Unauthorized") if kind == "rejected" else (403, "GatedRepo")
            self.answer(code, b'{"error": "Invalid credentials in Authorization header"}', {"X-Error-Code": name})
        elif kind not in server.repos:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest[-1:] == ["nope"]:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "tree" in rest:
            rows = [row("path", *file) | {"type": "file"} for file in server.repos[kind].items()]
            self.answer(200, json.dumps(rows).encode())
        elif api:
            siblings = [row("rfilename", *file) for file in server.repos[kind].items()]
            about = {"id": f"user/{kind}", "sha": COMMIT, "siblings": siblings, "tags": ["license:apache-2.0"]}
            self.answer(200, json.dumps(about).encode())
        else:
            self.send("/".join(rest[2:]), server.repos[kind]["/".join(rest[2:])])

    do_HEAD = do_GET

    def send(self, name: str, content: bytes) -> None:
        server: Any = self.server
        if name in server.broken and self.command == "GET":
            self.answer(403, b"")
            return
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        cut = name in server.cut and self.command == "GET"
        if cut:
            server.cut.remove(name)
        self.answer(206 if start else 200, content[start:], headers, cut=len(content) // 2 if cut else None)

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""


def etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def row(key: str, name: str, content: bytes) -> dict[str, Any]:
    size = len(content)
    lfs = {"oid": etag(content), "sha256": etag(content), "size": size, "pointerSize": 1}
    return {key: name, "size": size, "oid": "0" * 40, "blobId": "0" * 40, "lfs": lfs}


@contextmanager
def hub_of(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[Any]:
    """A running server; ``url`` is where."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as running:
        server: Any = running
        server.repos, server.asked, server.cut, server.broken = repos, [], set(), set()
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
