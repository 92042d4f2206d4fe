"""Who may talk to the studio: the host that it listens on, the password, and pages of other sites that send requests."""

import ipaddress
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from videotune.errors import VideotuneError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SAFE = ("GET", "HEAD", "OPTIONS")
LEAST = 8
"""Letters of a password."""

TRIES, WHILE = 10, 60.0
"""So many wrong passwords from one address within so many seconds, and its next ones are not looked at."""


def is_local(host: str) -> bool:
    """Whether only this computer reaches the host."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(host: str, password: str | None) -> None:
    """VideotuneError where others could come in without a password."""
    if not is_local(host) and not password:
        raise VideotuneError(
            f"--host {host} lets other computers in, and there is no password: set one in the environment variable "
            "VIDEOTUNE_STUDIO_PASSWORD (the name to log in with is studio), or leave --host out"
        )
    if password is not None and len(password) < LEAST:
        raise VideotuneError(f"the password has {len(password)} letters; take at least {LEAST}")


class Guard:
    """Middleware: requests by another name of this computer, or by pages of other sites, are refused.

    The first is how a page elsewhere would read a studio that has no password (its name is made to mean this computer), the
    second how it would change something there.
    """

    def __init__(self, app: App, host: str) -> None:
        self.app, self.host, self.wrong = app, host, WrongPasswords()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass; answer the rest with 403 or 429 and a reason."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        why = refusal(scope, self.host)
        if why is not None and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        elif why is not None:
            await _answer(send, 403, why)
        elif not _is_login(scope):
            await self.app(scope, receive, _with_headers(send))
        elif not self.wrong.begin(scope):
            await _answer(send, 429, f"Too many wrong passwords: wait {WHILE:g} seconds and try again.")
        else:
            await self.app(scope, receive, _with_headers(self.wrong.counting(scope, send)))


class WrongPasswords:
    """When each address has sent a wrong password lately, so that passwords cannot be tried out one after the other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._when: dict[str, list[float]] = {}

    def begin(self, scope: Scope) -> bool:
        """Count a try as wrong before its answer is known, so that many at once are not more; False: it has to wait."""
        now = self._clock()
        self._when = {
            name: late for name, times in self._when.items() if (late := [one for one in times if one > now - WHILE])
        }
        own = self._when.setdefault(_address(scope), [])
        if len(own) < TRIES:
            own.append(now)
            return True
        return False

    def counting(self, scope: Scope, send: Send) -> Send:
        """``send`` that takes the address's tries back where an answer accepts the password."""

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                self._when.pop(_address(scope), None)
            await send(message)

        return sending


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _is_login(scope: Scope) -> bool:
    return scope.get("method") == "POST" and str(scope.get("path", "")).rstrip("/").endswith("/login")


async def _answer(send: Send, status: int, why: str) -> None:
    body = why.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def refusal(scope: Scope, host: str) -> str | None:
    """Why a request is refused, or None where it may pass."""
    headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope.get("headers", [])}
    asked = headers.get("host", "")
    name = urlsplit(f"//{asked}").hostname or ""
    if is_local(host) and not is_local(name):
        return f"This studio answers to this computer alone, not to {name or 'no name'}."
    origin = headers.get("origin")
    if origin is not None and (origin == "null" or urlsplit(origin).netloc.lower() != asked.lower()):
        return "A page of another site may not ask this studio for anything."
    changes = scope["type"] == "websocket" or scope.get("method") not in SAFE
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and (
        changes or headers.get("sec-fetch-mode") != "navigate"
    ):
        return "A page of another site may not ask this studio for anything."
    return None


def _with_headers(send: Send) -> Send:
    """Answers that no other site may frame, and whose kind is not guessed."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            extra = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"same-origin")]
            there = {key.lower() for key, _ in message["headers"]}
            extra += (
                [] if b"content-security-policy" in there else [(b"content-security-policy", b"frame-ancestors 'self'")]
            )
            message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in there)]
        await send(message)

    return sending
