"""What is shown of a run that learns video and sound: losses of both, previews that can be
heard, and code that writes the sound.
"""

import base64
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import pytest

from tests.docs.test_schemas import faults
from tests.support import command_line, reports
from tests.support.run_results import of_kind
from tests.support.sounding_run import sounding_overrides, sounding_run
from videotune.errors import DONE
from videotune.job.overrides import Overrides
from videotune.reporter.build import environment, fill
from videotune.reporter.comparison import comparison_table, write_comparison
from videotune.reporter.inventory import use
from videotune.reporter.outcome import recommended_checkpoint, status
from videotune.reporter.read import read_run
from videotune.reporter.sound_code import conditioning_modality
from videotune.runs.journal import read_journal
from videotune.runs.scalars import scalars
from videotune.studio.series import charts
from videotune.studio.status import read_live
from videotune.text import sound_words


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sounding")


@pytest.fixture(scope="module")
def overrides(home: Path, tiny_bases: Callable[..., Path]) -> Overrides:
    return sounding_overrides(home, tiny_bases, generate=["video", "sound"])


@pytest.fixture(scope="module")
def run(home: Path, overrides: Overrides) -> Path:
    """A run that learns both, whose clips have a sound but for one."""
    return sounding_run(home, overrides)


def steps_with_sound(run: Path) -> list[dict[str, Any]]:
    return [line for line in of_kind(run, "step") if "sound" in line]


def streams(content: bytes) -> dict[str, float]:
    """Return the seconds of each stream of a video file, by its type."""
    with av.open(io.BytesIO(content)) as file:
        return {
            stream.type: float(stream.duration * stream.time_base)
            for stream in file.streams
        }


def test_all_that_the_run_writes_fits_the_schemas(run: Path) -> None:
    for line in read_journal(run):
        assert faults("journal", line) == []
    for name in ("plan", "check"):
        assert faults(name, json.loads((run / f"{name}.json").read_text())) == []
    assert any("sound" in row for row in of_kind(run, "start")[0]["buckets"])


def test_both_parts_are_read_from_the_journal(run: Path) -> None:
    video, sound = read_run(run).parts
    assert (video.name, sound.name) == ("video", "sound")
    lines = steps_with_sound(run)
    assert list(sound.errors.mse[0]) == [line["step"] for line in lines]
    assert list(sound.errors.mse[1]) == [line["sound"]["mse"] for line in lines]
    levels = sum(value is not None for line in lines for value in line["sound"]["by_t"])
    assert sum(len(steps) for steps, _ in sound.errors.by_noise) == levels

    validations = of_kind(run, "validation")
    for part, readings in (
        (video, validations),
        (sound, [line["sound"] for line in validations]),
    ):
        assert [one["held_out"] for one in part.validations] == [
            one["held_out"] for one in readings
        ]


def test_the_report_has_losses_and_validations_of_both(run: Path) -> None:
    chapters = reports.chapters(run)
    for name in ("loss", "validation"):
        assert [part["name"] for part in chapters[name]["parts"]] == ["video", "sound"]
    last = of_kind(run, "validation")[-1]
    changes = [
        last["held_out"]["normalised"],
        last["train"]["normalised"],
        last["sound"]["held_out"]["normalised"],
        last["sound"]["train"]["normalised"],
    ]
    assert [value for _, value, _ in chapters["verdict"]["changes"]] == changes
    assert {row["part"] for row in chapters["validation"]["grounds"]["clips"]} == {
        "video",
        "sound",
    }
    page = reports.report(run)
    for name in ("loss", "validation"):
        text = reports.part(page, name)
        assert "Video" in text
        assert "Sound" in text


def test_the_verdict_is_shown_with_its_parts(run: Path) -> None:
    verdict = of_kind(run, "verdict")[-1]
    assert verdict["parts"].keys() == {"video", "sound"}
    assert status(run)["verdict_parts"] == verdict["parts"]
    shown = reports.part(reports.report(run), "verdict")
    assert f"Video {verdict['parts']['video']}" in shown
    assert f"Sound {verdict['parts']['sound']}" in shown


def test_a_running_run_recommends_by_the_mean_of_both(run: Path) -> None:
    """The video is best at step 1, the sound at step 2, and the mean of both at step 2."""
    contents = read_run(run)
    readings = []
    for step, video, sound in ((1, 0.8, 0.9), (2, 0.85, 0.5), (3, 0.95, 0.95)):
        readings.append(
            {
                "kind": "validation",
                "step": step,
                "held_out": {"normalised": video},
                "train": None,
                "sound": {"held_out": {"normalised": sound}, "train": None},
            }
        )
    saves = [{"kind": "save", "step": step} for step in (1, 2, 3)]
    running = replace(contents, journal=(*readings, *saves))
    assert running.held_out_losses == [
        (1, pytest.approx(0.85)),
        (2, pytest.approx(0.675)),
        (3, pytest.approx(0.95)),
    ]
    latest = {"best_step": 2, "turned": True}
    assert recommended_checkpoint(running, latest)[0] == 2


def test_trackers_get_the_sound_beside_the_video(run: Path) -> None:
    line = steps_with_sound(run)[0]
    values = scalars(line)
    assert values["train/mse"] == line["mse"]
    assert values["sound/mse"] == line["sound"]["mse"]
    by_level = [tag for tag in values if tag.startswith("sound/mse_by_t/")]
    assert len(by_level) == sum(value is not None for value in line["sound"]["by_t"])

    reading = of_kind(run, "validation")[-1]
    values = scalars(reading)
    assert values["validation/held_out"] == reading["held_out"]["normalised"]
    sound = reading["sound"]
    assert values["sound/validation/held_out"] == sound["held_out"]["normalised"]
    assert values["sound/validation/train_mean"] == sound["train"]["mean"]


