"""Train text encoders: check their settings, and attach their trainable parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from videotune.adapters import layers
from videotune.config.schema import Config
from videotune.config.sections import token_names
from videotune.job.experts import of_expert
from videotune.memory.checkpointing import checkpoint_text
from videotune.models.base import DiffusersModel
from videotune.types import Batch

ROWS = "embedding."
"""Prefix of token rows in a checkpoint; the text encoder's name follows."""


def live_text(config: Config) -> layers.LiveText | None:
    """Return how captions are encoded in the step, or None if text states are cached."""
    if not config.text_in_step:
        return None
    if config.training_method == "EMBEDDING":
        return layers.LiveText(config.embedding.tokens)
    return layers.LiveText(())


def encode_live_text(
    family: DiffusersModel, text: layers.LiveText | None, batch: Batch
) -> Batch:
    """Return the batch with its captions encoded now; unchanged if text states are
    cached (``text`` None).

    Extras of a clip, such as its first frame, stay as they are. Training and validation
    both call this.
    """
    if text is None:
        return batch
    captions = [text.with_all_tokens(caption) for caption in batch.captions]
    encoded = family.encode_in_loop(captions)
    extras = {**batch.conditioning.extras, **encoded.extras}
    conditioning = replace(encoded, extras=extras)
    return replace(batch, conditioning=conditioning)


def refuse_text(family: DiffusersModel, config: Config) -> None:
    """Raise VideotuneError for patterns that match no weight, or an unusable new token,
    before anything is encoded.
    """
    settings = config.text_encoder
    if settings.train and settings.layers is not None:
        names = []
        for part, net in family.text_skeletons().items():
            for path, _ in net.named_parameters():
                names.append(f"{part}.{path}")
        layers.layers_of(names, settings.layers, of_text=True)

    if config.training_method == "EMBEDDING":
        for tokenizer in family.tokenizers().values():
            layers.add_tokens(tokenizer, config.embedding.tokens)


def attach_text(
    family: DiffusersModel, config: Config
) -> dict[str, dict[str, nn.Parameter]]:
    """Make the chosen modules of the family's text encoders trainable.

    Returns:
        The parameters, by the group of their learning rate and by their names in
        checkpoints.
    """
    if not config.text_in_step:
        return {}

    parts = family.text_parts()
    encoders = {name: part.encoder for name, part in parts.items()}
    for encoder in encoders.values():
        checkpoint_text(encoder, config.gradient_checkpointing or "ON")

    if config.training_method != "EMBEDDING":
        parameters = layers.add_text(encoders, config.text_encoder.layers)
        return {"text_encoder": parameters}

    rows_by_encoder = layers.add_rows(parts, config.embedding, config.seed)
    rows_by_name = {}
    for encoder_name, rows in rows_by_encoder.items():
        rows_by_name[ROWS + encoder_name] = rows
    return {"embedding": rows_by_name}


def by_part(
    family: DiffusersModel, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Split trained tensors into those of the denoiser and those of each text encoder,
    by the names in them.
    """
    text: dict[str, dict[str, Tensor]] = {}
    text_names: set[str] = set()
    for part in family.text_skeletons():
        tensors = of_expert(state, f"{part}.")
        text[part] = tensors
        text_names.update(f"{part}.{name}" for name in tensors)

    denoiser = {}
    for name, value in state.items():
        if name not in text_names:
            denoiser[name] = value
    return denoiser, text


def put_text(
    family: DiffusersModel, config: Config, state: Mapping[str, Tensor], where: str
) -> Callable[[str], str]:
    """Load a checkpoint's tensors into the family's text encoders.

    Args:
        family: the base model.
        config: the run's settings.
        state: tensors of the checkpoint.
        where: the checkpoint, for messages.

    Returns:
        A function that spells a prompt as the text encoders read it.
    """
    text = live_text(config)
    if text is None:
        return str

    parameters: dict[str, nn.Parameter] = {}
    for group in attach_text(family, config).values():
        parameters |= group
    tensors = {}
    for name, value in state.items():
        if name in parameters:
            tensors[name] = value
    layers.load_weights(parameters, tensors, where)
    return text.with_all_tokens


def put_files(
    family: DiffusersModel, embeddings: Sequence[tuple[str, Mapping[str, Tensor]]]
) -> Callable[[str], str]:
    """Add the token rows of embedding files to the family's text encoders.

    Args:
        family: the base model.
        embeddings: (token, rows by text encoder) of each file.

    Returns:
        A function that spells a prompt as the text encoders read it.
    """
    tokens_of: dict[str, tuple[str, ...]] = {}
    for token, rows_by_encoder in embeddings:
        for encoder, rows in rows_by_encoder.items():
            tokens = token_names(token, len(rows))
            tokens_of[token] = tokens
            part = family.text_parts()[encoder]
            layers.lay_rows(part, tokens, rows)

    def spell(prompt: str) -> str:
        for tokens in tokens_of.values():
            prompt = layers.spelled(prompt, tokens)
        return prompt

    return spell


def text_size(family: DiffusersModel, config: Config) -> tuple[int, int]:
    """Return how many modules and numbers of the text encoders would train."""
    encoders = family.text_skeletons()
    if config.training_method == "EMBEDDING":
        total_width = 0
        for encoder in encoders.values():
            table: Any = encoder.get_input_embeddings()  # type: ignore[operator]
            total_width += table.weight.shape[1]
        return len(encoders), config.embedding.vectors * total_width

    parameters = layers.add_text(encoders, config.text_encoder.layers)
    module_paths = set()
    numbers = 0
    for name, parameter in parameters.items():
        module_path, _, _ = name.rpartition(".")
        module_paths.add(module_path)
        numbers += parameter.numel()
    return len(module_paths), numbers
