"""Which runs cannot compute a block again part by part (``gradient_checkpointing:
IN_PARTS``).
"""

from collections.abc import Iterator

from videotune.config.schema import Config


def faults_of_parts(config: Config) -> Iterator[str]:
    """Yield faults of keys that do not go with IN_PARTS."""
    if config.gradient_checkpointing != "IN_PARTS":
        return
    reason = cannot_compute_in_parts(config)
    if reason is not None:
        yield f"gradient_checkpointing: {reason}. Set it to CPU_OFFLOADED, or to ON"


def cannot_compute_in_parts(config: Config) -> str | None:
    """Return why blocks cannot be computed again in parts, or None."""
    if config.compile is True:
        return "IN_PARTS computes parts of a block by themselves, and compile makes one graph of it"
    if config.training_method == "FINE_TUNE" or config.text_in_step:
        return (
            "IN_PARTS is for adapters on frozen weights: where text or all weights train, a block's gradients are summed "
            "in an order that only its whole graph keeps"
        )
    if config.context_parallel > 1:
        return "IN_PARTS was not tried with context_parallel"
    if config.sharding == "FULL":
        return "with sharding FULL a block's weights would not be there for its parts"
    return None
