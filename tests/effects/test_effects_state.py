"""What the keys about methods, averages, checkpoints, the verdict, experts and shards
do to a run.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.command_line import train
from tests.support.run_parts import callback
from tests.support.trainers import (
    Lab,
    job_of,
    overrides_of,
    run_steps,
    source_of,
    trainer_of,
    weights,
    written,
)
from videotune.distributed import DistributedContext
from videotune.files import read_json
from videotune.latent_cache.step_batch import share_of
from videotune.runs.checkpoint import complete_checkpoints
from videotune.runs.journal import read_journal
from videotune.trainer.build import make_objective, open_models, plain_batch
from videotune.trainer.expert_pool import make_expert_schedule, open_pool
from videotune.trainer.loop import train_loop
from videotune.trainer.saving import Saving, save


def stored(run: Path, part: str) -> dict[str, torch.Tensor]:
    """A part of the newest checkpoint."""
    return complete_checkpoints(run)[-1].load(part)


@pytest.mark.effect("training_method")
def test_an_adapter_leaves_the_model_s_weights_and_fine_tuning_changes_all(
    lab: Lab,
) -> None:
    moved, rates = {}, {}
    for method in ("LORA", "FINE_TUNE"):
        trainer = trainer_of(lab, {"training_method": method})
        before = {
            name: value.clone() for name, value in trainer.net.state_dict().items()
        }
        rates[method] = run_steps(trainer, 2)[0]["lr"]["transformer"]
        after = trainer.net.state_dict()
        moved[method] = {
            name
            for name, value in before.items()
            if not torch.equal(value, after[name])
        }
    assert all(".lora_" in name for name in moved["LORA"])
    assert len(moved["LORA"]) == 32
    assert moved["FINE_TUNE"] == set(before)
    assert rates == {"LORA": 1e-4, "FINE_TUNE": 1e-5}


@pytest.mark.effect("training_method")
@pytest.mark.parametrize("dtype", ["FLOAT_32", "BFLOAT_16"])
def test_a_fine_tuned_model_is_a_folder_that_diffusers_opens(
    lab: Lab, dtype: str
) -> None:
    from diffusers import WanPipeline, WanTransformer3DModel

    knobs = {
        "training_method": "FINE_TUNE",
        "train_dtype": dtype,
        "learning_rate": 0.01,
        "steps": 2,
    }
    trainer = trainer_of(lab, knobs)
    assert all(
        parameter.dtype == torch.float32 for parameter in trainer.parameters.values()
    )
    run_steps(trainer)
    folder = written(trainer, 2)
    opened = WanTransformer3DModel.from_pretrained(
        folder / "transformer", dtype=next(trainer.net.parameters()).dtype
    )
    for name, value in trainer.net.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value), name
    base = load_file(lab.model / "transformer" / "diffusion_pytorch_model.safetensors")
    assert not torch.allclose(
        opened.state_dict()["proj_out.weight"].float(),
        base["proj_out.weight"],
        atol=1e-3,
    )
    assert WanPipeline.from_pretrained(folder).vae is not None


@pytest.mark.effect("ema.decay")
@pytest.mark.parametrize("decay", [0.2, 0.9])
def test_the_average_is_its_recursion_and_is_what_is_used(
    lab: Lab, decay: float
) -> None:
    """In float64 from the weights after each step; previews compute with it, and the
    file that is exported holds it.
    """
    trainer = trainer_of(lab, {"ema": decay, "learning_rate": 0.05, "steps": 4})
    expected = {name: value.double() for name, value in weights(trainer).items()}
    for step in range(1, 5):
        trainer.first_step = step
        run_steps(trainer, 1)
        share = min(decay, (1 + step) / (10 + step))
        for name, value in weights(trainer).items():
            expected[name] = share * expected[name] + (1 - share) * value.double()
    live = weights(trainer)
    for name, value in expected.items():
        torch.testing.assert_close(
            trainer.result[name].double(), value, rtol=1e-5, atol=1e-7
        )
    assert max((live[name] - trainer.result[name]).abs().max() for name in live) > 1e-3
    with trainer.averaged():
        inside = weights(trainer)
    assert all(
        torch.equal(weights(trainer)[name], value) for name, value in live.items()
    )
    assert all(
        torch.equal(trainer.result[name], value) for name, value in inside.items()
    )
    name = "blocks.0.attn1.to_q.lora_B.weight"
    assert torch.equal(
        load_file(written(trainer, 4))[f"transformer.{name}"], trainer.result[name]
    )
    save(trainer, 4, thread=False)
    assert torch.equal(stored(trainer.run, "ema")[name], trainer.result[name])


@pytest.mark.effect("init_from")
def test_a_run_begins_with_the_weights_that_it_is_given(lab: Lab) -> None:
    first = trainer_of(lab, {"learning_rate": 0.05, "steps": 2})
    run_steps(first)
    begun, plain = (
        weights(trainer_of(lab, {"init_from": one}))
        for one in (str(written(first, 2)), None)
    )
    assert all(
        torch.equal(begun[name], value) for name, value in weights(first).items()
    )
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


def test_a_backup_is_due_after_so_many_minutes(lab: Lab) -> None:
    trainer = trainer_of(lab, {"backup_after": 30, "save_every": 0, "steps": 9})
    saver = callback(trainer, Saving)
    saved_at = trainer.saved_at
    due = {}
    for minutes in (0.6, 29.9, 30.1, 90):
        trainer.saved_at = saved_at - 60 * minutes
        due[minutes] = saver.due(trainer, 2, ())
    assert due == {0.6: False, 29.9: False, 30.1: True, 90: True}


@pytest.mark.effect("save_keep", "backup_every", "backup_keep", "backup_after")
@pytest.mark.parametrize(("knobs", "steps"), CHECKPOINTS, ids=str)
def test_which_checkpoints_and_backups_stay(
    lab: Lab, knobs: dict[str, float], steps: list[int]
) -> None:
    """After six steps, of which the last is a save."""
    trainer = trainer_of(lab, {"steps": 6} | knobs)
    assert train_loop(trainer) == "done"
    folders = (trainer.run / "checkpoints").glob("step-*")
    assert sorted(int(path.name.removeprefix("step-")) for path in folders) == steps


HELD = (1.0, 0.8, 0.6, 0.5, 0.6, 0.7, 0.8, 0.9)
TRAIN = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Readings before the first step and after each: held-out clips turn at the third.
tests/field has a run that does so.
"""


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation losses are planted, after each step the next."""

    def planted(
        validation: Any, family: Any, nets: Any, *others: Any
    ) -> dict[str, Any]:
        lora = [
            value for name, value in nets.net.named_parameters() if "lora_B" in name
        ]
        step = planted.seen.setdefault(
            float(lora[0].detach().double().abs().sum()), len(planted.seen)
        )  # type: ignore[attr-defined]

        def part(value: float, hard: tuple[float, ...]) -> dict[str, Any]:
            clips = {f"{n:012x}": [value * h] * 9 for n, h in enumerate(hard)}
            return {
                "mean": value,
                "by_quantile": [value] * 9,
                "windows": len(hard),
                "clips": clips,
            }

        return {
            "held_out": part(HELD[step], (0.9, 1.0, 1.1)),
            "train": part(TRAIN[step], (1.0, 1.0)),
        }

    planted.seen = {}  # type: ignore[attr-defined]
    monkeypatch.setattr("videotune.validation.callbacks.read_validation", planted)


def run_of(lab: Lab, **knobs: Any) -> list[dict[str, Any]]:
    """The journal of a whole run."""
    train(overrides_of(lab, knobs), lab.tmp / "run")
    return read_journal(lab.tmp / "run")


@pytest.mark.effect("early_stopping")
@pytest.mark.parametrize(("readings", "last"), [(None, 7), (1, 5), (2, 6)])
def test_a_run_that_copies_is_ended_and_its_best_checkpoint_exported(
    lab: Lab, copying: None, readings: int | None, last: int
) -> None:
    """A rise is believed at its second reading, after step 5."""
    lines = run_of(lab, steps=7, validate_every=1, early_stopping=readings)
    run, end = lab.tmp / "run", lines[-1]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(
        range(1, last + 1)
    )
    assert (end["kind"], end["why"]) == ("end", "done" if readings is None else "early")
    verdicts = [
        (line["step"], line["verdict"]) for line in lines if line["kind"] == "verdict"
    ]
    words = [
        None,
        None,
        "LEARNING",
        "LEARNING",
        "PLATEAU",
        "OVERFITTING",
        "OVERFITTING",
        "OVERFITTING",
    ]
    assert verdicts == list(enumerate(words[: last + 1])), "one line a validation"
    exported, *_ = read_json(run / "exports.json")
    if readings is None:  # nothing was saved but the end
        assert end["take"]["step"] == 7
        assert "no checkpoint of step 3" in end["take"]["why"]
        assert "step-7." in exported["path"]
        return
    assert end["take"] == {"step": 3, "why": "clips kept aside were best there"}
    assert "step-3." in exported["path"]
    best, end = (
        run / "checkpoints" / f"step-{step}" / "weights.safetensors"
        for step in (3, last)
    )
    name, value = next(
        (name, value) for name, value in load_file(best).items() if "lora_B" in name
    )
    assert torch.equal(load_file(run / exported["path"])[f"transformer.{name}"], value)
    assert not torch.equal(load_file(end)[name], value)


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({}, "validate_every is 0, and only validations can say when to stop"),
        ({"validate_every": 2}, "fewer than two clips are kept aside"),
    ],
)
def test_early_stopping_that_cannot_come_is_reported(
    lab: Lab, knobs: dict[str, Any], why: str
) -> None:
    for patience in (2, None):
        notes = job_of(lab, knobs | {"early_stopping": patience}).notes
        unused = [note for note in notes if note.startswith("early_stopping is unused")]
        assert [why in note for note in unused] == [True] * (patience is not None)


UP = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)


@pytest.mark.parametrize(
    ("held", "train", "step", "why"),
    [
        (HELD, HELD, 3, "clips kept aside were best there"),
        (UP, TRAIN, 1, "best before training"),
    ],
    ids=["flies apart", "base was best"],
)
def test_the_recommended_checkpoint(
    held: tuple[float, ...], train: tuple[float, ...], step: int, why: str,
    lab: Lab, copying: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where training clips get worse as well it is no copying, but the last state is
    not the one to take.
    """
    monkeypatch.setattr(sys.modules[__name__], "HELD", held)
    monkeypatch.setattr(sys.modules[__name__], "TRAIN", train)
    end = run_of(lab, steps=7, validate_every=1, save_every=1)[-1]
    assert end["take"]["step"] == step
    assert why in end["take"]["why"]


