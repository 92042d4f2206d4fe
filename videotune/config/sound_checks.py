"""Keys of a config that do not go together with sound."""

from collections.abc import Iterator

from videotune.config.schema import Config
from videotune.model_spec import ModelSpec


def faults_with_sound(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield what does not go together with sound."""
    if config.generate is None:
        return
    if spec.sound is None:
        yield f"generate: {spec.title} has no sound. Leave it out"

    if not config.learns_video and config.condition_types:
        types = ", ".join(sorted(config.condition_types))
        yield (
            f"generate: sound: the whole video is given to it, so {types} changes nothing. Leave that out"
        )
    if not config.learns_video:
        video = config.video_config
        of_video = {
            "video_config.frame_dropout_probability": video.frame_dropout_probability,
            "video_config.temporal_consistency_weight": video.temporal_consistency_weight,
            "loss_mask": config.loss_mask.is_used,
        }
        for key, value in of_video.items():
            if value:
                yield f"{key}: only the sound is learnt (generate), and it acts on the video. Leave it out"

    is_joint = config.learns_video and config.learns_sound
    if not is_joint and config.sound.loss_weight != 1:
        yield (
            "sound.loss_weight: it weighs the sound's loss beside the video's; generate has one of them. Leave it out"
        )

    if not config.video_config.use_temporal_attention:
        yield (
            "video_config.use_temporal_attention: false keeps frames from each other, which sound would connect. "
            "Leave out generate, or this"
        )
