"""Whether a run fits, how long its step takes, and what would make it fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.clips import noise, write_dataset
from tests.support.trainers import Lab, job_of, overrides_of
from videotune.config.resolve import parse
from videotune.job.job import Job, open_job
from videotune.job.overrides import resolve_config
from videotune.memory.checkpointing import CPU_OFFLOADED, OFF, ON
from videotune.planner import fit as fitting
from videotune.planner import memory
from videotune.planner.cache_size import cache_size
from videotune.planner.cluster import Cluster
from videotune.planner.fit import (
    Fit,
    cache_seconds,
    computing_seconds,
    config_constraints,
    fit,
    implied_constraints,
    pass_samples,
    planned_dtype,
    remedies,
    requested_card,
    spare_memory,
    step_seconds,
)
from videotune.planner.fit_facts import PROGRAM, bytes_of, to_json
from videotune.planner.gpus import Card, find_card
from videotune.planner.ledger import Work
from videotune.planner.memory import Choice, Constraints, Need
from videotune.planner.processes import message_seconds_of
from videotune.planner.read_step import step_spec
from videotune.planner.step_spec import UNCHANGED, StepSpec
from videotune.validation.overhead import overhead, total_share

GIB = 2**30
OPEN = {"gradient_checkpointing": None}
"""What these jobs set otherwise."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The toy base model, and clips of 9 and 17 frames; a cache that keeps readings."""
    folder = tmp_path_factory.mktemp("fit")
    frames = {"a.mkv": noise(9, 32, 32), "b.mkv": noise(17, 32, 32, seed=1)}
    clips = write_dataset(folder / "clips", frames, {}, fps=16)
    return Lab(Path("asset:toy"), clips, folder / "cache", folder)


def job_of_processes(lab: Lab, processes: int, **knobs: Any) -> Job:
    settings = {"video_config.frames": [9, 17], **knobs}
    return open_job(*resolve_config(overrides_of(lab, settings)), processes=processes)


def need_of(**phases: dict[str, int]) -> Need:
    return Need(Choice(3, ON, 1), phases, {}, Work(0), moved=0.0)


def made_fit(vram: int | None, fits: bool | None, spare: int = 0) -> Fit:
    """A fit whose preview needs 113 bytes and a context, since activations have a margin;
    its training needs 105.
    """
    phases = {
        "training": (UNCHANGED, {"weights": 105}),
        "preview": (UNCHANGED, {"weights": 100, "activations": 10}),
    }
    return Fit(1 / 3, need_of(end={}), phases, vram, None, fits, spare=spare)


def test_a_fit_is_tight_below_what_should_stay_free() -> None:
    needed = 113 + GIB
    roomy = made_fit(needed + 20, fits=True, spare=20)
    assert (roomy.worst, roomy.needed, roomy.verdict) == ("preview", needed, "fits")
    assert made_fit(needed + 19, fits=True, spare=20).verdict == "tight"
    assert made_fit(needed + 20, fits=False, spare=20).verdict == "does not fit"
    assert made_fit(None, fits=None).verdict is None
    assert roomy.chosen == {
        "micro_batch_size": 3,
        "gradient_checkpointing": ON,
        "layer_offload_fraction": 0.3333,
    }


def test_a_card_is_that_of_its_name_with_the_memory_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert requested_card(7.3, None) == (int(7.3 * GIB), None)
    assert requested_card(None, "rtx 4090") == (24 * GIB, find_card("rtx 4090"))
    assert requested_card(20, "rtx 4090") == (20 * GIB, find_card("rtx 4090"))
    assert requested_card(8, "rtx 3060") == (8 * GIB, find_card("rtx 3060 8gb"))
    monkeypatch.setattr(fitting, "local_device", lambda: torch.device("cpu"))
    assert requested_card(None, None) == (None, None)


def test_a_twentieth_stays_free_and_a_desktop_of_small_cards() -> None:
    assert spare_memory(10_000, is_free=True) == 500
    assert spare_memory(10 * GIB, is_free=False) == 768 * 2**20
    assert spare_memory(100 * GIB, is_free=False) == 5 * GIB


