"""``sample``: draw prompts with a run's adapter, with any LoRA file, or with the base model alone."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from videotune.adapters import adapter_types, layers, lora
from videotune.config.load import merge, parse_sets
from videotune.config.schema import Config
from videotune.console import bar, echo
from videotune.data.decode import decode as decode_frames
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_sampling import snap_frames
from videotune.data.media_info import probe_image
from videotune.data.video_writer import write_video
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import read_embedding, read_file
from videotune.job import experts, overrides
from videotune.latent_cache.encode import to_model
from videotune.latent_cache.sampler import ExpertSchedule
from videotune.models.base import DiffusersModel
from videotune.runs import run_dir
from videotune.runs.checkpoint import pick
from videotune.runs.schemas import read_record
from videotune.sampling.pipeline import SampleSettings, decode, draw, file_name
from videotune.trainer import build, text_encoders
from videotune.trainer.expert_pool import ExpertPool
from videotune.trainer.trainable import attach
from videotune.types import ClipShape, LatentDistribution, ModelSpec
from videotune.validation.selection import sample_settings

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

    prompts: Sequence[str]
    seed: int | None = None
    run: Path | None = None
    step: int | None = None
    base: str | None = None
    loras: Sequence[Path] = ()
    strength: float = 1.0
    sets: Sequence[str] = ()
    images: Sequence[Path] = ()
    embeddings: Sequence[Path] = ()


@dataclass(frozen=True)
class Sampler:
    """What samples are drawn with: the family, its networks with the adapter in place, how, the adapter's step, a seed.

    ``teach`` puts into the text encoders what was learnt of them, and returns how a prompt is spelled for them.
    """

    family: DiffusersModel
    nets: Mapping[str, nn.Module]
    settings: SampleSettings
    step: int
    seed: int
    teach: Callable[[], Callable[[str], str]]


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
    folder = None if run is None else Path(run)
    words = SampleOptions(
        prompts, seed, folder, step, base, loras, strength, sets, images, embeddings
    )
    if folder is not None:
        run_dir.refuse_samples_in_data(folder, Path(out))
    sampler = open_sampler(words)
    Path(out).mkdir(parents=True, exist_ok=True)  # only now: a refused command leaves no folder
    seeds = [sampler.seed + i for i in range(len(prompts))]
    paths = []
    for prompt, one, video in zip(
        prompts, seeds, render(sampler, prompts, seeds, images), strict=True
    ):
        name = named_by(file_name(sampler.step, prompt, one), prompt)
        paths.append(Path(out) / f"{adapter_name(words)}{name}")
        write_video(paths[-1], video, sampler.settings.shape.fps)
    return paths


def open_sampler(words: SampleOptions) -> Sampler:
    """The sampler that the words name; a network is loaded when its first step comes.

    Raises VideotuneError where neither a run nor a base model is named, and for files and images that do not fit it.
    """
    refuse(words)
    settings: dict[str, Any] = (
        run_dir.run_settings(words.run) if words.run else {"base_model_name": words.base}
    )
    settings = overrides.absolute_paths(merge(settings, parse_sets(words.sets)))
    resolved, spec, base = overrides.reopened(settings)
    config = resolved.config
    refuse_images(words, spec)
    files = by_expert(words.loras, spec)
    shape = sample_settings(config, spec, shape_of(words.run, spec.rules.fps, config, spec))
    seed = config.sample.seed if words.seed is None else words.seed
    family = build.open_models(spec, base, config)
    checkpoint = None if words.run is None or words.step == 0 else pick(words.run, words.step)
    weights = checkpoint.result() if checkpoint else {}
    learnt = experts.trained(spec, config) if checkpoint and config.transformer.train else ()
    if checkpoint and words.strength != 1.0 and config.training_method != "LORA":
        raise VideotuneError("--strength is an adapter's; a fine-tuned model has none")
    tokens = [read_embedding(family, path) for path in words.embeddings]
    for path, (token, _) in zip(words.embeddings, tokens, strict=True):
        echo(f"{path.name} is called {token} in prompts")

    def load(name: str) -> nn.Module:
        net = family.denoiser(name)
        if name in learnt:
            own = experts.of_expert(weights, experts.prefix(spec, name))
            own = text_encoders.by_part(family, own)[0] if config.text_in_step else own
            layers.load_weights(attach(net, spec, config), own, str(words.run))
        elif name in files:
            read_file(family, net, files[name], lora.ADAPTER)
        if words.strength != 1.0 and (name in files or name in learnt):
            if (
                kind := adapter_types.kind_of(lora.lora_parameters(net))
            ) in adapter_types.NOT_BY_DEGREES:
                raise VideotuneError(
                    f"--strength: {kind} cannot be scaled; leave it out, or use --base alone"
                )
            net.set_adapters([lora.ADAPTER], [words.strength])  # type: ignore[operator]
        return net

    def teach() -> Callable[[str], str]:
        if checkpoint is None:
            return text_encoders.put_files(family, tokens)
        begin = experts.prefix(spec, learnt[0]) if learnt else ""
        return text_encoders.put_text(
            family, config, experts.of_expert(weights, begin), str(words.run)
        )

    names = [expert.name for expert in spec.experts]
    nets = ExpertPool(ExpertSchedule(tuple(names)), names, load)
    nets.load(names[0])  # a file that does not fit is told before the text encoder runs
    return Sampler(family, nets, shape, checkpoint.step if checkpoint else 0, seed, teach)


def refuse(words: SampleOptions) -> None:
    """VideotuneError for words that do not say what to draw, or with what."""
    if not words.prompts:
        raise VideotuneError("which prompt? Give --prompt TEXT, as often as you like")
    for prompt in words.prompts:
        if _NO_TEXT.search(prompt) or len(prompt) > LONGEST:
            fault = f"has {len(prompt):,} letters, or some that are no text"
            raise VideotuneError(f"--prompt {prompt[:40]!r} … {fault}: at most {LONGEST:,}")
    if words.seed is not None and not 0 <= words.seed < 2**63:
        raise VideotuneError(
            f"--seed is {str(words.seed)[:40]}, and must be from 0 to 2^63 - 1"
        )
    if (words.run is None) == (words.base is None):
        raise VideotuneError(
            "sample needs a RUN folder, or --base MODEL with or without --lora FILE: name one"
        )
    if (words.run and (words.loras or words.embeddings)) or (
        words.base and words.step is not None
    ):
        raise VideotuneError(
            "--lora and --embedding need --base, and --step a RUN: a run has its own weights"
        )
    for path in words.loras:
        if not path.is_file():
            raise VideotuneError(f"no such LoRA file: {path}")


def refuse_images(words: SampleOptions, spec: ModelSpec) -> None:
    """VideotuneError where the model takes no image, cannot do without, or the images are not one for each prompt."""
    if words.images and spec.first_frame is None:
        raise VideotuneError(
            f"--image: {spec.title} takes no image; it generates from text alone"
        )
    if not words.images and spec.image_conditioning == "concat":
        raise VideotuneError(
            f"which image? {spec.title} continues one: give --image FILE, for each prompt or for all"
        )
    if len(words.images) not in (0, 1, len(words.prompts)):
        raise VideotuneError(
            f"--image: give one for all {len(words.prompts)} prompts, or one for each"
        )


def by_expert(files: Sequence[Path], spec: ModelSpec) -> dict[str, Path]:
    """Which LoRA file is whose: of two experts their names stand in the files' names.

    Raises VideotuneError where that cannot be told.
    """
    names = [expert.name for expert in spec.experts]
    if len(names) == 1:
        if len(files) > 1:
            raise VideotuneError(
                f"--lora: {spec.title} has one denoiser and takes one file, not {len(files)}"
            )
        return dict(zip(names, files, strict=False))
    found: dict[str, Path] = {}
    for path in files:
        own = [
            name for name in names if f"_{name}_" in f"_{path.stem.lower()}_".replace("-", "_")
        ]
        if len(own) != 1 or own[0] in found:
            wanted = f"a file each, whose name says whose it is, such as name_{names[0]}_noise.safetensors"
            raise VideotuneError(
                f"--lora {path}: {spec.title} has the experts {' and '.join(names)}, with {wanted}"
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
    alike = takewhile(
        lambda letters: len(set(letters)) == 1,
        zip(*(path.stem for path in files), strict=False),
    )
    both = "".join(letters[0] for letters in alike).rstrip(
        "-_"
    )  # what the files of two experts begin with
    name = "" if words.run else f"{both or files[0].stem}-" if files else "base-"
    return name if words.strength == 1.0 else f"{name}strength-{words.strength:g}-"


def shape_of(run: Path | None, fps: float, config: Config, spec: ModelSpec) -> ClipShape:
    """The shape a run trained most on, or without a run what the model draws unless told otherwise."""
    if run is not None:
        most = max(
            read_record(run / "plan.json")["buckets"], key=lambda bucket: bucket["windows"]
        )
        frames, height, width = (int(part) for part in most["shape"].split("x"))
        return ClipShape(frames, height, width, fps)
    rules = spec.rules
    side = (
        int(spec.default_resolution) // rules.side_multiple * rules.side_multiple
        if spec.sample_shape is None
        else 0
    )
    usual = spec.sample_shape or (8 * rules.frame_step + rules.frame_rest, side, side)
    asked = config.video_config.frames
    frames = (
        usual[0]
        if asked is None
        else snap_frames(max(asked) if isinstance(asked, list) else asked, rules)
    )
    return ClipShape(frames, *usual[1:], fps)


def render(
    sampler: Sampler,
    prompts: Sequence[str],
    seeds: Sequence[int],
    images: Sequence[Path] = (),
    title: str = "sampling",
) -> list[np.ndarray]:
    """uint8 frames (T,H,W,3) of each prompt: encoders, transformer and VAE one after the other.

    ``title``: of the progress bar; empty: whoever calls shows one.
    """
    family = sampler.family
    told = None
    try:
        texts = list(dict.fromkeys([*prompts, sampler.settings.negative, ""]))
        spell = sampler.teach()
        states = dict(
            zip(texts, family.encode_text([spell(text) for text in texts]), strict=True)
        )
    finally:
        family.free("text_encoder")
    if images:
        first = encode_images(family, images, sampler.settings.shape)
        told = first if len(first) == len(prompts) else first * len(prompts)
    pairs = list(zip(prompts, seeds, strict=True))
    with bar(title) if title else nullcontext() as progress:

        def tell(done: int) -> None:
            if progress:
                progress.update(done, len(prompts))

        latents = draw(
            family,
            sampler.nets,
            sampler.settings,
            states.__getitem__,
            pairs,
            on_done=tell,
            first=told,
        )
    return decode(family, latents)


def encode_images(
    family: DiffusersModel, images: Sequence[Path], shape: ClipShape
) -> list[LatentDistribution]:
    """What each image, cropped to the shape as clips are, tells as the first frame of a video.

    Raises VideotuneError that names an image that cannot be read.
    """
    encoded = []
    try:
        for path in images:
            try:
                still = decode_frames(
                    probe_image(path), [0.0] * shape.frames, shape.height, shape.width
                )
            except (ClipProblem, OSError) as problem:
                raise VideotuneError(
                    f"--image {path}: {getattr(problem, 'detail', None) or problem}"
                ) from problem
            encoded.append(family.encode_video(to_model(still)))
    finally:
        family.free("vae")
    return encoded
