"""A run that begins with an earlier LoRA is measured against that LoRA, and no page calls
that the base model.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import reports
from tests.support.command_line import Printed, run
from videotune.reporter.comparison import comparison_table, write_comparison
from videotune.reporter.model_card import model_card
from videotune.reporter.outcome import verdict
from videotune.reporter.ranking import (
    BEST_FIRST,
    NOT_RANKED,
    doubt_on_errors,
    order_of_runs,
)
from videotune.reporter.read import Run, read_run
from videotune.runs.start_state import start_state
from videotune.validation.overfitting import judge, recommend

SOURCE = "/home/somebody/runs/first/export/first-step-240-comfyui.safetensors"

OF_BASE = re.compile(r"base model('s error|itself|'s\b)|better than the base", re.ASCII)
"""What a page may not say of such a run's errors."""


def begin_with(folder: Path, source: str = SOURCE, method: str = "LORA") -> None:
    """Make a run one that began with the weights of a file or folder."""
    changed: dict[str, Any] = reports.config()
    changed["settings"] |= {"init_from": source, "training_method": method}
    changed["settings"]["family"] = "wan"
    reports.write_file(folder, "config.json", changed)


def validated(folder: Path, errors: Sequence[float], source: str = SOURCE) -> Path:
    """A finished run with previews whose clips take a course."""
    reports.full_run(folder)
    journal = folder / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    kept = [record for record in records if record["kind"] not in ("validation", "end")]
    readings: list[dict[str, Any]] = []
    for index, error in enumerate(errors):
        record = reports.reading(index * 40, 0.4 * error, 0.4 * error)
        for part in ("held_out", "train"):
            record[part]["normalised"] = error
            record[part]["clips"] = {letter * 12: error for letter in "de"}
        readings.append(record)
        judged = judge(readings)
        assert judged is not None
        kept += [record, {"kind": "verdict", "time": 1.0, **judged.to_json()}]
    kept.append({"kind": "end", "step": reports.STEPS, "why": "done"})
    journal.write_text("".join(json.dumps(record) + "\n" for record in kept))
    if source:
        begin_with(folder, source)
    return folder


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("LORA", "the LoRA it began with"),
        ("FINE_TUNE", "the weights it began with"),
        ("EMBEDDING", "the embedding it began with"),
        (None, "what it began with"),
    ],
)
def test_each_kind_of_first_weights_has_its_name(method: Any, name: str) -> None:
    assert start_state(SOURCE, method).name == name
    for nothing in (None, "", 3):
        assert start_state(nothing, method).name == "the base model"


def test_the_report_of_a_worse_run_speaks_of_the_lora_it_began_with(
    tmp_path: Path,
) -> None:
    folder = validated(tmp_path, (1.0, 1.1, 1.3, 1.5))
    page = reports.report(folder)
    said = reports.visible_text(page)
    outcome = reports.part(page, "verdict")
    share = "150% of the error that the LoRA it began with had on clips kept aside"
    assert share in outcome
    assert "It is worse than the LoRA it began with." in outcome
    assert "no state of this run is better than the LoRA it began with" in outcome
    assert "keep the LoRA it began with: first-step-240-comfyui.safetensors" in outcome
    assert "as a share of that of the LoRA it began with" in said
    assert "base (step 0)" not in said
    assert not OF_BASE.search(said), OF_BASE.search(said)


def test_pictures_of_step_0_are_not_labelled_base(tmp_path: Path) -> None:
    folder = validated(tmp_path, (1.0, 0.9, 0.8))
    begun = reports.chapters(folder)
    assert begun["samples"]["steps"][0] == "start (step 0)"

    reports.write_file(folder, "config.json", reports.config())
    assert reports.chapters(folder)["samples"]["steps"][0] == "base (step 0)"


@pytest.mark.parametrize("errors", [(1.0, 0.9, 0.8, 0.7), (1.0, 1.0, 1.0, 1.0)])
def test_no_verdict_names_the_base_model(
    tmp_path: Path, errors: tuple[float, ...]
) -> None:
    said = reports.visible_text(reports.report(validated(tmp_path, errors)))
    assert "the LoRA it began with" in said
    assert not OF_BASE.search(said), OF_BASE.search(said)


def test_the_reason_to_have_stopped_names_no_model(tmp_path: Path) -> None:
    """A verdict is judged from the journal alone, which does not say what a run began
    with.
    """
    readings = []
    for index, (aside, train) in enumerate(
        ((1.0, 1.0), (0.5, 0.5), (0.7, 0.4), (0.8, 0.3))
    ):
        record = reports.reading(index, aside, train)
        for part, error in (("held_out", aside), ("train", train)):
            record[part]["normalised"] = error
            record[part]["clips"] = {letter * 12: error for letter in "de"}
        readings.append(record)
    judged = judge(readings)
    assert judged is not None
    assert judged.label == "OVERFITTING"
    assert "base" not in judged.reason
    assert "0.500 of their error at step 0" in judged.reason
    assert "base" not in recommend({0: 1.0, 1: 1.1}, 0, {1})[1]


