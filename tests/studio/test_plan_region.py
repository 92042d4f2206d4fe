"""The plan on the page Setup belongs to the settings on the page, or has no numbers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import write_clip
from tests.support.job_folders import ended_job
from tests.support.reports import visible_text
from videotune.data.remarks import SERIOUS, Remark
from videotune.studio import (
    clip_row,
    clip_words,
    clips,
    far_values,
    form,
    gpu,
    model_choices,
    plan_server,
    preset_hours,
    project_plan,
    projects,
    start_questions,
    this_computer,
)
from videotune.studio.memory_bar import memory_parts
from videotune.text import duration

HX = {"HX-Request": "true"}
SETUP = "/p/cats/setup"

PLAN = {
    "fits": True,
    "verdict": "fits",
    "hours": 1.7,
    "hours_beside": 0.0,
    "seconds_a_step": 0.87,
    "steps": 4321,
    "device": {
        "card": "RTX 4090", "measured": None, "vram_bytes": 24 * 2**30, "memory_from": "card",
        "spare_bytes": 0, "unstreamed_bytes": 0, "need_bytes": 16.9 * 2**30, "phase": "training", "parts": {"weights": 2**30},
    },
    "disk": {"run_bytes": 1},
    "clips": {"used": 5, "held_out": 0, "skipped": 0},
    "views": {"per_window": {"min": 1, "max": 1, "band": "high"}, "advice": ""},
    "remedies": ["--set batch_size=1: less at once"],
    "notes": ["frames 18 becomes 17: this model takes 4n+1 frames"],
    "note_codes": ["frame_count"],
}  # fmt: skip


@pytest.fixture
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> projects.Project:
    monkeypatch.setattr(gpu, "list_gpus", list)
    project = projects.create(tmp_path, "Cats", preset="toy")
    (project.folder / "clips/a.mp4").write_bytes(b"\0\0\0\x20ftypisom" + b"\0" * 64)
    (project.folder / "clips/a.txt").write_text("a cat\n")
    return project


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The answer of the plan server, which a test fills in."""
    values: dict[str, Any] = {"current": False}

    def request_answer(out: Path, question: dict[str, Any]) -> dict[str, Any]:
        return values | {"computing": not values["current"]}

    monkeypatch.setattr(plan_server, "request_answer", request_answer)
    return values


def region(client: Any) -> str:
    text = client.get(SETUP).text
    return str(text.split('id="r-plan"')[1].split('id="start"')[0])


