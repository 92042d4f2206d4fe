"""What the keys about datasets, steps, batches and noise levels do to the samples of a
step.
"""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler

from tests.support.clips import noise, write_dataset, write_image
from tests.support.command_line import train
from tests.support.run_parts import measure
from tests.support.run_results import of_kind
from tests.support.trainers import (
    Lab,
    in_cache,
    job_of,
    overrides_of,
    pixels,
    run_steps,
    source_of,
    take_steps,
    trainer_of,
    weights,
)
from videotune.config.resolve import resolve
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.latent_cache.step_batch import StepBatch
from videotune.rng import generator_for
from videotune.trainer.build import make_objective


def folder(lab: Lab, name: str, count: int = 2, frames: int = 9) -> Path:
    """This number of clips of 32 x 32, equal to no other folder's."""
    clips = {
        f"{name}-{chr(97 + i)}.mp4": noise(frames, 32, 32, seed=100 * ord(name[0]) + i)
        for i in range(count)
    }
    return write_dataset(lab.tmp / name, clips, {}, fps=16)


@pytest.mark.effect("datasets.repeats", "datasets.kind")
@pytest.mark.parametrize(
    ("keys", "seen", "held_out"),
    [
        ({}, {"one": 2, "two": 2}, 0),
        ({"repeats": 3}, {"one": 2, "two": 6}, 0),
        ({"kind": "regularization"}, {"one": 2, "two": 2}, 0),
        ({"kind": "validation"}, {"one": 2}, 2),
    ],
)
def test_how_often_the_clips_of_a_dataset_are_trained_and_whether_they_are_measured(
    keys: dict[str, Any], seen: dict[str, int], held_out: int, lab: Lab
) -> None:
    rows = [
        {"path": str(folder(lab, "one"))},
        {"path": str(folder(lab, "two")), **keys},
    ]
    trainer = trainer_of(in_cache(lab, "own"), {"datasets": rows, "epochs": 1})
    names = {
        clip.id[:12]: Path(clip.path).stem[:3] for clip in trainer.job.library.clips
    }
    assert (
        Counter(
            names[name[:12]]
            for line in run_steps(trainer)
            for name in line["window_ids"]
        )
        == seen
    )
    assert max(trainer.job.exposure(trainer.job.steps).windows.values()) == keys.get(
        "repeats", 1
    )
    measure(trainer, 0)
    (line,) = of_kind(trainer.run, "validation")
    assert (line["held_out"] or {"windows": 0})["windows"] == held_out


@pytest.mark.effect("datasets.kind", "datasets.prior_preservation")
def test_regularization_holds_the_model_to_what_the_base_predicts(lab: Lab) -> None:
    """Before the first step the adapter is nothing: held to the base the loss is
    exactly 0, held to the clips it is not.
    """
    one = folder(lab, "one", 1)

    def first_loss(row: dict[str, Any]) -> float:
        trainer = trainer_of(
            in_cache(lab, "own"), {"datasets": [{"path": str(one), **row}], "steps": 2}
        )
        return run_steps(trainer, 1)[0]["loss"]

    as_training = first_loss({})
    assert as_training > 0.1
    assert first_loss({"kind": "regularization"}) == 0
    assert first_loss({"kind": "regularization", "prior_preservation": True}) == 0
    assert (
        first_loss({"kind": "regularization", "prior_preservation": False})
        == as_training
    )
    alone = [{"path": str(one), "kind": "regularization"}]
    with pytest.raises(VideotuneError, match="would learn nothing"):
        train(overrides_of(lab, {"datasets": alone}), lab.tmp / "nothing")


@pytest.mark.effect("datasets.loss_weight")
def test_a_samples_loss_is_multiplied(lab: Lab) -> None:
    one = folder(lab, "one", 1)

    def first_gradient(weight: float) -> torch.Tensor:
        rows = [{"path": str(one), "loss_weight": weight}]
        trainer = trainer_of(
            in_cache(lab, "own"), {"datasets": rows, "max_grad_norm": 1e9}
        )
        return torch.cat(
            [
                gradient.flatten()
                for gradient in take_steps(trainer, 1).gradients[0].values()
            ]
        )

    torch.testing.assert_close(
        first_gradient(2.5), 2.5 * first_gradient(1.0), rtol=1e-3, atol=1e-8
    )


