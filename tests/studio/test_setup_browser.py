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
        assert page.locator(".preset:visible h4").all_inner_texts() == ["Wan 2.1", "Wan VACE"]
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


def choose(page: Any, row: Any, words: str, name: str) -> None:
    """Choose a file for a prompt."""
    row.locator(".menu summary").click()
    row.get_by_text(words, exact=True).click()
    page.locator("#folders-find").fill(name)
    page.locator(f'#folders [data-file$="{name}"]').click()
    row.locator(".prompt-file", has_text=name).first.wait_for()


def test_a_prompt_gets_its_files_by_the_dialog(
    tmp_path: Path, cats: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(cats.folder))  # where the dialog begins
    from PIL import Image

    image = cats.folder / "first.png"
    Image.new("RGB", (32, 32)).save(image)
    (cats.folder / "end.mp4").write_bytes(b"\0")
    other = {"prompt": "a dog", "steps": 3}
    projects.save_draft(cats, {"samples": ["a cat", other]})
    with open_studio(tmp_path) as (studio, page):
        page.goto(f"{studio.address}/p/cats/setup")
        rows = page.locator("#prompts .prompt")
        assert rows.locator("textarea").first.input_value() == "a cat"
        choose(page, rows.first, "Begin with an image", "first.png")
        choose(page, rows.first, "Lead to a clip", "end.mp4")
        choose(page, rows.nth(1), "Begin with an image", "first.png")
        path = str(image)
        files = {"image": path, "suffix": str(cats.folder / "end.mp4")}
        wanted = [{"prompt": "a cat", **files}, other | {"image": path}]
        wait_until(lambda: projects.draft(cats) == {"samples": wanted}, 20)
        assert violations(page) == []

        page.reload()
        assert rows.locator("textarea").first.input_value() == "a cat"
        names = rows.first.locator("[data-file-name]:visible")
        assert names.all_inner_texts() == list(files.values())
        rows.first.locator('[data-drop-file="image"]').click()
        rows.first.locator('[data-drop-file="suffix"]').click()
        left = ["a cat", other | {"image": path}]
        wait_until(lambda: projects.draft(cats) == {"samples": left}, 20)

        # A condition is ticked, with its share.
        page.locator("summary", has_text="Clips and captions").click()
        suffix = page.locator('[data-condition="suffix"]')
        suffix.locator("[type=checkbox]").check()
        suffix.locator("[data-part=probability]").fill("0,5")
        suffix.locator("[data-part=latent_frames]").fill("2")
        suffix.locator("[data-part=latent_frames]").press("Tab")
        ticked = [{"type": "suffix", "probability": 0.5, "latent_frames": 2}]
        wait_until(lambda: projects.draft(cats).get("conditions") == ticked, 20)
        assert violations(page) == []
        suffix.locator("[type=checkbox]").uncheck()
        wait_until(lambda: projects.draft(cats) == {"samples": left}, 20)
