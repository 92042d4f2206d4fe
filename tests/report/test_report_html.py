import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from report_kit import EVIL, WINDOWS, account, clip, config, full_run, put, reading, sample, start, step, write_journal

from videotune.errors import VideotuneError
from videotune.report.html import write_report
from videotune.report.read import read_run

SECTIONS = [
    "verdict",
    "before",
    "loss",
    "ruler",
    "exposure",
    "samples",
    "probe",
    "clips",
    "time",
    "use",
    "settings",
    "files",
    "warnings",
]


class Tree(HTMLParser):
    """What a browser would see: elements with their attributes, that they close in order, and the text."""

    void = ("meta", "path")

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    tree = Tree()
    tree.feed(page)
    tree.close()
    assert tree.open == []
    return tree.elements


def part(page: str, anchor: str) -> str:
    """A section's text, as read."""
    found = re.search(rf'<section id="{anchor}">(.*?)</section>', page, re.DOTALL)
    assert found, anchor
    return words(found[1])


def words(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", markup)).split())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return full_run(tmp_path / "my run & more")


def test_the_page_has_its_sections_in_order_and_is_well_formed(run: Path) -> None:
    page = report(run)
    assert [attributes["id"] for tag, attributes in elements(page) if tag == "section"] == SECTIONS
    top = words(page[page.index("<main>") : page.index("<section")])
    assert "LORA on asset:toy: 120 of 120 steps, ended: done." in top
    assert "my run & more" in top
    assert "359,424" in top
    assert "16 frames are no count the model takes: 17 are used" in top
    assert "waiting for clips 1.2 s 3.3% forward 12 s 33.3% backward 22.8 s 63.3%" in part(page, "time")


def test_the_page_needs_no_network_and_no_script(run: Path) -> None:
    page = report(run)
    assert not [tag for tag, _ in elements(page) if tag in ("script", "link", "iframe", "img", "object", "base")]
    assert not re.search(r"https?://|@import|url\(", page)
    for tag, attributes in elements(page):
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href"):
            address = attributes.get(name) or "#"
            assert address.startswith("#") or (run / unquote(address)).exists(), address


def test_text_from_files_cannot_become_markup(run: Path) -> None:
    settings = config()
    settings["settings"][EVIL] = EVIL
    settings["origins"][EVIL] = EVIL
    settings["base"]["name"] = EVIL
    put(run, "config.json", settings)
    checked = account()
    checked["clips"].append(dict.fromkeys(("path", "reason", "detail", "shape"), EVIL) | {"warnings": [EVIL]})
    checked["notes"] = [EVIL]
    put(run, "check.json", checked)
    put(run, "exports.json", [{"format": EVIL, "path": EVIL, "verified": {"max_error": 0.0, "reader": EVIL}}])
    put(run, "demo.json", {"concept": {"before": 0, "after": 1, "n": EVIL}})
    records = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    records += [{"kind": "verdict", "verdict": EVIL, "reason": EVIL}, {"kind": "warning", "step": EVIL, "text": EVIL}]
    records += [sample(1, EVIL, path=EVIL), start(device=EVIL, notes=[EVIL], versions={EVIL: EVIL})]
    records += [step(121, window_ids=[EVIL]), {"kind": "end", "why": EVIL}]
    write_journal(run, records)
    page = report(run)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not [tag for tag, _ in elements(page) if tag in ("script", "i>bold.webm")]
    assert "b <i>bold.webm" in part(page, "clips")
    assert "/clips/<mine>" in part(page, "settings")


def test_letters_that_utf8_cannot_carry_are_shown_as_question_marks(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(), {"kind": "warning", "text": "caption \udce9 and \u00e9"}])
    assert "caption ? and é" in part(report(tmp_path), "warnings")


