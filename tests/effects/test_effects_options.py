"""What the keys about the range of noise levels, the loss, groups of parameters and
intervals in epochs do.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.trainers import (
    Lab,
    overrides_of,
    run_steps,
    source_of,
    take_steps,
    trainer_of,
    weights,
    written,
)
from videotune.adapters.adapter_types import by_module
from videotune.adapters.effect import change
from videotune.errors import VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.rng import generator_for
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.run_dir import read_run_config
from videotune.trainer.init_from import read_adapter
from videotune.trainer.optimizer_state import optimizer_state
from videotune.trainer.optimizers import parts_of
from videotune.trainer.resume import with_overrides
from videotune.trainer.saving import Saving, save


@pytest.mark.effect("timestep_min", "timestep_max")
@pytest.mark.parametrize(
    ("lo", "hi"), [(0.0, 1.0), (0.25, 1.0), (0.0, 0.5), (0.25, 0.5)]
)
def test_noise_levels_outside_of_the_range_are_not_drawn(
    lo: float, hi: float, lab: Lab
) -> None:
    """The distribution is truncated, so that the draws within keep their proportions;
    validation reads it too.
    """
    knobs = {"timestep_distribution": "UNIFORM", "timestep_shift": 1}
    source = source_of(lab, knobs | {"timestep_min": lo, "timestep_max": hi})
    for step in range(1, 21):
        wanted = lo + (hi - lo) * generator_for(0, "t", step, 0).random()
        assert make_step_batch(source, step).t.item() == pytest.approx(wanted, abs=1e-6)
    middles = [lo + (hi - lo) * (i + 0.5) / 9 for i in range(9)]
    assert source.objective.timesteps.quantiles(9).tolist() == pytest.approx(
        middles, abs=1e-6
    )


@pytest.mark.effect("timestep_min", "timestep_max")
def test_of_two_experts_each_keeps_to_its_own_part_of_the_range(pair: Lab) -> None:
    """The tiny model's experts part at 0.875; one that is left without a noise level is
    refused.
    """
    trainer = trainer_of(
        pair,
        {
            "timestep_min": 0.5,
            "timestep_max": 0.9,
            "expert_period": 1,
            "expert_share": 0.5,
        },
    )
    levels = [trainer.source.timesteps_of(step) for step in (1, 2)]
    assert sorted((level.lo, level.hi) for level in levels) == [
        (0.5, 0.875),
        (0.875, 0.9),
    ]
    for knobs, lost in (
        ({"timestep_max": 0.8}, "high"),
        ({"timestep_min": 0.9}, "low"),
    ):
        with pytest.raises(VideotuneError, match=f"expert {lost}"):
            trainer_of(pair, knobs)
        trainer_of(pair, knobs | {"experts": "low" if lost == "high" else "high"})


@pytest.mark.effect("loss", "loss_delta")
@pytest.mark.parametrize("kind", ["huber", "pseudo_huber"])
@pytest.mark.parametrize("delta", [0.1, 1.0])
def test_the_loss_is_of_its_kind_and_plain_mse_is_logged(
    kind: str, delta: float, lab: Lab
) -> None:
    trainer = trainer_of(lab, {"loss": kind, "loss_delta": delta})
    took, prepared = take_steps(trainer, 1), make_step_batch(trainer.source, 1)
    (line,) = took.lines
    error = (took.calls[0]["answer"] - (prepared.noise - prepared.batch.x0)).double()
    square, size = error.square(), error.abs()
    smooth = 2 * delta * ((square + delta**2).sqrt() - delta)
    costs = (
        torch.where(size <= delta, square, delta * (2 * size - delta))
        if kind == "huber"
        else smooth
    )
    assert line["loss"] == pytest.approx(costs.mean().item(), rel=1e-5)
    assert line["mse"] == pytest.approx(square.mean().item(), rel=1e-5)
    assert line["loss"] < line["mse"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"timestep_min": 0.6, "timestep_max": 0.4}, "timestep_min"),
    ({"loss_delta": 0.5}, "loss_delta"),
    (
        {"loss": "huber", "video_config.temporal_consistency_weight": 1.0},
        "temporal_consistency_weight",
    ),
    ({"lora.modules": [{"pattern": "nothing"}]}, "lora.modules: 'nothing' matches no"),
    ({"lora.modules": [{"pattern": "to_q", "rank": 0}]}, "lora.modules"),
    ({"lora.modules": [{"pattern": "to_q"}], "lora.variant": "OFT"}, "lora.modules"),
    (
        {"lora.learning_rate_ratio": 4, "lora.variant": "LOHA"},
        "lora.learning_rate_ratio",
    ),
    (
        {"lora.learning_rate_ratio": 4, "training_method": "FINE_TUNE"},
        "lora.learning_rate_ratio",
    ),
    (
        {"lora.learning_rate_ratio": 4, "optimizer": "PRODIGY"},
        "lora.learning_rate_ratio",
    ),
    (
        {
            "lora.modules": [{"pattern": "to_q", "learning_rate": 1e-3}],
            "optimizer": "PRODIGY",
        },
        "lora.modules",
    ),
    ({"output_dtype": "FLOAT_16", "training_method": "EMBEDDING"}, "output_dtype"),
    ({"output_dtype": "FLOAT_8"}, "output_dtype"),
    ({"optimizer": "SCHEDULE_FREE", "ema": 0.9}, "ema.decay"),
    (
        {"optimizer": "SCHEDULE_FREE", "learning_rate_scheduler": "COSINE"},
        "learning_rate_scheduler",
    ),
    ({"optimizer": {"name": "SCHEDULE_FREE", "beta1": 0}}, "optimizer.beta1"),
]
"""Knobs, and the key that the error names."""


@pytest.mark.parametrize(
    ("knobs", "named"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_do_not_apply_are_refused(
    lab: Lab, knobs: dict[str, Any], named: str
) -> None:
    with pytest.raises(VideotuneError, match=named):
        trainer_of(lab, knobs)


@pytest.mark.effect("lora.learning_rate_ratio")
@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_lora_b_learns_at_its_multiple_of_the_rate(ratio: float, lab: Lab) -> None:
    """Adam's updates, whatever the size of the gradients; lora_A's is 0 in the first
    step, as lora_B is.
    """
    trainer = trainer_of(
        lab,
        {
            "lora.learning_rate_ratio": ratio,
            "learning_rate": 1e-3,
            "optimizer.weight_decay": 0,
        },
    )
    took = take_steps(trainer, 1)
    assert took.lines[0]["lr"] == {"transformer": 1e-3} | (
        {} if ratio == 1 else {"transformer lora_B": 16e-3}
    )
    assert took.moved("lora_B").abs().max().item() == pytest.approx(
        1e-3 * ratio, rel=1e-2
    )
    both = take_steps(
        trainer_of(lab, {"lora.learning_rate_ratio": ratio, "learning_rate": 1e-3}), 2
    )
    usual = 1e-3 * (0.1 / 0.19) / (0.01 / 0.0199) ** 0.5
    assert both.moved("lora_A").abs().max().item() == pytest.approx(usual, rel=1e-2)
    kept = optimizer_state(trainer.pool.trainable.optimizer, trainer.parameters)
    assert {key.rpartition(".")[0] for key in kept} == set(trainer.parameters)


RULES = [
    {"pattern": r".*\.0\.attn1\.to_q", "rank": 4, "alpha": 2.0},
    {"pattern": "to_q", "rank": 1, "learning_rate": 5e-3},
    {"pattern": "attn1.to_k", "alpha": 6.0},
]


@pytest.mark.effect("lora.modules")
def test_the_first_rule_that_names_a_module_gives_its_rank_scale_and_rate(
    lab: Lab,
) -> None:
    trainer = trainer_of(lab, {"lora.modules": RULES, "learning_rate": 1e-3})
    layers: Any = {
        path: trainer.net.get_submodule(path) for path in by_module(trainer.parameters)
    }
    for path, layer in layers.items():
        rank, scale = (2, 1.0) if not path.endswith("attn1.to_k") else (2, 3.0)
        if path.endswith("to_q"):
            rank, scale = (4, 0.5) if path == "blocks.0.attn1.to_q" else (1, 1.0)
        assert (layer.r["default"], layer.scaling["default"]) == (rank, scale), path
        assert len(trainer.parameters[f"{path}.lora_A.weight"]) == rank
    assert trainer.plan["adapter"]["parameters"] == sum(
        p.numel() for p in trainer.parameters.values()
    )
    assert take_steps(trainer, 1).lines[0]["lr"] == {
        "transformer": 1e-3,
        "transformer to_q": 5e-3,
    }


@pytest.mark.effect("lora.modules")
@pytest.mark.parametrize("format", ["diffusers", "comfyui"])
def test_each_export_carries_each_module_s_rank_and_scale(
    format: str, lab: Lab
) -> None:
    """What PEFT computes in the run's network is what the file's update is; a run that
    begins from either has it too.
    """
    trainer = trainer_of(
        lab,
        {"lora.modules": RULES, "learning_rate": 1e-2, "output_model_format": format},
    )
    run_steps(trainer, 2)
    paths, net = by_module(trainer.parameters), trainer.net
    wanted = {
        path: net.get_submodule(path).get_delta_weight("default") for path in paths
    }
    save(trainer, 2, thread=False)
    (checkpoint,) = complete_checkpoints(trainer.run)
    for source in (written(trainer, 2), checkpoint.folder):
        parts, scales = read_adapter(source, trainer.family, "")
        for path, delta in wanted.items():
            torch.testing.assert_close(
                change(parts[path], scales[path]).float(), delta, rtol=1e-4, atol=1e-7
            )
        again = trainer_of(
            lab, {"lora.modules": RULES[:2], "lora.rank": 4, "init_from": str(source)}
        )
        for path, delta in wanted.items():
            layer: Any = again.net.get_submodule(path)
            torch.testing.assert_close(
                layer.get_delta_weight("default"), delta, rtol=1e-4, atol=1e-7
            )


def schedule_free(
    start: Tensor, given: Iterable[Tensor], rate: float, decay: float
) -> tuple[Tensor, Tensor]:
    """(x, y) of Defazio et al. 2024, algorithm 1, in float64, with a constant rate."""
    x = z = y = start.double()
    square = torch.zeros_like(x)
    for step, gradient in enumerate(given, 1):
        square = 0.99 * square + 0.01 * gradient.double().square()
        z = z - rate * (
            gradient.double() / ((square / (1 - 0.99**step)).sqrt() + 1e-8) + decay * y
        )
        x = x + (z - x) / step
        y = 0.1 * z + 0.9 * x
    return x, y


@pytest.mark.effect("optimizer.name")
@pytest.mark.parametrize("within", [False, True])
def test_schedule_free_trains_y_and_gives_away_x(within: bool, lab: Lab) -> None:
    """Validated, sampled and exported are the weights x; after that the weights that
    train are there again, to the bit.
    """
    knobs = {
        "optimizer": {"name": "SCHEDULE_FREE", "step_in_backward": within},
        "learning_rate": 0.01,
    }
    trainer = trainer_of(lab, knobs | {"max_grad_norm": 1e9})
    start, trainable, given = weights(trainer), trainer.pool.trainable, []
    for part in parts_of(trainable.optimizer):
        own = {id(p): name for name, p in trainer.parameters.items()}
        part.register_step_pre_hook(
            lambda part, *_, own=own: given.extend(
                (own[id(p)], p.grad.clone())
                for group in part.param_groups
                for p in group["params"]
            )
        )
    run_steps(trainer, 3)
    trained, result = (
        weights(trainer),
        {name: value.clone() for name, value in trainer.result.items()},
    )
    for name, first in start.items():
        x, y = schedule_free(
            first, [gradient for key, gradient in given if key == name], 0.01, 0.01
        )
        torch.testing.assert_close(result[name].double(), x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(trained[name].double(), y, rtol=1e-4, atol=1e-5)
    with trainer.averaged():
        assert all(
            torch.equal(value, result[name]) for name, value in weights(trainer).items()
        )
    assert all(
        torch.equal(value, trained[name]) for name, value in weights(trainer).items()
    )
    file = load_file(written(trainer, 3))
    assert all(
        torch.equal(file[f"transformer.{name}"], value)
        for name, value in result.items()
    )


@pytest.mark.effect("output_dtype")
@pytest.mark.parametrize("name", [None, "FLOAT_32", "BFLOAT_16", "FLOAT_16"])
@pytest.mark.parametrize(
    "more", [{}, {"lora.variant": "OFT"}, {"training_method": "FINE_TUNE"}], ids=str
)
def test_exports_have_the_dtype_and_read_back(
    name: str | None, more: dict[str, Any], lab: Lab
) -> None:
    """Weights that float16 cannot hold are refused, and nothing is left behind."""
    trainer = trainer_of(
        lab, {"output_dtype": name, "steps": 1, "learning_rate": 1e-2} | more
    )
    run_steps(trainer)
    whole = "training_method" in more
    path = written(trainer)
    file = load_file(
        path / "transformer" / "diffusion_pytorch_model.safetensors" if whole else path
    )
    dtypes = {
        value.dtype
        for key, value in file.items()
        if not (whole and ("norm" in key or "scale_shift" in key))
    }
    assert dtypes >= {getattr(torch, (name or "FLOAT_32").lower().replace("_", ""))}
    assert whole or len(dtypes) == 1
    if name == "FLOAT_16":
        for parameter in trainer.parameters.values():
            parameter.detach().fill_(1e6)
        with pytest.raises(VideotuneError, match="output_dtype"):
            written(trainer, 2)
        assert not [one for one in path.parent.iterdir() if "step-2" in one.name]


@pytest.mark.effect("save_every_epochs", "validate_every_epochs", "sample_after_epochs")
@pytest.mark.parametrize("epochs", [0.5, 1.0])
def test_intervals_may_be_passes_over_the_data(epochs: float, lab: Lab) -> None:
    """Four windows, one a step: half a pass is two steps.

    A resume takes the steps, whatever was named.
    """
    knobs = {
        f"{key}_epochs": epochs
        for key in ("save_every", "validate_every", "sample_after")
    }
    trainer = trainer_of(lab, {"steps": 8} | knobs)
    wanted = round(4 * epochs)
    config = trainer.job.config
    assert [config.save_every, config.validate_every, config.sample_after] == [
        wanted
    ] * 3
    (saving,) = [one for one in trainer.callbacks if isinstance(one, Saving)]
    assert [step for step in range(1, 8) if saving.due(trainer, step, ())] == list(
        range(wanted, 8, wanted)
    )
    kept = read_run_config(trainer.run)
    assert kept["settings"]["save_every"] == wanted
    assert kept["settings"]["save_every_epochs"] is None
    again, *_, changes = with_overrides(overrides_of(lab, {"steps": 8} | knobs), kept)
    assert (again.config.save_every, changes) == (wanted, [])


@pytest.mark.effect("prior_preservation")
def test_prior_preservation_is_a_regularization_dataset(lab: Lab, twenty: Path) -> None:
    """Before anything is learnt the base model's own prediction is the target of those
    clips alone: no error there.
    """
    knobs = {"prior_preservation": str(twenty), "missing_caption": "empty"}
    trainer = trainer_of(lab, knobs | {"steps": 30, "learning_rate": 1e-12})
    assert [one.kind for one in trainer.job.config.datasets] == [
        "train",
        "regularization",
    ]
    kept = {
        window.id
        for window in trainer.job.library.windows
        if window.clip_id in trainer.job.library.regularization
    }
    errors: dict[bool, list[float]] = {True: [], False: []}
    for line in run_steps(trainer):
        errors[line["window_ids"][0] in kept].append(line["loss"])
    assert max(errors[True]) < 1e-6 < 0.1 < min(errors[False])
    assert [one.kind for one in trainer_of(lab, {}).job.config.datasets] == ["train"]
    told, *_, changes = with_overrides(
        overrides_of(lab, knobs), read_run_config(trainer.run)
    )
    assert len(told.config.datasets) == 2
    assert not [change for change in changes if "dataset" in change.key]
