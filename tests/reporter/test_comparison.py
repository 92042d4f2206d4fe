"""The comparison of several runs, at the terminal and as a page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Printed, run
from tests.support.reports import attributes, config, full_run, write_file
from videotune.config.data_schema import Dataset
from videotune.errors import VideotuneError
from videotune.reporter import outcome
from videotune.reporter.comparison import (
    comparison_table,
    differences_of_data,
    differing_settings,
    write_comparison,
)
from videotune.reporter.ranking import BEST_FIRST, doubt_on_errors
from videotune.reporter.read import read_run


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


@pytest.mark.parametrize("best", ["zebra", "ant"])
@pytest.mark.parametrize("is_relative", [False, True])
def test_the_better_of_two_runs_of_one_name_comes_first_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: str, is_relative: bool
) -> None:
    """In the table, the chart and the previews, also if a path is relative."""
    folders = [full_run(tmp_path / name / "run") for name in ("zebra", "ant")]
    for folder in folders:
        if folder.parent.name == best:
            divide_held_out_errors(folder)
    if is_relative:
        monkeypatch.chdir(tmp_path)
        folders[1] = folders[1].relative_to(tmp_path)
    page_path = write_comparison(folders, tmp_path / "comparison.html")

    page = page_path.read_text(encoding="utf-8")
    other = {"zebra": "ant", "ant": "zebra"}[best]
    names = [f"{best}/run", f"{other}/run"]
    assert re.findall(r'data-label="run">([^<]+)<', page) == names
    assert re.findall(r"<figcaption>([^,]+),", page)[:2] == names
    sources = attributes(page, "src", "video")
    assert [source.partition("/")[0] for source in sources[:2]] == [best, other]


def test_a_run_whose_clips_kept_aside_changed_is_not_ranked_with_others(
    tmp_path: Path,
) -> None:
    """Its errors are shares of another error than the base model's."""
    changed, other = (full_run(tmp_path / name) for name in ("changed", "other"))
    divide_held_out_errors(changed)
    change_clips_kept_aside(changed)
    page = write_comparison([changed, other], tmp_path / "comparison.html")

    text = page.read_text(encoding="utf-8")
    assert re.findall(r'data-label="run">([^<]+)<', text) == ["other", "changed"]
    assert text.count("since its clips kept aside changed there") == 1
    assert "The clips kept aside of changed have changed in the run" in text


def test_errors_on_other_clips_kept_aside_are_doubted(tmp_path: Path) -> None:
    folders = [full_run(tmp_path / name) for name in ("first", "second")]
    assert doubt_on_errors([read_run(folder) for folder in folders]) == ""

    account = json.loads((folders[1] / "check.json").read_text())
    aside = next(clip for clip in account["clips"] if clip["held_out"])
    aside["captions"] = ["quite another caption"]
    write_file(folders[1], "check.json", account)
    runs = [read_run(folder) for folder in folders]
    assert "other captions" in doubt_on_errors(runs)

    aside["id"] = "f" * 32
    write_file(folders[1], "check.json", account)
    runs = [read_run(folder) for folder in folders]
    assert "other clips" in doubt_on_errors(runs)


def change_clips_kept_aside(folder: Path) -> None:
    """Give the first validation another set than the later ones."""
    journal = folder / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    first = next(record for record in records if record["kind"] == "validation")
    first["validation"] = "another"
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_other_clips_and_captions_are_differences(tmp_path: Path) -> None:
    folders = [full_run(tmp_path / name) for name in ("first", "second", "third")]
    runs = [read_run(folder) for folder in folders]
    assert differences_of_data(runs) == {}, "the same clips with the same captions"

    account = json.loads((folders[1] / "check.json").read_text())
    used = [clip for clip in account["clips"] if clip["used"] or clip["held_out"]]
    used[0]["captions"] = ["quite another caption"]
    write_file(folders[1], "check.json", account)
    account = json.loads((folders[2] / "check.json").read_text())
    next(clip for clip in account["clips"] if clip["used"])["id"] = "f" * 32
    write_file(folders[2], "check.json", account)

    count = len(used)
    found = differences_of_data([read_run(folder) for folder in folders])
    assert found == {
        "clips": [
            f"{count} clips",
            f"{count} clips",
            f"{count} clips, 1 of them others",
        ],
        "captions": ["–", f"1 of {count} differ", "–"],
    }
    assert run("compare", *folders) == 0


def divide_held_out_errors(folder: Path) -> None:
    journal = folder / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records:
        if record["kind"] == "validation" and record["held_out"] is not None:
            record["held_out"]["normalised"] /= 2
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))


def remove_validations(folder: Path) -> None:
    journal = folder / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    kept = [record for record in records if record["kind"] != "validation"]
    journal.write_text("".join(json.dumps(record) + "\n" for record in kept))


def test_a_measure_that_no_run_has_is_not_listed(
    runs: list[Path], capsys: Printed
) -> None:
    assert run("compare", *runs) == 0
    assert "error on clips kept aside" in capsys.readouterr().out
    assert "error on clips kept aside" in (runs[0] / "comparison.html").read_text()

    for folder in runs:
        remove_validations(folder)
    assert run("compare", *runs) == 0
    assert "error on clips kept aside" not in capsys.readouterr().out
    assert "error on clips kept aside" not in (runs[0] / "comparison.html").read_text()


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


