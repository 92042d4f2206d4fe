"""The place of the previews before the first one, what can be compared, and what becomes
of a tried prompt.
"""

import html
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support import reports
from tests.support.clips import write_clip
from tests.support.reports import full_run, write_file
from videotune.queue import entries as queued
from videotune.studio import projects, queue_page

CATS = "/p/cats"


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> projects.Project:
    """A project with two runs with previews, and one without."""
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    project = projects.create(tmp_path, "Cats", preset="toy")
    for name in ("run-1", "run-2", "bare"):
        run = project.folder / "runs" / name
        full_run(run)
        write_file(run, "config.json", {"steps": 120, "settings": {"sample_after": 60}})
    bare = project.folder / "runs/bare"
    shutil.rmtree(bare / "samples")
    (bare / "samples").mkdir()
    return project


def test_only_runs_with_previews_are_offered(
    client: Any, cats: projects.Project
) -> None:
    for page in ("train", "results"):
        text = client.get(f"{CATS}/{page}", params={"run": "run-1"}).text
        assert "<option>run-2</option>" in text
        assert "<option>bare</option>" not in text
    (cats.folder / "runs/bare/journal.jsonl").unlink()
    text = client.get(f"{CATS}/train", params={"run": "run-1"}).text
    assert 'value="run-2"' in text
    assert 'value="bare"' not in text, "a run without a step has no curve"


@pytest.mark.parametrize(
    ("settings", "said", "link"),
    [
        ({"sample_after": 0}, "draws no previews", "#f-sample_after"),
        ({"sample_after": 60, "samples": 0}, "draws no previews", "#f-samples"),
        ({"sample_after": 60, "samples": ["a cat"]}, "No preview was drawn", ""),
    ],
)
def test_the_place_says_why_it_is_empty(
    client: Any, cats: projects.Project, settings: dict[str, Any], said: str, link: str
) -> None:
    write_file(
        cats.folder / "runs/bare", "config.json", {"steps": 120, "settings": settings}
    )
    text = client.get(f"{CATS}/train", params={"run": "bare"}).text
    place = text.split('id="no-previews"')[1].split("</div>")[0]
    assert said in place
    assert (link in place) if link else ("<a" not in place)
    assert (
        'id="no-previews"'
        not in client.get(f"{CATS}/train", params={"run": "run-1"}).text
    )


def test_a_run_that_waits_says_what_will_appear(
    client: Any, cats: projects.Project
) -> None:
    write_clip(cats.folder / "clips/a.mp4", np.full((12, 32, 48, 3), 90, np.uint8), 12)
    (cats.folder / "clips/a.txt").write_text("a disc\n")
    queue_page.queue_run(cats.folder.parent, cats, "waits")
    text = client.get(f"{CATS}/train", params={"run": "waits"}).text
    assert "before step 1" in text.split('id="no-previews"')[1]


def test_a_tried_prompt_is_followed_below_its_button(
    client: Any, cats: projects.Project
) -> None:
    posted = {"run": "run-1", "prompt": "a cat on a roof"}
    assert client.post(f"{CATS}/run/draw", data=posted).status_code == 204
    text = client.get(f"{CATS}/results", params={"run": "run-1"}).text
    place = text.split('id="r-trying"')[1].split("</section>")[0]
    (folder,) = (cats.folder / "tries/run-1").iterdir()
    assert "Begins in a moment" in place
    assert f'href="#try-{folder.name}"' in place
    assert f'id="try-{folder.name}"' in text, "the link leads to its tile"
    (folder / "video.mp4").write_bytes(b"")
    text = client.get(f"{CATS}/results", params={"run": "run-1"}).text
    assert "See the video" in text.split('id="r-trying"')[1].split("</section>")[0]


def test_a_tried_prompt_is_given_files_that_the_model_takes(
    client: Any, cats: projects.Project
) -> None:
    address = {"run": "run-1"}
    fields = 'id="try-last_frame"', 'id="try-mask"'
    text = client.get(f"{CATS}/results", params=address).text
    assert not any(field in text for field in fields), "its plan says nothing of them"

    plan = cats.folder / "runs/run-1/plan.json"
    known = json.loads(plan.read_text())
    write_file(plan.parent, "plan.json", known | {"takes": ["last_frame"]})
    text = client.get(f"{CATS}/results", params=address).text
    assert [field in text for field in fields] == [True, False]

    posted = address | {"prompt": "a cat", "last_frame": "end.png"}
    assert client.post(f"{CATS}/run/draw", data=posted).status_code == 204
    folder = queue_page.queue_folder(cats.folder.parent)
    (entry,) = queued.entries(folder)
    option = entry.arguments.index("--last-frame")
    assert entry.arguments[option + 1] == str(cats.folder / "end.png")


def test_an_export_is_followed_below_its_button(
    client: Any, cats: projects.Project
) -> None:
    posted = {"run": "run-1", "format": "comfyui"}
    assert client.post(f"{CATS}/run/export", data=posted).status_code == 204
    assert len(queued.entries(queue_page.queue_folder(cats.folder.parent))) == 1
    text = client.get(f"{CATS}/results", params={"run": "run-1"}).text
    assert (
        "Writing files begins in a moment"
        in text.split('id="r-exporting"')[1].split("</section>")[0]
    )


def test_a_merged_model_is_an_export_of_its_own(
    client: Any, cats: projects.Project
) -> None:
    posted = {"run": "run-1", "format": ["comfyui", "diffusers"], "merge": "yes"}
    assert client.post(f"{CATS}/run/export", data=posted).status_code == 204
    folder = queue_page.queue_folder(cats.folder.parent)
    formats, merge = [entry.arguments for entry in queued.entries(folder)]
    assert "--format" in formats
    assert "--merge" not in formats
    assert "--merge" in merge
    assert "--format" not in merge


