"""A server that never finishes its answer."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BEGINNINGS = {
    "headers": b"HTTP/1.1 200 OK\r\nX-Long: ",
    "body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n",
    "silent": b"",
}


@contextmanager
def dripping(where: str) -> Iterator[str]:
    """Serve answers of which a byte comes each tenth of a second, for a block.

    Args:
        where: "headers" or "body", what drips; or "silent".

    Yields:
        The address.
    """
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(1 << 16)
            connection.sendall(BEGINNINGS[where])
            while not over.wait(0.1):
                if where != "silent":
                    connection.sendall(b"x")

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.close()