def test_a_dataset_of_weight_0_is_as_good_as_not_there(lab: Lab) -> None:
    """Bit for bit: it takes no samples from the others."""
    one, other = folder(lab, "one", 2), folder(lab, "other", 4)
    rows: list[dict[str, Any]] = [{"path": str(one)}]
    losses = {}
    for weight in (None, 0, 1):
        more = (
            []
            if weight is None
            else [{"path": str(other), "kind": "regularization", "loss_weight": weight}]
        )
        trainer = trainer_of(in_cache(lab, "own"), {"datasets": rows + more})
        losses[weight] = [
            (line["loss"], line["window_ids"]) for line in run_steps(trainer, 3)
        ]
        assert any(
            "left out: its loss_weight is 0" in note for note in trainer.job.notes
        ) == (weight == 0)
    assert losses[None] == losses[0]
    assert losses[None] != losses[1]


@pytest.mark.effect("datasets.resolution", "datasets.windows")
@pytest.mark.parametrize(
    ("knob", "sizes", "counts"),
    [
        ({}, [32] * 6, [3, 3]),
        ({"resolution": "16x32"}, [32] * 3 + [16] * 3, [3, 3]),
        ({"windows": "head"}, [32] * 4, [3, 1]),
    ],
)
def test_a_dataset_has_its_own_resolution_and_windows(
    lab: Lab, knob: dict[str, str], sizes: list[int], counts: list[int]
) -> None:
    rows = [
        {"path": str(folder(lab, "one", 1, 27))},
        {"path": str(folder(lab, "two", 1, 27)), **knob},
    ]
    job = job_of(in_cache(lab, "own"), {"datasets": rows})
    assert [frames.shape[1] for frames in pixels(job).values()] == sizes
    assert [account["windows"] for account in job.library.accounts] == counts


@pytest.mark.effect("resize")
def test_frames_are_cropped_padded_or_distorted(lab: Lab) -> None:
    """A wide clip, its left half white, at a square size: what is seen of both halves."""
    frames = np.zeros((9, 32, 64, 3), np.uint8)
    frames[:, :, :32] = 255
    data = write_dataset(lab.tmp / "data", {"a.mp4": frames}, {}, fps=16)

    def seen(resize: str, variant: int = 0) -> np.ndarray:
        job = job_of(in_cache(lab, "own"), {"resize": resize}, data)
        (clip,) = pixels(job, variant).values()
        assert clip.shape == (9, 32, 32, 3)
        return clip[4, :, :, 0] > 127

    assert seen("center").mean() == pytest.approx(0.5, abs=0.04)
    assert seen("stretch").mean() == pytest.approx(0.5, abs=0.04)
    padded = seen("pad")
    assert not padded[:8].any()
    assert not padded[24:].any()
    assert padded[10:22, :15].all()
    shares = {round(seen("random", variant).mean(), 2) for variant in range(4)}
    assert len(shares) > 2, "a crop somewhere else for each variant"


@pytest.mark.effect("video_config.video_batch_size_multiplier")
def test_videos_among_images_come_in_smaller_batches(lab: Lab) -> None:
    data = folder(lab, "one", 3)
    for i in range(6):
        image = write_image(
            data / f"still{i}.png", np.full((32, 32, 3), 40 * i, np.uint8)
        )
        image.with_suffix(".txt").write_text("a picture", encoding="utf-8")

    def batches(multiplier: float) -> dict[int, set[int]]:
        knobs = {
            "batch_size": 4,
            "video_config.video_batch_size_multiplier": multiplier,
            "epochs": 4,
        }
        source = source_of(in_cache(lab, "own"), knobs, data)
        found: dict[int, set[int]] = {}
        for step in range(1, 13):
            batch = make_step_batch(source, step).batch
            found.setdefault(batch.x0.shape[2], set()).add(len(batch))
        return found

    assert batches(0.5) == {3: {2}, 1: {4}}
    assert batches(0.1) == {3: {1}, 1: {4}}
    assert batches(1.0) == {3: {4}, 1: {4}}

    def note(multiplier: float, **dataset: int) -> str:
        settings = {
            "batch_size": 4,
            "video_config.video_batch_size_multiplier": multiplier,
            "datasets": [{"path": str(data), **dataset}],
        }
        notes = job_of(in_cache(lab, "own"), settings).notes
        (mixed,) = [note for note in notes if "images and videos are mixed" in note]
        return mixed

    assert "takes 4 images or 2 videos" in note(0.5)
    assert "takes 4 images or 12 videos" in note(3.0)
    assert "takes 3 images or 3 videos" in note(0.5, batch_size=3)
    assert "takes 4 images or 1 video (" in note(0.1)
    alone = job_of(
        lab,
        {"batch_size": 4, "video_config.video_batch_size_multiplier": 0.25},
        folder(lab, "two"),
    )
    assert alone.schedule.batch_sizes == (4,)
    assert any("unused" in note for note in alone.notes)