def test_the_loss_shown_is_the_journals(run: Path) -> None:
    mses = list(read_run(run).steps.mse[1])
    said = part(report(run), "loss")
    first, last = sum(mses[:12]) / 12, sum(mses[-12:]) / 12
    assert f"at 120 steps: over the first 12 of them {first:.4g}, over the last 12 {last:.4g}." in said
    assert "mean of 7 steps" in said
    assert said.count("→") == 9
    low = list(read_run(run).steps.by_noise[0][1])
    num = len(low) // 10
    assert f"t 0.00–0.11 {sum(low[:num]) / num:.3g} → {sum(low[-num:]) / num:.3g}, {len(low)} steps" in said


def test_steps_that_were_not_applied_are_marked(tmp_path: Path) -> None:
    bad = step(2, skipped=True) | {"mse": None, "loss": None, "grad_norm": None, "by_t": [None] * 9}
    write_journal(tmp_path, [start(), step(1), bad, step(3)])
    page = report(tmp_path)
    assert "1 step not applied" in part(page, "loss")
    assert "(red marks): 2." in part(page, "loss")
    assert 'class="mark" d="M500.0 ' in page


def test_the_ruler_shows_before_after_and_change(run: Path) -> None:
    said = part(report(run), "ruler")
    assert "step 0 step 120" in said
    assert "held-out clips 0.44 0.28 -36.4% 0.28 at step 120" in said
    assert "training clips 0.46 0.23 -50.0% 0.23 at step 120" in said


def test_without_held_out_clips_the_ruler_says_so(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(), reading(0, None, 0.5)])
    said = part(report(tmp_path), "ruler")
    assert "No held-out clips are measured: none are held out." in said
    assert "training clips 0.5" in said
    assert "change" not in said


def test_a_demo_shows_what_the_detector_saw(run: Path) -> None:
    shares = {"concept": {"before": 0.083, "after": 1, "n": 12}, "control": {"before": 1.0, "after": 0.917, "n": 12}}
    put(run, "demo.json", shares)
    said = part(report(run), "before")
    assert "the new concept 8% 100% 12" in said
    assert "what the base knew 100% 92% 12" in said


def test_views_are_counted_from_the_journal(run: Path) -> None:
    assert read_run(run).steps.windows == dict.fromkeys(WINDOWS, 60)
    said = part(report(run), "exposure")
    assert "high 240 samples drawn so far from 4 windows: each shown 60 to 60 times." in said
    order = ["two windows.mov 120 in 2 windows", "b <i>bold.webm 60", "zorble left.mp4 60"]
    places = [said.index(line) for line in order]
    assert places == sorted(places)
    assert "high 50 to 99: 3 clips" in said


def test_views_of_clips_that_were_taken_out_decide_no_band(run: Path) -> None:
    """After a resume with changed data: the account has the clips of today, the journal's steps those of before too."""
    gone = f"{'e' * 12}@0.000+17x64x64"
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "step")
    first["window_ids"] = first["window_ids"] + [gone] * 120
    write_journal(run, lines)
    said = part(report(run), "exposure")
    assert "high 240 samples drawn so far from 4 windows: each shown 60 to 60 times." in said
    held = account() | {
        "clips": [*account()["clips"], clip("since held out.mp4", used=False, held_out=True, id="e" * 32)]
    }
    put(run, "check.json", held)
    assert "high 240 samples" in part(report(run), "exposure"), "one that is held out now is no training clip any more"


def test_half_way_the_bars_show_so_far_and_by_the_end(tmp_path: Path) -> None:
    run = full_run(tmp_path / "half", last_step=61)
    page = report(run)
    said = part(page, "exposure")
    assert "two windows.mov 62 of 120 in 2 windows" in said
    assert "zorble left.mp4 30 of 60" in said
    assert "moderate 10 to 49: 3 clips" in said
    assert "61 of 120 steps" in words(page)
    assert "has no end: still going, or killed" in words(page)


def test_an_account_without_ids_shows_the_planned_views(run: Path) -> None:
    put(run, "check.json", account(ids=False))
    said = part(report(run), "exposure")
    assert "views of each clip by the end of the run, as planned" in said
    assert "two windows.mov 120 in 2 windows" in said


