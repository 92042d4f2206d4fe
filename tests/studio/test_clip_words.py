"""The names of the states of clips, and the remedy of each warning."""

import json
import re
import time
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.support.clips import write_clip
from tests.support.job_folders import ended_job
from videotune.commands.check import check as run_check
from videotune.config.schema import leaves
from videotune.data.remarks import Remark, RemarkCode
from videotune.files import write_json
from videotune.studio import (
    clip_row,
    clip_subjects,
    clip_words,
    clips,
    projects,
    trash,
)
from videotune.studio.clip_row import UNKNOWN

DATA = "/p/cats/data"

CHECKED: dict[str, Any] = {
    "used": True, "held_out": False, "reason": None, "detail": None, "source_seconds": 2.0,
    "source_fps": 12.0, "source_frames": 24, "width": 48, "height": 32, "shape": "9x32x48",
    "windows": 1, "spans": [[0.0, 1.0]], "warnings": [], "notes": [], "captions": ["a cat"],
    "kind": "train",
}  # fmt: skip


@pytest.fixture
def cats(tmp_path: Path) -> projects.Project:
    """Four clips: one used, one damaged, one without a caption, one of another code."""
    project = projects.create(tmp_path, "Cats", preset="toy")
    for name in "abcd":
        (project.folder / f"clips/{name}.mp4").write_bytes(
            b"\0\0\0\x20ftypisom" + name.encode()
        )
        if name != "c":
            (project.folder / f"clips/{name}.txt").write_bytes(
                b"a cat\n" if name != "d" else b"\xff\xfe\xfa"
            )
    return project


def check(
    project: projects.Project,
    rows: dict[str, dict[str, Any]],
    notes: list[str],
    note_codes: Sequence[str] = (),
) -> None:
    listed = [
        CHECKED | {"path": str(project.folder / f"clips/{name}.mp4")} | row
        for name, row in rows.items()
    ]
    folder = ended_job(project, "check", 0, started=time.time() + 60)
    account = {"clips": listed, "notes": notes, "note_codes": list(note_codes)}
    write_json(folder / "out", account | {"blockers": []})


def skipped(reason: str) -> dict[str, Any]:
    return {"used": False, "reason": reason, "detail": "why", "captions": []}


def text_of(html: str, pattern: str) -> list[str]:
    return [
        re.sub(r"<[^>]+>", "", match) for match in re.findall(pattern, html, re.DOTALL)
    ]


def test_cards_filter_player_and_counts_share_their_words(
    client: Any, cats: projects.Project
) -> None:
    rows = {
        "a": {},
        "b": skipped("decode_error"),
        "c": skipped("missing_caption"),
        "d": skipped("undecodable_caption"),
    }
    check(cats, rows, [])
    page = client.get(DATA).text
    options = text_of(page, r"<option value=\"[^\"]*\"[^>]*>[^<]+</option>")
    counts = text_of(page, r'<a class="badge[^>]*>[^<]+</a>')
    assert sorted(counts) == ["1 needs a caption", "1 used", "2 cannot be used"]
    cards = text_of(page, r'<span class="clip-marks"><span[^>]*>[^<]+</span>')
    assert sorted(cards) == [
        "cannot be used",
        "cannot be used",
        "needs a caption",
        "used",
    ]
    for name in "abcd":
        player = client.get(f"{DATA}/clip", params={"path": f"clips/{name}.mp4"}).text
        (badge,) = text_of(player, r'<span class="badge [^>]*>[^<]+</span>')
        assert badge in cards
        assert badge.capitalize() in options
        state = clip_row.state_of(clips.table(cats).rows[f"clips/{name}.mp4"])
        shown = client.get(f"{DATA}/tiles", params={"state": state}).text
        assert f'data-path="clips/{name}.mp4"' in shown


def test_the_player_of_a_damaged_clip_removes_it(
    client: Any, cats: projects.Project
) -> None:
    check(
        cats,
        {"a": {}, "b": skipped("decode_error"), "d": skipped("undecodable_caption")},
        [],
    )
    player = client.get(f"{DATA}/clip", params={"path": "clips/b.mp4"}).text
    assert 'data-act="bin"' in player
    assert "data-cut" not in player, "what cannot be read cannot be cut"
    usable = client.get(f"{DATA}/clip", params={"path": "clips/a.mp4"}).text
    assert all(
        button in usable
        for button in ('data-act="bin"', 'data-act="held-out"', "data-cut")
    )
    text = client.get(f"{DATA}/clip", params={"path": "clips/d.mp4"}).text
    assert "data-write" in text


@pytest.mark.parametrize("code", get_args(RemarkCode))
def test_every_kind_of_warning_has_its_remedy(code: Any) -> None:
    (remedy,) = [remedy for remedy in clip_words.REMEDIES if code in remedy.codes]
    assert clip_words.remedy_of(Remark(code, "any words")) is remedy
    assert clip_words.remedy_of("any words") is None
    assert (remedy.action == "setting") == bool(remedy.setting)
    if remedy.setting:
        assert remedy.setting in leaves()


