"""What the effect tests share: jobs, batches and trainers from knobs as a user sets
them, and what to measure.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.support.run_parts import build_trainer
from tests.support.run_parts import fill as fill_cache
from videotune.job.job import Job, open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.latent_cache.batch_source import BatchSource
from videotune.latent_cache.cache_items import CacheItems, missing_items
from videotune.latent_cache.encode import encode_missing
from videotune.latent_cache.keys import CacheKeys
from videotune.latent_cache.store import LatentCache
from videotune.trainer.build import make_objective, make_source, open_models
from videotune.trainer.export import export_run
from videotune.trainer.loop import train_steps
from videotune.trainer.optimizers import parts_of
from videotune.trainer.trainer import Trainer
from videotune.types import LatentDistribution, Window

BASE: dict[str, Any] = {
    "resolution": "32x32",
    "video_config.frames": 9,
    "lora.rank": 2,
    "steps": 4,
    "warmup_steps": 0,
    "caption_dropout": 0,
    "train_dtype": "FLOAT_32",
    "gradient_checkpointing": "OFF",
    "dataloader_threads": 0,
    "save_every": 0,
    "validate_every": 0,
    "sample_after": 0,
    "sample_metrics.budget": 0,
    "sample.steps": 1,
    "sample.guidance": 1,
}
"""A run of seconds, in which nothing happens that a test did not ask for."""


@dataclass
class Lab:
    """A tiny model, a folder of clips, a cache that tests share, and a place for this
    test's own files.
    """

    model: Path
    clips: Path
    cache: Path
    tmp: Path
    open: list[Trainer] = field(default_factory=list)


def overrides_of(
    lab: Lab,
    knobs: Mapping[str, Any] | None = None,
    data: Path | None = None,
    preset: str | None = None,
) -> Overrides:
    """These knobs as ``--set`` gives them; with a preset, these alone and where things
    lie.
    """
    places = {"base_model_name": str(lab.model), "cache_dir": str(lab.cache)}
    places |= {"datasets": [{"path": str(data or lab.clips)}]}
    settings = ({} if preset else BASE) | places | dict(knobs or {})
    return Overrides(
        preset,
        sets=tuple(f"{key}={json.dumps(value)}" for key, value in settings.items()),
    )


def job_of(
    lab: Lab,
    knobs: Mapping[str, Any] | None = None,
    data: Path | None = None,
    preset: str | None = None,
) -> Job:
    """The job that these knobs give."""
    return open_job(*resolve_config(overrides_of(lab, knobs, data, preset)))


def source_of(
    lab: Lab, knobs: Mapping[str, Any] | None = None, data: Path | None = None
) -> BatchSource:
    """Where the batches of such a run come from, the cache filled."""
    job = job_of(lab, knobs, data)
    family = open_models(job.spec, job.base, job.config)
    store = LatentCache(job.cache)
    fill_cache(job, family, store)
    return make_source(job, family, store, make_objective(job.spec, job.config))


def trainer_of(
    lab: Lab,
    knobs: Mapping[str, Any] | None = None,
    data: Path | None = None,
    preset: str | None = None,
) -> Trainer:
    """A trainer before its first step, in a run folder of its own."""
    trainer = build_trainer(
        job_of(lab, knobs, data, preset), lab.tmp / f"run{len(lab.open)}", False
    )
    lab.open.append(trainer)
    return trainer


def text_of(lab: Lab, *captions: str) -> torch.Tensor:
    """The text states (B,L,D) that the network must be given for these captions, by the
    text encoder itself.
    """
    job = job_of(lab)
    family = open_models(job.spec, job.base, job.config)
    return family.collate_states(family.encode_text(list(captions))).text


def pixels(job: Job, variant: int = 0) -> dict[Window, np.ndarray]:
    """The uint8 frames (T,H,W,3) that the VAE is handed for a variant of each window,
    in order.
    """
    family, handed = open_models(job.spec, job.base, job.config), []

    def see(frames: torch.Tensor) -> LatentDistribution:
        handed.append(frames)
        return LatentDistribution(
            frames[:1, :1].clone(memory_format=torch.contiguous_format)
        )

    own = {
        name: getattr(family, name)
        for name in (
            "spec",
            "device",
            "vae_lock",
            "encoding",
            "fingerprints",
            "text_length",
            "encode_text",
            "free",
        )
    }
    eye: Any = SimpleNamespace(**own, encode_video=see)
    windows = (*job.library.windows, *job.library.held_out_windows)
    seed = job.config.seed
    with TemporaryDirectory() as folder:
        store = LatentCache(Path(folder))
        items = CacheItems((), tuple((window, variant) for window in windows))
        todo = missing_items(store, CacheKeys.of(family, seed), items)
        encode_missing(
            eye,
            store,
            todo,
            job.library.media,
            seed,
            None,
            lambda what, done, total: None,
        )
    frames = [
        ((x + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy() for x in handed
    ]
    return dict(zip(windows, frames, strict=True))


def run_steps(trainer: Trainer, count: int | None = None) -> list[dict[str, Any]]:
    """Take so many steps (None: all there are); what each one measured."""
    lines = []
    for record in train_steps(trainer):
        lines.append(record.read())
        if len(lines) == count:
            break
    return lines


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of what trains, by name."""
    return {
        name: parameter.detach().clone()
        for name, parameter in trainer.parameters.items()
    }