@pytest.mark.parametrize(
    ("views", "band"),
    [
        (9, "conservative"),
        (10, "moderate"),
        (49, "moderate"),
        (50, "high"),
        (99, "high"),
        (100, "risky"),
        (1000, "risky"),
    ],
)
def test_bands_are_half_open(tmp_path: Path, views: int, band: str) -> None:
    write_journal(tmp_path, [start(windows=1), *(step(n + 1, window_ids=[WINDOWS[0]]) for n in range(views))])
    said = part(report(tmp_path), "exposure")
    assert said.startswith(f"How often each clip is shown {band} {views:,} samples")
    assert re.search(rf"{band} \d+ (to \d+|and more): 1 clip\b", said)


def test_windows_not_seen_yet_count_as_never_shown(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(windows=9), step(1), step(2)])
    assert "from 9 windows: each shown 0 to 1 times" in part(report(tmp_path), "exposure")


def test_many_clips_are_all_on_the_page(tmp_path: Path) -> None:
    windows = [f"{n:012d}@0.000+17x64x64" for n in range(100)]
    write_journal(tmp_path, [start(windows=100), step(1, window_ids=windows)])
    page = report(tmp_path)
    assert "60 more clips, seen least" in part(page, "exposure")
    assert all(f"{n:012d}" in page for n in range(100))


def test_samples_stand_in_a_grid_of_prompts_and_steps(run: Path) -> None:
    page = report(run)
    grid = page[page.index('<section id="samples">') : page.index('<section id="clips">')]
    videos = [attributes for tag, attributes in elements(grid) if tag == "video"]
    assert len(videos) == 6
    assert all({"controls", "loop", "muted", "playsinline"} <= set(video) for video in videos)
    assert all(not str(video["src"]).startswith(("/", "file:")) for video in videos)
    said = part(page, "samples")
    assert said == (
        f"Samples a zorble moves left seed 42 base (step 0) step 60 step 120 {EVIL} seed 42 base (step 0) step 60 step 120"
    )
    assert "--columns:3" in page


def test_a_missing_or_foreign_video_is_said_and_not_shown(tmp_path: Path) -> None:
    records = [start(), sample(0, "a"), sample(0, "b", path="../../etc/passwd"), sample(5, "a", path="/etc/passwd")]
    write_journal(tmp_path, [*records, sample(5, "c", path="javascript:alert(1)"), {"kind": "sample", "prompt": "d"}])
    page = report(tmp_path)
    assert not [tag for tag, _ in elements(page) if tag in ("video", "script")]
    said = part(page, "samples")
    assert "no longer there: samples/step-000000" in said
    assert "outside the run folder: ../../etc/passwd" in said
    assert "outside the run folder: /etc/passwd" in said
    assert "not drawn" in said


def test_odd_names_of_videos_become_working_links(tmp_path: Path) -> None:
    names = ["samples/50 % & ünder#1?.mp4", 'samples/"quoted".mp4']
    write_journal(tmp_path, [start(), *(sample(0, name, path=name) for name in names)])
    (tmp_path / "samples").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(b"")
    found = [attributes["src"] for tag, attributes in elements(report(tmp_path)) if tag == "video"]
    assert [unquote(str(address)) for address in found] == names
    assert not any(letter in str(address) for address in found for letter in ' "#?&')


def test_every_clip_is_accounted_for(run: Path) -> None:
    said = part(report(run), "clips")
    assert "5 found = 3 used + 1 held out + 1 skipped." in said
    assert "short.mp4 skipped too_short 64×64, 17 frames, 16 fps 3 frames at 16 fps; 5 are needed" in said
    assert "held back.mp4 held out" in said
    assert (
        "two windows.mov used 64×64, 17 frames, 29.97 fps 2 windows, 34 frames, each 64x64, 17 frames 0.19 s 120 high"
        in said
    )
    assert "42% 60 high 42 % of its frames repeat the one before <b>" in said
    assert said.index("short.mp4") < said.index("held back.mp4") < said.index("two windows.mov")
    assert "17x64x64 4 80" in said


