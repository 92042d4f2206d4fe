"""The page of the contact sheet says of each clip what ``check`` says, and shows its captions and pictures."""

import re
from html import unescape
from pathlib import Path
from typing import Any

from report_kit import EVIL, clip

from videotune.report.dataset import dataset_page, short_path

ROOT = Path("/clips/mine")


def page(*clips: dict[str, Any], job_notes: tuple[str, ...] = (), **account: Any) -> str:
    named = [{"kind": "train", "captions": ["a zorble"]} | row for row in clips]
    counts = {"found": len(clips), "used": len(clips), "held_out": 0, "skipped": 0, "buckets": [], "notes": []}
    shots = {row["path"]: ["clips/a-first.jpg", "clips/a-middle.jpg"] for row in named}
    return dataset_page("Clips", counts | account | {"clips": named}, shots, [ROOT], job_notes)


def row(path: str, **changed: Any) -> dict[str, Any]:
    return clip(f"{ROOT}/{path}", **changed)


def words(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", markup[markup.index("<main") :])).split())


def test_a_clip_is_named_from_its_folder_with_its_captions() -> None:
    made = page(row("sub/a.mp4", captions=["a zorble", "another", EVIL]))
    assert "sub/a.mp4 a zorble +2 more another" in words(made)
    assert str(ROOT) not in words(made)
    assert "<script" not in made
    assert made.count("<img") == 2


def test_a_long_or_empty_caption_is_shown_whole_or_said() -> None:
    long = "word " * 100 + "end"
    assert long in words(page(row("a.mp4", captions=[long])))
    assert "(empty caption)" in words(page(row("a.mp4", captions=[""])))


def test_one_of_a_thing_is_singular() -> None:
    said = words(page(row("a.mp4", windows=1, views=1.0, source_frames=1), row("b.mp4", windows=2, views=12.5)))
    assert "1 frame at 16 fps 64x64 64x64, 17 frames 1 window 1 view by the end" in said
    assert "2 windows 12.5 views by the end" in said


def test_held_out_clips_have_no_views() -> None:
    said = words(page(row("a.mp4", used=False, held_out=True, views=None)))
    assert "64x64, 17 frames 1 window" in said
    assert "by the end" not in said


def test_the_legend_says_what_colours_mean() -> None:
    said = words(page(row("a.mp4", kind="regularization")))
    assert "green: trained on orange: trained on, with warnings blue: held out for validation" in said
    assert "red: skipped" in said
    assert "used (regularization)" in said


def test_all_notes_are_told_once() -> None:
    said = words(page(row("a.mp4"), job_notes=("of the job", "of both"), notes=["of both", "of the account"]))
    assert said.count("of both") == 1
    assert "of the job" in said
    assert "of the account" in said


def test_paths_of_several_datasets_begin_with_the_datasets_name() -> None:
    roots = [ROOT, Path("/clips/other")]
    assert short_path("/clips/other/a.mp4", roots) == "other/a.mp4"
    assert short_path("/elsewhere/a.mp4", roots) == "/elsewhere/a.mp4"
