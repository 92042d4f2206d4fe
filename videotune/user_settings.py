"""What videotune keeps of a user between commands."""

import os
from pathlib import Path
from typing import Any

from videotune.files import read_json, write_json

_TERMS = "accepted_licences"

ACCEPT_VARIABLE = "VIDEOTUNE_ACCEPT_LICENCE"
"""Set to 1, it accepts the licence of every base model that is trained."""


def settings_file() -> Path:
    """Return the file of what is remembered of this user."""
    import platformdirs

    return platformdirs.user_config_path("videotune") / "settings.json"


def read_settings() -> dict[str, Any]:
    """Return what is remembered; empty without a file, or with another content."""
    path = settings_file()
    settings = read_json(path) if path.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def remember(**values: Any) -> None:
    """Keep values for later commands.

    Raises:
        OSError: if the file cannot be written.
    """
    path = settings_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**read_settings(), **values}, durable=False)


def accepted_terms() -> list[str]:
    """Return the addresses of the licences' terms that the user has accepted."""
    terms = read_settings().get(_TERMS)
    return [str(address) for address in terms] if isinstance(terms, list) else []


def has_accepted(address: str) -> bool:
    """Whether the user has accepted the terms at an address, or all with the variable."""
    return os.environ.get(ACCEPT_VARIABLE) == "1" or address in accepted_terms()


def accept_terms(address: str) -> None:
    """Keep that the terms at an address are accepted.

    Raises:
        OSError: if that cannot be written.
    """
    remember(**{_TERMS: sorted({*accepted_terms(), address})})
