"""The path of a project: each page shows the same stages and the same next step."""

import json
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.reports import (
    export_step,
    full_run,
    overfitting_run,
    visible_text,
    write_file,
)
from tests.support.studio_fuzz import PLAN
from videotune.queue import entries
from videotune.studio import (
    gpu,
    plan_server,
    project_plan,
    projects,
    queue_page,
    run_states,
    stages,
    this_computer,
)
from videotune.studio.projects import Project
from videotune.studio.stage import Stage
from videotune.studio.stages import next_stage
from videotune.studio.web import FormData, PageContext

PAGES = ("data", "setup", "train", "results")


@pytest.fixture
def cats(tmp_path: Path) -> Project:
    return projects.create(tmp_path, "Cats")


def stages_of(project: Project) -> dict[str, Stage]:
    root = project.folder.parent
    current = projects.find_project(root, project.name)
    page = PageContext(root=root, is_local=True, project=current, query=FormData({}))
    return {stage.name: stage for stage in stages.stages(page)}


def action_of(project: Project) -> str:
    step = next_stage(list(stages_of(project).values()))
    return "" if step is None else step.action


def add_clip(project: Project, clips: Path, caption: str = "") -> None:
    clip = next(path for path in clips.rglob("*.mp4"))
    shutil.copy(clip, project.folder / "clips" / "a.mp4")
    if caption:
        (project.folder / "clips" / "a.txt").write_text(caption)


def path_of(client: Any, page: str) -> dict[str, str]:
    """Return how each stage stands, as a page of the project shows it."""
    text = client.get(f"/p/cats/{page}").text
    path = text.split('<nav class="path"')[1].split("</nav>")[0]
    rows = re.findall(r"<b>(\w+)</b> <span>([^<]*)</span>", path)
    return {name.lower(): words for name, words in rows}


def answer_plan(project: Project, **answer: Any) -> None:
    """Write the answer to the plan's question of this moment."""
    current = projects.find_project(project.folder.parent, project.name)
    question = project_plan.plan_question(current, "plan")
    write_file(
        project.folder / ".studio",
        "plan.json",
        {"key": plan_server.key_of(question), "part": "full", **answer},
    )


def test_the_next_step_moves_on_with_what_is_done(
    cats: Project, small_clips: Path
) -> None:
    assert action_of(cats) == "Add clips"
    add_clip(cats, small_clips)
    assert stages_of(cats)["clips"].state == "done"
    assert action_of(cats) == "Caption 1 clip"
    add_clip(cats, small_clips, "a ball")
    assert stages_of(cats)["captions"].state == "done"
    assert action_of(cats) == "Choose a model and a card"
    projects.update(cats, vram=16.0)
    assert action_of(cats) == "Choose a model", "the card is known"
    projects.update(cats, preset="toy")
    assert action_of(cats) == "See the plan"
    assert stages_of(cats)["plan"].address(cats) == "/p/cats/setup#r-plan"

    answer_plan(cats, code=1, words="broken")
    assert stages_of(cats)["plan"].state == "blocked"
    answer_plan(cats, plan=PLAN | {"fits": False, "hours": 1.0})
    assert stages_of(cats)["plan"].state == "blocked"
    answer_plan(cats, plan=PLAN | {"fits": True, "hours": 1.5, "hours_beside": 0.0})
    assert stages_of(cats)["plan"].text == "fits, 1 h 30 min"
    assert action_of(cats) == "Start training"

    # a plan for other settings is no plan
    projects.save_draft(cats, {"steps": 7})
    assert stages_of(cats)["plan"].state == "open"


