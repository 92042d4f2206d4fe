"""What the keys about the kind of adapter and the layers of a fine-tuning do to what trains and to what is written."""

import pytest
import torch
from safetensors.torch import load_file

from tests.effects.effects_kit import Lab, run_steps, trainer_of, weights, written
from videotune.adapters.kinds import PARTS, split


@pytest.mark.effect("lora.variant")
def test_the_kind_that_is_named_trains_and_is_written(lab: Lab) -> None:
    """Each has tensors and a count of its own, begins with the same loss, and has another one after a step."""
    counts, losses = {}, {}
    for kind in PARTS:
        knobs = {"lora.variant": kind.lower(), "lora.rank": 4, "lora.targets": ["attn1.to_q"], "learning_rate": 0.1}
        trainer = trainer_of(lab, knobs)
        losses[kind] = [line["loss"] for line in run_steps(trainer, 2)]
        parts = {place[1] for name in trainer.parameters if (place := split(name))}
        assert parts == set(PARTS[kind]) & parts
        assert kind == "LOKR" or parts == set(PARTS[kind])
        counts[kind] = sum(parameter.numel() for parameter in trainer.parameters.values()) // 2
        assert trainer.job.config.output_model_format == ("peft" if kind in ("LOHA", "LOKR", "OFT") else "diffusers")
        in_file = {key.removesuffix(".weight").rsplit(".", 1)[1] for key in load_file(written(trainer))}
        assert in_file == parts
    one = 4 * (24 + 24)
    assert counts == {"LORA": one, "DORA": one + 24, "LOHA": 2 * one, "LOKR": 4 * 4 + 6 * 6, "OFT": 24 // 4 * 6}
    assert len({loss[0] for loss in losses.values()}) == 1, "step 1 is of the base itself"
    assert len({loss[1] for loss in losses.values()}) == len(PARTS)


def test_a_preset_s_alpha_is_not_held_against_rotations(lab: Lab) -> None:
    trainer = trainer_of(lab, {"lora.variant": "OFT", "lora.rank": 4, "resolution": "32x32"}, preset="toy")
    assert trainer.job.config.lora.alpha is None
    assert trainer.job.resolved.origins["lora.variant"] == "user"


@pytest.mark.effect("transformer.layers")
def test_the_layers_that_are_named_train_and_the_model_is_written_whole(lab: Lab) -> None:
    base = load_file(lab.model / "transformer" / "diffusion_pytorch_model.safetensors")
    trained = {}
    for layers in (None, ["blocks.1.attn1"], [r"blocks\.\d+\.ffn", "proj_out.bias"]):
        trainer = trainer_of(lab, {"training_method": "FINE_TUNE", "transformer.layers": layers, "learning_rate": 0.01})
        held = [parameter for group in trainer.pool.trainable.optimizer.param_groups for parameter in group["params"]]
        assert {id(parameter) for parameter in held} == {id(parameter) for parameter in trainer.parameters.values()}
        before = weights(trainer)
        run_steps(trainer, 2)
        assert all(not torch.equal(value, before[name]) for name, value in weights(trainer).items() if value.any())
        saved = load_file(written(trainer) / "transformer" / "diffusion_pytorch_model.safetensors")
        assert set(saved) == set(base)
        trained[str(layers)] = {name for name, value in saved.items() if not torch.equal(value, base[name])}
        assert trained[str(layers)] <= set(trainer.parameters)
    whole, one, two = trained.values()
    assert one
    assert {name.rsplit(".", 2)[0] for name in one} <= {"blocks.1.attn1", "blocks.1.attn1.to_out"}
    assert two
    assert all(".ffn." in name or name == "proj_out.bias" for name in two)
    assert len(whole) > len(one | two)
