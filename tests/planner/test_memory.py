"""What a choice of settings needs: three small blocks, counted by hand."""

from dataclasses import replace
from typing import Any

import pytest

from videotune.memory.checkpointing import (
    ATTENTION_SAVED,
    CPU_OFFLOADED,
    IN_PARTS,
    OFF,
    ON,
)
from videotune.planner import memory
from videotune.planner.gpus import Card
from videotune.planner.ledger import FIRST, KEPT, Reading, Work
from videotune.planner.memory import Choice, Constraints, Need
from videotune.planner.step_spec import ASIDE, TILED, UNCHANGED, StepSpec

ACTIVATIONS = {OFF: (500, 520, 480), ON: (100, 120, 90)}
"""Of a sample in the forward pass, in the backward pass and in the first block."""

CARD = Card("a card", 1 << 40, flops=1e12, link=1e9)
"""Of which only the rate of all operations is known."""


def reading(mode: str, samples: int) -> Reading:
    still = {"weights": 300, "trained": 8, "optimizer": 16, "ema": 8}
    forward, backward, first = (samples * size for size in ACTIVATIONS[mode])
    return Reading(
        {
            "forward": {**still, "activations": forward},
            KEPT: {**still, "activations": 9999},
            "backward": {**still, "activations": backward, "gradients": 10},
            FIRST: {**still, "activations": first, "gradients": 100},
            "end": {**still, "activations": 40},
        },
        Work(flops=samples * (3e9 if mode == OFF else 4e9)),
    )


def spec(**changes: Any) -> StepSpec:
    """Blocks of 100, 60 and 40 bytes; the last two are of one list."""
    fields: dict[str, Any] = {
        "one_sample": {mode: reading(mode, 1) for mode in (OFF, ON)},
        "two_samples": {mode: reading(mode, 2) for mode in (OFF, ON)},
        "blocks": (100, 60, 40),
        "trained": (0, 0, 0, 0),
        "kept": {OFF: (30, 20, 20), ON: (3, 2, 2)},
        "encoding_flops_per_pixel": 1.0,
    }
    return StepSpec(**{**fields, **changes})


def test_each_phase_has_its_largest_moment_and_nothing_beside_it() -> None:
    """The optimizer keeps half of what was read, and two experts train."""
    still = {"weights": 300, "trained": 16, "optimizer": 16, "ema": 16}
    plain = spec(optimizer_share=0.5, experts=2)
    needed = memory.need(plain, Choice(1, OFF, 0))
    assert needed.device == {
        "forward": {**still, "activations": 500},
        FIRST: {**still, "activations": 480, "gradients": 100},
        "backward": {**still, "activations": 500, "gradients": 55},
        "end": {**still, "activations": 40},
    }
    assert needed.host == {}
    assert needed.moved == 0
    assert needed.blocks == 3


def test_a_streamed_block_takes_its_part_of_all_that_trains() -> None:
    """Of 20 bytes that train the middle block has 5: three quarters stay."""
    trained = spec(trained=(3, 5, 2, 10))
    needed = memory.need(trained, Choice(1, OFF, 1))
    still = {
        "weights": 300 - (60 - 5),
        "trained": 6,
        "optimizer": 12,
        "ema": 6,
        "ring": 60,
    }
    assert needed.device["end"] == {**still, "activations": 30}
    assert needed.device["forward"] == {**still, "activations": 482}
    assert needed.device[FIRST] == {**still, "activations": 480, "gradients": 75}
    assert needed.host == {
        "streamed weights": 64,
        "masters, gradients and optimizer": 40,
    }
    assert needed.moved == 2 * 60 - 60
    assert needed.work.flops == pytest.approx(3e9 + 1e9 / 3)


def test_parts_that_no_reading_has_are_not_there() -> None:
    bare = Reading({"forward": {}, "backward": {}}, Work(1))
    readings = {OFF: bare, ON: bare}
    empty = spec(one_sample=readings, two_samples=readings)
    assert memory.need(empty, Choice(1, ON, 0)).device == {
        "forward": {},
        "backward": {},
    }


