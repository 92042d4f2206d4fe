"""Values that contradict each other, or that nothing would use, are refused by the name of their key before any work."""

from typing import Any

import pytest

from tests.effects.effects_kit import Lab, trainer_of
from videotune.errors import VideotuneError

FULL = {"training_method": "FINE_TUNE"}
TOKENS = {"training_method": "EMBEDDING"}
OFT = {"lora.variant": "OFT", "lora.rank": 4}
SHARDED = {"sharding": "FULL"}
ROUNDED = {"optimizer.masters": "STOCHASTIC_ROUNDING"}
WITHIN = {"optimizer.step_in_backward": True}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lora.targets": "everything"}, r"lora\.targets"),
    ({"lora.targets": ["to_z"]}, r"lora\.targets"),
    ({"transformer.file": "none.safetensors"}, "transformer.file: no such file"),
    (OFT | {"lora.alpha": 4}, "lora.alpha: OFT turns weights and scales nothing"),
    (OFT | {"lora.dropout": 0.1}, "lora.dropout: PEFT's OFT drops nothing out"),
    (OFT | {"lora.rank": 1}, "lora.rank: OFT turns so many inputs together, at least 2"),
    (OFT | {"lora.rank": 5}, "lora.rank: OFT turns 5 inputs at a time"),
    (OFT | {"output_model_format": "diffusers"}, "output_model_format: OFT for Wan 2.1 T2V has peft, not 'diffusers'"),
    ({"output_model_format": ["diffusers", "kohya"]}, r"output_model_format.*'kohya'.*comfyui"),
    ({"transformer.layers": ["blocks.1"]}, r"transformer\.layers: it is for FINE_TUNE; .* lora\.targets says"),
    (FULL | {"transformer.layers": ["blocks.9"]}, r"transformer\.layers: 'blocks\.9' matches no module or parameter"),
    ({"transformer.train": False}, "transformer.train: LORA trains an adapter of the transformer"),
    (FULL | {"transformer.train": False}, "transformer.train: nothing would train"),
    (TOKENS | {"transformer.train": True}, "transformer.train: EMBEDDING trains new tokens"),
    ({"text_encoder.train": True}, r"text_encoder.train: .* LORA does not"),
    (TOKENS | {"text_encoder.train": True}, "text_encoder.train: EMBEDDING trains new tokens"),
    (
        FULL | {"text_encoder.train": True, "text_encoder.layers": ["none"]},
        "text_encoder.layers: 'none' matches no module",
    ),
    (FULL | {"weight_dtype": "FLOAT_8"}, "weight_dtype: FINE_TUNE trains the transformer, and FLOAT_8 is for frozen"),
    (FULL | {"transformer.weight_dtype": "NFLOAT_4"}, "transformer.weight_dtype: FINE_TUNE trains the transformer"),
    (
        FULL | {"transformer.train": False, "text_encoder.train": True, "weight_dtype": "INT_8"},
        "or set transformer.weight_dtype alone",
    ),
    ({"weight_dtype": "FLOAT_9"}, "weight_dtype: 'FLOAT_9' is not one of"),
    ({"optimizer": "PAGED_ADAMW_8BIT"}, "PAGED_ADAMW_8BIT pages"),
    ({"optimizer": "PRODIGY", "learning_rate": 3e-4}, "a rate for other optimizers"),
    ({"optimizer": {"name": "PRODIGY", "step_in_backward": True}}, "PRODIGY finds one rate"),
    ({"optimizer.name": "ADAFACTOR", "optimizer.beta1": 0.5}, "ADAFACTOR keeps no such mean"),
    (ROUNDED | {"train_dtype": "BFLOAT_16"}, "an adapter trains, in float32"),
    (ROUNDED | FULL | {"train_dtype": "FLOAT_32"}, "they are float32 themselves"),
    (ROUNDED | FULL | {"train_dtype": None}, "train_dtype is FLOAT_32 unless set"),
    (WITHIN | {"gradient_accumulation_steps": 2}, "cannot be summed over"),
    (WITHIN | {"batch_size": 2, "micro_batch_size": 1}, "passes of micro_batch_size 1"),
    (SHARDED | {"layer_offload_fraction": 0.5}, "layer_offload_fraction"),
    (SHARDED | {"gradient_checkpointing": "CPU_OFFLOADED"}, "gradient_checkpointing"),
    (SHARDED | FULL | {"optimizer.name": "MUON"}, "optimizer.name: MUON"),
    (SHARDED | FULL | {"optimizer.name": "ADAMW_8BIT"}, "optimizer.name: ADAMW_8BIT"),
    ({"learning_rate_cycles": 2}, "it is for COSINE_RESTARTS"),
    ({"learning_rate_power": 2.0, "learning_rate_scheduler": "COSINE"}, "it is for POLYNOMIAL"),
    ({"timestep_mean": 0.5, "timestep_distribution": "UNIFORM"}, "timestep_mean: timestep_distribution UNIFORM"),
    ({"timestep_std": 0.5, "timestep_distribution": "SIGMOID"}, "it is for LOGIT_NORMAL"),
    ({"timestep_scale": 0.5}, "it is for SIGMOID and MODE"),
    ({"timestep_alpha": 3.0}, "it is for BETA"),
    ({"timestep_beta": 3.0}, "it is for BETA"),
    ({"timestep_scale": 9.0, "timestep_distribution": "MODE"}, "scale of MODE"),
    ({"timestep_shift": "large"}, "timestep_shift"),
    ({"timestep_shift": "resolution"}, r"timestep_shift: .* publishes no shift by resolution; give a number"),
    ({"loss_weighting_gamma": 1.0}, "it is for min_snr"),
    ({"loss_weighting": "min_snr"}, r"loss_weighting.*flow"),
    ({"first_frame_probability": 0.0}, "first_frame_probability.*takes no image"),
    ({"missing_caption": "text"}, "belong together"),
    ({"resolution": None, "width": 96}, "width"),
    ({"resolution": None, "height": 64}, "height"),
    ({"width": 96, "height": 64}, "with resolution"),
    ({"resolution": None, "width": 1e6, "height": 1}, "width"),
    ({"video_config.frames": 8, "video_config.strict_frames": True}, r"frames.*8.*9"),
    ({"video_config.temporal_compression_ratio": 2}, r"temporal_compression_ratio.*no multiple of this VAE's 4"),
    ({"video_config.temporal_compression_ratio": 6}, r"temporal_compression_ratio.*no multiple"),
    ({"video_config.spatial_compression_ratio": 4}, r"spatial_compression_ratio.*no multiple of this VAE's 8"),
    ({"sample_after": 1, "sample.frames": 6}, "sample.frames"),
    ({"sample_after": 1, "sample.resolution": "40x40"}, "sample.resolution"),
    ({"sample_after": 1, "sample.resolution": "64"}, "sample.resolution"),
    ({"sample.guidance_2": 2.0}, r"sample\.guidance_2.*one denoiser"),
]
"""Knobs, and what the error names."""

ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prior_preservation": True}, r"datasets\.prior_preservation.*regularization"),
    ({"kind": "validation", "loss_weight": 2}, r"datasets\.loss_weight.*never trained"),
    ({"loss_weight": 0}, r"datasets\.loss_weight: it is 0 for all"),
]
"""The same of the one dataset's own keys."""


@pytest.mark.parametrize(("knobs", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_nothing_would_use_is_refused(lab: Lab, knobs: dict[str, Any], named: str) -> None:
    with pytest.raises(VideotuneError, match=named):
        trainer_of(lab, knobs)


@pytest.mark.parametrize(("row", "named"), ROWS)
def test_keys_of_a_dataset_that_nothing_would_use_are_refused(lab: Lab, row: dict[str, Any], named: str) -> None:
    with pytest.raises(VideotuneError, match=named):
        trainer_of(lab, {"datasets": [{"path": str(lab.clips), **row}]})
