"""Readings of published base models that come with videotune, so that a plan of a preset
needs no run on fake tensors.

A step's bytes are affine in its tokens and in the rank of its LoRA, but for a few
moments of small clips, and its operations are quadratic in the tokens; an autoencoder's
are affine in the pixels of a frame and of a clip. Tables have readings at some sizes,
and what lies between two of them is interpolated: ``docs/planning.md`` has the measured
difference. ``scripts/write_ledgers.py`` writes the tables.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from videotune.config.schema import Config
from videotune.files import digest, read_json
from videotune.latent_cache.clip_ends import appended_sizes
from videotune.model_spec import ModelSpec
from videotune.models.registry import find
from videotune.planner.ledger import CountsByPart, Reading, Work
from videotune.planner.plan_inputs import PlanInputs, configs_of
from videotune.trainer.build import weights_of
from videotune.types import ClipShape

FOLDER = Path(__file__).parent / "readings"
"""A file for each family."""

ANY_RANK = ("rank", "alpha", "learning_rate_ratio", "dropout")
"""Keys of a LoRA that change no number of a table, or only by the rank."""

Table = Mapping[str, Any]
Numbers = Any
"""A number of a table: one, if it is the same at all sizes, or one for each of them."""


@cache
def family_tables(family: str) -> Mapping[str, Mapping[str, Table]]:
    """Return the tables of a family by kind and key; empty without any."""
    path = FOLDER / f"{family}.json"
    return read_json(path) if path.is_file() else {}


def lora_of(config: Config) -> dict[str, Any] | None:
    """Return what a network's readings depend on of the LoRA; None without one."""
    if config.training_method != "LORA":
        return None
    lora = config.lora.model_dump(mode="json")
    if has_affine_rank(config):
        lora = {key: value for key, value in lora.items() if key not in ANY_RANK}
    return lora


def has_affine_rank(config: Config) -> bool:
    """Whether every number is affine in the rank of the run's LoRA."""
    lora = config.lora
    has_own_ranks = any(module.rank is not None for module in lora.modules)
    return (
        config.training_method == "LORA"
        and lora.variant == "LORA"
        and not lora.dropout
        and not has_own_ranks
    )


def step_key(inputs: PlanInputs) -> str:
    """Return the key of a step's table: everything but sizes and rank."""
    optimizer = inputs.config.optimizer
    return digest(
        {
            "network": network_key(inputs.spec, inputs.folder, inputs.config),
            "settings": inputs.run_settings(),
            "optimizer": [optimizer.masters, optimizer.step_in_backward],
        }
    )


def network_key(spec: ModelSpec, folder: Path, config: Config) -> str:
    """Return the key of what trains in a denoiser, but for the rank."""
    return digest(
        {
            "sizes": sizes_key(spec, folder),
            "method": [
                config.training_method,
                config.transformer.train,
                config.transformer.layers,
            ],
            "lora": lora_of(config),
            "idle": spec.idle_paths,
            "text": text_training(config),
        }
    )


def sizes_key(spec: ModelSpec, folder: Path) -> str:
    """Return the key of a denoiser."""
    configs = configs_of(folder)
    related = {
        name: config for name, config in configs.items() if not _is_autoencoder(name)
    }
    return digest(
        {
            "family": spec.name,
            "encoding": find(spec.name).encoding,
            "connectors": spec.connectors_in_step,
            "configs": related,
        }
    )


def autoencoder_key(inputs: PlanInputs) -> str:
    """Return the key of an autoencoder's table."""
    configs = configs_of(inputs.folder)
    autoencoder = {name: configs[name] for name in configs if _is_autoencoder(name)}
    return digest(
        {
            "family": inputs.spec.name,
            "encoding": find(inputs.spec.name).encoding,
            "dtype": inputs.dtype,
            "configs": autoencoder,
        }
    )