def test_the_studio_draws_both(run: Path) -> None:
    drawn = charts(read_live(run), deadline=0.0)["charts"]
    assert [curve["name"] for curve in drawn["loss"]] == ["video", "sound"]
    assert [curve["name"] for curve in drawn["validation"]] == [
        "video, clips kept aside",
        "video, training clips",
        "sound, clips kept aside",
        "sound, training clips",
    ]
    assert drawn["sound_noise"]


def test_the_comparison_has_the_mean_and_both(run: Path, tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        shutil.copytree(run, tmp_path / name)
        runs.append(read_run(tmp_path / name))
    _, rows = comparison_table(runs, tmp_path)
    last = of_kind(run, "validation")[-1]
    video = last["held_out"]["normalised"]
    sound = last["sound"]["held_out"]["normalised"]
    assert float(rows[0]["held_out"]) == pytest.approx((video + sound) / 2, rel=1e-3)
    assert rows[0]["held_out_parts"] == f"video {video:.4g}, sound {sound:.4g}"
    page = write_comparison([one.folder for one in runs], tmp_path / "runs.html")
    text = page.read_text(encoding="utf-8")
    assert rows[0]["held_out_parts"] in text
    assert "sound −" in text


def test_previews_can_be_heard_in_the_report(run: Path) -> None:
    """Each is muted, has controls, and holds a sound as long as its pictures."""
    page = reports.report(run)
    videos = [given for tag, given in reports.elements(page) if tag == "video"]
    assert len(videos) >= 2
    for given in videos:
        assert {"muted", "controls", "loop"} <= given.keys()
        content = base64.b64decode(str(given["src"]).partition("base64,")[2])
        seconds = streams(content)
        assert seconds["audio"] == pytest.approx(seconds["video"], abs=0.05)
    record = of_kind(run, "sample")[-1]
    loudness = round(record["sound"]["loudness"])
    assert f"sound −{abs(loudness)} dB" in reports.part(page, "before")


def test_the_code_for_diffusers_writes_a_video_with_its_sound(
    run: Path,
    tiny_bases: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is run, with the tiny base and the exported adapter."""
    chapter = use(read_run(run))
    base = tiny_bases("ltx2", "2.3")
    (tmp_path / base.name).symlink_to(base)
    monkeypatch.chdir(tmp_path)
    templates = environment("videotune.reporter").overlay(autoescape=False)
    code = fill(templates, "use_code.j2", {"d": chapter})
    exec(compile(code, "report", "exec"), {})
    seconds = streams((tmp_path / "video.mp4").read_bytes())
    assert seconds["video"] == pytest.approx(17 / 24, abs=0.05)
    assert seconds["audio"] == pytest.approx(seconds["video"], abs=0.1)


def test_the_plan_counts_windows_with_sound(
    run: Path, overrides: Overrides, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = json.loads((run / "plan.json").read_text())
    assert (facts["windows"], facts["sound_windows"]) == (4, 3)
    assert sorted((row["sound"], row["windows"]) for row in facts["buckets"]) == [
        (False, 1),
        (True, 3),
    ]
    capsys.readouterr()
    command_line.plan(overrides, verbose=True)
    printed = "".join(capsys.readouterr())
    assert "sound: 3 training windows with it, 1 without" in printed
    assert "17 frames, with sound" in printed


@pytest.mark.parametrize(
    ("generate", "given", "option"),
    [
        (["sound"], "video", "--video clip.mp4"),
        (["video"], "sound", "--sound sound.wav"),
    ],
)
def test_a_run_of_one_for_the_other_names_the_command_and_no_code(
    generate: list[str], given: str, option: str, run: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["generate"] = generate
    reports.write_file(folder, "config.json", config)
    assert conditioning_modality(read_run(folder)) == given
    text = reports.part(reports.report(folder), "use")
    assert option in text
    assert "from diffusers import" not in text


def test_a_run_without_sound_has_one_part_without_a_name(tmp_path: Path) -> None:
    folder = reports.full_run(tmp_path / "run")
    contents = read_run(folder)
    assert [part.name for part in contents.parts] == [""]
    assert conditioning_modality(contents) == ""
    assert status(folder)["verdict_parts"] is None
    videos = [
        given
        for tag, given in reports.elements(reports.report(folder))
        if tag == "video" and str(given["src"]).startswith("data:")
    ]
    assert all("muted" in given for given in videos)
    assert "sound −" not in reports.report(folder)


def test_the_contact_sheet_shows_each_sound(
    overrides: Overrides, tmp_path: Path
) -> None:
    assert command_line.check(overrides, contact_sheet=tmp_path / "sheet") == DONE
    page = (tmp_path / "sheet/index.html").read_text(encoding="utf-8")
    assert page.count('<div class="sound">') == 5, "a clip of six has no track"
    assert page.count("<svg") == 5
    text = reports.visible_text(page)
    assert "sound −9 dB" in text
    assert "17 frames, with sound" in text


@pytest.mark.parametrize(
    ("sound", "words"),
    [
        (None, ""),
        ({"problem": None, "loudness": None}, ""),
        (
            {"problem": "it is silent", "loudness": -90.0},
            "sound not used: it is silent",
        ),
        ({"loudness": -20.6, "silent": 0.001, "clipped": 0.0}, "sound −21 dB"),
        (
            {"loudness": -3.0, "silent": 0.3, "clipped": 0.0123},
            "sound −3 dB, 30% silent, 1.2% clipped",
        ),
    ],
)
def test_a_clips_sound_in_words(sound: dict[str, Any] | None, words: str) -> None:
    assert sound_words(sound) == words
