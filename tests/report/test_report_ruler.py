from pathlib import Path

from report_kit import full_run, reading, start, write_journal
from test_report_html import part, report


def test_averages_and_experts_are_told_where_there_are_any(tmp_path: Path) -> None:
    line = reading(2, 0.5, 0.4)
    line["held_out"] |= {"normalised": 0.5, "experts": {"high": 0.6, "low": 0.45}}
    line["train"] |= {"normalised": 0.4, "experts": {"high": 0.3, "low": 0.41}}
    line["live"] = {"held_out": {"normalised": 0.55}, "train": {"normalised": 0.35}}
    write_journal(tmp_path, [start(), reading(0, 1.0, 1.0), line])
    said = part(report(tmp_path), "ruler")
    assert "the average of the weights, which is exported 0.5 0.4" in said
    assert "the weights themselves 0.55 0.35" in said
    assert "expert high, at its noise levels 0.6 0.3" in said
    assert "expert low, at its noise levels 0.45 0.41" in said
    write_journal(tmp_path, [start(), reading(0, 1.0, 1.0), reading(2, 0.5, 0.4)])
    assert "At the last reading" not in part(report(tmp_path), "ruler")


def test_readings_of_another_ruler_are_left_out_and_counted(tmp_path: Path) -> None:
    """After a resume with other held-out clips: what was read before compares with nothing that is read after."""
    names = ["old", "old", "new", "new"]
    readings = [reading(n, 0.9 - n / 10, 0.5) | {"ruler": name} for n, name in zip((0, 2, 4, 6), names, strict=True)]
    write_journal(tmp_path, [start(), *readings])
    said = part(report(tmp_path), "ruler")
    assert "clips step 4 step 6 change lowest" in said
    assert "held-out clips 0.5 0.3 -40.0%" in said
    assert "2 readings of an earlier ruler" in said
    assert "earlier ruler" not in part(report(full_run(tmp_path / "other")), "ruler")
