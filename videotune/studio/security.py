"""Access control of the studio: host check, password, and requests from other sites."""

import ipaddress
import re
import time
from collections.abc import Callable, Collection, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from videotune.errors import VideotuneError
from videotune.studio.web import Changes

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

PUBLIC_PATHS = ("/login", "/static/")
"""Paths that need no login."""

SESSION_COOKIE = "videotune-studio"
MIN_PASSWORD_LENGTH = 8

MAX_ATTEMPTS = 10
"""Wrong passwords that an address may send within ``ATTEMPT_WINDOW``; then it has to
wait.
"""

ATTEMPT_WINDOW = 60.0
"""Seconds over which wrong passwords are counted."""

HOST_HEADER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:[0-9]{1,5})?", re.ASCII)
"""A host name or an address, and a port; nothing else beside them."""

RESPONSE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
"""Headers of every response: no external resources, no inline scripts, no foreign
frames.
"""


def is_local(host: str) -> bool:
    """Return whether only this computer can reach the host."""
    if host.lower() == "localhost":
        return True

    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(host: str, password: str | None) -> None:
    """Check the host and the password.

    Raises:
        VideotuneError: if other computers could come in without a password, or it is
            too short.
    """
    if not is_local(host) and not password:
        raise VideotuneError(
            f"--host {host}: other computers can reach the studio, but no password is set. "
            "Set one in the environment variable VIDEOTUNE_STUDIO_PASSWORD "
            "(the login name is studio), or omit --host."
        )

    if password is not None and len(password) < MIN_PASSWORD_LENGTH:
        raise VideotuneError(
            f"VIDEOTUNE_STUDIO_PASSWORD: the password has {len(password)} characters. "
            f"Use at least {MIN_PASSWORD_LENGTH}."
        )


class LoginLimiter:
    """Limits wrong passwords per address, so that nobody can guess them by trying."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._attempts: dict[str, list[float]] = {}
        """Times of the recent attempts of each address."""

    def begin(self, address: str) -> bool:
        """Count an attempt as wrong and return whether it is allowed.

        It counts before the password is checked, so parallel attempts do not exceed the
        limit.
        """
        now = self._clock()
        self._drop_attempts_before(now - ATTEMPT_WINDOW)

        attempts = self._attempts.setdefault(address, [])
        if len(attempts) >= MAX_ATTEMPTS:
            return False
        attempts.append(now)
        return True

    def forget(self, address: str) -> None:
        """Clear the attempts of an address that sent the right password."""
        self._attempts.pop(address, None)

    def _drop_attempts_before(self, limit: float) -> None:
        recent_attempts = {}
        for address, times in self._attempts.items():
            recent = [attempt for attempt in times if attempt > limit]
            if recent:
                recent_attempts[address] = recent
        self._attempts = recent_attempts


def refusal(method: str, headers: Mapping[str, str], host: str) -> str | None:
    """Return why a request is refused, or None if it may pass.

    A foreign page can point a name of its own at this computer and so read a studio
    without a password (DNS rebinding), or send a request that changes something (CSRF).

    Args:
        method: HTTP method.
        headers: headers of the request, by lower-case name.
        host: host on which the studio listens.
    """
    host_header = headers.get("host", "")
    host_match = HOST_HEADER.fullmatch(host_header)
    host_name = host_match[1] if host_match else ""
    if is_local(host) and not is_local(host_name):
        return f"This studio serves only this computer, not {host_name or 'an empty host name'}."

    origin = headers.get("origin")
    is_foreign_origin = origin is not None and not _is_same_host(origin, host_header)
    is_navigation = (
        method in SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate"
    )
    is_other_site = headers.get("sec-fetch-site") in ("cross-site", "same-site")

    if is_foreign_origin or (is_other_site and not is_navigation):
        return "Pages of other sites may not send requests to this studio."
    return None


def _is_same_host(origin: str, host_header: str) -> bool:
    """Return whether an Origin header names the host of the request."""
    try:
        return urlsplit(origin).netloc.lower() == host_header.lower() != ""
    except ValueError:  # brackets without an address
        return False


class Guard:
    """Middleware that refuses other sites and users without login; adds security
    headers.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        sessions: Collection[str] | None,
        changes: Changes,
    ) -> None:
        """Wrap the app.

        Args:
            app: the app behind the guard.
            host: host on which the studio listens.
            sessions: names of the open sessions; None if no password is set.
            changes: notified after each request that may have changed something.
        """
        self._app = app
        self._host = host
        self._sessions = sessions
        self._changes = changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    response_headers.setdefault(name, value)
            await send(message)

        method = scope["method"]
        handler = self._handler(method, scope["path"], Headers(scope=scope))
        await handler(scope, receive, send_with_headers)

        if method not in SAFE_METHODS:
            self._changes.notify()
        return None

    def _handler(self, method: str, path: str, headers: Headers) -> ASGIApp:
        """Return the app, or the response that refuses the request."""
        if len(headers.getlist("host")) > 1:
            return PlainTextResponse("Send one Host header.", 400)
        reason = refusal(method, headers, self._host)
        if reason is not None:
            return PlainTextResponse(reason, 403)

        # Forms of other sites cannot send this header.
        is_from_studio = headers.get("hx-request") == "true"
        if method not in SAFE_METHODS and path != "/login" and not is_from_studio:
            return PlainTextResponse(
                "Send this request from a page of the studio.", 415
            )

        if self._may_enter(path, headers):
            return self._app

        is_document = (
            "text/html" in headers.get("accept", "") and method in SAFE_METHODS
        )
        if is_document:
            return RedirectResponse("/login", 303)
        return PlainTextResponse("log in first", 401)

    def _may_enter(self, path: str, headers: Headers) -> bool:
        if self._sessions is None or path.startswith(PUBLIC_PATHS):
            return True
        return _session(headers) in self._sessions


def _session(headers: Headers) -> str:
    """Return the session name that a request carries; empty if there is none."""
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(SESSION_COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie else ""
