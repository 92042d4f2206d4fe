"""An S3 server on this machine (moto), whose requests are counted and may be slow."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import boto3
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


class _QuietHandler(MotoRequestHandler):
    # Answers go out at once: the answer's head and body would else wait for each other.
    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"

    def log_request(self, *_: Any) -> None:
        """Keep quiet."""


class CountingServer(ThreadedMotoServer):
    """moto's server; each request passes ``hook`` first."""

    def __init__(self, hook: Callable[[str, str], str | None]) -> None:
        super().__init__(ip_address="127.0.0.1", port=0, verbose=False)
        self._hook = hook

    def _server_entry(self) -> None:
        application = DomainDispatcherApplication(create_backend_app)

        def counted(environment: Any, start_response: Any) -> Iterable[bytes]:
            path = unquote(environment["PATH_INFO"])
            status = self._hook(environment["REQUEST_METHOD"], path)
            if status is not None:
                start_response(status, [("Content-Length", "0")])
                return [b""]
            answer: Iterable[bytes] = application(environment, start_response)
            return answer

        self._server = make_server(
            self._ip_address, self._port, counted, True, request_handler=_QuietHandler
        )
        self._server_ready_event.set()
        self._server.serve_forever(poll_interval=0.02)


@dataclass
class Store:
    """A running object store."""

    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each, since the last ``forget``."""
    latency: float = 0.0
    """Seconds by which each request is answered later."""
    refuse: Callable[[str, str], str | None] | None = None
    """Returns the status of a request by method and path that is not served; or None."""
    most_fetches_at_once: int = 0
    _buckets: int = 0
    _fetches: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def hook(self, method: str, path: str) -> str | None:
        """Count a request; return the status if it is refused."""
        self.requests.append((method, path))
        is_fetch = method == "GET" and path.count("/") > 1
        with self._lock:
            self._fetches += is_fetch
            self.most_fetches_at_once = max(self.most_fetches_at_once, self._fetches)
        if self.latency:
            time.sleep(self.latency)
        with self._lock:
            self._fetches -= is_fetch
        return self.refuse(method, path) if self.refuse else None

    @property
    def client(self) -> Any:
        """A client of it, which is not what videotune uses."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret-of-the-tests",
        )

    def bucket(self) -> str:
        """The name of a new bucket."""
        self._buckets += 1
        name = f"bucket-{os.getpid()}-{self._buckets}"
        self.client.create_bucket(Bucket=name)
        return name

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Store these bytes by their keys."""
        client = self.client
        for key, content in objects.items():
            client.put_object(Bucket=bucket, Key=key, Body=content)

    def put_folder(self, folder: Path, bucket: str, prefix: str) -> str:
        """Store a folder's files below a prefix; the address."""
        self.put(
            bucket,
            {
                f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes()
                for path in sorted(folder.rglob("*"))
                if path.is_file() and ".videotune-cache" not in path.parts
            },
        )
        return f"s3://{bucket}/{prefix}"

    def keys(self, bucket: str, prefix: str = "") -> set[str]:
        """The keys that are there."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=prefix
        )
        return {entry["Key"] for page in pages for entry in page.get("Contents", ())}

    def forget(self) -> None:
        """Count from here on."""
        self.requests.clear()
        self.most_fetches_at_once = 0

    def fetched(self, suffix: str = "") -> list[str]:
        """Paths of the objects that were fetched, without listings."""
        return [
            path
            for method, path in self.requests
            if method == "GET" and path.count("/") > 1 and path.endswith(suffix)
        ]


@contextmanager
def serving_objects() -> Iterator[Store]:
    """An object store for a block."""
    store = Store()
    server = CountingServer(store.hook)
    server.start()
    host, port = server.get_host_and_port()
    store.url = f"http://{host}:{port}"
    try:
        yield store
    finally:
        server.stop()


class LargestSize:
    """Watches a folder in a thread: the most bytes that its files ever had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "LargestSize":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._look()

    def _look(self) -> None:
        self.most = max(self.most, bytes_in(self.folder))


def bytes_in(folder: Path) -> int:
    """Bytes of a folder's files, without what is counted in it."""
    total = 0
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.name != ".total":
            try:
                total += path.stat().st_size
            except FileNotFoundError:  # it went in the meantime
                continue
    return total
