"""The page as a whole: its chapters, that nothing in it comes from elsewhere, and that no text becomes markup."""

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

from tests.reporter import report_kit as kit
from videotune.reporter.build import contact_sheet_page

CHAPTERS = ["verdict", "before", "loss", "validation", "exposure", "samples", "metrics"]
CHAPTERS += ["clips", "time", "use", "settings", "files", "warnings"]


def test_the_page_has_its_chapters_in_order_and_is_well_formed(run: Path) -> None:
    page = kit.report(run)
    assert kit.attributes(page, "id", "section") == CHAPTERS
    assert kit.attributes(page, "href", "a")[: len(CHAPTERS)] == [f"#{anchor}" for anchor in CHAPTERS]
    top = kit.words(page[page.index("<main>") : page.index("<section")])
    for words_ in ("LORA on asset:toy: 120 of 120 steps, ended: done.", "my run & more", "359,424"):
        assert words_ in top
    assert "16 frames are no count the model takes: 17 are used" in top
    assert kit.report(run) == page, "written twice"
    (run.parent / "run").symlink_to(run)
    assert "<title>Run my run &amp; more</title>" in kit.report(run.parent / "run").replace(
        run.parent.name, "my run &amp; more"
    )


def test_the_page_needs_no_network_and_no_script(run: Path) -> None:
    page = kit.report(run)
    assert not [tag for tag, _ in kit.elements(page) if tag in ("script", "link", "iframe", "img", "object", "base")]
    assert not re.search(r"https?://|@import|url\(", page)
    assert not [given for _, given in kit.elements(page) if any(name.startswith("on") for name in given)]
    for address in (given[name] or "#" for _, given in kit.elements(page) for name in ("src", "href") if name in given):
        assert address.startswith("#") or (run / unquote(address)).exists(), address


def test_text_from_files_cannot_become_markup(run: Path) -> None:
    settings = kit.config()
    settings["settings"][kit.EVIL] = settings["origins"][kit.EVIL] = settings["base"]["name"] = kit.EVIL
    kit.put(run, "config.json", settings)
    checked = kit.account()
    checked["clips"].append(dict.fromkeys(("path", "reason", "detail", "shape"), kit.EVIL) | {"warnings": [kit.EVIL]})
    kit.put(run, "check.json", checked | {"notes": [kit.EVIL]})
    verified = {"max_error": 0.0, "reader": kit.EVIL}
    kit.put(run, "exports.json", [{"format": kit.EVIL, "path": kit.EVIL, "verified": verified, "use": kit.EVIL}])
    kit.put(run, "demo.json", {"concept": {"before": 0, "after": 1, "n": kit.EVIL}})
    kit.put(
        run,
        "heartbeat.json",
        {"pid": 1, "host": kit.EVIL, "started": 1.0, "state": kit.EVIL, "since": 1.0, "time": 2.0},
    )
    records = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    records += [
        {"kind": "verdict", "step": 1, "verdict": kit.EVIL, "reason": kit.EVIL},
        {"kind": "warning", "text": kit.EVIL},
    ]
    records += [
        kit.sample(1, kit.EVIL, path=kit.EVIL),
        kit.start(device=kit.EVIL, notes=[kit.EVIL], versions={kit.EVIL: kit.EVIL}),
    ]
    records += [
        kit.step(121, window_ids=[kit.EVIL]),
        {"kind": "sample_metrics", "step": 1, "samples": [{"prompt": kit.EVIL, "clip": kit.EVIL}]},
    ]
    for end in ([{"kind": "end", "step": 1, "why": kit.EVIL}], []):
        kit.write_journal(run, records + end)
        page = kit.report(run)
        assert "<script" not in page
        assert not [tag for tag, _ in kit.elements(page) if tag in ("script", "i>bold.webm")]
        assert page.count("&lt;script&gt;") > 20
    assert "b <i>bold.webm" in kit.part(page, "clips")
    assert "/clips/<mine>" in kit.part(page, "settings")
    assert kit.EVIL in kit.words(page[: page.index("<section")]), "the heartbeat's"


def test_letters_that_utf8_cannot_carry_are_shown_as_question_marks(tmp_path: Path) -> None:
    kit.write_journal(tmp_path, [kit.start(), {"kind": "warning", "text": "caption \udce9 and \u00e9"}])
    assert "caption ? and é" in kit.part(kit.report(tmp_path), "warnings")


def test_a_run_that_has_only_begun_says_what_is_not_there_yet(tmp_path: Path) -> None:
    kit.write_journal(tmp_path, [kit.start()])
    page = kit.report(tmp_path)
    assert kit.attributes(page, "id", "section") == CHAPTERS
    assert [anchor for anchor in CHAPTERS[:-1] if "Not there yet" not in kit.part(page, anchor)] == []
    assert "check.json" in kit.part(page, "clips")
    assert "None." in kit.part(page, "warnings")


def test_the_report_loads_neither_torch_nor_numpy() -> None:
    heavy = "{'torch', 'numpy', 'av', 'pydantic'}"
    code = f"import sys, videotune.reporter.build; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_contact_sheet_says_of_each_clip_what_check_says() -> None:
    rows = [
        kit.clip("/clips/mine/a.mp4") | {"kind": "regularization", "captions": ["a zorble", kit.EVIL], "views": 12.5},
        kit.clip("/clips/mine/b.mp4", used=False, held_out=True, views=None) | {"kind": "train", "captions": [""]},
        kit.clip("/clips/mine/c.mp4", used=False, reason="no_caption") | {"kind": "train", "captions": []},
    ]
    counts = {"found": 3, "used": 1, "held_out": 1, "skipped": 1, "buckets": [], "notes": ["of both"], "clips": rows}
    shots = {row["path"]: ["clips/a-first.jpg", "clips/a-middle.jpg"] for row in rows}
    made = contact_sheet_page("Clips", counts, shots, [Path("/clips/mine")], ("of the job", "of both"))
    assert [tag for tag, _ in kit.elements(made) if tag in ("img", "script")] == ["img"] * 6
    said = kit.words(made[made.index("<main") :])
    for sentence in (
        kit.EVIL,
        "12.5 times by the end",
        "used (regularization)",
        "(empty caption)",
        "skipped: no_caption",
    ):
        assert sentence in said
    assert [said.count(note) for note in ("of the job", "of both", "/clips/mine")] == [1, 1, 0]
