"""The comparison of several runs, at the terminal and as a page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Printed, run
from tests.support.reports import attributes, config, full_run, write_file
from videotune.errors import VideotuneError
from videotune.reporter.comparison import write_comparison


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs whose learning rates differ; the second has one of the previews."""
    folders = [full_run(tmp_path / name) for name in ("first", "second run")]
    changed: dict[str, Any] = config()
    changed["settings"]["learning_rate"] = 3e-4
    write_file(folders[1], "config.json", changed)
    journal = folders[1] / "journal.jsonl"
    kept = []
    for line in journal.read_text().splitlines():
        is_other_prompt = "<script>" in line and '"sample"' in line
        if not is_other_prompt:
            kept.append(line)
    journal.write_text("\n".join(kept) + "\n")
    return folders


def test_runs_stand_side_by_side(runs: list[Path], capsys: Printed) -> None:
    assert run("compare", *runs) == 0
    printed = re.sub(r"[ │┃]+", " ", capsys.readouterr().out)
    assert "learning_rate 0.001 0.0003" in printed
    assert "lora.rank" not in printed
    assert "state done done" in printed
    page_path = runs[0] / "comparison.html"
    assert printed.rstrip().endswith(str(page_path))

    page = page_path.read_text(encoding="utf-8")
    assert page.count("zorble moves left") == 1
    assert "<script>" not in page
    sources = attributes(page, "src", "video")
    assert len(sources) == 2, "only the prompt that both have sampled"
    assert sources[0].startswith("samples/step-000120")
    assert sources[1].startswith("../second%20run/samples/step-000120")


def test_no_row_has_the_name_of_another(runs: list[Path], capsys: Printed) -> None:
    """The length of a run is a setting; how far it came is a result."""
    config = json.loads((runs[1] / "config.json").read_text())
    config["settings"]["steps"] = 240
    write_file(runs[1], "config.json", config)

    assert run("compare", *runs, json=True) == 0
    assert "steps" in json.loads(capsys.readouterr().out)["keys"]
    assert run("compare", *runs) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("│")[1].strip() for line in lines if line.count("│") > 1]
    assert {"steps", "steps done"} <= set(names)
    assert len(set(names)) == len(names)

    page = (runs[0] / "comparison.html").read_text()
    headings = re.findall(r"<th>([^<]+)</th>", page)
    assert len(set(headings)) == len(headings)


def test_previews_come_in_the_order_of_the_table(runs: list[Path]) -> None:
    """Their errors do not differ, so it is the order in which they were given."""
    page_path = write_comparison([*reversed(runs)], runs[0] / "comparison.html")
    page = page_path.read_text(encoding="utf-8")
    names = re.findall(r'data-label="run">.*?>([^<]+)</a>', page) or re.findall(
        r'data-label="run">([^<]+)<', page
    )
    captions = re.findall(r"<figcaption>([^,]+),", page)
    assert names == captions == ["second run", "first"]


@pytest.mark.parametrize("is_measured", [True, False])
def test_runs_in_folders_of_one_name_keep_their_order_and_are_told_apart(
    tmp_path: Path, capsys: Printed, is_measured: bool
) -> None:
    folders = [full_run(tmp_path / f"{name}/runs/run") for name in ("zebra", "ant")]
    for folder, rate in zip(folders, (3e-4, 5e-4), strict=True):
        changed: dict[str, Any] = config()
        changed["settings"]["learning_rate"] = rate
        write_file(folder, "config.json", changed)
        if not is_measured:
            remove_validations(folder)

    assert run("compare", *folders) == 0
    printed = re.sub(r"[ │┃]+", " ", capsys.readouterr().out)
    assert "zebra/…/run ant/…/run" in printed
    assert "learning_rate 0.0003 0.0005" in printed
    page = (folders[0] / "comparison.html").read_text(encoding="utf-8")
    names = re.findall(r'data-label="run">([^<]+)<', page)
    captions = re.findall(r"<figcaption>([^,]+),", page)
    assert names == ["zebra/…/run", "ant/…/run"]
    assert captions[:2] == names
    sources = attributes(page, "src", "video")
    assert sources[0].startswith("samples/")
    assert sources[1].startswith("../../../ant/runs/run/samples/")


def remove_validations(folder: Path) -> None:
    journal = folder / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    kept = [record for record in records if record["kind"] != "validation"]
    journal.write_text("".join(json.dumps(record) + "\n" for record in kept))


def test_a_measure_that_no_run_has_is_not_listed(
    runs: list[Path], capsys: Printed
) -> None:
    assert run("compare", *runs) == 0
    assert "held-out error" in capsys.readouterr().out
    assert "held-out error" in (runs[0] / "comparison.html").read_text()

    for folder in runs:
        remove_validations(folder)
    assert run("compare", *runs) == 0
    assert "held-out error" not in capsys.readouterr().out
    assert "held-out error" not in (runs[0] / "comparison.html").read_text()


def test_the_answer_is_json_too(
    runs: list[Path], tmp_path: Path, capsys: Printed
) -> None:
    assert run("compare", *runs, out=tmp_path / "page", json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["page"] == str(tmp_path / "page" / "comparison.html")
    assert answer["keys"] == ["learning_rate"]
    assert not (runs[0] / "comparison.html").exists()


def test_what_cannot_be_compared_is_one_sentence(
    runs: list[Path], tmp_path: Path
) -> None:
    for folders, options, said in (
        ([runs[0], runs[0]], {}, "given twice"),
        ([runs[0], tmp_path], {}, "not a run folder"),
        (runs, {"prompt": "a cat"}, "--prompt: several runs"),
        (runs, {"seed": 3}, "--seed: several runs"),
    ):
        with pytest.raises(VideotuneError, match=said):
            run("compare", *folders, **options)
    (runs[1] / "config.json").unlink()
    with pytest.raises(VideotuneError, match=r"config\.json is missing"):
        run("compare", *runs)
    assert not (runs[0] / "comparison.html").exists()