def test_a_plan_for_a_card_is_in_the_dtype_that_the_card_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = parse({})
    named = parse({"train_dtype": "FLOAT_32"})
    assert planned_dtype(named, True, find_card("rtx 3090")) == "FLOAT_32"
    assert planned_dtype(plain, True) == "BFLOAT_16"
    assert planned_dtype(plain, True, find_card("T4")) == "FLOAT_16"
    monkeypatch.setattr(fitting, "dtype_name", lambda config: "of this machine")
    assert planned_dtype(plain, False, find_card("rtx 3090")) == "of this machine"


@pytest.mark.parametrize(
    ("knobs", "constraints"),
    [
        ({}, Constraints()),
        ({"gradient_accumulation_steps": 2}, Constraints(accumulates=True)),
        ({"sharding": "FULL"}, Constraints(streamed=0, allows_cpu_offload=False)),
        (
            {"training_method": "FINE_TUNE", "optimizer.name": "LION"},
            Constraints(streamed=0),
        ),
        (
            {"training_method": "FINE_TUNE", "optimizer.step_in_backward": True},
            Constraints(micro_batch=6, streamed=0),
        ),
    ],
)
def test_other_keys_imply_memory_settings(
    knobs: dict[str, Any], constraints: Constraints, lab: Lab
) -> None:
    config = job_of(lab, OPEN | knobs).config
    assert implied_constraints(config, 6) == constraints
    assert config_constraints(config, 4, 6) == constraints


def test_settings_of_the_config_are_constraints(lab: Lab) -> None:
    knobs = {
        "micro_batch_size": 1,
        "gradient_checkpointing": "ON",
        "layer_offload_fraction": 0.5,
        "batch_size": 2,
    }
    config = job_of(lab, knobs).config
    assert config_constraints(config, 8, 2) == Constraints(1, ON, streamed=4)
    none = job_of(lab, OPEN | {"layer_offload_fraction": 0}).config
    assert config_constraints(none, 8, 2) == Constraints(streamed=0)


def test_a_pass_has_a_processes_share_of_a_step_rounded_up(lab: Lab) -> None:
    knobs = {"batch_size": 5, "gradient_accumulation_steps": 2}
    job = job_of_processes(lab, 3, **knobs)
    assert set(job.schedule.batch_sizes) == {5 * 2 * 3}
    assert pass_samples(job) == [5, 5]
    assert pass_samples(replace(job, processes=4)) == [4, 4]


CARD = Card("a card", 24 * GIB, flops=1e12, link=1e9)


@pytest.fixture(scope="module")
def spec(lab: Lab) -> StepSpec:
    """The readings of a step, which take seconds."""
    return step_spec(job_of_processes(lab, 1), "FLOAT_32")


@pytest.fixture(scope="module")
def training(spec: StepSpec) -> Need:
    return memory.need(spec, Choice(1, OFF, 0))


def test_a_step_takes_the_mean_of_its_buckets(
    lab: Lab, spec: StepSpec, training: Need
) -> None:
    """A bucket of more frames has more tokens; each sample is a pass, twice a step."""
    knobs = {"batch_size": 3, "gradient_accumulation_steps": 2}
    job = job_of_processes(lab, 1, **knobs)
    by_bucket = computing_seconds(job, spec, training, CARD)
    a_pass = memory.seconds(training, 1, CARD)
    shares = [
        memory.relative_work(spec, job.spec.tokens(shape)) for shape in job.shapes
    ]
    assert sorted(shares)[0] < 0.9
    assert max(shares) == pytest.approx(1)
    expected = [2 * 3 * a_pass * share for share in shares]
    assert by_bucket == pytest.approx(expected)

    assert step_seconds(job, spec, training, CARD, "FLOAT_32") == pytest.approx(
        sum(weighted(job, expected))
    )


def weighted(job: Job, by_bucket: list[float]) -> list[float]:
    return [
        seconds * share for seconds, share in zip(by_bucket, job.shares, strict=True)
    ]


