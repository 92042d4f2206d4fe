"""Keys of a config that do not go together with an adapter on text connectors."""

from collections.abc import Iterator

from videotune.config.schema import Config
from videotune.config.sections import CONNECTORS
from videotune.model_spec import ModelSpec


def faults_with_connectors(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield what does not go together with connectors among ``lora.targets``."""
    if not config.trains_connectors:
        return

    if spec.connectors is None:
        yield f"lora.targets: {spec.title} has no text connectors. Leave {CONNECTORS} out"
    if config.lora.variant != "LORA":
        yield (
            f"lora.variant: diffusers reads a plain LoRA of the text connectors, not {config.lora.variant}. "
            f"Set LORA, or take {CONNECTORS} out of lora.targets"
        )
    if config.sharding == "FULL":
        yield (
            "sharding: with FULL no process has a whole block, and the text connectors run outside of the network "
            f"that shares its blocks out. Set OFF, or take {CONNECTORS} out of lora.targets"
        )
    formats = config.output_model_format or ()
    if "peft" in ([formats] if isinstance(formats, str) else formats):
        yield (
            "output_model_format: a file of PEFT is for one network, and transformer and text connectors are two. "
            "Set diffusers, comfyui, or both"
        )
