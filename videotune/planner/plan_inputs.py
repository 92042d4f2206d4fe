"""Everything that a plan of memory depends on, and its keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from videotune._version import __version__
from videotune.config import schema
from videotune.files import digest
from videotune.job.job import Job
from videotune.latent_cache.clip_ends import appended_sizes
from videotune.model_spec import ModelSpec
from videotune.models.registry import find
from videotune.trainer.build import weights_of
from videotune.types import ClipShape
from videotune.validation.selection import preview_settings

UNRELATED = ("architectures", "dtype", "torch_dtype", "transformers_version")
"""Keys of a network's config that no shape depends on, beside those with an underscore."""


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a plan of memory depends on."""

    spec: ModelSpec
    folder: Path
    """Folder of the base model."""
    config: schema.Config
    dtype: str
    shapes: tuple[ClipShape, ...]
    """The run's shapes, the most expensive first."""
    preview: ClipShape | None
    """Shape of a preview; None without previews."""

    @classmethod
    def of(cls, job: Job, dtype: str) -> PlanInputs:
        """Return the inputs of a job that names a base model."""
        assert job.base is not None
        config = job.config
        preview = None
        if config.sample_after != 0 and config.samples:
            preview = preview_settings(job).shape
        return cls(
            job.spec, job.base.folder, config, dtype, job.shapes_by_cost, preview
        )

    @property
    def key(self) -> str:
        """A hash of everything that the step's spec depends on."""
        config = self.config
        inputs = {
            "videotune": __version__,
            "encoding": find(self.spec.name).encoding,
            "configs": configs_of(self.folder),
            **self.run_settings(),
            "lora": config.lora.model_dump(mode="json"),
            "optimizer": [
                config.optimizer.name,
                config.optimizer.args,
                config.optimizer.masters,
                config.optimizer.step_in_backward,
            ],
            "shapes": [str(shape) for shape in self.shapes],
            "preview": str(self.preview),
        }

        if self.spec.reads_sound:
            has_sound = [shape.sound for shape in self.shapes]
            inputs["sound"] = [list(self.spec.generates), has_sound]
        if config.conditions:
            inputs["appended"] = [
                appended_sizes(config, shape, self.spec) for shape in self.shapes
            ]
        return digest(inputs)[:32]

    def run_settings(self) -> dict[str, Any]:
        """Return the settings on which a step depends beside the clips' shapes, the
        adapter and the optimizer.
        """
        config = self.config
        settings: dict[str, Any] = {
            "authors_text": self.spec.authors_text,
            "dtype": self.dtype,
            "weights": asdict(weights_of(config, self.dtype)),
            "method": [
                config.training_method,
                config.transformer.train,
                config.transformer.layers,
                config.experts,
            ],
            "text_encoder": [
                config.text_encoder.train,
                config.text_encoder.layers,
                config.embedding.vectors,
            ],
            "ema": config.ema.model_dump(mode="json"),
            "isolated": not config.video_config.use_temporal_attention,
            "first_frame": bool(config.first_frame_probability),
            "loss": [config.loss, config.loss_weighting],
            "consistency": bool(config.video_config.temporal_consistency_weight),
            "distilled_guidance": config.distilled_guidance is not None,
            "whole_graph": config.compile is True,
        }

        if self.spec.connectors_in_step:
            settings["connectors"] = True
        if config.conditions:
            settings["conditions"] = sorted(item.type for item in config.conditions)
        return settings


def configs_of(folder: Path) -> dict[str, Any]:
    """Return the configs of a base model's networks, by folder, without what no shape
    depends on.
    """
    configs = {}
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        configs[path.parent.name] = _related(config)
    return configs


def _related(config: Any) -> Any:
    """Return a config without what no shape depends on."""
    if not isinstance(config, Mapping):
        return config
    related = {}
    for key, value in config.items():
        is_private = key.startswith("_") and key != "_class_name"
        if not is_private and key not in UNRELATED:
            related[key] = _related(value)
    return related