def test_what_trains_of_one_byte_leaves_with_its_block() -> None:
    tiny = spec(trained=(0, 1, 0, 0))
    device = memory.need(tiny, Choice(1, OFF, 1)).device
    assert device["end"] == {"weights": 300 - (60 - 1), "ring": 60}


def test_pinned_memory_is_whole_pieces_and_a_power_of_two() -> None:
    """Blocks of 1.2 billion bytes together: a GiB, and the rest in 128 MiB."""
    large = spec(blocks=(4 * 10**8,) * 3)
    host = memory.need(large, Choice(2, CPU_OFFLOADED, 3)).host
    inputs = 8 + 4 + 4  # twice 3, 2 and 2
    assert host == {"streamed weights": 2**30 + 2**27, "block inputs": inputs}
    odd = spec(blocks=(2**29 + 1, 1, 1))
    host = memory.need(odd, Choice(1, ON, 3)).host
    assert host == {"streamed weights": 2**30}


def test_room_has_a_margin_for_activations_and_the_context() -> None:
    assert memory.with_overhead({"weights": 5, "activations": 11}) == {
        "weights": 5,
        "activations": 11,
        "allocator and libraries": 4,
        "CUDA context": 2**30,
    }
    assert memory.room({"weights": 10}) == 10 + 2**30


def test_the_worst_phase_is_the_one_that_needs_most_with_its_margin() -> None:
    device = {"z": {"weights": 100}, "a": {"activations": 90}}
    needed = Need(Choice(1, OFF, 0), device, {}, Work(0), moved=0.0)
    assert needed.worst == "a"
    assert needed.allocated == 90
    assert needed.needed == 117 + 2**30


def settings(
    constraints: Constraints, batch: int = 1, **changes: Any
) -> list[tuple[int, str, int, bool]]:
    return [
        (choice.micro_batch, choice.checkpointing, choice.streamed, choice.accumulates)
        for choice in memory.choices(spec(**changes), batch, constraints)
    ]


def test_choices_are_all_that_the_config_leaves_open_the_plainest_first() -> None:
    fixed = Constraints(checkpointing=ON, streamed=0)
    assert settings(fixed, batch=5) == [
        (5, ON, 0, False),
        (3, ON, 0, True),
        (2, ON, 0, True),
        (1, ON, 0, True),
    ]
    accumulating = replace(fixed, accumulates=True, micro_batch=8)
    assert settings(accumulating, batch=5) == [(5, ON, 0, True)]
    whole = replace(fixed, micro_batch=8)
    assert settings(whole, batch=5) == [(5, ON, 0, False)]

    modes = [(OFF, 0), (ON, 0), (CPU_OFFLOADED, 0)]
    modes += [(mode, count) for count in (1, 2, 3) for mode in (OFF, ON, CPU_OFFLOADED)]
    assert settings(Constraints()) == [(1, mode, count, False) for mode, count in modes]
    on_card = Constraints(streamed=2, allows_cpu_offload=False)
    assert settings(on_card) == [(1, OFF, 2, False), (1, ON, 2, False)]


def test_attention_is_saved_where_it_was_read_and_no_block_is_streamed() -> None:
    kept = dict.fromkeys((OFF, ON, ATTENTION_SAVED, IN_PARTS), (3, 2, 2))
    resident = Constraints(streamed=0, tries_parts=True)
    modes = [mode for _, mode, _, _ in settings(resident, kept=kept)]
    assert modes == [OFF, ON, ATTENTION_SAVED, CPU_OFFLOADED, IN_PARTS]
    streamed = replace(resident, streamed=1)
    modes = [mode for _, mode, _, _ in settings(streamed, kept=kept)]
    assert modes == [OFF, ON, CPU_OFFLOADED, IN_PARTS]
    not_read = [mode for _, mode, _, _ in settings(resident)]
    assert not_read == [OFF, ON, CPU_OFFLOADED]
    without_host = replace(resident, allows_cpu_offload=False)
    modes = [mode for _, mode, _, _ in settings(without_host, kept=kept)]
    assert modes == [OFF, ON, ATTENTION_SAVED]


