"""What the keys about updates, precision and memory do to gradients, weights and activations."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.effects.effects_kit import Lab, gradients, in_cache, run_steps, trainer_of, watched, weights
from videotune.diffusion.loss import denoising_loss
from videotune.latent_cache.batches import prepare
from videotune.trainer.trainer import Trainer

Weights = dict[str, torch.Tensor]


def adamw(start: Weights, gradients: Iterable[Weights], rate: float, b1: float, b2: float, decay: float) -> Weights:
    """Loshchilov and Hutter's algorithm 2, in float64: the weights after these gradients."""
    out = {name: value.double() for name, value in start.items()}
    mean = {name: torch.zeros_like(value) for name, value in out.items()}
    square = {name: torch.zeros_like(value) for name, value in out.items()}
    for step, given in enumerate(gradients, 1):
        for name, gradient in given.items():
            mean[name] = b1 * mean[name] + (1 - b1) * gradient.double()
            square[name] = b2 * square[name] + (1 - b2) * gradient.double().square()
            update = (mean[name] / (1 - b1**step)) / ((square[name] / (1 - b2**step)).sqrt() + 1e-8)
            out[name] = out[name] - rate * (update + decay * out[name])
    return out


@pytest.mark.effect("optimizer.beta1", "optimizer.beta2", "optimizer.weight_decay", "learning_rate")
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"optimizer.beta1": 0.5},
        {"optimizer.beta2": 0.5},
        {"optimizer.weight_decay": 1.0},
        {"learning_rate": 0.03},
        {"optimizer": "adamw"},
    ],
    ids=str,
)
def test_weights_after_three_steps_are_those_of_adamw_with_the_config_s_numbers(lab: Lab, knobs: dict) -> None:
    trainer = trainer_of(lab, {"learning_rate": 0.01} | knobs)
    start = weights(trainer)
    with gradients(trainer) as given:
        run_steps(trainer, 3)

    def expected(**other: float) -> Weights:
        named = {key.rsplit(".", 1)[-1]: value for key, value in knobs.items() if key != "optimizer"} | other
        rate = named.get("learning_rate", 0.01)
        return adamw(start, given, rate, *(named.get(k, d) for k, d in (("beta1", 0.9), ("beta2", 0.99))), decay(named))

    def decay(named: dict[str, float]) -> float:
        return named.get("weight_decay", 0.01)

    for name, wanted in expected().items():
        torch.testing.assert_close(trainer.parameters[name].double(), wanted, rtol=1e-4, atol=1e-6)
    for other in ({"beta1": 0.7}, {"beta2": 0.7}, {"weight_decay": 0.5}, {"learning_rate": 0.02}):
        wrong = expected(**other)
        gap = max((trainer.parameters[name].double() - wrong[name]).abs().max().item() for name in wrong)
        assert gap > 1e-4, f"the weights do not tell {other} apart"


@pytest.mark.effect("optimizer.weight_decay")
def test_the_optimizer_s_name_alone_leaves_the_preset_s_decay(lab: Lab) -> None:
    """The toy preset says weight_decay 0: A stays where it is while it has no gradient."""
    for optimizer, decay in (("ADAMW", 0.0), ({"name": "ADAMW", "weight_decay": 0.5}, 0.5)):
        knobs = {"optimizer": optimizer, "learning_rate": 0.1, "warmup_steps": 0, "resolution": "32x32"}
        trainer = trainer_of(lab, knobs | {"batch_size": 1, "sample_after": 0}, preset="toy")
        start = weights(trainer)
        run_steps(trainer, 1)
        for name, value in weights(trainer).items():
            if "lora_A" in name:
                torch.testing.assert_close(value, start[name] * (1 - 0.1 * decay))


