"""Which settings a fit takes of those that the config leaves open, for a made step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_dataset
from tests.support.made_steps import (
    DTYPE,
    SLOW_LINK,
    Specs,
    made_spec,
    reading,
    specs_in_place,
)
from tests.support.trainers import Lab, job_of
from videotune.job.job import Job
from videotune.memory.block_offload import spread
from videotune.memory.checkpointing import CPU_OFFLOADED, IN_PARTS, OFF, ON
from videotune.planner import fit as fitting
from videotune.planner import memory
from videotune.planner.fit import Fit, fit, process_share
from videotune.planner.gpus import USUAL
from videotune.planner.ledger import Work
from videotune.planner.memory import Choice, Constraints, need
from videotune.planner.step_spec import ASIDE, TILED, UNCHANGED

GIB = 2**30


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> Specs:
    return specs_in_place(monkeypatch)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The toy base model, and a clip."""
    folder = tmp_path_factory.mktemp("choice")
    clips = write_dataset(folder / "clips", {"a.mkv": noise(9, 32, 32)}, {}, fps=16)
    return Lab(Path("asset:toy"), clips, folder / "cache", folder)


def pair(lab: Lab, **knobs: Any) -> Job:
    """A job of two samples a step that leaves its memory settings open."""
    return job_of(lab, {"batch_size": 2, "gradient_checkpointing": None, **knobs})


def split(mode: str, streamed: int) -> Choice:
    """One sample after the other."""
    return Choice(1, mode, streamed, accumulates=True)


def room_for(specs: Specs, choice: Choice) -> int:
    """Bytes of a card on which the training just fits."""
    return need(specs.in_parts, choice).needed


STAIRS = (
    Choice(2, OFF, 0),
    Choice(2, OFF, 1),
    split(OFF, 0),
    split(OFF, 1),
    split(OFF, 2),
    Choice(2, ON, 0),
    *(Choice(2, CPU_OFFLOADED, streamed) for streamed in (0, 3, 4, 5)),
    split(ON, 0),
    split(CPU_OFFLOADED, 0),
    split(ON, 3),
    split(CPU_OFFLOADED, 3),
    split(ON, 4),
    split(CPU_OFFLOADED, 4),
    split(OFF, 5),
    split(CPU_OFFLOADED, 5),
)
"""From the fastest to the smallest."""

STAIRS_IN_PARTS = (
    *(Choice(2, IN_PARTS, streamed) for streamed in (0, 3, 4, 5)),
    split(IN_PARTS, 4),
    split(IN_PARTS, 5),
)
"""Still smaller."""


def test_each_card_trains_with_the_fastest_settings_that_fit_it(
    lab: Lab, specs: Specs
) -> None:
    """A card of a byte less than settings need has the next ones."""
    job = pair(lab)
    stairs = (*STAIRS, *STAIRS_IN_PARTS)
    for choice, next_choice in zip(stairs, (*stairs[1:], stairs[-1]), strict=True):
        specs.read.clear()
        vram = room_for(specs, choice)
        result = fit(job, DTYPE, vram, None)
        training = need(specs.in_parts, choice)
        resident = replace(choice, streamed=0, checkpointing=ON)
        streamed = f"{choice.streamed} of 5 blocks streamed"
        parts = training.device[training.worst]
        assert result == Fit(
            choice.streamed / 5,
            training,
            {"training": (streamed if choice.streamed else UNCHANGED, parts)},
            vram,
            None,
            fits=True,
            unstreamed=room_for(specs, resident),
        )
        is_in_parts = choice in STAIRS_IN_PARTS
        assert specs.read == ["plain", "in_parts"][: 1 + is_in_parts]

        smaller = fit(job, DTYPE, vram - 1, None)
        assert smaller.training.choice == next_choice
        assert smaller.fits is (choice != next_choice)
        assert bool(smaller.remedies) is not smaller.fits


