"""Measure at checkpoints what the training cost the base model.

What the run begins with, the base model or what ``init_from`` names, is read before the
first step. Its predictions are kept in the run folder, since it is gone afterwards. A failure is a warning.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from videotune.console import echo
from videotune.diffusion.loss import predict_and_target
from videotune.files import checked, write_whole
from videotune.job.job import Job
from videotune.latent_cache.store import own_storage
from videotune.runs.start_state import start_state
from videotune.sampling.pipeline import SampleLatents, SampleSettings, draw_samples
from videotune.trainer.build import plain_batch
from videotune.trainer.network_pass import tokens_per_sample
from videotune.trainer.trainer import Trainer, due
from videotune.types import Batch, Sound, Velocity, Window
from videotune.validation.decoding import SamplingCallback, broadcast_from_main
from videotune.validation.forgetting import (
    DISTILLED_GUIDANCE,
    LEVELS,
    OWN_GUIDANCE_AT,
    Predictions,
    compare,
    judge_kept,
    noise_of,
    own_guidance,
    path_error,
    rounded,
    to_json,
)
from videotune.validation.forgetting_plan import ForgettingPlan
from videotune.validation.validation_loss import covers, split_by_tokens

FILE = "forgetting.safetensors"
"""File of the base model's predictions."""


@dataclass(frozen=True)
class BaseReading:
    """What was read of the base model."""

    samples: tuple[SampleLatents, ...]
    """One for each prompt, to which noise is added."""
    predictions: Predictions
    path_errors: tuple[float, ...]
    own_guidance: float
    """See ``own_guidance``."""


class ForgettingCallback(SamplingCallback):
    """Read the base model before the first step, and the trained one at checkpoints."""

    heartbeat_state = "probing"
    failure_prefix = "the reading of what the training cost at step {} failed"

    def __init__(self, job: Job, plan: ForgettingPlan, every: int) -> None:
        start = start_state(job.config.init_from, job.config.training_method)
        self.title = f"comparisons with {start.name}"
        self.job = job
        self.plan = plan
        self.every = every
        self._base: BaseReading | None = None

    def prompts(self) -> Sequence[str]:
        """Return the prompts that have nothing to do with the clips."""
        return self.plan.prompts

    def windows(self) -> Sequence[Window]:
        """Return the windows whose conditions the samples have."""
        return self.plan.windows

    def is_lacking(self, trainer: Trainer, step: int) -> bool:
        """Whether the base model or a checkpoint was not read yet."""
        if step != 0 and not due(step, self.every, trainer.job.steps):
            return False
        lines = trainer.journal.history.of_kind("forgetting")
        is_read = any(line["step"] == step for line in lines)
        return not is_read and not self.has_failed(trainer, step)

    def run(self, trainer: Trainer, step: int) -> None:
        """Read the model as it is, and compare it with the base model."""
        with self.failures_as_warnings(trainer, step):
            started = time.perf_counter()
            reader = PromptReader(trainer, self.plan)
            if step == 0:
                with reader.ready():
                    base = reader.read_base()
                if trainer.dist.is_main:
                    save_base(trainer.run / FILE, self.plan, base)
                self._base = base

            if self._base is None:
                self._base = self._read_file(trainer)
            if self._base is None:
                reason = (
                    f"{FILE} of this run was not written before step 1, is damaged, or "
                    "is of other prompts, steps or shapes"
                )
                trainer.journal.event("forgetting", step=step, not_measured=reason)
                return

            base = self._base
            prediction = base.predictions.prompt
            path_errors = base.path_errors
            if step != 0:
                with reader.ready():
                    prediction, _ = reader.predict(base.samples, self.plan.prompts)
                    path_errors = reader.path_errors()
            if trainer.dist.is_main:
                seconds = round(time.perf_counter() - started, 3)
                self._write(trainer, step, base, prediction, path_errors, seconds)

    def _read_file(self, trainer: Trainer) -> BaseReading | None:
        """Return what an earlier process read of the base model."""
        base = None
        if trainer.dist.is_main:
            base = load_base(trainer.run / FILE, self.plan)
        return broadcast_from_main(trainer, base)

    def _write(
        self,
        trainer: Trainer,
        step: int,
        base: BaseReading,
        prediction: Tensor,
        path_errors: Sequence[float],
        seconds: float,
    ) -> None:
        reading = compare(base.predictions, prediction)
        figures = to_json(reading, path_errors, base.path_errors)
        guidance = base.own_guidance
        verdict = judge_kept(
            figures, is_distilled=self._is_distilled(trainer, guidance)
        )
        earlier = trainer.journal.history.of_kind("forgetting")
        previous = earlier[-1].get("verdict") if earlier else None

        trainer.journal.event(
            "forgetting",
            step=step,
            forgetting=self.plan.identity,
            prompts=list(self.plan.prompts),
            levels=trainer.source.objective.timesteps.quantiles(LEVELS).tolist(),
            own_guidance=rounded(guidance),
            **figures,
            verdict=verdict.label,
            reason=verdict.reason,
            seconds=seconds,
        )
        if verdict.label is not None and verdict.label != previous:
            echo(f"{verdict.label} at step {step}: {verdict.reason}")

    def _is_distilled(self, trainer: Trainer, guidance: float) -> bool:
        """Whether the base model was distilled, by how it is sampled or by its own
        predictions.
        """
        if trainer.job.spec.guidance_embedded:
            return True
        has_loras = bool(trainer.job.config.sample.loras)
        is_sampled_plain = self.plan.few_steps.guidance <= 1 and not has_loras
        return is_sampled_plain or guidance < DISTILLED_GUIDANCE


