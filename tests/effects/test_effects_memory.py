"""What the keys about memory do to bytes on the device, bytes that are kept, and passes of the network."""

import pytest
import torch

from tests.effects.effects_kit import Lab, gradients, run_steps, trainer_of, watched, weights


@pytest.mark.effect("layer_offload_fraction")
def test_so_many_blocks_wait_on_the_host_and_are_loaded_for_their_turn(lab: Lab) -> None:
    """The tiny model has two blocks. A slot of the ring stays for each of those that are streamed, two at most."""
    away, loads, losses, after = {}, {}, {}, {}
    for fraction in (0.0, 0.5, 1.0):
        trainer = trainer_of(lab, {"layer_offload_fraction": fraction, "learning_rate": 0.01})
        lines = run_steps(trainer, 2)
        losses[fraction], after[fraction] = [line["loss"] for line in lines], weights(trainer)
        own = [p for name, p in trainer.net.named_parameters() if "lora_" not in name]
        away[fraction] = sum(p.numel() * 4 for p in own) - sum(p.untyped_storage().nbytes() for p in own)
        streams = trainer.pool.streams
        loads[fraction] = 0 if streams is None else streams.buffers.loads
    block = sum(p.numel() * 4 for name, p in trainer.net.blocks[0].named_parameters() if "lora_" not in name)
    assert away[0.0] == 0
    assert away[0.5] == pytest.approx(block, rel=0.02)
    assert away[1.0] == pytest.approx(2 * block, rel=0.02)
    assert loads == {0.0: 0, 0.5: 1, 1.0: 2}
    assert losses[0.5] == losses[1.0] == losses[0.0]
    for name, value in after[0.0].items():
        assert torch.equal(after[0.5][name], value)
        assert torch.equal(after[1.0][name], value)


@pytest.mark.effect("micro_batch_size")
@pytest.mark.parametrize(("size", "passes"), [(None, [4, 4]), (9, [4, 4]), (3, [3, 3, 2]), (1, [1] * 8)])
def test_a_batch_goes_through_in_parts_and_the_step_is_the_same(lab: Lab, size: int | None, passes: list[int]) -> None:
    """Two batches of four a step, of which a part takes its samples one after the other."""
    knobs = {"batch_size": 4, "gradient_accumulation_steps": 2}
    whole, split = trainer_of(lab, knobs), trainer_of(lab, knobs | {"micro_batch_size": size})
    with gradients(whole) as one:
        before = run_steps(whole, 1)
    with gradients(split) as other, watched(split.net) as calls:
        after = run_steps(split, 1)
    assert [len(call["x_t"]) for call in calls] == passes
    assert after[0]["window_ids"] == before[0]["window_ids"]
    assert after[0]["loss"] == pytest.approx(before[0]["loss"], rel=1e-5)
    for name, gradient in one[0].items():
        torch.testing.assert_close(other[0][name], gradient, rtol=1e-3, atol=1e-7)