def test_a_preview_shows_its_middle_before_it_plays(
    client: Any, cats: projects.Project
) -> None:
    run = cats.folder / "runs/run-1"
    black_first = np.zeros((12, 32, 48, 3), np.uint8)
    black_first[4:] = 200
    for preview in (run / "samples").iterdir():
        write_clip(preview, black_first, 12)
    for step in (60, 120):
        marker = {"step": step, "kind": "save", "files": {}}
        folder = run / f"checkpoints/step-{step:06d}"
        (run / f"checkpoints/step-{step}").rename(folder)
        write_file(folder, "COMPLETE", marker)
    text = client.get(f"{CATS}/results", params={"run": "run-1"}).text
    table = text.split('id="saves-title"')[1].split("</table>")[0]
    posters = re.findall(r'poster="([^"]*)"', table)
    assert len(posters) == 2
    answer = client.get(html.unescape(posters[0]))
    with Image.open(io.BytesIO(answer.content)) as picture:
        assert np.asarray(picture).mean() > 150


def test_the_samples_that_a_warning_counts_are_all_shown_and_marked(
    client: Any, cats: projects.Project
) -> None:
    run = cats.folder / "runs/run-1"
    measured = []
    for seed, fault in ((1, "black"), (2, None), (3, "frozen")):
        record = reports.sample(120, "a small cat", seed)
        write_clip(run / record["path"], np.zeros((4, 16, 16, 3), np.uint8), 8)
        measured.append(
            record | {"picture": reports.picture(fault), "clip": "a.mp4", "copy": False}
        )
    faulty_preview = reports.sample(60, "a cat", 7, picture=reports.picture("noise"))
    write_clip(run / faulty_preview["path"], np.zeros((4, 16, 16, 3), np.uint8), 8)
    lines = [
        faulty_preview,
        {"kind": "sample_metrics", "step": 120, "samples": measured}
        | {"replication": {"line": 0.7, "copies": 2, "base_copies": 0}},
    ]
    for step in (60, 120):
        (run / f"checkpoints/step-{step}/COMPLETE").touch()
    with (run / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)

    page = client.get(f"{CATS}/results", params={"run": "run-1"}).text
    assert "1 is black, 1 is without motion" in page
    assert 'id="likely-copies">2 of 3 samples' in page
    (place,) = re.findall(
        r'<details class="card" id="measured">.*?</details>', page, re.DOTALL
    )
    of_taken, of_other = place.split("<h3>")[1:]
    figures = re.findall(r"<figure.*?</figure>", of_taken, re.DOTALL)
    assert "Likely yes: 2 of 3 samples" in of_taken
    assert len(figures) == 5, "previews and samples of the metrics"
    assert ["black" in figures[0], "without motion" in figures[1]] == [True, True]
    assert [">noise<" in figure for figure in figures] == [False] * 5
    assert of_other.count("<figure") == of_other.count(">noise<") == 1
    assert 'data-unfold="measured"' in page


def test_runs_of_two_projects_are_compared_with_links_that_lead_somewhere(
    client: Any, cats: projects.Project, tmp_path: Path
) -> None:
    dogs = projects.create(tmp_path, "Dogs", preset="toy")
    run = dogs.folder / "runs" / "run-1"
    full_run(run)
    write_file(run, "config.json", {"steps": 120, "settings": {"sample_after": 60}})
    write_file(run, "report.html", "<p>a report</p>")

    text = client.get(f"{CATS}/results", params={"run": "run-1"}).text
    address = re.search(r'href="([^"]*compare[^"]*beside=dogs)"', text)
    assert address is not None
    comparison = client.get(html.unescape(address[1])).text
    assert "4 runs" in comparison
    assert "dogs" in comparison, "two runs are called run-1"

    links = re.findall(r'(?:href|src)="([^"#]+)"', comparison)
    of_dogs = [link for link in links if link.startswith("/p/dogs/file/runs/run-1/")]
    assert len(of_dogs) >= 2, "its report and a preview"
    for link in of_dogs:
        assert client.get(html.unescape(link)).status_code == 200, link
    assert not [link for link in links if link.startswith("..")]

    assert client.get(f"{CATS}/compare?run=run-1&beside=../x").status_code == 422


def test_runs_that_all_wait_and_runs_that_are_not_there_are_compared_in_words(
    client: Any, cats: projects.Project, capsys: pytest.CaptureFixture[str]
) -> None:
    (cats.folder / "runs" / "waiting").mkdir()
    assert "waiting" in client.get(f"{CATS}/compare?run=waiting").text
    assert client.get(f"{CATS}/compare?run=gone").status_code == 422
    assert "Traceback" not in capsys.readouterr().err


def test_the_place_of_a_run_without_captions_promises_no_preview(
    client: Any, cats: projects.Project
) -> None:
    """It is done, so no preview comes by itself, and a resume would draw none."""
    bare = cats.folder / "runs/bare"
    records = [
        json.loads(line) for line in (bare / "journal.jsonl").read_text().splitlines()
    ]
    kept = [record for record in records if record["kind"] != "sample"]
    reports.write_journal(bare, kept)
    settings = {"sample_after": 60, "samples": 2}
    write_file(bare, "config.json", {"steps": 120, "settings": settings})
    account = json.loads((bare / "check.json").read_text())
    for clip in account["clips"]:
        clip["captions"] = [""]
    write_file(bare, "check.json", account)
    text = client.get(f"{CATS}/train", params={"run": "bare"}).text
    place = text.split('id="no-previews"')[1].split("</div>")[0]
    assert "no clip that it trains on has one" in place
    assert "Resume it" not in place
