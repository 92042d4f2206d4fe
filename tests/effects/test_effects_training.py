"""What the keys about updates, precision and memory do to gradients, weights and
activations.
"""

import itertools
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.models import attention_dispatch
from safetensors.torch import load_file
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.clips import noise, write_dataset
from tests.support.command_line import Patch, Printed, train
from tests.support.launcher import processes
from tests.support.out_of_memory import OUT_OF_MEMORY, fail_forward
from tests.support.run_results import of_kind
from tests.support.trainers import (
    Lab,
    in_cache,
    job_of,
    overrides_of,
    run_steps,
    take_steps,
    trainer_of,
    weights,
)
from videotune.diffusion.loss import denoising_loss
from videotune.errors import DONE, DoesNotFit, VideotuneError
from videotune.latent_cache.batches import make_step_batch
from videotune.latent_cache.step_batch import StepBatch
from videotune.memory import compiling
from videotune.memory.compiling import compiled_graphs
from videotune.planner import memory, settings
from videotune.planner.gpus import Card
from videotune.planner.ledger import KEPT, Work
from videotune.planner.memory import Choice, Need
from videotune.planner.read_step import step_spec
from videotune.runs.checkpoint import complete_checkpoints
from videotune.trainer import attention, loop
from videotune.trainer.optimizer_state import optimizer_state
from videotune.trainer.saving import save
from videotune.trainer.step import OutOfMemory
from videotune.trainer.step_context import StepContext
from videotune.trainer.trainer import Trainer

Weights = dict[str, torch.Tensor]


def adamw(
    start: Weights,
    gradients: Iterable[Weights],
    rate: float,
    b1: float,
    b2: float,
    decay: float,
) -> Weights:
    """Loshchilov and Hutter's algorithm 2, in float64: the weights after these
    gradients.
    """
    out = {name: value.double() for name, value in start.items()}
    mean = {name: torch.zeros_like(value) for name, value in out.items()}
    square = {name: torch.zeros_like(value) for name, value in out.items()}
    for step, given in enumerate(gradients, 1):
        for name, gradient in given.items():
            mean[name] = b1 * mean[name] + (1 - b1) * gradient.double()
            square[name] = b2 * square[name] + (1 - b2) * gradient.double().square()
            update = (mean[name] / (1 - b1**step)) / (
                (square[name] / (1 - b2**step)).sqrt() + 1e-8
            )
            out[name] = out[name] - rate * (update + decay * out[name])
    return out


ADAMW: list[dict[str, Any]] = [
    {},
    {"optimizer.beta1": 0.5},
    {"optimizer.beta2": 0.5},
    {"optimizer.weight_decay": 1.0},
]
ADAMW += [{"learning_rate": 0.03}, {"optimizer": "adamw"}]


@pytest.mark.effect(
    "optimizer.beta1", "optimizer.beta2", "optimizer.weight_decay", "learning_rate"
)
@pytest.mark.parametrize("knobs", ADAMW, ids=str)
def test_weights_after_three_steps_are_those_of_adamw_with_the_config_s_numbers(
    lab: Lab, knobs: dict
) -> None:
    trainer = trainer_of(lab, {"learning_rate": 0.01} | knobs)
    start = weights(trainer)
    given = take_steps(trainer, 3).gradients
    numbers = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01}
    numbers |= {
        key.rsplit(".", 1)[-1]: value
        for key, value in knobs.items()
        if key != "optimizer"
    }
    for name, wanted in adamw(start, given, *numbers.values()).items():
        torch.testing.assert_close(
            trainer.parameters[name].double(), wanted, rtol=1e-4, atol=1e-6
        )


@pytest.mark.effect("optimizer.weight_decay")
def test_the_optimizer_s_name_alone_leaves_the_preset_s_decay(lab: Lab) -> None:
    """The toy preset says weight_decay 0."""
    for optimizer, decay in (
        ("ADAMW", 0.0),
        ({"name": "ADAMW", "weight_decay": 0.5}, 0.5),
    ):
        assert (
            job_of(
                lab, {"optimizer": optimizer}, preset="toy"
            ).config.optimizer.weight_decay
            == decay
        )


