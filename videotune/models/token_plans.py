"""Plans of which tensors of a network are split by tokens over several processes."""

from collections.abc import Mapping
from typing import Any


def video_token_plan(
    net: Any, *, rope_dims: int, rope_tokens_dim: int
) -> Mapping[str, Any]:
    """Return diffusers' plan of an LTX network, for the video's tokens.

    Args:
        net: the network.
        rope_dims: dimensions of its rotary positions.
        rope_tokens_dim: the one that counts tokens.
    """
    from diffusers.models._modeling_parallel import ContextParallelInput

    positions = ContextParallelInput(
        split_dim=rope_tokens_dim, expected_dims=rope_dims, split_output=True
    )
    return {
        "": {
            "hidden_states": ContextParallelInput(split_dim=1, expected_dims=3),
            "timestep": ContextParallelInput(split_dim=1, expected_dims=2),
        },
        "rope": {0: positions, 1: positions},
        "proj_out": net._cp_plan["proj_out"],
    }