HALF_WAVE = [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
SCHEDULES: list[tuple[dict[str, Any], list[float]]] = [
    ({"learning_rate_scheduler": "CONSTANT"}, [1, 1, 1, 1]),
    ({"learning_rate_scheduler": "LINEAR"}, [1, 0.75, 0.5, 0.25]),
    ({"learning_rate_scheduler": "linear"}, [1, 0.75, 0.5, 0.25]),
    ({"learning_rate_scheduler": "COSINE"}, HALF_WAVE),
    ({"learning_rate_scheduler": "COSINE_RESTARTS", "learning_rate_cycles": 1}, HALF_WAVE),
    ({"learning_rate_scheduler": "COSINE_RESTARTS", "learning_rate_cycles": 2}, [1, 0.5, 1, 0.5]),
    ({"learning_rate_scheduler": "POLYNOMIAL"}, [1, 3 / 4, 2 / 4, 1 / 4]),
    ({"learning_rate_scheduler": "POLYNOMIAL", "learning_rate_power": 2}, [1, 9 / 16, 4 / 16, 1 / 16]),
    ({"warmup_steps": 0}, [1, 1, 1, 1]),
    ({"warmup_steps": 1}, [1 / 2, 1, 1, 1]),
    ({"warmup_steps": 3}, [1 / 4, 2 / 4, 3 / 4, 1]),
    ({"warmup_steps": None, "steps": 40}, [1 / 3, 2 / 3, 1, 1]),  # a twentieth of the steps
]


@pytest.mark.effect("learning_rate_scheduler", "learning_rate_cycles", "learning_rate_power", "warmup_steps")
@pytest.mark.parametrize(("knobs", "factors"), SCHEDULES, ids=str)
def test_the_rate_of_each_step_is_that_of_the_schedule(lab: Lab, knobs: dict[str, Any], factors: list[float]) -> None:
    """As the optimizer has it, and as the journal says it."""
    trainer = trainer_of(lab, {"learning_rate": 0.01} | knobs)
    rates: list[float] = []
    optimizer = trainer.pool.trainable.optimizer
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    lines = run_steps(trainer, 4)
    assert (
        rates == [line["lr"]["transformer"] for line in lines] == pytest.approx([0.01 * factor for factor in factors])
    )


@pytest.mark.effect("max_grad_norm")
def test_gradients_are_clipped_to_the_norm_once_a_step(lab: Lab) -> None:
    """The norm over both forward passes together; the direction stays; a norm below the limit is left alone."""
    found = {}
    for limit in (1e-3, 1e6):
        trainer = trainer_of(lab, {"max_grad_norm": limit, "gradient_accumulation_steps": 2})
        with gradients(trainer) as given:
            (line,) = run_steps(trainer, 1)
        found[limit] = torch.cat([value.flatten() for value in given[0].values()]), line["grad_norm"]
    (small, before), (whole, same) = found[1e-3], found[1e6]
    assert before == same == pytest.approx(whole.norm().item(), rel=1e-5)
    assert whole.norm() > 1e-3
    assert small.norm().item() == pytest.approx(1e-3, rel=1e-3)
    torch.testing.assert_close(small / small.norm(), whole / whole.norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.effect("train_dtype")
def test_frozen_weights_and_activations_have_the_train_dtype(lab: Lab) -> None:
    losses = {}
    for name, dtype in (("FLOAT_32", torch.float32), ("BFLOAT_16", torch.bfloat16), (None, torch.float32)):
        trainer = trainer_of(in_cache(lab, str(name)), {"train_dtype": name})
        with watched(trainer.net) as calls:
            (line,) = run_steps(trainer, 1)
        assert trainer.net.blocks[0].attn1.to_q.base_layer.weight.dtype == dtype
        assert (calls[0]["x_t"].dtype, calls[0]["text"].dtype) == (dtype, dtype)
        assert calls[0]["t"].dtype == torch.float32
        assert {parameter.dtype for parameter in trainer.parameters.values()} == {torch.float32}
        losses[name] = line["loss"]
    assert losses[None] == losses["FLOAT_32"]
    assert losses["BFLOAT_16"] != losses["FLOAT_32"]
    assert losses["BFLOAT_16"] == pytest.approx(losses["FLOAT_32"], rel=0.02)


@pytest.mark.effect("train_dtype")
def test_a_run_does_not_depend_on_the_dtype_of_an_earlier_run_over_the_same_cache(lab: Lab) -> None:
    alone = trainer_of(in_cache(lab, "alone"), {"train_dtype": "FLOAT_32"})
    trainer_of(in_cache(lab, "both"), {"train_dtype": "BFLOAT_16"})
    after = trainer_of(in_cache(lab, "both"), {"train_dtype": "FLOAT_32"})
    texts = [prepare(trainer.source, 1).batch.cond.text for trainer in (alone, after)]
    assert texts[1].dtype == texts[0].dtype
    assert torch.equal(*texts)


@pytest.mark.effect("gradient_checkpointing")
def test_blocks_are_recomputed_in_backward_and_less_is_kept(lab: Lab) -> None:
    kept, calls, losses = {}, {}, {}
    for mode in ("OFF", "ON", "CPU_OFFLOADED"):
        trainer = trainer_of(lab, {"gradient_checkpointing": mode})
        kept[mode], seen = kept_by_the_graph(trainer), []
        streams: Any = trainer.pool.streams
        sent = 0 if streams is None else streams.activation_offload.bytes
        trainer.net.blocks[0].attn1.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        losses[mode] = [line["loss"] for line in run_steps(trainer, 3)]
        calls[mode] = len(seen)
    assert calls == {"OFF": 3, "ON": 6, "CPU_OFFLOADED": 6}
    assert kept["ON"] < 0.5 * kept["OFF"]
    assert sent == 2 * 12 * 24 * 4, "3 latent frames of 2 x 2 tokens, 24 numbers each, before each of two blocks"
    assert kept["ON"] - kept["CPU_OFFLOADED"] >= sent
    assert losses["CPU_OFFLOADED"] == losses["ON"] == pytest.approx(losses["OFF"], rel=1e-6)


def kept_by_the_graph(trainer: Trainer) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, on the device."""
    trainer.net.train()
    prepared, saved = prepare(trainer.source, 1), {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        denoising_loss(
            trainer.family, trainer.net, trainer.source.objective, prepared.batch, prepared.t, prepared.noise
        )
    return sum(saved.values())