def with_datasets(folder: Path, *datasets: dict[str, Any]) -> None:
    """Set a run's datasets, with every key, as a run records them."""
    value = json.loads((folder / "config.json").read_text())
    entries = [Dataset(**each).model_dump(mode="json") for each in datasets]
    value["settings"]["datasets"] = entries
    write_file(folder, "config.json", value)


def cells_of(folders: list[Path], key: str) -> list[str]:
    """The cells of a setting, in the order of the runs."""
    keys, rows = comparison_table([read_run(folder) for folder in folders], folders[0])
    cells = {row["name"]: row["values"][keys.index(key)] for row in rows}
    return [cells[folder.name] for folder in folders]


def test_of_datasets_only_what_differs_is_shown(runs: list[Path]) -> None:
    clips: dict[str, Any] = {"path": "/home/me/clips"}
    held_out = {"path": "/home/me/held-out", "kind": "validation"}
    for datasets, expected in (
        (
            [[clips], [clips, held_out]],
            ["clips", "clips; held-out (kind validation)"],
        ),
        (
            [[clips], [clips | {"repeats": 3}]],
            ["clips (repeats 1)", "clips (repeats 3)"],
        ),
        (
            [[clips], [{"path": "/mnt/other/clips"}]],
            ["home/me/clips", "mnt/other/clips"],
        ),
    ):
        for folder, entries in zip(runs, datasets, strict=True):
            with_datasets(folder, *entries)
        assert cells_of(runs, "datasets") == expected


def test_a_folder_by_another_path_and_what_the_plan_sets_are_no_differences(
    runs: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "runs").mkdir()
    for folder, path, windows, origin in (
        (runs[0], "clips", 7, "plan"),
        (runs[1], "runs/../clips", 6, "plan"),
    ):
        with_datasets(folder, {"path": f"{tmp_path}/{path}"})
        changed = json.loads((folder / "config.json").read_text())
        changed["settings"]["validation_windows"] = windows
        changed["origins"]["validation_windows"] = origin
        write_file(folder, "config.json", changed)
    opened = [read_run(folder) for folder in runs]
    assert differing_settings(opened) == ["learning_rate"]

    changed["origins"]["validation_windows"] = "user"
    write_file(runs[1], "config.json", changed)
    opened = [read_run(folder) for folder in runs]
    assert "validation_windows" in differing_settings(opened)


def test_many_entries_that_all_runs_have_are_counted(runs: list[Path]) -> None:
    shared = [{"path": f"/clips/{name}"} for name in ("a", "b", "c")]
    with_datasets(runs[0], *shared)
    with_datasets(runs[1], *shared, {"path": "/clips/d", "trigger": "zorble"})
    assert cells_of(runs, "datasets") == [
        "3 that all runs have",
        "3 that all runs have; d (trigger zorble)",
    ]


@pytest.mark.parametrize("num_keys", [1, 5])
def test_results_come_first_then_previews_then_many_settings(
    runs: list[Path], num_keys: int
) -> None:
    config = json.loads((runs[1] / "config.json").read_text())
    for number in range(num_keys - 1):
        config["settings"][f"key{number}"] = "a long value " * 4
    write_file(runs[1], "config.json", config)
    write_comparison(runs, runs[0] / "comparison.html")
    page = (runs[0] / "comparison.html").read_text(encoding="utf-8")

    places = [
        page.index("error on clips kept aside</th>"),
        page.index("The same prompts"),
    ]
    places.append(page.index("Error on clips kept aside"))
    assert places == sorted(places)
    results = page.partition("</table>")[0]
    assert ("learning_rate" in results) == (num_keys == 1)
    assert ("Settings that differ" in page) == (num_keys > 1)
    if num_keys > 1:
        assert page.index("The same prompts") < page.index("Settings that differ")
    assert page.count(BEST_FIRST) == (3 if num_keys > 1 else 2), "above each of them"


def test_the_terminal_says_in_which_order_its_columns_are(
    runs: list[Path], capsys: Printed
) -> None:
    assert run("compare", *runs) == 0
    assert BEST_FIRST in " ".join(capsys.readouterr().out.split())


def test_an_error_of_another_step_than_the_recommended_says_which(
    runs: list[Path],
) -> None:
    journal = runs[0] / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    recommended = outcome.verdict(read_run(runs[0]))["step"]
    for record in records:
        if record["kind"] == "validation" and record["step"] == recommended:
            record["step"] = recommended - 1
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    _, rows = comparison_table([read_run(folder) for folder in runs], runs[0])
    errors = {row["name"]: row["held_out"] for row in rows}
    assert "at step" in errors["first"]
    assert "at step" not in errors["second run"]


def test_the_page_is_named_as_the_runs_were_given(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = [folder.relative_to(tmp_path) for folder in runs]
    assert run("compare", *relative) == 0
    last_line = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last_line == str(Path("first") / "comparison.html")
    assert run("compare", *relative, out=Path("page")) == 0
    assert capsys.readouterr().out.rstrip().endswith("\npage/comparison.html")
    assert (tmp_path / "page" / "comparison.html").is_file()
    with pytest.raises(VideotuneError, match=r"^first is given twice"):
        run("compare", relative[0], runs[0])
