"""The command line as a person meets it: exit codes, one helpful sentence for each
mistake, and nothing heavy for help.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.clips import noise, write_clip, write_dataset
from videotune import __version__
from videotune.cli.main import main
from videotune.config.schema import leaves
from videotune.presets.shipped import preset_names

HEAVY = ("torch", "diffusers", "transformers", "peft", "accelerate")


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """What it says of a mistake; there must be one, and no traceback."""
        assert "Traceback" not in self.err + self.out
        _, mark, text = self.err.rpartition("videotune: ")
        assert mark, f"no sentence in {self.err!r}"
        assert len(text) > 20
        return text


Command = Callable[..., Answer]


@pytest.fixture
def videotune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs a command in this process, through the same ``main`` as the installed
    script.
    """

    def run(*words: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["videotune", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return Answer(int(end.value.code or 0), out, err)

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from videotune.models.wan import Wan

    return Wan.tiny(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good clips."""
    both = {f"{name}.mp4": noise(9, 32, 32, seed=ord(name)) for name in "ab"}
    return write_dataset(tmp_path_factory.mktemp("cli") / "clips", both, {}, fps=16)


@pytest.fixture(scope="session")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good clips, and one that is no video."""
    both = {f"{name}.mp4": noise(9, 32, 32, seed=ord(name)) for name in "ab"}
    folder = write_dataset(tmp_path_factory.mktemp("cli") / "spoilt", both, {}, fps=16)
    (folder / "videos" / "c.mp4").write_text("no video")
    (folder / "captions" / "c.txt").write_text("a clip called c")
    return folder


def small(model: Path, *more: str) -> list[str]:
    """The words of a run of one step on the tiny model."""
    knobs = [
        f"base_model_name={model}",
        "resolution=32x32",
        "video_config.frames=5",
        "steps=1",
        "lora.rank=1",
    ]
    knobs += [
        "sample.steps=1",
        "samples=1",
        "sample.guidance=1",
        "validate_every=0",
        "train_dtype=FLOAT_32",
        *more,
    ]
    return [word for knob in knobs for word in ("--set", knob)]


@pytest.fixture(scope="session")
def a_run(tmp_path_factory: pytest.TempPathFactory, model: Path, clips: Path) -> Path:
    """A finished run, made by the command itself."""
    run = tmp_path_factory.mktemp("cli") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys,
            "argv",
            [
                "videotune",
                "train",
                "--data",
                str(clips),
                "--out",
                str(run),
                *small(model),
            ],
        )
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0
    return run


def test_the_module_says_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "videotune", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"videotune {__version__}\n",
        "",
    )


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, ["expandable_segments:True", None]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, [None, "backend:native"]),
        ({"PYTORCH_ALLOC_CONF": ""}, ["", None]),
    ],
)
def test_the_allocator_grows_segments_unless_the_user_configures_it(
    own: dict[str, str], expected: list[str]
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    program = (
        "import atexit, json, os, runpy, sys\n"
        f"atexit.register(lambda: print(json.dumps([os.environ.get(name) for name in {names}])))\n"
        "runpy.run_module('videotune', run_name='__main__', alter_sys=True)\n"
    )
    others = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", program, "--version"]
    done = subprocess.run(
        command, env=others | own, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def imported(*words: str | Path) -> tuple[int, set[str]]:
    """The exit code of a command in a process of its own, and the packages that it
    imported.
    """
    program = (
        "import json, sys\n"
        "from videotune.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code or 0\n"
        "print(json.dumps([code, sorted({name.split('.')[0] for name in sys.modules})]))\n"
    )
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", check=True
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    return code, set(modules)


def test_help_and_check_import_nothing_heavy(clips: Path) -> None:
    code, modules = imported("--help")
    assert code == 0
    assert not modules & {*HEAVY, "av", "numpy"}
    code, modules = imported("check", clips, "--preset", "toy")
    assert code == 0
    assert not modules & set(HEAVY)


def test_each_command_has_help(videotune: Command) -> None:
    top = videotune("--help")
    assert top.code == 0
    named = (
        "check",
        "plan",
        "cache",
        "train",
        "sample",
        "compare",
        "export",
        "report",
        "demo",
        "doctor",
        "presets",
    )
    for command in named:
        assert command in top.out
        answer = videotune(command, "--help")
        assert answer.code == 0
        assert "Usage" in answer.out


@pytest.mark.parametrize(
    ("knob", "nearest"),
    [
        ("target_fps=12", "video_config.target_fps"),
        (
            "video_config.learning_rate=1",
            "learning_rate' or 'text_encoder.learning_rate",
        ),
        ("frames=9", "sample.frames' or 'video_config.frames"),
        ("rank=3", "lora.rank"),
        ('datasets=[{"path": "x", "triger": "y"}]', "datasets.trigger"),
    ],
)
def test_an_unknown_or_misplaced_key_gets_the_nearest_name_in_its_section(
    videotune: Command, clips: Path, tmp_path: Path, knob: str, nearest: str
) -> None:
    key, _, value = knob.partition("=")
    answer = videotune("check", clips, "--preset", "toy", "--set", knob)
    assert answer.code == 1
    assert answer.sentence.startswith("--set: unknown key ")
    assert f"did you mean '{nearest}'?" in answer.sentence
    nested: object = json.loads(value)
    for part in reversed(key.split(".")):
        nested = {part: nested}
    (tmp_path / "mine.json").write_text(json.dumps(nested), encoding="utf-8")
    answer = videotune(
        "check", clips, "--preset", "toy", "--config", tmp_path / "mine.json"
    )
    assert answer.code == 1
    assert "mine.json: unknown key " in answer.sentence
    assert f"did you mean '{nearest}'?" in answer.sentence


@pytest.mark.parametrize(
    ("knob", "words"),
    [
        ("steps=0", "steps: "),
        ("batch_size=two", "batch_size: "),
        ("learning_rate=NaN", "learning_rate: "),
        (
            "timestep_distribution=NORMAL",
            "'LOGIT_NORMAL', 'SIGMOID', 'MODE', 'BETA' or",
        ),
        ("video_config=5", "video_config: "),
        ("resolution=50x64", '"48x64"'),
        ("steps", "--set takes key=value"),
        ("steps.more=1", "unknown key 'steps.more'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(
    videotune: Command, clips: Path, knob: str, words: str
) -> None:
    answer = videotune("check", clips, "--preset", "toy", "--set", knob)
    assert answer.code == 1
    assert words in answer.sentence
    assert "pydantic" not in answer.sentence


def test_every_wrong_value_is_said_at_once(videotune: Command, clips: Path) -> None:
    answer = videotune("check", clips, "--set", "steps=0", "--set", "lora.rank=0")
    assert [line.split(":")[0] for line in answer.sentence.strip().splitlines()] == [
        "steps",
        "lora.rank",
    ]


MISTAKES = {
    "plan --data {clips} --set base_model_name={tmp}/nowhere": "no such folder",
    "plan --data {clips} --set base_model_name={tmp}/empty": "model_index.json",
    "plan --data {clips} --set base_model_name=asset:nothing": "asset:toy",
    "plan --data {clips} --preset toi": "'toy'",
    "plan --data {clips}": "no model given",
    "plan --data {clips} --preset toy --price inf": "--price",
    "check {tmp}/nowhere": "nowhere does not exist",
    "check {tmp}/empty": "found 1 .md",
    "check {clips}/videos/a.mp4": "is a file",
    "check": "datasets: none is given",
    "check {clips} --allow-skips some": "neither a number nor all",
    "cache --preset toy --data {clips} --set cache_dir={tmp}/file": "cache_dir",
    "train --preset toy --data {tmp}/nowhere --out {tmp}/run": "does not exist",
    "train --preset toy --data {clips} --out {tmp}/file": "file is a file",
    "train --preset toy --data {clips} --out {run}": "already holds a run",
    "train --data {clips} --out {tmp}/none --override": "need --resume",
    "train --out {tmp}/none --resume": "does not exist",
    "train --out {run} --resume --preset toy": "cannot be resumed with another",
    "train --out {run} --resume --from 7": "no complete checkpoint of step 7",
    "train --out {run} --resume --set lora.rank=3": "cannot be resumed with another",
    "train --out {run} --resume --set learning_rate=0.5": "add --override",
    "sample {run}": "no prompt given",
    "sample --prompt cat": "pass one of them",
    "sample {run} --prompt cat --out {tmp}/file": "{tmp}/file",
    "export {tmp}": "holds no run",
    "export {run} --step 7": "no complete checkpoint of step 7",
    "export {run} --out {tmp}/file": "{tmp}/file",
    "report {tmp}": "is not a run folder",
    "tiny wan {tmp}": "Name a new folder",
    "tiny wan {tmp}/base --variant x": "ti2v",
    "tiny none {tmp}/base": "cogvideox",
}
"""Commands, and what the sentence about each names."""


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    videotune: Command, a_run: Path, clips: Path, tmp_path: Path, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty/notes.md", "file"):
        (tmp_path / name).touch()
    before = {
        path: path.stat().st_mtime_ns
        for folder in (a_run, tmp_path)
        for path in folder.rglob("*")
    }
    places = {"tmp": tmp_path, "clips": clips, "run": a_run}
    answer = videotune(*words.format(**places).split())
    assert answer.code == 1
    assert MISTAKES[words].format(**places) in answer.sentence
    after = {
        path: path.stat().st_mtime_ns
        for folder in (a_run, tmp_path)
        for path in folder.rglob("*")
    }
    assert after == before


def test_yaml_and_a_byte_order_mark_are_read(
    videotune: Command, clips: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(
        "# mine\nbase_model_name: asset:toy\nvideo_config: {frames: 5}\n"
    )
    (tmp_path / "b.json").write_bytes(
        b'\xef\xbb\xbf{"base_model_name": "asset:toy", "video_config": {"frames": 5}}'
    )
    for name in ("a.yaml", "b.json"):
        answer = videotune("check", clips, "--config", tmp_path / name, "--json")
        assert answer.code == 0
        assert json.loads(answer.out)["clips"][0]["frames"] == 5


def test_the_number_of_skips_that_check_advises_is_enough(
    videotune: Command, spoilt: Path, tmp_path: Path
) -> None:
    """Also if one of the clips is skipped because it has no caption."""
    clips = shutil.copytree(spoilt, tmp_path / "clips")
    (clips / "captions/a.txt").unlink()
    answer = videotune("check", clips)
    assert answer.code == 1
    assert re.findall(r"--allow-skips (\d+)", answer.err) == ["2"]
    assert videotune("check", clips, "--allow-skips", "1").code == 2
    assert videotune("check", clips, "--allow-skips", "2").code == 0


def test_code_2_where_a_clip_is_skipped_and_0_where_that_is_allowed(
    videotune: Command, model: Path, spoilt: Path
) -> None:
    answer = videotune("check", spoilt)
    assert answer.code == 2
    assert answer.out.startswith("3 found: 2 used, 0 kept aside, 1 skipped (")
    assert "\nskipped: videos/c.mp4: " in answer.out
    assert "--allow-skips 1" in answer.err
    for allowed, code in (("1", 0), ("all", 0), ("7", 0), ("0", 2), ("some", 1)):
        assert videotune("check", spoilt, "--allow-skips", allowed).code == code
    account = json.loads(videotune("check", spoilt, "--json").out)
    assert (account["found"], account["used"], account["skipped"]) == (3, 2, 1)
    for command in ("plan", "cache"):
        answer = videotune(command, "--data", spoilt, *small(model))
        assert (answer.code, "c.mp4: not a video" in answer.sentence) == (2, True)
    assert (
        videotune("plan", "--data", spoilt, *small(model), "--allow-skips", "1").code
        == 0
    )


def test_2_where_no_clip_can_be_used(videotune: Command, tmp_path: Path) -> None:
    write_clip(tmp_path / "short.mp4", noise(3, 32, 32), 16)
    (tmp_path / "short.txt").write_text("short")
    answer = videotune("check", tmp_path, "--json")
    assert answer.code == 2
    account = json.loads(answer.out)
    assert (account["found"], account["skipped"], account["clips"][0]["reason"]) == (
        1,
        1,
        "too_short",
    )
    assert videotune("plan", "--preset", "toy", "--data", tmp_path).code == 2


def test_check_accounts_for_clips_without_captions_and_then_fails(
    videotune: Command, tmp_path: Path
) -> None:
    for name, frames in (("a", 20), ("b", 21)):
        write_clip(tmp_path / f"{name}.mp4", noise(frames, 64, 64), 16)
    (tmp_path / "a.txt").write_text("a")
    answer = videotune("check", tmp_path, "--json")
    assert answer.code == 1
    assert [clip["reason"] for clip in json.loads(answer.out)["clips"]] == [
        None,
        "missing_caption",
    ]
    assert "--allow-skips 1" in answer.err


def test_presets_are_listed_and_shown_as_configs(
    videotune: Command, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    listed = videotune("presets", "list")
    assert listed.code == 0
    for name in preset_names():
        assert name in listed.out
        shown = videotune("presets", "show", name)
        assert shown.code == 0
        assert json.loads(shown.out)["base_model_name"]
    (tmp_path / "toy.json").write_text(
        videotune("presets", "show", "#TOY.json").out, encoding="utf-8"
    )
    as_file = videotune("check", clips, "--config", tmp_path / "toy.json", "--json")
    as_preset = videotune("check", clips, "--preset", "toy", "--json")
    assert (as_file.code, as_file.out) == (as_preset.code, as_preset.out)


def test_every_key_is_listed_with_its_meaning(
    videotune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    answer = videotune("presets", "keys")
    assert answer.code == 0
    for name, field in leaves().items():
        assert re.search(
            rf"\b{re.escape(name)} .*{re.escape(field.description[:20])}", answer.out
        ), name


def test_doctor_says_what_is_there(videotune: Command) -> None:
    import torch

    answer = videotune("doctor")
    assert answer.code == 0
    for word in (__version__, torch.__version__, "diffusers", "CUDA"):
        assert word in answer.out


@pytest.mark.parametrize(
    "words",
    [
        ("chek",),
        ("train", "--preset", "toy"),
        ("check", "--bogus"),
        ("cache", "verfy", "somewhere"),
    ],
)
def test_a_mistyped_command_is_told_without_a_traceback(
    videotune: Command, words: tuple[str, ...]
) -> None:
    answer = videotune(*words)
    assert answer.code != 0
    assert "Traceback" not in answer.err
    assert re.search(r"No such command|Missing option|No such option", answer.err)


@pytest.mark.parametrize("group", ["cache", "queue", "presets"])
def test_a_list_is_asked_for_by_either_word(videotune: Command, group: str) -> None:
    words = ["nowhere"] if group == "cache" else []
    either = [videotune(group, command, *words) for command in ("ls", "list")]
    assert either[0] == either[1]
    hidden = "ls" if group == "presets" else "list"
    assert not re.search(
        rf"^\W*{hidden} ", videotune(group, "--help").out, re.MULTILINE
    )


def test_sample_draws_with_the_config_s_seed_where_none_is_given(
    videotune: Command, a_run: Path, tmp_path: Path
) -> None:
    words = ("--prompt", "a cat", "--set", "sample.steps=1", "--set", "sample.seed=7")
    assert videotune("sample", a_run, *words, "--out", tmp_path).code == 0
    assert ["-seed7-" in path.name for path in tmp_path.glob("*.mp4")] == [True]


def test_the_page_of_a_run_is_written_when_it_is_asked_for(
    videotune: Command, tmp_path: Path
) -> None:
    """Of a run that is still at it: no more than a journal is there."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "journal.jsonl").write_text('{"kind": "start", "time": 1, "steps": 9}\n')
    answer = videotune("report", str(run))
    assert answer.code == 0, answer.err
    assert answer.out.strip() == str(run / "report.html")
    assert f"<title>Run {tmp_path.name}</title>" in (run / "report.html").read_text()
