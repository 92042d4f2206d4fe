"""The training loss, the validation loss, how often clips are seen, where the time
went; charts.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import reports
from videotune.reporter.charts import Line, axis_labels, line_chart, smooth, thin, ticks
from videotune.reporter.read import read_run

SPENT = {
    "starting": 2.0,
    "encoding": 10.0,
    "loading": 3.0,
    "training": 40.0,
    "saving": 1.0,
    "exporting": 4.0,
}


def test_the_loss_shown_is_the_journals(run: Path) -> None:
    mses = list(read_run(run).steps.mse[1])
    (loss,) = reports.chapters(run)["loss"]["parts"]
    first, last = sum(mses[:12]) / 12, sum(mses[-12:]) / 12
    assert (
        f"at 120 steps: over the first 12 of them {first:.4g}, over the last 12 {last:.4g}."
        in loss["says"]
    )
    assert [label for _, label in loss["chart"]["legend"]] == [
        "each step",
        "mean of 7 steps",
    ]
    low = list(read_run(run).steps.by_noise[0][1])
    num = len(low) // 10
    change = (
        f"{sum(low[:num]) / num:.3g} → {sum(low[-num:]) / num:.3g}, {len(low)} steps"
    )
    assert loss["by_noise"][0]["change"] == change
    assert f"t 0.00–0.11 {change}" in reports.part(reports.report(run), "loss")
    assert len(loss["by_noise"]) == 9


def test_steps_that_were_not_applied_are_marked(tmp_path: Path) -> None:
    bad = reports.step(2, skipped=True) | {
        "mse": None,
        "loss": None,
        "grad_norm": None,
        "by_t": [None] * 9,
    }
    reports.write_journal(
        tmp_path, [reports.start(), reports.step(1), bad, reports.step(3)]
    )
    assert "1 step not applied" in reports.part(reports.report(tmp_path), "loss")
    assert "(red marks): 2." in reports.part(reports.report(tmp_path), "loss")
    (loss,) = reports.chapters(tmp_path)["loss"]["parts"]
    assert dict(loss["chart"]["paths"])["mark"].startswith("M500.0 ")


def test_validation_shows_before_after_and_change(run: Path) -> None:
    (found,) = reports.chapters(run)["validation"]["parts"]
    assert found["head"] == ["clips", "step 0", "step 120", "lowest"]
    held_out, train = found["rows"]
    assert held_out == ["clips kept aside", "100.0%", "100.0%", "100.0% at step 0"]
    assert train == ["training clips", "100.0%", "100.0%", "100.0% at step 0"]
    assert (found["averages"], found["notes"]) == ([], [])
    reports.write_journal(run, [reports.start(), reports.reading(0, None, 0.5)])
    (found,) = reports.chapters(run)["validation"]["parts"]
    assert (found["head"], found["rows"]) == (
        ["clips", "step 0"],
        [["training clips", "0.5"]],
    )
    assert found["notes"] == ["No clips kept aside are measured: none are kept aside."]


def test_averages_and_experts_are_shown_where_there_are_any(tmp_path: Path) -> None:
    line = reports.reading(2, 0.5, 0.4)
    line["held_out"] |= {"normalised": 0.5, "experts": {"high": 0.6, "low": 0.45}}
    line["train"] |= {"normalised": 0.4, "experts": {"high": 0.3, "low": 0.41}}
    line["live"] = {"held_out": {"normalised": 0.55}, "train": {"normalised": 0.35}}
    reports.write_journal(
        tmp_path, [reports.start(), reports.reading(0, 1.0, 1.0), line]
    )
    (found,) = reports.chapters(tmp_path)["validation"]["parts"]
    assert found["averages"] == [
        ["the average of the weights, which is exported", "0.5", "0.4"],
        ["the weights themselves", "0.55", "0.35"],
        ["expert high, at its noise levels", "0.6", "0.3"],
        ["expert low, at its noise levels", "0.45", "0.41"],
    ]
    assert "expert low, at its noise levels 0.45 0.41" in reports.part(
        reports.report(tmp_path), "validation"
    )


def test_losses_of_another_validation_set_are_left_out_and_counted(
    tmp_path: Path,
) -> None:
    """After a resume with other held-out clips: what was measured before compares with
    nothing that is measured after.
    """
    names = {0: "old", 2: "old", 4: "new", 6: "new"}
    readings = [
        reports.reading(n, 0.9 - n / 10, 0.5) | {"validation": name}
        for n, name in names.items()
    ]
    reports.write_journal(tmp_path, [reports.start(), *readings])
    text = reports.part(reports.report(tmp_path), "validation")
    assert "clips step 4 step 6 lowest clips kept aside 100.0% 100.0%" in text
    assert "2 validations of an earlier set" in text


def bars(run: Path) -> list[tuple[str, str, int]]:
    return [
        (clip.path, clip.amount, clip.windows)
        for clip in reports.chapters(run)["exposure"]["clips"]
    ]


def test_times_seen_are_counted_from_the_journal(run: Path) -> None:
    assert read_run(run).steps.windows == dict.fromkeys(reports.WINDOWS, 60)
    text = reports.part(reports.report(run), "exposure")
    assert "high 240 samples so far from 4 windows: each seen 60 times." in text
    assert "50 to 99" not in text, "one band needs no legend"
    assert "two windows.mov 120 times, in 2 windows" in text
    expected = [
        ("two windows.mov", "120", 2),
        ("b <i>bold.webm", "60", 1),
        ("zorble left.mp4", "60", 1),
    ]
    assert bars(run) == expected
    reports.write_file(run, "check.json", reports.account(ids=False))
    assert "seen by the end of the run, as planned" in reports.part(
        reports.report(run), "exposure"
    )
    assert bars(run) == expected


@pytest.mark.parametrize("windows", [1, 5])
def test_clips_of_more_windows_are_not_said_to_be_seen_as_often_as_others(
    windows: int, run: Path
) -> None:
    clips = [reports.clip(f"{n}.mp4") for n in range(9)]
    clips.append(reports.clip("long.mp4", windows=windows, views=60 * windows))
    reports.write_file(run, "check.json", reports.account() | {"clips": clips})
    text = reports.part(reports.report(run), "exposure")
    assert ("10 clips, seen about equally often" in text) == (windows == 1)
    assert ("each window is seen about equally often" in text) == (windows == 5)


def test_clips_that_were_removed_decide_no_band(run: Path) -> None:
    """After a resume with changed data: the account has the clips of today, the
    journal's steps those of before too.
    """
    gone = f"{'e' * 12}@0.000+17x64x64"
    lines = [
        json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()
    ]
    first = next(line for line in lines if line["kind"] == "step")
    first["window_ids"] = first["window_ids"] + [gone] * 120
    reports.write_journal(run, lines)
    held = reports.clip("since kept aside.mp4", used=False, held_out=True, id="e" * 32)
    for clips in (reports.account()["clips"], [*reports.account()["clips"], held]):
        reports.write_file(run, "check.json", reports.account() | {"clips": clips})
        found = reports.chapters(run)["exposure"]["so_far"]
        assert found["band"][0] == "high"
        assert [found[key] for key in ("samples", "windows", "least", "most")] == [
            240,
            4,
            60,
            60,
        ]


def with_regularization(run: Path) -> dict[str, Any]:
    """The clip of two windows keeps the model as it is; a run of 4 steps, of which 2
    and 4 show it alone.
    """
    checked = reports.account()
    for row, name in zip(
        checked["clips"], ("train", "train", "regularization"), strict=False
    ):
        row["kind"] = name
    reports.write_file(run, "check.json", checked)
    train, keep = [reports.WINDOWS[0]] * 2, reports.WINDOWS[2:]
    shown = zip(
        (1.0, 90.0, 3.0, 70.0),
        (train, keep, [reports.WINDOWS[0], keep[0]], keep),
        strict=True,
    )
    reports.write_journal(
        run,
        [
            reports.start(),
            *(
                reports.step(n, mse, window_ids=ids)
                for n, (mse, ids) in enumerate(shown, 1)
            ),
        ],
    )
    return reports.chapters(run)


def test_regularization_clips_are_in_no_band_and_steps_of_them_alone_in_no_curve(
    run: Path,
) -> None:
    found = with_regularization(run)["exposure"]["clips"]
    assert [clip.path for clip in found] == ["zorble left.mp4", "b <i>bold.webm"]
    page = reports.report(run)
    text = reports.part(page, "exposure")
    assert "3 samples so far from 2 windows: each seen 0 to 3 times." in text
    assert (
        "1 regularization clip, in no band: 5 samples so far, 120 by the end." in text
    )
    assert "two windows.mov used (regularization) 64" in reports.part(page, "clips")
    loss = reports.part(page, "loss")
    assert "1 at the first step, 3 at the last." in loss
    assert "2 steps with only regularization clips are left out." in loss
    assert not re.search(r"\b(90|70)\b", loss)


def test_time_by_phase_sums_to_the_wall_time(tmp_path: Path) -> None:
    end = {"kind": "end", "step": 2, "why": "done", "seconds": SPENT}
    reports.write_journal(
        tmp_path, [reports.start(), reports.step(1), reports.step(2), end]
    )
    found = reports.chapters(tmp_path)["time"]
    assert found["whole"] == sum(seconds for _, seconds in found["spent"]) == 60
    assert sum(found["steps"].values()) + found["between"] == pytest.approx(40)
    assert [name for name, _ in found["spent"]][:2] == ["training", "encoding"]
    text = reports.part(reports.report(tmp_path), "time")
    assert (
        "of all training 40 s 66.7% waiting for clips 0.02 s 0.0% forward 0.2 s" in text
    )
    assert "between the steps 39.4 s" in text
    assert "wall time 60 s 100.0%" in text


finite = st.floats(-1e6, 1e6)


def strokes(chart: dict, css: str) -> list[tuple[float, float]]:
    """The corners of a line, in the drawing's coordinates."""
    data = dict(chart["paths"])[f"line {css}"]
    return [
        (float(x), float(y))
        for x, y in (corner.split() for corner in data[1:].split("L"))
    ]