def text_key(inputs: PlanInputs) -> str:
    """Return the key of a text encoder's readings."""
    config = inputs.config
    return digest(
        {
            "base": sizes_key(inputs.spec, inputs.folder),
            "tokens": inputs.spec.text_tokens,
            "authors_text": inputs.spec.authors_text,
            "dtype": inputs.dtype,
            "weights": asdict(weights_of(config, inputs.dtype))["text_encoder"],
            "training": text_training(config),
        }
    )


def text_training(config: Config) -> dict[str, Any] | None:
    """Return what the size of a text encoder's training depends on; None without it."""
    if not config.text_in_step:
        return None
    return {
        "method": config.training_method,
        "text_encoder": config.text_encoder.layers,
        "vectors": config.embedding.vectors,
    }


def _is_autoencoder(folder_name: str) -> bool:
    return folder_name == "vae"


def shipped_readings(inputs: PlanInputs) -> ShippedReadings | None:
    """Return the readings of a base model from tables; None if one of them is missing,
    or does not reach the run's clips or previews.
    """
    has_appended = any(
        appended_sizes(inputs.config, shape, inputs.spec) for shape in inputs.shapes
    )
    # Neither sound nor appended latents are part of a table's sizes.
    if inputs.spec.reads_sound or has_appended:
        return None

    tables = family_tables(inputs.spec.name)
    if not tables:
        return None
    step = tables["steps"].get(step_key(inputs))
    autoencoder = tables["autoencoders"].get(autoencoder_key(inputs))
    text = tables["texts"].get(text_key(inputs))
    if step is None or autoencoder is None or text is None:
        return None

    readings = ShippedReadings(
        inputs.spec, inputs.config.lora.rank, step, autoencoder, text
    )
    decoded = () if inputs.preview is None else (inputs.preview,)
    reaches_all = all(map(readings.reaches_step, inputs.shapes)) and all(
        map(readings.reaches_pixels, (inputs.shapes[0], *decoded))
    )
    return readings if reaches_all else None


@dataclass(frozen=True)
class ShippedReadings:
    """The readings of a base model, from tables: ``StepReadings``."""

    spec: ModelSpec
    rank: int
    """Rank of the run's LoRA."""
    step: Table
    autoencoder: Table
    text: Table

    @property
    def blocks(self) -> Mapping[str, Sequence[int]]:
        """Bytes of the weights of each block, by list of blocks; without adapters."""
        return self.step["blocks"]

    @property
    def other_weights(self) -> int:
        """Bytes of the denoiser's weights outside of blocks."""
        return self.step["other_weights"]

    def reaches_step(self, shape: ClipShape) -> bool:
        """Whether the table of the step has sizes on both sides of a shape's."""
        tokens = self.step["tokens"]
        return tokens[0] <= self.spec.tokens(shape) <= tokens[-1]

    def reaches_pixels(self, shape: ClipShape) -> bool:
        """Whether the table of the autoencoder has sizes on both sides of a shape's."""
        frames = self.autoencoder["whole"]["frames"]
        areas = self.autoencoder["whole"]["areas"]
        area = shape.height * shape.width
        return frames[0] <= shape.frames <= frames[-1] and areas[0] <= area <= areas[-1]

    def deep_step(self, shape: ClipShape, samples: int, checkpointing: str) -> Reading:
        """Return a training step of the whole network."""
        table = self.step["readings"][checkpointing][str(samples)]
        tokens = self.spec.tokens(shape)
        phases = self._bytes_at(tokens, table["phases"])
        between = quadratic_weights(self.step["tokens"], tokens)
        work = Work(**self._of_ranks(between, table["work"]))
        return Reading(phases, work)

    def kept_by_block(self, shape: ClipShape, checkpointing: str) -> Mapping[str, int]:
        """Return the bytes of activations that a block of each list keeps of one sample
        until the backward pass.
        """
        kept = self.step["kept"][checkpointing]
        return self._bytes_at(self.spec.tokens(shape), kept)

    def encode(self, shape: ClipShape) -> tuple[CountsByPart, float]:
        """Return the VAE that encodes one clip: bytes by part, and operations."""
        table = self.autoencoder["whole"]
        weights = pixel_weights(table, shape)
        parts = whole_numbers(mixed(table["encode"], weights))
        return parts, mixed(table["encode_flops"], weights)

    def decode(self, shape: ClipShape, tiled: bool = False) -> CountsByPart:
        """Return the VAE that decodes one preview, whole or in tiles: bytes by part."""
        table = self.autoencoder["tiles" if tiled else "whole"]
        return whole_numbers(mixed(table["decode"], pixel_weights(table, shape)))

    def read_text(self) -> tuple[CountsByPart, float, list[list[int]]]:
        """Return the text encoder: bytes by part, operations, bytes of each block of
        each encoder.
        """
        return self.text["parts"], self.text["flops"], self.text["encoders"]

    def text_size(self) -> tuple[int, int]:
        """Return how many modules and numbers of the text encoders train."""
        modules, numbers = self.text["size"]
        return modules, numbers

    def _bytes_at(self, tokens: int, table: Numbers) -> Any:
        between = linear_weights(self.step["tokens"], tokens)
        return whole_numbers(self._of_ranks(between, table))

    def _of_ranks(self, of_tokens: Sequence[float], table: Numbers) -> Any:
        """Return a table's numbers at the run's rank."""
        of_ranks = rank_weights(self.step["ranks"], self.rank)
        return mixed(table, products(of_ranks, of_tokens))


