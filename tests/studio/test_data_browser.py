"""The page Data in a real browser: clips are seen, captioned, cut, removed and brought
back.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import WAIT, NewPage, Studio, violations
from tests.support.clips import write_clip, write_image
from tests.support.http_server import Handler, serving
from videotune.studio import clip_moves, projects

VISIBLE = "[...document.querySelectorAll('#tiles img')].map((one) => one.naturalWidth)"


def frames(seconds: float, seed: int, cuts: int = 1) -> np.ndarray:
    """A disc that moves over a plain ground; ``cuts`` scenes of other colours."""
    count, (rows, columns) = int(seconds * 12), np.mgrid[0:64, 0:96]
    colours = np.random.default_rng(seed).integers(40, 215, (cuts, 2, 3))
    out = np.empty((count, 64, 96, 3), np.uint8)
    for index in range(count):
        ground, disc = colours[index * cuts // count]
        out[index] = ground
        out[index][
            (columns - 48 - 25 * np.sin(index / 8)) ** 2 + (rows - 32) ** 2 < 200
        ] = disc
    return out


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips: two with captions, one without, one cut short, a film of three scenes."""
    folder = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("cat", "dog", "bird")):
        write_clip(folder / f"{name}.mp4", frames(3, seed), 12)
    (folder / "cat.txt").write_text("a cat that runs\n")
    (folder / "dog.txt").write_text("a dog that runs\n")
    (folder / "damaged.mp4").write_bytes((folder / "cat.mp4").read_bytes()[:900])
    write_clip(folder / "film.mp4", frames(24, 9, cuts=3), 12)
    return folder


@pytest.fixture
def home(browser_studio: tuple[Studio, NewPage], sources: Path) -> projects.Project:
    """A project with these clips."""
    studio, _ = browser_studio
    project = projects.create(studio.root, "Animals", preset="toy")
    for path in sources.iterdir():
        if path.is_file():
            (project.folder / "clips" / path.name).write_bytes(path.read_bytes())
    return project


@pytest.fixture
def page(
    browser_studio: tuple[Studio, NewPage], home: projects.Project
) -> Iterator[Any]:
    studio, new_page = browser_studio
    with new_page() as page:
        page.emulate_media(
            reduced_motion="reduce"
        )  # axe-core looks at once, at what is not yet as it will be
        page.goto(f"{studio.address}/p/{home.name}/data")
        yield page


def tile(page: Any, name: str) -> Any:
    return page.locator(f'#tiles .clip[data-path="{name}"]')


def until(true: Callable[[], Any], seconds: float = WAIT / 1000) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def checked(page: Any) -> None:
    """Wait until the check has seen what is there."""
    page.locator("#counts .checked").wait_for()


def test_every_clip_has_its_picture_and_the_button_that_mends_it(
    page: Any, home: projects.Project
) -> None:
    checked(page)
    states = {
        one.get_attribute("data-path"): one.get_attribute("data-state")
        for one in page.locator("#tiles .clip").all()
    }
    assert states == {
        "clips/bird.mp4": "skipped", "clips/cat.mp4": "used", "clips/damaged.mp4": "skipped",
        "clips/dog.mp4": "used", "clips/film.mp4": "skipped",
    }  # fmt: skip
    until(lambda: [width > 0 for width in page.evaluate(VISIBLE)] == [True] * 4)
    assert violations(page) == []
    # without a caption, and it plays
    view = tile(page, "clips/bird.mp4").locator(".clip-open")
    view.hover()
    page.wait_for_function(
        "() => document.querySelector('#tiles video')?.currentTime > 0.1"
    )
    tile(page, "clips/bird.mp4").locator("textarea").click()
    page.keyboard.type("a bird <b>that</b> flies")
    page.keyboard.press("Tab")
    until((home.folder / "clips/bird.txt").is_file)
    assert (home.folder / "clips/bird.txt").read_text() == "a bird <b>that</b> flies\n"
    tile(page, "clips/damaged.mp4").locator("p [data-act=bin]").click()
    view.hover()  # a tile that plays is renewed too
    page.locator(
        '#tiles .clip[data-path="clips/bird.mp4"][data-state=used]'
    ).wait_for()  # the check begins by itself
    assert "used" in tile(page, "clips/bird.mp4").locator(".clip-marks").inner_text()
    assert tile(page, "clips/damaged.mp4").count() == 0
    page.locator("[data-open=bin]").click()
    page.locator("#r-bin li").get_by_role("button", name="Restore").click()
    tile(page, "clips/damaged.mp4").wait_for()
    page.keyboard.press("Escape")
    page.locator("#without .btn", has_text="Leave out").click()
    page.locator("#without.calm").wait_for()
    draft = projects.draft(projects.find_project(home.folder.parent, home.name))
    assert draft["missing_caption"] == "skip"


