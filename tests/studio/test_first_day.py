"""A person's first day: the model to begin with, the message when a base model cannot be
downloaded, numbers as people type them, the folder of projects, and the settings that a
result belongs to.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_folders import ended_job
from tests.support.reports import full_run, visible_text, write_file
from videotune.errors import VideotuneError
from videotune.hub_errors import hub_problem
from videotune.lazy import huggingface_hub as hub
from videotune.studio import (
    default_root,
    far_values,
    form,
    gpu,
    model_choices,
    plan_server,
    projects,
    queue_page,
    results_page,
    train_page,
)
from videotune.studio.base_model_problem import problem_of, problem_of_run
from videotune.studio.clip_words import STATES
from videotune.studio.first_model import first_model
from videotune.studio.model_choices import ChosenCard
from videotune.studio.status import read_live
from videotune.studio.terms import in_studio_terms
from videotune.studio.web import FormData
from videotune.text import time_span, without_thousands_marks

SETUP = "/p/cats/setup"
WAN = "wan 2.1 1.3B LoRA 16GB"


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    return projects.create(tmp_path, "Cats", preset="toy")


# --- which model to begin with


@pytest.mark.parametrize(
    ("gigabytes", "preset"),
    [(8, "wan 2.2 LoRA 8GB"), (12, "ltx 2B LoRA 12GB"), (16, WAN), (24, WAN), (4, "toy")],
)  # fmt: skip
def test_one_model_that_fits_the_card_is_the_one_to_begin_with(
    gigabytes: int, preset: str
) -> None:
    card = ChosenCard(f"a card of {gigabytes} GB", float(gigabytes))
    first = first_model(card)
    assert first.preset == preset
    (size,) = [
        size
        for family in model_choices.families_for(card)
        for size in family.sizes
        if size.preset == preset
    ]
    assert size.fits(card)
    assert first.reason.endswith(".")


def test_clips_too_short_for_a_model_make_another_one_the_first() -> None:
    card = ChosenCard("a card of 16 GB", 16.0)
    assert first_model(card, [3.0, 4.0]).preset == WAN, "33 frames at 16 a second"
    assert "2 of your 2 clips" in first_model(card, [3.0, 4.0]).reason
    short = first_model(card, [2.0, 2.0, 1.9])
    assert short.preset == "ltx 2B LoRA 12GB", "49 frames at 25 a second are shorter"


def test_the_first_model_is_marked_in_both_lists_and_comes_first(
    client: Any, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "list_gpus", list)
    projects.update(cats, preset=None, vram=16.0)
    dialog = client.get("/models", params={"card": "other", "vram": "16"}).text
    gallery = client.get(SETUP).text.split('id="r-gallery"')[1]
    for listed in (dialog, gallery):
        assert listed.count(">begin with this<") == 1
        tile = listed.split('<article class="tile preset')[1]
        assert "begin with this" in tile
        assert WAN in tile
        assert f"To begin with: {WAN}." in visible_text(listed)
        assert "calculated, not measured" in listed, "what the colours mean, in words"


# --- a base model that cannot be had


def error_of(kind: type[Exception], **response: Any) -> Exception:
    """Return an error of the Hub's library without a request."""
    error = kind.__new__(kind)
    Exception.__init__(error, "no")
    for name, value in response.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("kind", "said", "has_page"),
    [
        (hub.errors.GatedRepoError, "accept its licence", True),
        (hub.errors.RepositoryNotFoundError, "misspelt", False),
        (hub.errors.HFValidationError, "misspelt", False),
        (hub.errors.LocalEntryNotFoundError, "does not reach the Hugging Face Hub", False),
        (hub.errors.OfflineModeIsEnabled, "does not reach the Hugging Face Hub", False),
    ],
)  # fmt: skip
def test_each_reason_why_a_model_cannot_be_had_is_one_sentence(
    kind: type[Exception], said: str, has_page: bool
) -> None:
    message = f"base_model_name: {hub_problem('me/model', error_of(kind))}"
    problem = problem_of(message, "me/model")
    assert problem is not None
    assert said in problem.sentence
    assert problem.sentence.startswith("me/model ")
    assert problem.page == ("https://huggingface.co/me/model" if has_page else "")
    assert problem_of("data: no such folder", "me/model") is None


