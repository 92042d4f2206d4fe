"""The studio's pages of a run and of clips with sound: it can be heard, one at a time."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import reports
from tests.support.browser import open_studio
from tests.support.job_folders import ended_job
from tests.support.sounds import tone, write_sounding
from tests.support.waiting import wait_until
from videotune.files import write_json
from videotune.studio import projects, queue_page
from videotune.studio.preview_rows import preview_rows

RUN = "/p/cats/{page}?run=run-1"
LOUDNESS = {0: -21.0, 60: -80.0, 120: -18.4}
"""Loudness of the previews by step; those of step 60 are silent."""


def with_sound(record: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the journal as a run writes it that learns the sound too."""
    if record["kind"] == "step":
        return record | {"sound": {"mse": record["mse"] + 1, "by_t": record["by_t"]}}
    if record["kind"] == "validation":
        return record | {"sound": {key: record[key] for key in ("held_out", "train")}}
    if record["kind"] == "sample":
        sound = {"loudness": LOUDNESS[record["step"]], "clipped": 0.0}
        return record | {"sound": sound}
    return record


def make_project(root: Path) -> projects.Project:
    """A project with a clip with sound and a run of previews with sound."""
    project = projects.create(root, "Cats", preset="toy")
    clip = project.folder / "clips" / "cat.mp4"
    write_sounding(clip, tone(48000, 2.0, 440), 48000, codec="aac")

    run = reports.full_run(project.folder / "runs" / "run-1")
    lines = (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    records = [with_sound(json.loads(line)) for line in lines]
    reports.write_journal(run, records)
    for path in (run / "samples").glob("*.mp4"):
        shutil.copy(clip, path)
    settings = {"steps": 120, "settings": {"generate": ["video", "sound"]}}
    reports.write_file(run, "config.json", settings)
    for step in (60, 120):
        (run / f"checkpoints/step-{step}/COMPLETE").write_text("{}")
    return project


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> projects.Project:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    return make_project(tmp_path)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    root = tmp_path_factory.mktemp("heard") / "root"
    root.mkdir()
    make_project(root)
    with open_studio(root) as (studio, page):
        page.set_default_timeout(60_000)
        yield studio, page


def test_previews_say_how_loud_they_are(client: Any, cats: projects.Project) -> None:
    cells = preview_rows(cats, "run-1")[0]["cells"]
    assert [(step, fault, sound) for step, _, fault, sound in cells] == [
        (0, "", "sound −21 dB"),
        (60, "silent", "sound −80 dB"),
        (120, "", "sound −18 dB"),
    ]
    train = client.get(RUN.format(page="train")).text
    assert "video loss (mean of 50)" in train
    assert "sound loss" in train
    text = client.get(RUN.format(page="results")).text
    assert "Sound −18 dB" in text
    table = text.partition('id="saves-title"')[2].partition("</table>")[0]
    assert table.count("data-hear") == 2, "one for each checkpoint with a preview"
    assert (
        "data-hear"
        in text.partition('class="result-film"')[2].partition("</figure>")[0]
    )
    assert "2 are silent" in text


def test_a_run_without_sound_offers_none(client: Any, cats: projects.Project) -> None:
    run = cats.folder / "runs" / "run-1"
    shutil.rmtree(run)
    reports.full_run(run)
    assert [cell[3] for cell in preview_rows(cats, "run-1")[0]["cells"]] == [""] * 3
    assert "data-hear" not in client.get(RUN.format(page="results")).text


def test_the_clips_sound_is_described(client: Any, cats: projects.Project) -> None:
    clip = {
        "path": str(cats.folder / "clips/cat.mp4"),
        "used": True,
        "held_out": False,
        "reason": None,
        "detail": None,
        "source_seconds": 2.0,
        "captions": ["a cat"],
        "warnings": [],
        "notes": [],
        "sound": {"problem": None, "loudness": -9.0, "silent": 0.25, "clipped": 0.0},
    }
    folder = ended_job(cats, "check", 0)
    job = {"kind": "check", "about": "", "words": [], "started": time.time() + 1}
    write_json(folder / "job.json", job)
    account = {"clips": [clip], "blockers": [], "notes": []}
    write_json(folder / "out", account)
    answer = client.get("/p/cats/data/clip", params={"path": "clips/cat.mp4"})
    assert "Sound −9 dB, 25% silent." in answer.text
    waveform = client.get("/p/cats/data/sound", params={"path": "clips/cat.mp4"})
    assert "<svg" in waveform.text


HEARD = "[...document.querySelectorAll('video')].filter((one) => !one.muted).map((one) => one.closest('.shot')?.id ?? 'other')"


def test_one_preview_is_heard_at_a_time(opened: tuple[Any, Any]) -> None:
    studio, page = opened
    page.goto(studio.address + RUN.format(page="train"))
    choice = page.locator("#viewer-sound")
    choice.wait_for()
    assert page.evaluate(HEARD) == []
    choice.focus()
    page.keyboard.press("ArrowDown")
    wait_until(lambda: choice.input_value() == "shot-left")
    assert page.evaluate(HEARD) == ["shot-left"]
    choice.select_option("shot-right")
    assert page.evaluate(HEARD) == ["shot-right"]

    # Another step is heard as the one before was.
    page.locator("#viewer-step").press("ArrowLeft")
    page.locator("#shot-right figcaption", has_text="silent").wait_for()
    assert page.evaluate(HEARD) == ["shot-right"]
    choice.select_option("")
    assert page.evaluate(HEARD) == []


def test_a_checkpoints_preview_silences_the_viewer(opened: tuple[Any, Any]) -> None:
    studio, page = opened
    page.goto(studio.address + RUN.format(page="results"))
    choice = page.locator("#viewer-sound")
    choice.select_option("shot-right")
    button = page.locator("[data-hear]").first
    button.press("Enter")
    wait_until(lambda: button.get_attribute("aria-pressed") == "true")
    wait_until(lambda: choice.input_value() == "")
    assert page.evaluate(HEARD) == ["other"]
    button.press("Enter")
    wait_until(lambda: button.get_attribute("aria-pressed") == "false")
    assert page.evaluate(HEARD) == []


def test_the_chart_of_the_sounds_noise_levels_is_offered(
    opened: tuple[Any, Any],
) -> None:
    studio, page = opened
    page.goto(studio.address + RUN.format(page="train"))
    tab = page.locator("#tab-sound_noise")
    tab.wait_for(state="visible")
    tab.click()
    page.locator("#chart-box .u-legend").wait_for()
    page.locator("#tab-loss").click()
    names = page.locator("#chart-table td:first-child")
    assert names.all_text_contents() == ["video", "sound"]
