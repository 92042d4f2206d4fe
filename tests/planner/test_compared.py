"""The ways of computing a step that a plan compares."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainers import Lab, job_of
from videotune.memory.checkpointing import IN_PARTS, OFF, ON
from videotune.planner import memory
from videotune.planner.compared import (
    EIGHT_BITS,
    MODES,
    Way,
    _order,
    compared_ways,
)
from videotune.planner.fit import (
    fit,
    implied_constraints,
    pass_samples,
    process_share,
)
from videotune.planner.gpus import find_card
from videotune.planner.ledger import Work
from videotune.planner.memory import Choice, Need
from videotune.planner.read_step import step_spec, step_spec_in_parts

GB = 2**30


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that keeps what one test has read of the step for the others."""
    return tmp_path_factory.mktemp("readings") / "cache"


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path, cache: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, cache, tmp_path)


def ways_of(
    lab: Lab, knobs: dict[str, Any], vram: int = 24 * GB
) -> list[dict[str, Any]]:
    job = job_of(lab, knobs, preset="toy")
    result = fit(job, "BFLOAT_16", vram, find_card("RTX 4090"))
    return compared_ways(job, result, "BFLOAT_16")


def test_each_way_is_there_once_with_the_fastest_that_fits_first(lab: Lab) -> None:
    ways = ways_of(lab, {})
    modes = [way["settings"]["gradient_checkpointing"] for way in ways]
    assert set(modes) == set(MODES)
    assert all(way["fits"] for way in ways)
    seconds = [way["seconds_a_step"] for way in ways]
    assert seconds == sorted(seconds)
    assert sum(way["settings"]["compile"] for way in ways) >= 1
    rounded = [way for way in ways if way["is_another_base"]]
    assert len(rounded) == 1
    assert rounded[0]["settings"]["transformer.matmul_dtype"] == EIGHT_BITS


def test_its_bytes_and_seconds_are_those_of_a_plan_with_these_settings(
    lab: Lab,
) -> None:
    job = job_of(lab, {}, preset="toy")
    spec = process_share(job, step_spec(job, "BFLOAT_16"), "BFLOAT_16")
    alone = memory.need(spec, Choice(max(pass_samples(job)), OFF, 0))
    (plain,) = [
        way
        for way in ways_of(lab, {})
        if way["settings"]["gradient_checkpointing"] == OFF
        and not way["settings"]["compile"]
        and not way["is_another_base"]
    ]
    assert plain["need_bytes"] == alone.needed
    assert plain["streamed_blocks"] == 0


@pytest.mark.parametrize(
    ("knobs", "captures"),
    [
        ({}, True),
        ({"cuda_graphs": False}, False),
        ({"lora.dropout": 0.1}, False),
        ({"training_method": "FINE_TUNE"}, False),
    ],
)
def test_passes_are_planned_as_graphs_where_the_run_captures_them(
    knobs: dict[str, Any], captures: bool, lab: Lab
) -> None:
    job = job_of(lab, knobs, preset="toy")
    assert step_spec(job, "BFLOAT_16").captures is captures


