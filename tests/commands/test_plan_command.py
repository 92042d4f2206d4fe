"""What is planned and chosen before a run: memory settings, noise levels, published
models without a network; and runs with blocks and inputs on the host, which are the
plain run, line by line and bit for bit.
"""

import gc
import json
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from tests.support.clips import noise, write_dataset
from tests.support.command_line import Bases, Patch, Printed, plan, run, train
from tests.support.interruptions import nth
from tests.support.out_of_memory import OUT_OF_MEMORY
from tests.support.run_processes import Make, Work, resume
from tests.support.run_results import assert_same_run, of_kind, same_tensors, state
from tests.support.tiny_networks import deepen
from videotune.cli.plan import show_plan
from videotune.cli.plan_noise_levels import ROWS, curve
from videotune.cli.plan_options import parse_vram
from videotune.cli.plan_verdict import time_text
from videotune.commands.plan import COLUMNS, levels, noise_levels
from videotune.commands.plan import plan as plan_run
from videotune.diffusion.timesteps import TimestepSampler
from videotune.errors import DONE, SKIPPED, DoesNotFit, VideotuneError
from videotune.files import read_json
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.latent_cache.encoder_failures import TextEncoderFull
from videotune.planner import fit as fitting
from videotune.planner import settings
from videotune.planner.denoiser_size import activations_at_most
from videotune.planner.fit import (
    MEMORY_KEYS,
    config_constraints,
    fit,
    spare_memory,
)
from videotune.planner.fit_facts import to_json
from videotune.planner.gpus import find_card
from videotune.planner.measure import FakeRun
from videotune.planner.memory import Constraints
from videotune.planner.read_step import step_spec
from videotune.planner.settings import fit_settings
from videotune.planner.step_spec import TILED, UNCHANGED, StepSpec
from videotune.runs.run_dir import read_run_config
from videotune.sampling.pipeline import RenderedSample, SampleLatents
from videotune.text import memory_size
from videotune.trainer import cache_filling
from videotune.trainer.build import open_models
from videotune.validation import decoding


def opened(overrides: Overrides) -> Any:
    return open_job(*resolve_config(overrides))


@pytest.fixture
def small(overrides: Make) -> Any:
    """The job of a run of ten steps of two samples."""
    return opened(overrides("steps=10", "batch_size=2"))


@pytest.mark.parametrize(
    ("sets", "settings", "origins"),
    [
        ((), [2, "OFF", 0.0], ["plan"] * 3),
        (
            ("gradient_checkpointing=ON", "micro_batch_size=1"),
            [1, "ON", 0.0],
            ["user", "user", "plan"],
        ),
    ],
)
def test_on_a_cpu_nothing_is_saved_and_the_choice_is_recorded_as_planned(
    sets: tuple[str, ...], settings: list[Any], origins: list[str], work: Work
) -> None:
    chosen = work.overrides("steps=1", "batch_size=2", *sets)
    job = opened(chosen)
    planned = to_json(fit(job, "FLOAT_32", None, None), job, "FLOAT_32")["chosen"]
    assert train(chosen, work.run) == DONE
    kept = read_run_config(work.run)
    assert (
        [kept["settings"][key] for key in MEMORY_KEYS]
        == settings
        == [planned[key] for key in MEMORY_KEYS]
    )
    assert [kept["origins"][key] for key in MEMORY_KEYS] == origins


def test_where_the_host_is_short_blocks_are_computed_again(
    small: Any, monkeypatch: Patch
) -> None:
    assert fit_settings(small).config.gradient_checkpointing == "OFF"
    memory = SimpleNamespace(available=10**6, total=10**6)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert fit_settings(small).config.gradient_checkpointing == "ON"


def test_nothing_is_chosen_without_a_base_model_or_an_open_setting(
    small: Any, overrides: Make
) -> None:
    named = ("micro_batch_size=1", "gradient_checkpointing=ON")
    closed = opened(overrides("steps=1", *named, "layer_offload_fraction=0"))
    assert fit_settings(closed) is closed
    without_base = replace(small, base=None)
    assert fit_settings(without_base) is without_base


def test_a_resume_keeps_what_was_chosen_and_replan_chooses_anew(
    work: Work, monkeypatch: Patch
) -> None:
    run = work.copy("steps=2", "micro_batch_size=1")
    monkeypatch.setattr(settings, "host_checkpointing", lambda job: "ON")
    assert resume(run, "steps=3") == DONE
    assert read_run_config(run)["settings"]["gradient_checkpointing"] == "OFF"
    assert resume(run, "steps=4", replan=True) == DONE
    assert read_run_config(run)["settings"]["gradient_checkpointing"] == "ON"
    assert (
        "replanned: gradient_checkpointing: 'OFF' -> 'ON'"
        in of_kind(run, "resume")[-1]["changes"]
    )
    assert read_run_config(run)["origins"]["micro_batch_size"] == "user"


