"""Messages about a run to people who are elsewhere: by mail, chat or phone.

Apprise sends them, in a process for each message and address. A run neither waits for
one, except for the last ones at its end, nor ends because of one: an address that does
not work costs one warning.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from videotune.config.notify_addresses import is_masked, is_variable, masked
from videotune.config.schema import Config
from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.files import read_typed, write_json
from videotune.runs import notification_sender
from videotune.runs.journal import shown_verdict

ADDRESS_FILE = ".notify.json"
"""The URLs that a config named, for a resume. Only the user may read it, and no command
copies it anywhere.
"""

LAST_SECONDS = 10.0
"""Seconds that the end of a run waits for its last messages."""

INTERRUPTED_SECONDS = 2.0
"""Seconds that a run waits which ends at once: long enough to hand a message to the
process that sends it.
"""

_GRACE = 3.0
"""Seconds after which a sender that has not ended itself is killed."""

_LONGEST_BODY = 1000

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from videotune.runs.notification_sender import main
main()
"""

ENDS = {
    "done": ("done", "is done"),
    "early": ("done", "has stopped early: the loss on clips kept aside rises"),
    "stopped": ("stopped", "was stopped, and is saved"),
    "interrupted": ("stopped", "was interrupted, and is saved"),
}
"""For each end of a run the event and the words of its message."""


@dataclass(frozen=True)
class Address:
    """An address that messages go to."""

    name: str
    """How messages call it: the variable, or the URL's scheme."""
    url: str


def refuse_missing_library() -> None:
    """Raise VideotuneError if Apprise is not installed."""
    if find_spec("apprise") is None:
        raise VideotuneError(
            "notify: apprise is not installed. Install it from a checkout with "
            '`.venv/bin/pip install -c .venv/constraints.txt -e ".[notify]"`, or leave notify empty'
        )


def resolve_address(address: str) -> Address:
    """Return the URL of an address.

    Raises:
        VideotuneError: if a variable is not set, or a URL is only there masked.
    """
    if is_masked(address):
        raise VideotuneError(
            f"notify: the URL behind {address} is not on this machine. Give it again: "
            "--set notify=VARIABLE, with the URL in that environment variable"
        )
    if not is_variable(address):
        return Address(masked(address), address)
    url = os.environ.get(address, "").strip()
    if not url:
        raise VideotuneError(
            f"notify: the environment variable {address} is not set. Set it to a URL of "
            "Apprise such as ntfy://TOPIC, or leave it out of notify"
        )
    return Address(address, url)


def keep_addresses(run: Path, addresses: Sequence[str]) -> None:
    """Keep the URLs among a run's addresses in a file that only the user may read."""
    has_urls = any(not is_variable(item) and not is_masked(item) for item in addresses)
    if not has_urls:
        return
    path = run / ADDRESS_FILE
    with suppress(OSError):  # so that the URLs are never in a file others may read
        path.touch(mode=0o600)
    write_json(path, list(addresses))
    with suppress(OSError):
        path.chmod(0o600)


def kept_addresses(run: Path, addresses: Sequence[str]) -> list[str]:
    """Return addresses with the URLs of the run's file in the place of masked ones."""
    kept: list[str] = []
    with suppress(OSError, ValueError):  # a copy of the run has no such file
        kept = read_typed(run / ADDRESS_FILE, list[str])
    urls = list(kept)
    restored = []
    for address in addresses:
        url = next((item for item in urls if masked(item) == address), None)
        if is_masked(address) and url is not None:
            urls.remove(url)
            address = url
        restored.append(address)
    return restored


