"""What somebody who has not seen the studio stumbled over: the words beside a button say
what it does, and a figure says what it is.
"""

import html
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import run as run_command
from tests.support.job_folders import ended_job, write_heartbeat
from tests.support.reports import full_run, visible_text, write_file
from tests.support.studio_fuzz import PLAN
from videotune.errors import DONE
from videotune.files import write_json
from videotune.planner.preset_fits import FIT_BASIS
from videotune.queue import jobs
from videotune.studio import (
    form,
    gpu,
    model_choices,
    plan_server,
    projects,
    stages,
)
from videotune.studio.downloads import with_names_of_settings
from videotune.studio.frame_sizes import trained_sizes, turned_resolution
from videotune.studio.projects import Project
from videotune.studio.setting_names import (
    in_page_words,
    linked_sentence,
    with_value_words,
)
from videotune.studio.setting_values import describe_values
from videotune.studio.terms import in_studio_terms
from videotune.studio.web import FormData, PageContext

MP4 = b"\0\0\0\x20ftypisom" + b"\0" * 64
CROPPED = (
    "resolution: 640x368 makes frames 368 wide and 640 high, and crops away 62% or more "
    'of every clip; width=640 and height=368 (resolution "368x640") keep more of them. '
    "Set that, or allow_crop=true if this is intended."
)


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with a clip that has a caption, for an RTX 4090."""
    monkeypatch.setattr(gpu, "list_gpus", list)
    project = projects.create(tmp_path, "Cats", preset="toy", card="RTX 4090")
    (project.folder / "clips/a.mp4").write_bytes(MP4)
    (project.folder / "clips/a.txt").write_text("a cat\n")
    return project


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The answer of the plan server, which a test fills in."""
    values: dict[str, Any] = {"current": True, "computing": False}
    monkeypatch.setattr(plan_server, "request_answer", lambda out, question: values)
    return values


# --- clips that cannot be used


def add_damaged_clip(project: Project) -> None:
    (project.folder / "clips/b.mp4").write_bytes(MP4 + b"b")
    facts = {
        "path": str(project.folder / "clips/b.mp4"), "used": False, "held_out": False, "reason": "unreadable",
        "detail": "the container is damaged", "source_seconds": None, "captions": [], "warnings": [], "notes": [],
    }  # fmt: skip
    folder = ended_job(project, "check", 1)
    write_json(
        folder / "job.json",
        {"kind": "check", "about": "", "words": [], "started": time.time() + 1},
    )
    write_json(folder / "out", {"clips": [facts], "blockers": [], "notes": []})


def test_the_step_at_clips_that_cannot_be_used_is_named_after_their_button(
    client: Any, cats: Project, tmp_path: Path
) -> None:
    add_damaged_clip(cats)
    page = PageContext(root=tmp_path, is_local=True, project=cats, query=FormData({}))
    stage_by_name = {stage.name: stage for stage in stages.stages(page)}
    assert stage_by_name["clips"].action == "Remove 1 clip"
    assert stage_by_name["captions"].text == "each usable clip has one"

    shown = client.get("/p/cats/data?state=unusable").text
    actions = shown.split('<p class="row clip-actions">')[1].split("</p>")[0]
    assert visible_text(actions).split() == ["Remove"]


# --- the resolution


def test_the_resolution_says_what_its_numbers_are_and_which_sizes_follow(
    client: Any, cats: Project, answer: dict[str, Any]
) -> None:
    answer |= {"plan": {**PLAN, "buckets": [{"shape": "17x368x640"}]}}
    help_text = client.get("/p/cats/setup").text.split('id="h-resolution">')[1]
    help_text = visible_text(help_text.split("<details")[0])
    assert "height x width" in help_text
    assert "368 high, 640 wide, 17 frames" in help_text
    assert "each clip in its own shape" in help_text
    assert trained_sizes({**answer, "current": False}) == []


def test_a_refused_size_has_a_button_for_the_turned_one(
    client: Any, cats: Project, answer: dict[str, Any]
) -> None:
    answer |= {"code": 1, "words": CROPPED}
    setup = client.get("/p/cats/setup").text
    assert setup.count("<span>Use 368x640</span>") == 2, "in the plan and at the field"
    assert "The height stands first" in setup
    client.post("/p/cats/setup/set", data={"key": "resolution", "value": "368x640"})
    assert projects.draft(cats)["resolution"] == "368x640"

    assert turned_resolution({**answer, "current": False}) == ""
    padded = {**answer, "words": 'x; resize="pad" keeps all of them'}
    assert turned_resolution(padded) == ""


