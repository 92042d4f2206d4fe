"""Which parts move: sizes against full matrices, planted faults, and runs without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.run_parts import build_trainer, open_run
from tests.support.run_processes import Make
from tests.support.run_results import of_kind
from tests.support.sounding_clips import write_sounding_clips
from videotune.adapters.adapter_types import by_module
from videotune.adapters.effect import change
from videotune.memory.sharding import Shard
from videotune.models.registry import find, names
from videotune.reporter.diagnosis import diagnose
from videotune.trainer.loop import train_loop
from videotune.trainer.low_precision import owners_of
from videotune.trainer.trainer import Trainer
from videotune.validation.part_movement import (
    part_of,
    parts_of,
    sampled,
    squared_change,
)

STEPS = 12
IN_BACKWARD = (
    "optimizer.step_in_backward=true",
    "batch_size=1",
    "gradient_accumulation_steps=1",
)
"""Updates within the backward pass."""
KINDS = [(name, variant) for name in sorted(names()) for variant in find(name).variants]
USUAL = [(name, find(name).variants[0]) for name in sorted(names())]
FAULTS = ("detached", "rate of 0")
EVERY_KIND = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in USUAL else [pytest.mark.slow])
        for kind in KINDS
    ],
    ids=lambda kind: "-".join(kind),
)


def kinds_with_faults() -> list[Any]:
    """Every kind with a fault, in turn one and the other: that a part has not moved is
    seen without knowing the family.

    Wan has both; what is left of the product is for `make test-long`.
    """
    cases = []
    for number, kind in enumerate(KINDS):
        for fault in FAULTS:
            marks = [] if kind in USUAL else [pytest.mark.slow]
            if fault != FAULTS[number % 2] and kind != ("wan", "t2v"):
                marks = [pytest.mark.long]
            case_id = "-".join([*kind, fault])
            cases.append(pytest.param(kind, fault, marks=marks, id=case_id))
    return cases


def settings(name: str, variant: str = "") -> tuple[str, ...]:
    own = ("lora.targets=linear",)
    if name == "cogvideox":
        own += ("video_config.frames=49", "video_config.target_fps=60")
    if name == "ltx2":
        own += ("resolution=64x64",)
    if variant.endswith("a14b"):
        own += ("expert_period=1", "expert_share=0.5")
    return (f"steps={STEPS}", "save_every=0", *own)


def trainer_of(
    overrides: Make, run: Path, base: tuple[str, ...], *sets: str
) -> Trainer:
    words = overrides(*settings(*base), *sets, base=base)
    job = open_run(words, run, None).job
    return build_trainer(job, run)


def warned(trainer: Trainer) -> list[str]:
    texts = [line["text"] for line in trainer.journal.history.of_kind("warning")]
    return [text.partition(" trains and")[0] for text in texts if "not moved" in text]


@EVERY_KIND
def test_in_a_clean_run_every_part_moves(
    kind: tuple[str, str], overrides: Make, tmp_path: Path
) -> None:
    trainer = trainer_of(overrides, tmp_path / "run", kind)
    train_loop(trainer)
    trainer.journal.close()
    (line,) = of_kind(tmp_path / "run", "parts")
    assert line["step"] == STEPS
    assert line["parts"]
    experts = {part for part in line["parts"] if "noise:" in part}
    shares = [part["gradient"] for part in line["parts"].values()]
    known = [share for share in shares if share is not None]
    assert sum(known) == pytest.approx(1, rel=1e-6)
    assert bool(experts) or len(known) == len(shares)
    assert all(part["moved"] and part["change"] > 0 for part in line["parts"].values())
    assert warned(trainer) == []


def spoil(trainer: Trainer, fault: str, label: str) -> None:
    """Plant a fault in a part of a trainer."""
    part = parts_of(trainer.pool.trainables, trainer.job.spec)[label]
    for trainable in trainer.pool.trainables.values():
        if trainable.expert != part.expert:
            continue
        parameters = [trainable.parameters[name] for name in part.names]
        if fault == "rate of 0" and trainable.backward_optimizer is not None:
            owners = owners_of(trainable.optimizer)
            for parameter in parameters:
                owners[id(parameter)].step = lambda: None  # type: ignore[method-assign]
            continue
        for group in trainable.optimizer.param_groups:
            if fault == "detached":
                group["weight_decay"] = 0.0  # it would move a part without a gradient
            else:
                chosen = {id(parameter) for parameter in parameters}
                group["params"] = [
                    each for each in group["params"] if id(each) not in chosen
                ]
        if fault == "detached":
            for parameter in parameters:
                parameter.register_hook(torch.zeros_like)


@pytest.mark.parametrize(("kind", "fault"), kinds_with_faults())
def test_a_part_that_does_not_move_is_named(
    kind: tuple[str, str], fault: str, overrides: Make, tmp_path: Path
) -> None:
    sets = ("steps=24",) if kind[1].endswith("a14b") else ()
    trainer = trainer_of(overrides, tmp_path / "run", kind, *sets)
    parts = list(parts_of(trainer.pool.trainables, trainer.job.spec))
    label = parts[KINDS.index(kind) % len(parts)]
    spoil(trainer, fault, label)
    train_loop(trainer)
    trainer.journal.close()
    assert warned(trainer) == [label]
    *_, line = of_kind(tmp_path / "run", "parts")
    still = [name for name, part in line["parts"].items() if not part["moved"]]
    assert still == [label]
    _, problems = diagnose(tmp_path / "run")
    assert "A part does not move" in {problem.line for problem in problems}


@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE"])
def test_updates_within_backward_have_the_gradient_shares_of_one_after_it(
    method: str, overrides: Make, tmp_path: Path
) -> None:
    """The first step, so that both have the same weights."""
    shares = []
    for number, mode in enumerate((("batch_size=1",), IN_BACKWARD)):
        run = tmp_path / str(number)
        words = overrides(
            *("steps=1", "save_every=0", f"training_method={method}"), *mode
        )
        trainer = build_trainer(open_run(words, run, None).job, run)
        train_loop(trainer)
        trainer.journal.close()
        (line,) = of_kind(run, "parts")
        shares.append(
            {label: part["gradient"] for label, part in line["parts"].items()}
        )
    assert sum(shares[0].values()) == pytest.approx(1)
    assert shares[1] == pytest.approx(shares[0], rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_does_not_move_is_named_with_updates_within_backward(
    fault: str, overrides: Make, tmp_path: Path
) -> None:
    trainer = trainer_of(overrides, tmp_path / "run", ("wan",), *IN_BACKWARD)
    spoil(trainer, fault, "feed-forward")
    train_loop(trainer)
    trainer.journal.close()
    assert warned(trainer) == ["feed-forward"]
    (line,) = of_kind(tmp_path / "run", "parts")
    has_gradient = line["parts"]["feed-forward"]["gradient"] > 0
    assert has_gradient == (fault == "rate of 0")


@pytest.mark.parametrize("variant", ["LORA", "DORA", "LOHA", "LOKR", "OFT"])
def test_the_size_of_an_adapters_change_is_that_of_whole_matrices(
    variant: str, overrides: Make, tmp_path: Path
) -> None:
    trainer = trainer_of(
        overrides, tmp_path / "run", ("wan",), f"lora.variant={variant}", "lora.rank=4"
    )
    generator = torch.Generator().manual_seed(1)
    values: dict[str, Tensor] = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in trainer.parameters.items()
    }
    trainer.journal.close()
    scale = 0.7
    squared = sum(
        float(change(tensors, scale).square().sum())
        for tensors in by_module(values).values()
    )
    measured = squared_change(values, {}, scale)
    assert measured == pytest.approx(squared, rel=2e-4)


def test_the_size_of_a_change_of_weights_is_estimated_from_some() -> None:
    before = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    moves = 0.01 * torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    kept = {"blocks.0.ffn.net.2.weight": sampled(before)}
    now = {"blocks.0.ffn.net.2.weight": before + moves}
    measured = squared_change(now, kept, 1.0)
    assert measured**0.5 == pytest.approx(float(moves.norm()), rel=0.1)


@pytest.mark.parametrize("shape", [(300, 200), (7, 3), (5,), (2000,), (3, 900)])
def test_processes_that_share_a_weight_out_read_what_one_would(
    shape: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(shape, generator=generator)
    after = before + torch.randn(shape, generator=generator)
    name = "blocks.0.ffn.net.2.weight"
    whole = squared_change({name: after}, {name: sampled(before)}, 1.0)

    count = -(-shape[0] // 2)
    parts = []
    for first, rows in ((0, count), (count, shape[0] - count)):
        shard = Shard(shape, first, rows)
        kept = {name: sampled(shard.of(before), shard)}
        parts.append(squared_change({name: shard.of(after)}, kept, 1.0, {name: shard}))
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(whole, rel=1e-6)


def test_parts_of_sound_are_told_apart(tiny_family: Callable[..., Any]) -> None:
    spec = tiny_family("ltx2").spec.with_sound(("video", "sound"))
    blocks = "transformer_blocks.0"
    assert {
        name: part_of(f"{blocks}.{name}.lora_A", spec)
        for name in ("attn1.to_q", "audio_attn1.to_q", "audio_attn2.to_k", "ff.net.2")
    } == {
        "attn1.to_q": "self-attention",
        "audio_attn1.to_q": "sound: self-attention",
        "audio_attn2.to_k": "sound: cross-attention",
        "ff.net.2": "feed-forward",
    }
    between = part_of(f"{blocks}.video_to_audio_attn.to_v.lora_B", spec)
    assert between == "between video and sound"
    assert part_of(f"{blocks}.audio_attn1.norm_q.weight", spec) == "sound: norms"
    assert part_of("proj_in.weight", spec) == "other"


def test_text_connectors_are_parts_of_their_own(
    overrides: Make, tmp_path: Path
) -> None:
    words = overrides(
        *settings("ltx2"),
        'lora.targets=["attention", "connectors"]',
        'generate=["video", "sound"]',
        "video_config.frames=17",
        base=("ltx2",),
        data=write_sounding_clips(tmp_path / "sounding", sounding=2, silent=0),
    )
    trainer = build_trainer(
        open_run(words, tmp_path / "run", None).job, tmp_path / "run"
    )
    train_loop(trainer)
    trainer.journal.close()
    (line,) = of_kind(tmp_path / "run", "parts")
    parts = line["parts"]
    for label in ("text connectors", "sound: text connectors"):
        assert parts[label]["moved"]
        assert parts[label]["gradient"] > 0
    assert warned(trainer) == []


@pytest.mark.parametrize("method", ["FINE_TUNE", "EMBEDDING"])
def test_weights_and_new_tokens_are_parts_too(
    method: str, overrides: Make, tmp_path: Path
) -> None:
    words = overrides(f"training_method={method}", f"steps={STEPS}", "save_every=0")
    job = open_run(words, tmp_path / "run", None).job
    trainer = build_trainer(job, tmp_path / "run")
    train_loop(trainer)
    trainer.journal.close()
    (line,) = of_kind(tmp_path / "run", "parts")
    expected = {"new tokens"}
    if method == "FINE_TUNE":
        expected = {
            "self-attention",
            "cross-attention",
            "feed-forward",
            "norms",
            "other",
        }
    assert set(line["parts"]) == expected
    assert all(part["moved"] for part in line["parts"].values())


def test_new_tokens_have_the_whole_gradient_whichever_expert_runs(
    overrides: Make, tmp_path: Path
) -> None:
    words = overrides(
        *("training_method=EMBEDDING", "steps=2", "save_every=0", "expert_period=1"),
        base=("wan", "t2v-a14b"),
    )
    trainer = build_trainer(
        open_run(words, tmp_path / "run", None).job, tmp_path / "run"
    )
    train_loop(trainer)
    trainer.journal.close()
    (line,) = of_kind(tmp_path / "run", "parts")
    assert line["parts"]["new tokens"]["gradient"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("audio_scale_shift_table", "sound: other"),
        ("transformer_blocks.1.audio_scale_shift_table", "sound: other"),
        ("audio_proj_in.weight", "sound: other"),
        ("transformer_blocks.0.audio_attn1.to_q.weight", "sound: self-attention"),
        ("transformer_blocks.0.audio_ff.net.2.bias", "sound: feed-forward"),
        (
            "transformer_blocks.0.video_to_audio_attn.to_k.weight",
            "between video and sound",
        ),
        ("scale_shift_table", "other"),
        ("transformer_blocks.1.scale_shift_table", "other"),
        ("proj_in.weight", "other"),
        ("transformer_blocks.0.attn1.to_q.weight", "self-attention"),
    ],
)
def test_parameters_of_whole_networks_belong_to_sound_or_video(
    overrides: Make, tmp_path: Path, name: str, expected: str
) -> None:
    """Full fine-tuning also trains tables, which are no module's weights."""
    folder = write_sounding_clips(tmp_path / "clips")
    sets = ("steps=1", 'generate=["video", "sound"]', "video_config.frames=17")
    words = overrides(*sets, data=folder, base=("ltx2",))
    job = open_run(words, tmp_path / "run").job
    assert part_of(name, job.spec) == expected
