"""What does not go with sharded weights and several kinds of samples in a pass."""

from collections.abc import Iterator

from videotune.config.schema import Config
from videotune.model_spec import ModelSpec


def faults_with_passes_apart(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield faults of sharded weights where processes would run the network unequally
    often, and wait for one another for ever.
    """
    samples = config.micro_batch_size or config.batch_size
    share = config.first_frame_probability or 0.0
    is_mixed = spec.predicts_images_apart and 0 < share < 1
    if config.sharding == "FULL" and is_mixed and samples > 1:
        yield (
            f"sharding: FULL does not go with first_frame_probability {share:g} at several samples a pass: {spec.title} "
            "predicts samples with and without an image apart, and all processes must run the network equally often. "
            "Set micro_batch_size to 1, or first_frame_probability to 0 or 1"
        )
