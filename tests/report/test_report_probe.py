"""The page's section on measured samples."""

from pathlib import Path
from typing import Any

import pytest
from report_kit import EVIL, config, put, start, step, write_journal

from videotune.report.html import page
from videotune.report.read import read_run


def beside(value: float | None, *names: str) -> dict[str, Any]:
    out: dict[str, Any] = {"value": value}
    for name in names:
        out |= {name: 0.5, f"to_{name}": None if value is None else value / 0.5}
    return out


def probe(number: int, mean: float, copies: int = 0, **changed: Any) -> dict[str, Any]:
    sample = {"prompt": "a zorble", "seed": 42, "path": f"probe/step-{number:06d}-0badcafe-seed42.mp4"}
    near = {"clip": "/clips/zorble left.mp4", "similarity": mean, "copy": copies > 0}
    known = {"clips": 9, "median": 0.4, "p99": 0.6}
    found = {"mean": mean, "base": 0.3, "copies": copies, "base_copies": 0, "line": 0.7, "windows": 9}
    return {
        "kind": "probe",
        "step": number,
        "probe": "0badcafe",
        "embedding": "edges-1",
        "heuristic": True,
        "samples": [sample | near],
        "replication": found | {"held_out": None, "others": known},
        "diversity": beside(1.5, "base"),
        "motion": {name: beside(0.25, "base", "data") for name in ("energy", "flicker", "saturation")},
        "seconds": 2.0,
    } | changed


def shown(folder: Path, *records: dict[str, Any], settings: dict[str, Any] | None = None) -> str:
    """The section alone."""
    write_journal(folder, [start(), step(1), *records])
    whole = config()
    put(folder, "config.json", whole | {"settings": whole["settings"] | (settings or {})})
    return page(read_run(folder)).partition('id="probe"')[2].partition("</section>")[0]


def test_the_nearest_clip_stands_beside_each_sample_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "probe" / "step-000250-0badcafe-seed42.mp4"
    path.parent.mkdir()
    path.write_bytes(b"video")
    html = shown(tmp_path, probe(0, 0.3), probe(250, 0.85, copies=1))
    assert 'src="probe/step-000250-0badcafe-seed42.mp4"' in html
    assert "zorble left.mp4" in html
    assert "likely copy" in html
    assert "1 of 1 sample of step 250 nearer to a training clip than 0.7" in html
    assert "heuristic" in html
    assert "3.00 × base" in html
    assert "0.50 × clips" in html
    assert html.count("<svg") == 2


def test_no_copy_is_said_too_and_what_an_encoder_is_called(tmp_path: Path) -> None:
    html = shown(tmp_path, probe(0, 0.3), probe(250, 0.4, heuristic=False, embedding="clip-12345678"))
    assert "no copies seen" in html
    assert "by the encoder clip-12345678" in html
    assert "no longer there" in html, "the video was removed"


def test_clips_that_are_all_alike_are_told(tmp_path: Path) -> None:
    alike = probe(0, 0.3)
    alike["replication"]["others"] = {"clips": 9, "median": 0.9, "p99": 0.99}
    assert "a copy can hardly be told" in shown(tmp_path, alike)


def test_what_was_not_measured_says_why_once(tmp_path: Path) -> None:
    reasons = [{"kind": "probe", "step": n, "not_measured": f"budget: one takes {n} s"} for n in (250, 500)]
    html = shown(tmp_path, *reasons)
    assert "Not measured at step 250, step 500: budget: one takes 500 s." in html


@pytest.mark.parametrize(("settings", "told"), [({"sample_metrics.budget": 0}, "Switched off"), ({}, "Not there yet")])
def test_without_probes(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    assert told in shown(tmp_path, settings=settings)


def test_a_prompt_and_a_path_cannot_become_markup(tmp_path: Path) -> None:
    evil = probe(0, 0.3)
    evil["samples"] = [evil["samples"][0] | {"prompt": EVIL, "clip": f"/{EVIL}", "path": "../../out.mp4"}]
    html = shown(tmp_path, evil)
    assert "<script" not in html
    assert "../../out.mp4" not in html


def test_records_with_holes_do_not_break_the_page(tmp_path: Path) -> None:
    hole = {"kind": "probe", "step": 0, "probe": "0badcafe", "samples": [{}], "replication": {}, "motion": None}
    assert "0 of 1 sample" not in shown(tmp_path, hole)
    null = probe(0, 0.3, diversity=beside(None, "base"))
    assert "–" in shown(tmp_path, null)
