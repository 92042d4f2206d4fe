"""The values that a config takes, and the fields of its keys: each says what a resume
may do with its key.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]
FrameCount = Annotated[int, Field(ge=1, le=10_000)]
DatasetKind = Literal["train", "validation", "regularization"]
Layout = Literal["chunks", "head", "slide"]
Resolution = int | str | list[int | str]
CaptionExtension = Annotated[str, Field(pattern=r"^\.[A-Za-z0-9_]{1,16}$")]


def word(value: Any) -> Any:
    """Accept ``adamw`` for ``ADAMW``: the values of the config are not case-sensitive."""
    return value.upper() if isinstance(value, str) else value


ROUNDED = ("FLOAT_8", "INT_8", "NFLOAT_4")
"""Dtypes of frozen weights in which numbers lose most of their digits."""


def _field(resume: str) -> Any:
    """Return a maker of pydantic fields of a resume class (config_changes.py).

    ``goes_with`` is (key, the choices of it that use this field).
    """

    def field(
        default: Any = ...,
        *,
        goes_with: tuple[str, tuple[str, ...]] | None = None,
        **constraints: Any,
    ) -> Any:
        extra: dict[str, Any] = {"resume": resume}
        if goes_with:
            extra["goes_with"] = goes_with
        return Field(default, json_schema_extra=extra, **constraints)

    return field


safe, override, data, fatal, checked = map(
    _field, ("safe", "override", "data", "fatal", "checked")
)