@pytest.mark.effect("steps")
def test_so_many_updates_are_made(lab: Lab) -> None:
    for steps in (2, 5):
        trainer = trainer_of(lab, {"steps": steps})
        run_steps(trainer)
        counts = {
            int(state["step"])
            for state in trainer.pool.trainable.optimizer.state.values()
        }
        assert counts == {steps}


@pytest.mark.effect("epochs")
@pytest.mark.parametrize(("epochs", "updates"), [(1, 2), (3, 6), (0.6, 2)])
def test_epochs_are_passes_over_the_four_windows(
    lab: Lab, epochs: float, updates: int
) -> None:
    """Batches of two: 4 windows are two updates; the rest of an epoch is one more
    update.
    """
    trainer = trainer_of(lab, {"epochs": epochs, "batch_size": 2, "steps": 99})
    lines = run_steps(trainer)
    assert len(lines) == updates
    views = [
        line["window_ids"].count(name) for line in lines for name in line["window_ids"]
    ]
    assert set(views) == {1}
    if epochs >= 1:
        seen = [name for line in lines for name in line["window_ids"]]
        assert {seen.count(window.id) for window in trainer.job.library.windows} == {
            epochs
        }


@pytest.mark.effect("batch_size", "gradient_accumulation_steps")
@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_step_takes_exactly_batch_times_accumulation_samples(
    lab: Lab, batch: int, accumulation: int
) -> None:
    trainer = trainer_of(
        lab,
        {"batch_size": batch, "gradient_accumulation_steps": accumulation, "steps": 2},
    )
    took = take_steps(trainer)
    assert [len(call["x_t"]) for call in took.calls] == [batch] * (2 * accumulation)
    assert [len(line["window_ids"]) for line in took.lines] == [
        batch * accumulation
    ] * 2
    assert {
        int(state["step"]) for state in trainer.pool.trainable.optimizer.state.values()
    } == {2}


@pytest.mark.effect("seed")
def test_the_seed_names_every_draw(lab: Lab) -> None:
    """Noise, noise levels, order and the adapter's start: the counted draws of this
    seed, and others for another.
    """

    def first(seed: int) -> tuple[StepBatch, torch.Tensor, list[str]]:
        trainer = trainer_of(lab, {"seed": seed})
        order = [
            make_step_batch(trainer.source, step).batch.window_ids[0]
            for step in range(1, 13)
        ]
        return (
            make_step_batch(trainer.source, 1),
            weights(trainer)["blocks.0.attn1.to_q.lora_A.weight"],
            order,
        )

    one, again, other = first(1), first(1), first(2)
    wanted = generator_for(1, "noise", 1, 0).standard_normal(
        one[0].noise.shape[1:], "float32"
    )
    assert np.array_equal(one[0].noise[0].numpy(), wanted)
    assert torch.equal(one[0].noise, again[0].noise)
    assert torch.equal(one[0].t, again[0].t)
    assert torch.equal(one[1], again[1])
    assert one[2] == again[2]
    assert not torch.equal(one[0].noise, other[0].noise)
    assert not torch.equal(one[0].t, other[0].t)
    assert not torch.equal(one[1], other[1])
    assert one[2] != other[2]


@pytest.mark.effect("dataloader_threads")
def test_batches_are_read_ahead_by_threads_and_are_the_same(lab: Lab) -> None:
    def train(threads: int) -> tuple[list[tuple[float, ...]], set[threading.Thread]]:
        """What each step measured, and who read the batches."""
        trainer, readers = (
            trainer_of(lab, {"dataloader_threads": threads, "steps": 12}),
            set(),
        )

        def collate_states(states: Any) -> Any:
            readers.add(threading.current_thread())
            return trainer.family.collate_states(states)

        trainer.source = replace(trainer.source, collate_states=collate_states)
        return [
            (line["loss"], line["grad_norm"], *line["window_ids"])
            for line in run_steps(trainer)
        ], readers

    here = threading.current_thread()
    alone, who = train(0)
    assert (len(alone), who) == (12, {here})
    for threads in (1, 3):
        lines, who = train(threads)
        assert here not in who
        assert 1 <= len(who) <= threads
        assert lines == alone