TIMES_OF_PLAYER = """() => [...document.querySelectorAll('#player video')]
.map((video) => video.currentTime)"""


def test_the_large_player_steps_by_frames_and_shows_all(
    page: Any, home: projects.Project
) -> None:
    write_clip(home.folder / "clips/references/cat.mp4", frames(3, 7), 12)
    write_image(home.folder / "clips/masks/cat.png", frames(1, 8)[0])
    page.reload()
    labels = tile(page, "clips/cat.mp4").locator(".clip-companions li")
    labels.first.wait_for()
    assert labels.all_inner_texts() == ["mask", "reference"]
    checked(page)
    tile(page, "clips/cat.mp4").locator(".clip-open").click()
    page.locator("#player-film").wait_for()
    page.wait_for_function(
        "() => document.querySelector('#player-film').currentTime > 0.2"
    )
    page.keyboard.press(".")
    page.wait_for_function("() => document.querySelector('#player-film').paused")
    before = page.evaluate("document.querySelector('#player-film').currentTime")
    page.keyboard.press(".")
    page.wait_for_function(
        "(t) => document.querySelector('#player-film').currentTime > t", arg=before
    )
    moved = page.evaluate("document.querySelector('#player-film').currentTime") - before
    assert moved == pytest.approx(1 / 12, abs=0.01)
    # the reference shows the same frame, and plays on with the clip
    until(lambda: np.ptp(page.evaluate(TIMES_OF_PLAYER)) < 0.01)
    page.evaluate("document.querySelector('#player-film').play()")
    until(lambda: min(page.evaluate(TIMES_OF_PLAYER)) > before + 0.4)
    assert np.ptp(page.evaluate(TIMES_OF_PLAYER)) < 0.25
    page.evaluate("document.querySelector('#player-film').pause()")
    until(lambda: np.ptp(page.evaluate(TIMES_OF_PLAYER)) < 0.01)
    assert len(page.evaluate(TIMES_OF_PLAYER)) == 2
    assert violations(page) == []
    page.locator("[data-direction='1']").click()
    page.locator("#player-title", has_text="damaged.mp4").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


def test_a_caption_that_somebody_else_changed_is_not_written_over(
    page: Any, home: projects.Project
) -> None:
    caption = home.folder / "clips/cat.txt"
    other = page.context.new_page()
    other.goto(page.url)
    for one, text in ((page, "mine"), (other, "theirs")):
        tile(one, "clips/cat.mp4").locator("textarea").fill(text)
    tile(other, "clips/cat.mp4").locator("textarea").press("Control+Enter")
    until(lambda: caption.read_text() == "theirs\n")
    tile(page, "clips/cat.mp4").locator("textarea").press("Control+Enter")
    conflict = tile(page, "clips/cat.mp4").locator(".conflict")
    conflict.wait_for()
    assert conflict.locator("blockquote").inner_text() == "theirs"
    assert caption.read_text() == "theirs\n"
    assert tile(page, "clips/cat.mp4").locator("textarea").input_value() == "mine"
    conflict.locator("button").first.click()
    until(lambda: caption.read_text() == "mine\n")
    tile(page, "clips/cat.mp4").locator(".clip-open").click()
    page.locator("#player-history summary").click()
    page.locator("#player-history [data-bring]", has_text="Restore").last.click()
    until(lambda: caption.read_text() == "a cat that runs\n")


