"""A server on this machine that takes messages as Apprise's ``json://`` sends them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.http_server import Handler, serving


class MessageServer(Handler):
    """``messages`` of the server is what came; ``code`` what it answers.

    With ``silent`` it takes a message and never answers.
    """

    def do_POST(self) -> None:
        server = self.server
        server.messages.append(json.loads(self.body()))
        if server.silent:
            server.over.wait()
            return
        self.answer(server.code, b"{}")


@contextmanager
def message_server(code: int = 200, silent: bool = False) -> Iterator[Any]:
    """A running server; ``address`` is its URL for Apprise."""
    over = threading.Event()
    with serving(
        MessageServer, messages=[], code=code, silent=silent, over=over
    ) as server:
        server.address = f"json://user:secret-word@127.0.0.1:{server.server_port}/x"
        yield server
        over.set()