def test_an_account_that_does_not_add_up_is_said(run: Path) -> None:
    put(run, "check.json", account() | {"found": 6})
    assert "do not add up" in part(report(run), "clips")


def test_a_common_folder_of_the_clips_is_written_once(run: Path) -> None:
    checked = account()
    for row in checked["clips"]:
        row["path"] = f"/data/mine/{row['path']}"
    put(run, "check.json", checked)
    said = part(report(run), "clips")
    assert "In /data/mine/ :" in said
    assert said.count("/data/mine") == 1


def test_settings_stand_with_their_origin_the_persons_first(run: Path) -> None:
    said = part(report(run), "settings")
    for line in ("steps 120 user", "learning_rate 0.001 preset", "lora.targets linear preset", "lora.rank 16 default"):
        assert line in said
    assert "video_config.target_fps 16 family" in said
    assert "video_config.strict_frames no default" in said
    assert (
        said.index("steps 120 user") < said.index("learning_rate") < said.index("target_fps") < said.index("lora.rank")
    )
    assert "3 settings at the default" in said


def test_files_are_listed_with_their_check(run: Path) -> None:
    page = report(run)
    said = part(page, "files")
    assert "diffusers export/zorble.safetensors 1.45 MB verified largest error 2.5e-08 by diffusers" in said
    links = [attributes["href"] for tag, attributes in elements(page) if tag == "a"]
    assert "export/zorble.safetensors" in links
    assert "checkpoints/step-120" in links
    (run / "export" / "zorble.safetensors").unlink()
    assert "export/zorble.safetensors not found" in part(report(run), "files")


def test_an_export_outside_of_the_run_is_named_without_a_link(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "lora.safetensors"
    elsewhere.write_bytes(bytes(2_000_000))
    inside = (run / "export" / "zorble.safetensors").resolve()
    put(run, "exports.json", [{"format": "a", "path": str(elsewhere)}, {"format": "b", "path": str(inside)}])
    page = report(run)
    assert f"a {elsewhere} 2.00 MB unverified not read back" in part(page, "files")
    links = [attributes["href"] for tag, attributes in elements(page) if tag == "a"]
    assert "export/zorble.safetensors" in links
    assert str(elsewhere) not in links


def test_warnings_are_gathered_once_with_their_steps(tmp_path: Path) -> None:
    slow = [{"kind": "warning", "step": n, "text": "slow disk"} for n in (3, 5)]
    write_journal(tmp_path, [start(), *slow, {"kind": "warning", "text": "no step"}], '{"kind"')
    said = part(report(tmp_path), "warnings")
    assert said.count("slow disk") == 1
    assert "slow disk (step 3, 5)" in said
    assert "no step" in said
    assert "torn" in said


def test_a_run_that_has_only_begun_says_what_is_not_there_yet(tmp_path: Path) -> None:
    write_journal(tmp_path, [start()])
    page = report(tmp_path)
    assert [attributes["id"] for tag, attributes in elements(page) if tag == "section"] == SECTIONS
    for anchor in SECTIONS[:-1]:
        assert "Not there yet" in part(page, anchor), anchor
    assert "check.json" in part(page, "clips")
    assert "None." in part(page, "warnings")


def test_an_interrupted_run_is_not_called_done(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(), step(1), {"kind": "end", "step": 1, "why": "interrupted"}])
    page = report(tmp_path)
    assert "1 of 120 steps, ended: interrupted." in words(page)
    assert '<span class="badge care">interrupted</span>' in page


def test_a_resume_and_a_verdict_are_told(tmp_path: Path) -> None:
    verdict = {"kind": "verdict", "step": 6, "verdict": "PLATEAU", "reason": "no change since step 4", "best_step": 4}
    steps = [*(step(n) for n in range(1, 6)), {"kind": "resume", "from_step": 4}, step(5)]
    write_journal(tmp_path, [start(), *steps, verdict])
    said = words(report(tmp_path))
    assert "4 resumed from step" in said
    assert "PLATEAU It has come to rest. No change since step 4." in said
    assert "1 step after step 4 left behind" in said