def test_numbers_of_an_older_state_are_not_shown(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    answer.update({"plan": PLAN, "current": True, "measuring": False})
    now = region(client)
    assert all(text in now for text in ("4,321", ">fits<", "16.9 of 24.0", "0.87"))
    assert 'data-why=""' in now
    assert "Frames 18 becomes 17" in now.split("<details")[0], "not folded away"
    assert "--set" not in now

    answer["current"] = False
    old = region(client)
    assert not any(text in old for text in ("4,321", ">fits<", "16.9", "0.87"))
    assert "The plan is being calculated. You can start without it." in old
    assert 'data-why=""' in old

    answer["measuring"] = True
    answer["plan"] = {**PLAN, "device": None, "hours": None, "seconds_a_step": None}
    known = region(client)
    assert "4,321" in known
    assert ">fits<" not in known

    answer.update(
        {"current": True, "measuring": False, "code": 1, "words": "give --data DIR"}
    )
    failed = region(client)
    assert "4,321" not in failed
    assert "Give data DIR" in failed
    assert "It cannot start" in failed


def test_what_is_encoded_for_conditions_is_part_of_the_disk(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    disk = {"run_bytes": 10**9, "latent_entries": 10, "latent_bytes": 10**9}
    answer.update({"plan": PLAN | {"disk": disk}, "current": True, "measuring": False})
    plain = region(client)
    assert "2.00 GB" in plain
    assert "plan-conditions" not in plain

    disk |= {"condition_entries": 30, "condition_bytes": 4 * 10**9}
    answer["plan"] = PLAN | {"disk": disk, "hours_encoding": 0.5}
    text = re.sub(r"<[^>]*>", "", region(client))
    assert "6.00 GB" in text
    assert "Conditions: 30 of the 40 encoded videos of the cache" in text
    assert "4.00 GB of its 5.00 GB" in text
    assert "Encoding once: 30 min" in text


def test_the_time_of_a_card_that_is_not_here_names_the_card(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    answer.update({"plan": PLAN, "current": True, "measuring": False})
    assert "seconds a step</span>" in region(client), "no card: the time of this CPU"

    projects.update(cats, card="RTX 4090")
    text = region(client)
    assert "seconds a step on RTX 4090</span>" in text
    answer["plan"] = PLAN | {"cpu_hours": 0.2}
    assert "on the CPU of this computer" in region(client), "the toy trains anywhere"


def test_memory_of_a_card_is_shown_of_a_model_that_needs_one_or_has_one(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    answer.update({"plan": PLAN, "current": True, "measuring": False})
    assert "Memory of the card" in region(client)
    no_card = {**PLAN["device"], "card": None, "vram_bytes": None}
    answer["plan"] = PLAN | {"device": no_card, "fits": None}
    assert "Memory of the card" not in region(client), "the toy trains anywhere"
    projects.update(cats, preset="wan 2.2 LoRA")
    assert "Memory of the card" in region(client)


@pytest.mark.parametrize(("needed", "is_short"), [(5, False), (30, True)])
def test_memory_of_the_computer_is_shown_and_said_where_it_is_too_little(
    needed: int,
    is_short: bool,
    client: Any,
    cats: projects.Project,
    answer: dict[str, Any],
) -> None:
    host = {"need_bytes": needed << 30, "total_bytes": 16 << 30, "parts": {}}
    answer.update({"plan": PLAN | {"host": host}, "current": True, "measuring": False})
    text = region(client)
    assert f"{needed}.0 GB" in text
    badges = re.findall(r'id="plan-verdict"><span class="badge (\w+)">([^<]*)<', text)
    if is_short:
        assert badges == [("bad", "too little memory")], "one word, one colour"
        assert "This computer has 16.0 GB of memory beside the card" in text
    else:
        assert badges == [("good", "fits")]


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (200, "before the first step and at the end only"),
        (20, "before the first step, then every 20 steps"),
        (0, "none"),
    ],
)
def test_the_plan_says_when_previews_are_drawn(
    interval: int,
    words: str,
    client: Any,
    cats: projects.Project,
    answer: dict[str, Any],
) -> None:
    settings = {"sample_after": interval, "samples": ["a cat"]}
    plan = PLAN | {"steps": 60, "settings": settings}
    answer.update({"plan": plan, "current": True, "measuring": False})
    (line,) = re.findall(r'id="plan-previews">(.*?)</p>', region(client))
    assert f"Previews: {words}" in re.sub("<[^>]+>", "", line)


def test_a_clip_that_cannot_be_used_is_said_once_with_its_remedies(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    answer.update({"plan": PLAN, "current": True, "measuring": False})
    job = ended_job(cats, "check", 0)
    row = {
        "path": str(cats.folder / "clips/a.mp4"), "used": False, "held_out": False, "reason": "decode_error",
        "detail": "cut short", "source_seconds": None, "captions": [], "warnings": [], "notes": [],
    }  # fmt: skip
    (job / "out").write_text(json.dumps({"clips": [row], "notes": []}))
    clips._check_result.cache_clear()
    clips._tables.clear()

    text = region(client)
    assert text.count("cannot be used: a.mp4") == 1
    assert "Remove a.mp4" in text
    assert "Leave it out" in text
    assert "--allow-skips" not in text
    assert "Decide what happens" in text
    reply = client.post(
        f"{SETUP}/fact", data={"key": "allow_skips", "value": "true"}, headers=HX
    )
    assert reply.status_code == 200
    assert 'data-why=""' in region(client)


def test_the_page_knows_from_which_version_on_a_plan_is_its_own(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    answer.update({"plan": PLAN, "current": True, "measuring": False})
    versions = []
    for step, value in enumerate(("40", "50", "60")):
        reply = client.post(f"{SETUP}/set", data={"key": "steps", "value": value})
        versions.append(int(reply.headers["VT-Settings"]))
        assert f'data-version="{versions[step]}"' in region(client)
    reply = client.post(f"{SETUP}/fact", data={"key": "vram", "value": "24"})
    versions.append(int(reply.headers["VT-Settings"]))
    assert versions == sorted(set(versions))


def test_values_that_the_page_has_sent_itself_are_no_conflict(
    client: Any, cats: projects.Project
) -> None:
    def send(value: str, *was: str) -> Any:
        data = {"key": "learning_rate", "value": value, "was": list(was)}
        return client.post(f"{SETUP}/set", data=data)

    assert send("1e-4", "").json()["now"] == "0.0001"
    assert send("1e-4", "").status_code == 200, "sent twice, after a silence"
    assert send("2e-4", "", "1e-4").status_code == 200, "the first one had arrived"
    assert send("3e-4", "", "1e-4").json()["now"] == "0.0002"
    assert send("3e-4", "", "1e-4").status_code == 409
    assert projects.draft(cats) == {"learning_rate": 2e-4}

    fact = {"key": "card", "value": "RTX 4090", "was": "RTX 4080"}
    assert client.post(f"{SETUP}/fact", data=fact).json()["now"] == ""
    assert client.post(f"{SETUP}/fact", data=fact | {"was": ""}).status_code == 200
    assert client.post(f"{SETUP}/fact", data=fact).status_code == 200


def test_a_value_far_from_the_presets_is_noted(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    usual = form.inherited_values("toy")
    rate = usual["learning_rate"]
    notes = far_values.unusual_values(
        {"learning_rate": rate * 100, "steps": 1, "lora.rank": usual["lora.rank"]},
        usual,
    )
    assert list(notes) == ["learning_rate"]
    assert notes["learning_rate"].startswith("100 times the usual")
    assert far_values.unusual_values({"learning_rate": rate / 10}, usual)
    assert far_values.unusual_values({"learning_rate": rate * 2}, usual) == {}
    client.post(f"{SETUP}/set", data={"key": "learning_rate", "value": "100"})
    assert "the training may break" in client.get(SETUP).text


def test_the_reason_belongs_to_the_value_that_it_explains(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    client.post(f"{SETUP}/set", data={"key": "learning_rate", "value": "0.5"})
    text = client.get(SETUP).text
    more = text.split('id="ref-learning_rate"')[1].split("</p>")[0]
    usual = form.format_value(form.inherited_values("toy")["learning_rate"])
    assert f"Now 0.5, your own value; the preset&#39;s is {usual}" in more
    assert set(re.findall(r"Why ([\d.e-]+):", more)) <= {usual}
    assert "higher learns faster, can break" in text
    options = text.split('id="sweep-key-0"')[1].split("</select>")[0]
    assert options.index(">Learning rate<") < options.index("All others")
    assert ">video_config" not in options


@pytest.mark.parametrize(
    ("hours", "said"), [(1.7, duration(1.7 * 3600)), (0.01, "under 1 min")]
)
def test_the_plan_and_the_list_of_models_name_the_same_time(
    client: Any,
    cats: projects.Project,
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    hours: float,
    said: str,
) -> None:
    projects.update(cats, vram=24.0)
    answer.update({"plan": PLAN | {"hours": hours}, "current": True})
    listed = {
        "card": "a card of 24 GB",
        "total": 1,
        "presets": {"toy": {"fits": True, "hours": hours}},
    }
    monkeypatch.setattr(plan_server, "read_answer", lambda out: listed)
    text = client.get(SETUP).text
    assert f">{said}</b>" in text.split('id="r-plan"')[1].split("plan-toggle")[0]
    gallery = text.split('id="r-gallery"')[1]
    assert f">{said}</b>" in gallery
    assert 'id="hours-basis"' in gallery, "the values that the user set are not in it"


def test_a_memory_alone_has_the_times_of_example_cards(
    client: Any,
    cats: projects.Project,
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    projects.update(cats, vram=24.0)
    times = {"hours_beside": 0.5, "seconds_a_step": 1.0}
    examples = [
        {"card": "RTX 3090", "hours": 3.5, **times},
        {"card": "RTX 4090", "hours": 1.5, **times},
    ]
    answer.update(
        {"plan": PLAN | {"hours": None, "examples": examples}, "current": True}
    )
    listed = {"presets": {"toy": {"fits": True, "hours": None, "examples": examples}}}
    monkeypatch.setattr(
        plan_server, "read_answer", lambda out: listed | {"card": "a card of 24 GB"}
    )
    text = re.sub(r"<[^>]*>", "", client.get(SETUP).text)
    assert "Time: 4 h 00 min on RTX 3090 to 2 h 00 min on RTX 4090." in text
    assert "4 h 00 min to 2 h 00 min" in text


@pytest.mark.parametrize(
    ("answered", "badge", "is_shown"),
    [
        ({}, "fits 12 GB", "yes"),
        ({"words": "cannot be planned"}, "fits 12 GB", "yes"),
        ({"fits": False, "hours": None}, "does not fit", "no"),
        ({"fits": True, "verdict": "fits", "hours": 9.0}, "fits", "yes"),
        ({"fits": True, "verdict": "tight", "hours": 9.0}, "tight", "yes"),
    ],
)
def test_the_badge_of_a_larger_size_becomes_the_answer_of_its_plan(
    client: Any,
    cats: projects.Project,
    monkeypatch: pytest.MonkeyPatch,
    answered: dict[str, Any],
    badge: str,
    is_shown: str,
) -> None:
    projects.update(cats, vram=12.0)
    name = "wan 2.1 1.3B LoRA 16GB"
    listed = {"card": "a card of 12 GB", "total": 1, "presets": {name: answered}}
    monkeypatch.setattr(plan_server, "read_answer", lambda out: listed)
    rows = client.get(SETUP).text.split('<div class="size')
    (row,) = [row for row in rows if f'aria-label="Use {name}"' in row]
    assert re.findall(r'class="badge[^>]*>([^<]*)<', row) == [badge]
    assert f'data-fits="{is_shown}"' in row


def test_hours_are_stopped_and_keep_what_is_there(
    client: Any, cats: projects.Project, tmp_path: Path
) -> None:
    projects.update(cats, card="RTX 4090")
    out = cats.folder / ".studio/hours.json"
    worker = plan_server._workers
    reply = client.post(f"{SETUP}/hours")
    assert reply.status_code == 204
    try:
        assert plan_server.is_computing(out)
        question = project_plan.plan_question(cats, "hours")
        assert question["allow_skips"] == "all"
    finally:
        assert client.post(f"{SETUP}/stop-hours").status_code == 204
        worker[out].join(60)
    assert not plan_server.is_computing(out)


@pytest.mark.parametrize("is_computing", [True, False])
def test_the_hours_say_how_many_of_how_many_are_calculated(
    client: Any,
    cats: projects.Project,
    monkeypatch: pytest.MonkeyPatch,
    is_computing: bool,
) -> None:
    projects.update(cats, card="RTX 4090")
    cats = projects.find_project(cats.folder.parent, cats.folder.name)
    card = model_choices.chosen_card(cats.facts)
    question = preset_hours.question(cats, card)
    # The check in the background makes a cache in the clips' folder, whose time of change is
    # part of a question.
    monkeypatch.setattr(preset_hours, "question", lambda *_: question)
    monkeypatch.setattr(plan_server, "is_computing", lambda out, key="": is_computing)

    def shown(answer: dict[str, Any]) -> str:
        monkeypatch.setattr(plan_server, "read_answer", lambda out: answer)
        text = (
            client.get(SETUP).text.partition('id="cards"')[2].partition("</section>")[0]
        )
        return re.sub(r"<[^>]+>", " ", text)

    of_all = f"of {len(question['presets'])} calculated"
    older = {"key": "another question", "presets": {"toy": {}}, "total": 1}
    now = {"key": plan_server.key_of(question), "presets": {"toy": {}}}
    assert (f"0 {of_all}" in shown({})) == is_computing, "before the first answer"
    assert (f"0 {of_all}" in shown(older)) == is_computing
    assert f"1 {of_all}" in shown(now)
    assert ("Stop" in shown(now)) == is_computing
    assert ("Calculate the others" in shown(now)) != is_computing


def test_a_warning_of_most_clips_is_said_once(tmp_path: Path) -> None:
    lines = [f"{n}% of the frames repeat: {n} fps is slow" for n in (40, 41, 42)]
    rows = {
        str(n): {"warned": [line, *(["it is black"] if n == 0 else [])], "name": str(n)}
        for n, line in enumerate(lines)
    }
    (shared,) = clips._take_shared_warnings(rows)
    assert shared.names == ("0", "1", "2")
    assert rows["0"]["warned"] == ["it is black"]
    assert rows["1"]["warned"] == []
    few = {
        str(n): {"warned": [lines[0]] if n < 2 else [], "name": ""} for n in range(9)
    }
    assert clips._take_shared_warnings(few) == ()


def test_a_file_that_cannot_be_used_asks_for_no_caption() -> None:
    row = {**clip_row.UNKNOWN, "part": "clips", "caption": "hm", "state": "skipped"}
    row |= {"reason": "decode_error", "hints": [Remark("caption", "a short caption")]}
    assert clip_words.clip_actions(row) == ["bin"]
    assert clip_words.clip_actions(row | {"reason": "undecodable_caption"}) == ["write"]


def test_a_number_of_frames_that_the_model_does_not_take_needs_no_longer_clips(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    answer.update({"plan": PLAN, "current": True, "measuring": False})
    note = region(client).partition("Frames 18 becomes 17")[2].partition("</p>")[0]
    assert "You need not do anything" in note
    assert "longer clips" not in note


def test_the_plan_leads_to_the_interval_of_previews_and_of_validations(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    note = "a verdict needs 3 validations, the run has 2: set a smaller validate_every"
    settings = {"samples": ["a cat"], "sample_after": 9999}
    changes = {"notes": [note], "note_codes": ["few_validations"], "settings": settings}
    answer.update({"plan": PLAN | changes, "current": True, "measuring": False})
    shown = region(client)
    unfolded = shown.partition('id="plan-notes"')[0]
    assert "A verdict needs 3 validations" in unfolded
    assert "validate_every" not in re.sub(r"<[^>]*>", "", unfolded)
    assert 'href="#f-validate_every"' in unfolded
    assert 'href="#f-sample_after"' in shown


def test_a_trial_has_the_time_of_this_computer_first(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    projects.update(cats, card="RTX 4090")
    answer.update({"plan": PLAN | {"cpu_hours": 26.0}, "current": True})
    shown = region(client)
    head = shown.partition('class="plan-head"')[2].partition("</div>")[0]
    assert duration(26 * 3600) in head
    assert "on this CPU" in head
    assert "it takes minutes" not in shown

    # without any card it is the only time there is, and the terminal's plan says it too
    without = {"device": {**PLAN["device"], "vram_bytes": None}, "hours": None}
    projects.update(cats, card=None)
    answer["plan"] = PLAN | without | {"cpu_hours": 26.0}
    shown = region(client)
    head = shown.partition('class="plan-head"')[2].partition("</div>")[0]
    assert duration(26 * 3600) in head


def test_a_plan_for_another_computer_says_how_to_get_there(
    client: Any,
    cats: projects.Project,
    answer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    projects.update(cats, card="RTX 4090", preset="wan 2.1 1.3B LoRA 16GB")
    answer.update({"plan": PLAN, "current": True, "measuring": False})
    shown = region(client)
    assert "not on this computer" in shown
    place = shown.partition('id="elsewhere"')[2]
    assert 'href="/p/cats/export"' in place
    path = client.get(SETUP).text.partition('id="next-step"')[2]
    assert "#elsewhere" in path.partition("</a>")[0]
    assert "not-exported" not in place

    projects.update(cats, sources=[{"path": "/films/farm"}])
    place = visible_text(region(client).partition('id="elsewhere"')[2])
    assert "The clips of another folder are not in it: copy /films/farm" in place
    projects.update(cats, sources=None)

    answer["current"] = False
    waiting = region(client)
    assert 'id="elsewhere"' not in waiting
    assert "Plan not ready" in waiting, "its licence is not known yet"
    answer["measuring"] = True
    assert "you are asked first" in region(client)
    monkeypatch.delenv("VIDEOTUNE_ACCEPT_LICENCE")
    terms = {"model": "m", "name": "n", "terms": "https://example.org"}
    answer["plan"] = PLAN | {"licence": terms}
    assert "Accept the licence first" in region(client)


@pytest.mark.parametrize(
    ("code", "action"),
    [
        ("black", "bin"),
        ("frozen", "bin"),
        ("near_duplicate", "bin"),
        ("shared_sources", "validation"),
        ("cuts", "cut"),
        ("caption", "write"),
    ],
)
def test_each_warning_has_a_button(code: Any, action: str) -> None:
    row = {**clip_row.UNKNOWN, "warned": [Remark(code, "a warning")]}
    assert clip_words.clip_actions(row) == [action]


def test_arrows_of_the_player_go_through_the_filter(
    cats: projects.Project, client: Any
) -> None:
    for name in ("b", "c", "d"):
        write_clip(cats.folder / f"clips/{name}.mp4", _frames(), 12)
    (cats.folder / "clips/b.txt").write_text("has one\n")
    (cats.folder / "clips/a.txt").unlink()
    query = {"state": "without"}
    found = clips.neighbours(cats, "clips/c.mp4", query)
    assert (found["before"], found["after"]) == ("clips/a.mp4", "clips/d.mp4")
    (cats.folder / "clips/c.txt").write_text("now too\n")
    found = clips.neighbours(cats, "clips/c.mp4", query)
    assert (found["before"], found["after"]) == ("clips/a.mp4", "clips/d.mp4")
    page = client.get("/p/cats/data/clip", params={"path": "clips/c.mp4", **query})
    assert 'data-step-clip="clips/d.mp4"' in page.text
    assert "now too</textarea>" in page.text


def _frames() -> Any:
    import numpy as np

    return np.full((12, 32, 48, 3), 90, np.uint8)


def test_the_plan_names_the_steps_at_which_bands_end(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    steps_for = {"10": 57, "20": 119, "50": 307, "100": 619}
    for most, named in ((200, {"307", "619"}), (30, set()), (5, {"57"})):
        views = {
            "per_window": {"min": most, "max": most, "band": "high"},
            "advice": "",
            "steps_for": steps_for,
        }
        answer |= {"current": True, "plan": {**PLAN, "views": views}}
        assert "many: watch for copies" in region(client), "no word of a table"
        limits = region(client).partition('id="plan-limits"')[2].partition("</p>")[0]
        assert set(re.findall(r"<b class=\"num\">(\d+)</b>", limits)) == named


def test_no_step_takes_an_unbelievably_short_time(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    for seconds, shown in ((0.0001, "&lt; 0.01"), (0.87, "0.87")):
        answer |= {"current": True, "plan": {**PLAN, "seconds_a_step": seconds}}
        assert f"<b>{shown}</b><span>seconds a step" in region(client)


def test_reasons_that_prevent_a_verdict_together_stand_in_one_place(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    readings = "A verdict needs 3 validations, the run makes 2"
    clips_aside = "1 clip is kept aside: 2 are needed"
    changes = {
        "notes": [clips_aside, "another note", readings],
        "note_codes": ["few_held_out", "cropped", "few_validations"],
    }
    answer.update({"plan": PLAN | changes, "current": True, "measuring": False})
    shown = region(client)
    together = shown.partition('id="no-verdict"')[2].partition("</div>")[0]
    assert "for 2 reasons together" in together
    assert readings in together
    assert clips_aside in together
    assert "1 note<" in shown

    changes = {"notes": [clips_aside], "note_codes": ["few_held_out"]}
    answer["plan"] = PLAN | changes
    assert clips_aside in region(client).partition('id="plan-notes"')[0]
    assert 'id="plan-notes"' not in region(client)


def test_a_far_learning_rate_is_compared_with_the_presets_wherever_it_stands(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    """The plan of a run knows the usual rate of the method only."""
    projects.update(cats, preset="ltx 2B LoRA 12GB")
    projects.save_draft(cats, {"learning_rate": 0.006})
    note = (
        "learning_rate 0.006 is 60 times the usual 0.0001: the training may break. If it "
        "is not meant, set learning_rate=0.0001"
    )
    changes = {"notes": [note], "note_codes": ["far_rate"]}
    answer.update({"plan": PLAN | changes, "current": True, "measuring": False})
    shown = visible_text(client.get(SETUP).text)
    assert shown.count("30 times the usual 0.0002") == 2, "at the field and in the plan"
    assert "0.0001" not in shown


@pytest.mark.parametrize("code", SERIOUS)
def test_a_note_that_asks_for_a_decision_is_never_folded(
    client: Any, cats: projects.Project, answer: dict[str, Any], code: str
) -> None:
    changes = {
        "notes": ["another note", "something else is trained"],
        "note_codes": ["cropped", code],
    }
    answer.update({"plan": PLAN | changes, "current": True, "measuring": False})
    open_part, _, folded = region(client).partition('id="plan-notes"')
    assert "Something else is trained" in open_part
    assert "Another note" in folded
    assert "something else" not in folded.lower()


def test_that_nothing_is_kept_aside_is_said_once_and_in_sight(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    answer.update({"plan": PLAN, "current": True, "measuring": False})
    assert 'id="plan-no-check"' in region(client), "validation_fraction is 0"

    note = "no clip is kept aside for checking: 5 source videos, 20 are needed"
    answer["plan"] = PLAN | {"notes": [note], "note_codes": ["none_held_out"]}
    shown = region(client)
    assert shown.count("No clip is kept aside for checking") == 1
    assert 'id="plan-no-check"' not in shown
    assert "aside=1#aside-how" in shown.partition("No clip is kept aside")[2]


def test_no_button_is_named_that_clips_of_other_folders_lack(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    note = (
        "no clip is kept aside for checking: 1 source video, 20 are needed. Add clips, or "
        "put 2 or more into a folder of their own: --held-out FOLDER"
    )
    plan = PLAN | {"notes": [note], "note_codes": ["none_held_out"]}
    answer.update({"plan": plan, "current": True, "measuring": False})
    assert "choose “Keep aside” for 2 or more" in region(client)
    for clip in cats.folder.glob("clips/*"):
        clip.unlink()
    projects.update(cats, sources=[{"path": str(cats.folder)}])
    shown = region(client)
    assert "Keep aside" not in shown
    assert "add a folder of 2 or more for checking only" in shown


def test_the_plan_names_the_dtype_in_which_weights_are_kept(
    client: Any, cats: projects.Project, answer: dict[str, Any]
) -> None:
    settings = {"weight_dtype": "FLOAT_8", "train_dtype": "BFLOAT_16"}
    changes = {"settings": {**settings, "transformer": {"weight_dtype": "auto"}}}
    answer.update({"plan": PLAN | changes, "current": True, "measuring": False})
    assert "FLOAT_8" in visible_text(region(client))
    settings["weight_dtype"] = "BFLOAT_16"
    answer["plan"] = PLAN | {"settings": settings}
    assert 'id="plan-dtype"' not in region(client)


def test_the_size_of_a_download_is_the_same_at_the_start_and_in_the_list(
    client: Any, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_computer, "downloaded_models", list)
    model = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    size = model_choices.sizes_of_model(model)[0]
    projects.update(cats, preset=size.preset)
    current = projects.find_project(cats.folder.parent, "cats")
    questions = " ".join(start_questions.start_questions(current))
    assert f"is downloaded first: {size.download}," in questions
    notes = " ".join(this_computer.notes_on_this_computer(current, {}))
    assert f"{size.download} are downloaded" in notes


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("quant", "weight_dtype"),
        ("quantization", "weight_dtype"),
        ("fp8", "weight_dtype"),
        ("4-bit", "weight_dtype"),
        ("precision", "train_dtype"),
        ("block swap", "layer_offload_fraction"),
        ("lr", "learning_rate"),
    ],
)
def test_settings_are_found_by_the_words_of_other_trainers(
    client: Any, cats: projects.Project, word: str, key: str
) -> None:
    setting = client.get(SETUP).text.partition(f'for="f-{key}"')[0]
    name = re.findall(r'data-name="([^"]*)"', setting)[-1]
    assert word in name


def test_the_parts_of_the_memory_have_words_of_the_page() -> None:
    assert memory_parts({"ring": 2.0, "weights": 1.0}) == [
        ("blocks being copied to the card", 2.0),
        ("weights", 1.0),
    ]
