"""The samples of a step, what is drawn for them, and the numbers of their noise levels."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from videotune.memory.host_weights import pinned
from videotune.rng import generator_for
from videotune.types import Batch, Window


@dataclass(frozen=True)
class StepDraws:
    """Everything that is drawn for a step, except noise."""

    samples: tuple[tuple[Window, int], ...]
    """Window and variant of each sample."""
    captions: tuple[str, ...]
    condition_types: tuple[frozenset[str], ...]
    """Types of the conditions of each sample."""
    boxes: tuple[int, ...]
    """Which of the cached random boxes (regions to paint anew) each sample hides; 0 if it
    hides none.
    """
    t: Tensor
    """Noise levels (B,) of the video, or of the sound if the video is given."""
    sound_t: Tensor | None = None
    """Noise levels (B,) of the sound, if both are learnt."""


@dataclass(frozen=True)
class StepBatch:
    """This process's samples of a step, and facts of all the step's samples."""

    step: int
    window_ids: tuple[str, ...]
    """Windows of all samples of the step, in order."""
    captions: tuple[str, ...]
    """Captions of all samples of the step."""
    t: Tensor
    """Noise levels (B,) of all samples of the step: of the video, or of the sound if the
    video is given.
    """
    first_sample: int
    """Number of this process's first sample among those of the step."""
    batch: Batch | None
    """This process's samples. None: it has none."""
    noise: Tensor
    """Noise (b,C,F,H,W) of this process's samples."""
    prior_samples: tuple[int, ...] = ()
    """Numbers of the step's samples whose target is the base model's own prediction."""
    sound_t: Tensor | None = None
    """Noise levels (B,) of the sound, if both are learnt."""
    is_padding: bool = False
    """Whether ``batch`` is another process's sample that adds nothing, because all must
    run the network together.
    """

    @property
    def errors_per_sample(self) -> int:
        """1, or 2 if video and sound are learnt."""
        return 1 if self.sound_t is None else 2

    def pinned(self) -> "StepBatch":
        """Return the same batch in pinned memory, which a CUDA device reads while the
        host goes on.
        """
        batch = None if self.batch is None else self.batch.map(_pin)
        return replace(self, t=_pin(self.t), noise=_pin(self.noise), batch=batch)


def _pin(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return x
    return pinned(x.shape, x.dtype).copy_(x)


def uniforms(
    seed: int, step: int, count: int, stratified: bool, purpose: str = "t"
) -> Tensor:
    """Draw the uniform numbers (count,) float64 that a step's noise levels come from,
    one a sample.

    Args:
        seed: the run's seed.
        step: the step, counted from 1.
        count: samples of the step.
        stratified: cut [0, 1) into ``count`` equal parts and give sample i part π(i),
            where π is a permutation drawn for the step. The step then covers the
            distribution evenly, and each number alone stays uniform.
        purpose: what the numbers are drawn for.
    """
    u = torch.tensor(
        [generator_for(seed, purpose, step, i).random() for i in range(count)],
        dtype=torch.float64,
    )
    if not stratified:
        return u
    generator = generator_for(seed, f"{purpose} order", step)
    order = torch.from_numpy(generator.permutation(count))
    return ((order + u) / count).clamp(max=1 - 2**-53)


def share_of(rank_and_size: tuple[int, int], samples: int) -> tuple[int, int]:
    """Return the samples, begin and end, that a process takes of a step: nearly equal
    parts, in the order of the processes.

    Args:
        rank_and_size: the process, counted from 0, and the number of processes.
        samples: how many samples the step has.
    """
    rank, size = rank_and_size
    return rank * samples // size, (rank + 1) * samples // size


def samples_to_run(
    rank_and_size: tuple[int, int], samples: int, *, pad_empty_share: bool
) -> tuple[int, int, bool]:
    """Return the samples, begin and end, that a process runs the network on, and whether
    that is padding: another process's sample, which adds nothing.

    Args:
        rank_and_size: see ``share_of``.
        samples: how many samples the step has.
        pad_empty_share: give a process without a sample another one's, so that all run the
            network together.
    """
    begin, end = share_of(rank_and_size, samples)
    is_padding = pad_empty_share and begin == end
    if is_padding:
        begin = min(begin, samples - 1)
        end = begin + 1
    return begin, end, is_padding


def draw_noise(
    x0: Tensor, seed: int, step: int, first: int, name: str = "noise"
) -> Tensor:
    """Draw the noise of samples from number ``first`` of a step on, in the shape of
    their latents.
    """
    shape = tuple(x0.shape[1:])
    noise = []
    for index in range(first, first + len(x0)):
        numbers = generator_for(seed, name, step, index).standard_normal(
            shape, "float32"
        )
        noise.append(torch.from_numpy(numbers))
    return torch.stack(noise)
