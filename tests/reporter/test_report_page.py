"""The page as a whole: its kit.chapters, that nothing in it comes from elsewhere, and that no text becomes markup."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tests.reporter.report_kit as kit
from tests.reporter.report_kit import (
    EVIL,
    attributes,
    clip,
    elements,
    part,
    put,
    report,
    sample,
    start,
    step,
    words,
    write_journal,
)
from videotune.reporter.build import contact_sheet_page

CHAPTERS = ["verdict", "before", "loss", "validation", "exposure", "samples", "metrics"]
CHAPTERS += ["clips", "time", "use", "settings", "files", "warnings"]


def test_the_page_has_its_chapters_in_order_and_is_well_formed(run: Path) -> None:
    page = report(run)
    assert attributes(page, "id", "section") == CHAPTERS
    assert attributes(page, "href", "a")[: len(CHAPTERS)] == [f"#{anchor}" for anchor in CHAPTERS]
    top = words(page[page.index("<main>") : page.index("<section")])
    for words_ in ("LORA on asset:toy: 120 of 120 steps, ended: done.", "my run & more", "359,424"):
        assert words_ in top
    assert "16 frames are no count the model takes: 17 are used" in top
    assert report(run) == page, "written twice"
    (run.parent / "run").symlink_to(run)
    assert "<title>Run my run &amp; more</title>" in report(run.parent / "run").replace(
        run.parent.name, "my run &amp; more"
    )


def test_the_page_needs_no_network_and_no_script(run: Path) -> None:
    page = report(run)
    assert not [tag for tag, _ in elements(page) if tag in ("script", "link", "iframe", "img", "object", "base")]
    assert not re.search(r"https?://|@import|url\(", page)
    assert not [given for _, given in elements(page) if any(name.startswith("on") for name in given)]
    for address in (given[name] or "#" for _, given in elements(page) for name in ("src", "href") if name in given):
        assert address.startswith("#") or (run / unquote(address)).exists(), address


def test_text_from_files_cannot_become_markup(run: Path) -> None:
    settings = kit.config()
    settings["settings"][EVIL] = settings["origins"][EVIL] = settings["base"]["name"] = EVIL
    put(run, "config.json", settings)
    checked = kit.account()
    checked["clips"].append(dict.fromkeys(("path", "reason", "detail", "shape"), EVIL) | {"warnings": [EVIL]})
    put(run, "check.json", checked | {"notes": [EVIL]})
    verified = {"max_error": 0.0, "reader": EVIL}
    put(run, "exports.json", [{"format": EVIL, "path": EVIL, "verified": verified, "use": EVIL}])
    put(run, "demo.json", {"concept": {"before": 0, "after": 1, "n": EVIL}})
    put(run, "heartbeat.json", {"pid": 1, "host": EVIL, "started": 1.0, "state": EVIL, "since": 1.0, "time": 2.0})
    records = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    records += [{"kind": "verdict", "step": 1, "verdict": EVIL, "reason": EVIL}, {"kind": "warning", "text": EVIL}]
    records += [sample(1, EVIL, path=EVIL), start(device=EVIL, notes=[EVIL], versions={EVIL: EVIL})]
    records += [
        step(121, window_ids=[EVIL]),
        {"kind": "sample_metrics", "step": 1, "samples": [{"prompt": EVIL, "clip": EVIL}]},
    ]
    for end in ([{"kind": "end", "step": 1, "why": EVIL}], []):
        write_journal(run, records + end)
        page = report(run)
        assert "<script" not in page
        assert not [tag for tag, _ in elements(page) if tag in ("script", "i>bold.webm")]
        assert page.count("&lt;script&gt;") > 20
    assert "b <i>bold.webm" in part(page, "clips")
    assert "/clips/<mine>" in part(page, "settings")
    assert EVIL in words(page[: page.index("<section")]), "the heartbeat's"


def test_letters_that_utf8_cannot_carry_are_shown_as_question_marks(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(), {"kind": "warning", "text": "caption \udce9 and \u00e9"}])
    assert "caption ? and é" in part(report(tmp_path), "warnings")


def test_a_run_that_has_only_begun_says_what_is_not_there_yet(tmp_path: Path) -> None:
    write_journal(tmp_path, [start()])
    page = report(tmp_path)
    assert attributes(page, "id", "section") == CHAPTERS
    assert [anchor for anchor in CHAPTERS[:-1] if "Not there yet" not in part(page, anchor)] == []
    assert "check.json" in part(page, "clips")
    assert "None." in part(page, "warnings")


ROOT = Path("/clips/mine")


def sheet(*changed: dict[str, Any], job_notes: tuple[str, ...] = (), **more: Any) -> str:
    """The text of a contact sheet of clips with these fields, after its markup was looked at."""
    rows = [
        clip(f"{ROOT}/sub/{n}.mp4") | {"kind": "train", "captions": ["a zorble"]} | row for n, row in enumerate(changed)
    ]
    counts = {"found": len(rows), "used": len(rows), "held_out": 0, "skipped": 0, "buckets": [], "notes": []}
    shots = {row["path"]: ["clips/a-first.jpg", "clips/a-middle.jpg"] for row in rows}
    made = contact_sheet_page("Clips", counts | more | {"clips": rows}, shots, [ROOT], job_notes)
    kinds = [tag for tag, _ in elements(made)]
    assert kinds.count("img") == 2 * len(rows)
    assert "script" not in kinds
    return words(made[made.index("<main") :])


def test_a_contact_sheet_says_of_each_clip_what_check_says() -> None:
    said = sheet({"captions": ["a zorble", "another", EVIL], "windows": 1, "views": 1.0, "source_frames": 1})
    assert f"sub/0.mp4 a zorble +2 more another {EVIL}" in said
    assert str(ROOT) not in said
    assert "1 frame at 16 fps 64x64 64x64, 17 frames 1 window seen 1 time by the end" in said
    assert "green: trained on orange: trained on, with warnings blue: held out for validation red: skipped" in said
    long = "word " * 100 + "end"
    said = sheet({"captions": [long], "windows": 2, "views": 12.5}, {"captions": [""], "kind": "regularization"})
    assert long in said
    assert "2 windows seen 12.5 times by the end" in said
    assert "(empty caption) used (regularization)" in said
    held = sheet({"used": False, "held_out": True, "views": None}, {"used": False, "reason": "no_caption"})
    assert "held out 17 frames at 16 fps 64x64 64x64, 17 frames 1 window" in held
    assert "skipped: no_caption" in held
    assert "by the end" not in held
