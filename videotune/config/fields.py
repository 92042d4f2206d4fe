"""The values that a config takes, and the fields of its keys: each says what a resume may do with its key."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

Share = Annotated[float, Field(ge=0, le=1)]
Side = Annotated[int, Field(ge=1, le=16_384)] | None
Frames = Annotated[int, Field(ge=1, le=10_000)]
Kind = Literal["train", "validation", "regularization"]
Layout = Literal["chunks", "head", "slide"]
Resolution = int | str | list[int | str]


def word(value: Any) -> Any:
    """Accept ``adamw`` for ``ADAMW``: the words of the config are not case-sensitive."""
    return value.upper() if isinstance(value, str) else value


def weights(value: Any) -> Any:
    """The same for how weights are kept, whose default is spelled in small letters."""
    return "auto" if str(value).lower() == "auto" else word(value)


ROUNDED = ("FLOAT_8", "INT_8", "NFLOAT_4")
"""The ways to keep frozen weights in which their numbers lose most of their digits."""

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
ExportFormat = Literal["diffusers", "comfyui", "peft"]
ExportDtype = Annotated[Literal["FLOAT_32", "BFLOAT_16", "FLOAT_16"], BeforeValidator(word)]
WeightDtype = Annotated[
    Literal["auto", "FLOAT_32", "BFLOAT_16", "FLOAT_16", "FLOAT_8", "INT_8", "NFLOAT_4"], BeforeValidator(weights)
]
Dtype = Annotated[Literal["FLOAT_32", "BFLOAT_16"], BeforeValidator(word)]
Decay = Annotated[Literal["CONSTANT", "LINEAR", "COSINE", "COSINE_RESTARTS", "POLYNOMIAL"], BeforeValidator(word)]
Timesteps = Annotated[Literal["UNIFORM", "LOGIT_NORMAL", "SIGMOID", "MODE", "BETA"], BeforeValidator(word)]
Checkpointing = Annotated[Literal["OFF", "ON", "CPU_OFFLOADED"], BeforeValidator(word)]


# diffusers' back ends with gradients that are installed packages: none of sage's has any, and others fetch code of the Hub
_NATIVE = Literal["_native_cudnn", "_native_efficient", "_native_flash", "_native_math"]
Attention = Literal["auto", "native", _NATIVE, "flash", "_flash_3", "xformers"]


def _field(resume: str) -> Any:
    """A pydantic field of a resume class (config/drift.py); ``goes_with``: (key, choices of it that use this key)."""

    def field(default: Any = ..., *, goes_with: tuple[str, tuple[str, ...]] | None = None, **more: Any) -> Any:
        extra: dict[str, Any] = {"resume": resume} | ({"goes_with": goes_with} if goes_with else {})
        return Field(default, json_schema_extra=extra, **more)

    return field


safe, override, data, fatal, checked = map(_field, ("safe", "override", "data", "fatal", "checked"))
