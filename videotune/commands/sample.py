"""``sample``: draw prompts with a run's adapter, with any LoRA file, or only with the
base model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from videotune.adapters import adapter_types, layers, lora
from videotune.config.load import merge, parse_sets
from videotune.config.schema import Config
from videotune.console import bar, echo
from videotune.data.decode import decode as decode_frames
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_counts import snap_frames
from videotune.data.probe import probe_image
from videotune.data.video_writer import write_video
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import read_adapter, read_embedding
from videotune.job import experts, overrides
from videotune.latent_cache.encode import to_model
from videotune.latent_cache.sampler import ExpertSchedule
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.runs import run_dir
from videotune.runs.checkpoint import pick
from videotune.runs.schemas import read_record
from videotune.sampling.picture_faults import FAULTS
from videotune.sampling.picture_measure import measure_picture
from videotune.sampling.pipeline import SampleSettings, decode, draw, file_name
from videotune.trainer import build, text_encoders
from videotune.trainer.expert_pool import ExpertPool
from videotune.trainer.trainable import attach
from videotune.types import ClipShape, LatentDistribution
from videotune.validation.selection import sample_settings

LONGEST = 10_000
"""Letters of a prompt, at most. No model reads a tenth of them."""

_NOT_TEXT = re.compile(r"[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True)
class SampleOptions:
    """What to draw, from a run or from a base model."""

    prompts: Sequence[str]
    seed: int | None = None
    """The first seed. None: the config's."""
    run: Path | None = None
    step: int | None = None
    """Checkpoint of the run.

    None: the newest; 0: only its base model, drawn as the run draws.
    """
    base: str | None = None
    loras: Sequence[Path] = ()
    """LoRA files for the base model, one for each expert."""
    strength: float = 1.0
    """Strength of the adapter."""
    sets: Sequence[str] = ()
    """``KEY=VALUE`` settings."""
    images: Sequence[Path] = ()
    """First frames, one for all prompts or one each."""
    embeddings: Sequence[Path] = ()
    """Files of new tokens for the base model."""


@dataclass(frozen=True)
class Sampler:
    """What samples are drawn with."""

    family: DiffusersModel
    nets: Mapping[str, nn.Module]
    """The denoisers with the adapter, by expert."""
    settings: SampleSettings
    step: int
    """The adapter's step."""
    seed: int
    """The first seed."""
    teach: Callable[[], Callable[[str], str]]
    """Loads what was learnt into the text encoders, and returns a function that spells
    a prompt for them.
    """


