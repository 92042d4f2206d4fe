"""A base model's parts as their configs describe them, on the meta device: shapes without weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch
from videotune.models.config_file import read_config
from videotune.models.pretrained import explained, pretrained

if TYPE_CHECKING:
    from torch import nn


def on_meta(cls: Any, folder: Path) -> nn.Module:
    """A network of diffusers or transformers as its config describes it, all of it on the meta device."""
    with torch.device("meta"):
        return built(cls, folder)


def to_fill(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model that a part's config describes, parameters on the meta device, buffers real."""
    from accelerate import init_empty_weights  # torch comes with it

    if read_config(folder / "config.json").get("quantization_config"):
        raise VideotuneError(f"{folder} is quantized: take the checkpoint in float32, bfloat16 or float16")
    with _default_dtype(dtype), init_empty_weights():
        return built(cls, folder)


def built(cls: Any, folder: Path) -> Any:
    """A network of diffusers or transformers as the config in its folder describes it.

    Raises VideotuneError where there is no such network.
    """
    with explained(f"{folder / 'config.json'} describes no {cls.__name__}"):
        if hasattr(cls, "load_config"):
            return cls.from_config(cls.load_config(folder))
        return cls(pretrained(cls.config_class, folder))


def as_loaded(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A part of a base model on the meta device, each parameter in the dtype that it would be loaded in."""
    if hasattr(cls, "load_config"):
        net = to_fill(cls, folder, dtype)
    else:
        with _default_dtype(dtype):
            net = on_meta(cls, folder)
        net.tie_weights()  # type: ignore[operator]
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype_of(name, cls, dtype))
    return net


def kept_in_float32(cls: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of the paths of modules that a model's authors keep in float32."""
    if not hasattr(cls, "load_config") and dtype != torch.float16:  # transformers means half precision alone by that
        return tuple(getattr(cls, "_keep_in_fp32_modules_strict", None) or ())
    return tuple(getattr(cls, "_keep_in_fp32_modules", None) or ())


def dtype_of(name: str, cls: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter, by its name, of a model that is loaded in ``dtype``."""
    return torch.float32 if any(part in kept_in_float32(cls, dtype) for part in name.split(".")) else dtype


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As diffusers does: some models make their buffers in torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
