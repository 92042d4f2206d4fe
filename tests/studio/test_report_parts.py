"""The parts of the report that the page Train shows have styles of the studio's own."""

import json
import re
from pathlib import Path
from typing import Any

from tests.support.reports import (
    account,
    config,
    full_run,
    part,
    report,
    visible_text,
    write_file,
)
from videotune import studio
from videotune.latent_cache.view_bands import views_text
from videotune.reporter.build import contact_sheet_page
from videotune.reporter.charts import Line, line_chart
from videotune.reporter.curves import exposure as exposure_of
from videotune.reporter.read import read_run
from videotune.runs.start_state import StartState, start_state
from videotune.studio import projects
from videotune.studio.checkpoint_words import describe_best_step
from videotune.studio.web import render
from videotune.text import times_between
from videotune.validation.verdict_words import ErrorReference

WITHOUT_STYLE = {"chart"}
"""Classes that need no style."""


def test_each_class_of_a_chart_has_a_style() -> None:
    chart = line_chart(
        [
            Line("training clips", [(0, 1.0), (20, 0.6)], "one", dots=True),
            Line("held out", [(0, 1.0), (20, 0.8)], "two pale", dots=True),
        ],
        says="Error by step",
        x_label="step",
        marks=[20],
    )
    grounds = {
        "chart": chart,
        "best": 20,
        "reference": ErrorReference(),
        "changes": [],
        "clips": [],
    }
    exposure = {"absent": "", "clips": [], "regularization": {"num": 0}}
    page = render("train_exposure", d=exposure, grounds=grounds)

    folder = Path(studio.__file__).parent / "static"
    styles = (folder / "studio.css").read_text() + (folder / "train.css").read_text()
    classes = set(" ".join(re.findall(r'class="([^"]+)"', page)).split())
    assert {"axes", "plot", "line", "key"} <= classes
    unstyled = {name for name in classes if not re.search(rf"\.{name}\b", styles)}
    assert unstyled <= WITHOUT_STYLE


def test_times_seen_are_one_number_on_the_page_train_and_in_the_report(
    client: Any, tmp_path: Path
) -> None:
    project = projects.create(tmp_path, "Cats", preset="toy")
    run_folder = project.folder / "runs" / "run-1"
    full_run(run_folder)
    seen = exposure_of(read_run(run_folder))["so_far"]
    times = times_between(seen["least"], seen["most"])
    train = visible_text(client.get("/p/cats/train?run=run-1").text)
    assert f"{times} each part of a clip seen" in train
    chapter = visible_text(client.get("/p/cats/exposure?run=run-1").text)
    assert f"each seen {times}" in chapter
    assert views_text({"min": seen["least"], "max": seen["most"], "band": "high"}) == (
        f"each window seen {times} (high)"
    )


def test_a_report_of_a_project_names_the_places_of_the_studio_too(
    tmp_path: Path,
) -> None:
    project = projects.create(tmp_path, "Cats", preset="toy")
    for folder in (project.folder / "runs" / "run-1", tmp_path / "elsewhere" / "run-1"):
        full_run(folder)
        write_file(folder, "exports.json", [])
        said = part(report(folder), "verdict")
        assert "videotune export" in said
        assert ("page Results of the studio" in said) == (
            folder.is_relative_to(project.folder)
        )


def test_the_contact_sheet_speaks_of_the_page_where_the_page_shows_it(
    client: Any, tmp_path: Path
) -> None:
    project = projects.create(tmp_path, "Cats", preset="toy")
    note = "a.mp4 has cuts: `videotune dataset split clips --out scenes` makes scenes"
    caption = "a cat --ar 16:9 `videotune dataset split`"
    checked = account()
    checked["notes"] = ["its --mask <file> is missing"]
    for row in checked["clips"]:
        row |= {"kind": "train", "captions": []}
    checked["clips"][0] |= {"captions": [caption], "warnings": [note]}
    page = contact_sheet_page("Clips", checked, {}, [tmp_path], [])
    (project.folder / "sheet").mkdir()
    (project.folder / "sheet" / "index.html").write_text(page)
    assert "videotune dataset split clips" in page, "as the terminal has it"

    answer = client.get("/p/cats/file/sheet/index.html")
    assert answer.headers["content-security-policy"].startswith("sandbox")
    shown = visible_text(answer.text)
    assert caption in shown
    assert "its mask <file> is missing" in shown
    assert "<file>" not in answer.text
    assert "videotune dataset split clips" not in shown
    assert "Cut into scenes" in shown


def test_how_often_clips_were_seen_counts_parts_of_clips_as_the_other_pages_do(
    client: Any, tmp_path: Path
) -> None:
    project = projects.create(tmp_path, "Cats", preset="toy")
    run_folder = project.folder / "runs" / "run-1"
    full_run(run_folder)
    chapter = visible_text(client.get("/p/cats/exposure?run=run-1").text)
    assert "of clips: each seen" in chapter
    assert "times" in chapter
    assert "in 2 parts" in chapter
    assert "in 2 windows" not in chapter
    assert "window" in part(report(run_folder), "exposure")