HALF_WAVE = [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
SCHEDULES: list[tuple[dict[str, Any], list[float]]] = [
    ({"learning_rate_scheduler": "CONSTANT"}, [1, 1, 1, 1]),
    ({"learning_rate_scheduler": "LINEAR"}, [1, 0.75, 0.5, 0.25]),
    ({"learning_rate_scheduler": "linear"}, [1, 0.75, 0.5, 0.25]),
    ({"learning_rate_scheduler": "COSINE"}, HALF_WAVE),
    (
        {"learning_rate_scheduler": "COSINE_RESTARTS", "learning_rate_cycles": 1},
        HALF_WAVE,
    ),
    (
        {"learning_rate_scheduler": "COSINE_RESTARTS", "learning_rate_cycles": 2},
        [1, 0.5, 1, 0.5],
    ),
    ({"learning_rate_scheduler": "POLYNOMIAL"}, [1, 3 / 4, 2 / 4, 1 / 4]),
    (
        {"learning_rate_scheduler": "POLYNOMIAL", "learning_rate_power": 2},
        [1, 9 / 16, 4 / 16, 1 / 16],
    ),
    (
        {"learning_rate_scheduler": "LINEAR", "learning_rate_min": 0.002},
        [1, 0.8, 0.6, 0.4],
    ),
    ({"learning_rate_scheduler": "REX"}, [1, 6 / 7, 4 / 6, 2 / 5]),
    (
        {"learning_rate_scheduler": "WSD", "learning_rate_decay_steps": 1},
        [1, 1, 1, 1],
    ),
    (
        {"learning_rate_scheduler": "WSD", "learning_rate_decay_steps": 2},
        [1, 1, 1, 0.5],
    ),
    # a fifth of the steps
    ({"learning_rate_scheduler": "WSD", "steps": 10}, [1, 1, 1, 1]),
    (
        {"learning_rate_scheduler": "INVERSE_SQRT", "learning_rate_timescale": 1},
        [1, 2**-0.5, 3**-0.5, 0.5],
    ),
    (
        {"learning_rate_scheduler": "INVERSE_SQRT", "learning_rate_timescale": 3},
        [1, (3 / 4) ** 0.5, (3 / 5) ** 0.5, 2**-0.5],
    ),
    (
        {"learning_rate_scheduler": "INVERSE_SQRT", "warmup_steps": 1},
        [1 / 2, 1, 2**-0.5, 3**-0.5],
    ),
    ({"warmup_steps": 0}, [1, 1, 1, 1]),
    ({"warmup_steps": 1}, [1 / 2, 1, 1, 1]),
    ({"warmup_steps": 3}, [1 / 4, 2 / 4, 3 / 4, 1]),
    # a twentieth of the steps
    ({"warmup_steps": None, "steps": 40}, [1 / 3, 2 / 3, 1, 1]),
]


@pytest.mark.effect(
    "learning_rate_scheduler",
    "learning_rate_cycles",
    "learning_rate_power",
    "learning_rate_min",
    "learning_rate_decay_steps",
    "learning_rate_timescale",
    "warmup_steps",
)
@pytest.mark.parametrize(("knobs", "factors"), SCHEDULES, ids=str)
def test_the_rate_of_each_step_is_that_of_the_schedule(
    lab: Lab, knobs: dict[str, Any], factors: list[float]
) -> None:
    """As the optimizer has it, and as the journal says it."""
    trainer = trainer_of(lab, {"learning_rate": 0.01} | knobs)
    rates: list[float] = []
    optimizer = trainer.pool.trainable.optimizer
    optimizer.register_step_pre_hook(
        lambda *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    lines = run_steps(trainer, 4)
    assert rates == [line["lr"]["transformer"] for line in lines]
    assert rates == pytest.approx([0.01 * factor for factor in factors])


@pytest.mark.effect("max_grad_norm")
def test_gradients_are_clipped_to_the_norm_once_a_step(lab: Lab) -> None:
    """The norm over both forward passes together; the direction stays; a norm below the
    limit is left alone.
    """
    found = {}
    for limit in (1e-3, 1e6):
        trainer = trainer_of(
            lab, {"max_grad_norm": limit, "gradient_accumulation_steps": 2}
        )
        took = take_steps(trainer, 1)
        found[limit] = (
            torch.cat([g.flatten() for g in took.gradients[0].values()]),
            took.lines[0]["grad_norm"],
        )
    (small, before), (whole, same) = found[1e-3], found[1e6]
    assert before == same == pytest.approx(whole.norm().item(), rel=1e-5)
    assert whole.norm() > 1e-3
    assert small.norm().item() == pytest.approx(1e-3, rel=1e-3)
    torch.testing.assert_close(
        small / small.norm(), whole / whole.norm(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.effect("train_dtype")
def test_frozen_weights_and_activations_have_the_train_dtype(lab: Lab) -> None:
    losses = {}
    for name, dtype in (
        ("FLOAT_32", torch.float32),
        ("BFLOAT_16", torch.bfloat16),
        (None, torch.float32),
    ):
        trainer = trainer_of(in_cache(lab, str(name)), {"train_dtype": name})
        took = take_steps(trainer, 1)
        assert trainer.net.blocks[0].attn1.to_q.base_layer.weight.dtype == dtype
        assert [took.calls[0][name].dtype for name in ("x_t", "text", "t")] == [
            dtype,
            dtype,
            torch.float32,
        ]
        assert {parameter.dtype for parameter in trainer.parameters.values()} == {
            torch.float32
        }
        losses[name] = took.lines[0]["loss"]
    assert losses[None] == losses["FLOAT_32"]
    assert losses["BFLOAT_16"] != losses["FLOAT_32"]
    assert losses["BFLOAT_16"] == pytest.approx(losses["FLOAT_32"], rel=0.02)


@pytest.mark.effect("train_dtype")
def test_a_run_does_not_depend_on_the_dtype_of_an_earlier_run_over_the_same_cache(
    lab: Lab,
) -> None:
    alone = trainer_of(in_cache(lab, "alone"), {"train_dtype": "FLOAT_32"})
    trainer_of(in_cache(lab, "both"), {"train_dtype": "BFLOAT_16"})
    after = trainer_of(in_cache(lab, "both"), {"train_dtype": "FLOAT_32"})
    texts = [
        make_step_batch(trainer.source, 1).batch.conditioning.text
        for trainer in (alone, after)
    ]
    assert texts[1].dtype == texts[0].dtype
    assert torch.equal(*texts)


@pytest.mark.effect("gradient_checkpointing")
def test_blocks_are_recomputed_in_backward_and_less_is_kept(lab: Lab) -> None:
    kept, calls, losses = {}, {}, {}
    for mode in ("OFF", "ON", "CPU_OFFLOADED", "IN_PARTS"):
        trainer = trainer_of(lab, {"gradient_checkpointing": mode})
        kept[mode], seen = kept_by_the_graph(trainer), []
        streams: Any = trainer.pool.block_offload
        sent = 0 if streams is None else streams.activation_offload.bytes
        trainer.net.blocks[0].attn1.to_q.register_forward_hook(
            lambda *_, seen=seen: seen.append(1)
        )
        losses[mode] = [line["loss"] for line in run_steps(trainer, 3)]
        calls[mode] = len(seen)
    assert calls == {"OFF": 3, "ON": 6, "CPU_OFFLOADED": 6, "IN_PARTS": 9}
    assert kept["ON"] < 0.5 * kept["OFF"]
    assert sent == 2 * 12 * 24 * 4, (
        "3 latent frames of 2 x 2 tokens, 24 numbers each, before each of two blocks"
    )
    assert kept["ON"] - kept["CPU_OFFLOADED"] >= sent
    assert (
        losses["IN_PARTS"]
        == losses["CPU_OFFLOADED"]
        == losses["ON"]
        == pytest.approx(losses["OFF"], rel=1e-6)
    )


class AttentionCount(TorchDispatchMode):
    """Counts how often attention is computed forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        self.count += "attention" in name and "backward" not in name
        return func(*args, **kwargs or {})


@pytest.mark.effect("gradient_checkpointing")
def test_saved_attention_is_computed_once_and_kept(lab: Lab) -> None:
    """The memory is what the plan reads."""
    counts, losses = {}, {}
    for mode in ("OFF", "ATTENTION_SAVED", "ON"):
        trainer = trainer_of(lab, {"gradient_checkpointing": mode})
        with AttentionCount() as counted:
            losses[mode] = [line["loss"] for line in run_steps(trainer, 1)]
        counts[mode] = counted.count
    assert counts == {"OFF": 4, "ATTENTION_SAVED": 4, "ON": 8}
    assert losses["ATTENTION_SAVED"] == losses["ON"]

    spec = step_spec(trainer.job, "FLOAT_32")
    kept = {
        mode: reading.phases[KEPT]["activations"]
        for mode, reading in spec.one_sample.items()
    }
    # Both attentions of two blocks have 12 tokens of 24 numbers, which take 1536 bytes,
    # and a number for each token and head, which take 512.
    assert kept["ATTENTION_SAVED"] - kept["ON"] == 2 * 2 * (1536 + 512)
    assert kept["ON"] < kept["ATTENTION_SAVED"] < kept["OFF"]
    work = {mode: spec.at(mode, 1).work.flops for mode in spec.kept}
    assert work["OFF"] < work["ATTENTION_SAVED"] < work["ON"]


def kept_by_the_graph(trainer: Trainer) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, on the
    device.
    """
    trainer.net.train()
    prepared, saved = make_step_batch(trainer.source, 1), {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        given = (trainer.source.objective, prepared.batch, prepared.t, prepared.noise)
        denoising_loss(trainer.family, trainer.net, *given)
    return sum(saved.values())


FULL = {"training_method": "FINE_TUNE", "train_dtype": "BFLOAT_16"}
EVERY = (
    "ADAMW",
    "ADAMW_8BIT",
    "ADAFACTOR",
    "PRODIGY",
    "LION",
    "LION_8BIT",
    "MUON",
    "CAME",
    "SCHEDULE_FREE",
)


@pytest.mark.effect("optimizer.name")
def test_each_optimizer_keeps_its_own_state_and_moves_the_weights_its_own_way(
    lab: Lab,
) -> None:
    ways, kept = {}, {}
    for name in EVERY:
        rate = {} if name == "PRODIGY" else {"learning_rate": 1e-3}
        trainer = trainer_of(lab, {"optimizer": name, "steps": 2} | rate)
        ways[name] = take_steps(trainer).moved("lora_B")
        (trainable,) = trainer.pool.trainables.values()
        kept[name] = {
            key.rpartition(".")[2]
            for key in optimizer_state(trainable.optimizer, trainable.parameters)
        }
        assert ways[name].abs().max() > 0
    for one, other in itertools.combinations(EVERY, 2):
        alike = other == f"{one}_8BIT"  # an adapter of rank 2 is too small for 8 bits
        assert alike or not torch.allclose(ways[one], ways[other], rtol=0.01)
    assert kept["LION"] == {"step#", "state1"}
    assert kept["MUON"] == {"momentum_buffer"}
    assert {"exp_avg_sq_row", "exp_avg_sq_col"} < kept["ADAFACTOR"]
    assert {"p0", "s", "@d~", "@k#"} < kept["PRODIGY"]
    assert {"exp_avg", "exp_avg_res_row"} < kept["CAME"]
    assert kept["SCHEDULE_FREE"] == {
        "z",
        "exp_avg_sq",
        "@k#",
        "@lr_max~",
        "@weight_sum~",
    }


@pytest.mark.effect("optimizer.name", "optimizer.args")
def test_a_class_takes_its_arguments_and_the_rate_of_each_step(lab: Lab) -> None:
    """SGD moves by rate · gradient, with momentum by their sum; the second step has half
    of the rate.
    """
    settings = {
        "optimizer.name": "torch.optim:SGD",
        "learning_rate": 0.01,
        "learning_rate_scheduler": "LINEAR",
        "max_grad_norm": 1e9,
        "steps": 2,
    }
    for momentum in (0.0, 0.5):
        knobs = settings | {"optimizer.args": {"momentum": momentum}}
        took = take_steps(trainer_of(lab, knobs))
        assert [line["lr"]["transformer"] for line in took.lines] == [0.01, 0.005]
        name = next(key for key in took.gradients[0] if "lora_B" in key)
        first, second = (gradients[name] for gradients in took.gradients)
        expected = -0.01 * first - 0.005 * (second + momentum * first)
        torch.testing.assert_close(took.moves[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.effect("optimizer.name", "learning_rate")
def test_prodigy_multiplies_the_rate_that_it_finds(lab: Lab) -> None:
    updates = {}
    for rate in (None, 1.0, 2.0):
        took = take_steps(
            trainer_of(lab, {"optimizer": "PRODIGY", "learning_rate": rate, "steps": 1})
        )
        updates[rate] = took.moved("lora_B"), took.lines[0]["lr"]["transformer"]
    assert updates[None][1] == 1.0
    assert torch.equal(updates[None][0], updates[1.0][0])
    torch.testing.assert_close(updates[2.0][0], 2 * updates[1.0][0], rtol=1e-4, atol=0)


@pytest.mark.effect("optimizer.masters")
def test_without_masters_weights_are_held_in_bf16_alone_and_small_updates_still_arrive(
    lab: Lab,
) -> None:
    """Both ways the mean of many small updates is the same; what is kept for each
    weight is 4 bytes less.
    """
    change, kept = {}, {}
    for masters in ("FLOAT_32", "STOCHASTIC_ROUNDING"):
        knobs = {
            "optimizer.masters": masters,
            "optimizer.weight_decay": 0,
            "learning_rate": 2e-5,
            "steps": 3,
        }
        trainer = trainer_of(lab, FULL | knobs)
        net = dict(trainer.net.named_parameters())
        rounded = [n for n, p in net.items() if p.dtype == torch.bfloat16]
        before = {n: net[n].detach().clone().float() for n in rounded}
        run_steps(trainer)
        moved = [trainer.parameters[n].detach().float() - before[n] for n in rounded]
        change[masters] = torch.cat([values.flatten() for values in moved])
        name = max(rounded, key=lambda n: net[n].numel())
        own = trainer.parameters[name]
        kept[masters] = sum(
            p.numel() * p.element_size() for p in trainer.parameters.values()
        )
        assert own.dtype == (torch.float32 if masters == "FLOAT_32" else torch.bfloat16)
        assert (own is net[name]) is (masters != "FLOAT_32")
        save(trainer, 3, thread=False)
        (saved,) = complete_checkpoints(trainer.run)
        assert saved.load("weights")[name].dtype == own.dtype
    assert kept["STOCHASTIC_ROUNDING"] < 0.7 * kept["FLOAT_32"]
    exact, rounded_change = change["FLOAT_32"], change["STOCHASTIC_ROUNDING"]
    mean = (rounded_change * exact.sign()).sum() / exact.abs().sum()
    assert mean.item() == pytest.approx(1, abs=0.05)


@pytest.mark.effect("optimizer.step_in_backward")
@pytest.mark.parametrize(
    "masters", ["float32 weights", "FLOAT_32", "STOCHASTIC_ROUNDING"]
)
def test_updates_within_backward_keep_few_gradients_and_are_the_same(
    lab: Lab, masters: str
) -> None:
    """Without clipping: bit for bit the same weights, and at its peak a small part of
    the gradients' bytes.
    """
    peaks, ends = {}, {}
    for within in (False, True):
        knobs = {
            "optimizer.step_in_backward": within,
            "max_grad_norm": 1e9,
            "learning_rate": 1e-3,
            "steps": 2,
        }
        knobs |= {"training_method": "FINE_TUNE"}
        if masters != "float32 weights":
            knobs |= FULL | {"optimizer.masters": masters}
        trainer = trainer_of(lab, knobs | {"ema": 0.5})
        net, alive = dict(trainer.net.named_parameters()), []
        both = {
            id(p): p for p in (*net.values(), *trainer.parameters.values())
        }.values()

        def count(
            _: torch.Tensor, both: object = both, alive: list[int] = alive
        ) -> None:
            held = [p.grad for p in both if p.grad is not None]  # type: ignore[attr-defined]
            alive.append(sum(grad.numel() * grad.element_size() for grad in held))

        for parameter in net.values():
            parameter.register_post_accumulate_grad_hook(count)
        lines = run_steps(trainer)
        assert all(line["grad_norm"] > 0 and "skipped" not in line for line in lines)
        peaks[within], ends[within] = max(alive), weights(trainer)
    assert peaks[True] < 0.3 * peaks[False]
    assert all(
        torch.equal(value, ends[True][name]) for name, value in ends[False].items()
    )


@pytest.mark.effect("optimizer.step_in_backward", "max_grad_norm")
def test_within_backward_the_norm_of_each_tensor_is_what_is_clipped(lab: Lab) -> None:
    """LION takes the sign, so clipping shows in the moment: at most the limit times 1 -
    beta2 for each tensor.
    """
    for limit in (1e-5, 1e9):
        knobs = {
            "optimizer.name": "LION",
            "optimizer.step_in_backward": True,
            "max_grad_norm": limit,
            "steps": 1,
        }
        trainer = trainer_of(lab, knobs)
        run_steps(trainer)
        (trainable,) = trainer.pool.trainables.values()
        state = optimizer_state(trainable.optimizer, trainable.parameters)
        norms = [
            value.norm().item()
            for key, value in state.items()
            if key.endswith("state1") and value.any()
        ]
        clipped = [
            norm for norm in norms if norm == pytest.approx(1e-5 * 0.01, rel=1e-2)
        ]
        assert len(clipped) == (len(norms) if limit == 1e-5 else 0)
        assert len(norms) > 4


@pytest.mark.effect("ema.device")
def test_the_average_lies_on_its_device_and_is_the_same(lab: Lab) -> None:
    """Here both are the CPU, so that a weight of a CUDA device is only pretended; the
    values are measured in earnest.
    """
    found = {}
    for where in ("device", "host"):
        trainer = trainer_of(lab, {"ema": {"decay": 0.5, "device": where}, "steps": 3})
        run_steps(trainer)
        found[where] = {name: value.clone() for name, value in trainer.averages.items()}
        (trainable,) = trainer.pool.trainables.values()
        with FakeTensorMode():
            pretended = torch.empty(3, device="cuda")
            assert trainable.ema is not None
            assert trainable.ema._in_form_of_averages([pretended])[0].device.type == (
                "cuda" if where == "device" else "cpu"
            )
    assert all(
        torch.equal(value, found["host"][name])
        for name, value in found["device"].items()
    )


@pytest.mark.effect("layer_offload_fraction")
def test_so_many_blocks_wait_on_the_host_and_are_loaded_for_their_turn(
    lab: Lab,
) -> None:
    """The tiny model has two blocks.

    A slot of the ring stays for each of those that are streamed, two at most.
    """
    away, loads, losses, after = {}, {}, {}, {}
    for fraction in (0.0, 0.5, 1.0):
        trainer = trainer_of(
            lab, {"layer_offload_fraction": fraction, "learning_rate": 0.01}
        )
        lines = run_steps(trainer, 2)
        losses[fraction], after[fraction] = (
            [line["loss"] for line in lines],
            weights(trainer),
        )
        own = [p for name, p in trainer.net.named_parameters() if "lora_" not in name]
        away[fraction] = sum(p.numel() * 4 for p in own) - sum(
            p.untyped_storage().nbytes() for p in own
        )
        streams = trainer.pool.block_offload
        loads[fraction] = 0 if streams is None else streams.buffers.loads
    block = sum(
        p.numel() * 4
        for name, p in trainer.net.blocks[0].named_parameters()
        if "lora_" not in name
    )
    assert away[0.0] == 0
    assert away[0.5] == pytest.approx(block, rel=0.02)
    assert away[1.0] == pytest.approx(2 * block, rel=0.02)
    assert loads == {0.0: 0, 0.5: 1, 1.0: 2}
    assert losses[0.5] == losses[1.0] == losses[0.0]
    for name, value in after[0.0].items():
        assert torch.equal(after[0.5][name], value)
        assert torch.equal(after[1.0][name], value)


@pytest.mark.effect("micro_batch_size")
@pytest.mark.parametrize(
    ("size", "passes"), [(None, [4, 4]), (9, [4, 4]), (3, [3, 3, 2]), (1, [1] * 8)]
)
def test_a_batch_goes_through_in_parts_and_the_step_is_the_same(
    lab: Lab, size: int | None, passes: list[int]
) -> None:
    """Two batches of four a step, of which a part takes its samples one after the
    other.
    """
    knobs = {"batch_size": 4, "gradient_accumulation_steps": 2}
    whole, split = (
        take_steps(trainer_of(lab, knobs | more), 1)
        for more in ({}, {"micro_batch_size": size})
    )
    assert [len(call["x_t"]) for call in split.calls] == passes
    assert split.lines[0]["window_ids"] == whole.lines[0]["window_ids"]
    assert split.lines[0]["loss"] == pytest.approx(whole.lines[0]["loss"], rel=1e-5)
    for name, gradient in whole.gradients[0].items():
        torch.testing.assert_close(
            split.gradients[0][name], gradient, rtol=1e-3, atol=1e-7
        )


@pytest.mark.effect("deterministic")
def test_deterministic_kernels_are_asked_for_in_every_step_and_then_no_more(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = loop.train_steps
    asked: list[bool] = []
    unsafe = False

    def with_hook(trainer: Trainer) -> Any:
        def hook(module: Any, given: Any) -> None:
            asked.append(torch.are_deterministic_algorithms_enabled())
            # of the few operations that have no deterministic kernel on a CPU
            if unsafe:
                torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))

        trainer.net.register_forward_pre_hook(hook)
        return make(trainer)

    monkeypatch.setattr(loop, "train_steps", with_hook)

    def go(run: str, **more: Any) -> int:
        return train(overrides_of(lab, {"steps": 2, **more}), tmp_path / run)

    assert go("plain") == DONE
    assert asked == [False, False]
    assert go("same", deterministic=True) == DONE
    assert asked == [False, False, True, True]
    assert not torch.are_deterministic_algorithms_enabled()
    unsafe = True
    assert go("unsafe") == DONE
    with pytest.raises(
        VideotuneError,
        match="deterministic: an operation of this model has no deterministic kernel",
    ):
        go("refused", deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.effect("out_of_memory")
def test_a_step_is_retried_where_it_is_allowed_and_ends_the_run_where_not(
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def weights(run: str) -> dict[str, torch.Tensor]:
        return load_file(
            tmp_path / run / "checkpoints" / "step-4" / "weights.safetensors"
        )

    assert train(overrides_of(lab), tmp_path / "straight") == DONE
    with fail_forward(3), pytest.raises(DoesNotFit, match="out of memory in step 3"):
        train(overrides_of(lab, {"out_of_memory": "stop"}), tmp_path / "stopped")
    with fail_forward(3):
        assert (
            train(overrides_of(lab, {"out_of_memory": "retry"}), tmp_path / "again")
            == DONE
        )
    assert "Trying once more with gradient_checkpointing=ON" in capsys.readouterr().err
    straight, again = weights("straight"), weights("again")
    assert all(torch.equal(again[name], value) for name, value in straight.items())
    assert any(
        "out of memory in step 3" in line["text"]
        for line in of_kind(tmp_path / "again", "warning")
    )
    (resumed,) = of_kind(tmp_path / "again", "resume")
    assert resumed["from_step"] == 2
    assert resumed["changes"] == ["gradient_checkpointing: 'OFF' -> 'ON'"]


@pytest.mark.slow
@pytest.mark.effect("compile")
def test_compiled_blocks_take_the_same_steps_with_few_graphs(
    lab: Lab, monkeypatch: Patch
) -> None:
    """Three buckets; with checkpointing and streamed weights too, for which nothing is
    compiled anew.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(lab.tmp / "inductor"))
    clips = {f"{side}.mp4": noise(5, side, 32, seed=side) for side in (32, 48, 64)}
    data = write_dataset(lab.tmp / "data", clips, {}, fps=16)
    knobs = {
        "resolution": ["32x32", "48x32", "64x32"],
        "video_config.frames": 5,
        "steps": 6,
        "missing_caption": "empty",
    }
    streamed = {"gradient_checkpointing": "ON", "layer_offload_fraction": 0.5}
    made, losses = [], {}
    for name, more in (("resident", {}), ("streamed", streamed)):
        for compiled in (False, True):
            before = compiled_graphs()
            trainer = trainer_of(lab, knobs | more | {"compile": compiled}, data)
            assert len(trainer.job.buckets) == 3
            losses[name, compiled] = [line["loss"] for line in run_steps(trainer)]
            made.append(compiled_graphs() - before)
        assert losses[name, True] == pytest.approx(losses[name, False], rel=1e-5)
    assert any((lab.tmp / "inductor").iterdir()), "the person's own folder"
    assert made[0] == made[2] == 0
    assert 1 <= made[1] <= 4
    assert made[3] == 0


def test_compiled_code_is_kept_in_the_users_cache(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Importing torch's compiler names a temporary folder."""
    monkeypatch.setattr(compiling, "user_cache", lambda: tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    compiling.compile_blocks(torch.nn.Module(), ())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_auto_compiles_where_the_planned_run_is_long_enough(
    lab: Lab, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Card("a card", 80 << 30, 1e15, 1e11, bandwidth=1e12)
    work = Work(flops=1e15, moved=1e12)
    training = Need(Choice(1, "OFF", 0), {}, {}, work, moved=0.0)
    chosen = {}

    def counted(job: Any, spec: None, need: Need, card: Card, dtype: str) -> float:
        assert (job.steps, spec, dtype) == (steps, None, "FLOAT_32")
        return memory.seconds(need, 1, card)

    plain, faster = (
        memory.seconds(need, 1, card) for need in (training, memory.compiled(training))
    )
    for steps in (10, 1000):
        job = job_of(lab, {"steps": steps})
        assert settings.decide_compile(job).config.compile == "auto", (
            "on a CPU it means off"
        )
        with monkeypatch.context() as patch:
            patch.setattr(settings, "has_streams", lambda _: True)
            patch.setattr(settings, "no_compiler", lambda: None)
            patch.setattr(settings, "requested_card", lambda *_: (card.vram, card))
            patch.setattr(settings, "planned_need", lambda *_: (None, training))
            patch.setattr(settings, "step_seconds", counted)
            chosen[steps] = settings.decide_compile(job).config.compile
        saved = f"it would save about {steps * (plain - faster):.0f} s of this run"
        assert saved in capsys.readouterr().err
    assert chosen == {10: False, 1000: True}


@pytest.mark.effect("compile")
@pytest.mark.parametrize("beside", [{"deterministic": True}])
def test_what_cannot_be_compiled_is_refused(
    beside: dict[str, Any], lab: Lab, monkeypatch: Patch
) -> None:
    with pytest.raises(VideotuneError, match=r"^compile: .*Set it to false"):
        job_of(lab, {"compile": True} | beside)
    assert job_of(lab, {"compile": False} | beside).config.compile is False
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(VideotuneError, match=r"no C\+\+ compiler"):
        trainer_of(lab, {"compile": True})


@pytest.mark.slow
def test_a_compiler_that_fails_ends_no_run(
    lab: Lab, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The C++ compiler of a process of its own always fails."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    settings = overrides_of(lab, {"gradient_checkpointing": "ON", "steps": 2}).sets
    losses = {}
    for run, compiled in (("plain", "false"), ("failing", "true")):
        words = [w for s in (*settings, f"compile={compiled}") for w in ("--set", s)]
        words = ["train", "--out", str(tmp_path / run), *words]
        ended = processes(1, tmp_path / f"logs-{run}", words, "no compiler")
        assert ended.codes == (DONE,), ended.failures
        losses[run] = [line["loss"] for line in of_kind(tmp_path / run, "step")]
    assert losses["failing"] == losses["plain"]
    (warning,) = of_kind(tmp_path / "failing", "warning")
    assert "compile: blocks cannot be compiled, and the run goes on" in warning["text"]
    assert "InvalidCxxCompiler" in warning["text"]
    (end,) = of_kind(tmp_path / "failing", "end")
    assert end["compile_seconds"] > 0


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("shapes"), RuntimeError), (OUT_OF_MEMORY, OutOfMemory)],
)
def test_an_error_of_the_model_is_not_one_of_the_compiler(
    error: Exception, raised: type[Exception], lab: Lab
) -> None:
    """Nor is memory that runs out."""

    def fail(*_: Any) -> None:
        raise error

    trainer = trainer_of(lab, {"compile": True})
    trainer.net.blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(raised):
        run_steps(trainer, 1)
    assert trainer.pool.compiled is not None
    assert trainer.pool.compiled.failure is None


@pytest.mark.effect("attention")
def test_attention_is_computed_by_the_back_end_of_that_name(lab: Lab) -> None:
    losses, calls = {}, {}
    for name in ("auto", "_native_math"):
        trainer, seen = trainer_of(lab, {"attention": name}), Counter[str]()
        with patched_dispatch(seen):
            losses[name] = [line["loss"] for line in run_steps(trainer, 2)]
        calls[name] = dict(seen)
    assert calls == {"auto": {"native": 8}, "_native_math": {"_native_math": 8}}
    assert losses["auto"] == pytest.approx(losses["_native_math"], rel=1e-5)
    assert (
        attention_dispatch._AttentionBackendRegistry.get_active_backend()[0] == "native"
    ), "of nobody else"


@contextmanager
def patched_dispatch(seen: Counter[str]) -> Iterator[None]:
    """Count the calls of diffusers' back ends."""
    known = attention_dispatch._AttentionBackendRegistry._backends

    def counted(name: str, call: Any) -> Any:
        def counting(*given: Any, **named: Any) -> Any:
            seen[name] += 1
            return call(*given, **named)

        return counting

    with patch.dict(
        known, {key: counted(key.value, call) for key, call in known.items()}
    ):
        yield


@pytest.mark.parametrize("fastest", ["native", "_native_math"])
def test_auto_takes_the_fastest_attention_of_those_that_work(
    fastest: str, lab: Lab, monkeypatch: Patch
) -> None:
    """Measured without a trace in what is learnt."""
    tried: list[str] = []

    def seconds(trainer: Trainer, *_: Any) -> float:
        tried.append(
            str(trainer.net.blocks[0].attn1.processor._attention_backend.value)
        )
        return 1.0 if tried[-1] == fastest else 2.0

    monkeypatch.setattr(attention, "CANDIDATES", ("native", "flash", "_native_math"))
    monkeypatch.setattr(attention, "_seconds", seconds)
    trainer = trainer_of(lab, {"steps": 300})
    with monkeypatch.context() as patching:
        patching.setattr(attention, "has_streams", lambda _: True)
        attention.choose_attention(trainer, loop.step_context(trainer))
    assert tried == ["native"] * 2 + ["_native_math"] * 2, "flash is not installed"
    assert (
        trainer.pool.attention
        == trainer.net.blocks[0].attn1.processor._attention_backend
        == fastest
    )


def test_a_step_that_does_not_fit_is_no_measurement(
    lab: Lab, monkeypatch: Patch, capsys: Printed
) -> None:
    """The run begins with the default, and its first step says what is wrong. A batch
    that cannot be read is no fault of a kernel.
    """
    monkeypatch.setattr(attention, "CANDIDATES", ("native", "_native_math"))
    monkeypatch.setattr(attention, "has_streams", lambda _: True)

    def too_large(*_: Any) -> float:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(attention, "_seconds", too_large)
    trainer = trainer_of(lab, {"steps": 300})
    capsys.readouterr()
    attention.choose_attention(trainer, loop.step_context(trainer))
    assert trainer.pool.attention == "native"
    printed = capsys.readouterr().err
    assert printed.count("does not fit on the device") == 2
    assert "a step)" not in printed

    def damaged(*_: Any) -> StepBatch:
        raise VideotuneError("the latents of a clip are damaged")

    monkeypatch.setattr(attention, "make_step_batch", damaged)
    with pytest.raises(VideotuneError, match="damaged"):
        attention.choose_attention(trainer, loop.step_context(trainer))


@pytest.mark.parametrize("knobs", [{}, FULL], ids=["LoRA", "FINE_TUNE in bf16"])
def test_measuring_attention_takes_a_step_s_passes_and_leaves_no_gradient(
    knobs: dict[str, Any], lab: Lab, monkeypatch: Patch
) -> None:
    """The first step has the gradient that it has without a measurement, also where the
    optimizer updates copies of the network's own weights.
    """
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(attention, "CANDIDATES", ("native",))
    straight, measured = (trainer_of(lab, {"steps": 300, **knobs}) for _ in range(2))
    seconds = attention._seconds
    measurements: list[float] = []

    def timed_seconds(
        trainer: Trainer, context: StepContext, batch: StepBatch
    ) -> float:
        measurements.append(seconds(trainer, context, batch))
        return measurements[-1]

    monkeypatch.setattr(attention, "_seconds", timed_seconds)
    begun = time.perf_counter()
    with monkeypatch.context() as patching:
        patching.setattr(attention, "has_streams", lambda _: True)
        attention.choose_attention(measured, loop.step_context(measured))
    assert len(measurements) == 2
    assert 0 < min(measurements) < time.perf_counter() - begun

    (first,) = run_steps(measured, 1)
    (expected,) = run_steps(straight, 1)
    for key in ("loss", "grad_norm"):
        assert first[key] == expected[key]


@pytest.mark.effect("attention")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sage", "is not one of"),
        ("flash_hub", "is not one of"),
        ("flash", "cannot be used here"),
    ],
)
def test_an_attention_that_cannot_train_is_refused(
    name: str, why: str, lab: Lab
) -> None:
    with pytest.raises(VideotuneError, match=f"attention: .*{why}"):
        trainer_of(lab, {"attention": name})
