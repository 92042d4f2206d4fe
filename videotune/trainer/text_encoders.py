"""Text encoders of which something trains: what of the config says so, and how it is put in place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from videotune.adapters import layers
from videotune.config.schema import Config, token_names
from videotune.job.experts import of_expert
from videotune.memory.checkpointing import checkpoint_text
from videotune.models.base import DiffusersModel

ROWS = "embedding."
"""What the names of token rows begin with in a checkpoint; the text encoder's name follows."""


def live_text(config: Config) -> layers.LiveText | None:
    """How captions are read where text is encoded in the step; None where its states are cached."""
    if not config.text_in_step:
        return None
    return layers.LiveText(
        config.embedding.tokens if config.training_method == "EMBEDDING" else ()
    )


def refuse_text(family: DiffusersModel, config: Config) -> None:
    """Before anything is encoded: VideotuneError for patterns that name no weight, and a token that is none."""
    if config.text_encoder.train and config.text_encoder.layers is not None:
        nets = family.text_skeletons().items()
        named = [f"{part}.{path}" for part, net in nets for path, _ in net.named_parameters()]
        layers.layers_of(named, config.text_encoder.layers, of_text=True)
    if config.training_method == "EMBEDDING":
        for tokenizer in family.tokenizers().values():
            layers.add_tokens(tokenizer, config.embedding.tokens)


def attach_text(family: DiffusersModel, config: Config) -> dict[str, dict[str, nn.Parameter]]:
    """Put into the family's text encoders what trains of them; by the group of its rate, then by the checkpoints' names."""
    if not config.text_in_step:
        return {}
    parts = family.text_parts()
    encoders = {name: part.encoder for name, part in parts.items()}
    for encoder in encoders.values():
        checkpoint_text(encoder, config.gradient_checkpointing or "ON")
    if config.training_method == "EMBEDDING":
        rows = layers.add_rows(parts, config.embedding, config.seed)
        return {"embedding": {ROWS + name: parameter for name, parameter in rows.items()}}
    return {"text_encoder": layers.add_text(encoders, config.text_encoder.layers)}


def by_part(
    family: DiffusersModel, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """What trained of the denoiser, and of each text encoder, all by the names in them."""
    text = {part: of_expert(state, f"{part}.") for part in family.text_skeletons()}
    beside = {f"{part}.{name}" for part, own in text.items() for name in own}
    return {name: value for name, value in state.items() if name not in beside}, text


def put_text(
    family: DiffusersModel, config: Config, state: Mapping[str, Tensor], where: str
) -> Callable[[str], str]:
    """What a checkpoint holds of the text encoders, put into the family's; returns how prompts are to be spelled."""
    live = live_text(config)
    if live is None:
        return str
    held = {
        name: parameter
        for group in attach_text(family, config).values()
        for name, parameter in group.items()
    }
    layers.load_weights(
        held, {name: value for name, value in state.items() if name in held}, where
    )
    return live.spell


def put_files(
    family: DiffusersModel, found: Sequence[tuple[str, Mapping[str, Tensor]]]
) -> Callable[[str], str]:
    """The rows of files (token, rows by text encoder) laid over the family's; returns how prompts are to be spelled."""
    words: dict[str, tuple[str, ...]] = {}
    for token, rows in found:
        for name, own in rows.items():
            words[token] = token_names(token, len(own))
            layers.lay_rows(family.text_parts()[name], words[token], own)

    def spell(prompt: str) -> str:
        for tokens in words.values():
            prompt = layers.spelled(prompt, tokens)
        return prompt

    return spell


def text_size(family: DiffusersModel, config: Config) -> tuple[int, int]:
    """(modules, numbers) of the text encoders that would train."""
    encoders = family.text_skeletons()
    if config.training_method == "EMBEDDING":
        tables: list[Any] = [encoder.get_input_embeddings() for encoder in encoders.values()]  # type: ignore[operator]
        return len(tables), config.embedding.vectors * sum(
            table.weight.shape[1] for table in tables
        )
    chosen = layers.add_text(encoders, config.text_encoder.layers)
    return len({name.rpartition(".")[0] for name in chosen}), sum(
        parameter.numel() for parameter in chosen.values()
    )