def test_a_memory_may_have_its_unit() -> None:
    for text in ("16", "16 GB", "16GB", " 16 gib "):
        assert parse_vram(text) == 16
    assert parse_vram("7.5") == 7.5
    for text in ("", "0", "-16", "16 MB", "many"):
        with pytest.raises(VideotuneError, match="not a number of GB"):
            parse_vram(text)


def test_a_plan_for_a_card_begins_with_its_verdict(
    overrides: Make, capsys: Printed
) -> None:
    settings = overrides("steps=10", "batch_size=2")
    assert plan(settings, card="rtx 3060 12gb", verbose=True) == DONE
    printed = capsys.readouterr().out
    assert printed.startswith("it fits RTX 3060 12GB: ")
    assert "less than a minute" in printed.splitlines()[0]
    for text in (
        "memory of the device, calculated",
        "host memory:",
        "calculated for RTX 3060",
        "cache in ",
        "encoding ",
    ):
        assert text in printed, text
    assert plan(settings, vram=1.0) == SKIPPED, "a card must have a GiB for CUDA itself"
    assert capsys.readouterr().out.startswith("it does not fit 1 GB: ")
    assert plan(settings, card="t4") == DONE
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.endswith("; no hours, because the rate of T4 is not known")
    with pytest.raises(VideotuneError, match="read from its base model"):
        plan(
            Overrides(family="wan", data=settings.data, sets=("resolution=32x32",)),
            vram=8,
        )


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (0.02, "5 min"),
        (0.52, "30 min"),
        (0.99, "1 hour"),
        (1.57, "1.5 hours"),
        (4.9, "5 hours"),
        (1200.4, "1,200 hours"),
    ],
)
def test_hours_of_a_card_that_was_not_measured_are_round(
    hours: float, text: str
) -> None:
    assert time_text(hours, 2.634, is_rough=True) == f"about {text} (2.6 s a step)"
    assert "2.63 s a step" in time_text(hours, 2.634)


def test_a_host_that_is_too_small_is_said_by_the_verdict_and_both_forms(
    overrides: Make, capsys: Printed
) -> None:
    planned = plan_run(overrides("steps=10"), card="rtx 3060 12gb")
    needed = planned.plan["host"]["need_bytes"]
    planned.plan["host"]["total_bytes"] = needed - 1
    needed_words = memory_size(needed)
    for is_here, expected in (
        (True, f"it does not fit this machine: the run keeps {needed_words} in"),
        (False, f"the card's computer needs {needed_words} of memory"),
    ):
        result = replace(planned, is_here=is_here)
        for verbose in (False, True):
            show_plan(result, verbose=verbose)
            printed = " ".join(capsys.readouterr().out.split())
            assert expected in printed
            assert ("which is too little" in printed) == is_here
            assert printed.startswith("it fits RTX 3060 12GB: ") != is_here


def test_ways_are_compared_if_they_are_asked_for(
    overrides: Make, capsys: Printed
) -> None:
    settings = overrides("steps=10", "batch_size=2")
    assert plan(settings, card="rtx 3060 12gb") == DONE
    assert "ways of computing a step" not in capsys.readouterr().out
    assert plan(settings, card="rtx 3060 12gb", ways=True) == DONE
    printed = capsys.readouterr().out
    assert "ways of computing a step" in printed
    for text in ("IN_PARTS", "CPU_OFFLOADED"):
        assert text in printed, text
    assert "INT_8" not in printed, "no layer of the tiny model is wide enough"


