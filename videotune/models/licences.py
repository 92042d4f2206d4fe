"""Licences whose terms pass to what is trained: they are accepted once."""

from __future__ import annotations

import os
import sys

from videotune.console import echo
from videotune.errors import VideotuneError
from videotune.model_spec import ModelSpec
from videotune.user_settings import accept_terms, accepted_terms, settings_file

VARIABLE = "VIDEOTUNE_ACCEPT_LICENCE"
"""Set to 1, it accepts the licence of every base model that is trained."""


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
    return spec.licence_terms in accepted_terms()


def accept(spec: ModelSpec) -> None:
    """Keep for later commands that the terms of a base model are accepted."""
    try:
        accept_terms(spec.licence_terms)
    except OSError as error:
        echo(
            f"note: {settings_file()} cannot be written ({error}): you will be asked again"
        )
