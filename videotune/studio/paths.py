"""Which files and servers a user of the studio may name.

Somebody who sits at the computer may name every file that the studio can read. Somebody
who came in with the password may name only what is below the folder of the projects,
wherever a path comes from: a form, a preset, an imported config or project.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from videotune.config.notify_addresses import is_masked, is_variable
from videotune.config.optimizer_classes import is_imported
from videotune.config.optimizers import optimizer_named
from videotune.errors import VideotuneError
from videotune.files import walk_json
from videotune.sampling.prompts import ENDINGS

CAPTION_SERVERS_VARIABLE = "VIDEOTUNE_STUDIO_CAPTION_SERVERS"
"""Environment variable with the addresses of servers inside the network that everybody
may name, separated by commas.
"""


@dataclass(frozen=True)
class PathRule:
    """What the user of a request may name."""

    root: Path
    """The folder of all projects."""

    is_restricted: bool
    """Whether only paths below the root may be named."""

    def allows(self, text: str) -> bool:
        """Return whether the user may name a file or folder by this text.

        A text that is no path, such as a prompt, names a file below whatever folder it
        is relative to, so it is allowed.
        """
        if not self.is_restricted or not text:
            return True
        if "\0" in text or names_object_store(text):
            return False

        path = _expanded(text)
        if path is None:
            return False
        if not self._is_below_root(self.root / "project" / path):
            return False
        # Some commands read a relative path from the folder of the server.
        local_path = Path.cwd() / path
        if os.path.lexists(local_path) and not self._is_below_root(local_path):
            return False
        return path.is_absolute() or self._is_below_root_in_projects(path)

    def _is_below_root_in_projects(self, path: Path) -> bool:
        """Return whether a relative path stays below the root in every project, from whose
        folder a training reads it: a link in there may lead elsewhere.
        """
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            has_beginning = os.path.lexists(folder.joinpath(*path.parts[:1]))
            if has_beginning and not self._is_below_root(folder / path):
                return False
        return True

    def _is_below_root(self, path: Path) -> bool:
        try:
            return path.resolve().is_relative_to(self.root.resolve())
        except (RuntimeError, OSError):  # a link that leads to itself
            return False

    def check_path(self, text: str, subject: str) -> None:
        """Raise VideotuneError if the user may not name this path.

        Args:
            text: the path.
            subject: what it is for, such as the key.
        """
        if self.is_restricted and names_object_store(text):
            raise VideotuneError(
                f"{subject}: {text[:200]!r} would be read with the server's own credentials. Only a "
                "user on the server itself can name an object store: use a path inside a project"
            )
        if not self.allows(text):
            raise VideotuneError(
                f"{subject}: {text[:200]!r} is outside of the studio's folder. Only a "
                "user on the server itself can name it: use a path inside a project"
            )

    def check_config(self, keys: Any) -> None:
        """Raise VideotuneError if any value of a config is a path that may not be named,
        a file that names further paths, an optimizer whose code would be imported, or an
        address for messages that this user may not name.
        """
        self._check_addresses(keys)
        for key, text in _texts(keys):
            self.check_path(text, key)
            # Such a file could change between a check of what it names and the run.
            is_samples = key.rpartition(".")[2] == "samples"
            if self.is_restricted and is_samples and names_prompts(text):
                raise VideotuneError(
                    f"{key}: only a user on the server itself can name a file of prompts,"
                    f" such as {text[:200]!r}. Write the prompts into the field"
                )
        if self.is_restricted:
            refuse_imported_optimizer(keys)

    def _check_addresses(self, keys: Any) -> None:
        """Raise VideotuneError for an address that messages or uploads may not go to.

        Everybody who has the password sees the settings of a project, so nobody may put
        a URL with a secret there. And a visitor's message must not reach a server that
        only the server's own network can reach.
        """
        for key, text in _texts(keys):
            name = key.rpartition(".")[2]
            if self.is_restricted and text and name in UPLOAD_KEYS:
                raise VideotuneError(
                    f"{key}: it uploads with the server's account of the Hub. Only a user on "
                    "the server itself can name a repository. Leave it empty"
                )
            if not NOTIFY_KEY.fullmatch(key):
                continue
            if self.is_restricted:
                raise VideotuneError(
                    "notify: only a user on the server itself can name addresses for "
                    "messages. Leave it empty"
                )
            if not is_variable(text) and not is_masked(text):
                raise VideotuneError(
                    "notify: all who may open the studio can see its settings. Put the "
                    "URL into an environment variable of the studio, and its name here"
                )

    def replace_paths(self, value: Any, replacement: Callable[[str], str]) -> Any:
        """Return JSON data in which each path that may not be named is replaced."""
        if isinstance(value, dict):
            return {
                key: self.replace_paths(inner, replacement)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self.replace_paths(inner, replacement) for inner in value]
        if isinstance(value, str) and not self.allows(value):
            return replacement(value)
        return value

    def check_server(self, address: str) -> None:
        """Raise VideotuneError if the user may not send requests to this address.

        Somebody who came in with the password could otherwise reach servers that only
        the server's own network can reach.
        """
        parts = _server_parts(address)
        if not self.is_restricted or address in _trusted_servers():
            return
        if not all(_is_public(ip) for ip in _ip_addresses(parts.hostname or "")):
            raise VideotuneError(
                f"endpoint: {address[:200]} is inside the server's own network. Only a "
                "user on the server itself can name it, or set it in the environment "
                f"variable {CAPTION_SERVERS_VARIABLE}"
            )


UPLOAD_KEYS = ("push_to", "push_checkpoints_to")
"""Keys of repositories that the server's account writes to."""