def test_without_a_gpu_the_plan_is_for_the_cpu(
    overrides: Make, capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(
        "videotune.commands.plan.local_device", lambda: torch.device("cpu")
    )
    settings = overrides("steps=10", "batch_size=2")
    result = plan_run(settings)
    assert 0 < (result.cpu_seconds or 0) < 60, "ten steps of a tiny model"
    twice = plan_run(replace(settings, sets=(*settings.sets, "steps=40")))
    assert (twice.cpu_seconds or 0) > (result.cpu_seconds or 0)
    assert plan_run(settings, card="rtx 3060 12gb").cpu_seconds is None
    assert plan(settings) == DONE
    assert capsys.readouterr().out.startswith("no GPU here, so it trains on the CPU")


def test_without_a_card_the_plan_is_for_the_cards_of_the_preset(
    overrides: Make, capsys: Printed
) -> None:
    """On a machine without a card, and never for a preset that is for any card."""
    settings = replace(
        overrides("steps=10", "batch_size=2"), preset="wan 2.1 1.3B LoRA 16GB"
    )
    assert plan(settings) == DONE
    assert capsys.readouterr().out.startswith("it fits 16 GB, the preset's card: ")
    device = plan_run(settings).plan["device"]
    assert (device["vram_bytes"], device["memory_from"]) == (16 << 30, "preset")
    facts = plan_run(settings, vram=24).plan
    assert facts["device"]["memory_from"] == "vram"
    assert plan_run(settings, card="24 GB").plan["device"] == facts["device"]
    assert facts["hours"] is None
    fast, slow = facts["examples"]
    assert (slow["card"], fast["card"]) == ("RTX 3090", "RTX 4090")
    named = plan_run(settings, vram=24, card="rtx 3090").plan
    assert (named["hours"], named["examples"]) == (slow["hours"], [])
    for vram, hours in ((24, "RTX 3090; for your card"), (25, "such as --card")):
        assert plan(settings, vram=vram) == DONE
        verdict = capsys.readouterr().out.partition("\n\n")[0]
        assert hours in " ".join(verdict.split())
    toy = plan_run(replace(settings, preset="toy")).plan
    assert (toy["verdict"], toy["device"]["memory_from"]) == (None, None)


def test_a_plan_leaves_room_and_is_tight_where_it_cannot(small: Any) -> None:
    """GiB by GiB: as a card fits that a desktop leaves three quarters of a GiB less."""
    needed = fit(small, "FLOAT_32", None, None).needed
    spare = spare_memory(8 << 30, is_free=False)
    assert spare == 768 << 20
    assert spare_memory(80 << 30, is_free=False) == 4 << 30, "5 % of a large card"
    assert spare_memory(8 << 30, is_free=True) < spare, "the desktop is counted already"

    roomy = fit(small, "FLOAT_32", needed + spare, None, spare=spare)
    assert (roomy.verdict, roomy.needed) == ("fits", needed)
    tight = fit(small, "FLOAT_32", needed, None, spare=spare)
    assert (tight.verdict, tight.fits, tight.needed) == ("tight", True, needed)
    short = fit(small, "FLOAT_32", 1 << 30, None, spare=spare)
    assert (short.verdict, short.fits) == ("does not fit", False)


def test_the_parts_of_a_plan_add_up_to_what_it_needs(overrides: Make) -> None:
    for vram in (None, 1.01, 24):
        device = plan_run(overrides("steps=10"), vram=vram).plan["device"]
        assert sum(device["parts"].values()) == device["need_bytes"]
        assert device["need_bytes"] > device["allocated_bytes"]


def test_a_plan_is_short_and_as_wide_as_the_terminal(
    overrides: Make, capsys: Printed, monkeypatch: Patch
) -> None:
    """Also the whole of it, whose tables break no name."""
    monkeypatch.setenv("COLUMNS", "80")
    settings = overrides("steps=10", "batch_size=2", "learning_rate=1e-4")
    assert plan(settings, card="rtx 3060 12gb") == DONE
    short = capsys.readouterr().out.splitlines()
    assert len(short) <= 12, "\n".join(short)
    assert plan(settings, card="rtx 3060 12gb", verbose=True) == DONE
    long = capsys.readouterr().out.splitlines()
    assert len(long) > len(short)
    assert max(map(len, [*short, *long])) <= 80


def test_a_price_of_the_hour_is_that_of_all_hours(
    overrides: Make, capsys: Printed
) -> None:
    settings = overrides("steps=3000", "batch_size=2")
    options = {"card": "rtx 3060 12gb", "as_json": True}
    totals = []
    for price in (100.0, 300.0):
        assert plan(settings, price=price, **options) == DONE
        facts = json.loads(capsys.readouterr().out)
        assert facts["price"]["an_hour"] == price
        totals.append(facts["price"]["total"])
    hours = facts["hours"] + facts["hours_beside"] + facts["hours_encoding"]
    assert totals == [
        pytest.approx(100 * hours, abs=0.01),
        pytest.approx(300 * hours, abs=0.01),
    ]

    assert plan(settings, price=100.0, card="rtx 3060 12gb") == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{totals[0]:.2f} at 100 an hour" in printed
    # Without a card there are no hours.
    with pytest.raises(VideotuneError, match="--price"):
        plan(settings, price=100.0)


def test_a_plan_of_many_views_names_fewer_steps_and_those_of_init(
    overrides: Make, capsys: Printed
) -> None:
    """At the steps that it names, the windows are seen as often as it says."""
    sets = ("batch_size=2", "epochs=null")
    assert plan(overrides("steps=400", *sets)) == DONE
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    of_init = re.search(
        r"--set steps=([\d,]+) shows each 45 times.*"
        r"`videotune init` chooses ([\d,]+) to ([\d,]+)",
        printed,
    )
    assert of_init is not None
    named = [("45", of_init[1]), ("30", of_init[2]), ("45", of_init[3])]
    for views, steps in named:
        settings = overrides(f"steps={steps}", *sets)
        facts = plan_run(settings).plan["views"]["per_window"]
        assert facts["max"] == int(views)

    assert plan(overrides("steps=10", *sets)) == DONE
    assert "fewer steps" not in capsys.readouterr().out


def test_at_a_low_rate_the_steps_follow_the_views_that_are_said_to_be_safe(
    overrides: Make, capsys: Printed
) -> None:
    sets = ("batch_size=2", "epochs=null", "learning_rate=2e-5")
    assert plan(overrides("steps=400", *sets)) == DONE
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    named = re.search(r"--set steps=([\d,]+) shows each 30 times", printed)
    assert named is not None
    assert "up to 20-30 views" in printed
    assert "45 times" not in printed

    settings = overrides(f"steps={named[1].replace(',', '')}", *sets)
    assert plan_run(settings).plan["views"]["per_window"]["max"] == 30
    assert plan(settings) == DONE
    assert "fewer steps" not in capsys.readouterr().out


def test_a_batch_far_larger_than_the_clips_is_not_mended_by_fewer_steps(
    overrides: Make, capsys: Printed
) -> None:
    assert plan(overrides("steps=10", "batch_size=900", "epochs=null")) == DONE
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "with 900 samples a step; make the batch smaller" in printed
    assert "steps=1 " not in printed


def test_the_disk_is_that_of_the_run_folder(
    overrides: Make, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The folder itself does not exist yet."""
    asked = []
    real_usage = shutil.disk_usage

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return real_usage(path)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    settings = overrides("steps=10", "batch_size=2")
    plan_run(settings, out=tmp_path / "disk" / "run")
    (tmp_path / "disk").mkdir()
    plan_run(settings, out=tmp_path / "disk" / "run")
    plan_run(settings, out="run")
    assert asked == [tmp_path, tmp_path / "disk", Path.cwd()]


@pytest.fixture(scope="module")
def fine_tuning(overrides: Make) -> StepSpec:
    """The readings of a step that trains all weights."""
    sets = ("steps=1", "batch_size=4", "training_method=FINE_TUNE")
    return step_spec(opened(overrides(*sets)), "FLOAT_32")


@pytest.mark.parametrize(
    ("sets", "forced"),
    [
        (
            ("optimizer.name=LION", "optimizer.step_in_backward=true"),
            Constraints(4, None, 0),
        ),
        (("optimizer.name=LION",), Constraints(None, None, 0)),
        (("training_method=LORA", "optimizer.name=LION"), Constraints()),
        ((), Constraints()),
    ],
)
def test_a_plan_chooses_nothing_that_the_run_would_refuse(
    overrides: Make,
    sets: tuple[str, ...],
    forced: Constraints,
    fine_tuning: StepSpec,
    monkeypatch: Patch,
) -> None:
    """By the readings of one step: what is refused depends on the config alone."""
    monkeypatch.setattr(fitting, "step_spec", lambda job, dtype: fine_tuning)
    job = opened(
        overrides("steps=1", "batch_size=4", "training_method=FINE_TUNE", *sets)
    )
    assert config_constraints(job.config, 2, 4) == forced
    found = fit(job, "FLOAT_32", 10**6, None)
    assert not found.fits, "so that all that may be chosen was chosen"
    assert found.training.choice.micro_batch == (forced.micro_batch or 1)


def test_tiles_are_read_only_where_nothing_else_fits(overrides: Make) -> None:
    job = opened(
        overrides(
            "steps=1", "sample_after=1", "sample.resolution=64x64", "sample.frames=9"
        )
    )
    roomy = fit(job, "FLOAT_32", 1 << 40, None)
    assert roomy.phases["preview"][0] == UNCHANGED
    assert TILED not in step_spec(job, "FLOAT_32").other_phases["preview"]
    assert fit(job, "FLOAT_32", 10**6, None).phases["preview"][0] == TILED
    assert TILED in step_spec(job, "FLOAT_32").other_phases["preview"], "remembered"


def test_what_does_not_fit_is_reported_with_remedies(overrides: Make) -> None:
    named = (
        "gradient_checkpointing=OFF",
        "layer_offload_fraction=0",
        "micro_batch_size=4",
    )
    job = opened(overrides("steps=10", "batch_size=4", *named))
    whole = fit(job, "FLOAT_32", None, None)
    assert whole.fits is None
    short = fit(job, "FLOAT_32", whole.training.needed - 1, find_card("rtx 3060 12gb"))
    assert short.fits is False
    assert short.chosen == {
        "micro_batch_size": 4,
        "gradient_checkpointing": "OFF",
        "layer_offload_fraction": 0.0,
    }
    assert any(
        "the settings that need least (micro_batch_size=1 " in line
        for line in short.remedies
    )
    facts = to_json(short, job, "FLOAT_32")
    assert facts["device"]["phase"] in facts["device"]["phases"]
    assert facts["hours"] is not None
    assert any(
        "take a larger card, fewer frames" in line
        for line in fit(job, "FLOAT_32", 2**30, None).remedies
    )


def test_quantized_weights_are_named_with_what_they_save_and_never_chosen(
    small: Any, overrides: Make
) -> None:
    short = fit(small, "FLOAT_32", 2**30, None)
    (line,) = (
        line for line in short.remedies if line.startswith("weight_dtype=FLOAT_8")
    )
    net = open_models(small.spec, small.base, small.config).denoiser()
    numbers = sum(
        m.weight.numel() for m in net.blocks.modules() if isinstance(m, torch.nn.Linear)
    )
    assert (
        f"the denoiser's take {memory_size(round(numbers * (4 - 1 - 4 / 128)))} less"
        in line
    )
    assert "weight_dtype" not in short.chosen
    rounded = opened(overrides("steps=10", "batch_size=2", "weight_dtype=NFLOAT_4"))
    assert not any(
        "weight_dtype" in line
        for line in fit(rounded, "FLOAT_32", 2**30, None).remedies
    )
    saved = [
        fit(one, "FLOAT_32", None, None).training.device["end"]["weights"]
        for one in (small, rounded)
    ]
    assert saved[0] > saved[1], "and the plan knows"


def test_on_a_card_settings_are_chosen_for_it_or_the_run_is_refused(
    small: Any, monkeypatch: Patch
) -> None:
    """As on a CUDA machine whose card has so many bytes."""
    monkeypatch.setattr(settings, "local_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(settings, "dtype_name", lambda config: "FLOAT_32")
    monkeypatch.setattr(
        settings, "requested_card", lambda vram, name: (80 * 10**9, None)
    )
    assert [getattr(fit_settings(small).config, key) for key in MEMORY_KEYS] == [
        2,
        "OFF",
        0.0,
    ]
    monkeypatch.setattr(settings, "requested_card", lambda vram, name: (10**6, None))
    with pytest.raises(
        DoesNotFit, match=r"this run needs .* and the card has 977 KiB free:\n"
    ):
        fit_settings(small)


@pytest.mark.parametrize("is_tight", [True, False])
def test_the_line_on_memory_says_whether_it_is_tight(
    small: Any, is_tight: bool, monkeypatch: Patch, capsys: Printed
) -> None:
    monkeypatch.setattr(settings, "local_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(settings, "dtype_name", lambda config: "FLOAT_32")
    monkeypatch.setattr(settings, "surely_fits", lambda job, vram: False)
    needed = settings.fit(small, "FLOAT_32", 80 * 10**9, None, 1 << 40).needed
    card = needed + (1 if is_tight else 80 * 10**9)
    monkeypatch.setattr(settings, "requested_card", lambda vram, name: (card, None))
    fit_settings(small)
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if "memory: " in line
    ]
    assert ("tight" in line) == is_tight


@pytest.mark.parametrize(
    ("driver", "whole", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 80 << 30, "H100"),
        ("NVIDIA GeForce RTX 3060", 12 << 30, "RTX 3060 12GB"),
        ("a card of tomorrow", 48 << 30, None),
    ],
)
def test_the_plan_is_for_the_card_in_use_and_what_is_free_of_it(
    driver: str, whole: int, name: str | None, monkeypatch: Patch
) -> None:
    """The second of two cards, on which another program holds 2 GiB and this one 1 GiB."""
    facts = {
        "get_memory_info": (whole - (3 << 30), whole),
        "memory_reserved": 1 << 30,
        "get_device_name": driver,
    }
    for asked, answer in facts.items():
        answers, owner = (
            {1: answer},
            torch.cuda if asked == "get_device_name" else torch.accelerator,
        )
        monkeypatch.setattr(
            owner, asked, lambda device, answers=answers: answers[device.index]
        )
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available: torch.device("cuda"),
    )
    monkeypatch.setenv("LOCAL_RANK", "1")
    memory, card = fitting.requested_card(None, None)
    assert (memory, card and card.name) == (whole - (2 << 30), name)


# ---- another way where there is no room


def test_a_preview_without_room_offloads_the_denoiser_and_then_decodes_in_tiles(
    work: Work, monkeypatch: Patch, capsys: Printed
) -> None:
    """The run is the same to the bit, and so is a preview with the denoiser offloaded."""
    real, seen, tries = decoding.render_samples, [], []

    def short(family: Any, latents: Any, tiled: bool = False) -> list[RenderedSample]:
        tries.append(tiled)
        if len(tries) <= most:
            raise OUT_OF_MEMORY
        seen.append(real(family, latents, tiled))
        return seen[-1]

    monkeypatch.setattr(decoding, "render_samples", short)
    for most, wanted in ((0, [False]), (1, [False, False]), (2, [False, False, True])):
        tries.clear()
        run = work.tmp / f"run{most}"
        assert (
            train(
                work.overrides(
                    "steps=2", "sample_after=1", "samples=1", "sample.steps=1"
                ),
                run,
            )
            == DONE
        )
        assert tries[: len(wanted)] == wanted
        assert len(of_kind(run, "sample")) == 3
        assert same_tensors(state(run, 2), state(work.tmp / "run0", 2))
    assert np.array_equal(seen[0][0].frames, seen[3][0].frames), (
        "step 0, whole and with the denoiser offloaded"
    )
    assert "decoded in tiles" in capsys.readouterr().err


def test_a_text_encoder_without_room_is_streamed_and_encodes_the_same(
    work: Work, monkeypatch: Patch, capsys: Printed
) -> None:
    fill, met, plain, run = (
        cache_filling.encode_missing,
        nth(1),
        work.finished("steps=2"),
        work.run,
    )

    first_encoders = []

    def short(family: Any, *more: Any, **named: Any) -> Any:
        if met():
            text_encoder = family.part("text_encoder")
            first_encoders.append(weakref.ref(text_encoder))
            raise TextEncoderFull("no room")
        gc.collect()
        assert first_encoders[0]() is None, "its memory is what the second try needs"
        return fill(family, *more, **named)

    monkeypatch.setattr(cache_filling, "encode_missing", short)
    assert (
        train(work.overrides("steps=2", f"cache_dir={work.tmp / 'cache'}"), run) == DONE
    )
    printed = capsys.readouterr().err
    assert "the text encoder does not fit the device" in printed
    assert "its blocks are now streamed from host memory" in printed
    assert_same_run(run, plain, 2)
    assert (
        read_json(plain / "config.json")["data"]
        == read_json(run / "config.json")["data"]
    )


@pytest.mark.parametrize("family", ["wan", "cogvideox"])
def test_without_a_fake_step_the_bound_on_activations_holds(
    family: str, overrides: Make
) -> None:
    """Of what a step really keeps, OFF, by its reading: at least so much is set aside
    for it.
    """
    job = opened(
        overrides(
            "steps=1", "batch_size=2", "video_config.target_fps=16", base=(family,)
        )
    )
    seen = FakeRun(open_models(job.spec, job.base, job.config), job.config)
    depths = tuple(seen.depths.items())
    kept = max(
        parts.get("activations", 0)
        for parts in seen.step(job.shapes[0], 2, "OFF", depths).phases.values()
    )
    assert kept < activations_at_most(job, 4) < 30 * kept


def test_a_plan_that_needs_more_than_the_disk_has_ends_with_2(
    overrides: Make, capsys: Printed
) -> None:
    many_saves = overrides("steps=1000000000", "save_every=1")
    # Also where the plan is for a card that this machine lacks.
    for options in ({}, {"card": "rtx 3060 12gb"}):
        assert plan(many_saves, **options) == SKIPPED
        assert "too much" in capsys.readouterr().out
    assert plan(overrides("steps=1000000000", "save_every=1", "save_keep=2")) == DONE


def test_bands_density_and_validation_levels_are_those_of_the_distribution() -> None:
    settings = Overrides(
        family="wan",
        sets=("timestep_distribution=BETA", "timestep_alpha=3", "timestep_shift=2"),
    )
    facts = noise_levels(settings)
    (one,) = facts["distributions"]
    ts = TimestepSampler("BETA", 2.0, alpha=3.0)
    drawn = ts.draw((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)
    counted = drawn.mul(9).long().clamp(max=8).bincount(minlength=9) / len(drawn)
    assert one["bands"] == pytest.approx(counted.tolist(), abs=1e-3)
    assert sum(one["density"]) / COLUMNS == pytest.approx(1, abs=1e-3)
    assert facts["validation"] == pytest.approx(ts.quantiles(9).tolist(), abs=1e-4)


def test_of_two_experts_each_has_its_share(tiny_bases: Bases, capsys: Printed) -> None:
    """37 % at shift 5 for the one above 0.875."""
    sets = (
        f"base_model_name={tiny_bases('wan', 't2v-a14b')}",
        "timestep_distribution=LOGIT_NORMAL",
        "timestep_shift=5",
    )
    plan(Overrides(sets=sets), timesteps=True)
    out = capsys.readouterr().out
    assert "noise levels: LOGIT_NORMAL, shift 5" in out
    assert "experts: high 36.8%, low 63.2%" in out


def test_a_shift_by_resolution_has_a_curve_for_each_bucket() -> None:
    resolved, spec, _ = resolve_config(Overrides(family="wan"))
    spec = replace(spec, shift_by_tokens=(100, 0.5, 1000, 1.5))
    facts = levels(
        spec, resolved.config, {"5x32x32": (100, 0.25), "9x64x64": (1000, 0.75)}
    )
    small, large = facts["distributions"]
    assert (small["bucket"], small["share_of_steps"], small["shift"]) == (
        "5x32x32",
        0.25,
        1.6487,
    )
    assert large["shift"] == 4.4817
    assert large["bands"][8] > small["bands"][8]


def test_the_curve_is_as_high_as_the_density() -> None:
    lines = curve([0.0, 1.0, 2.0])
    assert len(lines) == ROWS
    assert [sum(line[i] == "█" for line in lines) for i in range(3)] == [
        0,
        ROWS // 2,
        ROWS,
    ]


@pytest.fixture
def _offline(tmp_path: Path, monkeypatch: Patch) -> None:
    """The Hub may not be asked, and its cache is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def film(tmp_path: Path) -> Path:
    return write_dataset(
        tmp_path / "clips", {"a.mp4": noise(40, 96, 160, seed=1)}, {}, fps=16
    )


@pytest.mark.usefixtures("_offline")
def test_check_and_plan_answer_for_a_preset(film: Path, capsys: Printed) -> None:
    """What a published model needs of a card: tests/models/test_manifests.py."""
    preset = "wan 2.1 1.3B LoRA 16GB"
    for command, options in (("check", {}), ("plan", {"timesteps": True})):
        assert run(command, film, preset=preset, **options) == DONE
        assert "come with videotune" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "options", "named"),
    [
        (
            "train",
            {"preset": "wan 2.1 1.3B LoRA 16GB", "out": "run"},
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        ),
        ("plan", {"base": "somebody/other"}, "somebody/other"),
    ],
)
@pytest.mark.usefixtures("_offline")
def test_a_model_that_is_not_here_is_named(
    command: str, options: dict[str, str], named: str, tmp_path: Path, film: Path
) -> None:
    with pytest.raises(VideotuneError, match=named):
        run(command, film, **options)
    assert not (tmp_path / "run").exists()


