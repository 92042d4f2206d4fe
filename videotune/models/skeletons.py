"""Build networks without weights, as the libraries build them before loading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.errors import VideotuneError
from videotune.lazy import torch, transformers
from videotune.models.model_files import (
    read_config,
)

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def explained(context: str) -> Iterator[None]:
    """Turn a library's error about a damaged file into a VideotuneError that begins
    with ``context``.

    Errors about full memory pass through.
    """
    try:
        yield
    except VideotuneError:
        raise
    except Exception as error:  # each library has its own classes, tokenizers has none
        is_memory = re.search("out of memory|allocate memory", str(error))
        if isinstance(error, MemoryError) or is_memory:
            raise
        if "trust_remote_code" in str(error):
            raise VideotuneError(
                f"{context}: it names code of its own, which videotune never runs"
            ) from error
        reason = " ".join((str(error) or type(error).__name__).split())[:200]
        raise VideotuneError(f"{context}: {reason}") from error


def pretrained(cls: Any, path: Path | str, **arguments: Any) -> Any:
    """Call ``cls.from_pretrained(path)`` without running code from there, and without a
    prompt.

    Raises:
        VideotuneError: if the library cannot read it.
    """
    adapter = Path(path) / "adapter_config.json"
    if adapter.is_file():
        raise VideotuneError(
            f"{adapter}: the library would read the weights of another model instead of these. "
            "Remove the file."
        )
    with explained(f"{path} cannot be read by {cls.__name__}"):
        return cls.from_pretrained(path, trust_remote_code=False, **arguments)


def on_meta(cls: Any, folder: Path) -> nn.Module:
    """Build a network of diffusers or transformers by its config, on the meta device."""
    with torch.device("meta"):
        return built(cls, folder)


def to_fill(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Build a part by its config, with parameters on the meta device and real buffers."""
    from accelerate import init_empty_weights  # torch comes with it

    if read_config(folder / "config.json").get("quantization_config"):
        raise VideotuneError(
            f"{folder} is quantized: take the checkpoint in float32, bfloat16 or float16"
        )
    # Some models create their buffers in torch's default dtype.
    with transformers.modeling_utils.local_torch_dtype(dtype), init_empty_weights():
        return built(cls, folder)


def built(cls: Any, folder: Path) -> Any:
    """Build a network of diffusers or transformers by the config in its folder.

    Raises:
        VideotuneError: if the config is not valid for the class.
    """
    with explained(f"{folder / 'config.json'} describes no {cls.__name__}"):
        if hasattr(cls, "load_config"):
            return cls.from_config(cls.load_config(folder))
        return cls(pretrained(cls.config_class, folder))


def as_loaded(cls: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Build a part on the meta device, with the dtypes of a loaded one."""
    if hasattr(cls, "load_config"):
        net = to_fill(cls, folder, dtype)
    else:
        with transformers.modeling_utils.local_torch_dtype(dtype):
            net = on_meta(cls, folder)
        net.tie_weights()  # type: ignore[operator]
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype_of(name, cls, dtype))
    return net


def kept_in_float32(cls: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Return names in the paths of modules that a model's authors keep in float32."""
    names = getattr(cls, "_keep_in_fp32_modules", None)
    if not hasattr(cls, "load_config") and dtype != torch.float16:
        # transformers applies _keep_in_fp32_modules only to half precision
        names = getattr(cls, "_keep_in_fp32_modules_strict", None)
    return tuple(names or ())


def dtype_of(name: str, cls: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter of a model that is loaded in ``dtype``."""
    is_kept = any(part in kept_in_float32(cls, dtype) for part in name.split("."))
    return torch.float32 if is_kept else dtype
