"""A stand-in of the Hub that takes uploads and gives the files back.

Unlike ``upload_hub`` it is for other processes: they find it by environment variables.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from huggingface_hub import constants

from tests.support.http_server import serving
from tests.support.hub_downloads import etag, row
from tests.support.hub_uploads import COMMIT, TOKEN, UploadHub


class RunHub(UploadHub):
    """The repository user/run: ``files`` are its files.

    ``swap`` has other bytes for a path than the listing says.
    """

    def do_GET(self) -> None:
        hub = self.server
        path = self.path.split("?")[0]
        code = next(
            (code for word, code in hub.status.items() if word in self.path), None
        )
        if code:
            self.give({"error": "no"}, code)
        elif "/resolve/" in path:
            self.send(path.split("/resolve/")[1].partition("/")[2])
        elif hub.private is None:
            self.give({}, 404)
        else:
            siblings = [row("rfilename", *file) for file in hub.files.items()]
            about = {"id": "user/run", "sha": COMMIT, "private": hub.private}
            self.give(about | {"siblings": siblings, "tags": []})

    do_HEAD = do_GET

    def send(self, name: str) -> None:
        hub = self.server
        if name not in hub.files:
            self.give({}, 404)
            return
        content = hub.swap.get(name, hub.files[name])
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT}
        self.answer(200, content, headers)


@contextmanager
def run_hub(patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A running server, which this process and those it starts take for the Hub."""
    facts: dict[str, Any] = {
        "files": {},
        "stored": {},
        "asked": [],
        "status": {},
        "swap": {},
        "private": None,
        "cut": 0,
        "hold": 0,
    }
    with serving(RunHub, **facts, lock=threading.Lock(), over=threading.Event()) as hub:
        patch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url
            + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            patch.setattr(constants, name, value)
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        patch.setenv("HF_TOKEN", TOKEN)
        yield hub
        hub.over.set()
