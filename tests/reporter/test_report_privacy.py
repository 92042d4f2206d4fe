"""A page that is sent to others names nothing of the machine that wrote it: no folder
above the run or the dataset, no host, no process.
"""

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest

from tests.support import reports
from videotune.files import read_json
from videotune.reporter.build import contact_sheet_page
from videotune.reporter.comparison import write_comparison
from videotune.reporter.privacy import PathNames, names_of_datasets
from videotune.reporter.read import read_run

SECRET = "Jane Doe's disk"


def home(tmp_path: Path) -> Path:
    """Folders above the run and the datasets that nobody else should read."""
    return tmp_path / SECRET / "projects"


def private_run(tmp_path: Path, datasets: tuple[str, ...] = ("clips",)) -> Path:
    """A run whose every text names the folders that it knows."""
    run = reports.full_run(home(tmp_path) / "my run")
    folders = [home(tmp_path) / name for name in datasets]
    path = folders[0] / "videos" / "a.mp4"
    config = reports.config()
    config["settings"]["datasets"] = [
        {"path": str(folder), "trigger": None} for folder in folders
    ]
    config["settings"] |= {
        "base_model_name": str(home(tmp_path) / "models" / "wan base"),
        "cache_dir": str(home(tmp_path) / "cache"),
        "output_model_destination": str(run),
    }
    config["base"]["name"] = config["settings"]["base_model_name"]
    reports.write_file(run, "config.json", config)

    account = reports.account()
    for row in account["clips"]:
        row["path"] = str(path.with_name(row["path"]))
        row["warnings"] = [f"{path}: has the same bytes as {folders[-1]}/b.mp4"]
        row["captions"] = [f"a caption that names {path}"]
    account["notes"] = [
        f"{folders[0]} has a clip twice",
        f"in {home(tmp_path)}/other/x",
    ]
    reports.write_file(run, "check.json", account)
    reports.write_file(
        run,
        "exports.json",
        [
            {
                "format": name,
                "path": str(run / "export" / "zorble.safetensors"),
                "use": f"p = Pipeline.from_pretrained({config['base']['name']!r}); p.load(THIS_FILE)",
            }
            for name in ("diffusers", "comfyui")
        ],
    )
    with (run / "journal.jsonl").open("a") as journal:
        texts = [
            f"the preview failed: OSError: {run}/samples/a.mp4",
            f"could not read {path}: {home(tmp_path)}/cache/ab/cd.safetensors is damaged",
            f"see {Path.home()}/.cache/huggingface/hub and C:\\Users\\jane\\clips\\a.mp4",
        ]
        for text in texts:
            journal.write(
                json.dumps({"kind": "warning", "step": 1, "text": text}) + "\n"
            )
        sample = reports.sample(1, f"like {path}", path=str(run / "samples" / "x.mp4"))
        journal.write(json.dumps(sample) + "\n")
        verdict = {"kind": "verdict", "step": 1, "verdict": None, "reason": f"{path}"}
        journal.write(json.dumps(verdict) + "\n")
    return run


def assert_names_nothing(page: str, tmp_path: Path) -> None:
    for text in (str(tmp_path), SECRET, SECRET.replace("'", "&#39;"), "projects"):
        assert text not in page, text
    assert "jane" not in page
    assert str(Path.home() / ".cache") not in page
    assert socket.gethostname() not in page


@pytest.mark.parametrize(
    "datasets", [("clips",), ("clips", "known"), ("my run/clips",)]
)
def test_the_report_names_no_folder_of_the_machine(
    tmp_path: Path, datasets: tuple[str, ...]
) -> None:
    run = private_run(tmp_path, datasets)
    page = reports.report(run)
    assert_names_nothing(page, tmp_path)

    prefix = "" if len(datasets) == 1 else "clips/"
    said = reports.visible_text(page)
    assert f"{prefix}videos/zorble left.mp4: has the same bytes" not in said
    assert f"{prefix}videos/a.mp4: has the same bytes as" in said
    assert "OSError: samples/a.mp4" in said
    assert "export/zorble.safetensors" in reports.attributes(page, "href", "a")


def test_a_run_that_was_moved_names_its_old_folder_no_more(tmp_path: Path) -> None:
    run = private_run(tmp_path)
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    assert_names_nothing(reports.report(moved), tmp_path / "nowhere")


def test_a_running_run_names_neither_host_nor_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    reports.write_journal(run, [reports.start(), reports.step(1)])
    beat = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": 1790000000.0,
        "step": 1,
        "state": "training",
        "since": 1790000000.0,
        "time": time.time(),
    }
    reports.write_file(run, "heartbeat.json", beat)
    page = reports.report(run)
    assert "running when this page was written" in page
    assert socket.gethostname() not in page
    assert str(os.getpid()) not in re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    assert read_run(run).life is not None, "the terminal still says which process"


def test_the_page_of_a_sweep_names_no_folder(tmp_path: Path) -> None:
    runs = [private_run(tmp_path / name) for name in ("one", "two")]
    page = write_comparison(runs, tmp_path / "compare.html").read_text()
    for run in runs:
        assert str(run.parent) not in page
    assert SECRET.replace("'", "&#39;") not in re.sub(r'href="[^"]*"', "", page)
    assert "datasets" in page, (
        "the runs differ in their clips, whatever these are called"
    )


def test_a_comparison_ranks_only_runs_with_held_out_clips(tmp_path: Path) -> None:
    runs = [private_run(tmp_path / name) for name in ("one", "two")]
    ranked = write_comparison(runs, tmp_path / "compare.html").read_text()
    for run in runs:
        (run / "validation.json").unlink(missing_ok=True)
        lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["kind"] != "validation"]
        (run / "journal.jsonl").write_text("".join(kept))
    unranked = write_comparison(runs, tmp_path / "compare.html").read_text()
    assert ("comes first" in ranked, "ranks none" in ranked) == (True, False)
    assert ("comes first" in unranked, "ranks none" in unranked) == (False, True)


def test_the_contact_sheet_names_no_folder(tmp_path: Path) -> None:
    run = private_run(tmp_path)
    account = read_json(run / "check.json")
    for row in account["clips"]:
        row["kind"] = "train"
    path = account["clips"][0]["path"]
    roots = [home(tmp_path) / "clips"]
    notes = [f"{roots[0]}/videos/x.mp4: odd"]
    page = contact_sheet_page("Clips", account, {path: ["a.jpg"]}, roots, notes)
    assert_names_nothing(page, tmp_path)
    assert "videos/x.mp4: odd" in page
    assert reports.attributes(page, "src", "img") == ["a.jpg"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/clips/a.mp4 is damaged", "a.mp4 is damaged"),
        ("/data/clips is a folder", "clips is a folder"),
        ("/data/clips-2/a.mp4", "…/a.mp4"),
        ("see (/data/clips-2/a.mp4)", "see (…/a.mp4)"),
        ("/data/clips\\sub\\a.mp4 x", "sub\\a.mp4 x"),
        ("D:\\films\\b.mp4: odd", "…/b.mp4: odd"),
        ("\\\\server\\share\\b.mp4 odd", "…/b.mp4 odd"),
        ("https://huggingface.co/a/b and 16/9, and/or", None),
        ("samples/a.mp4, ./x/y, ../x/y and ~/x/y", None),
        ("<a>/</a> 1 / 2 / 3", None),
        ("asset:toy", None),
    ],
)
def test_absolute_paths_become_short_and_nothing_else_changes(
    text: str, expected: str | None
) -> None:
    names = PathNames(names_of_datasets(["/data/clips"]))
    assert names.in_text(text) == (text if expected is None else expected)
