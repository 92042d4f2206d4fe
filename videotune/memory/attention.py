"""Which function computes attention, by diffusers' dispatcher: ``attention``."""

from typing import Any

from torch import nn

from videotune.errors import VideotuneError


def switchable(net: nn.Module) -> bool:
    """Whether diffusers can switch the attention of a network."""
    return any(
        hasattr(getattr(module, "processor", None), "_attention_backend")
        for module in net.modules()
    )


def set_attention(net: Any, name: str) -> None:
    """Have a network compute its attention by the back end of this name.

    Raises VideotuneError where that is not installed, or the network's attention cannot be switched.
    """
    if not switchable(net):
        raise VideotuneError(
            f"attention: that of {type(net).__name__} cannot be switched: leave it out"
        )
    from diffusers.models.attention_dispatch import attention_backend

    try:
        with attention_backend(
            "native"
        ):  # diffusers would make it that of all networks in the process
            net.set_attention_backend(name)
    except (RuntimeError, ImportError) as error:
        raise VideotuneError(
            f"attention: {name} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