@pytest.mark.effect("video_config.temporal_consistency_weight")
@pytest.mark.parametrize("weight", [0, 0.5, 2])
def test_the_error_may_be_weighed_by_its_change_from_frame_to_frame(
    lab: Lab, weight: float
) -> None:
    """(‖e‖² + λ‖Δe‖²) / (1 + 2λ(F - 1)/F), from what the network answered; the plain
    mse is logged too.
    """
    trainer = trainer_of(lab, {"video_config.temporal_consistency_weight": weight})
    took, prepared = take_steps(trainer, 1), make_step_batch(trainer.source, 1)
    (line,) = took.lines
    error = (took.calls[0]["answer"] - (prepared.noise - prepared.batch.x0)).double()
    frames = error.shape[2]
    plain = error.square().mean().item()
    flicker = error.diff(dim=2).square().sum().item() / error.numel()
    wanted = (plain + weight * flicker) / (1 + 2 * weight * (frames - 1) / frames)
    assert line["loss"] == pytest.approx(wanted, rel=1e-5)
    assert line["mse"] == pytest.approx(plain, rel=1e-5)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mode(u: float, scale: float) -> float:
    """In the paper's own time, where 1 is data."""
    return 1 - (1 - u) - scale * (math.cos(math.pi / 2 * (1 - u)) ** 2 - u)


def probit(u: float) -> float:
    return torch.special.ndtri(torch.tensor(u, dtype=torch.float64)).item()


LEVELS: list[tuple[str | None, dict[str, float], Callable[[float], float]]] = [
    ("UNIFORM", {}, lambda u: u),
    ("UNIFORM", {"shift": 5}, lambda u: 5 * u / (1 + 4 * u)),
    ("UNIFORM", {"shift": 0}, lambda u: 3 * u / (1 + 2 * u)),  # left to the family
    (None, {}, lambda u: logistic(probit(u))),
    ("LOGIT_NORMAL", {}, lambda u: logistic(probit(u))),
    ("LOGIT_NORMAL", {"mean": 0.7}, lambda u: logistic(0.7 + probit(u))),
    (
        "LOGIT_NORMAL",
        {"mean": -0.3, "std": 0.4},
        lambda u: logistic(-0.3 + 0.4 * probit(u)),
    ),
    ("SIGMOID", {"scale": 1.0}, lambda u: logistic(probit(u))),
    ("SIGMOID", {"scale": 2.5}, lambda u: logistic(2.5 * probit(u))),
    ("MODE", {}, lambda u: mode(u, 1.29)),
    ("MODE", {"scale": -0.5}, lambda u: mode(u, -0.5)),
    ("MODE", {"scale": 0.8}, lambda u: mode(u, 0.8)),
]
"""Distribution, its numbers, and its inverse CDF."""


@pytest.mark.effect(
    "timestep_mean",
    "timestep_std",
    "timestep_scale",
    "timestep_distribution",
    "timestep_shift",
)
@pytest.mark.parametrize(("name", "numbers", "inverse"), LEVELS)
def test_noise_levels_are_the_inverse_cdf_at_the_uniform_draws(
    name: str | None,
    numbers: dict[str, float],
    inverse: Callable[[float], float],
    lab: Lab,
) -> None:
    knobs = {"timestep_shift": 1} | {
        f"timestep_{key}": value or None for key, value in numbers.items()
    }
    source = source_of(lab, knobs | ({"timestep_distribution": name} if name else {}))
    levels = [make_step_batch(source, step).t.item() for step in range(1, 41)]
    assert levels == pytest.approx(
        [inverse(generator_for(0, "t", step, 0).random()) for step in range(1, 41)],
        abs=1e-6,
    )


@pytest.mark.effect("timestep_alpha", "timestep_beta", "timestep_distribution")
@pytest.mark.parametrize(("a", "b"), [(2.0, 2.0), (5.0, 2.0), (2.0, 5.0)])
def test_noise_levels_of_beta_have_its_cdf(a: float, b: float, lab: Lab) -> None:
    knobs = {
        "timestep_distribution": "BETA",
        "timestep_alpha": a,
        "timestep_beta": b,
        "timestep_shift": 1,
    }
    source = source_of(lab, knobs)
    for step in range(1, 41):
        below = float(
            mpmath.betainc(
                a, b, 0, make_step_batch(source, step).t.item(), regularized=True
            )
        )
        assert below == pytest.approx(generator_for(0, "t", step, 0).random(), abs=1e-6)


