from pathlib import Path

from report_kit import full_run, reading, start, write_journal
from test_report_html import part, report


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
