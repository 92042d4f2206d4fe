"""The demo's settings, table and pictures, without its training; docs/toy.md has what
it shows.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.support.command_line import Patch, Printed
from videotune.cli.demo import show, show_demo
from videotune.commands import demo
from videotune.commands.check import check
from videotune.commands.plan import plan
from videotune.data.video_writer import write_sheet
from videotune.errors import VideotuneError
from videotune.files import write_json
from videotune.job.job import open_job
from videotune.job.overrides import Overrides, resolve_config
from videotune.toy.dataset import write_dataset
from videotune.toy.shapes import DIRECTIONS, HELD_OUT, KNOWN

RESULT = {
    "clips_used": 42,
    "steps": 300,
    "views": {},
    "validation": {"before": 0.24, "after": 0.2},
    "concept": {"before": 0.0, "after": 0.958, "n": 24},
    "control": {"before": 1.0, "after": 1.0, "n": 24},
    "same_frames": {"max_difference": 1},
    "lora": "demo/run/export/run-step-300.safetensors",
    "base": "asset:toy",
    "seconds": 123.4,
}


def test_at_least_24_samples_of_the_concept_and_of_what_the_base_never_saw_together() -> (
    None
):
    assert len(demo.SEEDS) * len(DIRECTIONS) >= 24
    assert len(demo.CONTROLS) >= 24
    assert set(demo.CONTROLS) <= set(HELD_OUT)
    assert not set(demo.CONTROLS) & set(KNOWN)


def test_the_demos_job_keeps_what_the_base_predicts_on_about_half_of_its_samples(
    tmp_path: Path,
) -> None:
    write_dataset(tmp_path / "clips", concept_clips=demo.CLIPS, reminder_clips=0)
    write_dataset(tmp_path / "known", concept_clips=0, reminder_clips=demo.KNOWN_CLIPS)
    write_json(tmp_path / "config.json", demo.settings_of(tmp_path, 0))
    job = open_job(
        *resolve_config(Overrides(preset="toy", config=tmp_path / "config.json"))
    )
    kept = [clip for clip in job.library.clips if clip.kind == "regularization"]
    assert {clip.target for clip in kept} == {"base"}
    assert len(kept) == demo.KNOWN_CLIPS
    assert len(job.library.held_out_windows) >= 2
    shown = {clip.id: clip.repeats for clip in job.library.clips}
    assert (
        0.4
        < len(kept) / sum(shown[window.clip_id] for window in job.library.windows)
        < 0.5
    )
    assert (job.steps, job.config.batch_size) == (demo.STEPS, demo.BATCH)
    assert not any("regularization takes" in note for note in job.notes)
    assert {prompt.split()[1] for prompt in job.config.samples} > {"zorble"}  # type: ignore[union-attr]


def test_another_seed_is_another_demo(tmp_path: Path) -> None:
    demo.refuse_other(tmp_path / "config.json", 1)
    write_json(tmp_path / "config.json", demo.settings_of(tmp_path, 0))
    demo.refuse_other(tmp_path / "config.json", 0)
    with pytest.raises(VideotuneError, match="holds the demo of seed 0"):
        demo.demo(tmp_path, 1)


def test_the_result_is_a_short_table_and_the_place_of_the_report(
    capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    show_demo(Path("demo"), RESULT)
    printed = capsys.readouterr().out
    for words in (
        'draws a "zorble": an orange diamond',
        "0%",
        "96%",
        "100%",
        "0.240",
        "0.200",
    ):
        assert words in printed
    assert "42 clips, 300 steps, 2 min in all" in printed
    assert "report:   demo/run/report.html" in printed
    assert len(printed.splitlines()) < 24


def test_the_demo_names_no_option_that_it_does_not_have(
    tmp_path: Path, capsys: Printed
) -> None:
    write_dataset(tmp_path / "clips", concept_clips=demo.CLIPS, reminder_clips=0)
    write_dataset(tmp_path / "known", concept_clips=0, reminder_clips=20)
    config = tmp_path / demo.CONFIG_NAME
    write_json(config, demo.settings_of(tmp_path, 0))
    overrides = Overrides(preset="toy", config=config)
    show(tmp_path, check(overrides))
    show(tmp_path, plan(overrides))
    printed = " ".join(capsys.readouterr().out.split())
    for name in ("check", "plan"):
        command = f"videotune {name} {config} --preset toy --verbose:"
        assert command in printed
        printed = printed.replace(command, "")
    assert "--" not in printed


def test_the_sheet_shows_a_clips_frames_beside_its_words(tmp_path: Path) -> None:
    from PIL import Image

    clips = [np.full((17, 64, 64, 3), light, np.float32) for light in (0.0, 1.0)]
    rows = [
        demo.sheet_row(prompt, clip, "base")
        for prompt, clip in zip(["one", "two"], clips, strict=True)
    ]
    assert [words for words, _ in rows] == ["one\nbase", "two\nbase"]
    write_sheet(tmp_path / "x.png", rows, label=200)
    pixels = np.asarray(Image.open(tmp_path / "x.png"))
    assert pixels[4 + 32, 200 + 32].tolist() == [0, 0, 0]
    assert pixels[4 + 68 + 32, -50].tolist() == [255, 255, 255]
