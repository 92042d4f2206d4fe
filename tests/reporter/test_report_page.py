"""The page as a whole: its kit.chapters, that nothing in it comes from elsewhere, and that no text becomes markup."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

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


def test_warnings_are_gathered_once_with_their_steps(tmp_path: Path) -> None:
    slow = [{"kind": "warning", "step": n, "text": "slow disk"} for n in (3, 5)]
    write_journal(tmp_path, [start(), *slow, {"kind": "warning", "text": "no step"}], '{"kind"')
    torn, *lines = kit.chapters(tmp_path)["warnings"]["lines"]
    assert "torn" in torn
    assert lines == ["slow disk (step 3, 5)", "no step"]


def test_a_run_that_has_only_begun_says_what_is_not_there_yet(tmp_path: Path) -> None:
    write_journal(tmp_path, [start()])
    page = report(tmp_path)
    assert attributes(page, "id", "section") == CHAPTERS
    assert [anchor for anchor in CHAPTERS[:-1] if "Not there yet" not in part(page, anchor)] == []
    assert "check.json" in part(page, "clips")
    assert "None." in part(page, "warnings")


@pytest.mark.parametrize("value", [0, 250])
def test_what_is_switched_off_is_not_awaited(tmp_path: Path, value: int) -> None:
    write_journal(tmp_path, [start(), step(1)])
    keys = {"verdict": "validate_every", "validation": "validate_every", "samples": "sample_after"}
    keys["metrics"] = "sample_metrics.budget"
    own = {"validate_every": value, "sample_after": value, "sample_metrics": {"budget": value}}
    put(tmp_path, "config.json", {"settings": own})
    found = kit.chapters(tmp_path)
    for anchor, key in keys.items():
        expected = "Not there yet" if value else f"Switched off ({key} is 0)."
        assert found[anchor]["absent"].startswith(expected), anchor


def test_an_interrupted_run_is_not_called_done_and_a_resume_is_shown(tmp_path: Path) -> None:
    verdict = {"kind": "verdict", "step": 6, "verdict": "PLATEAU", "reason": "no change since step 4", "best_step": 4}
    steps = [*map(step, range(1, 5)), {"kind": "resume", "from_step": 4}, step(5)]
    write_journal(tmp_path, [start(), *steps, verdict, {"kind": "end", "step": 5, "why": "interrupted"}])
    page = report(tmp_path)
    assert '<span class="badge care">interrupted</span>' in page
    for sentence in (
        "5 of 120 steps, ended: interrupted.",
        "4 resumed from step",
        "PLATEAU It has come to rest. No change since step 4.",
    ):
        assert sentence in words(page)


def test_fields_of_the_wrong_kind_do_not_end_the_report(tmp_path: Path) -> None:
    odd = [start(clips=3, versions=None, buckets="x", notes=None, steps=None, windows="many")]
    odd += [step(1) | {"mse": "x", "by_t": None, "window_ids": None, "seconds": 4}, {"kind": "step"}]
    odd += [
        {"kind": "validation", "step": 0, "held_out": 3, "train": {"by_quantile": "x"}},
        {"kind": "sample", "step": "x"},
    ]
    odd += [
        start(buckets=[{"shape": "1x²x3", "windows": 1}]),
        {"kind": "sample_metrics", "step": 1, "samples": 3, "motion": 4},
    ]
    write_journal(tmp_path, [*odd, {"kind": "save"}, {"kind": "warning"}, {"kind": "resume"}, {"kind": "verdict"}])
    row = {"used": True, "id": "a", "windows": 0.5, "views": -3, "width": [1], "speed": "x", "captions": None}
    put(tmp_path, "check.json", {"clips": [row, row | {"views": 3, "seconds_cut": "x"}], "notes": []})
    put(tmp_path, "plan.json", {"views": {}})
    settings = {"sample": 3, "datasets": [3], "video_config": "x"}
    put(tmp_path, "config.json", {"settings": settings, "base": {"name": "x"}})
    put(tmp_path, "exports.json", [{"path": f"a-step-{'9' * 5000}"}, {"path": "a-step-²", "use": "x", "verified": 3}])
    put(tmp_path, "demo.json", {"concept": 3, "control": {"before": "x"}})
    assert attributes(report(tmp_path), "id", "section") == CHAPTERS


def test_the_report_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, videotune.reporter.build; print(sorted({'torch', 'numpy', 'av', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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


def test_all_notes_of_a_contact_sheet_are_shown_once() -> None:
    said = sheet({}, job_notes=("of the job", "of both"), notes=["of both", "of the kit.account"])
    assert [said.count(note) for note in ("of the job", "of both", "of the kit.account")] == [1, 1, 1]