@contextmanager
def record_calls(net: torch.nn.Module) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Every call of the network: x_t, timestep, text, and what it answered."""
    calls: list[dict[str, torch.Tensor]] = []

    def keep(
        module: torch.nn.Module,
        words: tuple[Any, ...],
        named: dict[str, Any],
        answer: Any,
    ) -> None:
        given = {
            "x_t": named["hidden_states"],
            "t": named["timestep"],
            "text": named["encoder_hidden_states"],
        }
        calls.append(
            {
                name: x.detach().clone()
                for name, x in (given | {"answer": answer[0]}).items()
            }
        )

    handle = net.register_forward_hook(keep, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@dataclass(frozen=True)
class StepsTaken:
    """What steps showed: what each measured, the network's calls, the gradients that
    the optimizer was given, and how far the weights moved.
    """

    lines: list[dict[str, Any]]
    calls: list[dict[str, torch.Tensor]]
    gradients: list[dict[str, torch.Tensor]]
    moves: dict[str, torch.Tensor]

    def moved(self, part: str) -> torch.Tensor:
        """How far the weights whose name holds ``part`` have moved, as one flat vector."""
        return torch.cat(
            [value.flatten() for name, value in self.moves.items() if part in name]
        )


def take_steps(trainer: Trainer, count: int | None = None) -> StepsTaken:
    """Take so many steps (None: all there are) of a model without experts."""
    before, seen = weights(trainer), []

    def keep(*_: Any) -> None:
        seen.append(
            {
                name: p.grad.clone()
                for name, p in trainer.parameters.items()
                if p.grad is not None
            }
        )

    first = parts_of(trainer.pool.trainable.optimizer)[0]
    handle = first.register_step_pre_hook(keep)
    with record_calls(trainer.net) as calls:
        lines = run_steps(trainer, count)
    handle.remove()
    return StepsTaken(
        lines,
        calls,
        seen,
        {name: value - before[name] for name, value in weights(trainer).items()},
    )


def in_cache(lab: Lab, name: str) -> Lab:
    """The same lab with a cache of its own."""
    return replace(lab, cache=lab.tmp / name)


def written(trainer: Trainer, step: int = 1) -> Path:
    """The first file or folder that the trainer's result is exported to."""
    done, *_ = export_run(
        trainer.run, trainer.family, trainer.result, step, trainer.job.resolved
    )
    return done.path