def dealt(pair: Lab, **knobs: Any) -> str:
    """H or L for each step."""
    lines = run_steps(
        trainer_of(pair, {"steps": 8, "expert_period": 1, "expert_share": 0.5} | knobs)
    )
    return "".join(str(line["expert"])[0] for line in lines)


@pytest.mark.effect("expert_period")
def test_so_many_steps_in_a_row_are_one_expert_s(pair: Lab) -> None:
    assert dealt(pair, expert_period=1) == "hlhlhlhl"
    assert dealt(pair, expert_period=3) == "hhhlllhh"


@pytest.mark.effect("expert_share")
def test_the_high_expert_has_its_share_of_the_steps(pair: Lab) -> None:
    assert dealt(pair, expert_share=0.25) == "lhlllhll"
    assert dealt(pair, expert_share=0.75) == "hhlhhhlh"


@pytest.mark.effect("experts")
def test_the_experts_that_are_named_train(pair: Lab) -> None:
    for word, moved in (
        ("both", {"high", "low"}),
        ("high", {"high"}),
        ("low", {"low"}),
    ):
        share = {}
        if word == "both":
            share = {"expert_share": 0.5, "expert_period": 1}
        trainer = trainer_of(pair, {"experts": word, "steps": 2} | share)
        before = weights(trainer)
        run_steps(trainer)
        changed = [
            name
            for name, value in weights(trainer).items()
            if not torch.equal(value, before[name])
        ]
        assert (
            {name.split(".")[0] for name in changed}
            == moved
            == {name.split(".")[0] for name in before}
        )