def pixel_weights(table: Table, shape: ClipShape) -> list[float]:
    """Return the weight of each number of a grid of frames and areas for a shape."""
    of_frames = linear_weights(table["frames"], shape.frames)
    of_areas = linear_weights(table["areas"], shape.height * shape.width)
    return products(of_frames, of_areas)


def linear_weights(knots: Sequence[int], value: float) -> list[float]:
    """Return the weight of each knot's number in the number at ``value``: of its two
    neighbours, or of the last two for a value beyond them.
    """
    weights = [0.0] * len(knots)
    if len(knots) == 1:
        return [1.0]
    right = min(max(bisect_right(knots, value), 1), len(knots) - 1)
    share = (value - knots[right - 1]) / (knots[right] - knots[right - 1])
    weights[right - 1] = 1 - share
    weights[right] = share
    return weights


def quadratic_weights(knots: Sequence[int], value: float) -> list[float]:
    """Return the weight of each knot's number in the number of a parabola at ``value``,
    through the first, a middle and the last one.
    """
    if len(knots) < 3:
        return linear_weights(knots, value)
    weights = [0.0] * len(knots)
    chosen = (0, len(knots) // 2, len(knots) - 1)
    for index in chosen:
        weight = 1.0
        for other in chosen:
            if other != index:
                weight *= (value - knots[other]) / (knots[index] - knots[other])
        weights[index] = weight
    return weights


def products(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return each number of the first times each of the second, in that order."""
    return [left * right for left, right in product(first, second)]


def rank_weights(ranks: Sequence[int], rank: int) -> list[float]:
    """Return the weight of each rank's number; a table without ranks has one number."""
    if not ranks:
        return [1.0]
    low, high = ranks
    share = (rank - low) / (high - low)
    return [1 - share, share]


def mixed(table: Numbers, weights: Sequence[float]) -> Any:
    """Return a table with one number in place of each list, which is its weighted sum."""
    if isinstance(table, Mapping):
        return {name: mixed(part, weights) for name, part in table.items()}
    if isinstance(table, list):
        pairs = zip(weights, table, strict=True)
        return sum(weight * number for weight, number in pairs if weight)
    return table


def whole_numbers(table: Any) -> Any:
    """Return a table with whole numbers of bytes, none of them negative."""
    if isinstance(table, Mapping):
        return {name: whole_numbers(part) for name, part in table.items()}
    return max(0, round(table))