def sample(
    run: Path | str | None = None,
    prompts: Sequence[str] = (),
    out: Path | str | None = None,
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
    """Write an mp4 for each prompt into ``out``, or else into the folder ``sampled`` of
    the run, or into ``samples`` without one.

    The other arguments are those of ``SampleOptions``.
    """
    if out is None:
        out = "samples" if run is None else Path(run) / run_dir.SAMPLED
    options = SampleOptions(
        prompts=prompts,
        seed=seed,
        run=None if run is None else Path(run),
        step=step,
        base=base,
        loras=loras,
        strength=strength,
        sets=sets,
        images=images,
        embeddings=embeddings,
    )
    if options.run is not None:
        run_dir.refuse_samples_in_data(options.run, Path(out))
    sampler = open_sampler(options)
    # only now: a refused command leaves no folder
    Path(out).mkdir(parents=True, exist_ok=True)

    seeds = [sampler.seed + index for index in range(len(prompts))]
    videos = render(sampler, prompts, seeds, images)
    paths = []
    for prompt, prompt_seed, video in zip(prompts, seeds, videos, strict=True):
        name = named_by(file_name(sampler.step, prompt, prompt_seed), prompt)
        path = Path(out) / f"{adapter_name(options)}{name}"
        write_video(path, video, sampler.settings.shape.fps)
        picture = measure_picture(video, sampler.family.spec.rules)
        if picture["fault"] is not None:
            echo(f"{path.name} is {FAULTS[str(picture['fault'])]}")
        paths.append(path)
    return paths


def open_sampler(options: SampleOptions) -> Sampler:
    """Open what the options name. A denoiser is loaded when its first step comes.

    Raises VideotuneError if neither a run nor a base model is named, and for files and
    images that do not fit it.
    """
    refuse(options)
    settings: dict[str, Any] = {"base_model_name": options.base}
    if options.run:
        settings = run_dir.run_settings(options.run)
    settings = overrides.absolute_paths(merge(settings, parse_sets(options.sets)))
    resolved, spec, base = overrides.reopened(settings)
    config = resolved.config
    refuse_images(options, spec)
    lora_files = by_expert(options.loras, spec)

    family = build.open_models(spec, base, config)
    checkpoint = None
    if options.run is not None and options.step != 0:
        checkpoint = pick(options.run, options.step)
    is_adapter = config.training_method == "LORA"
    if checkpoint and options.strength != 1.0 and not is_adapter:
        raise VideotuneError(
            "--strength: it is for an adapter, and a fine-tuned model has none"
        )

    embeddings = [read_embedding(family, path) for path in options.embeddings]
    for path, (token, _) in zip(options.embeddings, embeddings, strict=True):
        echo(f"{path.name} is called {token} in prompts")

    loader = _SampleLoader(
        family=family,
        config=config,
        options=options,
        lora_files=lora_files,
        embeddings=embeddings,
        weights=checkpoint.result() if checkpoint else {},
        has_checkpoint=checkpoint is not None,
    )
    names = [expert.name for expert in spec.experts]
    nets = ExpertPool(ExpertSchedule(tuple(names)), names, loader.load)
    nets.load(names[0])  # refuses a file that does not fit before the text encoder runs

    shape = shape_of(options.run, spec.rules.fps, config, spec)
    return Sampler(
        family=family,
        nets=nets,
        settings=sample_settings(config, spec, shape),
        step=checkpoint.step if checkpoint else 0,
        seed=config.sample.seed if options.seed is None else options.seed,
        teach=loader.teach,
    )


@dataclass(frozen=True)
class _SampleLoader:
    """Load denoisers and text encoders with what was learnt."""

    family: DiffusersModel
    config: Config
    options: SampleOptions
    lora_files: Mapping[str, Path]
    """By expert."""
    embeddings: Sequence[tuple[str, Mapping[str, Any]]]
    """(token, rows by text encoder) of each file."""
    weights: Mapping[str, Tensor]
    """Of the checkpoint."""
    has_checkpoint: bool

    @property
    def trained_experts(self) -> tuple[str, ...]:
        """The experts of which the checkpoint has weights."""
        if not self.has_checkpoint or not self.config.transformer.train:
            return ()
        return experts.trained(self.family.spec, self.config)

    def load(self, expert: str) -> nn.Module:
        """Load the denoiser of an expert, with its adapter or trained weights."""
        spec = self.family.spec
        net = self.family.denoiser(expert)
        is_trained = expert in self.trained_experts
        if is_trained:
            tensors = experts.of_expert(self.weights, experts.prefix(spec, expert))
            if self.config.text_in_step:
                tensors, _ = text_encoders.by_part(self.family, tensors)
            parameters = attach(net, spec, self.config)
            layers.load_weights(parameters, tensors, str(self.options.run))
        elif expert in self.lora_files:
            read_adapter(self.family, net, self.lora_files[expert], lora.ADAPTER)

        has_adapter = is_trained or expert in self.lora_files
        if self.options.strength != 1.0 and has_adapter:
            self._set_strength(net)
        return net

    def _set_strength(self, net: nn.Module) -> None:
        kind = adapter_types.kind_of(lora.lora_parameters(net))
        if kind in adapter_types.NOT_BY_DEGREES:
            raise VideotuneError(
                f"--strength: {kind} cannot be scaled. Leave it out, or use only --base"
            )
        net.set_adapters([lora.ADAPTER], [self.options.strength])  # type: ignore[operator]

    def teach(self) -> Callable[[str], str]:
        """Load what was learnt into the text encoders, and return a function that
        spells a prompt for them.
        """
        if not self.has_checkpoint:
            return text_encoders.put_files(self.family, self.embeddings)
        name_prefix = ""
        if self.trained_experts:
            name_prefix = experts.prefix(self.family.spec, self.trained_experts[0])
        tensors = experts.of_expert(self.weights, name_prefix)
        return text_encoders.put_text(
            self.family, self.config, tensors, str(self.options.run)
        )


def refuse(options: SampleOptions) -> None:
    """Raise VideotuneError for options that do not say what to draw, or with what."""
    if not options.prompts:
        raise VideotuneError(
            "no prompt given; pass --prompt TEXT, as often as you like"
        )
    for prompt in options.prompts:
        if _NOT_TEXT.search(prompt) or len(prompt) > LONGEST:
            raise VideotuneError(
                f"--prompt {prompt[:40]!r} … has {len(prompt):,} letters, or some that are not text. "
                f"At most {LONGEST:,} are read"
            )
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise VideotuneError(
            f"--seed: {str(options.seed)[:40]} is not a number from 0 to 2^63 - 1"
        )
    if (options.run is None) == (options.base is None):
        raise VideotuneError(
            "sample needs a RUN folder, or --base MODEL with or without --lora FILE; pass one of them"
        )
    has_files = bool(options.loras or options.embeddings)
    if (options.run and has_files) or (options.base and options.step is not None):
        raise VideotuneError(
            "--lora and --embedding need --base, and --step a RUN: a run has its own weights"
        )
    for path in options.loras:
        if not path.is_file():
            raise VideotuneError(f"--lora: no such file: {path}")


def refuse_images(options: SampleOptions, spec: ModelSpec) -> None:
    """Raise VideotuneError if the model takes no image, needs one, or the images are
    not one for each prompt.
    """
    if options.images and spec.first_frame is None:
        raise VideotuneError(
            f"--image: {spec.title} takes no image; it generates only from text"
        )
    if not options.images and spec.image_conditioning == "concat":
        raise VideotuneError(
            f"no image given; {spec.title} continues one: pass --image FILE, for each prompt or for all"
        )
    if len(options.images) not in (0, 1, len(options.prompts)):
        raise VideotuneError(
            f"--image: pass one for all {len(options.prompts)} prompts, or one for each"
        )


def by_expert(files: Sequence[Path], spec: ModelSpec) -> dict[str, Path]:
    """Return the LoRA file of each expert.

    With two experts, the file names contain their names.

    Raises VideotuneError if a file belongs to no expert.
    """
    names = [expert.name for expert in spec.experts]
    if len(names) == 1:
        if len(files) > 1:
            raise VideotuneError(
                f"--lora: {spec.title} has one denoiser and takes one file, not {len(files)}"
            )
        return dict(zip(names, files, strict=False))

    by_name: dict[str, Path] = {}
    for path in files:
        stem = f"_{path.stem.lower()}_".replace("-", "_")
        matches = [name for name in names if f"_{name}_" in stem]
        if len(matches) != 1 or matches[0] in by_name:
            raise VideotuneError(
                f"--lora {path}: {spec.title} has the experts {' and '.join(names)}, with a file each, whose name "
                f"says whose it is, such as name_{names[0]}_noise.safetensors"
            )
        by_name[matches[0]] = path
    return by_name


def named_by(name: str, prompt: str) -> str:
    """Return a sample's file name with the first letters of its prompt before the
    ending, all valid on any disk.
    """
    letters = re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:40].strip("-")
    return f"{name.removesuffix('.mp4')}-{letters}.mp4" if letters else name


