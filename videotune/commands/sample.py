"""``sample``: draw prompts with a run's adapter, with any LoRA file, or with the base model alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videotune.adapters.kinds import NOT_BY_DEGREES, kind_of
from videotune.adapters.layers import load_weights
from videotune.adapters.lora import ADAPTER, lora_parameters
from videotune.config.load import merge, parse_sets
from videotune.config.resolve import resolve
from videotune.config.schema import Config
from videotune.console import bar, echo
from videotune.data.decode import decode as decode_frames
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_sampling import snap_frames
from videotune.data.media_info import probe_image
from videotune.data.video_writer import write_video
from videotune.errors import VideotuneError
from videotune.exporter.embedding import read_embedding
from videotune.exporter.lora import read_file
from videotune.latent_cache.encode import to_model
from videotune.models.base_model import place, spec_for
from videotune.records import read_record
from videotune.sampling.pipeline import SampleSettings, decode, draw, file_name
from videotune.trainer.checkpoint import pick
from videotune.trainer.components import open_models
from videotune.trainer.denoisers import attach
from videotune.trainer.experts import of_expert, prefix, trained
from videotune.trainer.resolve_config import absolute_paths
from videotune.trainer.run_dir import run_settings
from videotune.trainer.text_encoders import by_part, put_files, put_text
from videotune.types import ClipShape, Family, ModelSpec, Moments
from videotune.validation.previews import sample_settings

if TYPE_CHECKING:
    import numpy as np
    from torch import nn


LONGEST = 10_000
"""Letters of a prompt; no model reads a tenth of them."""

_NO_TEXT = re.compile(r"[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True)
class SampleOptions:
    """What to draw: prompts and the first seed (None: the config's), from ``run`` or from ``base``.

    A run is drawn from at its newest checkpoint or at ``step`` (0: its base model alone, drawn as the run draws); a base
    model with ``loras``, a file for each expert, with ``embeddings``, files of new tokens, or alone. ``images``: what the
    videos begin with, one for all prompts or one each.
    """

    prompts: tuple[str, ...]
    seed: int | None = None
    run: Path | None = None
    step: int | None = None
    base: str | None = None
    loras: tuple[Path, ...] = ()
    strength: float = 1.0
    sets: tuple[str, ...] = ()
    images: tuple[Path, ...] = ()
    embeddings: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Sampler:
    """What samples are drawn with: the family, its networks with the adapter in place, how, the adapter's step, a seed.

    ``teach`` puts into the text encoders what was learnt of them, and returns how a prompt is spelled for them.
    """

    family: Family
    nets: Mapping[str, nn.Module]
    settings: SampleSettings
    step: int
    seed: int
    teach: Callable[[], Callable[[str], str]] = lambda: str


class OneAtATime(Mapping[str, "nn.Module"]):
    """The experts by name, of which one is in memory: the one that was looked up last."""

    def __init__(self, spec: ModelSpec, load: Callable[[str], nn.Module]) -> None:
        self._names, self._load = [expert.name for expert in spec.experts], load
        self._held: dict[str, nn.Module] = {}

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._held:
            self._held.clear()  # before another one is loaded
            self._held[name] = self._load(name)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def sample(
    run: Path | str | None = None,
    prompts: Sequence[str] = (),
    out: Path | str = "samples",
    *,
    seed: int | None = None,
    step: int | None = None,
    base: str | None = None,
    loras: Sequence[Path] = (),
    embeddings: Sequence[Path] = (),
    images: Sequence[Path] = (),
    strength: float = 1.0,
    sets: Sequence[str] = (),
) -> list[Path]:
    """Write one mp4 a prompt into ``out``; the arguments are those of ``SampleOptions``."""
    words = SampleOptions(
        tuple(prompts),
        seed,
        None if run is None else Path(run),
        step,
        base,
        tuple(loras),
        strength,
        tuple(sets),
        tuple(images),
        tuple(embeddings),
    )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    sampler = open_sampler(words)
    seeds = [sampler.seed + i for i in range(len(words.prompts))]
    paths = []
    for prompt, one, video in zip(
        words.prompts, seeds, render(sampler, words.prompts, seeds, words.images), strict=True
    ):
        paths.append(out / f"{adapter_name(words)}{named_by(file_name(sampler.step, prompt, one), prompt)}")
        write_video(paths[-1], video, sampler.settings.shape.fps)
    return paths


def open_sampler(words: SampleOptions) -> Sampler:
    """The sampler that the words name; a network is loaded when its first step comes.

    Raises VideotuneError where neither a run nor a base model is named, and for files and images that do not fit it.
    """
    refuse(words)
    settings: dict[str, Any] = run_settings(words.run) if words.run else {"base_model_name": words.base}
    settings = absolute_paths(merge(settings, parse_sets(words.sets)))
    base = place(settings["base_model_name"], weights=False)
    spec = spec_for(settings.get("family"), base)
    config = resolve(settings, {}, spec).config
    refuse_images(words, spec)
    files = by_expert(words.loras, spec)
    shape = sample_settings(config, spec, shape_of(words.run, spec.rules.fps, config, spec))
    seed = config.sample.seed if words.seed is None else words.seed
    family, step = open_models(spec, base, config), 0
    adapt: Callable[[str, nn.Module], None]
    teach: Callable[[], Callable[[str], str]]
    if words.run is not None and words.step == 0:

        def adapt(name: str, net: nn.Module) -> None:
            pass

        def teach() -> Callable[[str], str]:
            return str
    elif words.run is not None:
        checkpoint = pick(words.run, words.step)
        step, weights = checkpoint.step, checkpoint.load("ema" if checkpoint.has_ema else "weights")
        if words.strength != 1.0 and config.training_method != "LORA":
            raise VideotuneError("--strength is an adapter's; a fine-tuned model has none")

        def adapt(name: str, net: nn.Module) -> None:
            if config.transformer.train and name in trained(spec, config):
                own = of_expert(weights, prefix(spec, name))
                own = by_part(family, own)[0] if config.text_in_step else own
                load_weights(attach(net, spec, config), own, str(words.run))

        def teach() -> Callable[[str], str]:
            begin = prefix(spec, trained(spec, config)[0]) if config.transformer.train else ""
            return put_text(family, config, of_expert(weights, begin), str(words.run))
    else:

        def adapt(name: str, net: nn.Module) -> None:
            if name in files:
                read_file(family, net, files[name], ADAPTER)

        found = [read_embedding(family, path) for path in words.embeddings]
        for path, (token, _) in zip(words.embeddings, found, strict=True):
            echo(f"{path.name} is called {token} in prompts")

        def teach() -> Callable[[str], str]:
            return put_files(family, found)

    def load(name: str) -> nn.Module:
        net = family.denoiser(name)
        adapt(name, net)
        if words.strength != 1.0 and (name in files or (words.run and name in trained(spec, config))):
            refuse_strength(net)
            net.set_adapters([ADAPTER], [words.strength])  # type: ignore[operator]
        return net

    nets = OneAtATime(spec, load)
    _ = nets[spec.experts[0].name]  # a file that does not fit is told before the text encoder runs
    return Sampler(family, nets, shape, step, seed, teach)


def refuse(words: SampleOptions) -> None:
    """VideotuneError for words that do not say what to draw, or with what."""
    if not words.prompts:
        raise VideotuneError("which prompt? Give --prompt TEXT, as often as you like")
    for prompt in words.prompts:
        if _NO_TEXT.search(prompt) or len(prompt) > LONGEST:
            raise VideotuneError(
                f"--prompt {prompt[:40]!r} … has {len(prompt):,} letters, or some that are no text: at most {LONGEST:,}"
            )
    if words.seed is not None and not 0 <= words.seed < 2**63:
        raise VideotuneError(f"--seed is {str(words.seed)[:40]}, and must be from 0 to 2^63 - 1")
    if (words.run is None) == (words.base is None):
        raise VideotuneError(
            "sample draws from a RUN folder, or from --base MODEL with or without --lora FILE: name one"
        )
    if (words.run and (words.loras or words.embeddings)) or (words.base and words.step is not None):
        raise VideotuneError(
            "--lora and --embedding go with --base, and --step with a RUN: a run is drawn with what it has learnt itself"
        )
    for path in words.loras:
        if not path.is_file():
            raise VideotuneError(f"no such LoRA file: {path}")


def refuse_strength(net: nn.Module) -> None:
    """VideotuneError for an adapter that acts wholly or not at all."""
    kind = kind_of(lora_parameters(net))
    if kind in NOT_BY_DEGREES:
        raise VideotuneError(f"--strength: {kind} acts wholly or not at all; leave it out, or draw with --base alone")


def refuse_images(words: SampleOptions, spec: ModelSpec) -> None:
    """VideotuneError where the model takes no image, cannot do without, or the images are not one for each prompt."""
    if words.images and spec.first_frame is None:
        raise VideotuneError(f"--image: {spec.title} takes no image; it draws from text alone")
    if not words.images and spec.given == "concat":
        raise VideotuneError(f"which image? {spec.title} continues one: give --image FILE, for each prompt or for all")
    if len(words.images) not in (0, 1, len(words.prompts)):
        raise VideotuneError(f"--image: give one for all {len(words.prompts)} prompts, or one for each")


def by_expert(files: Sequence[Path], spec: ModelSpec) -> dict[str, Path]:
    """Which LoRA file is whose: of two experts their names stand in the files' names.

    Raises VideotuneError where that cannot be told.
    """
    names = [expert.name for expert in spec.experts]
    if len(names) == 1:
        if len(files) > 1:
            raise VideotuneError(f"--lora: {spec.title} has one denoiser and takes one file, not {len(files)}")
        return dict(zip(names, files, strict=False))
    found: dict[str, Path] = {}
    for path in files:
        own = [name for name in names if f"_{name}_" in f"_{path.stem.lower()}_".replace("-", "_")]
        if len(own) != 1 or own[0] in found:
            raise VideotuneError(
                f"--lora {path}: {spec.title} has the experts {' and '.join(names)}, with a file each, whose name says "
                f"whose it is, such as name_{names[0]}_noise.safetensors"
            )
        found[own[0]] = path
    return found


def named_by(name: str, prompt: str) -> str:
    """A sample's file name with the first letters of its prompt before the ending, of which any disk takes each."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:40].strip("-")
    return f"{name.removesuffix('.mp4')}-{words}.mp4" if words else name


def adapter_name(words: SampleOptions) -> str:
    """What tells a sample's file from those of another adapter or strength; empty for a run at full strength."""
    files = (*words.loras, *words.embeddings)
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*(path.stem for path in files), strict=False))
    both = "".join(letters[0] for letters in alike).rstrip("-_")  # what the files of two experts begin with
    name = "" if words.run else f"{both or files[0].stem}-" if files else "base-"
    return name if words.strength == 1.0 else f"{name}strength-{words.strength:g}-"


