"""Keys that cannot act: each condition of the table, failing and holding."""

from typing import Any

import pytest

from videotune.config.applies import TABLE, Facts, applies_when, conditions, unused
from videotune.config.nested_keys import merge, unflatten
from videotune.config.resolve import parse, resolve
from videotune.config.schema import Config, leaves
from videotune.errors import VideotuneError
from videotune.models import registry


def config_of(**settings: Any) -> Config:
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return parse(unflatten(dotted))


FULL = {"training_method": "FINE_TUNE"}
CLIPS = {"path": "clips"}
CASES: dict[str, tuple[Facts, Facts]] = {
    "lora.rank": (Facts(config_of(**FULL)), Facts(config_of())),
    "lora.targets": (
        Facts(config_of(training_method="EMBEDDING")),
        Facts(config_of(lora__variant="LOKR")),
    ),
    "lora.modules": (
        Facts(config_of(lora__variant="LOHA")),
        Facts(config_of(lora__variant="DORA")),
    ),
    "optimizer.args": (
        Facts(config_of(optimizer="ADAMW")),
        Facts(config_of(optimizer="torch.optim:SGD")),
    ),
    "optimizer.beta1": (
        Facts(config_of(optimizer="torch.optim:SGD")),
        Facts(config_of(optimizer="ADAMW")),
    ),
    "embedding.vectors": (
        Facts(config_of()),
        Facts(config_of(training_method="EMBEDDING", transformer__train=False)),
    ),
    "text_encoder.layers": (
        Facts(config_of(**FULL)),
        Facts(config_of(**FULL, text_encoder__train=True)),
    ),
    "learning_rate": (
        Facts(config_of(experts="low", learning_rate_low=1e-5)),
        Facts(config_of(experts="low")),
    ),
    "learning_rate of rows": (
        Facts(
            config_of(
                training_method="EMBEDDING",
                transformer__train=False,
                embedding_learning_rate=1e-3,
            )
        ),
        Facts(config_of(training_method="EMBEDDING", transformer__train=False)),
    ),
    "learning_rate of text": (
        Facts(
            config_of(
                **FULL,
                transformer__train=False,
                text_encoder__train=True,
                text_encoder__learning_rate=1e-5,
            )
        ),
        Facts(
            config_of(
                **FULL, text_encoder__train=True, text_encoder__learning_rate=1e-5
            )
        ),
    ),
    "learning_rate_low": (
        Facts(config_of(experts="high"), num_denoisers=2),
        Facts(config_of(experts="low"), num_denoisers=2),
    ),
    "expert_period": (
        Facts(config_of(), num_denoisers=1),
        Facts(config_of(), num_denoisers=2),
    ),
    "timestep_stratified": (
        Facts(config_of(), samples_per_step=1),
        Facts(config_of(), samples_per_step=2),
    ),
    "ema.device": (Facts(config_of()), Facts(config_of(ema__decay=0.99))),
    "backup_keep": (
        Facts(config_of(backup_after=0.0)),
        Facts(config_of(backup_after=0.0, backup_every=5)),
    ),
    "sound.changed_speed": (
        Facts(config_of()),
        Facts(config_of(generate=["video", "sound"])),
    ),
    "tracker_project": (Facts(config_of()), Facts(config_of(trackers=["wandb"]))),
    "object_cache_gb": (
        Facts(config_of()),
        Facts(config_of(cache_dir="s3://bucket/cache")),
    ),
    "push_checkpoints_keep": (
        Facts(config_of()),
        Facts(config_of(push_checkpoints_to="user/run")),
    ),
    "notify_on": (Facts(config_of()), Facts(config_of(notify=["MY_PHONE"]))),
    "sample.steps": (Facts(config_of(samples=0)), Facts(config_of(samples=["a"]))),
    "sample.seed": (Facts(config_of(sample_after=0)), Facts(config_of())),
    "sample_metrics.steps": (
        Facts(config_of(sample_metrics__budget=0.0)),
        Facts(config_of()),
    ),
    "forgetting.steps": (
        Facts(config_of(forgetting__budget=0.0)),
        Facts(config_of()),
    ),
    "video_config.max_frames": (
        Facts(config_of(video_config__frames=9)),
        Facts(config_of()),
    ),
    "video_config.frame_dropout_probability": (
        Facts(config_of(), most_frames=1),
        Facts(config_of(), most_frames=5),
    ),
    "video_config.video_batch_size_multiplier": (
        Facts(config_of(), mixes_images=False),
        Facts(config_of(), mixes_images=True),
    ),
    "video_config.window_stride": (
        Facts(config_of()),
        Facts(config_of(video_config__windows="slide")),
    ),
    "video_config.keyframe_source": (
        Facts(config_of()),
        Facts(config_of(video_config__frame_sample_strategy="keyframe")),
    ),
    "video_config.variants": (
        Facts(config_of(), has_random_windows=False),
        Facts(config_of(), has_random_windows=True),
    ),
    "video_config.windows": (
        Facts(config_of(video_config__stretch=True)),
        Facts(config_of()),
    ),
    "validation_fraction": (
        Facts(config_of(datasets=[CLIPS, CLIPS | {"kind": "validation"}])),
        Facts(config_of(datasets=[CLIPS])),
    ),
    "validation_windows": (
        Facts(config_of(validate_every=0)),
        Facts(config_of(validate_every=3)),
    ),
    "early_stopping": (
        Facts(config_of(), held_out_clips=1),
        Facts(config_of(), held_out_clips=2),
    ),
}
"""For a key of each condition: facts under which it cannot act, and under which it can."""