@pytest.mark.effect("learning_rate_low")
def test_the_low_expert_s_first_update_has_its_own_rate(pair: Lab) -> None:
    """AdamW's first step moves each weight of B by the rate."""
    reach = {}
    for rate in (None, 0.003):
        knobs = {
            "learning_rate": 0.001,
            "learning_rate_low": rate,
            "expert_share": 0.5,
            "expert_period": 1,
            "steps": 2,
        }
        trainer = trainer_of(pair, knobs)
        run_steps(trainer)
        ends = {
            name: value for name, value in weights(trainer).items() if "lora_B" in name
        }
        for expert in ("high", "low"):
            reach[expert, rate] = max(
                float(v.abs().max())
                for name, v in ends.items()
                if name.startswith(expert)
            )
    assert reach["high", None] == reach["high", 0.003] == pytest.approx(0.001, rel=1e-2)
    assert reach["low", None] == pytest.approx(0.001, rel=1e-2)
    assert reach["low", 0.003] == pytest.approx(0.003, rel=1e-2)


@pytest.fixture
def one_of_two() -> Iterator[DistributedContext]:
    """This process as the first of two, of which the other one is not there: nothing is
    sent.
    """
    torch_dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DistributedContext(0, 2)
    torch_dist.destroy_process_group()


@pytest.mark.effect("sharding")
@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
def test_sharding_leaves_a_process_its_part_of_the_weights(
    method: str, lab: Lab, one_of_two: DistributedContext
) -> None:
    held, trained = {}, {}
    for value in ("OFF", "FULL"):
        job = job_of(lab, {"sharding": value, "training_method": method})
        family = open_models(job.spec, job.base, job.config)
        expert_schedule = make_expert_schedule(
            job.spec, job.config, make_objective(job.spec, job.config)
        )
        pool = open_pool(family, job.config, expert_schedule, 4, 1, one_of_two)
        weights = [
            p.detach() for name, p in pool.net.named_parameters() if "lora" not in name
        ]
        held[value] = sum(
            (w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights
        )
        trained[value] = sum(p.numel() for p in pool.trainable.parameters.values())
        assert all(
            type(p.data) is torch.Tensor for p in pool.trainable.parameters.values()
        )
    assert 0.5 * held["OFF"] <= held["FULL"] <= 0.55 * held["OFF"]
    if method == "LORA":
        assert trained["FULL"] == trained["OFF"], "the adapter each process has whole"
    else:
        assert trained == held


@pytest.mark.effect("context_parallel")
def test_processes_that_share_a_sample_have_a_part_of_its_tokens(
    lab: Lab, one_of_two: DistributedContext
) -> None:
    """And compute all of a step's samples; the network's output is whole."""
    tokens: dict[int, list[int]] = {1: [], 2: []}
    samples = {}
    for parts in (1, 2):
        job = job_of(lab, {"context_parallel": parts})
        family = open_models(job.spec, job.base, job.config)
        objective = make_objective(job.spec, job.config)
        schedule = make_expert_schedule(job.spec, job.config, objective)
        dist = replace(one_of_two, context_parallel=parts)
        samples[parts] = share_of((dist.data_rank, dist.data_size), 2)
        pool = open_pool(family, job.config, schedule, 4, 1, dist)

        seen = tokens[parts]
        pool.net.blocks[1].register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].shape[1])
        )
        source = source_of(lab, {"context_parallel": parts})
        batch = plain_batch(source, source.buckets[0][0])
        prediction = family.predict(pool.net, batch.x0, torch.tensor([0.5]), batch)
        assert prediction.shape == batch.x0.shape

    assert tokens[1] == [2 * count for count in tokens[2]] != []
    assert samples == {1: (0, 1), 2: (0, 2)}
