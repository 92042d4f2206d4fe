"""The few answers of the Hugging Face Hub that models and datasets ask for, from a
server on this machine.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from tests.support.http_server import Handler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(Handler):
    """``repos`` of the server are files by repository; ``asked`` what was asked for;
    ``cut`` breaks off once, ``broken`` always. The repository rejected does not take
    the token, and gated refuses its files.
    """

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(
            (
                self.command,
                self.path,
                self.headers.get("Range"),
                self.headers.get("Authorization"),
            )
        )
        parts = self.path.split("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        start = 2 if api else int(parts[0] == "datasets")
        kind, rest = "".join(parts[start + 1 : start + 2]), parts[start + 2 :]
        if kind == "rejected" or (kind == "gated" and not api):
            code, name = (
                (401, "Unauthorized") if kind == "rejected" else (403, "GatedRepo")
            )
            self.answer(
                code,
                b'{"error": "Invalid credentials in Authorization header"}',
                {"X-Error-Code": name},
            )
        elif kind not in server.repos:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif rest[-1:] == ["nope"]:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "tree" in rest:
            rows = [
                row("path", *file) | {"type": "file"}
                for file in server.repos[kind].items()
            ]
            self.answer(200, json.dumps(rows).encode())
        elif api:
            siblings = [row("rfilename", *file) for file in server.repos[kind].items()]
            about = {
                "id": f"user/{kind}",
                "sha": COMMIT,
                "siblings": siblings,
                "tags": ["license:apache-2.0"],
            }
            self.answer(200, json.dumps(about).encode())
        else:
            self.send("/".join(rest[2:]), server.repos[kind]["/".join(rest[2:])])

    do_HEAD = do_GET

    def send(self, name: str, content: bytes) -> None:
        server = self.server
        if name in server.broken and self.command == "GET":
            self.answer(403, b"")
            return
        headers = {
            "ETag": f'"{etag(content)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        start = int(
            (self.headers.get("Range") or "bytes=0-")
            .removeprefix("bytes=")
            .partition("-")[0]
        )
        headers |= (
            {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            if start
            else {}
        )
        cut = name in server.cut and self.command == "GET"
        if cut:
            server.cut.remove(name)
        self.answer(
            206 if start else 200,
            content[start:],
            headers,
            cut=len(content) // 2 if cut else None,
        )


def etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def row(key: str, name: str, content: bytes) -> dict[str, Any]:
    size = len(content)
    lfs = {
        "oid": etag(content),
        "sha256": etag(content),
        "size": size,
        "pointerSize": 1,
    }
    return {key: name, "size": size, "oid": "0" * 40, "blobId": "0" * 40, "lfs": lfs}


def hub_of(repos: Mapping[str, Mapping[str, bytes]]) -> AbstractContextManager[Any]:
    """A running server; ``url`` is where."""
    return serving(FakeHub, repos=repos, asked=[], cut=set(), broken=set())
