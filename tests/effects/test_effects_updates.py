"""What the keys about optimizers, schedules and averages do to weights, gradients and memory."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.effects.effects_kit import Lab, moved, run_steps, trainer_of, weights
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.optimizers import optimizer_state
from videotune.trainer.saving import save

FULL = {"training_method": "FINE_TUNE", "train_dtype": "BFLOAT_16"}
EVERY = ("ADAMW", "ADAMW_8BIT", "ADAFACTOR", "PRODIGY", "LION", "LION_8BIT", "MUON")


@pytest.mark.effect("optimizer.name")
def test_each_optimizer_keeps_its_own_state_and_moves_the_weights_its_own_way(lab: Lab) -> None:
    ways, kept = {}, {}
    for name in EVERY:
        trainer = trainer_of(
            lab, {"optimizer": name, "steps": 2} | ({"learning_rate": 1e-3} if name != "PRODIGY" else {})
        )
        before = weights(trainer)
        run_steps(trainer)
        ways[name] = moved(before, weights(trainer), "lora_B")
        (trainable,) = trainer.pool.trainables.values()
        kept[name] = {key.rpartition(".")[2] for key in optimizer_state(trainable.optimizer, trainable.parameters)}
        assert ways[name].abs().max() > 0
    for one, other in itertools.combinations(EVERY, 2):
        alike = other == f"{one}_8BIT"  # an adapter of rank 2 is too small for 8 bits
        assert alike or not torch.allclose(ways[one], ways[other], rtol=0.01)
    assert kept["LION"] == {"step#", "state1"}
    assert kept["MUON"] == {"momentum_buffer"}
    assert {"exp_avg_sq_row", "exp_avg_sq_col"} < kept["ADAFACTOR"]
    assert {"p0", "s", "@d~", "@k#"} < kept["PRODIGY"]


@pytest.mark.effect("optimizer.name", "learning_rate")
def test_prodigy_multiplies_the_rate_that_it_finds(lab: Lab) -> None:
    updates = {}
    for rate in (None, 1.0, 2.0):
        trainer = trainer_of(lab, {"optimizer": "PRODIGY", "learning_rate": rate, "steps": 1})
        before = weights(trainer)
        (line,) = run_steps(trainer)
        updates[rate] = moved(before, weights(trainer), "lora_B"), line["lr"]["transformer"]
    assert updates[None][1] == 1.0
    assert torch.equal(updates[None][0], updates[1.0][0])
    torch.testing.assert_close(updates[2.0][0], 2 * updates[1.0][0], rtol=1e-4, atol=0)


@pytest.mark.effect("optimizer.masters")
def test_without_masters_weights_are_held_in_bf16_alone_and_small_updates_still_arrive(lab: Lab) -> None:
    """Both ways the mean of many small updates is the same; what is kept for each weight is 4 bytes less."""
    change, kept = {}, {}
    for masters in ("FLOAT_32", "STOCHASTIC_ROUNDING"):
        knobs = {"optimizer.masters": masters, "optimizer.weight_decay": 0, "learning_rate": 2e-5, "steps": 3}
        trainer = trainer_of(lab, FULL | knobs)
        net = dict(trainer.net.named_parameters())
        name = max((n for n, p in net.items() if p.dtype == torch.bfloat16), key=lambda n: net[n].numel())
        before = net[name].detach().clone().float()
        run_steps(trainer)
        own = trainer.parameters[name]
        change[masters] = (own.detach().float() - before).abs().mean().item()
        kept[masters] = sum(p.numel() * p.element_size() for p in trainer.parameters.values())
        assert own.dtype == (torch.float32 if masters == "FLOAT_32" else torch.bfloat16)
        assert (own is net[name]) is (masters != "FLOAT_32")
        save(trainer, 3)
        (saved,) = complete_checkpoints(trainer.run)
        assert saved.load("weights")[name].dtype == own.dtype
    assert kept["STOCHASTIC_ROUNDING"] < 0.7 * kept["FLOAT_32"]
    assert change["STOCHASTIC_ROUNDING"] == pytest.approx(change["FLOAT_32"], rel=0.3)


@pytest.mark.effect("optimizer.step_in_backward")
@pytest.mark.parametrize("masters", ["float32 weights", "FLOAT_32", "STOCHASTIC_ROUNDING"])
def test_updates_within_backward_keep_few_gradients_and_are_the_same(lab: Lab, masters: str) -> None:
    """Without clipping: bit for bit the same weights, and at its peak a small part of the gradients' bytes."""
    peaks, ends = {}, {}
    for within in (False, True):
        knobs = {"optimizer.step_in_backward": within, "max_grad_norm": 1e9, "learning_rate": 1e-3, "steps": 2}
        knobs |= {"training_method": "FINE_TUNE"}
        if masters != "float32 weights":
            knobs |= FULL | {"optimizer.masters": masters}
        trainer = trainer_of(lab, knobs | {"ema": 0.5})
        net, alive = dict(trainer.net.named_parameters()), []
        both = {id(p): p for p in (*net.values(), *trainer.parameters.values())}.values()

        def count(_: torch.Tensor, both: object = both, alive: list[int] = alive) -> None:
            held = [p.grad for p in both if p.grad is not None]  # type: ignore[attr-defined]
            alive.append(sum(grad.numel() * grad.element_size() for grad in held))

        for parameter in net.values():
            parameter.register_post_accumulate_grad_hook(count)
        lines = run_steps(trainer)
        assert all(line["grad_norm"] > 0 and "skipped" not in line for line in lines)
        peaks[within], ends[within] = max(alive), weights(trainer)
    assert peaks[True] < 0.3 * peaks[False]
    assert all(torch.equal(value, ends[True][name]) for name, value in ends[False].items())


@pytest.mark.effect("optimizer.step_in_backward", "max_grad_norm")
def test_within_backward_the_norm_of_each_tensor_is_what_is_clipped(lab: Lab) -> None:
    """LION takes the sign, so clipping shows in the moment: at most the limit times 1 - beta2 for each tensor."""
    for limit in (1e-5, 1e9):
        knobs = {"optimizer.name": "LION", "optimizer.step_in_backward": True, "max_grad_norm": limit, "steps": 1}
        trainer = trainer_of(lab, knobs)
        run_steps(trainer)
        (trainable,) = trainer.pool.trainables.values()
        state = optimizer_state(trainable.optimizer, trainable.parameters)
        norms = [value.norm().item() for key, value in state.items() if key.endswith("state1") and value.any()]
        clipped = [norm for norm in norms if norm == pytest.approx(1e-5 * 0.01, rel=1e-2)]
        assert len(clipped) == (len(norms) if limit == 1e-5 else 0)
        assert len(norms) > 4


@pytest.mark.effect("ema.device")
def test_the_average_lies_on_its_device_and_is_the_same(lab: Lab) -> None:
    """Here both are the CPU, so that a weight of a CUDA device is only pretended; the values are measured in earnest."""
    found = {}
    for where in ("device", "host"):
        trainer = trainer_of(lab, {"ema": {"decay": 0.5, "device": where}, "steps": 3})
        run_steps(trainer)
        found[where] = {name: value.clone() for name, value in trainer.averages.items()}
        (trainable,) = trainer.pool.trainables.values()
        with FakeTensorMode():
            pretended = torch.empty(3, device="cuda")
            assert trainable.ema is not None
            assert trainable.ema._own(pretended).device.type == ("cuda" if where == "device" else "cpu")
    assert all(torch.equal(value, found["host"][name]) for name, value in found["device"].items())
