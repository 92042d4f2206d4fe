"""A base model whose licence passes to what is trained: its terms are shown and accepted
on the page Setup, and no run is queued before.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.sounding_clips import write_sounding_clips
from tests.support.waiting import wait_until
from videotune.files import write_json
from videotune.models.registry import find
from videotune.studio import plan_server, projects, queue_page
from videotune.studio.project_plan import plan_file, plan_question
from videotune.user_settings import ACCEPT_VARIABLE, accept_terms, accepted_terms

SETUP = "/p/bees/setup"
TERMS = find("ltx2").spec.licence_terms


@pytest.fixture
def bees(
    tmp_path: Path,
    tiny_bases: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> projects.Project:
    """A project of a base model in a folder, with clips."""
    monkeypatch.delenv(ACCEPT_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(queue_page, "ensure_worker", lambda root: None)
    project = projects.create(tmp_path, "Bees", preset="toy")
    write_sounding_clips(project.folder / "clips", sounding=1, silent=1)
    settings = {
        "family": "ltx2",
        "base_model_name": str(tiny_bases("ltx2")),
        "resolution": "32x32",
        "video_config": {"frames": 9},
        "steps": 2,
    }
    projects.save_draft(project, settings)
    return project


def plan_region(client: Any) -> str:
    text = client.get(SETUP).text
    return str(text.split('id="r-plan"')[1].split('id="start"')[0])


def wait_for_plan(client: Any, project: projects.Project) -> dict[str, Any]:
    """Load the page until its plan is that of the settings, and return the answer."""

    def is_there() -> bool:
        client.get(SETUP)
        answer = plan_server.answer_so_far(out, plan_question(project, "plan"))
        return bool(answer["current"])

    out = plan_file(project)
    wait_until(is_there, 120)
    return plan_server.answer_so_far(out, plan_question(project, "plan"))


def queued_runs(project: projects.Project) -> int:
    return len(queue_page.project_entries(project.folder.parent, project))


def test_a_run_waits_until_the_licence_is_accepted(
    client: Any, bees: projects.Project
) -> None:
    answer = wait_for_plan(client, bees)
    assert answer["plan"]["licence"]["terms"] == TERMS, answer.get("words")
    page = plan_region(client)
    assert f'href="{TERMS}"' in page
    assert 'data-why=""' not in page

    sweep = {"key": "steps", "values": "2,3"}
    for address, form in (
        ("/p/bees/start", {}),
        (f"{SETUP}/start", {"title": "a"}),
        ("/p/bees/sweep", sweep),
    ):
        assert client.post(address, data=form).status_code == 422
    wrong = client.post(f"{SETUP}/licence", data={"terms": "https://example.org"})
    assert wrong.status_code == 422
    assert queued_runs(bees) == 0
    assert accepted_terms() == []

    assert client.post(f"{SETUP}/licence", data={"terms": TERMS}).status_code < 300
    assert accepted_terms() == [TERMS]
    assert TERMS not in plan_region(client)
    assert client.post("/p/bees/start", data={}).status_code < 300
    assert client.post("/p/bees/sweep", data=sweep).status_code < 300
    assert queued_runs(bees) == 3


def test_who_has_accepted_in_a_terminal_is_not_asked(
    client: Any, bees: projects.Project
) -> None:
    accept_terms(TERMS)
    wait_for_plan(client, bees)
    assert TERMS not in plan_region(client)
    assert client.post("/p/bees/start", data={}).status_code < 300


# One test for all of them: the plan that they are written into takes longer than the rest.
def test_a_plan_that_was_written_by_somebody_else_names_no_address(
    client: Any, bees: projects.Project
) -> None:
    licences: list[Any] = [
        {"model": "a", "name": "b", "terms": "javascript:alert(1)"},
        {"model": "a", "name": "b"},
        {"terms": ["https://example.org"]},
        "https://example.org",
        ["https://example.org"],
    ]
    wait_for_plan(client, bees)
    path = plan_file(bees)
    answer = json.loads(path.read_text(encoding="utf-8"))
    for licence in licences:
        answer["plan"]["licence"] = licence
        write_json(path, answer)
        page = client.get(SETUP)
        assert page.status_code == 200, licence
        assert "javascript:" not in page.text.split('id="r-plan"')[1]
        assert "example.org" not in page.text
        posted = client.post(f"{SETUP}/licence", data={"terms": "javascript:alert(1)"})
        assert posted.status_code == 422
        assert accepted_terms() == []
