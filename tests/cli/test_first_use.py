"""What a first-time user reads: which of several figures counts, why something is not
there, what is done at the moment, and what a command would send.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command_line import Bases, Patch, Printed, run
from tests.support.reports import (
    config,
    reading,
    start,
    step,
    write_file,
    write_journal,
)
from tests.support.trainers import Lab, job_of
from videotune import console
from videotune.commands.compare_runs import compare_runs
from videotune.config.load import parsed
from videotune.errors import DONE, VideotuneError
from videotune.models.base_model import comfyui_reads_otherwise
from videotune.planner.compared import compared_ways
from videotune.planner.fit import fit
from videotune.planner.gpus import find_card

# ---- plan --ways


def test_the_ways_are_judged_as_the_plan_is_and_its_own_is_marked(
    tmp_path: Path, small_clips: Path
) -> None:
    """A way that leaves too little of the card free is tight, as the verdict says."""
    lab = Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)
    job = job_of(lab, {}, preset="toy")
    card = find_card("RTX 4090")
    roomy = fit(job, "BFLOAT_16", card.vram, card)
    least = roomy.needed

    for vram, spare in ((card.vram, 0), (least, 0), (least, least // 10)):
        result = fit(job, "BFLOAT_16", vram, card, spare=spare)
        ways = compared_ways(job, result, "BFLOAT_16")
        (chosen,) = [way for way in ways if way["is_chosen"]]
        assert chosen["settings"].items() >= result.chosen.items()
        for way in ways:
            room = "fits" if way["need_bytes"] <= vram - spare else "tight"
            assert way["verdict"] == (
                room if way["need_bytes"] <= vram else "does not fit"
            )
            assert way["fits"] == (way["verdict"] != "does not fit")
        verdicts = [way["verdict"] for way in ways]
        order = ["fits", "tight", "does not fit"]
        assert verdicts == sorted(verdicts, key=order.index)


# ---- status


def test_status_says_why_there_is_no_verdict_and_what_a_run_does(
    tmp_path: Path, capsys: Printed
) -> None:
    from tests.commands.test_status import beat, status_of

    run_folder = tmp_path / "running"
    verdict = {
        "kind": "verdict",
        "step": 3,
        "time": 0.0,
        "verdict": None,
        "reason": "no clip is kept aside for checking",
        "best_step": None,
        "best": None,
    }
    write_journal(run_folder, [start(), step(1), verdict])
    write_file(run_folder, "config.json", config())
    progress = {"what": "clips", "done": 3, "total": 20}
    beat(run_folder, "encoding", step=0, progress=progress)
    (row,) = status_of(run_folder, capsys)["runs"]
    assert row["no_verdict"] == "no clip is kept aside for checking"
    assert row["activity"] == "encoding clips 3 of 20"
    assert run("status", run_folder) == DONE
    printed = capsys.readouterr().out
    assert "running: encoding clips 3 of 20" in printed
    assert "no verdict: no clip is kept aside for checking" in printed

    beat(run_folder, "training")
    (row,) = status_of(run_folder, capsys)["runs"]
    assert row["activity"] is None


# ---- compare


def test_runs_without_held_out_clips_are_compared_by_their_training_error(
    tmp_path: Path, capsys: Printed
) -> None:
    for name, error in (("first", 0.57), ("second", 0.81)):
        validation = reading(1, None, error)
        validation["train"]["normalised"] = error
        records = [start(), step(1), validation, step(2)]
        write_journal(tmp_path / name, records)
        write_file(tmp_path / name, "config.json", config())
    rows = {
        row["name"]: row
        for row in compare_runs([tmp_path / "first", tmp_path / "second"]).rows
    }
    assert rows["first"]["training"] != rows["second"]["training"]
    assert run("compare", tmp_path / "first", tmp_path / "second") == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "error on training clips" in printed
    assert "mean error of the last 50 steps" in printed
    assert "No clip is kept aside for checking" in printed


# ---- init


def test_init_reads_captions_as_comfyui_does_where_that_differs(
    tmp_path: Path, small_clips: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    for variable in ("HF_HUB_OFFLINE", "VIDEOTUNE_OFFLINE"):
        monkeypatch.setenv(variable, "1")  # put back after the test
    options = {"purpose": "style", "card": "12", "trigger": "", "data": small_clips}
    for model, convention in (("ltx 2B LoRA", "authors"), ("wan 2.1 1.3B LoRA", None)):
        folder = tmp_path / model
        assert run("init", folder, model=model, **options) == DONE
        text = (folder / "config.yaml").read_text()
        keys = yaml.safe_load(text)
        assert keys.get("text_encoder", {}).get("convention") == convention
        assert ("ComfyUI read them" in text) == (convention is not None)
        capsys.readouterr()
        assert run("plan", config=folder / "config.yaml", offline=True) == DONE
        assert "ComfyUI reads" not in capsys.readouterr().out
    assert not comfyui_reads_otherwise("nobody/nothing")


def test_a_preset_that_changes_the_speed_of_motion_is_named_in_the_lists(
    capsys: Printed,
) -> None:
    for words in (["presets", "list"], ["presets", "list", "--card", "8 GB"]):
        assert run(*words) == DONE
        printed = " ".join(capsys.readouterr().out.split())
        assert "wan 2.2 LoRA 8GB reads 12 frames a second" in printed
        assert "plays four times as fast as filmed" in printed


# ---- errors, JSON, bars


def test_a_yaml_error_names_the_line_and_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text, where in (
        ("a: [1\nb: 2\n", "line 2, column 2"),
        ("a: b: c\n", "line 1, column 5"),
        ("a: \x07\n", "position 3"),
    ):
        with pytest.raises(VideotuneError) as error:
            parsed(text, path)
        assert where in str(error.value)
        assert "<unicode string>" not in str(error.value)
        assert "^" not in str(error.value)


def test_a_preset_as_json_is_an_object(capsys: Printed) -> None:
    assert run("presets", "show", "toy", as_json=True) == DONE
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["preset"] == "toy"
    assert result["settings"]["base_model_name"] == "asset:toy"
    assert set(result["reasons"])


def test_clips_that_are_read_again_show_no_second_bar(
    capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    with console.without_bars(), console.bar("reading clips") as progress:
        progress.update(1, 2)
        progress.update(2, 2)
    assert capsys.readouterr().err == ""


def test_notes_on_a_model_that_is_not_here_fit_the_terminal(
    capsys: Printed, monkeypatch: Patch, tiny_bases: Bases
) -> None:
    from videotune.models.model_files import note

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    note("note: a model is not on this machine and the Hub cannot be reached: " * 2)
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 80
