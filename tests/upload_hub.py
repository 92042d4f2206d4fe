"""The Hub's upload protocol as huggingface_hub speaks it without Xet, from a server on this machine."""

import hashlib
import json
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants

TOKEN = "hf_this_is_secret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class UploadHub(BaseHTTPRequestHandler):
    """``files`` of the server is what was committed, ``stored`` the large contents by their SHA-256, ``asked`` the requests.

    ``cut`` breaks off so many large uploads in the middle; ``hold`` leaves the n-th and later ones unanswered; ``status``
    is what paths with a word in them are answered with.
    """

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.asked.append((self.command, self.path))
        server.tokens.add(self.headers.get("Authorization"))
        for end, code in server.status.items():
            if end in self.path:
                self.answer({"error": "no"}, code)
                return
        match self.path.rsplit("/", 1)[-1]:
            case "create" if server.private is None:
                asked = json.loads(body)
                server.private = asked["visibility"] == "private"
                self.answer({"url": f"{server.url}/{asked.get('organization') or 'user'}/{asked['name']}"})
            case "create":
                asked = json.loads(body)
                self.answer({"url": f"{server.url}/{asked.get('organization') or 'user'}/{asked['name']}"}, 409)
            case "validate-yaml":
                server.cards.append(json.loads(body)["content"])
                self.answer({"warnings": [], "errors": []})
            case "main" if "/preupload/" in self.path:
                self.answer({"files": [self.mode(one) for one in json.loads(body)["files"]]})
            case "batch":
                self.answer({"transfer": "basic", "objects": [self.action(one) for one in json.loads(body)["objects"]]})
            case "main":
                self.commit(body)

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append((self.command, self.path))
        if server.private is None:
            self.answer({"error": "Repository not found"}, 404)
            return
        self.answer({"id": "user/run", "sha": COMMIT, "private": server.private, "siblings": [], "tags": []})

    def do_PUT(self) -> None:
        server: Any = self.server
        server.asked.append((self.command, self.path))
        size = int(self.headers["Content-Length"])
        if server.cut:
            server.cut -= 1
            self.rfile.read(size // 2)
            self.close_connection = True
            self.connection.close()
            return
        content = self.rfile.read(size)
        with server.lock:
            if server.hold and len(server.stored) >= server.hold - 1:
                server.over.wait()  # its client is killed meanwhile
                return
            server.stored[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def mode(self, one: dict[str, Any]) -> dict[str, Any]:
        server: Any = self.server
        large = one["path"].endswith((".safetensors", ".mp4"))
        there = server.files.get(one["path"])
        oid = None if there is None else hashlib.sha256(there).hexdigest() if large else git_hash(there)
        return {"path": one["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def action(self, one: dict[str, Any]) -> dict[str, Any]:
        server: Any = self.server
        if one["oid"] in server.stored:
            return one
        return one | {"actions": {"upload": {"href": f"{server.url}/large/{one['oid']}"}}}

    def commit(self, body: bytes) -> None:
        server: Any = self.server
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                server.files[value["path"]] = b64decode(value["content"])
            if line["key"] == "lfsFile":
                server.files[value["path"]] = server.stored[value["oid"]]
        self.answer({"commitUrl": f"{server.url}/user/run/commit/{COMMIT}", "commitOid": COMMIT})

    def answer(self, content: Any, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def upload_hub(patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A running server, which this process takes for the Hub; ``url`` is where."""
    with ThreadingHTTPServer(("127.0.0.1", 0), UploadHub) as running:
        server: Any = running
        server.files, server.stored, server.asked, server.cards, server.tokens = {}, {}, [], [], set()
        server.cut, server.status, server.private, server.hold = 0, {}, None, 0
        server.lock, server.over = threading.Lock(), threading.Event()
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.over.set()
        server.shutdown()