# --- the plan


@pytest.mark.parametrize(("band", "is_first"), [("risky", True), ("moderate", False)])
def test_what_the_plan_warns_of_stands_before_its_figures(
    client: Any, cats: Project, answer: dict[str, Any], band: str, is_first: bool
) -> None:
    views = {"per_window": {"min": 200, "max": 200, "band": band}, "advice": ""}
    device = {
        "card": "RTX 4090", "measured": None, "vram_bytes": 24 * 2**30, "memory_from": "card", "spare_bytes": 0,
        "unstreamed_bytes": 0, "need_bytes": 2**30, "phase": "training", "parts": {"weights": 2**30},
    }  # fmt: skip
    answer |= {"plan": {**PLAN, "views": views, "device": device}}
    region = client.get("/p/cats/setup").text.split('id="r-plan"')[1]
    seen, memory = region.index("Each part of a clip seen"), region.index("Memory of")
    assert (seen < memory) == is_first
    assert region.count("Each part of a clip seen") == 1


def test_captions_for_previews_are_counted_only_if_there_are_some(
    client: Any, cats: Project
) -> None:
    projects.save_draft(cats, {"samples": 2})
    assert "1 caption of your clips is used" in client.get("/p/cats/setup").text
    (cats.folder / "clips/a.txt").unlink()
    text = client.get("/p/cats/setup").text
    assert "captions of your clips are used, once there are some" in text


# --- the list of models


def test_badges_and_their_legend_have_the_memory_of_the_card(client: Any) -> None:
    listed = client.get("/models", params={"card": "RTX 4090"}).text
    legend = listed.split("fit-words")[1].split("</p>")[0]
    assert ">fits 24 GB<" in legend
    assert FIT_BASIS in html.unescape(legend)
    assert ">needs more than 24 GB<" in legend
    assert "no card" not in legend
    assert "GB, may fit" not in listed

    largest = client.get("/models", params={"card": "other", "vram": "400"}).text
    assert "needs more than" not in largest
    assert "fit-words" not in client.get("/models").text, "no card, no legend"


@pytest.mark.parametrize("gigabytes", [8, 12, 24])
def test_the_studio_and_the_terminal_say_the_same_of_a_card(
    client: Any, capsys: pytest.CaptureFixture[str], gigabytes: int
) -> None:
    """A model of a class far above the card does not "may fit": both read one table."""
    listed = client.get(
        "/models", params={"card": "other", "vram": str(gigabytes)}
    ).text
    badge_by_preset = {}
    for row in listed.split('<label class="size"')[1:]:
        presets = re.findall(r'value="([^"]+)"', row)
        badges = re.findall(r'class="badge[^>]*>([^<]*)<', row)
        if presets:  # none for "choose later"
            badge_by_preset[presets[0]] = badges[-1]

    assert (
        run_command("presets", "list", "--card", f"{gigabytes} GB", json=True) == DONE
    )
    fits = json.loads(capsys.readouterr().out)["fits"]
    assert badge_by_preset.keys() == fits.keys()
    words = {
        "fits": f"fits {gigabytes} GB",
        "is tight": f"tight on {gigabytes} GB",
        "does not fit": f"needs more than {gigabytes} GB",
        "any machine": "any computer",
    }
    for preset, fit in fits.items():
        assert badge_by_preset[preset] == words[fit], preset
    assert badge_by_preset["wan 2.2 Finetune"] == f"needs more than {gigabytes} GB"


def test_models_say_their_download_and_sizes_how_they_differ(client: Any) -> None:
    listed = visible_text(client.get("/models", params={"card": "RTX 4090"}).text)
    assert "wan 2.1 1.3B LoRA 16GB download about 28.9 GB" in listed
    assert "frames 17 instead of 33. Download about 126 GB" in listed

    for family in model_choices.families_for(model_choices.ChosenCard("x", 24.0)):
        for size in family.others:
            assert family.difference(size), size.preset
    small, usual = "wan 2.2 A14B LoRA 8GB", "wan 2.2 A14B LoRA 24GB"
    assert model_choices.difference(small, usual) == (
        "frames 9 instead of 33, resolution 384 instead of 480, rank 16 instead of 32, "
        "weights in 4 bits"
    )


# --- words of the page