def test_a_warning_of_the_set_stands_beside_its_button(
    client: Any, cats: projects.Project
) -> None:
    mixed = "3 frame rates are mixed: 24 fps (2), 30 fps (1)"
    frozen = {
        "warnings": ["95% of it is frozen: the picture does not change"],
        "warning_codes": ["frozen"],
    }
    check(
        cats,
        {"a": frozen, "b": frozen, "c": frozen, "d": {}},
        [
            mixed,
            "repeats by folder names: a 2",
            "no clip is kept aside for checking, so there is no verdict: 1 source video, 20 are needed. "
            "Add clips, or put some into a dataset of kind validation",
        ],
        ["mixed_rates", "", "none_held_out"],
    )
    page = client.get(DATA).text
    (notes,) = re.findall(r'<details id="data-notes">.*?</details>', page, re.DOTALL)
    assert 'href="/p/cats/setup#f-video_config.target_fps"' in notes
    assert notes.count(clip_words.NO_REMEDY) == 1, "what needs nothing says so"
    pattern = r'<div class="notice care[^>]*id="note-.*?</div>'
    (serious,) = re.findall(pattern, page, re.DOTALL)
    assert "<p>No clip is kept aside for checking" in serious
    assert "of kind validation" not in serious
    assert serious.count("choose “Keep aside” for some") == 1
    assert 'data-files="files"' in serious
    assert "Show clips with a warning" not in notes, "no clip has a warning of these"
    (shared,) = re.findall(r'id="shared-1">.*?<details', page, re.DOTALL)
    assert "clips/a.mp4" in shared.split("data-select=")[1]


SOUND = {
    "codec": "aac",
    "problem": None,
    "start": 0.0,
    "seconds": 2.0,
    "windows": 1,
    "clipped": 0.0,
}
UPSCALED = "upscaled 1.7x: 270x480 pixels to 464x832"


@pytest.mark.parametrize(
    ("code", "facts"),
    [
        ("upscaled", {"warnings": [UPSCALED], "warning_codes": ["upscaled"]}),
        ("slow_clips", {"warnings": ["9%"], "warning_codes": ["repeated_frames"]}),
        ("caption_lines", {"text": "a cat\nthe cat"}),
        ("no_sound", {"sound": None}),
        ("silent_sound", {"sound": SOUND | {"problem": "silent"}}),
        ("clipped_sound", {"sound": SOUND | {"clipped": 0.5}}),
        ("short_sound", {"sound": SOUND | {"seconds": 1.0}}),
        ("sound_dropped", {"sound": SOUND | {"windows": 0}}),
        ("unused_masks", {"mask": "masks/b.png"}),
        ("unused_references", {"control": "control/b.mp4"}),
    ],
)
def test_a_note_leads_to_the_clips_that_it_counts(
    client: Any, cats: projects.Project, code: str, facts: dict[str, Any]
) -> None:
    """Also where their cards are silent: what needs no action is no warning there."""
    ordinary: dict[str, Any] = {
        "source_seconds": 2.0,
        "windows": 1,
        "sound": SOUND,
        # A smaller factor is a note of the check, which the note on all does not count.
        "notes": ["upscaled 1.1x: 400x700 pixels to 464x832"],
        "note_codes": ["upscaled"],
    }
    if "text" in facts:
        (cats.folder / "clips" / "b.txt").write_text(facts["text"])
    rows = {"a": ordinary, "b": ordinary | facts, "c": ordinary}
    check(cats, rows, ["1 of 3 clips is meant"], [code])

    page = unescape(client.get(DATA).text)
    (address,) = set(re.findall(r'href="(\?state=about[^"]*)"', page))
    assert "Show it" in page
    tiles = client.get(DATA + address).text
    assert re.findall(r'data-path="([^"]*)"', tiles) == ["clips/b.mp4"]
    assert clip_subjects.SUBJECTS[code].label in tiles
    if code == "upscaled":
        assert UPSCALED[1:] in tiles


def test_notes_name_settings_by_their_names_and_no_model_before_one_is_chosen(
    client: Any, cats: projects.Project
) -> None:
    slow = (
        "most clips are slower than the 16 fps of training: use faster ones; or "
        "--set video_config.target_fps=12 trains each frame once"
    )
    notes = [
        slow,
        "1 caption has several lines; caption_lines “join” makes one of them",
        "4 images are numbered. Set datasets.frame_folder_fps",
        "1 Parquet file is not used (a); name one as a dataset of kind validation",
    ]
    check(cats, {"a": {}}, notes, ["slow_clips", "caption_lines", "numbered_stills"])
    page = client.get(DATA).text
    assert "“Target FPS” set to 12 trains each frame" in page
    assert "“Frame rate of folders of images”" in page
    pattern = r'<div class="notice care[^>]*id="note-.*?</div>|<details id="data-notes">.*?</details>'
    texts = " ".join(text_of(page, pattern))
    assert not re.search(r"[a-z]_[a-z]|of kind", texts)

    projects.update(cats, preset="")
    assert "16 fps of training" not in client.get(DATA).text
    assert "1 caption has several lines" in client.get(DATA).text


