"""What is left open of memory is settled before a run begins, written down, kept by a resume, and chosen anew when asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.commands.safety_kit import Make, equal, facts_of, of_kind, state
from tests.shell import plan, train
from videotune.console import size
from videotune.errors import DONE, SKIPPED, DoesNotFit, VideotuneError
from videotune.files import read_json
from videotune.planner import fit as fitting
from videotune.planner.cards import card
from videotune.planner.fake_run import FakeRun
from videotune.planner.fit import OPEN, activations_at_most, fit, fit_settings, fixed, peak, planned_bytes, to_json
from videotune.planner.memory import PLAIN, TILED, Fixed
from videotune.planner.memory_plan import step_spec
from videotune.trainer import cache_filling
from videotune.trainer.components import open_models
from videotune.trainer.resolve_config import Overrides, resolve_config
from videotune.trainer.resume import Resume
from videotune.trainer.run_dir import read_run_config
from videotune.trainer.run_spec import open_job
from videotune.validation import decoding


def opened(words: Overrides) -> Any:
    return open_job(*resolve_config(words))


def test_on_a_cpu_all_stays_where_it_is_and_that_is_written_down(overrides: Make, tmp_path: Path) -> None:
    assert train(overrides("steps=1", "batch_size=2", "lora.rank=2"), tmp_path / "run") == DONE
    kept = read_run_config(tmp_path / "run")
    assert [kept["settings"][key] for key in OPEN] == [2, "OFF", 0.0]
    assert {kept["origins"][key] for key in OPEN} == {"plan"}
    named = overrides("steps=1", "batch_size=2", "gradient_checkpointing=ON", "micro_batch_size=1")
    assert train(named, tmp_path / "named") == DONE
    kept = read_run_config(tmp_path / "named")
    assert [kept["settings"][key] for key in OPEN] == [1, "ON", 0.0]
    assert [kept["origins"][key] for key in OPEN] == ["user", "user", "plan"]


def test_where_the_host_is_short_blocks_are_computed_again(overrides: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job = opened(overrides("steps=1"))
    assert fit_settings(job).config.gradient_checkpointing == "OFF"
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 10**6, "total": 10**6}))
    assert fit_settings(job).config.gradient_checkpointing == "ON"


def test_a_resume_keeps_what_was_chosen_and_replan_chooses_anew(
    overrides: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert train(overrides("steps=2", "lora.rank=2", "micro_batch_size=1"), run) == DONE
    monkeypatch.setattr(fitting, "on_host", lambda job: dict(zip(OPEN, (1, "ON", 0.0), strict=True)))
    assert train(Overrides(sets=("steps=3",)), run, resume=Resume()) == DONE
    assert read_run_config(run)["settings"]["gradient_checkpointing"] == "OFF"
    assert train(Overrides(sets=("steps=4",)), run, resume=Resume(replan=True)) == DONE
    assert read_run_config(run)["settings"]["gradient_checkpointing"] == "ON"
    assert "replanned: gradient_checkpointing: 'OFF' -> 'ON'" in of_kind(run, "resume")[-1]["changes"]
    assert read_run_config(run)["origins"]["micro_batch_size"] == "user"


def test_a_plan_for_a_card(overrides: Make, capsys: pytest.CaptureFixture[str]) -> None:
    words = overrides("steps=10", "batch_size=2")
    assert plan(words, card="rtx 3060 12gb") == DONE
    told = capsys.readouterr().out
    for text in ("memory of the device, calculated", "it fits RTX 3060", "host memory:", "calculated for RTX 3060"):
        assert text in told, text
    assert plan(words, as_json=True, vram=1.0) == SKIPPED, "a card must have a GiB for CUDA itself"
    with pytest.raises(VideotuneError, match="read from its base model"):
        plan(Overrides(family="wan", data=words.data, sets=("resolution=32x32",)), vram=8)


@pytest.mark.parametrize(
    ("sets", "forced"),
    [
        (("optimizer.name=LION", "optimizer.step_in_backward=true"), Fixed(4, None, 0)),
        (("optimizer.name=LION",), Fixed(None, None, 0)),
        (("training_method=LORA", "optimizer.name=LION"), Fixed()),
        ((), Fixed()),
    ],
)
def test_a_plan_chooses_nothing_that_the_run_would_refuse(
    overrides: Make, sets: tuple[str, ...], forced: Fixed
) -> None:
    job = opened(overrides("steps=1", "batch_size=4", "training_method=FINE_TUNE", *sets))
    assert fixed(job.config, 2, 4) == forced
    found = fit(job, "FLOAT_32", 10**6, None)
    assert not found.fits, "so that all that may be chosen was chosen"
    assert found.training.choice.micro_batch == (forced.micro_batch or 1)


def test_tiles_are_read_only_where_nothing_else_fits(overrides: Make) -> None:
    job = opened(overrides("steps=1", "sample_after=1", "sample.resolution=64x64", "sample.frames=9"))
    roomy = fit(job, "FLOAT_32", 1 << 40, None)
    assert roomy.phases["preview"][0] == PLAIN
    assert TILED not in step_spec(job, "FLOAT_32").elsewhere["preview"]
    assert fit(job, "FLOAT_32", 10**6, None).phases["preview"][0] == TILED
    assert TILED in step_spec(job, "FLOAT_32").elsewhere["preview"], "remembered"


def test_what_does_not_fit_is_told_with_remedies(overrides: Make) -> None:
    job = opened(
        overrides(
            "steps=10", "batch_size=4", "gradient_checkpointing=OFF", "layer_offload_fraction=0", "micro_batch_size=4"
        )
    )
    whole = fit(job, "FLOAT_32", None, None)
    assert whole.fits is None
    need = whole.training.needed
    short = fit(job, "FLOAT_32", need - 1, card("rtx 3060 12gb"))
    assert short.fits is False
    assert short.chosen == {"micro_batch_size": 4, "gradient_checkpointing": "OFF", "layer_offload_fraction": 0.0}
    assert any(
        line.startswith("left open, the settings that need least (micro_batch_size=1 ") for line in short.remedies
    )
    facts = to_json(short, job, "FLOAT_32")
    assert facts["device"]["phase"] in facts["device"]["phases"]
    assert facts["hours"] is not None
    least = fit(job, "FLOAT_32", 2**30, None)
    assert any("take a larger card, fewer frames" in line for line in least.remedies)


def test_rounded_weights_are_named_with_what_they_save_and_never_chosen(overrides: Make) -> None:
    job = opened(overrides("steps=10"))
    short = fit(job, "FLOAT_32", 2**30, None)
    (line,) = (line for line in short.remedies if line.startswith("weight_dtype=FLOAT_8"))
    net = open_models(job.spec, job.base, job.config).denoiser()
    numbers = sum(m.weight.numel() for m in net.blocks.modules() if isinstance(m, torch.nn.Linear))
    assert f"the denoiser's take {size(round(numbers * (4 - 1 - 4 / 128)))} less" in line
    assert "weight_dtype" not in short.chosen
    rounded = opened(overrides("steps=10", "weight_dtype=NFLOAT_4"))
    assert not any("weight_dtype" in line for line in fit(rounded, "FLOAT_32", 2**30, None).remedies)
    saved = [fit(one, "FLOAT_32", None, None).training.device["end"]["weights"] for one in (job, rounded)]
    assert saved[0] > saved[1], "and the plan knows"


def test_what_was_planned_is_said_beside_what_was_held(overrides: Make) -> None:
    """On CUDA the two stand in the journal's last line; elsewhere there is no peak to tell."""
    job = fit_settings(opened(overrides("steps=10", "batch_size=2", "lora.rank=3")))
    assert planned_bytes(job, "FLOAT_32") is None, "no plan was made"
    result = fit(job, "FLOAT_32", 80 * 10**9, None)
    assert planned_bytes(job, "FLOAT_32") == result.training.allocated
    assert peak(job, torch.device("cpu")) is None


