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
from videotune.commands.sample_options import (
    SampleOptions,
    SampleSource,
    folder_of,
    open_source,
)
from videotune.config.load import parse_sets
from videotune.config.nested_keys import flatten
from videotune.config.schema import Config
from videotune.config.sections import BaseLora, LoraFile
from videotune.console import bar, echo
from videotune.data.frame_counts import sample_fps, snap_frames
from videotune.errors import VideotuneError
from videotune.exporter.adapter_export import read_adapter, read_embedding
from videotune.files import digest
from videotune.job import experts
from videotune.latent_cache.sampler import ExpertSchedule
from videotune.model_spec import ModelSpec
from videotune.models.base import DiffusersModel
from videotune.runs.schemas import read_record
from videotune.sampling.given_files import GivenFiles
from videotune.sampling.given_latents import encode_given
from videotune.sampling.picture_faults import describe_faults
from videotune.sampling.picture_measure import measure_picture
from videotune.sampling.pipeline import (
    RenderedSample,
    SampleSettings,
    draw_samples,
    file_name,
    render_samples,
)
from videotune.sampling.sample_files import measure_sound, write_sample
from videotune.text import counted, shape_words
from videotune.trainer import build, text_encoders
from videotune.trainer.expert_pool import ExpertPool
from videotune.trainer.trainable import attach
from videotune.types import ClipShape
from videotune.validation.selection import sample_settings


@dataclass(frozen=True)
class Sampler:
    """What samples are drawn with."""

    family: DiffusersModel
    nets: Mapping[str, nn.Module]
    """The denoisers with the adapter, by expert."""
    settings: SampleSettings
    config: Config
    """The run's."""
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
    strength: float | None = None,
    sets: Sequence[str] = (),
) -> list[Path]:
    """Write an mp4 for each prompt into ``out``, or else into the folder ``sampled`` of
    the run, or into ``samples`` without one.

    The other arguments are those of ``SampleOptions``.
    """
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
    folder = folder_of(options, None if out is None else Path(out))
    return write_samples(open_source(options), folder)


def write_samples(source: SampleSource, folder: Path) -> list[Path]:
    """Write an mp4 for each prompt of checked options into a folder."""
    options = source.options
    prompts = options.prompts
    sampler = make_sampler(source)
    # only now: a refused command leaves no folder
    folder.mkdir(parents=True, exist_ok=True)

    shape = sampler.settings.shape
    echo(
        f"drawing {counted(len(prompts), 'video')}: {shape_words(str(shape))}, "
        f"{counted(sampler.settings.steps, 'step')} each"
    )
    seeds = [sampler.seed + index for index in range(len(prompts))]
    rendered = render_with_sound(sampler, prompts, seeds, options.given())
    paths = []
    # A file is named by its own name, which a step of 0 would contradict.
    is_of_files = options.run is None and (options.loras or options.embeddings)
    step = None if is_of_files else sampler.step
    requests = zip(prompts, seeds, rendered, strict=True)
    for index, (prompt, prompt_seed, video) in enumerate(requests):
        content = drawn_content(source, sampler.settings, prompt, index)
        name = named_by(file_name(step, content, prompt_seed), prompt)
        path = folder / f"{adapter_name(options)}{name}"
        write_sample(path, video, sampler.settings.shape.fps)
        facts: dict[str, Any] = {
            "picture": measure_picture(video.frames, sampler.family.spec.rules)
        }
        if video.sound is not None:
            facts["sound"] = measure_sound(video.sound)
        faults = describe_faults(facts)
        if faults:
            echo(f"{path.name} is {faults}")
        paths.append(path)
    return paths


def open_sampler(options: SampleOptions) -> Sampler:
    """Open what the options name; see ``open_source`` and ``make_sampler``."""
    return make_sampler(open_source(options))


def make_sampler(source: SampleSource) -> Sampler:
    """Open the model of checked options. A denoiser is loaded when its first step comes.

    Raises VideotuneError for files that do not fit the model.
    """
    options = source.options
    config = source.config
    spec = source.spec
    checkpoint = source.checkpoint
    merged = config.model_copy(update={"base_loras": merged_loras(config, options)})
    family = build.open_models(spec, source.base, merged)
    embeddings = [read_embedding(family, path) for path in options.embeddings]
    for path, (token, _) in zip(options.embeddings, embeddings, strict=True):
        echo(f"{path.name} is called {token} in prompts")

    loader = _SampleLoader(
        family=family,
        config=config,
        options=options,
        lora_files=source.lora_files,
        embeddings=embeddings,
        weights=checkpoint.result() if checkpoint else {},
        has_checkpoint=checkpoint is not None,
    )
    names = [expert.name for expert in spec.experts]
    nets = ExpertPool(ExpertSchedule(tuple(names)), names, loader.load)
    nets.load(names[0])  # refuses a file that does not fit before the text encoder runs

    shape = shape_of(options.run, sample_rate_of(config, spec), config, spec)
    return Sampler(
        family=family,
        nets=nets,
        settings=sample_settings(config, spec, shape),
        config=config,
        step=checkpoint.step if checkpoint else 0,
        seed=config.sample.seed if options.seed is None else options.seed,
        teach=loader.teach,
    )


