"""Select the attention backend of a network (``attention``) through diffusers."""

from typing import Any

from torch import nn

from videotune.errors import VideotuneError


def switchable(net: nn.Module) -> bool:
    """Return whether diffusers can switch the attention backend of a network."""
    return any(
        hasattr(getattr(module, "processor", None), "_attention_backend")
        for module in net.modules()
    )


def set_attention(net: Any, name: str) -> None:
    """Set the attention backend of a network.

    Raises VideotuneError if the backend is not installed or the network's attention
    cannot be switched.
    """
    if not switchable(net):
        raise VideotuneError(
            f"attention: {type(net).__name__} has a fixed backend. Remove the key."
        )
    from diffusers.models.attention_dispatch import attention_backend

    try:
        # Without this context, diffusers sets it for all networks in the process.
        with attention_backend("native"):
            net.set_attention_backend(name)
            for part in net.children():
                # A model within the network, such as text connectors, is called with
                # masks, which some backends refuse.
                if hasattr(part, "set_attention_backend"):
                    part.set_attention_backend("native")
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise VideotuneError(
            f"attention: {name} cannot be used here: {reason}"
        ) from error