# ---- streamed runs


@pytest.fixture(scope="module")
def deep(
    small_clips: Path, tiny_bases: Bases, tmp_path_factory: pytest.TempPathFactory
) -> Make:
    """Words of a run of four steps on a tiny base of six blocks; everything that a run
    does happens in it.
    """
    folder = tmp_path_factory.mktemp("deep")
    bases = {
        variant: deepen(tiny_bases("wan", variant), folder / variant, blocks=4)
        for variant in ("t2v", "t2v-a14b")
    }
    fixed = (
        f"cache_dir={folder / 'cache'}", "resolution=32x32", "steps=4", "save_every=2", "warmup_steps=0", "samples=1",
        "sample_after=4", "sample.steps=2", "sample.guidance=1", "validate_every=4",
        "dataloader_threads=0", "learning_rate=0.001",
    )  # fmt: skip

    def make(*sets: str, variant: str = "t2v") -> Overrides:
        return Overrides(
            data=str(small_clips),
            sets=(*fixed, f"base_model_name={bases[variant]}", *sets),
        )

    return make


@pytest.fixture
def decoded(monkeypatch: Patch) -> list[torch.Tensor]:
    """The latents of every preview, in order: the encoder of the files themselves does
    not give the same bits twice.
    """
    seen: list[torch.Tensor] = []

    def keep(family: Any, samples: list[SampleLatents], tiled: bool) -> Any:
        seen.extend(sample.video for sample in samples)
        return render(family, samples, tiled)

    render = decoding.render_samples
    monkeypatch.setattr(decoding, "render_samples", keep)
    return seen


