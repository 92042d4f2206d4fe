"""``sample``: draw prompts with a run's adapter, with any LoRA file, or with the base model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.adapters.lora import ADAPTER
from videotune.config.resolve import resolve
from videotune.errors import DONE, VideotuneError
from videotune.export.lora import read_lora
from videotune.families.find import place, spec_for
from videotune.files import read_json
from videotune.run.console import bar
from videotune.run.folder import run_settings
from videotune.run.models import open_models, sample_settings
from videotune.run.trainer import attach, put_weights
from videotune.sampling.preview import SampleSettings, conditions, decode, draw, file_name, write_video
from videotune.train.state import pick
from videotune.types import ClipShape, Family

if TYPE_CHECKING:
    import numpy as np
    from torch import nn


@dataclass(frozen=True)
class SampleWords:
    """What to draw: prompts and the first seed (None: the config's), from ``run`` or from ``base``.

    A run is drawn from at its newest checkpoint or at ``step``; a base model with a ``lora`` file or alone.
    """

    prompts: tuple[str, ...]
    seed: int | None = None
    run: Path | None = None
    step: int | None = None
    base: str | None = None
    lora: Path | None = None
    strength: float = 1.0
    sets: tuple[str, ...] = ()


def sample(words: SampleWords, out: Path) -> int:
    """Write one mp4 a prompt into ``out`` and print where."""
    out.mkdir(parents=True, exist_ok=True)
    family, net, settings, step, first = open_sampler(words)
    seeds = [first + i for i in range(len(words.prompts))]
    frames = render(family, net, settings, words.prompts, seeds)
    for prompt, seed, video in zip(words.prompts, seeds, frames, strict=True):
        path = out / f"{adapter_name(words)}{file_name(step, prompt, seed)}"
        write_video(path, video, settings.shape.fps)
        print(path)
    return DONE


def open_sampler(words: SampleWords) -> tuple[Family, nn.Module, SampleSettings, int, int]:
    """The family, its transformer with the adapter in place, how to draw, the adapter's step and the first seed.

    Raises VideotuneError where neither a run nor a base model is named.
    """
    from videotune.run.job import anchored, merge, parse_sets

    if not words.prompts:
        raise VideotuneError("which prompt? Give --prompt TEXT, as often as you like")
    if (words.run is None) == (words.base is None):
        raise VideotuneError(
            "sample draws from a RUN folder, or from --base MODEL with or without --lora FILE: name one"
        )
    if (words.run and words.lora) or (words.base and words.step is not None):
        raise VideotuneError("--lora goes with --base, and --step with a RUN: a run is drawn with its own adapter")
    settings: dict[str, Any] = run_settings(words.run) if words.run else {"base_model_name": words.base}
    settings = anchored(merge(settings, parse_sets(words.sets)))
    base = place(settings["base_model_name"], weights=False)
    spec = spec_for(settings.get("family"), base)
    config = resolve(settings, {}, spec).config
    family, step = open_models(spec, base, config), 0
    net = family.denoiser()
    if words.run is not None:
        checkpoint = pick(words.run, words.step)
        weights = checkpoint.load("ema" if checkpoint.has_ema else "weights")
        put_weights(attach(net, spec, config), weights, config, str(checkpoint.folder))
        if words.strength != 1.0 and config.training_method != "LORA":
            raise VideotuneError("--strength is an adapter's; a fine-tuned model has none")
        step = checkpoint.step
    elif words.lora is not None:
        load_file_into(family, net, words.lora)
    if words.strength != 1.0 and (words.run or words.lora):
        net.set_adapters([ADAPTER], [words.strength])  # type: ignore[operator]
    settings_of = sample_settings(config, spec, shape_of(words.run, spec.rules.fps, config, spec))
    return family, net, settings_of, step, config.sample.seed if words.seed is None else words.seed


def adapter_name(words: SampleWords) -> str:
    """What tells a sample's file from those of another adapter or strength; empty for a run at full strength."""
    name = "" if words.run else f"{words.lora.stem}-" if words.lora else "base-"
    return name if words.strength == 1.0 else f"{name}strength-{words.strength:g}-"


def load_file_into(family: Family, net: nn.Module, path: Path) -> None:
    """A LoRA file of any form that diffusers reads, by diffusers' own loader."""
    if not path.is_file():
        raise VideotuneError(f"no such LoRA file: {path}")
    try:
        read_lora(family, net, path, ADAPTER)
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # each of diffusers' ways to say no
        first = str(error).strip().splitlines()[:2]
        raise VideotuneError(
            f"{path} cannot be read as a LoRA of {family.spec.title}: it was made for another base, or is no LoRA file"
            f" ({' '.join(first)[:200]})"
        ) from error


def shape_of(run: Path | None, fps: float, config: Any, spec: Any) -> ClipShape:
    """The shape a run trained most on, or without a run a square of the model's own resolution."""
    if run is not None:
        most = max(read_json(run / "plan.json")["buckets"], key=lambda bucket: bucket["windows"])
        frames, height, width = (int(part) for part in most["shape"].split("x"))
        return ClipShape(frames, height, width, fps)
    side = spec.default_resolution // spec.rules.side_multiple * spec.rules.side_multiple
    frames = config.video_config.frames or 8 * spec.rules.frame_step + spec.rules.frame_rest
    return ClipShape(frames, side, side, fps)


def render(
    family: Family,
    net: nn.Module,
    settings: SampleSettings,
    prompts: Sequence[str],
    seeds: Sequence[int],
    batch: int = 1,
) -> list[np.ndarray]:
    """uint8 frames (T,H,W,3) of each prompt: text encoder, transformer and VAE one after the other."""
    try:
        texts = list(dict.fromkeys([*prompts, ""]))
        states = dict(zip(texts, family.encode_text(texts), strict=True))
    finally:
        family.free("text_encoder")
    with bar("sampling") as progress:
        latents = draw(
            family,
            net,
            settings,
            conditions(family, states),
            prompts,
            seeds,
            batch,
            on_done=lambda done: progress.update(done, len(prompts)),
        )
    return decode(family, latents)
