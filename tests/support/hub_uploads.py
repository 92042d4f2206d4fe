"""The Hub's upload protocol as huggingface_hub speaks it without Xet, from a server on
this machine.
"""

import hashlib
import json
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from huggingface_hub import constants

from tests.support.http_server import Handler, serving

TOKEN = "hf_this_is_secret"
MODES = ("lfs", "regular")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class UploadHub(Handler):
    """``files`` of the server is what was committed, ``stored`` the large contents by
    their SHA-256, ``asked`` the requests.

    ``cut`` breaks off so many large uploads in the middle; ``hold`` leaves the n-th and
    later ones unanswered; ``status`` is what paths with a word in them are answered
    with.
    """

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        hub, body = self.server, self.body()
        hub.asked.append((self.command, self.path, self.headers["Authorization"]))
        if code := next(
            (code for word, code in hub.status.items() if word in self.path), None
        ):
            self.give({"error": "no"}, code)
        elif self.path.endswith("/repos/create"):
            asked, there = json.loads(body), hub.private is not None
            hub.private = hub.private if there else asked["visibility"] == "private"
            self.give(
                {"url": f"{hub.url}/{asked['organization'] or 'user'}/{asked['name']}"},
                409 if there else 200,
            )
        elif "/preupload/" in self.path:
            files = [
                {"path": one["path"], "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self.give(
                {
                    "files": [
                        one | {"uploadMode": MODES[one["path"][-2:] == "md"]}
                        for one in files
                    ]
                }
            )
        elif self.path.endswith("/batch"):
            objects = json.loads(body)["objects"]
            for one in (one for one in objects if one["oid"] not in hub.stored):
                one["actions"] = {"upload": {"href": f"{hub.url}/{one['oid']}"}}
            self.give({"objects": objects})
        else:  # of validate-yaml too, which is not read here
            lines = (
                [json.loads(line) for line in body.splitlines()]
                if "/commit/" in self.path
                else []
            )
            for value in (
                line["value"] for line in lines if line["key"] in ("file", "lfsFile")
            ):
                content = (
                    b64decode(value["content"])
                    if "content" in value
                    else hub.stored[value["oid"]]
                )
                hub.files[value["path"]] = content
            for line in lines:
                if line["key"] == "deletedFile":
                    del hub.files[line["value"]["path"]]
            self.give(
                {
                    "commitUrl": f"{hub.url}/user/run/commit/{COMMIT}",
                    "commitOid": COMMIT,
                }
            )

    def do_GET(self) -> None:
        about = {
            "id": "user/run",
            "sha": COMMIT,
            "private": self.server.private,
            "siblings": [],
            "tags": [],
        }
        self.give(
            about,
            self.server.status.get("", 404 if self.server.private is None else 200),
        )

    def do_PUT(self) -> None:
        hub, size = self.server, int(self.headers["Content-Length"])
        hub.asked.append((self.command, self.path, ""))
        with hub.lock:
            cut, hub.cut = hub.cut > 0, hub.cut - 1
            content = self.rfile.read(size // 2 if cut else size)
            if hub.hold and len(hub.stored) >= hub.hold - 1:
                hub.over.wait()  # its client is killed meanwhile
            if cut or hub.over.is_set():
                self.close_connection = True
                return
            hub.stored[hashlib.sha256(content).hexdigest()] = content
        self.give({})

    def give(self, content: Any, code: int = 200) -> None:
        self.answer(code, json.dumps(content).encode())


@contextmanager
def upload_hub(patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A running server, which this process takes for the Hub; ``url`` is where."""
    facts: dict[str, Any] = {
        "files": {},
        "stored": {},
        "asked": [],
        "status": {},
        "private": None,
        "cut": 0,
        "hold": 0,
    }
    with serving(
        UploadHub, **facts, lock=threading.Lock(), over=threading.Event()
    ) as hub:
        patch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
        for name, value in {
            "ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            patch.setattr(constants, name, value)
        patch.setenv("HF_TOKEN", TOKEN)
        yield hub
        hub.over.set()