def test_of_equally_fast_choices_the_plainest_is_taken() -> None:
    """Computing a block again costs nothing here, nor does streaming it."""
    readings = {
        mode: replace(reading(mode, 1), work=Work(flops=1e12)) for mode in (OFF, ON)
    }
    equal = spec(one_sample=readings, two_samples=readings)
    open_settings = Constraints(micro_batch=1)
    fastest = memory.fastest(equal, 1, open_settings, 1 << 40, CARD)
    assert fastest is not None
    assert fastest.choice == Choice(1, OFF, 0)
    assert memory.fastest(equal, 1, open_settings, fastest.needed, CARD) == fastest
    less = memory.fastest(equal, 1, open_settings, fastest.needed - 1, CARD)
    assert less is not None
    assert less.choice == Choice(1, ON, 0)


def test_a_step_has_as_many_passes_as_samples_need_and_at_least_one() -> None:
    training = Need(Choice(4, OFF, 0), {}, {}, Work(flops=2e12), moved=0.0)
    a_pass = 2 / CARD.reached
    for batch, passes in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        assert memory.seconds(training, batch, CARD) == pytest.approx(passes * a_pass)


@pytest.mark.parametrize("mode", [ATTENTION_SAVED, IN_PARTS])
def test_the_host_chooses_what_each_block_keeps(mode: str) -> None:
    card = replace(CARD, bandwidth=1e12)
    work = Work(flops=1, operations=1000)
    training = Need(Choice(1, mode, 0), {}, {}, work, moved=0.0, blocks=20)
    starting = 1000 * memory.LAUNCH_SECONDS + 20 * memory.SAVING_SECONDS
    assert memory.seconds(training, 1, card) == pytest.approx(starting)


def test_between_two_readings_work_is_on_a_line() -> None:
    two = spec(work=((100, 20.0), (200, 60.0)))
    assert memory.relative_work(two, 200) == pytest.approx(1)
    assert memory.relative_work(two, 150) == pytest.approx(40 / 60)
    assert memory.relative_work(spec(work=((100, 20.0),)), 50) == 1.0


def test_a_preview_is_decoded_beside_what_the_denoiser_leaves_on_the_card() -> None:
    sizes = {UNCHANGED: 500, ASIDE: 500, TILED: 100}
    preview = {
        way: {"autoencoder": 30, "activations": size} for way, size in sizes.items()
    }
    other = {"preview": preview, "encoding text": {UNCHANGED: {"text encoder": 7}}}
    with_preview = spec(other_phases=other)
    training = memory.need(with_preview, Choice(1, ON, 1))

    still = {"trained": 8, "optimizer": 16, "ema": 8}
    beside = {
        UNCHANGED: {
            **still,
            "autoencoder": 30,
            "activations": 540,
            "weights": 240,
            "ring": 60,
        },
        ASIDE: {**still, "autoencoder": 30, "activations": 540},
        TILED: {**still, "autoencoder": 30, "activations": 140},
    }
    chosen = memory.fit_other_phases(with_preview, training, None)
    assert chosen == {
        "preview": (UNCHANGED, beside[UNCHANGED]),
        "encoding text": (UNCHANGED, {"text encoder": 7}),
    }

    limits = {
        memory.room(beside[UNCHANGED]): UNCHANGED,
        memory.room(beside[UNCHANGED]) - 1: ASIDE,
        memory.room(beside[ASIDE]): ASIDE,
        memory.room(beside[ASIDE]) - 1: TILED,
        0: TILED,
    }
    for vram, way in limits.items():
        chosen = memory.fit_other_phases(with_preview, training, vram)
        assert chosen["preview"] == (way, beside[way])