def test_what_a_field_takes_is_said_without_signs() -> None:
    for field in form.fields():
        words = describe_values(field.key, field.values)
        assert not re.search(r"[≥≤<>{}]|integer|1e\+|text or list", words), words
    assert describe_values("steps", "integer, ≥ 1, ≤ 1e+09") == (
        "a whole number from 1 to 1,000,000,000"
    )
    assert describe_values("x", "number, > 0") == "a number above 0"
    assert describe_values("x", "list of text, length ≥ 1") == "a list of text"
    assert "height x width" in describe_values("resolution", "")


def test_a_message_of_the_plan_leads_to_the_settings_that_it_names() -> None:
    message = "image: the toy takes <b>. Set first_frame_probability above 0"
    assert linked_sentence(message, "my cats") == (
        "Image: the toy takes &lt;b&gt;. Set "
        '<a href="/p/my%20cats/setup#f-first_frame_probability">“First frame probability”</a> above 0'
    )
    assert linked_sentence("max_frames: too large", "a").startswith("<a href=")
    for said, meant in (
        ("If not, set learning_rate=0.1", "If not, set “Learning rate” to 0.1"),
        ("Set max_grad_norm=2 or less", "Set “Max grad norm” to 2 or less"),
        ("learning_rate=0.1 is far", "“Learning rate” set to 0.1 is far"),
        ("set learning_rate lower", "set “Learning rate” lower"),
    ):
        assert in_page_words(said) == meant


def test_the_reason_of_no_effect_names_settings_as_the_page_does(
    client: Any, cats: Project
) -> None:
    reason = 'frame_sample_strategy is not "keyframe"'
    assert with_value_words(in_page_words(reason)) == (
        "“Frame sample strategy” is not “keyframe”"
    )
    setup = visible_text(client.get("/p/cats/setup").text)
    assert "Frame sample strategy” is not “keyframe”" in setup
    assert "frame_sample_strategy is not" not in setup
    assert "Takes: " not in setup


def test_a_comparison_names_settings_as_the_page_does(
    client: Any, cats: Project
) -> None:
    page = '<table><tr><th>run</th><th>lora.rank</th></tr><td data-label="lora.rank">4</td></table>'
    (cats.folder / "runs").mkdir(exist_ok=True)
    (cats.folder / "runs/comparison.html").write_text(page)
    shown = client.get("/p/cats/file/runs/comparison.html").text
    assert "<th>Rank</th>" in shown
    assert 'data-label="Rank"' in shown
    assert with_names_of_settings("<th>a &amp; b</th>") == "<th>a &amp; b</th>"


def test_a_note_on_clips_kept_aside_has_no_option_of_a_terminal() -> None:
    note = (
        "no clip is kept aside for checking, so it cannot be told whether the model copies your clips: "
        "5 source videos, 20 are needed. Add clips, or put 2 or more into a folder of "
        "their own: --held-out FOLDER"
    )
    assert in_studio_terms(note) == (
        "no clip is kept aside for checking, so it cannot be told whether the model "
        "copies your clips: from 20 videos on, some are kept aside by themselves; "
        "your usable clips come from 5 videos. Until then choose “Keep aside” for 2 or more"
    )
    few = "1 clip is kept aside: 2 are needed. Put more clips into the dataset of kind validation (--held-out FOLDER)"
    assert "FOLDER" not in in_studio_terms(few)


def test_choosing_clips_to_keep_aside_says_what_to_press(
    client: Any, cats: Project, answer: dict[str, Any]
) -> None:
    answer |= {"plan": {**PLAN, "clips": {"used": 1, "held_out": 0, "skipped": 0}}}
    setup = client.get("/p/cats/setup").text
    assert "/p/cats/data?state=used&amp;aside=1#aside-how" in setup
    assert 'id="aside-how"' in client.get("/p/cats/data?state=used&aside=1").text
    assert 'id="aside-how"' not in client.get("/p/cats/data?state=used").text


# --- projects, settings of the studio


def test_the_first_page_leads_to_the_toy_and_does_not_repeat_its_name(
    client: Any,
) -> None:
    page = client.get("/").text
    assert "without a download" in visible_text(page)
    assert 'data-choose="toy"' in page
    assert '<h1 class="where visually-hidden">Projects</h1>' in page


