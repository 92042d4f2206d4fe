"""Errors of a single field of a form, which the page shows at that field."""

from collections.abc import Iterator
from contextlib import contextmanager

from videotune.errors import VideotuneError


class FieldError(VideotuneError):
    """A mistake in a field of a form."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@contextmanager
def at_field(name: str) -> Iterator[None]:
    """Turn an error of the block into one of a field.

    Args:
        name: the name of the field in the form.
    """
    try:
        yield
    except VideotuneError as error:
        raise FieldError(str(error), name) from error
