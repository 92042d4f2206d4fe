"""Settings that decide how many samples go through the network together."""

from collections.abc import Iterator

from videotune.config.schema import Config
from videotune.model_spec import ModelSpec


def largest_batch(config: Config) -> int:
    """Return the most samples of a forward pass that the config asks for."""
    batches = [dataset.batch_size or 0 for dataset in config.datasets]
    return max([config.batch_size, *batches])


def faults_of_passes(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield a fault if processes of a sharded network could make unequal numbers of
    passes, and wait for each other without end.
    """
    is_one_by_one = config.micro_batch_size == 1 or largest_batch(config) == 1
    if config.sharding != "FULL" or is_one_by_one:
        return
    if spec.text_by_length:
        yield (
            f"sharding: {spec.title} reads captions of one length at a time, and with sharding FULL every process must "
            "make as many passes as the others. Set micro_batch_size to 1, or sharding to OFF"
        )
    share = config.first_frame_probability or 0.0
    if spec.predicts_images_apart and 0 < share < 1:
        yield (
            f"sharding: {spec.title} predicts samples with and without an image apart, and with sharding FULL every "
            "process must make as many passes as the others. Set micro_batch_size to 1, or first_frame_probability to 0 or 1"
        )
