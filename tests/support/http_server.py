"""An HTTP server on this machine, for a block."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers requests; what it knows are attributes of its ``server``."""

    server: Any

    def body(self) -> bytes:
        """The content of the request."""
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(
        self,
        code: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        """Send an answer; ``cut``: of its body no more than so many bytes."""
        self.send_response(code)
        for name, value in {
            **(headers or {}),
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""


@contextmanager
def serving(handler: type[Handler], **state: Any) -> Iterator[Any]:
    """A running server with these attributes; ``url`` is where."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        vars(server).update(state, url=f"http://127.0.0.1:{server.server_port}")
        polling = {"poll_interval": 0.02}  # a shutdown waits for the end of one
        threading.Thread(
            target=server.serve_forever, kwargs=polling, daemon=True
        ).start()
        yield server
        server.shutdown()
