"""Plans of which tensors of a network are split by tokens over several processes."""

from typing import Any


def video_token_plan(
    net: Any, *, rope_dims: int, rope_tokens_dim: int
) -> dict[str, Any]:
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


def sound_attention_plan(positions: Any) -> dict[str, Any]:
    """Return the plan of an LTX-2 network for attention between video and sound, which
    each process has whole.

    The video attends to the sound by its part of the tokens. The sound attends to all
    tokens of the video, whose keys and values are gathered. This is for samples: a run
    that learns sound is refused.

    Args:
        positions: how the video's rotary positions are split.
    """
    from diffusers.models._modeling_parallel import (
        ContextParallelInput,
        ContextParallelOutput,
    )

    part = ContextParallelInput(positions.split_dim, positions.expected_dims)
    gathered = ContextParallelOutput(gather_dim=1, expected_dims=3)
    blocks = "transformer_blocks.*"
    return {
        f"{blocks}.audio_to_video_attn": {"query_rotary_emb": [part, part]},
        f"{blocks}.video_to_audio_attn.to_k": gathered,
        f"{blocks}.video_to_audio_attn.to_v": gathered,
    }
