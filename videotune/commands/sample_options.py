"""The options of ``sample`` and ``compare``, checked before a library of models is
imported.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.config.applies import acts_in_samples, sampling_key_of
from videotune.config.load import parse_sets
from videotune.config.nested_keys import flatten, merge
from videotune.config.schema import Config
from videotune.errors import VideotuneError
from videotune.exporter.lora_target import changes_connectors
from videotune.job import overrides
from videotune.job.absolute_paths import absolute_paths
from videotune.model_spec import ModelSpec
from videotune.runs import run_dir
from videotune.runs.checkpoint import Checkpoint, complete_checkpoints, pick
from videotune.runs.journal import History
from videotune.sampling.given_files import (
    FILE_KEYS,
    GivenFiles,
    refuse_given,
    refuse_no_modality,
)
from videotune.types import BasePlace

LONGEST = 10_000
"""Letters of a prompt, at most. No model reads a tenth of them."""

FILE_OPTIONS = tuple(key for key in FILE_KEYS if key != "image")
"""Options of one file that all prompts are conditioned on."""

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
    """LoRA files for the base model, one for each expert; with a run, files that are
    added to its own LoRA.
    """
    strength: float | None = None
    """Strength of the adapter. None: the config's."""
    sets: Sequence[str] = ()
    """``KEY=VALUE`` settings."""
    images: Sequence[Path] = ()
    """First frames, one for all prompts or one each."""
    embeddings: Sequence[Path] = ()
    """Files of new tokens for the base model."""
    last_frame: Path | None = None
    prefix: Path | None = None
    suffix: Path | None = None
    video: Path | None = None
    mask: Path | None = None
    reference: Path | None = None
    control: Path | None = None
    sound: Path | None = None
    """Files that all prompts are conditioned on, see ``GivenFiles``."""

    def given(self) -> list[GivenFiles]:
        """Return what each prompt is conditioned on, or nothing; one entry counts for
        all.
        """
        paths = {name: getattr(self, name) for name in FILE_OPTIONS}
        shared = {name: str(path) for name, path in paths.items() if path is not None}
        images = [str(path) for path in self.images]
        if not images and not shared:
            return []
        return [GivenFiles(image=image, **shared) for image in images or (None,)]


@dataclass(frozen=True)
class SampleSource:
    """Checked options, with what they name."""

    options: SampleOptions
    config: Config
    spec: ModelSpec
    base: BasePlace
    lora_files: Mapping[str, Path]
    """By expert."""
    checkpoint: Checkpoint | None
    """None: only the base model, or the files."""


def open_source(options: SampleOptions) -> SampleSource:
    """Open what the options name, without its weights.

    Raises VideotuneError for whatever can be refused from the options and from small
    files.
    """
    refuse(options)
    settings: dict[str, Any] = {"base_model_name": options.base}
    if options.run:
        settings = run_dir.run_settings(options.run)
    sets = parse_sets(options.sets)
    refuse_unused_sets(sets)
    if options.strength is not None:
        sets = merge(sets, {"sample": {"strength": options.strength}})
    settings = absolute_paths(merge(settings, sets))
    resolved, spec, base = overrides.reopened(settings)
    is_adapter = resolved.config.training_method == "LORA"
    if (
        spec.connectors is not None
        and is_adapter
        and any(map(changes_connectors, options.loras))
    ):
        spec = spec.with_connectors()
    refuse_images(options, spec, resolved.config)
    lora_files = {} if options.run else by_expert(options.loras, spec)

    checkpoint = None
    if options.run is not None and options.step != 0:
        checkpoint = pick(options.run, options.step)
    if checkpoint and options.strength not in (None, 1.0) and not is_adapter:
        raise VideotuneError(
            "--strength: it is for an adapter, and fine-tuned models and new tokens have none"
        )
    return SampleSource(options, resolved.config, spec, base, lora_files, checkpoint)


def refuse_unused_sets(sets: Mapping[str, Any]) -> None:
    """Raise VideotuneError for a setting that only a training reads."""
    for key, value in flatten(sets).items():
        if acts_in_samples(key):
            continue
        sampling_key = sampling_key_of(key)
        remedy = "Leave it out"
        if sampling_key is not None:
            remedy = f"A video has --set {sampling_key}={value}"
        raise VideotuneError(
            f"--set {key}: it acts in a training, and here the training is done. {remedy}"
        )


def folder_of(options: SampleOptions, out: Path | None) -> Path:
    """Return the folder for the videos: ``out``, or else the run's, or ``samples``.

    Raises VideotuneError if it is in a dataset of the run.
    """
    if out is None:
        out = options.run / run_dir.SAMPLED if options.run else Path("samples")
    if options.run is not None:
        run_dir.refuse_samples_in_data(options.run, out)
    return out


def refuse_compare(
    run: Path,
    prompt: str | None,
    seed: int | None,
    image: Path | None,
    sets: Sequence[str] = (),
) -> str:
    """Return the prompt of a comparison.

    Raises VideotuneError if there is no checkpoint, no prompt, or the image does not
    fit the model.
    """
    run_dir.read_run_config(run)
    if not complete_checkpoints(run):
        raise VideotuneError(
            f"{run} has no checkpoint yet, so there is nothing to compare. Train it further first"
        )
    prompt = prompt or _prompt_of_preview(run)
    images = (image,) if image else ()
    open_source(SampleOptions((prompt,), seed, run, images=images, sets=sets))
    return prompt


def _prompt_of_preview(run: Path) -> str:
    previews = History(run).of_kind("sample")
    if not previews:
        raise VideotuneError(
            f"no prompt given, and {run} has no preview to take one from; pass --prompt TEXT"
        )
    return str(previews[0]["prompt"])


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
    if options.run and options.embeddings:
        raise VideotuneError(
            "--embedding needs --base: a run has its own new tokens, or none"
        )
    if options.base and options.step is not None:
        raise VideotuneError("--step needs a RUN: a base model has no steps")
    files: dict[str, Sequence[Path]] = {
        "--lora": options.loras,
        "--embedding": options.embeddings,
        "--image": options.images,
    }
    for name in FILE_OPTIONS:
        path = getattr(options, name)
        if path is not None:
            files[f"--{name.replace('_', '-')}"] = (path,)
    for option, paths in files.items():
        for path in paths:
            if not path.is_file():
                raise VideotuneError(f"{option}: no such file: {path}")


def refuse_images(options: SampleOptions, spec: ModelSpec, config: Config) -> None:
    """Raise VideotuneError if the model does not take the conditions, needs an image,
    or the images are not one for each prompt.
    """
    for files in options.given():
        refuse_given(files, spec, config, "sample")
    if not options.given():
        refuse_no_modality(spec, "sample")
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
