"""Send one message to one address, in a process of its own.

It reads a request from its standard input, so that no address is in a process list, and
prints what went wrong; nothing: the message was taken. It ends itself when its time is
over, whether or not the process that started it is still there.
"""

import json
import logging
import os
import re
import sys
import threading
from typing import Any

SECONDS = 20.0
"""Seconds for one message, from the start of the process to the server's answer."""

NOT_AN_ADDRESS = "Apprise does not know this kind of address"


class _Statuses(logging.Handler):
    """Keeps the HTTP statuses in the library's messages, and whether it connected.

    The messages themselves may contain the address.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.problem = "the server did not take the message"

    def emit(self, record: logging.LogRecord) -> None:
        """Remember what a message says of the server."""
        text = record.getMessage()
        status = re.search(r"error=(\d{3})\b", text)
        if status:
            self.problem = f"the server answered {status[1]}"
        elif "onnection error" in text:
            self.problem = "the server cannot be reached"


def send(address: str, title: str, body: str) -> str | None:
    """Send a message, and return what went wrong, without the address."""
    import apprise

    statuses = _Statuses()
    logger = logging.getLogger("apprise")
    logger.addHandler(statuses)
    logger.propagate = False

    services = apprise.Apprise()
    if not services.add(address) or not len(services):
        return NOT_AN_ADDRESS
    is_sent = services.notify(
        body=body, title=title, body_format=apprise.NotifyFormat.TEXT
    )
    return None if is_sent else statuses.problem


def main() -> None:
    """Send the message of the request on standard input."""
    request: dict[str, Any] = json.load(sys.stdin)

    def end() -> None:
        print(f"no answer in {request['seconds']:g} s", flush=True)
        os._exit(1)

    # A server that sends a byte now and then would hold the library for ever.
    timer = threading.Timer(request["seconds"], end)
    timer.daemon = True
    timer.start()

    problem = send(request["address"], request["title"], request["body"])
    if problem:
        print(problem, flush=True)
    # The library's threads may still wait for a server.
    os._exit(1 if problem else 0)