def test_captions_are_changed_together_and_taken_back(
    page: Any, home: projects.Project
) -> None:
    texts = {
        path.name: path.read_text() for path in (home.folder / "clips").glob("*.txt")
    }
    page.locator("[data-open=edit-captions]").click()
    page.locator("#edit-word").fill("ohwx")
    page.locator("#edit-count[data-count='2']").wait_for()
    assert violations(page) == []
    page.locator("#edit-go").click()
    until(
        lambda: (home.folder / "clips/dog.txt").read_text() == "ohwx, a dog that runs\n"
    )
    page.locator("#edit-captions:not([open])").wait_for(state="attached")
    page.locator("#counts .btn", has_text="Undo").click()
    until(
        lambda: (
            {
                path.name: path.read_text()
                for path in (home.folder / "clips").glob("*.txt")
            }
            == texts
        )
    )
    page.locator("#find").fill("DOG")
    page.wait_for_function(
        "() => document.querySelectorAll('#tiles .clip').length == 1"
    )
    page.locator("[data-open=edit-captions]").click()
    page.locator("#edit-how").select_option("replace")
    page.locator("#edit-word").fill("RUNS")
    page.locator("#edit-to").fill(r"jumps \1")
    page.locator("#edit-count[data-count='1']").wait_for()
    page.locator("#edit-go").click()
    until(
        lambda: (home.folder / "clips/dog.txt").read_text() == "a dog that jumps \\1\n"
    )
    assert (home.folder / "clips/cat.txt").read_text() == "a cat that runs\n"


def test_a_trigger_word_reaches_the_clips_kept_aside_that_the_filter_hides(
    page: Any, home: projects.Project
) -> None:
    clip_moves.move(home, ["clips/cat.mp4"], "held-out")
    checked(page)
    page.locator("#state").select_option("used")
    tile(page, "held-out/cat.mp4").wait_for(state="detached")
    page.locator("[data-open=edit-captions]").click()
    page.locator("#edit-word").fill("ohwx")
    page.locator("#edit-count[data-count='1']").wait_for()
    page.locator("#edit-with-aside").check()
    page.locator("#edit-count[data-count='2']").wait_for()
    assert page.locator("#edit-with-aside").is_checked()
    page.locator("#edit-go").click()

    for caption in ("clips/dog.txt", "held-out/cat.txt"):
        until(lambda caption=caption: "ohwx" in (home.folder / caption).read_text())


def test_a_film_becomes_scenes_to_keep_or_remove(
    page: Any, home: projects.Project
) -> None:
    checked(page)
    film = tile(page, "clips/film.mp4")
    film.locator(".clip-marks", has_text="long video").wait_for()
    film.locator("p [data-cut]").click()
    page.locator(".scene").nth(2).wait_for()
    film.wait_for(state="detached")
    scenes = home.folder / "scenes" / "film"
    names = sorted(path.name for path in scenes.glob("*.mp4"))
    assert len(names) == 3
    assert violations(page) == []
    page.locator(".scene").nth(0).get_by_role("button", name=re.compile("Keep")).click()
    tile(page, f"clips/{names[0]}").wait_for()
    page.locator(".scenes").get_by_role("button", name="Remove all").click()
    page.locator(".scenes").wait_for(state="detached")
    page.locator("[data-open=bin]").click()
    assert page.locator("#r-bin li").count() == 2, (
        "the film, and the scenes that were not kept"
    )


