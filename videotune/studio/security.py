"""Who may talk to the studio: the host that it listens on, the password, and pages of other sites that send requests."""

import ipaddress
import time
from collections.abc import Callable, Collection, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from videotune.errors import VideotuneError
from videotune.studio.web import Changes

SAFE = ("GET", "HEAD", "OPTIONS")
OPEN = ("/login", "/static/")
"""What a browser is given before the login."""

COOKIE = "videotune-studio"
LEAST = 8
"""Letters of a password."""

TRIES = 10
WHILE = 60.0
"""So many wrong passwords from one address within so many seconds, and its next ones are not looked at."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
"""Of every answer: nothing is loaded from elsewhere, no inline script runs, no other site frames a page."""


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


class WrongPasswords:
    """When each address has sent a wrong password lately, so that passwords cannot be tried out one after the other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._when: dict[str, list[float]] = {}

    def begin(self, address: str) -> bool:
        """Count a try as wrong before its answer is known, so that many at once are not more; False: it has to wait."""
        now = self._clock()
        recent = {
            name: [one for one in times if one > now - WHILE]
            for name, times in self._when.items()
        }
        self._when = {name: late for name, late in recent.items() if late}
        own = self._when.setdefault(address, [])
        if len(own) < TRIES:
            own.append(now)
            return True
        return False

    def forget(self, address: str) -> None:
        """The address has sent the right one."""
        self._when.pop(address, None)


def refusal(method: str, headers: Mapping[str, str], host: str) -> str | None:
    """Why a request is refused, or None where it may pass.

    By another name of this computer a page elsewhere would read a studio that has no password (its name is made to mean this
    computer); by a request of its own it would change something there.
    """
    asked = headers.get("host", "")
    name = urlsplit(f"//{asked}").hostname or ""
    if is_local(host) and not is_local(name):
        return f"This studio answers to this computer alone, not to {name or 'no name'}."
    origin = headers.get("origin")
    navigates = method in SAFE and headers.get("sec-fetch-mode") == "navigate"
    other = origin is not None and (
        origin == "null" or urlsplit(origin).netloc.lower() != asked.lower()
    )
    if other or (
        headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigates
    ):
        return "A page of another site may not ask this studio for anything."
    return None


class Guard:
    """In front of every route: refuses other sites and whoever has not logged in, and adds the headers of every answer.

    ``sessions``: names of those who have logged in; None where no password is set. After a request that may have changed
    something, ``changes`` wakes the open pages.
    """

    def __init__(
        self, app: ASGIApp, host: str, sessions: Collection[str] | None, changes: Changes
    ) -> None:
        self._app = app
        self._host = host
        self._sessions = sessions
        self._changes = changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        method = scope["method"]
        path = scope["path"]

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    answered.setdefault(name, value)
            await send(message)

        answer: ASGIApp = self._app
        if (why := refusal(method, headers, self._host)) is not None:
            answer = PlainTextResponse(why, 403)
        elif (
            method not in SAFE and path != "/login" and headers.get("hx-request") != "true"
        ):  # no form of another site sends it
            answer = PlainTextResponse("ask by the studio's own pages", 415)
        elif (
            self._sessions is not None
            and not path.startswith(OPEN)
            and _session(headers) not in self._sessions
        ):
            document = "text/html" in headers.get("accept", "") and method in SAFE
            answer = (
                RedirectResponse("/login", 303)
                if document
                else PlainTextResponse("log in first", 401)
            )
        await answer(scope, receive, sent)
        if method not in SAFE:
            self._changes.tell()
        return None


def _session(headers: Headers) -> str:
    """The name of the session that a request brings; empty where it brings none."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""
