"""``doctor --bundle``: what is in the zip, and what never is."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.command_line import Patch, Printed
from tests.support.command_line import run as shell
from tests.support.run_processes import Work
from videotune.commands.bundle import Masks
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json, write_json

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bundle.schema.json"
SETS = (
    "steps=2",
    "sample_after=2",
    "sample.steps=1",
    'samples=["a very secret prompt of mine, with many words"]',
    "sample.negative=ugly secret",
    "video_config.frames=5",
    "datasets.trigger=secrettrigger",
    "tracker_project=marys-project",
)


def contents(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture
def run(work: Work, monkeypatch: Patch) -> Path:
    """A run in the home folder of somebody, with a damaged record of a person."""
    monkeypatch.setenv("HOME", str(work.tmp))
    monkeypatch.setenv("LOGNAME", "maryjones")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setenv("VIDEOTUNE_STUDIO_PASSWORD", "open sesame")
    run = work.copy(*SETS)
    line = {"kind": "warning", "time": 1.0, "step": 2}
    texts = [
        f"{work.tmp}/films/holiday.mp4 cannot be read by maryjones",
        "the caption 'a very secret prompt of mi…' is cut",
        "push_checkpoints_to: mary/films: the Hub refuses the account",
        "json://user:pass-word@10.0.0.1/x and hf_qrstuvwxyzabcdef were refused",
    ]
    with (run / "journal.jsonl").open("a") as journal:
        for text in texts:
            journal.write(json.dumps(line | {"text": text}) + "\n")
    config = read_json(run / "config.json")
    config["settings"]["notify"] = ["ntfy://secret-topic"]
    config["settings"]["push_checkpoints_to"] = "mary/films"
    write_json(run / "config.json", config)
    return run


def captions_and_clips(run: Path) -> tuple[list[str], list[str]]:
    clips = read_json(run / "check.json")["clips"]
    captions = [text for clip in clips for text in clip["captions"]]
    return captions, [Path(clip["path"]).name for clip in clips]


def test_a_bundle_has_what_a_report_needs_and_nothing_of_the_user(
    run: Path, tmp_path: Path, capsys: Printed
) -> None:
    out = tmp_path / "report.zip"
    assert shell("doctor", run, bundle=out) == DONE
    printed = capsys.readouterr().out
    files = contents(out)
    about = json.loads(files["bundle.json"])
    Draft202012Validator(read_json(SCHEMA)).validate(about)
    assert {row["path"] for row in about["files"]} | {"bundle.json"} == set(files)
    for row in about["files"]:
        assert row["bytes"] == len(files[row["path"]].encode())
        assert row["path"] in printed

    captions, names = captions_and_clips(run)
    assert captions
    assert names
    forbidden = [*captions, *names, str(tmp_path), "maryjones", "very secret prompt"]
    forbidden += ["ugly secret", "secrettrigger", "abcdefghijklmnop", "open sesame"]
    forbidden += [
        "mary/films",
        "marys-project",
        "pass-word",
        "secret-topic",
        "qrstuvwxyzabcdef",
    ]
    leaks = []
    for name, text in files.items():
        leaks += [(name, word) for word in forbidden if word in text]
    assert leaks == []

    lines = [json.loads(line) for line in files["run/journal.jsonl"].splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2]
    assert steps[0]["loss"] > 0
    assert "videotune" in lines[0]["versions"]
    assert "(left out): the Hub refuses the account" in files["run/journal.jsonl"]
    settings = json.loads(files["run/config.json"])["settings"]
    assert settings["lora"]["rank"] == 2
    assert settings["notify"] == ["ntfy://(hidden)"]
    assert settings["datasets"][0]["trigger"] == "(left out)"
    machine = json.loads(files["machine.json"])
    assert "torch" in machine["packages"]
    assert machine["variables"]["VIDEOTUNE_STUDIO_PASSWORD"] == "(set)"
    problems = json.loads(files["run/doctor.json"])
    assert problems["summary"].startswith("2 of 2 steps")


def test_with_captions_they_are_there_and_secrets_are_not(
    run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.zip"
    assert shell("doctor", run, bundle=out, with_captions=True) == DONE
    files = contents(out)
    assert "a very secret prompt of mine" in files["run/journal.jsonl"]
    everything = "\n".join(files.values())
    for word in ("pass-word", "secret-topic", "qrstuvwxyzabcdef", str(tmp_path)):
        assert word not in everything


def test_a_bundle_of_a_damaged_run_is_written(run: Path, tmp_path: Path) -> None:
    (run / "plan.json").write_text("{")
    (run / "check.json").write_bytes(b"\xff")
    with (run / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"kind": "st')
    out = tmp_path / "report.zip"
    assert shell("doctor", run, bundle=out) == DONE
    files = contents(out)
    assert "run/plan.json" not in files
    assert json.loads(files["run/doctor.json"])["summary"]


def test_a_bundle_overwrites_nothing(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.zip"
    out.write_bytes(b"mine")
    with pytest.raises(VideotuneError, match="already exists"):
        shell("doctor", run, bundle=out)
    assert out.read_bytes() == b"mine"
    for folder, options, match in (
        (tmp_path / "nosuch", {"bundle": tmp_path / "b.zip"}, "is not a run folder"),
        (run, {"bundle": tmp_path / "b.tar"}, r"end in \.zip"),
        (run, {"with_captions": True}, "is for --bundle"),
    ):
        with pytest.raises(VideotuneError, match=match):
            shell("doctor", folder, **options)
    assert not (tmp_path / "b.zip").exists()


def test_a_bundle_of_the_machine_alone(tmp_path: Path) -> None:
    out = tmp_path / "new" / "machine.zip"
    assert shell("doctor", bundle=out) == DONE
    assert set(contents(out)) <= {"bundle.json", "machine.json", "crash.txt"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a red car", "(left out)"),
        ("caption 'a red car is driving th' cut", "caption '(left out)' cut"),
        ("/data/films/a b.mp4: no frames", "clip-1.mp4: no frames"),
        ("put a clip into red cars", "put a clip into red cars"),
        ("a.mp4 is a clip", "clip-2.mp4 is a clip"),
        ("Authorization: hf_abcdefgh1234", "Authorization: (token)"),
        ("ntfy://topic?x=1, next", "ntfy://(hidden) next"),
    ],
)
def test_masks(text: str, shown: str) -> None:
    captions = ["a red car is driving through the rain", "a red car"]
    assert Masks(captions, ["/data/films/a b.mp4", "a.mp4"]).in_text(text) == shown


def test_masks_of_any_depth() -> None:
    value: Any = {"notify": "tgram://1/2", "a": [{"prompt": "x y z"}], "n": 1}
    assert Masks().in_value(value, with_texts=False) == {
        "notify": "tgram://(hidden)",
        "a": [{"prompt": "(left out)"}],
        "n": 1,
    }
