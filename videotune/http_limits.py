"""Limits of the answers to HTTP requests, as hooks of an httpx client.

A library's timeout counts each read, so that a server which sends a byte now and then
holds it for ever. Here the time counts from the last byte of the request to the last
byte of the answer, headers included.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from videotune.bounds import HUB_SECONDS, MODEL_FILE_BYTES
from videotune.errors import VideotuneError
from videotune.files import size_text
from videotune.lazy import huggingface_hub as hub


class AnswerLimits:
    """Bounds of each answer in seconds and bytes.

    Each request gets a connection of its own, which is cut when its time is over.
    """

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self.seconds = seconds
        self.max_bytes = max_bytes

    @contextmanager
    def attached(self, client: Any) -> Iterator[None]:
        """Limit the answers to an httpx client for the length of a block."""
        hooks = client.event_hooks
        timeout = client.timeout
        client.event_hooks = {
            "request": [*hooks.get("request", ()), self.watch_request],
            "response": [*hooks.get("response", ()), self.limit_response],
        }
        client.timeout = self.seconds
        try:
            yield
        finally:
            client.event_hooks = hooks
            client.timeout = timeout

    def watch_request(self, request: Any) -> None:
        """Begin to watch a request; a hook of httpx."""
        request.headers["connection"] = "close"
        # A compressed answer may be a thousand times larger than what is counted.
        request.headers["accept-encoding"] = "identity"
        watch = _Watch(self.seconds)
        request.extensions = {**request.extensions, "trace": watch.trace}

    def limit_response(self, response: Any) -> None:
        """Count the bytes of an answer while they arrive; a hook of httpx."""
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            response.close()
            raise VideotuneError(
                f"the server's answer is compressed ({encoding[:20]}), which was not asked for"
            )
        response.stream = _counted_stream(response.stream, self.max_bytes)


@contextmanager
def limited_hub() -> Iterator[None]:
    """Limit the answers of the Hub for the length of a block that fetches no file.

    The Hub's library would wait for an answer for ever.
    """
    limits = AnswerLimits(HUB_SECONDS, MODEL_FILE_BYTES)
    with limits.attached(hub.get_session()):
        yield


class _Watch:
    """Cuts the connection of one request when its answer takes too long."""

    def __init__(self, seconds: float) -> None:
        # A silent server is left to the timeout of the client, which asks again.
        self._timer = threading.Timer(seconds + 1.0, self._cut)
        self._timer.daemon = True
        self._stream: Any = None

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Follow the request; httpcore calls it with the name of each event."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._stream = info["return_value"]
        elif event.endswith("send_request_body.complete"):
            self._timer.start()
        elif event.endswith(("response_closed.complete", ".failed")):
            self._timer.cancel()

    def _cut(self) -> None:
        connection = self._stream.get_extra_info("socket") if self._stream else None
        if connection is not None:
            with suppress(OSError):  # it was closed in the meantime
                connection.shutdown(socket.SHUT_RDWR)


def _counted_stream(stream: Any, max_bytes: int) -> Any:
    """Return a byte stream of the same class of httpx that fails beyond a size."""
    stream_class = next(
        base for base in type(stream).__mro__ if base.__name__ == "SyncByteStream"
    )

    class CountedStream(stream_class):  # type: ignore[misc, valid-type]
        """A byte stream that ends with an error beyond a number of bytes."""

        def __iter__(self) -> Iterator[bytes]:
            count = 0
            for chunk in stream:
                count += len(chunk)
                if count > max_bytes:
                    raise VideotuneError(
                        f"the server's answer is larger than {size_text(max_bytes)}"
                    )
                yield chunk

        def close(self) -> None:
            stream.close()

    return CountedStream()