def validations(run: Path) -> list[Any]:
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "time")}
        for line in of_kind(run, "validation")
    ]


RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lora": ("t2v", ("lora.dropout=0.2", "ema.decay=0.9")),
    "full": ("t2v", ("training_method=FINE_TUNE", "ema.decay=0.9")),
    "full-bf16": (
        "t2v",
        (
            "training_method=FINE_TUNE",
            "train_dtype=BFLOAT_16",
            "sample_after=0",
            "validate_every=0",
        ),
    ),
    "two-experts": ("t2v-a14b", ("expert_period=2", "validate_every=0")),
    "new-tokens": ("t2v", ("training_method=EMBEDDING", "learning_rate=0.01")),
    "one-expert-full": (
        "t2v-a14b",
        ("training_method=FINE_TUNE", "experts=low", "validate_every=0"),
    ),
}
STREAMED = ("layer_offload_fraction=0.5", "gradient_checkpointing=CPU_OFFLOADED")


LONG = ("full-bf16", "one-expert-full")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in RUNS]
)
def test_a_streamed_run_is_the_plain_run(
    name: str, deep: Make, tmp_path: Path, decoded: list[torch.Tensor]
) -> None:
    """Losses, checkpoints, averages, previews and validation."""
    variant, sets = RUNS[name]
    plain, streamed = tmp_path / "plain", tmp_path / "streamed"
    assert train(deep(*sets, variant=variant), plain) == DONE
    count = len(decoded)
    assert train(deep(*sets, *STREAMED, variant=variant), streamed) == DONE
    assert_same_run(streamed, plain, 4)
    assert validations(streamed) == validations(plain)
    assert count == (0 if "sample_after=0" in sets else 2)
    assert len(decoded) == 2 * count
    assert all(
        torch.equal(one, other)
        for one, other in zip(decoded[:count], decoded[count:], strict=True)
    )