def test_on_a_card_settings_are_chosen_for_it_or_the_run_is_refused(
    overrides: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CUDA machine whose card has so many bytes."""
    job = opened(overrides("steps=10", "batch_size=2"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fitting, "dtype_name", lambda config: "FLOAT_32")
    monkeypatch.setattr(fitting, "asked_card", lambda vram, name: (80 * 10**9, None))
    assert [getattr(fit_settings(job).config, key) for key in OPEN] == [2, "OFF", 0.0]
    monkeypatch.setattr(fitting, "asked_card", lambda vram, name: (10**6, None))
    with pytest.raises(DoesNotFit, match=r"this run needs .* and the card has 1\.0 MB:\n"):
        fit_settings(job)


# ---- another way where there is no room


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_preview_that_finds_no_room_sets_the_denoiser_aside_and_then_takes_tiles(
    overrides: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is the same to the bit, and so is a preview with the denoiser aside."""
    real, seen, tries = decoding.decode, [], []

    def short(family: Any, latents: Any, tiled: bool = False) -> list[np.ndarray]:
        tries.append(tiled)
        if len(tries) <= most:
            raise out_of_memory()
        seen.append(real(family, latents, tiled))
        return seen[-1]

    monkeypatch.setattr(decoding, "decode", short)
    states = []
    for most, wanted in ((0, [False]), (1, [False, False]), (2, [False, False, True])):
        tries.clear()
        run = tmp_path / f"run{most}"
        words = overrides("steps=2", "sample_after=1", "samples=1", "sample.steps=1", "lora.rank=2")
        assert train(words, run) == DONE
        assert tries[: len(wanted)] == wanted
        assert len(of_kind(run, "sample")) == 3
        states.append(state(run, 2))
    assert equal(states[0], states[1])
    assert equal(states[0], states[2])
    assert np.array_equal(seen[0][0], seen[3][0]), "step 0, whole and with the denoiser aside"
    assert "decoded in tiles" in capsys.readouterr().err


def test_a_text_encoder_that_finds_no_room_is_streamed_and_says_the_same(
    overrides: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill, tries = cache_filling.fill, []

    def short(family: Any, *words: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            family.part("text_encoder")
            raise out_of_memory()
        return fill(family, *words)

    plain, streamed = tmp_path / "plain", tmp_path / "streamed"
    assert train(overrides("steps=2", f"cache_dir={tmp_path / 'one'}"), plain) == DONE
    monkeypatch.setattr(cache_filling, "fill", short)
    assert train(overrides("steps=2", f"cache_dir={tmp_path / 'two'}"), streamed) == DONE
    assert "the blocks of the text encoder now come from host memory" in capsys.readouterr().err
    assert facts_of(streamed) == facts_of(plain), "bit for bit what the whole encoder says"
    assert equal(state(streamed, 2), state(plain, 2))
    assert read_json(plain / "config.json")["data"] == read_json(streamed / "config.json")["data"]


@pytest.mark.parametrize("family", ["wan", "cogvideox"])
def test_without_reading_a_step_no_more_is_promised_than_it_keeps(
    family: str, overrides: Make, tiny_bases: Callable[[str], Path]
) -> None:
    """Of what a step really keeps, OFF, by its reading: at least so much is set aside for it."""
    job = opened(
        overrides("steps=1", "batch_size=2", f"base_model_name={tiny_bases(family)}", "video_config.target_fps=16")
    )
    seen = FakeRun(open_models(job.spec, job.base, job.config), job.config)
    depths = tuple(seen.depths.items())
    kept = max(parts.get("activations", 0) for parts in seen.step(job.shapes[0], 2, "OFF", depths).phases.values())
    assert kept < activations_at_most(job, 4) < 30 * kept


def test_a_plan_begins_with_its_verdict(overrides: Make, capsys: pytest.CaptureFixture[str]) -> None:
    words = overrides("steps=10")
    assert plan(words, card="rtx 3060 12gb") == DONE
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("it fits RTX 3060 12GB: ")
    assert "hours" in first
    assert plan(words, vram=1.0) == SKIPPED
    assert capsys.readouterr().out.startswith("it does not fit 1 GB: ")
    assert plan(words, card="t4") == DONE
    assert "hours" not in capsys.readouterr().out.splitlines()[0], "no rate is known of it"


def test_without_a_card_a_plan_says_what_the_training_then_does(overrides: Make, tmp_path: Path) -> None:
    words = overrides("steps=1", "batch_size=2", "lora.rank=2")
    job = opened(words)
    planned = to_json(fit(job, "FLOAT_32", None, None), job, "FLOAT_32")["chosen"]
    assert train(words, tmp_path / "run") == DONE
    kept = read_run_config(tmp_path / "run")["settings"]
    assert planned == {key: kept[key] for key in OPEN}


def test_a_plan_that_needs_more_than_the_disk_has_ends_with_2(
    overrides: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(overrides("steps=1000000000", "save_every=1")) == SKIPPED
    assert "too much" in capsys.readouterr().out
    assert plan(overrides("steps=1000000000", "save_every=1", "save_keep=2")) == DONE