def test_a_step_waits_for_gradients_and_not_for_weights_that_come_in_time(
    lab: Lab, spec: StepSpec, training: Need
) -> None:
    job = job_of_processes(lab, 2, sharding="FULL")
    computing = sum(weighted(job, computing_seconds(job, spec, training, CARD)))
    seconds = {}
    for rate in (1e11, 1e3):
        card = replace(CARD, peer_link=rate)
        one, two = (
            step_seconds(job, spec, training, card, "FLOAT_32", cluster)
            for cluster in (None, Cluster(1, 2))
        )
        assert one == two
        sent = message_seconds_of(job, spec, training, "FLOAT_32", card, None)
        seconds[rate] = (one, sent)

    fast, sent = seconds[1e11]
    assert sent.beside < computing
    assert fast == pytest.approx(computing + sent.waiting)
    slow, sent = seconds[1e3]
    assert slow == sent.beside > computing + sent.waiting


def test_all_processes_fill_the_cache_together(lab: Lab, spec: StepSpec) -> None:
    conditions = [{"type": "suffix", "latent_frames": 2}]
    job = job_of_processes(lab, 1, conditions=conditions)
    spec = replace(spec, encoding_flops_per_pixel=1e6)
    size = cache_size(job)
    assert size.conditions.pixels > 0
    pixels = size.windows.pixels + size.conditions.pixels
    seconds = cache_seconds(job, spec, CARD)
    assert seconds == pytest.approx(pixels * 1e6 / (CARD.reached * 1e12 / 2))
    assert cache_seconds(job, spec, CARD, is_cpu=True) == seconds / 2
    several = job_of_processes(lab, 4, conditions=conditions)
    assert cache_seconds(several, spec, CARD) == pytest.approx(seconds / 4)


def begins(lines: tuple[str, ...]) -> list[str]:
    """What each remedy is about."""
    return [line.partition(" ")[0] for line in lines]


