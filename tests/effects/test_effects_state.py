"""What the keys about the method, the optimizer's memory, averages and checkpoints do to weights and files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.effects.effects_kit import Lab, run_steps, trainer_of, weights, written
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.loop import train_loop
from videotune.trainer.saving import save


def stored(run: Path, part: str) -> dict[str, torch.Tensor]:
    """A part of the newest checkpoint."""
    return complete_checkpoints(run)[-1].load(part)


@pytest.mark.effect("training_method")
def test_an_adapter_leaves_the_model_s_weights_and_fine_tuning_changes_all(lab: Lab) -> None:
    moved, rates = {}, {}
    for method in ("LORA", "FINE_TUNE"):
        trainer = trainer_of(lab, {"training_method": method})
        before = {name: value.clone() for name, value in trainer.net.state_dict().items()}
        rates[method] = run_steps(trainer, 2)[0]["lr"]["transformer"]
        after = trainer.net.state_dict()
        moved[method] = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert all(".lora_" in name for name in moved["LORA"])
    assert len(moved["LORA"]) == 32
    assert moved["FINE_TUNE"] == set(before)
    assert rates == {"LORA": 1e-4, "FINE_TUNE": 1e-5}


@pytest.mark.effect("training_method")
@pytest.mark.parametrize("dtype", ["FLOAT_32", "BFLOAT_16"])
def test_a_fine_tuned_model_is_a_folder_that_diffusers_opens(lab: Lab, dtype: str) -> None:
    from diffusers import WanPipeline, WanTransformer3DModel

    knobs = {"training_method": "FINE_TUNE", "train_dtype": dtype, "learning_rate": 0.01, "steps": 2}
    trainer = trainer_of(lab, knobs)
    assert all(parameter.dtype == torch.float32 for parameter in trainer.parameters.values())
    run_steps(trainer)
    folder = written(trainer, 2)
    opened = WanTransformer3DModel.from_pretrained(folder / "transformer", dtype=next(trainer.net.parameters()).dtype)
    for name, value in trainer.net.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value), name
    base = load_file(lab.model / "transformer" / "diffusion_pytorch_model.safetensors")
    assert not torch.allclose(opened.state_dict()["proj_out.weight"].float(), base["proj_out.weight"], atol=1e-3)
    assert WanPipeline.from_pretrained(folder).vae is not None


@pytest.mark.effect("ema.decay")
@pytest.mark.parametrize("decay", [0.2, 0.9])
def test_the_average_is_its_recursion_and_is_what_is_used(lab: Lab, decay: float) -> None:
    """In float64 from the weights after each step; previews compute with it, and the file that is exported holds it."""
    trainer = trainer_of(lab, {"ema": decay, "learning_rate": 0.05, "steps": 4})
    expected = {name: value.double() for name, value in weights(trainer).items()}
    for step in range(1, 5):
        trainer.first = step
        run_steps(trainer, 1)
        share = min(decay, (1 + step) / (10 + step))
        for name, value in weights(trainer).items():
            expected[name] = share * expected[name] + (1 - share) * value.double()
    live = weights(trainer)
    for name, value in expected.items():
        torch.testing.assert_close(trainer.result[name].double(), value, rtol=1e-5, atol=1e-7)
    assert max((live[name] - trainer.result[name]).abs().max() for name in live) > 1e-3
    with trainer.averaged():
        inside = weights(trainer)
    assert all(torch.equal(weights(trainer)[name], value) for name, value in live.items())
    assert all(torch.equal(trainer.result[name], value) for name, value in inside.items())
    name = "blocks.0.attn1.to_q.lora_B.weight"
    assert torch.equal(load_file(written(trainer, 4))[f"transformer.{name}"], trainer.result[name])
    save(trainer, 4)
    assert torch.equal(stored(trainer.run, "ema")[name], trainer.result[name])


@pytest.mark.effect("init_from")
def test_a_run_begins_with_the_weights_that_it_is_given(lab: Lab) -> None:
    first = trainer_of(lab, {"learning_rate": 0.05, "steps": 2})
    run_steps(first)
    begun, plain = (weights(trainer_of(lab, {"init_from": one})) for one in (str(written(first, 2)), None))
    assert all(torch.equal(begun[name], value) for name, value in weights(first).items())
    assert not any(value.any() for name, value in plain.items() if "lora_B" in name)


CHECKPOINTS: list[tuple[dict[str, float], list[int]]] = [
    ({"save_every": 1}, [1, 2, 3, 4, 5, 6]),
    ({"save_every": 1, "save_keep": 2}, [5, 6]),
    ({"backup_every": 2}, [2, 4, 6]),
    ({"backup_every": 0}, [6]),
    ({"backup_every": 1, "backup_keep": 3}, [3, 4, 5, 6]),
    ({"backup_every": 1, "backup_keep": 1, "save_every": 2}, [2, 4, 5, 6]),
    ({"backup_after": 1e-9}, [4, 5, 6]),
    ({"backup_after": 60}, [6]),
    ({"backup_after": 0}, [6]),
]


@pytest.mark.effect("save_keep", "backup_every", "backup_keep", "backup_after")
@pytest.mark.parametrize(("knobs", "steps"), CHECKPOINTS, ids=str)
def test_which_checkpoints_and_backups_stay(lab: Lab, knobs: dict[str, float], steps: list[int]) -> None:
    """After six steps, of which the last is a save."""
    trainer = trainer_of(lab, {"steps": 6} | knobs)
    assert train_loop(trainer) == "done"
    assert (
        sorted(int(path.name.removeprefix("step-")) for path in (trainer.run / "checkpoints").glob("step-*")) == steps
    )
