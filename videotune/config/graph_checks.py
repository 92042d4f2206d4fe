"""What rules out CUDA graphs (``cuda_graphs``) and saved outputs of attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from videotune.config.schema import Config


def faults_of_graphs(config: Config) -> Iterator[str]:
    """Yield a fault if a config asks for graphs that its passes cannot be."""
    reason = cannot_capture(config)
    if config.cuda_graphs is True and reason:
        yield f"cuda_graphs: {reason}. Set it to false"


def cannot_capture(config: Config) -> str | None:
    """Return why the config's passes cannot be CUDA graphs, or None."""
    if config.training_method == "FINE_TUNE":
        return "with FINE_TUNE a graph would keep a second gradient of every weight"
    if config.layer_offload_fraction:
        return "streamed weights change their place in every pass"
    if config.gradient_checkpointing in ("CPU_OFFLOADED", "IN_PARTS"):
        return f"with {config.gradient_checkpointing} the host decides in a pass what is copied"
    if config.sharding == "FULL":
        return "with sharding FULL the weights of a block are gathered within it"
    if config.optimizer.step_in_backward:
        return "with optimizer.step_in_backward a pass holds updates, which change in every step"
    if config.lora.dropout:
        return "lora.dropout draws anew in every pass"
    if config.text_in_step:
        return "captions that are encoded in the step differ in their tokens"
    if "NFLOAT_4" in (config.weight_dtype, config.transformer.weight_dtype):
        return "NFLOAT_4 was not tried in a graph"
    return None


def saved_attention_faults(config: Config) -> Iterator[str]:
    """Yield a fault of a block that is streamed and saves what attention returns."""
    saves = config.gradient_checkpointing == "ATTENTION_SAVED"
    if saves and config.layer_offload_fraction:
        yield (
            "gradient_checkpointing: ATTENTION_SAVED keeps attention's outputs on the device, while streamed blocks "
            "keep only their inputs. Set it to ON, or layer_offload_fraction to 0"
        )
