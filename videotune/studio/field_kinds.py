"""Keys whose fields are more than a plain input."""

from typing import Literal

from videotune.config.optimizer_classes import usable_classes
from videotune.config.optimizers import OPTIMIZERS
from videotune.data.clip_file import CAPTION_SUFFIXES

SUGGESTIONS = {
    "datasets.caption_extension": CAPTION_SUFFIXES,
    "optimizer.name": (*OPTIMIZERS, *usable_classes()),
}
"""By key the values that are offered while the user types."""

PATH_KEYS: dict[str, Literal["folder", "file"]] = {
    "base_model_name": "folder",
    "base_parts": "folder",
    "init_from": "file",
    "prior_preservation": "folder",
    "sample_metrics.encoder": "folder",
    "text_encoder.file": "file",
    "transformer.file": "file",
    "vae.file": "file",
}
"""The keys that take a path, and what it leads to; "file" also takes a folder."""

UNUSED_WHEN_EMPTY = (
    "datasets.caption_column",
    "datasets.caption_prefix",
    "datasets.caption_suffix",
    "datasets.caption_weights",
    "datasets.file_column",
    "datasets.max_clips",
    "datasets.trigger",
    "early_stopping",
    "embedding.init_text",
    "init_from",
    "missing_caption_text",
    "prior_preservation",
    "push_checkpoints_to",
    "push_to",
    "save_keep",
    "text_encoder.file",
    "transformer.file",
    "vae.file",
)
"""Keys without a default that do nothing while their field is empty. A run chooses the
values of all others itself.
"""