@pytest.mark.parametrize("key", CASES)
def test_a_key_is_unused_exactly_if_its_condition_fails(key: str) -> None:
    failing, holding = CASES[key]
    key = key.partition(" ")[0]
    assert key in unused(failing)
    assert key not in unused(holding)


def test_every_condition_has_a_case() -> None:
    for condition in TABLE:
        assert set(condition.keys) & set(CASES), condition.keys
        assert set(condition.keys) <= set(leaves())


def test_what_is_not_known_counts_as_acting() -> None:
    known = Facts(config_of())
    for key in ("timestep_stratified", "video_config.variants", "expert_period"):
        assert key not in unused(known)


REFUSED = (
    ("wan", {"learning_rate_low": 1e-5}),
    ("wan", {"expert_period": 3}),
    ("wan", {"experts": "high", "learning_rate_low": 1e-5}),
    ("wan", {"experts": "low", "expert_period": 3}),
    ("wan", {"experts": "low", "expert_share": 0.5}),
    ("wan", {"lora.variant": "LOKR", "lora.learning_rate_ratio": 4.0}),
    ("wan", {"loss_delta": 0.5}),
    ("wan", {"timestep_beta": 3.0}),
    ("wan", {"optimizer.name": "PRODIGY", "learning_rate": 1.0, "learning_rate_low": 1e-4}),
    ("wan", {"optimizer.name": "PRODIGY", "learning_rate": 1.0, "training_method": "EMBEDDING",
             "embedding_learning_rate": 1e-4}),
    ("wan", {"optimizer.name": "PRODIGY", "learning_rate": 1.0, "training_method": "FINE_TUNE",
             "text_encoder.train": True, "text_encoder.learning_rate": 1e-4}),
    ("wan", {"datasets": [{"path": "clips", "kind": "validation", "caption_weights": [1.0]}]}),
    ("wan", {"datasets": [{"path": "clips", "kind": "validation", "caption_shuffle": True}]}),
    ("wan", {"datasets": [{"path": "clips", "caption_keep_tokens": 1}]}),
    ("wan", {"datasets": [{"path": "clips", "caption_wildcards": True, "caption_separator": ";"}]}),
    ("wan", {"datasets": [{"path": "clips", "caption_variants": 3}]}),
    ("wan", {"datasets": [{"path": "clips", "from_step": 9, "until_step": 8}]}),
    ("wan", {"datasets": [{"path": "clips", "from_step": 9}], "epochs": 2.0}),
    ("wan", {"datasets": [{"path": "clips", "until_step": 9}], "save_every_epochs": 2.0}),
    ("wan", {"datasets": [{"path": "clips", "kind": "validation", "probability": 0.5}]}),
)  # fmt: skip


@pytest.mark.parametrize(("family", "settings"), REFUSED)
def test_a_key_that_contradicts_another_is_refused(
    family: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(VideotuneError):
        resolve(merge(unflatten(settings)), {}, registry.find(family).spec)


def test_the_conditions_have_words() -> None:
    assert applies_when("steps") == ""
    for condition in conditions():
        for key in condition.keys:
            assert applies_when(key)
            assert condition.otherwise
