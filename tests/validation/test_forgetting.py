"""What a training costs the base model: the figures against closed forms, the verdict,
and the choice of a checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from videotune.sampling.pipeline import SampleLatents
from videotune.validation.forgetting import (
    FORGETTING,
    LEVELS,
    UNDISTILLING,
    Predictions,
    compare,
    judge_kept,
    own_guidance,
    path_error,
    to_json,
)
from videotune.validation.forgetting_callback import BaseReading, load_base, save_base
from videotune.validation.forgetting_plan import least_related, shipped_prompts
from videotune.validation.frontier import Kept, kept_by_step, weigh_kept

PROMPTS = 5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def base() -> Predictions:
    return Predictions(
        prompt=draw(PROMPTS, 4, 4000), empty=draw(PROMPTS, 4, 4000, seed=1)
    )


# figures


def test_the_base_model_keeps_everything(base: Predictions) -> None:
    reading = compare(base, base.prompt)
    assert reading.guidance.tolist() == pytest.approx([1.0] * PROMPTS)
    assert reading.guidance_by_level.tolist() == pytest.approx([1.0] * 4)
    assert reading.distance.tolist() == [0.0] * 4
    assert reading.effect.tolist() == [0.0] * PROMPTS


@pytest.mark.parametrize("share", [0.0, 0.25, 1.5])
def test_a_model_that_keeps_a_share_of_the_guidance_has_that_share(
    base: Predictions, share: float
) -> None:
    effect = base.prompt - base.empty
    reading = compare(base, base.empty + share * effect)
    assert reading.guidance.tolist() == pytest.approx([share] * PROMPTS, abs=1e-5)
    assert reading.effect.tolist() == pytest.approx(
        [abs(1 - share)] * PROMPTS, rel=1e-5
    )
    expected = abs(1 - share) * effect.norm(dim=2) / base.prompt.norm(dim=2)
    assert reading.distance.tolist() == pytest.approx(
        expected.mean(0).tolist(), rel=1e-5
    )


def test_a_change_across_the_prompts_effect_leaves_the_guidance(
    base: Predictions,
) -> None:
    effect = base.prompt - base.empty
    change = draw(PROMPTS, 4, 4000, seed=2)
    along = (change * effect).sum(2, keepdim=True) / effect.square().sum(
        2, keepdim=True
    )
    across = change - along * effect
    reading = compare(base, base.prompt + 3 * across)
    assert reading.guidance.tolist() == pytest.approx([1.0] * PROMPTS, abs=1e-4)
    assert min(reading.effect.tolist()) > 1


@pytest.mark.parametrize("scale", [1.0, 2.0, 4.0])
def test_the_own_guidance_of_a_model_that_predicts_a_multiple_is_its_inverse(
    scale: float,
) -> None:
    """Data has the mean v(∅) + g, with noise; the model predicts v(∅) + scale · g."""
    empty = draw(PROMPTS, 2, 40_000)
    effect = draw(PROMPTS, 2, 40_000, seed=1)
    data = empty + effect + draw(PROMPTS, 2, 40_000, seed=2)
    model = Predictions(prompt=empty + scale * effect, empty=empty)
    assert own_guidance(model, data) == pytest.approx(1 / scale, abs=0.02)


def test_the_error_of_few_steps_is_in_deviations_of_the_finer_path() -> None:
    fine = 3 * draw(2000) + 7
    coarse = fine + 0.6 * draw(2000, seed=1)
    assert path_error(coarse, fine) == pytest.approx(0.2, rel=0.05)
    assert path_error(fine, fine) == 0


# the verdict


def figures(
    guidance: Sequence[float],
    *,
    effect: Sequence[float] = (0.3,) * PROMPTS,
    growth: Sequence[float] = (1.0,) * PROMPTS,
    base_error: float = 0.1,
) -> dict[str, Any]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "guidance": {"mean": mean(guidance), "by_prompt": list(guidance)},
        "effect": {"mean": mean(effect), "by_prompt": list(effect)},
        "few_steps": {
            "error": base_error * mean(growth),
            "base": base_error,
            "growth_by_prompt": list(growth),
        },
    }


LOST = (0.4, 0.5, 0.45, 0.5, 0.42)
SCATTERED = (1.3, 0.2, 1.1, 0.1, 0.9)
WHOLE = (0.97, 1.02, 0.95, 1.0, 0.99)


@pytest.mark.parametrize(
    ("reading", "distilled", "label"),
    [
        (figures(WHOLE), True, None),
        (figures(WHOLE), False, None),
        (figures(LOST), True, UNDISTILLING),
        (figures(LOST), False, FORGETTING),
        (figures(SCATTERED), True, None),
        (figures(WHOLE, effect=(1.3, 1.2, 1.4, 1.3, 1.2)), True, FORGETTING),
        (figures(WHOLE, effect=(1.9, 0.4, 1.8, 0.3, 1.2)), False, None),
        (figures(WHOLE, growth=(2.5, 3.0, 2.8, 2.2, 3.5)), True, UNDISTILLING),
        (figures(WHOLE, growth=(2.5, 3.0, 2.8, 2.2, 3.5)), False, None),
        (figures(WHOLE, growth=(9, 9, 8, 9, 8), base_error=0.6), True, None),
        (figures(WHOLE, growth=(0.2, 9.0, 0.5, 6.0, 0.1)), True, None),
    ],
)
def test_what_is_lost_is_called_if_it_exceeds_chance(
    reading: dict[str, Any], distilled: bool, label: str | None
) -> None:
    assert judge_kept(reading, is_distilled=distilled).label == label


def test_without_finite_numbers_nothing_is_called(base: Predictions) -> None:
    prediction = base.prompt.clone()
    prediction[0, 0, 0] = float("nan")
    errors = [0.1] * PROMPTS
    reading = to_json(compare(base, prediction), errors, errors)
    assert None in reading["guidance"]["by_prompt"]
    assert judge_kept(reading, is_distilled=True).label is None


# the checkpoint


def test_a_step_that_has_lost_abilities_gives_way_to_the_best_that_has_not() -> None:
    held_out = {10: 0.8, 20: 0.6, 30: 0.5, 40: 0.4}
    kept = {
        10: Kept(0.99, None),
        20: Kept(0.95, None),
        30: Kept(0.5, UNDISTILLING),
        40: Kept(0.4, UNDISTILLING),
    }
    assert weigh_kept(40, held_out, kept, [10, 20, 30, 40])[0] == 20
    assert weigh_kept(40, held_out, kept, [10, 30, 40])[0] == 10
    step, why = weigh_kept(40, held_out, kept, [30, 40])
    assert step == 40
    assert why
    assert weigh_kept(20, held_out, kept, [10, 20, 30, 40]) == (20, "")


def test_a_choice_is_on_the_frontier_of_both() -> None:
    """None that is better in one and no worse in the other."""
    held_out = {10: 0.8, 20: 0.5, 30: 0.5, 40: 0.52}
    kept = {
        step: Kept(share, None)
        for step, share in {10: 0.99, 20: 0.97, 30: 0.95, 40: 0.9}.items()
    }
    assert weigh_kept(40, held_out, kept, [10, 20, 30, 40])[0] == 20
    assert weigh_kept(40, held_out, kept, [10, 40]) == (40, "")
    assert weigh_kept(40, held_out, {}, [10, 20, 40]) == (40, "")
    assert weigh_kept(40, {}, kept, [10, 20, 40]) == (40, "")


def test_readings_of_other_prompts_do_not_compare() -> None:
    def line(step: int, name: str, share: float | None) -> dict[str, Any]:
        return {
            "kind": "forgetting",
            "step": step,
            "forgetting": name,
            "guidance": {"mean": share},
            "verdict": None,
        }

    lines = [
        line(1, "a", 0.5),
        line(2, "b", 1.2),
        line(3, "b", None),
        {"kind": "forgetting", "step": 4, "not_measured": "why"},
    ]
    assert kept_by_step(lines) == {2: Kept(1.0, None)}


# prompts


def test_shipped_prompts_that_name_what_the_clips_show_are_left_out() -> None:
    prompts = shipped_prompts()
    assert len(set(prompts)) == len(prompts) >= 8
    horses = ["A horse gallops over sand", "my horse, brown, in a field"]
    chosen = least_related(prompts, horses, 8)
    assert len(chosen) == 8
    assert not any("horse" in prompt for prompt in chosen)
    assert chosen == least_related(prompts, horses, 8)


FORGED: dict[str, Tensor | None] = {
    "path_errors": torch.tensor(0.5),
    "path_errors ": torch.zeros(2, 3),
    "prompt": torch.zeros(2, LEVELS, 7),
    "prompt ": torch.zeros(2, LEVELS, 6, dtype=torch.int64),
    "empty": torch.full((2, LEVELS, 6), torch.nan),
    "video": torch.zeros(3, 1, 1, 2, 3),
    "video ": torch.tensor(1.0),
    "video  ": torch.zeros(2, 1, 1, 2, 4),
    "video   ": None,
    "sound": torch.zeros(1, 1),
    "sound ": torch.zeros(2, 1),
}
"""Tensors that do not fit the other ones, by their names."""


@pytest.mark.parametrize("name", FORGED)
def test_a_reading_of_the_base_whose_tensors_do_not_fit_is_read_again(
    tmp_path: Path, name: str
) -> None:
    """A run folder of a stranger may have any."""
    plan: Any = SimpleNamespace(identity="12345678", prompts=("a cat", "a dog"))
    predictions = torch.randn(2, 2, LEVELS, 6, generator=torch.manual_seed(0))
    samples = tuple(SampleLatents(torch.ones(1, 1, 2, 3), None) for _ in plan.prompts)
    base = BaseReading(samples, Predictions(*predictions), (0.25, 0.5), 1.0)
    path = tmp_path / "forgetting.safetensors"
    save_base(path, plan, base)
    kept = load_base(path, plan)
    assert kept is not None
    assert kept.path_errors == (0.25, 0.5)
    assert torch.equal(kept.predictions.empty, predictions[1])

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in list(file.keys())}
    forged = FORGED[name]
    if forged is None:
        del tensors[name.strip()]
    else:
        tensors[name.strip()] = forged
    save_file(tensors, path, metadata=metadata)
    assert load_base(path, plan) is None