def test_scenes_that_appear_out_of_sight_are_told_and_shown(
    page: Any, home: projects.Project
) -> None:
    checked(page)
    page.set_viewport_size({"width": 390, "height": 420})
    film = tile(page, "clips/film.mp4")
    film.locator("p [data-cut]").scroll_into_view_if_needed()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    film.locator("p [data-cut]").evaluate("button => button.click()")
    film.wait_for(state="detached")

    told = page.locator(".toast", has_text="3 scenes of film.mp4 were made")
    told.wait_for()
    heading = page.locator(".scenes h2")
    is_in_sight = "part => { const box = part.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight; }"
    assert not heading.evaluate(is_in_sight)
    told.get_by_role("button", name="Show them").click()
    until(lambda: heading.evaluate(is_in_sight))
    assert told.count() == 0


def test_a_cut_that_fails_loses_nothing_and_says_why(
    page: Any, home: projects.Project
) -> None:
    checked(page)
    damaged = tile(page, "clips/damaged.mp4")
    damaged.locator(".menu summary").click()
    damaged.locator(".menu [data-cut]").click()
    page.locator("#r-state .notice.bad").wait_for()
    assert (home.folder / "clips/damaged.mp4").is_file()
    assert damaged.count() == 1


def test_selected_clips_are_moved_together(page: Any, home: projects.Project) -> None:
    checked(page)
    picks = page.locator("#tiles [data-pick]")
    picks.nth(0).check()
    picks.nth(2).click(modifiers=["Shift"])
    assert page.locator("#picked-said").inner_text().startswith("3")
    assert violations(page) == []
    page.locator("#picked [data-act=held-out]").click()
    until(lambda: len(list((home.folder / "held-out").glob("*.mp4"))) == 3)
    page.locator("#picked").wait_for(state="hidden")
    page.locator("#state").select_option("held out")
    page.locator('#tiles .clip[data-path="held-out/cat.mp4"]').wait_for()
    page.locator("#tiles [data-pick]").first.check()
    page.locator("[data-all]").click()
    page.locator("#picked [data-act=bin]").click()
    until(lambda: not list((home.folder / "held-out").glob("cat.mp4")))


def test_files_and_folders_are_dropped_anywhere(
    page: Any, home: projects.Project, sources: Path
) -> None:
    content = list((sources / "cat.mp4").read_bytes()[:-1] + b"x")
    drop = """([content]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(content)], "new one.mp4"));
        data.items.add(new File(["these are notes"], "notes.mp4"));
        const how = { dataTransfer: data, bubbles: true, cancelable: true };
        for (const name of ["dragover", "drop"]) document.body.dispatchEvent(new DragEvent(name, how));
    }"""
    page.evaluate(drop, [content])
    page.locator("#sent[data-done=true]").wait_for()
    assert "notes.mp4" in page.locator("#sent-refused").inner_text()
    tile(page, "clips/new one.mp4").wait_for()
    assert (home.folder / "clips/new one.mp4").is_file()
    with page.expect_file_chooser() as chooser:
        page.locator("#data-tools [data-files=folder]").evaluate("(one) => one.click()")
    assert chooser.value.element.get_attribute("id") == "folder"


class Model(Handler):
    """A server with OpenAI's chat interface, whose every caption is the same."""

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        content = json.dumps(models).encode()
        self.answer(200, content, {"Content-Type": "application/json"})

    def do_POST(self) -> None:
        self.body()
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "A disc that moves."},
        }
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
        }
        self.answer(
            200, json.dumps(answer).encode(), {"Content-Type": "application/json"}
        )


def test_a_model_writes_captions_and_undo_takes_them_back(
    page: Any, home: projects.Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Model) as server:
        page.locator("[data-open=auto-caption]").first.click()
        page.locator('#auto-caption [value="server"]').check()
        page.locator("#auto-endpoint").fill("http://127.0.0.1:9/v1")
        page.locator("#auto-test").click()
        page.locator("#auto-tested.bad").wait_for()
        page.locator("#auto-endpoint").fill(f"{server.url}/v1")
        page.locator("#auto-test").click()
        page.locator("#auto-tested.good").wait_for()
        assert page.locator("#auto-model").input_value() == "m", "found by the test"
        page.locator("#auto-trigger").fill("ohwx")
        assert violations(page) == []
        page.locator("#auto-caption .btn.primary").click()
        bird = home.folder / "clips/bird.txt"
        until(bird.is_file)
        assert bird.read_text() == "ohwx, A disc that moves.\n"
        page.locator("#counts .btn", has_text="Undo auto-caption of").click()
        until(lambda: not bird.exists())
    assert (home.folder / "clips/cat.txt").read_text() == "a cat that runs\n"