def shape_of(run: Path | None, fps: float, config: Config, spec: ModelSpec) -> ClipShape:
    """The shape a run trained most on, or without a run what the model draws unless told otherwise."""
    if run is not None:
        most = max(read_record(run / "plan.json")["buckets"], key=lambda bucket: bucket["windows"])
        frames, height, width = (int(part) for part in most["shape"].split("x"))
        return ClipShape(frames, height, width, fps)
    rules = spec.rules
    side = int(spec.default_resolution) // rules.side_multiple * rules.side_multiple if spec.sample_shape is None else 0
    usual = spec.sample_shape or (8 * rules.frame_step + rules.frame_rest, side, side)
    frames = usual[0] if config.video_config.frames is None else snap_frames(config.video_config.frames, rules)
    return ClipShape(frames, *usual[1:], fps)


def render(
    sampler: Sampler,
    prompts: Sequence[str],
    seeds: Sequence[int],
    images: Sequence[Path] = (),
    title: str | None = "sampling",
) -> list[np.ndarray]:
    """uint8 frames (T,H,W,3) of each prompt: encoders, transformer and VAE one after the other.

    ``title``: of the progress bar; None: whoever calls shows one.
    """
    family, told = sampler.family, None
    try:
        texts = list(dict.fromkeys([*prompts, ""]))
        spell = sampler.teach()
        states = dict(zip(texts, family.encode_text([spell(text) for text in texts]), strict=True))
    finally:
        family.free("text_encoder")
    if images:
        first = encode_images(family, images, sampler.settings.shape)
        told = first if len(first) == len(prompts) else first * len(prompts)
    with bar(title) if title else nullcontext() as progress:
        latents = draw(
            family,
            sampler.nets,
            sampler.settings,
            states.__getitem__,
            list(zip(prompts, seeds, strict=True)),
            on_done=lambda done: progress.update(done, len(prompts)) if progress else None,
            first=told,
        )
    return decode(family, latents)


def encode_images(family: Family, images: Sequence[Path], shape: ClipShape) -> list[Moments]:
    """What each image, cropped to the shape as clips are, tells as the first frame of a video.

    Raises VideotuneError that names an image that cannot be read.
    """
    encoded = []
    try:
        for path in images:
            try:
                still = decode_frames(probe_image(path), [0.0] * shape.frames, shape.height, shape.width)
            except (ClipProblem, OSError) as problem:
                raise VideotuneError(f"--image {path}: {getattr(problem, 'detail', None) or problem}") from problem
            encoded.append(family.encode_video(to_model(still)))
    finally:
        family.free("vae")
    return encoded
