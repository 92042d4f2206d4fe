"""Licences whose terms pass to what is trained: they are accepted once."""

from __future__ import annotations

import os
import sys

from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.files import read_json, write_json
from videotune.model_spec import ModelSpec
from videotune.models.models_folder import settings_file

VARIABLE = "VIDEOTUNE_ACCEPT_LICENCE"
"""Set to 1, it accepts the licence of every base model that is trained."""

_SETTING = "accepted_licences"


def require_licence(spec: ModelSpec, accepts: bool) -> None:
    """Make sure that the terms of a base model were accepted, now or before.

    At a terminal the user is asked.

    Args:
        spec: of the base model.
        accepts: whether the user has said so with this command.

    Raises:
        VideotuneError: if they were not.
    """
    if not spec.licence_terms:
        return
    echo(f"licence of {spec.title}: {spec.licence}: {spec.licence_terms}")
    if os.environ.get(VARIABLE) == "1" or is_accepted(spec):
        return
    if not accepts and sys.stdin.isatty() and sys.stderr.isatty():
        echo("Read the terms. Do you accept them, for what you train too? [y/N]")
        accepts = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not accepts:
        raise VideotuneError(
            f"the licence of {spec.title} must be accepted once, because its terms pass to what you "
            f"train. Read {spec.licence_terms}, then add --accept-licence to the command"
        )
    accept(spec)


def is_accepted(spec: ModelSpec) -> bool:
    """Whether this user has accepted a base model's terms before."""
    return spec.licence_terms in _accepted()


def accept(spec: ModelSpec) -> None:
    """Keep for later commands that the terms of a base model are accepted."""
    path = settings_file()
    settings = read_json(path) if path.is_file() else {}
    accepted = sorted({*_accepted(), spec.licence_terms})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**settings, _SETTING: accepted}, durable=False)
    except OSError as error:
        echo(f"note: {path} cannot be written ({error}): you will be asked again")


def _accepted() -> list[str]:
    path = settings_file()
    settings = read_json(path) if path.is_file() else {}
    accepted = settings.get(_SETTING) if isinstance(settings, dict) else None
    return [str(terms) for terms in accepted] if isinstance(accepted, list) else []