def test_the_path_and_the_plan_on_the_page_tell_the_same(
    client: Any,
    cats: Project,
    small_clips: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The path is above the plan, and yet it is the one that sends the question."""
    add_clip(cats, small_clips, "a ball")
    projects.update(cats, preset="toy")
    sent: list[Any] = []

    def make_worker(**call: Any) -> Any:
        start = partial(sent.append, call)
        return SimpleNamespace(start=start, is_alive=lambda: True)

    monkeypatch.setattr(plan_server, "Thread", make_worker)
    for page in ("data", "train"):
        assert path_of(client, page)["plan"] == "not calculated"
    assert sent == []

    assert path_of(client, "setup")["plan"] == "being calculated"
    assert len(sent) == 1

    answer_plan(cats, plan=PLAN | {"fits": True, "hours": 1.5, "hours_beside": 0.0})
    for page in PAGES:
        assert path_of(client, page)["plan"] == "fits, 1 h 30 min", page
    assert len(sent) == 1


def test_a_plan_that_another_page_is_waiting_for_is_being_calculated(
    cats: Project, small_clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_clip(cats, small_clips, "a ball")
    projects.update(cats, preset="toy")
    current = projects.find_project(cats.folder.parent, cats.name)
    out = project_plan.plan_file(current)
    question = project_plan.plan_question(current, "plan")
    release = Event()
    worker = Thread(target=release.wait, args=(60,))
    worker.start()
    monkeypatch.setitem(plan_server._workers, out, worker)
    monkeypatch.setitem(plan_server._current_key, out, plan_server.key_of(question))
    try:
        plan = stages_of(cats)["plan"]
        assert (plan.state, plan.text) == ("busy", "being calculated")
        projects.save_draft(cats, {"steps": 7})
        assert stages_of(cats)["plan"].state == "open", "it is of other settings"
    finally:
        release.set()
        worker.join()


def test_a_run_that_has_ended_offers_its_result(
    cats: Project, small_clips: Path
) -> None:
    add_clip(cats, small_clips, "a ball")
    projects.update(cats, preset="toy")
    run = cats.folder / "runs" / "run-1"
    full_run(run)
    write_file(run, "config.json", {"steps": 120})
    assert action_of(cats) == ""
    result = stages_of(cats)["result"]
    assert (result.state, result.action) == ("done", "Go to the LoRA")
    assert result.address(cats) == "/p/cats/results?run=run-1#r-result"

    write_file(run, "exports.json", [])
    assert action_of(cats) == "Write the file"

    # settings that have changed since are those of the next run
    later = time.time() + 60
    projects.save_draft(cats, {"steps": 7})
    os.utime(cats.folder / "config.json", (later, later))
    assert action_of(cats) == "See the plan"
    assert stages_of(cats)["run"].state == "open"
    assert stages_of(cats)["run"].text == "settings changed since run-1"


@pytest.mark.parametrize("why", ["stopped", "early"])
def test_a_run_that_more_steps_make_worse_offers_its_recommended_checkpoint(
    client: Any, cats: Project, small_clips: Path, why: str
) -> None:
    add_clip(cats, small_clips, "a ball")
    projects.update(cats, preset="toy")
    run = overfitting_run(cats.folder / "runs" / "run-1", why)
    assert action_of(cats) == "Write the file"
    result = stages_of(cats)["result"]
    assert result.text == "no file of step 60"
    assert result.address(cats) == "/p/cats/results?run=run-1#r-result"
    if why == "stopped":
        assert "stopped at step 120 of 1,500" in stages_of(cats)["run"].text

    export_step(run, 120)
    assert action_of(cats) == "Write the file", "the file is of another step"
    export_step(run, 60)
    assert action_of(cats) == ""
    assert stages_of(cats)["result"].action == "Go to the LoRA"

    # The filled button leads to the checkpoint; Resume is a plain one.
    page = client.get("/p/cats/train?run=run-1").text
    state = page.split('id="state-title"')[1].split("</section>")[0]
    filled = re.findall(r'class="btn primary".*?<span>(.*?)</span>', state)
    assert filled == ["Go to step 60"]
    assert 'href="/p/cats/results?run=run-1#r-result"' in state
    assert "<span>Resume</span>" in state


def test_a_checkpoint_before_the_last_one_is_not_called_the_last(
    client: Any, cats: Project
) -> None:
    run = overfitting_run(cats.folder / "runs" / "run-1")
    for step in (60, 120):
        (run / f"checkpoints/step-{step}/COMPLETE").touch()
    text = visible_text(client.get("/p/cats/results?run=run-1").text)
    assert "Its error on clips kept aside was the lowest." in text
    assert "It is the last one" not in text


def test_a_stopped_run_that_still_learns_is_resumed(
    client: Any, cats: Project, small_clips: Path
) -> None:
    add_clip(cats, small_clips, "a ball")
    projects.update(cats, preset="toy")
    run = overfitting_run(cats.folder / "runs" / "run-1")
    journal = run / "journal.jsonl"
    text = journal.read_text(encoding="utf-8")
    journal.write_text(text.replace("OVERFITTING", "LEARNING"), encoding="utf-8")
    assert action_of(cats) == "Go to Resume of run-1"
    page = client.get("/p/cats/train?run=run-1").text
    assert "take-result" not in page
    assert re.search(r'class="btn primary" hx-post="/p/cats/run/resume"', page)
    assert 'id="resume-settings"' not in page

    later = time.time() + 60
    projects.save_draft(cats, {"steps": 2000})
    os.utime(cats.folder / "config.json", (later, later))
    page = client.get("/p/cats/train?run=run-1").text
    note = page.partition('id="resume-settings"')[2].partition("</p>")[0]
    assert "to its step 1,500" in note, "not to that of the page Setup"


def test_scenes_that_wait_are_the_next_step(
    client: Any, cats: Project, small_clips: Path
) -> None:
    """The film they were cut from is in the bin, so they would not be trained."""
    add_clip(cats, small_clips, "a ball")
    film = cats.folder / "scenes" / "film"
    film.mkdir(parents=True)
    for number in (1, 2):
        (film / f"film-scene-00{number}.mp4").write_bytes(b"film")
    stage = stages_of(cats)["clips"]
    assert (stage.state, stage.part) == ("open", "r-scenes")
    assert "2 scenes" in stage.text
    assert "Keep 2 scenes" in action_of(cats)

    client.post("/p/cats/data/scene", data={"film": "film", "keep": "1"})
    assert "scene" not in stages_of(cats)["clips"].text


def test_the_path_follows_the_run_that_trains_and_not_one_that_waits(
    cats: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {"third": "queued", "second": "running", "first": "done"}
    monkeypatch.setattr(
        run_states, "run_state", lambda page, name: (None, None, None, codes[name])
    )
    page = PageContext(
        root=cats.folder.parent, is_local=True, project=cats, query=FormData({})
    )
    assert run_states.run_to_follow(page, list(codes)) == "second"
    codes["second"] = "stopped"
    assert run_states.run_to_follow(page, list(codes)) == "third", "it is the next"


def test_runs_are_in_the_order_in_which_they_began(cats: Project) -> None:
    """The folders of an imported project are all new."""
    for name, begun in (("b", 30.0), ("a", 10.0), ("c", 20.0)):
        folder = cats.folder / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        start = {"kind": "start", "time": begun}
        (folder / "journal.jsonl").write_text(json.dumps(start) + "\n")
    assert run_states.run_names(cats, cats.folder.parent) == ["b", "c", "a"]
    (cats.folder / "runs" / "a" / "journal.jsonl").write_text("damaged")
    assert run_states.run_names(cats, cats.folder.parent)[0] == "a", "by its folder"


def test_a_run_that_waits_has_not_made_its_plan_yet(
    cats: Project, small_clips: Path
) -> None:
    add_clip(cats, small_clips, "a ball")
    projects.update(cats, preset="toy")
    queue = queue_page.queue_folder(cats.folder.parent)
    entries.add(queue, "cats--run-1", {}, cats.folder / "runs" / "run-1")
    assert stages_of(cats)["run"].text == "run-1: queued"
    assert stages_of(cats)["plan"].text == "run-1 makes its own when it starts"


def test_a_run_of_another_model_is_not_that_of_the_settings(
    cats: Project, small_clips: Path
) -> None:
    """Even if it has trained since the model was changed."""
    add_clip(cats, small_clips, "a ball")
    projects.update(cats, preset="wan 2.1 1.3B LoRA 16GB", vram=16.0)
    run = cats.folder / "runs" / "run-1"
    full_run(run)
    settings = {"base_model_name": "asset:toy", "training_method": "LORA"}
    write_file(run, "config.json", {"steps": 120, "settings": settings})
    assert stages_of(cats)["run"].text == "settings changed since run-1"
    assert stages_of(cats)["result"].text == "of run-1, with older settings"
    assert action_of(cats) == "See the plan"

    projects.update(cats, preset="toy")
    later = time.time() + 60
    os.utime(run / "journal.jsonl", (later, later))
    assert stages_of(cats)["run"].state == "done"


def test_the_result_says_that_it_is_the_last_where_there_is_no_verdict(
    client: Any, cats: Project
) -> None:
    run = cats.folder / "runs" / "run-1"
    full_run(run)
    why = "no verdict: no clip is kept aside for checking"
    end = {"kind": "end", "step": 120, "why": "done", "seconds": {}}
    with (run / "journal.jsonl").open("a", encoding="utf-8") as journal:
        journal.write(json.dumps(end | {"take": {"step": 120, "why": why}}) + "\n")
    page = client.get("/p/cats/results?run=run-1").text
    text = visible_text(page)
    assert "It is the last one, and no checkpoint was compared with it." in text
    assert "No clip is kept aside for checking." in text
    assert "not known whether the model learns from your clips or copies them" in text
    assert 'href="/p/cats/data?state=used#tiles"' in page, "how to get a verdict"


def test_all_pages_show_the_same_path(client: Any, cats: Project) -> None:
    shown = set()
    for page in PAGES:
        text = client.get(f"/p/cats/{page}").text
        path = re.search(r'<nav class="path".*?</nav>', text, re.DOTALL)
        assert path is not None, page
        shown.add(path[0])
    assert len(shown) == 1
    assert "Add clips" in shown.pop()
    assert 'class="path"' not in client.get("/").text


def test_each_next_step_leads_to_the_place_where_it_is_done(
    client: Any, cats: Project
) -> None:
    """The button of the path marks what is pressed next, on the page that has it."""
    page = client.get("/p/cats/data").text
    link = re.search(r'id="next-step" href="([^"]+)"', page)
    assert link is not None
    address, _, part = link[1].partition("#")
    assert address == "/p/cats/data"
    assert f'id="{part}"' in page
    assert part == "add-clips"


def test_a_damaged_project_still_has_its_pages(client: Any, cats: Project) -> None:
    write_file(cats.folder, "config.json", "no object")
    assert client.get("/p/cats/data").status_code == 200
    write_file(cats.folder / ".studio", "plan.json", {"key": 3, "plan": "x"})
    assert client.get("/p/cats/setup").status_code == 200


def test_the_plan_says_what_this_computer_does_not_have(
    cats: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(gpu, "list_gpus", list)
    projects.update(cats, preset="toy", card="RTX 4090")
    current = projects.find_project(tmp_path, "cats")
    assert this_computer.notes_on_this_computer(current, {}) == [], "not known yet"
    hours = {"hours": 0.01, "hours_beside": 0.0, "cpu_hours": 7.0}
    (toy_note,) = this_computer.notes_on_this_computer(current, hours)
    assert "RTX 4090" in toy_note, "the toy's model is everywhere, the card is not"
    assert this_computer.hours_here(current, hours) == 7.0

    projects.update(cats, preset="wan 2.1 1.3B LoRA 16GB")
    current = projects.find_project(tmp_path, "cats")
    (model,) = this_computer.notes_on_this_computer(current, {})
    assert "Wan2.1-T2V-1.3B" in model
    assert "about 28.9 GB" in model, "as in the list of models"

    # with weights of the user's own in it, the size of the rest is not known
    projects.save_draft(current, {"text_encoder": {"file": "t5.safetensors"}})
    (model,) = this_computer.notes_on_this_computer(current, {})
    assert " GB" not in model


@pytest.mark.parametrize("page", ["train", "results"])
def test_a_page_without_a_run_has_the_button_of_the_next_step(
    client: Any, cats: Project, small_clips: Path, page: str
) -> None:
    def button() -> str:
        text = client.get(f"/p/cats/{page}").text
        empty = text.partition("No run yet")[2].partition("</div>")[0]
        assert empty.count("<a ") == 1
        assert "<button" not in empty
        return visible_text(empty.partition("<a ")[2].partition(">")[2])

    assert "Add clips" in button()
    add_clip(cats, small_clips)
    assert "Caption 1 clip" in button()
    (cats.folder / "clips" / "a.txt").write_text("a dot")
    assert "Choose a model and a card" in button()


@pytest.mark.parametrize("page", PAGES)
def test_a_button_that_opens_a_dialog_stands_on_a_page_that_has_it(
    client: Any, cats: Project, small_clips: Path, page: str
) -> None:
    for preset in ("", "toy"):
        projects.update(cats, preset=preset)
        text = client.get(f"/p/cats/{page}").text
        opened = set(re.findall(r'data-open="([^"]+)"', text))
        dialogs = set(re.findall(r'<dialog[^>]* id="([^"]+)"', text))
        assert opened <= dialogs
        add_clip(cats, small_clips)


@pytest.mark.parametrize(
    ("method", "action"),
    [("FINE_TUNE", "Go to the model"), ("EMBEDDING", "Go to the new word")],
)
def test_a_run_without_an_adapter_offers_nothing_of_one(
    client: Any, cats: Project, small_clips: Path, method: str, action: str
) -> None:
    """To merge it and to set its strength always failed, and its file is no LoRA."""
    add_clip(cats, small_clips, "a ball")
    run = full_run(cats.folder / "runs" / "run-1")
    write_file(run, "config.json", {"settings": {"training_method": method}})
    assert stages_of(cats)["result"].action == action
    page = client.get("/p/cats/results?run=run-1").text
    assert 'name="prompt"' in page
    assert 'name="strength"' not in page
    assert 'name="merge"' not in page