def adapter_name(options: SampleOptions) -> str:
    """Return a prefix that distinguishes samples of different adapters and strengths;
    empty for a run at full strength.
    """
    stems = [path.stem for path in (*options.loras, *options.embeddings)]
    if options.run:
        name = ""
    elif stems:
        # Of two experts' files, what both names begin with.
        common = commonprefix(stems).rstrip("-_")  # noqa: RUF071 (file names, not paths)
        name = f"{common or stems[0]}-"
    else:
        name = "base-"
    return name if options.strength == 1.0 else f"{name}strength-{options.strength:g}-"


def shape_of(
    run: Path | None, fps: float, config: Config, spec: ModelSpec
) -> ClipShape:
    """Return the shape that a run trained most on, or without a run what the model
    draws by default.
    """
    if run is not None:
        buckets = read_record(run / "plan.json")["buckets"]
        largest = max(buckets, key=lambda bucket: bucket["windows"])
        frames, height, width = (int(part) for part in largest["shape"].split("x"))
        return ClipShape(frames, height, width, fps)

    rules = spec.rules
    if spec.sample_shape is not None:
        frames, height, width = spec.sample_shape
    else:
        frames = 8 * rules.frame_step + rules.frame_rest
        side = int(spec.default_resolution) // rules.side_multiple * rules.side_multiple
        height = side
        width = side

    configured = config.video_config.frames
    if configured is not None:
        most = max(configured) if isinstance(configured, list) else configured
        frames = snap_frames(most, rules)
    return ClipShape(frames, height, width, fps)


def render(
    sampler: Sampler,
    prompts: Sequence[str],
    seeds: Sequence[int],
    images: Sequence[Path] = (),
    title: str = "sampling",
) -> list[np.ndarray]:
    """Return uint8 frames (T,H,W,3) of each prompt.

    Encoders, transformer and VAE are in memory one after the other.

    Args:
        sampler: what to draw with.
        prompts: what to draw.
        seeds: one for each prompt.
        images: first frames, one for all prompts or one each.
        title: of the progress bar. Empty: the caller shows one.
    """
    family = sampler.family
    try:
        texts = list(dict.fromkeys([*prompts, sampler.settings.negative, ""]))
        spell = sampler.teach()
        encoded = family.encode_text([spell(text) for text in texts])
        states = dict(zip(texts, encoded, strict=True))
    finally:
        family.free("text_encoder")

    first_frames = None
    if images:
        first_frames = encode_images(family, images, sampler.settings.shape)
        if len(first_frames) != len(prompts):
            first_frames = first_frames * len(prompts)

    with bar(title) if title else nullcontext() as progress:

        def report(done: int) -> None:
            if progress:
                progress.update(done, len(prompts))

        latents = draw(
            family,
            sampler.nets,
            sampler.settings,
            states.__getitem__,
            list(zip(prompts, seeds, strict=True)),
            on_done=report,
            first=first_frames,
        )
    return decode(family, latents)


def encode_images(
    family: DiffusersModel, images: Sequence[Path], shape: ClipShape
) -> list[LatentDistribution]:
    """Encode images, cropped as clips are, as first frames of videos.

    Raises VideotuneError for an unreadable image.
    """
    encoded = []
    try:
        for path in images:
            try:
                times = [0.0] * shape.frames
                still = decode_frames(
                    probe_image(path), times, shape.height, shape.width
                )
            except (ClipProblem, OSError) as problem:
                reason = getattr(problem, "detail", None) or problem
                raise VideotuneError(f"--image {path}: {reason}") from problem
            encoded.append(family.encode_video(to_model(still)))
    finally:
        family.free("vae")
    return encoded
