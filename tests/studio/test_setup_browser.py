"""Setup and Queue in a real browser: a value on the disk, a conflict shown, a preset
found, runs put in order.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import open_studio, violations
from tests.support.waiting import wait_until
from videotune.queue import entries
from videotune.studio import projects, queue_page


def field(page: Any, key: str) -> Any:
    return page.locator(f'[id="f-{key}"]')


def put(page: Any, key: str, value: str) -> None:
    """Type into a field and leave it."""
    field(page, key).fill(value)
    field(page, key).press("Tab")


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    return projects.create(tmp_path, "Cats", preset="toy")


def test_settings_in_two_tabs(tmp_path: Path, cats: projects.Project) -> None:
    with open_studio(tmp_path) as (studio, page):
        page.emulate_media(
            reduced_motion="reduce"
        )  # a colour on its way between two themes is neither's
        page.goto(f"{studio.address}/p/cats/setup")
        put(page, "steps", "60")
        page.locator('.setting.own [id="f-steps"]').wait_for()
        other = page.context.new_page()
        other.goto(f"{studio.address}/p/cats/setup")
        field(page, "steps").focus()
        put(other, "steps", "70")
        other.locator('.setting.own [id="f-steps"][data-saved="70"]').wait_for()
        put(page, "steps", "80")
        page.locator('[id="e-steps"] button').last.wait_for()
        assert projects.draft(cats) == {"steps": 70}, "nothing is written over"
        assert violations(page) == []
        page.locator('[id="e-steps"] button').last.click()
        other.locator('[id="f-steps"][data-saved="80"]').wait_for()
        assert projects.draft(cats) == {"steps": 80}
        put(page, "resolution", "big")
        page.locator('[id="f-resolution"][aria-invalid=true]').wait_for()
        page.locator("[data-reset=steps]").click()
        page.locator('.setting:not(.own) [id="f-steps"]').wait_for()
        page.locator("#add-prompt").click()
        page.keyboard.type("a cat")
        page.locator("#add-prompt").click()
        page.keyboard.type("a dog")
        page.keyboard.press("Tab")
        page.locator(".prompts [data-drop-prompt]").first.click()
        page.locator("#find").fill("noise level")
        shown = page.locator("#all .setting:visible").count()
        assert 0 < shown < 30
        page.locator('.preset-card [data-open="presets"]').click()
        page.locator("#preset-find").fill("2.1 14B")
        assert page.locator(".preset:visible h4").all_inner_texts() == ["Wan 2.1"]
        assert violations(page) == []
        page.keyboard.press("Escape")
        assert projects.draft(cats) == {"samples": ["a dog"]}


def test_runs_are_put_in_order_by_dragging_and_by_buttons(
    tmp_path: Path, cats: projects.Project
) -> None:
    from filelock import FileLock

    queue = queue_page.queue_folder(tmp_path)
    names = [f"cats--run-{n}" for n in (1, 2, 3, 4)]
    for name in names:
        entries.add(
            queue, name, {}, cats.folder / "runs" / name[6:], arguments=["wait", "x"]
        )
    folder = cats.folder / ".studio" / "sweeps"
    folder.mkdir(parents=True)
    (folder / "sweep-1.json").write_text(
        json.dumps({"runs": {"run-1": {"seed": "1"}, "run-2": {"seed": "2"}}})
    )

    def order() -> list[str]:
        return [entry.name[-1] for entry in entries.entries(queue)]

    with (
        FileLock(queue / ".lock"),
        open_studio(tmp_path) as (studio, page),
    ):  # another worker has it, so that nothing starts
        page.emulate_media(reduced_motion="reduce")
        page.goto(f"{studio.address}/queue")
        assert page.locator("td .badge").count() == 2
        assert violations(page) == []
        with page.expect_response("**/queue/order"):
            page.locator('[id="up-cats--run-4"]').click()
        assert order() == ["1", "2", "4", "3"]
        grip, top = (
            page.locator("#waiting .grip").last.bounding_box(),
            page.locator("#waiting li").first.bounding_box(),
        )
        page.mouse.move(grip["x"] + 4, grip["y"] + 4)
        page.mouse.down()
        page.mouse.move(grip["x"] + 4, top["y"] + 2, steps=10)
        with page.expect_response("**/queue/order"):
            page.mouse.up()
        assert order() == ["3", "1", "2", "4"]
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_prompt_gets_a_start_image_by_the_dialog(
    tmp_path: Path, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(cats.folder))  # where the dialog begins
    from PIL import Image

    image = cats.folder / "first.png"
    Image.new("RGB", (32, 32)).save(image)
    other = {"prompt": "a dog", "steps": 3}
    projects.save_draft(cats, {"samples": ["a cat", other]})
    with open_studio(tmp_path) as (studio, page):
        page.goto(f"{studio.address}/p/cats/setup")
        rows = page.locator("#prompts .prompt")
        assert rows.locator("textarea").first.input_value() == "a cat"
        for number in (0, 1):
            rows.nth(number).locator("[data-browse]").click()
            page.locator("#folders-find").fill("first")
            page.locator('#folders [data-file$="first.png"]').click()
            rows.nth(number).locator(".prompt-image").wait_for()
        path = str(image)
        wanted = [{"prompt": "a cat", "image": path}, other | {"image": path}]
        wait_until(lambda: projects.draft(cats) == {"samples": wanted}, 20)
        assert violations(page) == []

        page.reload()
        assert rows.locator("textarea").first.input_value() == "a cat"
        assert rows.first.locator("[data-image-name]").inner_text() == path
        rows.first.locator("[data-drop-image]").click()
        left = ["a cat", other | {"image": path}]
        wait_until(lambda: projects.draft(cats) == {"samples": left}, 20)
