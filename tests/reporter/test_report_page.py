"""The page as a whole: its chapters, that nothing comes from elsewhere, that no text
becomes markup; and damaged runs.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.support import reports
from videotune.errors import VideotuneError
from videotune.reporter.build import contact_sheet_page, write_report
from videotune.reporter.read import read_run

OUTCOME = ["verdict", "before", "use"]
DETAILS = ["warnings", "validation", "forgetting", "parts", "loss", "samples"]
DETAILS += ["metrics", "exposure", "clips", "time", "settings", "files"]
CHAPTERS = OUTCOME + DETAILS


def test_the_page_has_its_chapters_in_order_and_is_well_formed(run: Path) -> None:
    page = reports.report(run)
    assert reports.attributes(page, "id", "section") == CHAPTERS
    folded = re.findall(r'<section id="(\w+)">\s*<details>', page)
    assert folded == DETAILS, "the outcome is open, all else is folded"
    top = reports.visible_text(page[page.index("<main>") : page.index("<section")])
    assert "LORA on the toy base model: 120 of 120 steps, ended: done." in top
    assert "my run & more" in top
    assert "359,424" in reports.visible_text(page[page.index(">Details<") :])
    note = "16 frames are no count the model takes: 17 are used"
    assert note in reports.part(page, "warnings")
    assert reports.report(run) == page, "written twice"
    (run.parent / "run").symlink_to(run)
    linked = reports.report(run.parent / "run").replace(
        run.parent.name, "my run &amp; more"
    )
    assert "<title>Run my run &amp; more</title>" in linked


def test_the_page_needs_no_network_and_no_script(run: Path) -> None:
    page = reports.report(run)
    assert not [
        tag
        for tag, _ in reports.elements(page)
        if tag in ("script", "link", "iframe", "img", "object", "base")
    ]
    assert not re.search(r"https?://|@import|url\(", page)
    assert not [
        given
        for _, given in reports.elements(page)
        if any(name.startswith("on") for name in given)
    ]
    for address in (
        given[name] or "#"
        for _, given in reports.elements(page)
        for name in ("src", "href")
        if name in given
    ):
        assert address.startswith("#") or (run / unquote(address)).exists(), address


def test_text_from_files_cannot_become_markup(run: Path) -> None:
    settings = reports.config()
    settings["settings"][reports.EVIL] = settings["origins"][reports.EVIL] = settings[
        "base"
    ]["name"] = reports.EVIL
    reports.write_file(run, "config.json", settings)
    checked = reports.account()
    checked["clips"].append(
        dict.fromkeys(("path", "reason", "detail", "shape"), reports.EVIL)
        | {"warnings": [reports.EVIL]}
    )
    reports.write_file(run, "check.json", checked | {"notes": [reports.EVIL]})
    verified = {"max_error": 0.0, "reader": reports.EVIL}
    reports.write_file(
        run,
        "exports.json",
        [
            {
                "format": reports.EVIL,
                "path": reports.EVIL,
                "verified": verified,
                "use": reports.EVIL,
            }
        ],
    )
    reports.write_file(
        run, "demo.json", {"concept": {"before": 0, "after": 1, "n": reports.EVIL}}
    )
    beat = {
        "pid": 1,
        "host": reports.EVIL,
        "started": 1.0,
        "state": reports.EVIL,
        "since": 1.0,
        "time": 2.0,
    }
    reports.write_file(run, "heartbeat.json", beat)
    records = [
        *(
            json.loads(line)
            for line in (run / "journal.jsonl").read_text().splitlines()
        ),
        {"kind": "verdict", "step": 1, "verdict": reports.EVIL, "reason": reports.EVIL},
        {"kind": "warning", "text": reports.EVIL},
        reports.sample(1, reports.EVIL, path=reports.EVIL),
        reports.start(
            device=reports.EVIL,
            notes=[reports.EVIL],
            versions={reports.EVIL: reports.EVIL},
        ),
        reports.step(121, window_ids=[reports.EVIL]),
        {
            "kind": "sample_metrics",
            "step": 1,
            "samples": [{"prompt": reports.EVIL, "clip": reports.EVIL}],
        },
    ]
    for end in ([{"kind": "end", "step": 1, "why": reports.EVIL}], []):
        reports.write_journal(run, records + end)
        page = reports.report(run)
        assert "<script" not in page
        assert not [
            tag for tag, _ in reports.elements(page) if tag in ("script", "i>bold.webm")
        ]
        assert page.count("&lt;script&gt;") > 20
    assert "b <i>bold.webm" in reports.part(page, "clips")
    assert "{path: <mine>" in reports.part(page, "settings")
    assert reports.EVIL in reports.visible_text(page[: page.index("<section")]), (
        "the heartbeat's"
    )


def test_letters_that_utf8_cannot_carry_are_shown_as_question_marks(
    tmp_path: Path,
) -> None:
    reports.write_journal(
        tmp_path,
        [reports.start(), {"kind": "warning", "text": "caption \udce9 and \u00e9"}],
    )
    assert "caption ? and é" in reports.part(reports.report(tmp_path), "warnings")


def test_a_run_that_has_only_begun_says_what_is_not_there_yet(tmp_path: Path) -> None:
    reports.write_journal(tmp_path, [reports.start()])
    page = reports.report(tmp_path)
    assert reports.attributes(page, "id", "section") == CHAPTERS
    assert [
        anchor
        for anchor in CHAPTERS
        if anchor not in ("warnings", "compare")
        and "Not there yet" not in reports.part(page, anchor)
    ] == []
    assert "check.json" in reports.part(page, "clips")
    assert "17 are used" in reports.part(page, "warnings")


def test_the_report_loads_neither_torch_nor_numpy() -> None:
    heavy = "{'torch', 'numpy', 'av', 'pydantic'}"
    code = f"import sys, videotune.reporter.build; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_contact_sheet_says_of_each_clip_what_check_says() -> None:
    rows = [
        reports.clip("/clips/mine/a.mp4")
        | {
            "kind": "regularization",
            "captions": ["a zorble", reports.EVIL],
            "views": 12.5,
        },
        reports.clip("/clips/mine/b.mp4", used=False, held_out=True, views=None)
        | {"kind": "train", "captions": [""]},
        reports.clip("/clips/mine/c.mp4", used=False, reason="missing_caption")
        | {"kind": "train", "captions": []},
    ]
    counts = {
        "found": 3,
        "used": 1,
        "held_out": 1,
        "skipped": 1,
        "buckets": [],
        "notes": ["of both"],
        "clips": rows,
    }
    shots = {row["path"]: ["clips/a-first.jpg", "clips/a-middle.jpg"] for row in rows}
    made = contact_sheet_page(
        "Clips", counts, shots, [Path("/clips/mine")], ("of the job", "of both")
    )
    assert [tag for tag, _ in reports.elements(made) if tag in ("img", "script")] == [
        "img"
    ] * 6
    said = reports.visible_text(made[made.index("<main") :])
    states = ("used (regularization)", "(empty caption)", "skipped: no caption")
    for sentence in (reports.EVIL, "12.5 times by the end", *states):
        assert sentence in said
    assert [said.count(note) for note in ("of the job", "of both", "/clips/mine")] == [
        1,
        1,
        0,
    ]


@pytest.mark.parametrize(
    "tail",
    ['{"kind": "step", "st', '{"kind": "step", "step": 3', '"a", "\x00\x00', "{", "é"],
)
def test_a_torn_last_line_is_left_out_and_noted(tmp_path: Path, tail: str) -> None:
    reports.write_journal(tmp_path, [reports.start(), reports.step(1), reports.step(2)])
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(tail.encode()[:-1] if tail == "é" else tail.encode())
    run = read_run(tmp_path)
    assert list(run.steps.at) == [1, 2]
    assert len(run.notes) == 1
    assert "last line (4) is torn" in run.notes[0]


def test_a_last_line_without_its_line_break_is_kept_where_it_is_whole(
    tmp_path: Path,
) -> None:
    reports.write_journal(
        tmp_path, [reports.start()], '{"kind": "end", "step": 0, "why": "stopped"}'
    )
    run = read_run(tmp_path)
    assert (run.last("end")["why"], run.notes) == ("stopped", ())


def test_a_bad_line_in_the_middle_is_noted_by_its_number_and_unknown_kinds_are_kept(
    tmp_path: Path,
) -> None:
    bad = '{"kind": "step", "st{"kind": "step"}\n[1, 2]\n{"step": 4}\n'
    good = '{"kind": "other", "x": 6}\n{"kind": "end", "step": 1, "why": "done"}\n'
    reports.write_journal(tmp_path, [reports.start()], bad + good)
    run = read_run(tmp_path)
    assert [note.split(" of")[0] for note in run.notes] == [
        "line 2",
        "line 3",
        "line 4",
    ]
    assert [record["kind"] for record in run.journal] == ["start", "other", "end"]
    assert run.of_kind("other") == [{"kind": "other", "x": 6}]


def test_what_a_resume_changed_is_noted(run: Path) -> None:
    change = "data: 1 clip with another caption (kitten.mp4)"
    resume = {"kind": "resume", "time": 1.0, "from_step": 111, "changes": [change]}
    with (run / "journal.jsonl").open("a", encoding="utf-8") as journal:
        journal.write(json.dumps(resume) + "\n")
    said = reports.visible_text(reports.report(run))
    assert f"resumed from step 111: {change}" in said


def test_a_folder_without_a_run_is_an_error_and_gets_no_report(tmp_path: Path) -> None:
    (tmp_path / "holiday.mp4").write_bytes(b"")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(VideotuneError, match="not a run folder"):
            write_report(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.mp4"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("plan.json", "{"),
        ("plan.json", "[]"),
        ("plan.json", {"effective_batch": 10**30}),
        ("check.json", {"clips": [{"shape": {"x": []}}]}),
        ("check.json", {"clips": [{"source_fps": "x"}]}),
        ("check.json", {"clips": [{"warnings": {"": None}}]}),
        ("check.json", {"skipped": []}),
        ("config.json", {"settings": {"base_model_name": "asset:toy"}, "steps": 2**63}),
        ("exports.json", {"format": 1}),
        ("demo.json", []),
        ("journal.jsonl", {"kind": "step", "step": 10**30}),
        ("journal.jsonl", {"kind": "end", "step": 1, "why": "done", "time": 1e308}),
        ("journal.jsonl", {"kind": "resume", "from_step": -1}),
    ],
)
def test_a_value_of_another_kind_or_size_is_left_out_with_a_note(
    tmp_path: Path, name: str, damage: object
) -> None:
    run = reports.full_run(tmp_path / "run")
    (run / name).write_text(
        (damage if isinstance(damage, str) else json.dumps(damage)) + "\n"
    )
    assert write_report(run).is_file()
    assert ("line 1 of the journal" if name == "journal.jsonl" else name) in " ".join(
        read_run(run).notes
    )


@pytest.mark.parametrize(
    ("batches", "words"), [((2, 4), "2 to 4"), ((2, 2), "2"), ((3,), "3"), ((), "2")]
)
def test_the_samples_of_a_step_are_those_of_the_buckets(
    tmp_path: Path, batches: tuple[int, ...], words: str
) -> None:
    """Images and videos may differ in theirs; a plan of an earlier version has none."""
    run = reports.full_run(tmp_path / "run")
    buckets = [{"shape": "17x64x64", "windows": 4, "batch": batch} for batch in batches]
    reports.write_file(run, "plan.json", reports.plan() | {"buckets": buckets})
    page = reports.visible_text(reports.report(run))
    assert f" {words} samples a step" in page


def test_a_journal_of_an_earlier_version_is_read_by_its_old_words(
    tmp_path: Path,
) -> None:
    lines: list[dict[str, Any]] = [
        {
            "kind": "ruler",
            "step": 0,
            "ruler": "0badcafe",
            "held_out": None,
            "train": None,
        },
        {
            "kind": "verdict",
            "step": 0,
            "verdict": None,
            "reason": "one so far",
            "ruler": "0badcafe",
        },
        {"kind": "probe", "step": 0, "probe": "feedbeef", "not_measured": "budget"},
    ]
    reports.write_journal(tmp_path, lines)
    run = read_run(tmp_path)
    assert [(one["kind"], one["validation"]) for one in run.validations] == [
        ("validation", "0badcafe")
    ]
    assert run.last("verdict")["validation"] == "0badcafe"
    assert run.of_kind("sample_metrics")[0]["sample_metrics"] == "feedbeef"


def test_a_picture_among_the_clips_has_one_frame(tmp_path: Path) -> None:
    account = reports.account()
    account["clips"][0] |= {"source_frames": 1, "width": 720, "height": 480}
    reports.write_journal(tmp_path, [reports.start()])
    reports.write_file(tmp_path, "check.json", account)
    said = reports.part(reports.report(tmp_path), "clips")
    assert "720x480, 1 frame," in said