@pytest.mark.parametrize(
    ("sets", "first", "then"),
    [
        (("lora.dropout=0.2", "ema.decay=0.9"), (), STREAMED),
        (
            ("training_method=FINE_TUNE",),
            ("layer_offload_fraction=1",),
            ("layer_offload_fraction=0",),
        ),
    ],
)
def test_a_resume_turns_streaming_on_and_off(
    sets: tuple[str, ...],
    first: tuple[str, ...],
    then: tuple[str, ...],
    deep: Make,
    tmp_path: Path,
) -> None:
    sets, plain, run = (
        (*sets, "sample_after=0", "validate_every=0"),
        tmp_path / "plain",
        tmp_path / "run",
    )
    assert train(deep(*sets), plain) == DONE
    assert train(deep(*sets, "steps=2", *first), run) == DONE
    assert resume(run, "steps=4", *then) == DONE
    assert_same_run(run, plain, 4)


@pytest.mark.parametrize(("share", "names_total"), [(0.1, False), (3.0, True)])
def test_the_short_plan_names_the_time_in_all_where_steps_are_not_most_of_it(
    share: float, names_total: bool
) -> None:
    """Of a card and of a CPU, with what is encoded; without hours nothing is known."""
    from videotune.cli.plan_times import total_text
    from videotune.commands.plan import PlanResult

    facts: dict[str, Any] = {
        "hours": 2.0,
        "hours_encoding": 0.5,
        "beside": {"previews": {"share": share}, "readings": None},
        "device": {"measured": "2026-01-01"},
    }
    for result in (
        PlanResult(facts, None),
        PlanResult(
            facts | {"hours": None}, None, cpu_seconds=7200, cpu_cache_seconds=1800
        ),
    ):
        text = total_text(result)
        assert bool(text) == names_total
        assert ("8 h" in text) == names_total
    assert total_text(PlanResult(facts | {"hours": None}, None)) == ""
