"""What the pages say of runs and jobs."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_folders import ended_job, steps
from tests.support.reports import full_run, plan, visible_text
from videotune.files import write_json
from videotune.queue import jobs
from videotune.studio import projects, queue_page, results_page, status, web


def test_an_error_is_told_whole_and_by_the_names_of_the_project(tmp_path: Path) -> None:
    project = projects.create(tmp_path, "one", preset="toy")
    said = f"encoding 3/4\nvideotune: 1 clip has no caption:\n  {project.folder}/clips/a.mp4: there is no a.txt\nWrite it.\n"
    told = jobs.describe_outcome(jobs.read_job(ended_job(project, "train", 1, said)))
    assert told == "1 clip has no caption:\n  clips/a.mp4: there is no a.txt\nWrite it."


@pytest.mark.parametrize(
    ("share", "said", "unsaid"),
    [
        (None, "starting", "%"),
        (0.5, "50 %, 7 s left", "ending"),
        (1.0, "ending", "left"),
    ],
)
def test_the_bar_names_a_run_that_ends(
    share: float | None, said: str, unsaid: str
) -> None:
    """After its last step it still draws previews and writes files: it has no time left
    that is known.
    """
    row = {"kind": "train", "project": "one", "about": "run-1", "share": share}
    row |= {"title": "One", "loss": None, "left": "7 s" if share else ""}
    row |= {"paused": False, "failed": ""}
    shown = visible_text(web.render("status", rows=[row], open_name="one"))
    assert said in shown
    assert unsaid not in shown


def test_a_run_that_was_not_resumed_says_so_beside_how_it_stood(
    tmp_path: Path, client: Any
) -> None:
    project = projects.create(tmp_path, "one", preset="toy")
    run = project.folder / "runs" / "run-1"
    steps(run, range(1, 4))
    write_json(run / "config.json", {"steps": 3, "settings": {}})
    os.utime(run / "journal.jsonl", (time.time() - 60, time.time() - 60))
    assert "this changes what it learns" not in client.get("/p/one/train").text
    ended_job(project, "train", 1, "videotune: this changes what it learns\n")
    shown = client.get("/p/one/train").text
    assert "this changes what it learns" in shown
    assert "3 of 3" in shown


def test_samples_seen_are_those_that_were_shown(tmp_path: Path, client: Any) -> None:
    """A step of videos may take fewer than the batch."""
    project = projects.create(tmp_path, "one", preset="toy")
    run = full_run(project.folder / "runs" / "run-1")
    num_shown = 0
    for line in (run / "journal.jsonl").read_text().splitlines():
        num_shown += len(json.loads(line).get("window_ids", ()))
    write_json(run / "plan.json", plan() | {"effective_batch": 8})

    shown = visible_text(client.get("/p/one/train?run=run-1").text)
    assert f"{num_shown:,} samples seen" in shown


@pytest.mark.parametrize(
    ("printed", "is_offered"),
    [
        (
            "videotune: the data of runs/run-1 has changed since it started: 1 clip. "
            "Restore it, start a new run, or continue with the changed data: "
            "--allow-data-change\n",
            True,
        ),
        ("videotune: this changes what it learns\n", False),
    ],
)
def test_a_resume_that_changed_clips_stop_offers_to_go_on_with_them(
    tmp_path: Path, client: Any, printed: str, is_offered: bool
) -> None:
    project = projects.create(tmp_path, "one", preset="toy")
    run = project.folder / "runs" / "run-1"
    steps(run, range(1, 4))
    write_json(run / "config.json", {"steps": 9, "settings": {}})
    os.utime(run / "journal.jsonl", (time.time() - 60, time.time() - 60))
    ended_job(project, "train", 1, printed)
    shown = client.get("/p/one/train").text
    assert ("&#34;data&#34;: &#34;changed&#34;" in shown) is is_offered
    assert "--allow" not in shown


def test_another_number_of_steps_is_meant_where_it_is_asked_for(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    project = projects.create(tmp_path, "one", preset="toy")

    def resumed(**words: str) -> tuple[str, ...]:
        assert (
            client.post("/p/one/run/resume", data={"run": "run-1", **words}).status_code
            == 204
        )
        entry = queue_page.training_entry(tmp_path, project, "run-1")
        assert entry is not None
        queue_page.ACTIONS["remove"][0](queue_page.queue_folder(tmp_path), entry.name)
        return entry.arguments

    assert resumed() == (
        "train",
        "--out",
        str(project.folder / "runs/run-1"),
        "--resume",
    )
    assert resumed(step="2")[-2:] == ("--from", "2")
    assert resumed(data="changed")[-1] == "--allow-data-change"
    assert resumed(step="2", steps="50")[-3:] == ("--set", "steps=50", "--override")
    assert (
        client.post(
            "/p/one/run/resume", data={"run": "run-1", "steps": "many"}
        ).status_code
        == 422
    )


def test_a_run_that_is_done_trains_on_only_to_a_later_end(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    project = projects.create(tmp_path, "one", preset="toy")
    run = project.folder / "runs" / "run-1"
    full_run(run)
    write_json(run / "config.json", {"steps": 120, "settings": {}})
    for step in (60, 120):
        (run / f"checkpoints/step-{step}/COMPLETE").touch()

    def status_of(**fields: str) -> int:
        answer = client.post("/p/one/run/resume", data={"run": "run-1", **fields})
        return int(answer.status_code)

    assert status_of() == 422
    assert status_of(step="120") == 422
    assert status_of(steps="120") == 422
    assert status_of(step="60", steps="60") == 422
    assert queue_page.training_entry(tmp_path, project, "run-1") is None
    assert status_of(steps="121") == 204


@pytest.mark.parametrize("variant", ["LORA", "DORA", "LOHA", "LOKR", "OFT"])
def test_export_offers_what_an_adapter_of_the_kind_can_be_written_as(
    tmp_path: Path, variant: str
) -> None:
    import torch

    from videotune.exporter.formats import formats_of
    from videotune.models.base_model import place
    from videotune.models.wan import Wan

    family = Wan(place("asset:toy").folder, torch.device("cpu"), torch.float32)
    write_json(
        tmp_path / "config.json",
        {"settings": {"training_method": "LORA", "lora": {"variant": variant}}},
    )
    offered = results_page.export_formats(status.read_live(tmp_path))
    assert sorted(offered) == sorted(formats_of(family, variant))
    assert set(offered) <= set(projects.texts()["formats"])


def test_measured_samples_stand_beside_the_clip_that_they_are_nearest_to(
    tmp_path: Path, client: Any
) -> None:
    project = projects.create(tmp_path, "one", preset="toy")
    run, clip = project.folder / "runs" / "run-1", project.folder / "clips" / "cat.mp4"
    (run / "sample_metrics").mkdir(parents=True)
    for path in (run / "sample_metrics" / "a.mp4", clip, run / "preview.mp4"):
        path.write_bytes(b"video")
    one = {
        "path": "sample_metrics/a.mp4",
        "prompt": "a cat",
        "seed": 7,
        "clip": str(clip),
    }
    one |= {"similarity": 0.98765, "copy": True}
    probe = {
        "kind": "sample_metrics",
        "step": 20,
        "replication": {"line": 0.6451},
        "samples": [one, {**one, "path": "sample_metrics/gone.mp4"}],
    }
    sample = {"kind": "sample", "step": 20, "prompt": "a dog", "path": "preview.mp4"}
    (run / "journal.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (sample, probe))
    )
    write_json(run / "config.json", {})
    shown = client.get("/p/one/results").text
    assert "file?path=runs%2Frun-1%2Fsample_metrics%2Fa.mp4" in shown
    assert "file?path=clips%2Fcat.mp4" in shown
    assert "gone.mp4" not in shown

    # The scale of the likeness, and which samples have none.
    place = shown.partition('id="measured"')[2].partition("</details>")[0]
    measured, _, previews = place.partition("<h4>Previews</h4>")
    heading, _, tile = measured.partition('<div class="tiles">')
    assert "0.645" in heading
    said = " ".join(re.sub("<[^>]+>", " ", tile).split())
    assert "cat.mp4. Likeness 0.988, above 0.645: likely a copy" in said
    assert "preview.mp4" in previews
    assert "preview.mp4" not in measured
    assert "Likeness" not in previews
    assert "not compared" in previews
    assert " controls" not in place, "they would hide a small picture"


def test_a_run_that_has_saved_its_beginning_only_has_no_result(
    tmp_path: Path, client: Any
) -> None:
    project = projects.create(tmp_path, "one", preset="toy")
    run = project.folder / "runs" / "run-1"
    steps(run, range(1, 2))
    write_json(run / "config.json", {"steps": 9, "settings": {}})
    (run / "checkpoints/step-0").mkdir(parents=True)
    (run / "checkpoints/step-0/COMPLETE").touch()
    line = {"kind": "save", "step": 0, "path": "checkpoints/step-0"}
    with (run / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps(line) + "\n")
    shown = client.get("/p/one/results?run=run-1").text
    assert "Nothing is trained yet" in shown
    assert "Write the files of step 0" not in shown


@pytest.mark.parametrize(
    ("doing", "said"),
    [
        ("training", "44 %, 2 min left"),
        ("measuring", "44 %, measuring the validation loss"),
        ("loading", "44 %, loading the model"),
    ],
)
def test_the_bar_says_what_a_run_does_between_its_steps(doing: str, said: str) -> None:
    row = {"kind": "train", "project": "one", "about": "run-1", "share": 0.44}
    row |= {"title": "One", "loss": 0.5, "left": "2 min", "paused": False, "failed": ""}
    shown = web.render("status", rows=[row | {"doing": doing}], open_name="one")
    assert said in visible_text(shown)


def test_the_bar_says_what_a_run_does_before_its_first_step() -> None:
    row = {"kind": "train", "project": "one", "about": "run-1", "share": None}
    row |= {"title": "One", "loss": None, "left": "", "paused": False, "failed": ""}
    shown = visible_text(
        web.render("status", rows=[row | {"doing": "encoding"}], open_name="one")
    )
    assert "encoding the clips" in shown
    assert "starting" in visible_text(
        web.render("status", rows=[row | {"doing": ""}], open_name="one")
    )