def test_smoothing_is_the_mean_of_the_neighbours() -> None:
    xs, ys = [0, 1, 2, 3, 4], [3.0, 0.0, 3.0, 6.0, 9.0]
    assert smooth(xs, ys, 3) == [(0, 1.5), (1, 2.0), (2, 3.0), (3, 6.0), (4, 7.5)]
    assert smooth(xs, ys, 1) == list(zip(xs, ys, strict=True))
    assert smooth([], [], 5) == []
    far = [(25.0 + 50 * i, 25.0 + 50 * i) for i in range(20)]
    assert smooth(range(1000), [float(x) for x in range(1000)], 5, 10) == far


@given(st.lists(finite, min_size=1, max_size=2000))
def test_thinning_keeps_the_extremes_and_the_order(values: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    thinned = thin([x for x, _ in points], values, columns=50)
    assert len(thinned) <= 100
    assert thinned == sorted(thinned)
    assert set(thinned) <= set(points)
    assert {min(values), max(values)} <= {y for _, y in thinned}


@given(finite, st.floats(1e-6, 1e6))
def test_ticks_lie_within_and_their_labels_tell_them_apart(
    low: float, width: float
) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 9
    room = 1e-6 * width + 1e-9 * abs(low)
    assert all(low - room <= value <= low + width + room for value in found)
    if abs(low) < 1e3:
        assert len(set(axis_labels(found))) == len(set(found))


def test_points_and_marks_are_drawn_where_they_belong() -> None:
    line = Line("mse", [(0, 0.0), (50, 4.0), (100, 2.0)], "one")
    chart = line_chart([line], says="a curve", from_zero=True, marks=[50])
    (x0, y0), (x1, y1), (x2, y2) = strokes(chart, "one")
    assert (x0, x1, x2, y0) == (0, 500, 1000, 1000)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(2, abs=0.01)
    assert dict(chart["paths"])["mark"].startswith("M500.0 ")
    assert chart["legend"] == [("one", "mse")]


def test_a_spike_of_the_raw_curve_does_not_flatten_the_rest() -> None:
    raw = [(float(x), 1.0 + x / 400) for x in range(400)]
    raw[200] = (200.0, 1e6)
    heights = [
        y for _, y in strokes(line_chart([Line("raw", raw, "faint")], says=""), "faint")
    ]
    assert max(heights) - sorted(heights)[5] > 800


def test_noise_levels_compare_although_each_has_other_clips(tmp_path: Path) -> None:
    """Three training clips are measured at every third level each: the plain errors go
    up and down with the clips, also where all have halved.
    """
    by_clip = (8.0, 2.0, 1.0)
    records = [reports.start()]
    for step, share in ((0, 1.0), (2, 0.5)):
        record = reports.reading(step, None, 1.0)
        record["train"]["by_quantile"] = [share * by_clip[i % 3] for i in range(9)]
        record["train"]["clips"] = {letter * 12: share for letter in "abc"}
        record["train"]["normalised"] = share
        records.append(record)
        reports.write_journal(tmp_path, records)
        (found,) = reports.chapters(tmp_path)["validation"]["parts"]
        assert "every third noise level" in found["level_note"]
        page = reports.part(reports.report(tmp_path), "validation")
        assert found["level_note"] in page

    title, chart = found["charts"][1]
    assert "as a share of the base model's error" in title
    line = dict(chart["paths"])["line two"]
    heights = [corner.split()[1] for corner in line[1:].split("L")]
    assert len(heights) == 9
    assert len(set(heights)) == 1, "a flat line"