def test_what_should_stay_free_is_used_only_where_nothing_else_fits(
    lab: Lab, specs: Specs
) -> None:
    job = pair(lab)
    first, second = STAIRS[:2]
    vram = room_for(specs, second) + 5
    roomy = fit(job, DTYPE, vram, USUAL, spare=5)
    assert roomy.training.choice == second
    assert (roomy.vram, roomy.spare, roomy.verdict) == (vram, 5, "fits")
    assert roomy.card == USUAL
    assert fit(job, DTYPE, room_for(specs, first) + 4, None, spare=5) == replace(
        fit(job, DTYPE, room_for(specs, first) - 1, None),
        vram=room_for(specs, first) + 4,
        spare=5,
    )

    vram = room_for(specs, STAIRS_IN_PARTS[-1])
    tight = fit(job, DTYPE, vram, USUAL, spare=1)
    assert tight.training.choice == STAIRS_IN_PARTS[-1]
    assert (tight.vram, tight.spare, tight.verdict) == (vram, 1, "tight")
    assert tight.card == USUAL
    for spare in (0, 5):
        without_card = fit(job, DTYPE, None, None, spare=spare)
        assert (without_card.vram, without_card.spare) == (None, spare)


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize(
    ("choice", "without_host"),
    [
        (Choice(2, OFF, 1), split(OFF, 0)),
        (Choice(2, IN_PARTS, 0), split(IN_PARTS, 0)),
        (split(IN_PARTS, 4), None),
    ],
)
def test_a_host_without_room_for_what_would_wait_there_is_not_used(
    choice: Choice, without_host: Choice | None, spare: int, lab: Lab, specs: Specs
) -> None:
    job = pair(lab)
    vram = room_for(specs, choice) + spare
    host = sum(need(specs.in_parts, choice).host.values())
    enough = fit(job, DTYPE, vram, None, host, spare=spare)
    assert (enough.training.choice, enough.verdict) == (choice, "fits")

    less = fit(job, DTYPE, vram, None, host - 1, spare=spare)
    if without_host:
        assert (less.training.choice, less.fits) == (without_host, True)
    else:  # what needs least fits the card, and not the host
        assert less.training.choice == STAIRS_IN_PARTS[-1]
        assert (less.verdict, len(less.remedies)) == ("does not fit", 1)
        assert "the host" in less.remedies[0]


@pytest.mark.parametrize(
    ("modes", "usual", "slow"),
    [
        ((OFF, ON), Choice(2, OFF, 1), split(OFF, 0)),
        ((OFF, ON, IN_PARTS), Choice(2, IN_PARTS, 4), split(IN_PARTS, 0)),
    ],
)
def test_a_card_with_a_slow_link_computes_more_and_streams_less(
    modes: tuple[str, ...], usual: Choice, slow: Choice, lab: Lab, specs: Specs
) -> None:
    """Without a card, settings are compared on a usual one."""
    job = pair(lab)
    vram = max(room_for(specs, choice) for choice in (usual, slow))
    chosen = [
        fit(job, DTYPE, vram, card).training.choice for card in (None, USUAL, SLOW_LINK)
    ]
    assert chosen == [usual, usual, slow]
    read = ["plain", "in_parts"] if IN_PARTS in modes else ["plain"]
    assert specs.read == read * 3


def test_settings_of_the_config_are_kept_and_other_ones_are_not_read(
    lab: Lab, specs: Specs
) -> None:
    """Half of five blocks are two; the fraction stays as it was given."""
    knobs = {"gradient_checkpointing": ON, "layer_offload_fraction": 0.5}
    job = pair(lab, **knobs)
    result = fit(job, DTYPE, GIB, None)
    assert (result.fits, result.fraction) == (False, 0.5)
    assert result.training.choice == split(ON, len(spread(5, 0.5)))
    assert specs.read == ["plain", "in_parts"]  # the latter for its remedies