def test_the_plan_that_lacks_its_model_says_it_at_the_model_with_the_ways_out(
    client: Any, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "base_model_name: me/model: the Hub is not reached: check the network"
    answer = {"current": True, "computing": False, "code": 1, "words": message}
    monkeypatch.setattr(plan_server, "answer_so_far", lambda out, question: answer)
    monkeypatch.setattr(plan_server, "request_answer", lambda out, question: answer)
    (cats.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\0" * 64)
    projects.save_draft(cats, {"base_model_name": "me/model"})

    text = client.get(SETUP).text
    place = text.split('id="model-problem"')[1].split("</div>")[0]
    assert "me/model could not be downloaded" in place
    assert "Try again" in place
    assert "Choose a folder of this computer" in place
    assert 'data-browse="f-base_model_name"' in place
    assert "Take another model" in place
    at_field = text.split('id="u-base_model_name"')[1].split("</span>")[0]
    assert "me/model could not be downloaded" in at_field

    file = cats.folder / ".studio/plan.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    assert client.post(f"{SETUP}/replan").status_code == 204
    assert not file.exists(), "the plan is calculated again"


def test_the_run_that_lacks_its_model_says_so_too(cats: projects.Project) -> None:
    folder = ended_job(cats, "train", 1)
    (folder / "log").write_text(
        "videotune: base_model_name: me/model is gated. Agree to its terms at "
        "https://huggingface.co/me/model; then make a token\n"
    )
    job = train_page.jobs.latest(cats.folder, "train")
    run = read_live(cats.folder / "runs/run-1")
    problem = problem_of_run(run, None, job, "failed")
    assert problem is not None
    assert problem.page == "https://huggingface.co/me/model"
    assert problem_of_run(run, None, job, "failed", "you/other") is None
    assert problem_of_run(run, None, job, "done") is None


# --- numbers as people type them


@pytest.mark.parametrize(
    ("key", "typed", "means"),
    [
        ("steps", "1,000", 1000), ("steps", "12 000", 12000), ("steps", "1'000'000", 1_000_000),
        ("learning_rate", "0,001", 0.001), ("learning_rate", "0.001", 0.001),
    ],
)  # fmt: skip
def test_a_number_may_be_typed_with_its_thousands_apart(
    key: str, typed: str, means: float
) -> None:
    assert form.flatten(form.set_key({}, key, typed, "toy")) == {key: means}


def test_a_number_that_can_mean_two_is_refused_with_both() -> None:
    with pytest.raises(VideotuneError, match=r"can mean 1\.000 or 1000"):
        form.set_key({}, "loss_weighting_gamma", "1,000", "toy")
    assert FormData({"step": ["1,000"]}).number("step") == "1000"
    assert without_thousands_marks("10,00") == "10,00"


# --- values far off, and times that are read at once


def test_a_costly_value_is_noted_with_hours_and_disk() -> None:
    usual = form.inherited_values("toy")
    values = {"steps": 999_999_999, "learning_rate": 10.0}
    notes = far_values.unusual_values(
        values, usual, "It takes 31 years and 900 GB of disk."
    )
    assert "times the usual" in notes["steps"]
    assert "e+" not in notes["steps"]
    assert notes["steps"].endswith("It takes 31 years and 900 GB of disk.")
    assert "31 years" not in notes["learning_rate"], "it takes no longer"
    assert far_values.unusual_values({"steps": usual["steps"] * 9}, usual) == {}


@pytest.mark.parametrize(
    ("hours", "said"),
    [(0.01, "under 1 min"), (1.5, "1 h 30 min"), (47, "47 h 00 min"), (72, "3 days"), (24 * 365 * 40, "40 years")],
)  # fmt: skip
def test_a_long_time_is_said_in_days_or_years(hours: float, said: str) -> None:
    assert time_span(hours) == said


# --- where the projects are


def test_the_folder_of_projects_does_not_depend_on_where_the_studio_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert default_root.default_root() == home / "videotune-projects"

    (here / "videotune-projects").mkdir()
    assert default_root.default_root() == here / "videotune-projects", "of before"
    assert default_root.other_root(here / "videotune-projects") is None
    (home / "videotune-projects").mkdir()
    assert default_root.other_root(here / "videotune-projects") == home / "videotune-projects"  # fmt: skip


def test_the_page_says_where_the_projects_are_and_how_to_open_others(
    client: Any, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = client.get("/").text.split('id="projects-folder"')[1].split("</p>")[0]
    assert str(cats.folder.parent) in text
    assert "videotune studio --root FOLDER" in text


# --- what a result belongs to, and what is known of it


def test_a_result_of_older_settings_says_so_on_its_page_and_in_the_path(
    client: Any, cats: projects.Project
) -> None:
    run = cats.folder / "runs" / "run-1"
    full_run(run)
    write_file(run, "config.json", {"steps": 120})
    assert "older-settings" not in client.get("/p/cats/results").text

    later = time.time() + 60
    projects.save_draft(cats, {"steps": 7})
    os.utime(cats.folder / "config.json", (later, later))
    text = client.get("/p/cats/results").text
    place = text.split('id="older-settings"')[1].split("</div>")[0]
    assert "belongs to the settings that run-1 was trained with" in place
    assert 'href="/p/cats/setup#start"' in place
    path = visible_text(text.split('<nav class="path"')[1].split("</nav>")[0])
    assert "of run-1, with older settings" in path
    assert "after the run" not in path


def test_a_run_that_trains_with_the_settings_of_now_is_named_beside_older_results(
    client: Any, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    (cats.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\0" * 64)
    run = cats.folder / "runs" / "run-1"
    full_run(run)
    write_file(run, "config.json", {"steps": 120})
    later = time.time() + 60
    projects.save_draft(cats, {"steps": 7})
    os.utime(cats.folder / "config.json", (later, later))

    def place() -> str:
        text = str(client.get("/p/cats/results?run=run-1").text)
        return text.split('id="older-settings"')[1].split("</div>")[0]

    queue_page.queue_run(cats.folder.parent, cats, "run-2")
    assert "run-2" not in place(), "it was queued with the settings before"

    os.utime(cats.folder / "config.json")
    assert "run-2 trains with those" in place()
    assert "Train with the settings of now" not in place()
    assert 'href="/p/cats/train?run=run-2"' in place()


def test_publishing_without_a_login_is_off_and_says_the_way(
    client: Any, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_run(cats.folder / "runs" / "run-1")
    for token, is_off in ((None, True), ("hf_x", False)):
        monkeypatch.setattr(results_page, "get_token", lambda token=token: token)
        text = client.get("/p/cats/results").text
        button = text.split('data-open="publish"')[1].split(">")[0]
        assert ("disabled" in button) is is_off
        assert ("hf auth login" in text) is is_off


def test_a_downloaded_file_has_the_name_of_its_project(
    client: Any, cats: projects.Project
) -> None:
    folder = cats.folder / "runs/run-1/export"
    folder.mkdir(parents=True)
    for name, sent in (
        ("run-1-step-5.safetensors", "cats-run-1-step-5.safetensors"),
        ("cats-step-5.safetensors", "cats-step-5.safetensors"),
    ):
        (folder / name).write_bytes(b"x")
        reply = client.get("/p/cats/file", params={"path": f"runs/run-1/export/{name}"})
        assert f'filename="{sent}"' in reply.headers["Content-Disposition"]


# --- clips kept aside


def test_the_words_for_clips_kept_aside_are_the_same_everywhere(
    client: Any, cats: projects.Project
) -> None:
    (cats.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\0" * 64)
    assert STATES["held out"].label == "kept aside"
    text = client.get("/p/cats/data").text
    assert 'aria-label="Keep a.mp4 aside for checking"' in text
    client.post("/p/cats/data/move", data={"path": "clips/a.mp4", "to": "held-out"})
    text = client.get("/p/cats/data").text
    assert 'aria-label="Train on a.mp4 again"' in text
    assert "kept aside" in text

    # as runs of earlier versions say it
    said = in_studio_terms("no clip is held out, and only held-out clips show copying")
    assert said == "no clip is kept aside for checking, and only clips kept aside show copying"  # fmt: skip
    assert in_studio_terms("held-out/a.mp4 is damaged") == "held-out/a.mp4 is damaged"
