"""The connectors of LTX-2: two small transformers between Gemma and the transformer, one
for video tokens and one for sound tokens.

diffusers' LTX2TextConnectors first projects the states of all of Gemma's layers, then
runs the connectors. Where an adapter trains on these, captions are cached after the
projection, and the connectors run in the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.lazy import torch
from videotune.model_spec import ConnectorRules
from videotune.models.ltx2_configs import CONNECTORS
from videotune.models.model_files import read_config

if TYPE_CHECKING:
    from torch import Tensor, nn


CONNECTORS_CLASS = "ltx2.LTX2TextConnectors"

PROJECTIONS = ("text_proj_in", "video_text_proj_in", "audio_text_proj_in")
"""Modules of LTX2TextConnectors that make the states before the connectors."""

VIDEO_CONNECTOR = "video_connector"
AUDIO_CONNECTOR = "audio_connector"

CONNECTOR_BLOCKS = (
    f"{VIDEO_CONNECTOR}.transformer_blocks",
    f"{AUDIO_CONNECTOR}.transformer_blocks",
)
"""Lists of blocks within LTX2TextConnectors, in the order in which they run."""

CONNECTOR_TARGETS = (
    r"connectors\.(video|audio)_connector\.transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)",
    r"connectors\.(video|audio)_connector\.transformer_blocks\.\d+\.ff\.(net\.0\.proj|net\.2)",
)

AUTHORS_NAMES = (
    (
        r"^connectors\.(video|audio)_connector\.transformer_blocks\.",
        r"\1_embeddings_connector.transformer_1d_blocks.",
    ),
    (r"^connectors\.(video|audio)_connector\.", r"\1_embeddings_connector."),
)
"""Names of the connectors in the authors' files, and in ComfyUI, where they are modules
of the diffusion model.
"""


def connector_rules(
    text_tokens: int, text_width: int, sound_width: int
) -> ConnectorRules:
    """Return how an adapter trains on the connectors.

    Args:
        text_tokens: tokens of a caption, at most.
        text_width: numbers of a projected state of a token.
        sound_width: numbers of its other projected state, for the sound's connector; 0
            if both connectors read the same one.
    """
    return ConnectorRules(
        path=CONNECTORS,
        blocks=tuple(f"{CONNECTORS}.{path}" for path in CONNECTOR_BLOCKS),
        lora_targets=CONNECTOR_TARGETS,
        text_width=text_width,
        text_numbers=text_tokens * sound_width,
    )


def rules_of_checkpoint(folder: Path, text_tokens: int) -> ConnectorRules:
    """Return how an adapter trains on the connectors of a checkpoint."""
    config = read_config(folder / CONNECTORS / "config.json")
    if has_shared_projection(config):
        return connector_rules(text_tokens, config["caption_channels"], 0)
    return connector_rules(
        text_tokens, config["video_hidden_dim"], config["audio_hidden_dim"]
    )


def has_shared_projection(config: Mapping[str, Any]) -> bool:
    """Return whether both connectors read one projection of Gemma's states (LTX-2)."""
    return not config.get("per_modality_projections", False)


def states_before_connectors(connectors: Any) -> Any:
    """Let LTX2TextConnectors return what its connectors would read; returns it."""

    class PassOn(torch.nn.Module):
        """Stands in for a connector: returns its input, and a mask of zeros, as the
        connector does.
        """

        def forward(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return states, torch.zeros_like(mask)

    connectors.video_connector = PassOn()
    connectors.audio_connector = PassOn()
    return connectors


def without_projections(connectors: Any) -> Any:
    """Remove what has run before a caption was cached; returns the connectors."""
    for name in PROJECTIONS:
        if hasattr(connectors, name):
            delattr(connectors, name)
    return connectors


def connect(connector: nn.Module, states: Tensor, mask: Tensor) -> Tensor:
    """Run a connector over captions, as LTX2TextConnectors does.

    Registers take the places after the caption, so all states of the result count.

    Args:
        connector: one of the two.
        states: projected states (B,L,D).
        mask: (B,L), true where the caption is.
    """
    padding = (mask.to(states.dtype) - 1) * torch.finfo(states.dtype).max
    connected: Tensor = connector(states, padding[:, None, None])[0]
    return connected
