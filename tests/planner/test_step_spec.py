"""What becomes of a step's readings where its weights or the text encoder's work are
shared: small whole numbers, counted by hand.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.made_steps import StepRun
from videotune.config.resolve import parse
from videotune.memory.checkpointing import ATTENTION_SAVED, IN_PARTS, OFF, ON
from videotune.model_spec import Expert
from videotune.models.registry import find
from videotune.planner.ledger import FIRST, KEPT, Reading, Work
from videotune.planner.step_spec import (
    STREAMED,
    UNCHANGED,
    StepSpec,
    assemble,
    is_consistent,
    kept_by_blocks,
    read_other_phases,
    read_work,
    sharded,
    with_shared_samples,
    with_text_encoder,
)
from videotune.types import ClipShape

SHAPE = ClipShape(9, 64, 64, 16.0)


def reading(samples: int) -> Reading:
    """Sizes that three processes do not share evenly."""
    sizes = {
        "weights": 100,
        "trained": 10,
        "optimizer": 20,
        "ema": 5,
        "activations": 31 * samples,
    }
    return Reading(
        {
            "forward": sizes,
            "backward": {**sizes, "gradients": 11},
            FIRST: {**sizes, "gradients": 13},
            KEPT: sizes,
            "end": {**sizes, "activations": 2},
        },
        Work(900.0 * samples, 70.0 * samples, 30 * samples, 6 * samples),
    )


def spec(**changes: Any) -> StepSpec:
    fields: dict[str, Any] = {
        "one_sample": {mode: reading(1) for mode in (OFF, ATTENTION_SAVED, ON)},
        "two_samples": {mode: reading(2) for mode in (OFF, ATTENTION_SAVED, ON)},
        "blocks": (40, 60),
        "trained": (0, 0, 0),
        "kept": {OFF: (7, 8), ATTENTION_SAVED: (5, 5), ON: (1, 2)},
        "encoding_flops_per_pixel": 1.0,
    }
    return StepSpec(**{**fields, **changes})


def test_a_share_of_weights_is_rounded_up_and_two_of_the_largest_block_arrive() -> None:
    phases = sharded(spec(), 3, full=False).at(OFF, 1).phases
    assert phases["forward"] == {**reading(1).phases["forward"], "weights": 34 + 120}
    assert phases["end"] == {**reading(1).phases["end"], "weights": 34}
    assert all(isinstance(size, int) for size in phases["end"].values())


def test_a_full_share_has_a_part_of_all_that_trains() -> None:
    phases = sharded(spec(), 3, full=True).at(OFF, 2).phases
    assert phases["backward"] == {
        "weights": 34 + 120,
        "trained": 4,
        "optimizer": 7,
        "ema": 2,
        "activations": 62,
        "gradients": 4 + 120,
    }
    assert phases["end"] == {
        "weights": 34,
        "trained": 4,
        "optimizer": 7,
        "ema": 2,
        "activations": 2,
    }


def test_the_work_of_a_process_with_shards_is_all_of_its_samples() -> None:
    assert sharded(spec(), 3, full=True).at(ON, 2).work == reading(2).work


def test_shared_samples_are_held_in_parts_and_attention_is_computed_once_more() -> None:
    shared = with_shared_samples(spec(), 2, 12.0)
    phases = shared.at(OFF, 1).phases
    assert phases["forward"]["activations"] == 16
    assert phases["forward"]["exchanged by attention"] == 2 * 12 // 2
    assert phases[KEPT]["activations"] == 16
    assert "exchanged by attention" not in phases[KEPT]
    assert phases["end"] == reading(1).phases["end"]
    assert shared.at(OFF, 2).phases[FIRST]["exchanged by attention"] == 24

    work = shared.at(OFF, 1).work
    again = 70.0 / 3.5
    blocks, passes, starts, moves = 2, 3, 14, 28
    assert work.flops == pytest.approx((900.0 + again) / 2)
    assert work.attention == pytest.approx((70.0 + again) / 2)
    assert work.operations == 6 + blocks * passes * starts
    assert work.moved == pytest.approx(30 / 2 + blocks * passes * moves * 12.0 / 2)


def test_of_shared_samples_no_attention_is_saved() -> None:
    read = {**spec().kept, IN_PARTS: (1, 1)}
    kept = with_shared_samples(spec(kept=read), 2, 12.0).kept
    assert kept == {OFF: (4, 4), ON: (1, 1)}


class Readings:
    """What would be read of a text encoder of two lists of blocks."""

    def __init__(self, parts: dict[str, int]) -> None:
        self.parts = parts
        self.blocks = {"first": [1, 2, 3], "second": [4]}

    def read_text(self) -> tuple[dict[str, int], float, list[list[int]]]:
        return self.parts, 50.0, [[10, 30, 20], [5]]

    def text_size(self) -> tuple[int, int]:
        return 3, 1000

    def kept_by_block(self, shape: ClipShape, mode: str) -> dict[str, int]:
        assert (shape, mode) == (SHAPE, ON)
        return {"first": 70, "second": 80}

    def decode(self, shape: ClipShape, tiled: bool = False) -> dict[str, int]:
        assert (shape, tiled) == (SHAPE, False)
        return {"vae": 9}


def config(train: bool) -> Any:
    return SimpleNamespace(text_encoder=SimpleNamespace(train=train))


@pytest.mark.parametrize(("activations", "waiting"), [({"activations": 6}, 6), ({}, 0)])
def test_each_sample_s_text_waits_for_the_backward_pass(
    activations: dict[str, int], waiting: int
) -> None:
    readings: Any = Readings({"text encoder": 400, **activations})
    changed = with_text_encoder(spec(), readings, config(train=False))
    for samples in (1, 2, 3):
        after = changed.at(OFF, samples)
        assert after.phases["forward"] == {
            **reading(samples).phases["forward"],
            "activations": (31 + waiting) * samples,
            "text encoder": 400,
        }
        assert after.phases["end"]["activations"] == 2
        assert after.phases["end"]["text encoder"] == 400
        assert after.work.flops == (900.0 + 50.0) * samples


def test_a_trained_text_encoder_has_masters_gradients_and_two_moments() -> None:
    """Of 1,000 numbers 8 bytes, and 8 of the optimizer, of which this one has a half."""
    readings: Any = Readings({"text encoder": 400})
    half = spec(optimizer_share=0.5)
    after = with_text_encoder(half, readings, config(train=True)).at(ON, 1)
    for phase in ("forward", "end"):
        assert after.phases[phase]["text encoder's training"] == 8000 + 4000


def test_each_block_keeps_what_its_list_keeps() -> None:
    readings: Any = Readings({})
    assert kept_by_blocks(readings, SHAPE, ON) == (70, 70, 70, 80)


def test_streamed_text_encoders_have_two_blocks_each_on_the_card() -> None:
    readings: Any = Readings({"text encoder": 400, "activations": 6})
    inputs: Any = SimpleNamespace(preview=None)
    phases = read_other_phases(readings, inputs, {"vae": 3})
    streamed = 400 - (60 - 2 * 30) - (5 - 2 * 5)
    assert phases == {
        "encoding text": {
            UNCHANGED: {"text encoder": 400, "activations": 6},
            STREAMED: {"text encoder": streamed, "activations": 6},
        },
        "encoding clips": {UNCHANGED: {"vae": 3}},
    }
    assert "preview" in read_other_phases(
        readings,
        SimpleNamespace(preview=SHAPE),
        {"vae": 3},  # type: ignore[arg-type]
    )


def without_phase(mode: str, phase: str) -> dict[str, Reading]:
    readings = {mode: reading(1) for mode in (OFF, ATTENTION_SAVED, ON)}
    phases = dict(readings[mode].phases)
    del phases[phase]
    readings[mode] = Reading(phases, readings[mode].work)
    return readings


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": ()},
        {"captures": True},
        {"trained": (0, 0)},
        {"kept": {OFF: (7, 8), ATTENTION_SAVED: (5, 5)}},
        {"kept": {OFF: (7, 8), ATTENTION_SAVED: (5, 5), ON: (1,)}},
        {"one_sample": {OFF: reading(1), ON: reading(1)}},
        {"two_samples": without_phase(ON, "end")},
        {
            "one_sample": without_phase(ON, "forward"),
            "two_samples": without_phase(ON, "forward"),
        },
    ],
)
def test_a_stored_spec_with_a_hole_is_not_taken(changes: dict[str, Any]) -> None:
    assert is_consistent(spec())
    assert not is_consistent(spec(**changes))


TWO_EXPERTS = (Expert("high", 0.5, 1.0), Expert("low", 0.0, 0.5))
FULL = {"training_method": "FINE_TUNE"}
ONLY_TEXT = {"transformer": {"train": False}, "text_encoder": {"train": True}}


@pytest.mark.parametrize(
    ("keys", "trained", "share", "experts"),
    [
        ({}, (0,) * 5, 1.0, 2),
        ({"optimizer": {"name": "LION"}}, (0,) * 5, 0.5, 2),
        (FULL | {"experts": "high"}, (1, 2, 3, 4, 90), 1.0, 1),
        ({"experts": "low"}, (0,) * 5, 1.0, 1),
        (FULL | ONLY_TEXT, (0,) * 5, 1.0, 1),
    ],
)
@pytest.mark.parametrize("has_parts", [True, False])
def test_a_spec_is_made_of_the_largest_shape_s_readings_in_each_mode(
    has_parts: bool,
    keys: dict[str, Any],
    trained: tuple[int, ...],
    share: float,
    experts: int,
) -> None:
    """Those in parts come from a run of their own."""
    run = StepRun(1)
    parts = StepRun(1000)
    base = replace(find("wan").spec, experts=TWO_EXPERTS)
    config = parse(keys)
    inputs: Any = SimpleNamespace(
        config=config,
        spec=base,
        shapes=(SHAPE, ClipShape(5, 32, 64, 16.0)),
        preview=SHAPE,
    )
    family: Any = None  # nothing is asked of it
    made = assemble(run, inputs, family, parts if has_parts else None)  # type: ignore[arg-type]

    sources = dict.fromkeys((OFF, ATTENTION_SAVED, ON), run)
    if has_parts:
        sources[IN_PARTS] = parts
    expected = StepSpec(
        one_sample={
            mode: source.deep_step(SHAPE, 1, mode) for mode, source in sources.items()
        },
        two_samples={
            mode: source.deep_step(SHAPE, 2, mode) for mode, source in sources.items()
        },
        blocks=(1, 2, 3, 4),
        trained=trained,
        kept={
            mode: (source.factor * (64 + len(mode)),) * 3
            + (source.factor * (64 + len(mode)) + 1,)
            for mode, source in sources.items()
        },
        encoding_flops_per_pixel=6.0,
        work=read_work(run, inputs),  # type: ignore[arg-type]
        other_phases=read_other_phases(run, inputs, {"vae": 9}),  # type: ignore[arg-type]
        optimizer_share=share,
        experts=experts,
    )
    if config.text_in_step:
        expected = with_text_encoder(expected, run, config)  # type: ignore[arg-type]
    assert made == expected
    assert len(made.work) == 2


def test_an_optimizer_class_has_the_state_that_is_measured_of_the_denoiser(
    tiny_family: Callable[..., Any],
) -> None:
    """Momentum is half of what AdamW keeps."""
    family = tiny_family("wan")
    optimizer = {"name": "torch.optim:SGD", "args": {"momentum": 0.9}}
    config = parse({"optimizer": optimizer, "lora": {"rank": 4}})
    inputs: Any = SimpleNamespace(
        config=config, spec=family.spec, shapes=(SHAPE,), preview=None
    )
    made = assemble(StepRun(1), inputs, family)  # type: ignore[arg-type]
    assert made.optimizer_share == pytest.approx(0.5, rel=0.02)


def test_a_shared_step_without_activations_has_none() -> None:
    bare = {OFF: Reading({"forward": {"weights": 100}}, Work(1.0))}
    shared = with_shared_samples(spec(one_sample=bare, two_samples=bare), 2, 12.0)
    assert shared.at(OFF, 1).phases["forward"] == {
        "weights": 100,
        "activations": 0,
        "exchanged by attention": 12,
    }