def test_the_card_of_a_project_counts_the_run_that_it_says_is_running(
    client: Any, cats: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from videotune.studio import header, run_states

    row = {"kind": "train", "project": "cats", "about": "run-1", "paused": False, "failed": "", "share": None,
           "loss": None, "left": "", "title": "Cats"}  # fmt: skip
    monkeypatch.setattr(header, "running_work", lambda root, name="": [row])
    monkeypatch.setattr(run_states, "run_names", lambda project, root: ["run-1"])
    card = visible_text(client.get("/").text.split('id="project-cats"')[1])
    assert "1 run " in card
    assert "run-1 running" in card

    row |= {"kind": "check", "about": ""}
    card = visible_text(client.get("/").text.split('id="project-cats"')[1])
    assert "checking clips" in card
    assert "running" not in card.split("The projects are")[0]


def test_the_settings_of_the_studio_keep_the_open_project(
    client: Any, cats: Project
) -> None:
    assert 'href="/settings?project=cats"' in client.get("/p/cats/data").text
    settings = client.get("/settings?project=cats").text
    assert 'href="/p/cats/train"' in settings
    assert 'data-project="cats"' in settings


# --- runs and their files


@pytest.fixture
def run(cats: Project) -> Path:
    """A run with checkpoints of two steps; the later one has a file for ComfyUI."""
    run = cats.folder / "runs" / "run-1"
    full_run(run)
    settings = {"base_model_name": "asset:toy", "training_method": "LORA"}
    write_file(run, "config.json", {"steps": 120, "settings": settings})
    for step in (60, 120):
        (run / f"checkpoints/step-{step}/COMPLETE").touch()
    path = "export/run-1-step-120-comfyui.safetensors"
    (run / path).write_bytes(b"weights")
    write_file(run, "exports.json", [{"format": "comfyui", "path": path}])
    return run


def test_each_checkpoint_has_its_file_for_comfyui(client: Any, run: Path) -> None:
    page = client.get("/p/cats/results?run=run-1").text
    row_by_step = {
        step: page.split(f'id="save-{step}"')[1].split("</tr>")[0] for step in (60, 120)
    }
    assert 'download="cats-run-1-step-120-comfyui.safetensors"' in row_by_step[120]
    assert 'data-make="60"' in row_by_step[60]
    assert "/p/cats/run/export" in row_by_step[60]
    assert all("File for ComfyUI" in row for row in row_by_step.values())

    post = {"run": "run-1", "step": "60", "format": "comfyui"}
    assert client.post("/p/cats/run/export", data=post).status_code == 204
    page = client.get("/p/cats/results?run=run-1").text
    row = page.split('id="save-60"')[1].split("</tr>")[0]
    assert "data-make" not in row, "it is being written"


def test_a_downloaded_checkpoint_has_the_names_of_project_and_run(
    client: Any, run: Path
) -> None:
    sent = client.get("/p/cats/folder?path=runs/run-1/checkpoints/step-60")
    assert sent.headers["Content-Disposition"].endswith("cats-run-1-step-60.zip")
    assert b"step-60/COMPLETE" in sent.content
    assert b"cats-run-1-step-60/" not in sent.content, "it can be put back as it is"


def unended(run: Path) -> None:
    """Take the end out of the journal of a run."""
    journal = run / "journal.jsonl"
    lines = [line for line in journal.read_text().splitlines() if '"end"' not in line]
    journal.write_text("\n".join(lines) + "\n")


def test_samples_that_are_measured_are_counted(client: Any, run: Path) -> None:
    unended(run)
    write_heartbeat(run, os.getpid(), "probing")
    beat = json.loads((run / "heartbeat.json").read_text())
    progress = {"what": "sample metrics", "done": 3, "total": 8}
    write_file(run, "heartbeat.json", {**beat, "progress": progress})
    text = visible_text(client.get("/p/cats/train?run=run-1").text)
    assert "Checking small samples for copies, 3 of 8, since" in text


def test_a_program_that_starts_says_since_when(client: Any, cats: Project) -> None:
    """A process that has not written a heartbeat yet."""
    run = cats.folder / "runs" / "run-1"
    run.mkdir(parents=True)
    write_file(run, "config.json", {"steps": 120, "settings": {}})
    job = jobs.start(cats.folder, "train", ["studio", "--help"], "run-1")
    try:
        text = visible_text(client.get("/p/cats/train?run=run-1").text)
    finally:
        jobs.stop(job)
    assert "Starting the program, since" in text
    assert "up to a minute" in text