NOTIFY_KEY = re.compile(r"(.+\.)?notify(\.\d+)?")
"""Dotted keys of addresses for messages."""

OPTIMIZER_KEY = re.compile(r"(.+\.)?optimizer(\.name)?(\.\d+)?")
"""Dotted keys whose text names an optimizer."""


def refuse_imported_optimizer(keys: Any) -> None:
    """Raise VideotuneError for an optimizer of another package than the listed ones:
    naming it runs code of that package, which a stranger must not choose.
    """
    for key, text in _texts(keys):
        if OPTIMIZER_KEY.fullmatch(key) and is_imported(optimizer_named(text) or ""):
            raise VideotuneError(
                f"{key}: {text[:200]!r} would run code of a package on the server. Only a user on the server itself can "
                "name it; the classes of torch.optim, pytorch_optimizer and bitsandbytes are free to all"
            )


def _expanded(text: str) -> Path | None:
    """Return a path with its ~ replaced; None if there is no such user."""
    if not text.startswith("~"):
        return Path(text)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return None


def names_object_store(text: str) -> bool:
    """Whether a text is the address of an object store, in whatever way it is written."""
    return text.strip().lower().startswith(("s3:", "s3a:"))


def refuse_object_stores(keys: Any) -> None:
    """Raise VideotuneError for an address of an object store in what somebody else has
    written: it would be read with the credentials of whoever runs it.
    """
    for key, text in _texts(keys):
        if names_object_store(text):
            raise VideotuneError(
                f"{key}: {text[:200]!r} would be read with your own credentials, and somebody else named it. "
                "Add the dataset yourself, if you trust it"
            )


def names_prompts(samples: Any) -> bool:
    """Whether a value of ``samples`` is a file of prompts."""
    return isinstance(samples, str) and samples.endswith(ENDINGS)


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of each text in JSON data."""
    for path, inner in walk_json(value):
        if isinstance(inner, str):
            yield ".".join(map(str, path)), inner


def _server_parts(address: str) -> Any:
    """Return the parts of the address of a server; VideotuneError if it is not valid."""
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_valid = False
    if not is_valid or re.search(r"[\s\0]", address):
        raise VideotuneError(
            f"endpoint: {address[:200]!r} is not the address of a server, such as "
            "http://localhost:8000/v1"
        )
    return parts


def _trusted_servers() -> list[str]:
    servers = os.environ.get(CAPTION_SERVERS_VARIABLE, "").split(",")
    return [server.strip() for server in servers if server.strip()]


NAT64 = ipaddress.ip_network("64:ff9b::/96")
IPV4_COMPATIBLE = ipaddress.ip_network("::/96")


def _is_public(ip: Any) -> bool:
    """Return whether an address is on the public internet; of an IPv6 address that
    stands for an IPv4 address, whether that one is.
    """
    if ip.version == 6:
        embedded = ip.ipv4_mapped or ip.sixtofour
        if embedded is None and ip.teredo is not None:
            embedded = ip.teredo[1]
        if embedded is None and (ip in NAT64 or ip in IPV4_COMPATIBLE):
            embedded = ipaddress.ip_address(int(ip) & 0xFFFFFFFF)
        if embedded is not None:
            return bool(embedded.is_global)
        if ip.is_site_local:
            return False
    return bool(ip.is_global) and not ip.is_multicast


def _ip_addresses(host: str) -> list[Any]:
    """Return the addresses of a host.

    Raises:
        VideotuneError: if it has none.
    """
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise VideotuneError(
            f"endpoint: there is no server {host[:200]!r}. Check the address"
        ) from error
    # An address of IPv6 may have a zone, such as %eth0.
    return [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in found]