def test_the_mark_of_the_best_step_is_below_the_curve_of_held_out_clips() -> None:
    chart = line_chart(
        [Line("clips kept aside", [(0, 1.0), (50, 0.2), (100, 0.5)], "one")],
        says="",
        marked_points=[(50, 0.2)],
    )
    ((_, mark),) = [path for path in chart["paths"] if path[0] == "mark"]
    x, top, length = map(float, re.findall(r"-?[\d.]+", mark))
    assert x == chart["size"] / 2
    lowest = chart["size"] * (1 - 0.06 / 1.12)
    assert top + length <= chart["size"]
    assert top > lowest - length, "it does not hide the point itself"


def test_the_page_says_why_the_best_step_is_not_the_recommended_one() -> None:
    saves = [(60, Path("step-60")), (120, Path("step-120"))]
    measured = (0, 60, 100, 120)
    start = StartState()
    without_turn = {"best_step": 100, "turned": False}
    assert describe_best_step(without_turn, 100, saves, measured, start) == ""
    assert (
        describe_best_step(
            {"best_step": None, "turned": False}, 120, saves, measured, start
        )
        == ""
    )
    missing = describe_best_step(without_turn, 120, saves, measured, start)
    assert "step 100" in missing
    assert "no checkpoint" in missing
    as_good = describe_best_step(
        {"best_step": 60, "turned": False}, 120, saves, measured, start
    )
    assert "step 60" in as_good
    assert "no checkpoint" not in as_good
    unmeasured = describe_best_step(
        {"best_step": 60, "turned": False}, 120, saves, (0, 60), start
    )
    assert "step 120 itself was not measured" in unmeasured

    at_start = {"best_step": 0, "turned": False}
    begun = start_state("/lora.safetensors", "LORA")
    for state, words in (
        (start, "the base model itself"),
        (begun, "the LoRA it began"),
    ):
        said = describe_best_step(at_start, 120, saves, measured, state)
        assert words in said


def test_a_run_without_held_out_clips_says_so_at_each_checkpoint(
    client: Any, tmp_path: Path
) -> None:
    run_folder = projects.create(tmp_path, "Cats", preset="toy").folder / "runs/run-1"
    full_run(run_folder)
    journal = run_folder / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "validation":
            line["held_out"] = None
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (60, 120):
        (run_folder / f"checkpoints/step-{step}/COMPLETE").touch()

    table = visible_text(client.get("/p/cats/results?run=run-1").text)
    assert table.count("no clip is kept aside") == 2
    assert "not measured" not in table
    train = visible_text(client.get("/p/cats/train?run=run-1").text)
    assert "what the verdict rests on" not in train
    assert "How often each clip was seen, and its error" in train


def test_a_report_that_the_studio_serves_names_its_places_in_the_notes(
    client: Any, tmp_path: Path
) -> None:
    project = projects.create(tmp_path, "Cats", preset="toy")
    run_folder = project.folder / "runs" / "run-1"
    full_run(run_folder)
    note = "Add clips, or put 2 or more into a dataset of kind validation"
    rate = "--set video_config.target_fps=8 trains each frame once"
    checked = account()
    checked["notes"] = [note, rate]
    checked["clips"][0]["captions"] = ["a cat --ar 16:9"]
    write_file(run_folder, "check.json", checked)
    report(run_folder)

    written = (run_folder / "report.html").read_text()
    answer = client.get("/p/cats/file/runs/run-1/report.html")
    assert answer.headers["content-security-policy"].startswith("sandbox")
    for page, is_served in ((written, False), (answer.text, True)):
        assert ('<a href="checkpoints/step-120">' in page) != is_served, "a folder"
        assert '<a href="export/' in page, "a file"
        clips = part(page, "clips")
        assert ("“Keep aside” for 2 or more" in clips) == is_served
        assert (note in clips) != is_served
        assert ("“Target FPS” set to 8" in clips) == is_served
        settings = part(page, "settings")
        assert "learning_rate" in settings, "they are named as in a config"


def test_the_pages_of_a_run_name_the_lora_that_it_began_with(
    client: Any, tmp_path: Path
) -> None:
    run_folder = projects.create(tmp_path, "Cats", preset="toy").folder / "runs/run-1"
    full_run(run_folder)
    assert client.get("/p/cats/previews?run=run-1").json()["start"] == "the base model"

    changed: dict[str, Any] = config()
    changed["settings"]["init_from"] = "/loras/first.safetensors"
    write_file(run_folder, "config.json", changed)
    answer = client.get("/p/cats/previews?run=run-1").json()
    assert answer["start"] == "the LoRA it began with"
    results = client.get("/p/cats/results?run=run-1").text
    assert 'data-start="the LoRA it began with"' in results
    assert "relative to the LoRA it began with: below 1 is better" in results
    assert "relative to the base model" not in results