def test_the_first_remedy_has_the_settings_that_need_least(
    lab: Lab, specs: Specs
) -> None:
    """They would fit a card of exactly their bytes."""
    job = pair(lab, gradient_checkpointing=OFF, micro_batch_size=2)
    least = STAIRS_IN_PARTS[-1]
    words = (
        "(micro_batch_size=1 gradient_checkpointing=IN_PARTS "
        "layer_offload_fraction=1.00)"
    )
    vram = room_for(specs, least)
    for card, would_fit in ((vram, True), (vram - 1, False)):
        remedy = fit(job, DTYPE, card, None).remedies[0]
        assert words in remedy
        assert ("left open" in remedy) is would_fit
        assert "1.0 GiB" in remedy


@pytest.mark.parametrize("mode", [ON, OFF])
def test_without_a_card_nothing_is_streamed_and_the_host_decides_the_checkpointing(
    mode: str, lab: Lab, specs: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = pair(lab)

    def host_checkpointing(asked: Job) -> str:
        assert asked is job
        return mode

    monkeypatch.setattr(fitting, "host_checkpointing", host_checkpointing)
    slow_together = {
        mode: replace(reading(mode, 2), work=Work(1e14)) for mode in (OFF, ON)
    }
    specs.plain = replace(specs.plain, two_samples=slow_together)
    result = fit(job, DTYPE, None, None)
    assert result.training == need(specs.plain, Choice(2, mode, 0))
    assert (result.fraction, result.fits, result.vram) == (0.0, None, None)
    assert result.unstreamed == result.training.needed
    assert specs.read == ["plain"]


def test_a_preview_is_decoded_in_tiles_only_where_it_does_not_fit_whole(
    lab: Lab, specs: Specs
) -> None:
    """Its activations are far larger than those of the training."""
    whole = made_spec(OFF, ON, **{UNCHANGED: 9000, ASIDE: 9000})
    tiles = made_spec(OFF, ON, **{UNCHANGED: 9000, ASIDE: 9000, TILED: 5000})
    specs.plain = whole
    specs.with_tiles = tiles
    beside = memory.room({"autoencoder": 30, "activations": 9000})
    in_tiles = memory.room({"autoencoder": 30, "activations": 5000})
    job = pair(lab)
    for vram, way in (
        (beside + 300, UNCHANGED),
        (beside + 299, ASIDE),
        (beside, ASIDE),
        (beside - 1, TILED),
        (in_tiles, TILED),
        (in_tiles - 1, TILED),
    ):
        specs.read.clear()
        result = fit(job, DTYPE, vram, None)
        assert result.phases["preview"][0] == way
        assert result.fits is (vram >= in_tiles)
        assert result.training.choice == STAIRS[0]
        assert specs.read == ["plain", *["with_tiles"] * (way == TILED)]
    assert len(result.remedies) == 2
    assert result.remedies[0].startswith("previews")
    specs.read.clear()
    assert fit(job, DTYPE, None, None).phases["preview"][0] == UNCHANGED
    assert specs.read == ["plain"]


def test_of_a_shared_sample_every_reading_is_a_process_s_part(
    tiny_bases: Callable[..., Path], lab: Lab, specs: Specs
) -> None:
    """Two processes on a card on which nothing fits."""
    job = pair(replace(lab, model=tiny_bases("wan")), context_parallel=2)
    previews = {UNCHANGED: 9000, ASIDE: 9000}
    specs.plain = made_spec(OFF, ON, **previews)
    specs.in_parts = made_spec(OFF, ON, IN_PARTS, **previews)
    specs.with_tiles = made_spec(OFF, ON, **previews, **{TILED: 5000})
    result = fit(job, DTYPE, GIB, None)
    part = process_share(job, specs.in_parts, DTYPE)
    least = memory.smallest(part, 2, Constraints())
    assert result.training == least
    assert least.choice.checkpointing == CPU_OFFLOADED
    assert result.fits is False
    assert result.phases["preview"][0] == TILED
    assert specs.read == ["plain", "in_parts", "with_tiles", "in_parts"]
