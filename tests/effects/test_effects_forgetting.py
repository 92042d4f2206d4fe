"""Effects of the keys on what a run costs its base model."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.run_results import of_kind
from tests.support.trainers import Lab, job_of, take_steps, trainer_of
from videotune.diffusion.loss import predict_and_target
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.reporter.curves import GUIDED_TARGET
from videotune.reporter.curves import validation as validation_chapter
from videotune.reporter.read import read_run
from videotune.trainer.build import plain_batch
from videotune.trainer.loop import train_loop
from videotune.trainer.step import adapter_off
from videotune.trainer.trainer import Trainer
from videotune.validation.callbacks import Validation
from videotune.validation.overhead import validations
from videotune.validation.selection import QUANTILES, quantiles_by_window
from videotune.validation.validation_loss import noise_of

READ = {
    "steps": 4,
    "save_every": 2,
    "forgetting.budget": 1e9,
    "forgetting.steps": 1,
    "learning_rate": 0.01,
}


def readings(lab: Lab, **keys: Any) -> list[dict[str, Any]]:
    trainer = trainer_of(lab, READ | keys)
    train_loop(trainer)
    trainer.journal.close()
    return of_kind(trainer.run, "forgetting")


@pytest.mark.effect("forgetting.budget")
@pytest.mark.parametrize(("budget", "steps"), [(0, []), (0.5, []), (1e9, [0, 2, 4])])
def test_what_the_budget_does_not_allow_is_not_read(
    lab: Lab, budget: float, steps: list[int]
) -> None:
    lines = readings(lab, **{"forgetting.budget": budget})
    assert [line["step"] for line in lines] == steps


@pytest.mark.effect("forgetting.prompts")
def test_the_prompts_that_are_named_are_read(lab: Lab) -> None:
    named = ["a cat", "a dog", "a cow", "a hen"]
    own = readings(lab, **{"forgetting.prompts": named})
    shipped = readings(lab)
    assert own[0]["prompts"] == named
    assert len(shipped[0]["prompts"]) == 8
    assert own[0]["forgetting"] != shipped[0]["forgetting"]
    assert len(own[-1]["guidance"]["by_prompt"]) == 4
    assert own[-1]["distance"]["mean"] != shipped[-1]["distance"]["mean"]


@pytest.mark.effect("forgetting.steps")
def test_a_path_of_more_steps_ends_nearer_to_the_finer_one(lab: Lab) -> None:
    errors = [
        readings(lab, **{"forgetting.steps": steps})[0]["few_steps"]["base"]
        for steps in (1, 4)
    ]
    assert errors[1] < errors[0]


def target_of(trainer: Trainer, scale: float) -> torch.Tensor:
    """The guided target of the first step, by the base model run on its own."""
    batch = make_step_batch(trainer.source, 1)
    samples = batch.batch
    assert samples is not None
    empty = trainer.family.collate_states(
        [trainer.source.text_states("")] * len(samples)
    )
    plain = replace(samples, conditioning=empty)
    arguments = (batch.t, batch.noise)
    objective = trainer.source.objective
    with torch.no_grad(), adapter_off(trainer.net):
        prompt, data = predict_and_target(
            trainer.family, trainer.net, objective, samples, *arguments
        )
        nothing, _ = predict_and_target(
            trainer.family, trainer.net, objective, plain, *arguments
        )
    return data.video + (1 - 1 / scale) * (prompt.video - nothing.video)


@pytest.mark.effect("distilled_guidance")
@pytest.mark.parametrize("scale", [2.0, 6.0])
def test_the_target_keeps_the_guidance_of_the_base_model(
    lab: Lab, scale: float
) -> None:
    trainer = trainer_of(lab, {"distilled_guidance": scale, "caption_dropout": 0})
    target = target_of(trainer, scale)
    took = take_steps(trainer, 1)
    (line,) = took.lines
    error = (took.calls[-1]["answer"] - target).double()
    assert line["loss"] == pytest.approx(error.square().mean().item(), rel=1e-5)
    assert len(took.calls) == 3

    plain = take_steps(trainer_of(lab, {"caption_dropout": 0}), 1)
    assert plain.lines[0]["loss"] != line["loss"]
    assert len(plain.calls) == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"training_method": "FINE_TUNE"},
        {"training_method": "EMBEDDING"},
    ],
)
def test_without_a_base_model_beside_the_training_it_is_refused(
    lab: Lab, keys: dict[str, Any]
) -> None:
    with pytest.raises(VideotuneError, match="distilled_guidance"):
        trainer_of(lab, {"distilled_guidance": 3.0, **keys})


def test_without_a_caption_the_target_is_the_datas(lab: Lab) -> None:
    """A caption that was dropped has no effect to keep."""
    lines = []
    for keys in ({}, {"distilled_guidance": 4.0}):
        trainer = trainer_of(lab, {"caption_dropout": 1.0, **keys})
        lines += take_steps(trainer, 1).lines
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], rel=1e-6)


def validated(lab: Lab, **keys: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    """A short run with validations, and these."""
    sets = {"steps": 2, "validate_every": 2, "learning_rate": 0.01}
    trainer = trainer_of(lab, sets | keys)
    train_loop(trainer)
    trainer.journal.close()
    return trainer, of_kind(trainer.run, "validation")


def error_of_base(trainer: Trainer, share: float) -> float:
    """The base model's error on the training clips if only a share of the captions'
    effect is predicted, by the base model run on its own.
    """
    (validation,) = (x for x in trainer.callbacks if isinstance(x, Validation))
    windows = validation.loss.train
    source = trainer.source
    levels = source.objective.timesteps.quantiles(QUANTILES)
    empty = trainer.family.collate_states([source.text_states("")])
    errors = torch.full((len(windows), QUANTILES), float("nan"), dtype=torch.float64)
    with torch.no_grad(), adapter_off(trainer.net):
        for row, chosen in enumerate(quantiles_by_window(windows)):
            batch = plain_batch(source, windows[row])
            without = replace(batch, conditioning=empty)
            for level in chosen:
                shape = tuple(batch.x0.shape)
                noise = noise_of(validation.loss.seed, windows[row], level, shape)
                t = levels[[level]].float()
                arguments = (t, noise)
                by_batch = [
                    predict_and_target(
                        trainer.family, trainer.net, source.objective, each, *arguments
                    )
                    for each in (batch, without)
                ]
                (prompt, data), (nothing, _) = by_batch
                weakened = nothing.video + share * (prompt.video - nothing.video)
                error = (weakened - data.video).double().square().mean()
                errors[row, level] = error
    return float(errors.nanmean(0).mean())


@pytest.mark.parametrize("scale", [2.0, 5.0])
def test_validations_are_read_against_the_target_that_trains(
    lab: Lab, scale: float
) -> None:
    """Against its own target the base model has the error of the captions' effect by
    1/w: what a distilled model predicts of the data without guidance.
    """
    trainer, lines = validated(lab, distilled_guidance=scale)
    error = lines[0]["train"]["mean"]
    plain_error = lines[0]["plain"]["train"]["mean"]
    expected = error_of_base(trainer, 1 / scale)
    expected_plain = error_of_base(trainer, 1.0)
    assert error == pytest.approx(expected, rel=2e-6)
    assert plain_error == pytest.approx(expected_plain, rel=2e-6)
    # Captions move the predictions of a random model little.
    assert abs(expected - expected_plain) > 2e-5 * expected
    for part in (lines[0], lines[0]["plain"]):
        assert part["train"]["normalised"] == pytest.approx(1)
    assert lines[1]["plain"]["train"]["normalised"] != lines[1]["train"]["normalised"]

    _, plain_lines = validated(lab)
    assert plain_lines[0]["train"]["mean"] == pytest.approx(plain_error, rel=1e-6)
    assert "plain" not in plain_lines[0]
    assert plain_lines[0]["validation"] != lines[0]["validation"]


def test_a_set_of_another_target_is_another_set(lab: Lab) -> None:
    names = [
        validated(lab, distilled_guidance=scale)[1][0]["validation"]
        for scale in (2.0, 5.0)
    ]
    assert names[0] != names[1]


def test_the_report_says_what_validations_are_measured_against(lab: Lab) -> None:
    trainer, _ = validated(lab, distilled_guidance=4.0)
    (part,) = validation_chapter(read_run(trainer.run))["parts"]
    assert GUIDED_TARGET in part["notes"]
    labels = [row[0] for row in part["rows"]]
    assert labels == ["training clips", "training clips, against the clips alone"]

    trainer, _ = validated(lab)
    (part,) = validation_chapter(read_run(trainer.run))["parts"]
    assert GUIDED_TARGET not in part["notes"]
    assert [row[0] for row in part["rows"]] == ["training clips"]


def test_a_target_of_the_base_model_makes_validations_three_times_as_dear(
    lab: Lab,
) -> None:
    keys = {"validate_every": 2}
    passes = [
        validations(job_of(lab, keys | extra))["passes"]
        for extra in ({}, {"distilled_guidance": 4.0})
    ]
    assert passes[1] == 3 * passes[0]