def send(address: Address, title: str, body: str, seconds: float) -> str | None:
    """Send a message, wait for at most ``seconds``, and return what went wrong."""
    request = {
        "address": address.url,
        "title": title,
        "body": body[:_LONGEST_BODY],
        "seconds": seconds,
    }
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # The terminal's Ctrl-C must not end the message that the run was stopped.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
    except OSError as error:
        return f"no process can be started: {error.strerror}"
    try:
        output, _ = child.communicate(json.dumps(request).encode(), seconds + _GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return f"no answer in {seconds:g} s"
    problem = output.decode(errors="replace").strip()
    if child.returncode and not problem:
        return "its process failed"
    return problem or None


class Notifier:
    """Sends messages of the events that a run's config names.

    It follows the journal for verdicts and the end; ``watching`` sees failures.
    """

    def __init__(
        self,
        run: Path,
        addresses: Sequence[Address],
        events: Collection[str],
        seconds: float = notification_sender.SECONDS,
    ) -> None:
        """Prepare messages of a run.

        Args:
            run: the run folder; messages have its name.
            addresses: where they go; empty: nothing is sent.
            events: "done", "failed", "stopped", "verdict".
            seconds: for one message.
        """
        self._name = run.resolve().name
        self._addresses = addresses
        self._events = events
        self._seconds = seconds
        self._threads: list[threading.Thread] = []
        self._problems: list[tuple[str, str]] = []
        self._warned: set[str] = set()
        self._verdict: str | None = None
        self._shown_verdict = ""
        self._verdict_text = ""
        self._has_ended = False
        self.warn: Callable[[str], None] = lambda text: echo(f"warning: {text}")
        """Called in the caller's thread with a sentence on an address that failed."""

    def begin(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take the verdict so far from the events of a run that is resumed."""
        for line in lines:
            if line["kind"] == "verdict":
                self._take_verdict(line)

    def line(self, line: Mapping[str, Any]) -> None:
        """Follow the journal: send a message if the line is of such an event."""
        self._warn_of_problems()
        if line["kind"] == "verdict":
            before = self._verdict
            self._take_verdict(line)
            # The first verdict is news only if it is a bad one.
            is_news = before is not None or self._verdict == "OVERFITTING"
            if self._verdict not in (None, before) and is_news:
                title = f"{self._name}: {self._shown_verdict}"
                self._send("verdict", title, self._verdict_text)
        elif line["kind"] == "end":
            self._has_ended = True
            event, text = ENDS.get(line["why"], ("stopped", "has ended"))
            body = [f"Step {line['step']}."]
            if self._verdict_text:
                body.append(self._verdict_text)
            take = line.get("take") or {}
            if event == "done" and take:
                body.append(f"Recommended checkpoint: step {take['step']}.")
            self._send(event, f"{self._name} {text}", "\n".join(body))

    def _take_verdict(self, line: Mapping[str, Any]) -> None:
        if line["verdict"] is not None:
            self._verdict = line["verdict"]
            self._shown_verdict = shown_verdict(line)
            self._verdict_text = f"Verdict at step {line['step']}: {self._shown_verdict}. {line['reason']}"

    @contextmanager
    def watching(self, goes_on: Callable[[BaseException], bool]) -> Iterator[None]:
        """Send a message if the block fails, and wait for the last messages.

        Args:
            goes_on: whether the run continues by itself after an error.
        """
        seconds = LAST_SECONDS
        try:
            yield
        except KeyboardInterrupt:
            seconds = INTERRUPTED_SECONDS
            if not self._has_ended:
                self._send("stopped", f"{self._name} was interrupted", "")
            raise
        except Exception as error:
            if not goes_on(error) and not self._has_ended:
                self._send("failed", f"{self._name} has failed", _without_paths(error))
            raise
        finally:
            self.close(seconds)

    def _send(self, event: str, title: str, body: str) -> None:
        if event not in self._events:
            return
        for address in self._addresses:
            thread = threading.Thread(
                target=self._send_to, args=(address, title, body), daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _send_to(self, address: Address, title: str, body: str) -> None:
        problem = send(address, f"videotune: {title}", body or title, self._seconds)
        if problem:
            self._problems.append((address.name, problem))

    def _warn_of_problems(self) -> None:
        while self._problems:
            name, problem = self._problems.pop(0)
            if name not in self._warned:  # before the warning: it is a line, too
                self._warned.add(name)
                self.warn(f"notify: {name} got no message: {problem}")

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Wait for messages that are on their way, for at most ``seconds`` in all."""
        self.warn = lambda text: echo(f"warning: {text}")
        waiter = threading.Event()
        timer = threading.Timer(seconds, waiter.set)
        timer.daemon = True
        timer.start()
        for thread in self._threads:
            while thread.is_alive() and not waiter.is_set():
                thread.join(0.05)
        timer.cancel()
        self._warn_of_problems()


def _without_paths(error: Exception) -> str:
    """Return the first line of an error; of paths only the last part."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(
        r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\"]+)*[/\\]", "…/", lines[0]
    )


def open_notifier(run: Path, config: Config, *, goes_on: bool) -> Notifier:
    """Return what sends a run's messages.

    Args:
        run: the run folder.
        config: the run's config.
        goes_on: the run is resumed. An address that is missing here is then a warning.

    Raises:
        VideotuneError: if Apprise is not installed, or a variable of a new run is not
            set.
    """
    if not config.notify:
        return Notifier(run, (), ())
    addresses = []
    for text in kept_addresses(run, config.notify):
        try:
            refuse_missing_library()
            addresses.append(resolve_address(text))
        except VideotuneError as error:
            if not goes_on:
                raise
            echo(f"warning: {error}")
    return Notifier(run, addresses, config.notify_on)
