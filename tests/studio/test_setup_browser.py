"""Setup and Queue in a real browser: a value on the disk, a conflict shown, a preset
found, runs put in order.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Bench:
    """One studio and one browser for all tests of this file."""

    root: Path
    address: str
    context: Any


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("setup")
    with open_studio(root) as (studio, page):
        yield Bench(root, studio.address, page.context)


@pytest.fixture
def page(bench: Bench) -> Iterator[Any]:
    """A page with no colour on its way between two themes, closed after the test with
    all others.
    """
    page = bench.context.new_page()
    page.emulate_media(reduced_motion="reduce")
    yield page
    for opened in bench.context.pages:
        opened.close()


def test_settings_in_two_tabs(bench: Bench, page: Any) -> None:
    tabs = projects.create(bench.root, "Tabs", preset="toy")
    page.goto(f"{bench.address}/p/tabs/setup")
    put(page, "steps", "60")
    page.locator('.setting.own [id="f-steps"]').wait_for()
    other = page.context.new_page()
    other.goto(f"{bench.address}/p/tabs/setup")
    field(page, "steps").focus()
    put(other, "steps", "70")
    other.locator('.setting.own [id="f-steps"][data-saved="70"]').wait_for()
    put(page, "steps", "80")
    page.locator('[id="e-steps"] button').last.wait_for()
    assert projects.draft(tabs) == {"steps": 70}, "nothing is written over"
    assert violations(page) == []
    page.locator('[id="e-steps"] button').last.click()
    other.locator('[id="f-steps"][data-saved="80"]').wait_for()
    assert projects.draft(tabs) == {"steps": 80}
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
    assert page.locator(".preset:visible h4").all_inner_texts() == [
        "Wan 2.1",
        "Wan VACE",
    ]
    assert violations(page) == []
    page.keyboard.press("Escape")
    assert projects.draft(tabs) == {"samples": ["a dog"]}


def test_runs_are_put_in_order_by_dragging_and_by_buttons(
    bench: Bench, page: Any
) -> None:
    from filelock import FileLock

    cats = projects.create(bench.root, "Cats", preset="toy")
    queue = queue_page.queue_folder(bench.root)
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

    # another worker has the queue, so that nothing starts
    with FileLock(queue / ".lock"):
        page.goto(f"{bench.address}/queue")
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


def test_a_prompt_gets_its_files_by_the_dialog(bench: Bench, page: Any) -> None:
    from PIL import Image

    dogs = projects.create(bench.root, "Dogs", preset="toy")
    image = dogs.folder / "first.png"
    Image.new("RGB", (32, 32)).save(image)
    (dogs.folder / "end.mp4").write_bytes(b"\0")
    other = {"prompt": "a dog", "steps": 3}
    projects.save_draft(dogs, {"samples": ["a cat", other]})
    page.goto(f"{bench.address}/p/dogs/setup")
    rows = page.locator("#prompts .prompt")
    assert rows.locator("textarea").first.input_value() == "a cat"
    choose(page, rows.first, "Begin with an image", "first.png")
    choose(page, rows.first, "Lead to a clip", "end.mp4")
    choose(page, rows.nth(1), "Begin with an image", "first.png")
    path = str(image)
    files = {"image": path, "suffix": str(dogs.folder / "end.mp4")}
    wanted = [{"prompt": "a cat", **files}, other | {"image": path}]
    wait_until(lambda: projects.draft(dogs) == {"samples": wanted}, 20)
    assert violations(page) == []

    page.reload()
    assert rows.locator("textarea").first.input_value() == "a cat"
    names = rows.first.locator("[data-file-name]:visible")
    assert names.all_inner_texts() == list(files.values())
    rows.first.locator('[data-drop-file="image"]').click()
    rows.first.locator('[data-drop-file="suffix"]').click()
    left = ["a cat", other | {"image": path}]
    wait_until(lambda: projects.draft(dogs) == {"samples": left}, 20)

    # A condition is ticked, with its share.
    page.locator("summary", has_text="Clips and captions").click()
    suffix = page.locator('[data-condition="suffix"]')
    suffix.locator("[type=checkbox]").check()
    suffix.locator("[data-part=probability]").fill("0,5")
    suffix.locator("[data-part=latent_frames]").fill("2")
    suffix.locator("[data-part=latent_frames]").press("Tab")
    ticked = [{"type": "suffix", "probability": 0.5, "latent_frames": 2}]
    wait_until(lambda: projects.draft(dogs).get("conditions") == ticked, 20)
    assert violations(page) == []
    suffix.locator("[type=checkbox]").uncheck()
    wait_until(lambda: projects.draft(dogs) == {"samples": left}, 20)


def test_prompts_of_a_preset_and_of_another_tab_are_shown_at_once(
    bench: Bench, page: Any
) -> None:
    """A prompt that is typed just then stays."""
    project = projects.create(bench.root, "Listed", preset="toy")
    keys = {"samples": ["a cat runs", "a dog sits"]}
    (bench.root / "presets").mkdir(exist_ok=True)
    preset = {"preset": "toy", "keys": keys}
    (bench.root / "presets/two prompts.json").write_text(json.dumps(preset))
    page.goto(f"{bench.address}/p/listed/setup")
    texts = page.locator(".prompts textarea")
    page.locator("#add-prompt").wait_for()
    assert texts.count() == 0

    page.evaluate("vt.post(`${location.pathname}/preset/use`, { name: 'two prompts' })")
    texts.nth(1).wait_for()
    assert [texts.nth(at).input_value() for at in (0, 1)] == keys["samples"]

    texts.nth(0).fill("a cat sleeps")
    texts.nth(0).press("Tab")
    wait_until(lambda: projects.draft(project)["samples"][0] == "a cat sleeps", 20)
    projects.save_draft(project, {"samples": ["a bird"]})
    texts.nth(1).wait_for(state="detached")
    assert texts.nth(0).input_value() == "a bird"

    page.locator("#add-prompt").click()
    texts.nth(1).press_sequentially("a fish")
    projects.save_draft(project, {"samples": ["a horse"], "steps": 91})
    page.locator('[id="f-steps"][data-saved="91"]').wait_for()
    assert texts.nth(1).input_value() == "a fish"


def test_a_dialog_closes_whose_button_is_gone_before_the_answer(
    bench: Bench, page: Any
) -> None:
    """The stream may show the new preset first; the button "Use" is then no more."""
    project = projects.create(bench.root, "Late", preset="toy", vram=16.0)
    page.goto(f"{bench.address}/p/late/setup")
    page.locator('.preset-card [data-open="presets"]').click()
    button = page.locator('[aria-label="Use wan 2.1 1.3B LoRA 16GB"]')

    def late(route: Any) -> None:
        answer = route.fetch()
        button.wait_for(state="detached")
        route.fulfill(response=answer)

    page.route("**/setup/fact", late)
    button.click()
    page.locator("#presets:not([open])").wait_for(state="attached")
    preset = projects.find_project(bench.root, project.name).preset
    assert preset == "wan 2.1 1.3B LoRA 16GB"


def test_what_is_learnt_is_chosen_in_words_and_says_what_a_prompt_takes(
    bench: Bench, page: Any
) -> None:
    waves = projects.create(bench.root, "Waves", preset="ltx 2.3 LoRA 24GB")
    projects.save_draft(waves, {"samples": ["a wave"]})
    page.goto(f"{bench.address}/p/waves/setup")
    page.locator("#keys-sound > summary").click()
    field(page, "generate").select_option(label="video and sound")
    wait_until(lambda: projects.draft(waves).get("generate") == ["video", "sound"])

    field(page, "generate").select_option(label="only sound, for a given video")
    page.locator("#prompts [data-browse^=prompt-video]").wait_for(state="attached")
    assert page.locator("#prompts [data-browse^=prompt-]").count() == 1
    assert projects.draft(waves)["generate"] == "sound"

    field(page, "generate").select_option(label="video for a given sound")
    page.locator("#prompts [data-browse^=prompt-sound]").wait_for(state="attached")
    assert page.locator("#prompts textarea").input_value() == "a wave"
    assert projects.draft(waves)["samples"] == ["a wave"]


def test_a_search_shows_settings_of_that_name_and_stays_while_one_is_set(
    bench: Bench, page: Any
) -> None:
    found = projects.create(bench.root, "Found", preset="toy")
    page.goto(f"{bench.address}/p/found/setup")
    page.locator("#find").fill("sample after")
    shown = page.locator("#all .setting:visible > .setting-head label")
    names = [text.split("\n")[0] for text in shown.all_inner_texts()]
    assert [name.startswith("Sample after") for name in names] == [True, True]
    assert page.locator("#all .keys:visible > summary").count() == 1
    assert "sample_after" not in page.locator("#keys-previews").inner_text()

    put(page, "sample_after", "50")
    page.locator('.setting.own [id="f-sample_after"]').wait_for()
    assert projects.draft(found) == {"sample_after": 50}
    assert page.locator("#find").input_value() == "sample after"
    assert shown.count() == 2, "no other group stands open"

    page.locator("#also-found button").click()
    assert page.locator("#all .setting:visible").count() > 2
    page.locator("#find").fill("")
    assert page.locator("#all .keys[open]").count() == 0


def test_a_search_leads_to_the_main_settings_too(bench: Bench, page: Any) -> None:
    projects.create(bench.root, "Rate", preset="toy")
    page.goto(f"{bench.address}/p/rate/setup")
    page.locator("#find").fill("lr")
    link = page.locator("#front-found a").first
    assert link.inner_text().startswith("Learning rate")
    link.click()
    assert page.url.endswith("#f-learning_rate")
    page.locator("#find").fill("block swap")
    page.locator('[id="f-layer_offload_fraction"]').wait_for()
    assert page.locator("#front-found").is_hidden()
    assert page.locator("#none-found").is_hidden()