class PromptReader:
    """Reads what a run's networks predict for the prompts of a plan."""

    def __init__(self, trainer: Trainer, plan: ForgettingPlan) -> None:
        self._trainer = trainer
        self._plan = plan
        self._states = cache(trainer.text_states)
        self._unconditioned = cache(
            lambda: trainer.family.unconditioned_states(plan.drawing.shape)
        )

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let the networks compute with the average of their weights, if there is one.

        The user may interrupt the block.
        """
        trainer = self._trainer
        # In this order, the weights are restored even after an interruption.
        with (
            trainer.averaged(),
            trainer.interruptible(),
            trainer.in_lockstep(),
            torch.no_grad(),
        ):
            yield

    def read_base(self) -> BaseReading:
        """Draw samples of the model as it is, and read its predictions for them."""
        plan = self._plan
        samples = self._draw(plan.drawing)
        empty_prompts = [""] * len(plan.prompts)
        prompt_v, _ = self.predict(samples, plan.prompts)
        empty_v, _ = self.predict(samples, empty_prompts)

        much_noise = torch.tensor(OWN_GUIDANCE_AT)
        noisy_v, data_v = self.predict(samples, plan.prompts, much_noise)
        noisy_empty_v, _ = self.predict(samples, empty_prompts, much_noise)
        guidance = own_guidance(Predictions(noisy_v, noisy_empty_v), data_v)
        return BaseReading(
            samples=tuple(samples),
            predictions=Predictions(prompt=prompt_v, empty=empty_v),
            path_errors=self.path_errors(),
            own_guidance=guidance,
        )

    def path_errors(self) -> tuple[float, ...]:
        """Return for each prompt how far a path of few steps ends from a finer one."""
        plan = self._plan
        coarse = self._draw(plan.few_steps)
        fine = self._draw(replace(plan.few_steps, steps=plan.many_steps))
        return tuple(
            path_error(self._learnt(*coarse_sample), self._learnt(*fine_sample))
            for coarse_sample, fine_sample in zip(coarse, fine, strict=True)
        )

    def predict(
        self,
        samples: Sequence[SampleLatents],
        prompts: Sequence[str],
        levels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the velocities (P,Q,N) that are predicted, and those of the samples.

        Args:
            samples: one for each prompt of the plan, to which noise is added.
            prompts: what is read for each.
            levels: noise levels (Q,). None: those of the readings.
        """
        trainer = self._trainer
        if levels is None:
            levels = trainer.source.objective.timesteps.quantiles(LEVELS)
        predictions: dict[tuple[int, int], Tensor] = {}
        velocities: dict[tuple[int, int], Tensor] = {}
        for expert in trainer.family.spec.experts:
            indices = [i for i, t in enumerate(levels.tolist()) if covers(expert, t)]
            if not indices:
                continue
            net = trainer.pool[expert.name]
            was_training = net.training
            net.eval()
            try:
                for number, (sample, prompt) in enumerate(
                    zip(samples, prompts, strict=True)
                ):
                    batch = self._batch(number, sample, prompt)
                    tokens = tokens_per_sample(trainer.family, batch)
                    for group in split_by_tokens(indices, tokens):
                        outputs = self._pass(net, batch, number, levels, group)
                        for row, level in enumerate(group):
                            predictions[number, level] = outputs[0][row]
                            velocities[number, level] = outputs[1][row]
            finally:
                net.train(was_training)
                # Otherwise this expert would stay in memory beside the next one.
                del net
        return _stacked(predictions, len(levels)), _stacked(velocities, len(levels))

    def _pass(
        self,
        net: nn.Module,
        batch: Batch,
        number: int,
        levels: Tensor,
        group: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Return what is predicted of a sample at some levels, and the data's (Q,N)."""
        trainer = self._trainer
        device = batch.x0.device
        count = len(group)
        if count > 1:
            batch = batch.take([0] * count)
        t = levels[list(group)].float().to(device)

        seed = self._plan.seed
        noise = [noise_of(seed, number, level, batch.x0.shape[1:]) for level in group]
        if batch.sound is not None:
            sound_shape = batch.sound.x0.shape[1:]
            sound_noise = [
                noise_of(seed, number, level, sound_shape, "forgetting sound")
                for level in group
            ]
            sound = replace(batch.sound, t=t, noise=torch.stack(sound_noise).to(device))
            batch = replace(batch, sound=sound)
        prediction, velocity = predict_and_target(
            trainer.family,
            net,
            trainer.source.objective,
            batch,
            t,
            torch.stack(noise).to(device),
        )
        return _flat(prediction), _flat(velocity)

    def _batch(self, number: int, sample: SampleLatents, prompt: str) -> Batch:
        """Return a batch of one sample with a prompt, on the device."""
        trainer = self._trainer
        windows = self._plan.windows
        x0 = sample.video[None].float().cpu()
        states = dict(self._states(prompt))

        if windows:
            window = windows[number]
            states |= trainer.source.plain_latents_with_conditions(window).extras
            batch = replace(plain_batch(trainer.source, window), x0=x0)
        else:
            states |= self._unconditioned()
            fps = torch.tensor([self._plan.drawing.shape.fps])
            batch = Batch.of(x0, trainer.family.collate_states([states]), fps=fps)
        batch = replace(batch, conditioning=trainer.family.collate_states([states]))

        if sample.sound is not None:
            sound_x0 = sample.sound[None, :, :, None, None].float().cpu()
            sound = Sound(sound_x0, torch.zeros_like(sound_x0), torch.zeros(1))
            batch = replace(batch, sound=sound)
        return batch.map(lambda x: x.to(trainer.family.device))

    def _draw(self, settings: SampleSettings) -> list[SampleLatents]:
        """Draw a sample of each prompt."""
        trainer = self._trainer
        plan = self._plan
        conditions = [
            trainer.source.plain_latents_with_conditions(window)
            for window in plan.windows
        ]
        samples = [
            (prompt, plan.seed + number) for number, prompt in enumerate(plan.prompts)
        ]

        video_config = trainer.job.config.video_config
        samples_of_prompts = draw_samples(
            trainer.family,
            trainer.pool,
            settings,
            self._states,
            samples,
            conditions=conditions,
            isolated=not video_config.use_temporal_attention,
        )
        return [_on_cpu(sample) for sample in samples_of_prompts]

    @staticmethod
    def _learnt(video: Tensor, sound: Tensor | None) -> Tensor:
        """Return the numbers of a sample's latents."""
        parts = [video.flatten()]
        if sound is not None:
            parts.append(sound.flatten())
        return torch.cat(parts).float()


def _stacked(rows: Mapping[tuple[int, int], Tensor], levels: int) -> Tensor:
    """Return (P,Q,N) of the rows (N,) of each prompt and level."""
    in_order = torch.stack([rows[key] for key in sorted(rows)])
    return in_order.unflatten(0, (-1, levels))


def _on_cpu(sample: SampleLatents) -> SampleLatents:
    """Return a sample whose latents are in the host's memory."""
    sound = None if sample.sound is None else sample.sound.cpu()
    return SampleLatents(sample.video.cpu(), sound)


def _flat(velocity: Velocity) -> Tensor:
    """Return the numbers of each sample's velocity (B,N), on the CPU."""
    parts = [velocity.video.flatten(1)]
    if velocity.sound is not None:
        parts.append(velocity.sound.flatten(1))
    return torch.cat(parts, 1).float().cpu()


def save_base(path: Path, plan: ForgettingPlan, base: BaseReading) -> None:
    """Write what was read of the base model."""
    tensors = {
        "prompt": base.predictions.prompt,
        "empty": base.predictions.empty,
        "path_errors": torch.tensor(base.path_errors, dtype=torch.float64),
        "video": torch.stack([sample.video for sample in base.samples]),
    }
    sounds = [sample.sound for sample in base.samples if sample.sound is not None]
    if sounds:
        tensors["sound"] = torch.stack(sounds)
    stored = {name: own_storage(tensor) for name, tensor in tensors.items()}
    about = {"identity": plan.identity, "own_guidance": base.own_guidance}
    metadata = {"forgetting": json.dumps(about)}
    write_whole(path, lambda temporary: save_file(stored, temporary, metadata=metadata))


def load_base(path: Path, plan: ForgettingPlan) -> BaseReading | None:
    """Return what was read of the base model, or None if the file is missing, damaged,
    or of another plan.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = checked(_About, (file.metadata() or {}).get("forgetting", "{}"))
            if about.identity != plan.identity:
                return None
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, ValueError, SafetensorError):
        return None
    return _from_tensors(tensors, len(plan.prompts), about.own_guidance)


@dataclass(frozen=True)
class _About:
    """What the file says of itself."""

    identity: str
    own_guidance: float


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isfinite().all())


def _from_tensors(
    tensors: dict[str, Any], prompts: int, guidance: float
) -> BaseReading | None:
    """Return the reading that tensors hold, or None if they do not fit each other."""
    names = ("prompt", "empty", "path_errors", "video")
    if not all(name in tensors for name in names):
        return None
    if not all(_is_finite(tensor) for tensor in tensors.values()):
        return None

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if any(shape[:1] != (prompts,) for shape in shapes.values()):
        return None
    latents = [tensors[name] for name in ("video", "sound") if name in tensors]
    numbers = sum(latent[0].numel() for latent in latents)
    predictions = [tensors[name] for name in ("prompt", "empty")]
    is_read_at_all_levels = all(
        tuple(tensor.shape) == (prompts, LEVELS, numbers) for tensor in predictions
    )
    has_videos = len(shapes["video"]) == 5
    has_errors = shapes["path_errors"] == (prompts,)
    if not is_read_at_all_levels or not has_videos or not has_errors:
        return None

    sounds: Sequence[Tensor | None] = tensors.get("sound", [None] * prompts)
    samples = tuple(
        SampleLatents(video, sound)
        for video, sound in zip(tensors["video"], sounds, strict=True)
    )
    path_errors = tuple(tensors["path_errors"].tolist())
    return BaseReading(samples, Predictions(*predictions), path_errors, guidance)
