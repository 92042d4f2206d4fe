"""Effects of the keys on what a run costs its base model."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.run_results import of_kind
from tests.support.trainers import Lab, take_steps, trainer_of
from videotune.diffusion.loss import predicted
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.trainer.loop import train_loop
from videotune.trainer.step import adapter_off
from videotune.trainer.trainer import Trainer

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
    empty = trainer.family.condition([trainer.source.text("")] * len(samples))
    plain = replace(samples, conditioning=empty)
    arguments = (batch.t, batch.noise)
    objective = trainer.source.objective
    with torch.no_grad(), adapter_off(trainer.net):
        prompt, data = predicted(
            trainer.family, trainer.net, objective, samples, *arguments
        )
        nothing, _ = predicted(
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
