"""Which samples of a step each process runs through the network, and in which pass."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from videotune.latent_cache.step_batch import StepBatch, share_of
from videotune.trainer.micro_batches import micro_batches, pad_for_sharding
from videotune.types import Batch, Conditioning


def step_of(
    rank: int, processes: int, samples: int, prior: Sequence[int] = ()
) -> StepBatch:
    """A process's part of a step; latents and noise hold the numbers of their samples."""
    begin, end = share_of((rank, processes), samples)
    numbers = torch.arange(begin, end, dtype=torch.float32)
    latents = numbers.view(-1, 1, 1, 1, 1)
    batch = None
    if end > begin:
        is_prior = tuple(number in prior for number in range(begin, end))
        batch = Batch.of(
            latents, Conditioning(latents[:, :, 0, 0]), prior_preservation=is_prior
        )
    return StepBatch(
        step=1,
        window_ids=tuple(f"w{number}" for number in range(samples)),
        captions=("",) * samples,
        t=torch.arange(samples) / samples,
        first_sample=begin,
        batch=batch,
        noise=10 + latents,
        prior_samples=tuple(prior),
    )


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_sample_has_its_own_noise_and_level(rank: int, size: int) -> None:
    """Of 7 samples of a step that three processes share."""
    step = step_of(rank, 3, 7, prior=[1, 5])
    parts = micro_batches(step, size)
    begin, end = share_of((rank, 3), 7)
    seen: list[int] = []
    for part in parts:
        numbers = [int(x) for x in part.batch.x0.flatten()]
        assert 1 <= len(numbers) <= size
        assert part.first_sample == numbers[0]
        assert part.noise.flatten().tolist() == [10 + number for number in numbers]
        assert torch.equal(part.t, torch.tensor(numbers) / 7)
        assert part.needs_base_prediction == bool({1, 5} & set(numbers))
        assert not part.is_padding
        seen += numbers
    assert seen == list(range(begin, end))
    assert len(parts) == -(-(end - begin) // size)


def test_the_parts_of_a_spare_sample_are_padding() -> None:
    step = replace(step_of(0, 1, 2), is_padding=True)
    assert [part.is_padding for part in micro_batches(step, 1)] == [True, True]


def test_a_process_without_a_sample_has_no_pass() -> None:
    assert micro_batches(step_of(0, 2, 1), 2) == []


@pytest.mark.parametrize(
    ("processes", "samples", "size"), [(2, 3, 1), (2, 5, 2), (3, 7, 1), (3, 7, 2)]
)
@pytest.mark.parametrize("prior", [(), (0,), (2,)])
def test_all_processes_of_sharded_weights_make_the_same_passes(
    processes: int, samples: int, size: int, prior: tuple[int, ...]
) -> None:
    """Those without a sample left run their first one again, as padding; the base model
    runs in the passes in which any process needs it.
    """
    steps = [step_of(rank, processes, samples, prior) for rank in range(processes)]
    parts = [micro_batches(step, size) for step in steps]
    padded = [
        pad_for_sharding(own, step, size, processes)
        for own, step in zip(parts, steps, strict=True)
    ]
    passes = max(len(own) for own in parts)
    assert [len(own) for own in padded] == [passes] * processes
    assert any(len(own) < passes for own in parts)

    for index in range(passes):
        present = {part[index].needs_base_prediction for part in padded}
        needed = any(
            own[index].needs_base_prediction for own in parts if index < len(own)
        )
        assert present == {needed}

    for own, full in zip(parts, padded, strict=True):
        for part, same in zip(own, full, strict=False):
            assert same.batch is part.batch
            assert not same.is_padding
        for padding in full[len(own) :]:
            assert padding.is_padding
            assert len(padding.batch) == len(padding.t) == len(padding.noise) == 1
            assert torch.equal(padding.batch.x0, own[-1].batch.x0[:1])
            assert torch.equal(padding.noise, own[-1].noise[:1])
            assert torch.equal(padding.t, own[-1].t[:1])