def test_a_card_too_small_for_all_of_them_has_the_smallest_of_each(lab: Lab) -> None:
    ways = ways_of(lab, {}, vram=GB // 4)
    assert not any(way["fits"] for way in ways)
    roomy = ways_of(lab, {})
    most = max(way["need_bytes"] for way in roomy)
    assert max(way["need_bytes"] for way in ways) <= most


def test_a_way_is_tight_where_it_takes_what_was_to_stay_free(lab: Lab) -> None:
    """The fastest way on cards that have exactly its bytes beside the spare ones, one
    less, and one less than its bytes.
    """
    job = job_of(lab, {"gradient_checkpointing": OFF}, preset="toy")
    card = find_card("RTX 4090")
    spare = GB
    (way,) = (
        way
        for way in compared_ways(job, fit(job, "BFLOAT_16", 24 * GB, card), "BFLOAT_16")
        if way["is_chosen"]
    )
    needed = way["need_bytes"]

    verdicts = []
    for vram in (needed + spare, needed + spare - 1, needed):
        result = replace(fit(job, "BFLOAT_16", vram, card), spare=spare)
        ways = compared_ways(job, result, "BFLOAT_16")
        verdicts += [way["verdict"] for way in ways if way["need_bytes"] == needed][:1]
    assert verdicts == ["fits", "tight", "tight"]


def test_without_a_card_the_ways_are_there_without_a_verdict(lab: Lab) -> None:
    job = job_of(lab, {}, preset="toy")
    ways = compared_ways(job, fit(job, "BFLOAT_16", None, None), "BFLOAT_16")
    assert {way["settings"]["gradient_checkpointing"] for way in ways} == set(MODES)
    assert {way["verdict"] for way in ways} == {None}
    assert {way["seconds_a_step"] for way in ways} == {None}


def test_settings_that_need_least_may_compute_blocks_in_parts(lab: Lab) -> None:
    """Parts that are offered where the config has left the settings open need less."""
    job = job_of(lab, {}, preset="toy")
    spec = process_share(job, step_spec_in_parts(job, "BFLOAT_16"), "BFLOAT_16")
    batch = max(pass_samples(job))
    constraints = replace(implied_constraints(job.config, batch), tries_parts=True)
    least = memory.smallest(spec, batch, constraints)
    without = memory.smallest(spec, batch, replace(constraints, tries_parts=False))
    assert least.choice.checkpointing == IN_PARTS
    assert least.needed < without.needed

    remedies = fit(job, "BFLOAT_16", GB // 4, None).remedies
    assert "gradient_checkpointing=IN_PARTS" in " ".join(remedies)


def test_what_the_config_forbids_is_no_way(lab: Lab) -> None:
    full = {"training_method": "FINE_TUNE"}
    assert not any(way["is_another_base"] for way in ways_of(lab, full))
    rounded = {"transformer.matmul_dtype": EIGHT_BITS}
    assert not any(way["is_another_base"] for way in ways_of(lab, rounded))


def test_products_in_eight_bits_are_counted_as_such(lab: Lab) -> None:
    """All products of the blocks' linear layers, forward and backward."""
    plain = step_spec(job_of(lab, {}, preset="toy"), "BFLOAT_16")
    knobs = {"transformer.matmul_dtype": EIGHT_BITS}
    rounded = step_spec(job_of(lab, knobs, preset="toy"), "BFLOAT_16")
    choice = Choice(1, OFF, 0)
    work = memory.need(plain, choice).work
    in_eight_bits = memory.need(rounded, choice).work
    assert work.eight_bit == 0
    products = in_eight_bits.flops - in_eight_bits.attention
    assert 0.3 * products < in_eight_bits.eight_bit < products
    card = replace(find_card("RTX 4090"), bandwidth=None)
    as_bf16 = replace(in_eight_bits, eight_bit=0)
    assert memory.card_seconds(in_eight_bits, card) < memory.card_seconds(as_bf16, card)


def test_encoding_a_pixel_is_about_as_much_work_in_clips_of_any_size(lab: Lab) -> None:
    rates = []
    for resolution, frames in (("32x32", 9), ("64x64", 17)):
        knobs = {"resolution": resolution, "video_config.frames": frames}
        job = job_of(lab, knobs, preset="toy")
        rates.append(step_spec(job, "BFLOAT_16").encoding_flops_per_pixel)
    assert rates[0] == pytest.approx(rates[1], rel=0.2)


def made_way(**changes: Any) -> Way:
    device = {"end": {"weights": changes.pop("weights", 5)}}
    training = Need(Choice(2, ON, 1), device, {}, Work(0), moved=0.0)
    fields: dict[str, Any] = {"seconds": 1.23456, "verdict": "tight", "blocks": 3}
    return Way(training, **{**fields, **changes})


def test_a_way_has_its_settings_and_what_it_needs() -> None:
    expected = {
        "settings": {
            "gradient_checkpointing": "ON",
            "layer_offload_fraction": 0.3333,
            "micro_batch_size": 2,
            "compile": False,
            "transformer.matmul_dtype": "auto",
        },
        "streamed_blocks": 1,
        "blocks": 3,
        "need_bytes": 5 + 2**30,
        "fits": True,
        "verdict": "tight",
        "is_chosen": False,
        "seconds_a_step": 1.2346,
        "is_another_base": False,
    }
    assert made_way().to_json() == expected

    other = made_way(
        seconds=None,
        verdict="does not fit",
        is_compiled=True,
        matmul_dtype="INT_8",
        is_chosen=True,
    ).to_json()
    settings = {"compile": True, "transformer.matmul_dtype": "INT_8"}
    assert other == expected | {
        "settings": expected["settings"] | settings,  # type: ignore[operator]
        "fits": False,
        "verdict": "does not fit",
        "is_chosen": True,
        "seconds_a_step": None,
        "is_another_base": True,
    }
    assert made_way(verdict=None).fits
    assert made_way(blocks=1).to_json()["settings"]["layer_offload_fraction"] == 1


def test_ways_that_fit_come_before_tight_ones_and_quick_before_small() -> None:
    ordered = [
        made_way(verdict="fits", seconds=1.0, weights=9),
        made_way(verdict="fits", seconds=2.0, weights=8),
        made_way(verdict="fits", seconds=2.0, weights=9),
        made_way(verdict="tight", seconds=0.5, weights=1),
        made_way(verdict="does not fit", seconds=0.1, weights=1),
    ]
    shuffled = [ordered[index] for index in (3, 1, 4, 2, 0)]
    assert sorted(shuffled, key=_order) == ordered
    small, large = (
        made_way(verdict=None, seconds=None, weights=size) for size in (1, 2)
    )
    assert min([large, small], key=_order) is small


def test_the_way_of_the_run_is_marked_once(lab: Lab) -> None:
    knobs = {"compile": False, "gradient_checkpointing": "ON"}
    (chosen,) = (way for way in ways_of(lab, knobs) if way["is_chosen"])
    assert chosen["settings"]["compile"] is False
    assert chosen["settings"]["gradient_checkpointing"] == "ON"
    assert chosen["seconds_a_step"] > 0
    assert chosen["verdict"] == "fits"


def test_sharded_weights_have_no_way_with_inputs_on_the_host(lab: Lab) -> None:
    modes = {
        way["settings"]["gradient_checkpointing"]
        for way in ways_of(lab, {"sharding": "FULL"})
    }
    assert "CPU_OFFLOADED" not in modes
    assert {"ON", "OFF"} <= modes