def test_a_note_that_clips_kept_aside_have_answered_is_gone_at_once(
    client: Any, cats: projects.Project
) -> None:
    check(
        cats,
        {"a": {}, "b": {}},
        ["no clip is kept aside for checking: 20 are needed"],
        ["none_held_out"],
    )
    assert 'id="note-none_held_out"' in client.get(DATA).text
    client.post(f"{DATA}/move", data={"to": "held-out", "path": "clips/a.mp4"})
    assert 'id="note-none_held_out"' not in client.get(DATA).text


def test_a_clip_in_another_folder_says_no_more_than_is_known() -> None:
    row = UNKNOWN | {"state": "skipped", "reason": "missing_caption", "caption": ""}
    assert clip_row.state_of(row) == "without"
    assert clip_row.state_of(UNKNOWN | {"caption": "x"}) == "new"
    written = row | {"state": "new", "part": "clips", "caption": "a cat"}
    assert clip_row.state_of(written) == "new", "its caption was written since"


def test_a_check_says_what_each_warning_is_about(tmp_path: Path) -> None:
    for shade, name in enumerate("abc", 3):
        frames = np.full((24, 48, 64, 3), 30 * shade, np.uint8)
        write_clip(tmp_path / f"{name}.mp4", frames, 12)
        (tmp_path / f"{name}.txt").write_text("todo\n")
    account = run_check(data=str(tmp_path)).account
    for row in account["clips"]:
        codes = dict(zip(row["warning_codes"], row["warnings"], strict=True))
        assert "one flat colour" in codes["black"]
        assert "placeholder" in codes["caption"]
        assert len(row["note_codes"]) == len(row["notes"])
    notes = dict(zip(account["note_codes"], account["notes"], strict=True))
    assert "no clip is kept aside for checking" in notes["none_held_out"]


def test_a_note_that_a_warning_of_the_clips_says_already_is_left_out() -> None:
    slow = Remark("slow_clips", "most clips are slower than the training")
    mixed = Remark("mixed_rates", "3 frame rates are mixed")
    repeated = Remark("repeated_frames", "47% of the frames repeat the one before")
    assert clip_words.without_repeats([slow, mixed], []) == [slow, mixed]
    assert clip_words.without_repeats([slow, mixed], [repeated]) == [mixed]


def test_a_text_that_is_nearly_named_as_a_clip_becomes_its_caption(
    client: Any, cats: projects.Project
) -> None:
    clips_folder = cats.folder / "clips"
    (clips_folder / "kitten_b.mp4").write_bytes(b"film")
    (clips_folder / "kiten_b.txt").write_text("a kitten\n")
    note = "1 text file has no clip of the same name: kiten_b.txt (nearly kitten_b)"
    check(cats, {"kitten_b": {"caption": ""}}, [note], ["captions_without_clip"])
    address = f"/p/{cats.name}/data"
    assert "Use kiten_b.txt for kitten_b.mp4" in client.get(address).text

    for wrong in ("clips/kitten_b.mp4", "clips/other.txt", "../x.txt", ""):
        answer = client.post(f"{address}/use-text", data={"path": wrong})
        assert answer.status_code == 422, wrong
    answer = client.post(f"{address}/use-text", data={"path": "clips/kiten_b.txt"})
    assert answer.status_code == 204
    assert (clips_folder / "kitten_b.txt").read_text().strip() == "a kitten"
    assert not (clips_folder / "kiten_b.txt").exists()

    undo = json.loads(answer.headers["hx-trigger"])["toast"]["action"]
    client.post(undo["post"], data=undo["values"])
    assert not (clips_folder / "kitten_b.txt").exists()


@pytest.mark.parametrize(
    "names", ["notes.txt", "notes.txt (nearly note)", "notes.txt, z.txt and 2 more"]
)
def test_a_text_file_without_a_clip_is_removed_by_a_button(
    client: Any, cats: projects.Project, names: str
) -> None:
    (cats.folder / "clips/notes.txt").write_text("to do\n")
    note = f"1 text file has no clip of the same name: {names}"
    check(cats, {"a": {}}, [note], ["captions_without_clip"])
    address = f"/p/{cats.name}/data"
    assert "Remove notes.txt" in client.get(address).text

    for wrong in ("clips/a.txt", "clips/a.mp4", "config.json", "../x.txt", ""):
        answer = client.post(f"{address}/remove-text", data={"path": wrong})
        assert answer.status_code == 422, wrong
    answer = client.post(f"{address}/remove-text", data={"path": "clips/notes.txt"})
    assert answer.status_code == 204
    assert not (cats.folder / "clips/notes.txt").exists()
    assert "captions_without_clip" not in client.get(address).text

    (item,) = trash.list_items(cats.folder)
    undo = json.loads(answer.headers["hx-trigger"])["toast"]["action"]
    assert undo["values"] == {"id": item.id}
    assert client.post(undo["post"], data=undo["values"]).status_code == 204
    assert (cats.folder / "clips/notes.txt").read_text() == "to do\n"
    assert "Remove notes.txt" in client.get(address).text