def test_the_contact_sheet_shows_its_pictures(
    page: Any, home: projects.Project
) -> None:
    page.locator("#data-tools .menu summary").click()
    page.locator("#data-tools .menu .btn", has_text="contact sheet").click()
    link = page.locator("#counts a", has_text="Contact sheet")
    link.wait_for()
    with page.context.expect_page() as opened_page:
        link.click()
    sheet = opened_page.value
    sheet.wait_for_load_state("load")
    widths = sheet.evaluate("[...document.images].map((one) => one.naturalWidth)")
    assert widths
    assert all(widths)


@pytest.mark.parametrize("width", [390, 2560])
def test_nothing_scrolls_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    checked(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    tile(page, "clips/cat.mp4").locator(".clip-open").click()
    page.locator("#player-film").wait_for()
    assert page.evaluate(
        "document.querySelector('#player').scrollWidth <= document.querySelector('#player').clientWidth"
    )


def test_the_player_says_what_becomes_of_its_clip(
    page: Any, home: projects.Project
) -> None:
    checked(page)
    tile(page, "clips/bird.mp4").locator(".clip-open").click()
    badge = page.locator("#player-state .badge")
    badge.filter(has_text="needs a caption").wait_for()
    page.locator("#player-text").fill("a bird that flies")
    page.keyboard.press("Control+s")
    page.locator("#player-title").click()
    badge.filter(has_text="new").wait_for()
    badge.filter(has_text="used").wait_for()
    assert violations(page) == []

    # what is damaged can be removed where it is seen
    page.locator("#player [data-close]").click()
    tile(page, "clips/damaged.mp4").locator(".clip-open").click()
    badge.filter(has_text="cannot be used").wait_for()
    page.locator("#player [data-act=bin]").click()
    page.locator("#player-title", has_text="dog.mp4").wait_for()
    assert not (home.folder / "clips/damaged.mp4").exists()
    page.locator("#player [data-act=held-out]").click()
    badge.filter(has_text="kept aside").wait_for()
    assert (home.folder / "held-out/dog.mp4").is_file()


def test_the_player_closes_when_its_film_has_become_scenes(
    page: Any, home: projects.Project
) -> None:
    checked(page)
    tile(page, "clips/film.mp4").locator(".clip-open").click()
    page.locator("#player [data-cut]").click()
    page.locator(".toast", has_text="3 scenes of film.mp4 were made").wait_for()
    assert not page.locator("#player").is_visible()
    assert page.locator(".scene").count() == 3


@pytest.mark.parametrize("is_typed", [False, True])
def test_the_player_tells_what_another_tab_did_with_its_clip(
    page: Any, home: projects.Project, is_typed: bool
) -> None:
    checked(page)
    tile(page, "clips/cat.mp4").locator(".clip-open").click()
    text = page.locator("#player-text")
    text.wait_for()
    if is_typed:
        text.fill("a cat that sleeps")

    clip_moves.move(home, ["clips/cat.mp4"], "held-out")
    page.locator('#player-state[data-path="held-out/cat.mp4"]').wait_for()
    if is_typed:
        caption = home.folder / "held-out/cat.txt"
        until(lambda: caption.read_text() == "a cat that sleeps\n")

    if is_typed:
        page.locator("#player-text").fill("a cat that eats")
    clip_moves.move(home, ["held-out/cat.mp4"], "bin")
    toast = page.locator(".toast", has_text="cat.mp4 is in the bin")
    toast.wait_for()
    assert ("a cat that eats" in toast.inner_text()) is is_typed
    assert not page.locator("#player").is_visible()