def test_fields_of_the_wrong_kind_do_not_end_the_report(tmp_path: Path) -> None:
    odd = [start(clips=3, versions=None, buckets="x", notes=None, steps=None, windows="many")]
    odd += [step(1) | {"mse": "x", "by_t": None, "window_ids": None, "seconds": 4}, {"kind": "step"}]
    odd += [{"kind": "ruler", "step": 0, "held_out": 3, "train": {"by_quantile": "x"}}, {"kind": "sample", "step": "x"}]
    write_journal(tmp_path, [*odd, {"kind": "save"}, {"kind": "warning"}, {"kind": "resume"}, {"kind": "verdict"}])
    put(tmp_path, "check.json", {"clips": [1, {"used": True}], "notes": 3})
    put(tmp_path, "plan.json", {"views": 3})
    put(tmp_path, "config.json", {"settings": [], "base": "x"})
    put(tmp_path, "exports.json", [3, {}])
    assert [attributes["id"] for tag, attributes in elements(report(tmp_path)) if tag == "section"] == SECTIONS


def test_writing_twice_gives_the_same_page(run: Path) -> None:
    assert report(run) == report(run)


def test_a_folder_that_is_no_run_gets_no_report(tmp_path: Path) -> None:
    with pytest.raises(VideotuneError, match="not a run folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_report_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, videotune.report.html; print(sorted({'torch', 'numpy', 'av', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def with_regularization(run: Path, kind: str | None = "regularization") -> None:
    """The clip of two windows keeps the model as it is; a run of 4 steps, of which 2 and 4 show it alone."""
    checked = account()
    for row, name in zip(checked["clips"], ("train", "train", kind), strict=False):
        row |= {"kind": name} if kind else {}
    put(run, "check.json", checked)
    train, keep = [WINDOWS[0]] * 2, WINDOWS[2:]
    shown = zip((1.0, 90.0, 3.0, 70.0), (train, keep, [WINDOWS[0], keep[0]], keep), strict=True)
    write_journal(run, [start(), *(step(n, mse, window_ids=ids) for n, (mse, ids) in enumerate(shown, 1))])


def test_regularization_clips_are_in_no_band(run: Path) -> None:
    with_regularization(run)
    said = part(report(run), "exposure")
    assert "3 samples drawn so far from 2 windows: each shown 0 to 3 times." in said
    assert "1 regularization clip, in no band: 5 samples drawn so far, 120 by the end." in said
    assert "conservative 0 to 9: 2 clips" in said
    assert "two windows.mov" not in said
    assert "two windows.mov used (regularization) 64" in part(report(run), "clips")


def test_an_account_without_kinds_counts_all_clips(run: Path) -> None:
    with_regularization(run, kind=None)
    page = report(run)
    assert "8 samples drawn so far from 4 windows: each shown 0 to 3 times." in part(page, "exposure")
    assert "conservative 0 to 9: 3 clips" in part(page, "exposure")
    assert "regularization" not in part(page, "exposure") + part(page, "loss") + part(page, "clips")
    assert "1 at the first step, 70 at the last" in part(page, "loss")


def test_the_loss_leaves_out_steps_of_regularization_alone(run: Path) -> None:
    with_regularization(run)
    said = part(report(run), "loss")
    assert "1 at the first step, 3 at the last." in said
    assert "2 steps of regularization clips alone are left out." in said
    assert not re.search(r"\b(90|70)\b", said)


def test_what_is_switched_off_is_not_awaited(tmp_path: Path) -> None:
    write_journal(tmp_path, [start(), step(1)])
    for settings, validation, samples in (
        (
            {"validate_every": 0, "sample_after": 0},
            "Switched off (validate_every is 0).",
            "Switched off (sample_after is 0).",
        ),
        ({"validate_every": 250, "sample_after": 250}, "Not there yet", "Not there yet"),
        ({}, "Not there yet", "Not there yet"),
    ):
        put(tmp_path, "config.json", {"settings": settings})
        page = report(tmp_path)
        assert validation in part(page, "ruler")
        assert samples in part(page, "samples")
