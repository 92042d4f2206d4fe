"""What a person has typed is on the disk, or the page says that it is not and sends it
again: with a server that is gone, frozen, slow or started again, in two tabs, and with
files that are changed beside it.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Studio, open_studio
from tests.support.waiting import wait_until
from videotune.config.nested_keys import flatten
from videotune.studio import projects

pytestmark = pytest.mark.slow

MP4 = b"\0\0\0\x20ftypisom" + b"\0" * 64

SEEN_WITHIN = 2.0
"""Seconds within which a page notices that the server is silent."""

SLOWNESS = 4.0
"""Seconds on top, for a machine that others use too."""


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    project = projects.create(tmp_path / "root", "Cats", preset="toy")
    for name in ("a", "b"):
        (project.folder / "clips" / f"{name}.mp4").write_bytes(MP4 + name.encode())
        (project.folder / "clips" / f"{name}.txt").write_text(f"clip {name}\n")
    return project


@pytest.fixture
def browser(cats: projects.Project) -> Iterator[tuple[Studio, Any]]:
    with open_studio(cats.folder.parent) as (studio, page):
        page.set_default_timeout(60_000)
        page.on("dialog", lambda dialog: dialog.accept())
        page.goto(f"{studio.address}/p/cats/setup")
        yield studio, page


def put(page: Any, key: str, value: str) -> None:
    """Type into a field and leave it."""
    page.locator(f'[id="f-{key}"]').fill(value)
    page.locator(f'[id="f-{key}"]').press("Tab")


def error_of(page: Any, key: str) -> Any:
    return page.locator(f'[id="e-{key}"]')


def saved(cats: projects.Project) -> dict[str, Any]:
    return flatten(projects.draft(cats))


def freeze(studio: Studio, page: Any) -> float:
    """Stop the server's process as a busy machine or a debugger would; return the
    seconds until the page says so.
    """
    os.kill(studio.process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    page.locator("#lost").wait_for()
    return time.monotonic() - begun


def thaw(studio: Studio, page: Any) -> None:
    os.kill(studio.process.pid, signal.SIGCONT)
    page.locator("#lost").wait_for(state="hidden")


def test_a_value_typed_while_the_server_is_gone_is_sent_when_it_is_back(
    browser: tuple[Studio, Any], cats: projects.Project
) -> None:
    studio, page = browser
    studio.end()
    begun = time.monotonic()
    page.locator("#lost").wait_for()
    assert time.monotonic() - begun < SEEN_WITHIN + SLOWNESS

    put(page, "steps", "88")
    error_of(page, "steps").filter(has_text="Not saved").wait_for()
    assert page.locator("#start").is_disabled(), "the plan is not of this value"
    assert "One change" in page.locator("#lost").inner_text()
    toast = page.locator(".toast.bad")
    page.evaluate("vt.post('/create', {})")
    toast.wait_for()
    bar = page.locator("#lost").bounding_box()
    box = toast.bounding_box()
    assert box["y"] + box["height"] <= bar["y"], "the bar does not cover a toast"
    assert saved(cats) == {}

    studio.begin()
    page.locator("#lost").wait_for(state="hidden")
    wait_until(lambda: saved(cats) == {"steps": 88}, 20)
    page.locator('.setting.own [id="f-steps"][data-saved="88"]').wait_for()
    assert error_of(page, "steps").inner_text() == ""
    assert toast.count() == 0, "what was said of the silence goes with it"


def test_a_frozen_server_is_seen_and_nothing_typed_meanwhile_is_lost(
    browser: tuple[Studio, Any], cats: projects.Project
) -> None:
    studio, page = browser
    assert freeze(studio, page) < SEEN_WITHIN + SLOWNESS
    put(page, "steps", "88")
    put(page, "steps", "90")
    put(page, "lora.rank", "2")
    error_of(page, "steps").filter(has_text="Not saved").wait_for()
    thaw(studio, page)
    wait_until(lambda: saved(cats) == {"steps": 90, "lora.rank": 2}, 20)
    page.locator('[id="f-steps"][data-saved="90"]').wait_for()
    assert error_of(page, "steps").inner_text() == "", "no conflict with oneself"


def test_what_was_not_saved_outlives_a_reload(
    browser: tuple[Studio, Any], cats: projects.Project
) -> None:
    studio, page = browser
    studio.end()
    page.locator("#lost").wait_for()
    put(page, "steps", "88")
    page.locator("#add-prompt").click()
    page.keyboard.type("a cat")
    page.locator("#find").click()
    error_of(page, "samples").filter(has_text="Not saved").wait_for()
    asked: list[str] = []
    page.on("dialog", lambda dialog: asked.append(dialog.type))
    with pytest.raises(Exception, match="ERR_CONNECTION_REFUSED"):
        page.reload()
    assert asked == ["beforeunload"], "leaving was warned of"

    studio.begin()
    # The toast goes after some seconds, perhaps before the whole page is loaded.
    page.goto(f"{studio.address}/p/cats/setup", wait_until="commit")
    page.locator(".toast", has_text="not saved before").wait_for()
    wait_until(lambda: saved(cats) == {"steps": 88, "samples": ["a cat"]}, 20)
    assert page.locator('[id="f-steps"]').input_value() == "88"


def test_answers_that_come_late_never_bring_back_an_older_value(
    browser: tuple[Studio, Any], cats: projects.Project
) -> None:
    _, page = browser
    delays = iter((2.5, 0.0, 0.0, 0.0))

    def late(route: Any) -> None:
        time.sleep(next(delays, 0.0))
        route.continue_()

    page.route("**/setup/set", late)
    put(page, "steps", "50")
    put(page, "steps", "60")
    put(page, "lora.rank", "2")
    # The browser's own waiting: a wait in Python would not let `late` pass a request on.
    page.locator('[id="f-steps"][data-saved="60"]').wait_for()
    page.locator('[id="f-lora.rank"][data-saved="2"]').wait_for()
    page.wait_for_timeout(1500)
    assert page.locator('[id="f-steps"]').input_value() == "60"
    assert saved(cats) == {"steps": 60, "lora.rank": 2}


def test_a_file_changed_beside_the_page_is_shown_or_asked_about(
    browser: tuple[Studio, Any], cats: projects.Project
) -> None:
    _, page = browser
    config = cats.folder / "config.json"
    config.write_text(json.dumps({"steps": 70}))
    page.locator('[id="f-steps"][data-saved="70"]').wait_for()
    page.locator('[id="f-steps"]').focus()
    config.write_text(json.dumps({"steps": 75}))
    page.locator('[id="f-steps"][data-saved="75"]').wait_for(state="attached")
    put(page, "steps", "80")
    error_of(page, "steps").locator("button").last.wait_for()
    assert saved(cats) == {"steps": 75}, "nothing is written over"

    config.write_text("{")
    page.locator("#r-settings .notice.bad").wait_for()
    answer = page.evaluate(
        "vt.post(`${location.pathname}/set`, { key: 'seed', value: '1' })"
        ".then((answer) => answer.status)"
    )
    assert answer == 422
    assert config.read_text() == "{", "a damaged file is not written over"

    page.reload()
    page.locator("#r-settings .notice.bad").wait_for()
    config.write_text(json.dumps({"steps": 90}))
    page.locator('[id="f-steps"][data-saved="90"]').wait_for()
    page.locator("#add-prompt").click()
    page.locator(".prompts textarea").wait_for()


def test_captions_are_sent_again_and_marked_in_tile_and_player(
    browser: tuple[Studio, Any], cats: projects.Project
) -> None:
    studio, page = browser
    page.goto(f"{studio.address}/p/cats/data")
    field = page.locator('#tiles .clip[data-path="clips/a.mp4"] textarea')
    field.wait_for()
    studio.end()
    page.locator("#lost").wait_for()
    field.fill("a cat that sleeps")
    field.press("Tab")
    mark = page.locator('#tiles .clip[data-path="clips/a.mp4"] .saved-mark')
    mark.filter(has_text="not saved").wait_for()
    caption = cats.folder / "clips/a.txt"
    assert caption.read_text() == "clip a\n"

    studio.begin()
    wait_until(lambda: caption.read_text() == "a cat that sleeps\n", 30)
    mark.filter(has_text="not saved").wait_for(state="hidden")

    os.kill(studio.process.pid, signal.SIGSTOP)
    field.fill("a cat that eats")
    field.press("Tab")
    mark.filter(has_text="not saved").wait_for()
    thaw(studio, page)
    wait_until(lambda: caption.read_text() == "a cat that eats\n", 30)
    assert page.locator(".conflict:visible").count() == 0


def test_files_that_did_not_arrive_are_sent_again_by_a_button(
    browser: tuple[Studio, Any], cats: projects.Project
) -> None:
    studio, page = browser
    page.goto(f"{studio.address}/p/cats/data")
    studio.end()
    page.locator("#lost").wait_for()
    file = {"name": "new.txt", "mimeType": "text/plain", "buffer": b"a new one"}
    page.locator("#files").set_input_files([file])
    page.locator("#sent-refused li", has_text="did not arrive").wait_for()
    studio.begin()
    page.locator("#lost").wait_for(state="hidden")
    page.locator("#sent-again").click()
    wait_until((cats.folder / "clips/new.txt").is_file, 30)
    page.locator("#sent-refused li").wait_for(state="detached")
    page.locator("#sent-close").click()
    page.locator("#sent").wait_for(state="hidden")


def test_a_card_is_refused_at_its_field_and_sent_again_after_a_silence(
    browser: tuple[Studio, Any], cats: projects.Project
) -> None:
    studio, page = browser
    page.locator('.preset-card [data-open="presets"]').click()
    memory = page.locator("#f-fact-vram")
    memory.fill("much")
    memory.press("Tab")
    page.locator("#e-fact-vram", has_text="unknown card").wait_for()
    os.kill(studio.process.pid, signal.SIGSTOP)
    memory.fill("16")
    memory.press("Tab")
    page.locator("#e-fact-vram", has_text="Not saved yet").wait_for()
    assert page.locator("#lost").is_visible(), "above the dialog, not behind it"
    thaw(studio, page)
    facts = cats.folder / "project.json"
    wait_until(lambda: json.loads(facts.read_text()).get("vram") == 16, 20)
    page.locator('.size[data-fits="no"]').first.wait_for()
