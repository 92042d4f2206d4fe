"""Licences whose terms pass to what is trained: they are accepted once."""

from __future__ import annotations

import sys

from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.model_spec import ModelSpec
from videotune.user_settings import accept_terms, has_accepted, settings_file


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
    if has_accepted(spec.licence_terms):
        return
    if not accepts and sys.stdin.isatty() and sys.stderr.isatty():
        echo("Read the terms. Do you accept them, for what you train too? [y/N]")
        accepts = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not accepts:
        raise VideotuneError(
            f"the licence of {spec.title} must be accepted once, because its terms pass to what you "
            f"train. Read {spec.licence_terms}, then add --accept-licence to the "
            "command, or accept it on the studio's page Setup"
        )
    accept(spec)


def accept(spec: ModelSpec) -> None:
    """Keep for later commands that the terms of a base model are accepted."""
    try:
        accept_terms(spec.licence_terms)
    except OSError as error:
        echo(
            f"note: {settings_file()} cannot be written ({error}): you will be asked again"
        )