def merged_loras(config: Config, options: SampleOptions) -> list[BaseLora]:
    """Return the LoRA files to merge into the weights that a sample is drawn with.

    They are those under the training, except for what only the training has; those that
    the config adds to samples; and with a run those of --lora.
    """
    loras: list[LoraFile] = []
    if config.sample.base_loras:
        loras += [lora for lora in config.base_loras if not lora.training_only]
    loras += config.sample.loras
    if options.run is not None:
        loras += [LoraFile(file=str(path)) for path in options.loras]
    return [
        BaseLora(file=lora.file, strength=lora.strength, expert=lora.expert)
        for lora in loras
    ]


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
        if self.config.sample.strength != 1.0 and has_adapter:
            _refuse_strength(net)
        return net

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


def _refuse_strength(net: nn.Module) -> None:
    """Raise VideotuneError for a kind of adapter that has no strength but 1."""
    kind = adapter_types.kind_of(lora.lora_parameters(net))
    if kind in adapter_types.NOT_BY_DEGREES:
        raise VideotuneError(
            f"sample.strength: {kind} cannot be scaled. Leave it and --strength out, or use only --base"
        )


def named_by(name: str, prompt: str) -> str:
    """Return a sample's file name with the first letters of its prompt before the
    ending, all valid on any disk.
    """
    letters = re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:40].strip("-")
    return f"{name.removesuffix('.mp4')}-{letters}.mp4" if letters else name


def drawn_content(
    source: SampleSource, settings: SampleSettings, prompt: str, index: int
) -> str:
    """Return a text that differs where two videos of a step and a seed may differ: in the
    prompt, the settings, and the files that they are drawn with.

    Args:
        source: the checked options.
        settings: how the videos are drawn.
        prompt: of the video.
        index: the place of the prompt.
    """
    options = source.options
    given_files = options.given()
    files = GivenFiles()
    if given_files:
        files = given_files[index if len(given_files) > 1 else 0]

    paths = [path for path in vars(files).values() if path is not None]
    versions = [
        _file_version(path) for path in (*options.loras, *options.embeddings, *paths)
    ]

    # Those of the section ``sample`` are in the settings.
    other_sets = {
        key: value
        for key, value in flatten(parse_sets(options.sets)).items()
        if not key.startswith("sample.")
    }

    content = {
        "prompt": prompt,
        "settings": repr(settings),
        "others": other_sets,
        "base": options.base,
        "given": repr(files),
        "files": versions,
    }
    return digest(content)


def _file_version(path: str | Path) -> tuple[str, int, int]:
    """Return a file's path, size and time, one of which changes with its content."""
    status = Path(path).stat()
    return str(Path(path).absolute()), status.st_size, status.st_mtime_ns


def adapter_name(options: SampleOptions) -> str:
    """Return a prefix that distinguishes samples of different adapters and strengths;
    empty for a run at full strength.
    """
    stems = [path.stem for path in (*options.loras, *options.embeddings)]
    if options.run:
        name = "".join(f"{path.stem}-" for path in options.loras)
    elif stems:
        # Of two experts' files, what both names begin with.
        common = commonprefix(stems).rstrip("-_")  # noqa: RUF071 (file names, not paths)
        name = f"{common or stems[0]}-"
    else:
        name = "base-"
    if options.strength in (None, 1.0):
        return name
    return f"{name}strength-{options.strength:g}-"


def sample_rate_of(config: Config, spec: ModelSpec) -> float:
    """Return the frames a second of samples: of the clips, if the pipeline is told them,
    else the model's own.
    """
    if not spec.takes_frame_rate:
        return spec.rules.fps
    return sample_fps(config.video_config, spec.rules)


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


def render(*args: Any, **keywords: Any) -> list[np.ndarray]:
    """Return uint8 frames (T,H,W,3) of each prompt; see ``render_with_sound``."""
    return [sample.frames for sample in render_with_sound(*args, **keywords)]


def render_with_sound(
    sampler: Sampler,
    prompts: Sequence[str],
    seeds: Sequence[int],
    files: Sequence[GivenFiles] = (),
    title: str = "sampling",
) -> list[RenderedSample]:
    """Draw each prompt.

    Encoders, transformer and VAE are in memory one after the other.

    Args:
        sampler: what to draw with.
        prompts: what to draw.
        seeds: one for each prompt.
        files: what prompts are conditioned on, one for all prompts or one each.
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

    conditions = None
    if files:
        requests = [(each, sampler.settings.shape) for each in files]
        conditions = encode_given(family, requests, sampler.config, "sample")
        if len(conditions) != len(prompts):
            conditions = conditions * len(prompts)

    with bar(title) if title else nullcontext() as progress:

        def report(done: int) -> None:
            if progress:
                progress.update(done, len(prompts))

        latents = draw_samples(
            family,
            sampler.nets,
            sampler.settings,
            states.__getitem__,
            list(zip(prompts, seeds, strict=True)),
            on_done=report,
            conditions=conditions,
        )
    return render_samples(family, latents)
