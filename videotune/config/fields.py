"""The values that a config takes, and the fields of its keys: each says what a resume
may do with its key.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

Share = Annotated[float, Field(ge=0, le=1)]
FrameCount = Annotated[int, Field(ge=1, le=10_000)]
DatasetKind = Literal["train", "validation", "regularization"]
Layout = Literal["chunks", "head", "slide"]
Resolution = int | str | list[int | str]
FILE_ENDING = r"^\.[A-Za-z0-9_]{1,16}$"

CaptionExtension = Annotated[str, Field(pattern=FILE_ENDING)]


def no_file_ending(value: str) -> str:
    """Refuse the ending of caption files as a text behind each caption.

    Raises:
        ValueError: for such as ``.txt``.
    """
    if re.match(FILE_ENDING, value):
        raise ValueError(
            f"{value} would be put behind each caption. The ending of the caption files "
            "is caption_extension"
        )
    return value


CaptionSuffix = Annotated[
    str, Field(min_length=1, max_length=2000), AfterValidator(no_file_ending)
]


def word(value: Any) -> Any:
    """Accept ``adamw`` for ``ADAMW``: the values of the config are not case-sensitive."""
    return value.upper() if isinstance(value, str) else value


Side = Annotated[int, Field(ge=1, le=16_384)] | None
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
ExportFormat = Literal["diffusers", "comfyui", "peft"]
ExportDtype = Annotated[
    Literal["FLOAT_32", "BFLOAT_16", "FLOAT_16"], BeforeValidator(word)
]
Dtype = Annotated[Literal["FLOAT_32", "BFLOAT_16", "FLOAT_16"], BeforeValidator(word)]
Decay = Annotated[
    Literal[
        "CONSTANT",
        "LINEAR",
        "COSINE",
        "COSINE_RESTARTS",
        "POLYNOMIAL",
        "REX",
        "WSD",
        "INVERSE_SQRT",
    ],
    BeforeValidator(word),
]
FALLING = tuple(name for name in get_args(get_args(Decay)[0]) if name != "CONSTANT")
"""The schedules whose rate falls."""

Timesteps = Annotated[
    Literal[
        "UNIFORM",
        "LOGIT_NORMAL",
        "SIGMOID",
        "MODE",
        "BETA",
        "STRETCHED_LOGIT_NORMAL",
    ],
    BeforeValidator(word),
]
Checkpointing = Annotated[
    Literal["OFF", "ON", "ATTENTION_SAVED", "CPU_OFFLOADED", "IN_PARTS"],
    BeforeValidator(word),
]


# diffusers' back ends with gradients that are installed packages: none of sage's has
# any, and others fetch code of the Hub
_NATIVE = Literal["_native_cudnn", "_native_efficient", "_native_flash", "_native_math"]
Attention = Literal["auto", "native", _NATIVE, "flash", "_flash_3", "xformers"]


def short_for(kind: type, wrap: Callable[[Any], Any]) -> BeforeValidator:
    """Accept a value of that kind as short for what ``wrap`` makes of it: ``"ema": 0.999`` for
    ``{"decay": 0.999}``.
    """
    return BeforeValidator(
        lambda value: wrap(value) if isinstance(value, kind) else value
    )


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
