"""Keys of a config that do not go together with tokens that several processes share
(``context_parallel``).
"""

from collections.abc import Iterator
from pathlib import Path

from videotune.config.schema import Config
from videotune.files import read_json
from videotune.model_spec import ModelSpec

SPLIT_ATTENTION = ("auto", "native", "_native_cudnn", "_native_flash", "flash")
"""Installed back ends of attention that diffusers splits with gradients."""

SPLIT_MODELS = ", ".join(
    read_json(Path(__file__).with_name("models_with_token_plans.json"))
)
"""Models whose tokens diffusers splits, in words."""


def faults_of_context(config: Config) -> Iterator[str]:
    """Yield what does not go together with shared tokens, whatever the model."""
    if config.context_parallel == 1:
        return

    if config.attention not in SPLIT_ATTENTION:
        yield (
            f"attention: diffusers does not split tokens for {config.attention}, which context_parallel asks for. "
            "Set native, or context_parallel to 1"
        )
    if config.gradient_checkpointing == "ATTENTION_SAVED":
        yield (
            "gradient_checkpointing: with context_parallel attention is computed again in any case. "
            "Set it to ON"
        )
    if config.sample.cache_threshold:
        yield (
            "sample.cache_threshold: with context_parallel each process would decide by its own tokens which blocks to skip. "
            "Set it to 0"
        )
    if not config.video_config.use_temporal_attention:
        yield (
            "video_config.use_temporal_attention: with context_parallel no process has all tokens of a frame. "
            "Set it to true, or context_parallel to 1"
        )


def faults_of_context_in(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Yield what does not go together with shared tokens in a model."""
    parts = config.context_parallel
    if parts == 1:
        return

    if not spec.splits_tokens:
        yield (
            f"context_parallel: diffusers splits the tokens of these models: {SPLIT_MODELS}; not of {spec.title}. Set it to 1"
        )
    elif spec.attention_heads % parts:
        divisors = [n for n in range(1, parts) if spec.attention_heads % n == 0]
        yield (
            f"context_parallel: {spec.title} has {spec.attention_heads} heads of attention, which {parts} processes "
            f"cannot share equally. Set it to {divisors[-1]}"
        )
    if config.reads_sound:
        yield (
            "context_parallel: diffusers splits the tokens of a video, not those of its sound. "
            'Set generate to "video", or context_parallel to 1'
        )