def test_the_model_card_names_the_lora_it_began_with(tmp_path: Path) -> None:
    folder = validated(tmp_path, (1.0, 0.9, 0.8, 0.7))
    reports.write_file(folder, "plan.json", reports.plan() | {"buckets": []})
    begun = model_card(read_run(folder)).text
    assert "(1 is that of the LoRA it began with)" in begun
    assert "(1 is the base model's)" not in begun


def opened(*folders: Path) -> list[Run]:
    return [read_run(folder) for folder in folders]


def test_runs_with_different_starts_are_not_ranked(
    tmp_path: Path, capsys: Printed
) -> None:
    """Each error is relative to another model, so none is better than the other."""
    further = validated(tmp_path / "further", (1.0, 1.1, 1.02))
    first = validated(tmp_path / "first", (1.0, 0.6, 0.4), source="")
    assert run("compare", further, first) == 0
    printed = " ".join(re.sub(r"[│┃]", " ", capsys.readouterr().out).split())
    assert BEST_FIRST not in printed
    assert NOT_RANKED in printed
    assert "further and first did not begin with the same weights" in printed
    _, rows = comparison_table(opened(further, first), tmp_path)
    assert "times that of the LoRA it began with" in rows[0]["held_out"]
    assert "times the base model's" in rows[1]["held_out"]

    page = (further / "comparison.html").read_text(encoding="utf-8")
    assert re.findall(r'data-label="run">([^<]+)<', page) == ["further", "first"]
    said = reports.visible_text(page)
    assert BEST_FIRST not in said
    assert "did not begin with the same weights" in said
    assert "relative to what each run began with" in said
    assert "relative to the base model" not in said
    assert "<h2>Error on clips kept aside</h2>" not in page, "no chart"


def test_the_runs_that_began_alike_are_ranked_before_one_that_did_not(
    tmp_path: Path,
) -> None:
    further = validated(tmp_path / "further", (1.0, 0.3, 0.2))
    worse = validated(tmp_path / "worse", (1.0, 0.6, 0.5), source="")
    better = validated(tmp_path / "better", (1.0, 0.5, 0.4), source="")
    runs = opened(further, worse, better)
    _, rows = comparison_table(runs, tmp_path)
    assert [row["name"] for row in rows] == ["better", "worse", "further"]
    assert "times that of the LoRA it began with" in rows[-1]["held_out"]
    assert "times" not in rows[0]["held_out"]
    assert order_of_runs(runs) == BEST_FIRST
    assert "further began with other weights" in doubt_on_errors(runs)


def test_runs_from_one_lora_are_ranked(tmp_path: Path) -> None:
    folders = [
        validated(tmp_path / name, (1.0, 0.9, last))
        for name, last in (("one", 0.8), ("two", 0.7))
    ]
    runs = opened(*folders)
    assert doubt_on_errors(runs) == ""
    assert order_of_runs(runs) == BEST_FIRST
    assert [row["name"] for row in comparison_table(runs, tmp_path)[1]] == [
        "two",
        "one",
    ]
    page = write_comparison(folders, tmp_path / "compare.html").read_text()
    assert "relative to the LoRA it began with" in page

    begin_with(folders[1], "/elsewhere/second.safetensors")
    assert order_of_runs(opened(*folders)) == NOT_RANKED, "another LoRA"


def test_runs_on_different_base_models_are_not_ranked(tmp_path: Path) -> None:
    folders = [
        validated(tmp_path / name, (1.0, 0.9, last), source="")
        for name, last in (("one", 0.8), ("two", 0.7))
    ]
    for folder in folders:
        changed: dict[str, Any] = reports.config()
        changed["base"]["fingerprints"] = {"transformer": folder.name}
        reports.write_file(folder, "config.json", changed)
    assert order_of_runs(opened(*folders)) == NOT_RANKED
    assert "did not begin with the same weights" in doubt_on_errors(opened(*folders))


def test_the_advice_keeps_the_earlier_lora_only_if_there_is_one(
    tmp_path: Path,
) -> None:
    folder = validated(tmp_path, (1.0, 1.1, 1.3, 1.5), source="")
    outcome = reports.part(reports.report(folder), "verdict")
    assert "Until then, keep" not in outcome
    assert verdict(read_run(folder))["reference"].start.is_base
