import json
from pathlib import Path
from typing import Any

import pytest

from tests.reporter.report_kit import full_run, start, step, write_journal
from videotune.errors import VideotuneError
from videotune.reporter.build import write_report
from videotune.reporter.read import read_run


@pytest.mark.parametrize("tail", ['{"kind": "step", "st', '{"kind": "step", "step": 3', '"a", "\x00\x00', "{", "é"])
def test_a_torn_last_line_is_left_out_and_noted(tmp_path: Path, tail: str) -> None:
    write_journal(tmp_path, [start(), step(1), step(2)])
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(tail.encode()[:-1] if tail == "é" else tail.encode())
    run = read_run(tmp_path)
    assert list(run.steps.at) == [1, 2]
    assert len(run.notes) == 1
    assert "last line (4) is torn" in run.notes[0]


def test_a_last_line_without_its_line_break_is_kept_where_it_is_whole(tmp_path: Path) -> None:
    write_journal(tmp_path, [start()], '{"kind": "end", "step": 0, "why": "stopped"}')
    run = read_run(tmp_path)
    assert (run.last("end")["why"], run.notes) == ("stopped", ())


def test_a_bad_line_in_the_middle_is_noted_by_its_number_and_unknown_kinds_are_kept(tmp_path: Path) -> None:
    bad = '{"kind": "step", "st{"kind": "step"}\n[1, 2]\n{"step": 4}\n'
    write_journal(tmp_path, [start()], bad + '{"kind": "other", "x": 6}\n{"kind": "end", "step": 1, "why": "done"}\n')
    run = read_run(tmp_path)
    assert [note.split(" of")[0] for note in run.notes] == ["line 2", "line 3", "line 4"]
    assert [record["kind"] for record in run.journal] == ["start", "other", "end"]
    assert run.of_kind("other") == [{"kind": "other", "x": 6}]


def test_a_folder_without_a_run_is_an_error_and_gets_no_report(tmp_path: Path) -> None:
    (tmp_path / "holiday.mp4").write_bytes(b"")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(VideotuneError, match=r"not a run folder.*journal\.jsonl"):
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
def test_a_value_of_another_kind_or_size_is_left_out_with_a_note(tmp_path: Path, name: str, damage: object) -> None:
    run = full_run(tmp_path / "run")
    (run / name).write_text((damage if isinstance(damage, str) else json.dumps(damage)) + "\n")
    assert write_report(run).is_file()
    assert ("line 1 of the journal" if name == "journal.jsonl" else name) in " ".join(read_run(run).notes)


def test_a_journal_of_an_earlier_version_is_read_by_its_old_words(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "ruler", "step": 0, "ruler": "0badcafe", "held_out": None, "train": None},
        {"kind": "verdict", "step": 0, "verdict": None, "reason": "one so far", "ruler": "0badcafe"},
        {"kind": "probe", "step": 0, "probe": "feedbeef", "not_measured": "budget"},
    ]
    write_journal(tmp_path, lines)
    run = read_run(tmp_path)
    assert [(one["kind"], one["validation"]) for one in run.validations] == [("validation", "0badcafe")]
    assert run.last("verdict")["validation"] == "0badcafe"
    assert run.of_kind("sample_metrics")[0]["sample_metrics"] == "feedbeef"