@pytest.mark.parametrize(
    ("phases", "begin"),
    [
        ((), ["the"]),
        (("encoding clips",), ["encoding"]),
        (("preview",), ["previews:", "weight_dtype=FLOAT_8"]),
        (("encoding text",), ["the", "text_encoder.weight_dtype=FLOAT_8"]),
        (("training",), ["training:", "weight_dtype=FLOAT_8"]),
    ],
)
def test_each_phase_without_room_has_its_remedies(
    phases: tuple[str, ...],
    begin: list[str],
    lab: Lab,
    spec: StepSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a card with a GiB beside the context, of which others need all."""
    monkeypatch.setattr(fitting, "step_spec_in_parts", lambda job, dtype: spec)
    job = job_of(lab)
    names = ("training", "encoding clips", "preview", "encoding text")
    parts = {name: (UNCHANGED, {"weights": GIB + (name in phases)}) for name in names}
    training = replace(need_of(end={"weights": 1}), host={"a": GIB, "b": 2 * GIB})
    result = Fit(0.0, training, parts, 2 * GIB, None, False)
    lines = remedies(result, spec, job, "FLOAT_32")
    assert begins(lines) == begin
    if not phases:
        assert "3.0 GiB" in lines[0]


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, ["training:", "weight_dtype=FLOAT_8"]),
        ({"transformer.weight_dtype": "NFLOAT_4"}, ["training:"]),
        ({"transformer.matmul_dtype": "INT_8"}, ["training:"]),
        (
            {"training_method": "FINE_TUNE"},
            ["training:", "training_method=LORA"],
        ),
        (
            {"training_method": "FINE_TUNE", "text_encoder.train": True},
            ["training:", "text_encoder.train=false", "training_method=LORA"],
        ),
        (
            {"training_method": "EMBEDDING"},
            [
                "training:",
                "weight_dtype=FLOAT_8",
                "text_encoder.weight_dtype=FLOAT_8",
            ],
        ),
    ],
)
def test_a_step_that_no_card_so_small_trains_has_remedies_of_its_method(
    knobs: dict[str, Any],
    expected: list[str],
    lab: Lab,
    spec: StepSpec,
    training: Need,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the readings of one step: which remedies there are depends on the config."""
    monkeypatch.setattr(fitting, "step_spec_in_parts", lambda job, dtype: spec)
    job = job_of(lab, knobs)
    phases = {"training": (UNCHANGED, training.device[training.worst])}
    result = Fit(0.0, training, phases, GIB, None, False)
    lines = remedies(result, spec, job, "FLOAT_32")
    several_cards = ["several"] if job.spec.splits_tokens else []
    assert begins(lines) == [*expected[:1], *several_cards, *expected[1:]]
    assert "video_config.frames" in lines[0]
    if several_cards:
        assert "context_parallel" in lines[1]


def test_a_fit_in_a_plan_has_its_bytes_hours_and_settings(lab: Lab) -> None:
    job = job_of_processes(lab, 1, steps=10_000)
    card = find_card("rtx 4090")
    result = fit(job, "FLOAT_32", 24 * GIB, card, spare=GIB)
    facts = to_json(result, job, "FLOAT_32", 5000, "card")
    spec = step_spec(job, "FLOAT_32")
    step = step_seconds(job, spec, result.training, card, "FLOAT_32")
    hours = 10_000 * step / 3600
    beside = hours * total_share(overhead(job))
    _, worst = result.phases[result.worst]

    device = facts.pop("device")
    host = facts.pop("host")
    assert facts == {
        "fits": True,
        "verdict": "fits",
        "hours": round(hours, 3),
        "hours_beside": round(beside, 3),
        "hours_encoding": round(cache_seconds(job, spec, card) / 3600, 3),
        "seconds_a_step": round(step, 4),
        "examples": [],
        "chosen": result.chosen,
        "processes": None,
        "micro_batch": result.training.choice.micro_batch,
        "remedies": [],
    }
    assert device == {
        "card": "RTX 4090",
        "measured": card.measured,
        "vram_bytes": 24 * GIB,
        "memory_from": "card",
        "spare_bytes": GIB,
        "unstreamed_bytes": result.unstreamed,
        "need_bytes": result.needed,
        "allocated_bytes": sum(worst.values()),
        "phase": result.worst,
        "parts": {
            part: size for part, size in memory.with_overhead(worst).items() if size
        },
        "phases": {
            name: {"way": way, **bytes_of(parts)}
            for name, (way, parts) in result.phases.items()
        },
    }
    assert host["parts"] == {
        "program": PROGRAM,
        **result.training.host,
        "checkpoint while it is written": 5000,
    }
    assert host["need_bytes"] == sum(host["parts"].values())


def test_without_a_rate_a_plan_has_no_hours_and_a_memory_has_two_examples(
    lab: Lab,
) -> None:
    job = job_of_processes(lab, 1, steps=10_000)
    unknown = ("hours", "hours_beside", "hours_encoding", "seconds_a_step")
    untimed = fit(job, "FLOAT_32", 16 * GIB, find_card("T4"))
    facts = to_json(untimed, job, "FLOAT_32")
    assert [facts[key] for key in unknown] == [None] * 4
    assert facts["examples"] == []

    result = fit(job, "FLOAT_32", 24 * GIB, None)
    facts = to_json(result, job, "FLOAT_32", memory_from="vram")
    assert [facts[key] for key in unknown] == [None] * 4
    assert facts["device"]["card"] is None
    assert facts["device"]["measured"] is None
    assert facts["device"]["memory_from"] == "vram"
    cards = [find_card("rtx 4090"), find_card("rtx 3090")]
    assert [row["card"] for row in facts["examples"]] == ["RTX 4090", "RTX 3090"]
    for card, row in zip(cards, facts["examples"], strict=True):
        spec = step_spec(job, "FLOAT_32")
        step = step_seconds(job, spec, result.training, card, "FLOAT_32")
        assert row["seconds_a_step"] == round(step, 4)
        assert row["hours"] == round(10_000 * step / 3600, 3)

    for unlike in (replace(result, fits=False), replace(result, vram=None)):
        assert to_json(unlike, job, "FLOAT_32")["examples"] == []


@pytest.mark.parametrize("mode", [OFF, CPU_OFFLOADED])
def test_a_setting_of_the_config_stays_as_it_is_without_a_card(
    mode: str, lab: Lab
) -> None:
    knobs = {"gradient_checkpointing": mode, "micro_batch_size": 1, "batch_size": 2}
    result = fit(job_of_processes(lab, 1, **knobs), "FLOAT_32", None, None)
    assert result.training.choice == Choice(1, mode, 0, accumulates=True)
    assert result.fraction == 0
    assert result.fits is None
    assert result.spare == 0