@pytest.mark.effect("timestep_shift")
def test_the_shift_may_follow_each_bucket_s_tokens(lab: Lab) -> None:
    """A family that publishes the rule: e^μ, μ linear in the tokens.

    Another size, another shift, the same validation.
    """
    shifts = {}
    for size in ("32x32", "64x64"):
        job = job_of(lab, {"resolution": size, "timestep_distribution": "UNIFORM"})
        spec = replace(job.spec, shift_by_tokens=(10, 0.5, 50, 1.5))
        config = job.config.model_copy(update={"timestep_shift": "resolution"})
        source = source_of(
            lab, {"resolution": size, "timestep_distribution": "UNIFORM"}
        )
        source = replace(
            source, objective=make_objective(spec, config), spec=spec, config=config
        )
        tokens = spec.tokens(job.shapes[0])
        shift = shifts[tokens] = math.exp(0.5 + (tokens - 10) / 40)
        for step in (1, 2, 3):
            u = generator_for(0, "t", step, 0).random()
            assert make_step_batch(source, step).t.item() == pytest.approx(
                shift * u / (1 + (shift - 1) * u), abs=1e-6
            )
        fixed = TimestepSampler("UNIFORM", spec.timestep_shift)
        assert torch.equal(source.objective.timesteps.quantiles(9), fixed.quantiles(9))
    assert len(shifts) == 2
    assert (
        resolve({"timestep_shift": "resolution"}, {}, spec).config.timestep_shift
        == "resolution"
    )


@pytest.mark.effect("timestep_stratified")
def test_the_samples_of_a_step_cover_the_distribution_evenly(lab: Lab) -> None:
    """Of a step's n samples each nth of the distribution has exactly one, whatever way
    the step is split.
    """
    for stratified in (False, True):
        drawn = []
        for split in (
            {"batch_size": 8},
            {"batch_size": 2, "gradient_accumulation_steps": 4},
        ):
            knobs = {
                "timestep_stratified": stratified,
                "timestep_distribution": "UNIFORM",
                "timestep_shift": 1,
            }
            source = source_of(lab, knobs | split)
            drawn.append(
                [
                    sorted((make_step_batch(source, step).t * 8).long().tolist())
                    for step in range(1, 11)
                ]
            )
        assert drawn[0] == drawn[1]
        assert [numbers == list(range(8)) for numbers in drawn[0]] == [stratified] * 10


@pytest.mark.effect("loss_weighting", "loss_weighting_gamma")
def test_min_snr_prices_each_timestep_that_a_run_draws(
    lab: Lab, tiny_bases: Callable[..., Path]
) -> None:
    """Of a v-prediction model: min(ᾱ, γ(1 - ᾱ)) of the plain error at each whole
    timestep, γ 5 where none is named.
    """
    cog = replace(lab, model=tiny_bases("cogvideox"), cache=lab.tmp / "cog")
    bars = CogVideoXDDIMScheduler.from_pretrained(
        cog.model, subfolder="scheduler"
    ).alphas_cumprod.numpy()
    levels, moves = [], []
    for weighting, gamma in (("none", None), ("min_snr", None), ("min_snr", 0.05)):
        knobs = {
            "loss_weighting": weighting,
            "loss_weighting_gamma": gamma,
            "steps": 6,
            "learning_rate": 1e-2,
        }
        trainer = trainer_of(cog, knobs | {"video_config.target_fps": 16})
        took = take_steps(trainer)
        levels.append([call["t"].item() for call in took.calls])
        moves.append(took.moved("lora_B"))
        for k, line in zip(levels[0], took.lines, strict=True):
            price = (
                1 if weighting == "none" else min(bars[k], (gamma or 5) * (1 - bars[k]))
            )
            assert line["loss"] == pytest.approx(price * line["mse"], rel=1e-4)
    assert trainer.source.objective.timesteps.distribution == "UNIFORM", (
        "the family's own"
    )
    assert levels[0] == levels[1] == levels[2]
    assert len(set(levels[0])) > 3
    assert (
        min(
            (one - other).abs().max() for one, other in itertools.combinations(moves, 2)
        )
        > 1e-4
    )
