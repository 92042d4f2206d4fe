"""sample and compare: from a run, from a LoRA file, from the base; one prompt at every
checkpoint.
"""

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator

from tests.support.command_line import (
    Bases,
    Patch,
    Printed,
    compare,
    export,
    sample,
    train,
)
from tests.support.command_line import run as shell
from tests.support.run_processes import Finished, Make, Work, resume
from tests.support.run_results import of_kind
from videotune.commands.compare import is_drawn
from videotune.commands.sample import named_by
from videotune.commands.sample_options import SampleOptions, refuse_compare
from videotune.data.decode import decode
from videotune.data.probe import probe
from videotune.data.video_writer import read_video
from videotune.errors import DONE, VideotuneError
from videotune.exporter.adapter_export import export_lora
from videotune.files import read_json
from videotune.job.job import open_job
from videotune.job.overrides import resolve_config
from videotune.models.registry import find
from videotune.reporter import contact_sheet
from videotune.runs.checkpoint import complete_checkpoints, last_checkpoint
from videotune.runs.journal import read_journal
from videotune.runs.run_dir import refuse_samples_in_data

NO_TEXT = ("a\0b", "a\x1b[31m", "a \ud800", "a" * 10**7)
SIZE = (
    "sample.frames=5",
    "sample.resolution=32x32",
    "sample.steps=3",
    "sample.guidance=1",
)


@pytest.fixture
def a_run(finished: Finished) -> Path:
    return finished("steps=20", "learning_rate=0.003", "lora.rank=16", *SIZE)


def sampled(options: SampleOptions, out: Path) -> np.ndarray:
    assert sample(options, out) == DONE
    facts = probe(next(out.glob("*.mp4")))
    return decode(facts, facts.timestamps, 32, 32).astype(int)


def test_a_run_and_its_file_sample_the_same_and_strength_0_is_the_base(
    a_run: Path, tiny_bases: Bases, tmp_path: Path
) -> None:
    base, prompts = str(tiny_bases("wan")), ("a red circle",)
    family = find("wan")(tiny_bases("wan"), torch.device("cpu"), torch.float32)
    state = last_checkpoint(a_run).load("weights")
    file = export_lora(
        family, "comfyui", state, 1.0, tmp_path / "lora.safetensors", {}
    ).path
    from_run = sampled(SampleOptions(prompts, 3, run=a_run), tmp_path / "a")
    from_file = sampled(
        SampleOptions(prompts, 3, base=base, loras=(file,), sets=SIZE), tmp_path / "b"
    )
    (video,) = (tmp_path / "b").glob("*.mp4")
    assert "step" not in video.name, "of a file the step is not known"
    alone = sampled(SampleOptions(prompts, 3, base=base, sets=SIZE), tmp_path / "c")
    off = sampled(SampleOptions(prompts, 3, run=a_run, strength=0.0), tmp_path / "d")
    half = sampled(SampleOptions(prompts, 3, run=a_run, strength=0.5), tmp_path / "e")
    assert np.abs(from_run - from_file).max() <= 1
    assert np.abs(alone - off).max() <= 1
    assert np.abs(from_run - alone).mean() > 0.2
    assert 0.05 < np.abs(half - alone).mean() < np.abs(from_run - alone).mean()
    assert np.abs(half - from_run).mean() > 0.05


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompts": ("a",)}, "sample needs a RUN folder"),
        (
            {
                "prompts": ("a",),
                "base": "asset:toy",
                "loras": (Path("none.safetensors"),),
            },
            "--lora: no such file",
        ),
        *[
            ({"prompts": ("a",), "base": "asset:toy", "seed": seed}, "seed")
            for seed in (2**63, 10**30, -1)
        ],
        *[
            (
                {
                    "prompts": ("a",),
                    "base": "asset:toy",
                    "sets": (f"sample.seed={seed}",),
                },
                "seed",
            )
            for seed in (2**63, -1)
        ],
        *[({"prompts": (text,), "base": "asset:toy"}, "--prompt") for text in NO_TEXT],
    ],
    ids=lambda value: ascii(value)[:60].replace("\\", ""),
)
def test_options_that_make_no_sample_are_refused(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """A seed of more than 63 bits, a prompt that is no text."""
    with pytest.raises(VideotuneError, match=named):
        sample(SampleOptions(**options), tmp_path)


def test_samples_of_a_run_go_into_the_run_beside_its_previews(
    a_run: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(a_run, tmp_path / "run")
    assert shell("sample", folder, prompt="a cat", set="sample.steps=1") == 0
    (video,) = (folder / "sampled").iterdir()
    assert video.suffix == ".mp4"
    assert not (tmp_path / "samples").exists()


def test_samples_do_not_go_into_the_run_s_own_dataset(
    a_run: Path, small_clips: Path
) -> None:
    """They would be clips of it; a folder above the dataset is none of it."""
    for write in (
        lambda out: sample(SampleOptions(("a",), run=a_run), out),
        lambda out: compare(a_run, "a", 1, out),
    ):
        with pytest.raises(VideotuneError, match="is inside of the dataset"):
            write(small_clips / "videos" / "more")
    refuse_samples_in_data(a_run, small_clips.parent)


def test_options_that_contradict_a_run_are_refused(a_run: Path, tmp_path: Path) -> None:
    for options in (
        SampleOptions((), run=a_run),
        SampleOptions(("a",), run=a_run, base="x"),
    ):
        with pytest.raises(VideotuneError):
            sample(options, tmp_path)
    with pytest.raises(
        VideotuneError,
        match="no complete checkpoint of step 7; the only complete checkpoint is of step 20",
    ):
        sample(SampleOptions(("a",), run=a_run, step=7), tmp_path)


def test_of_two_experts_files_a_sample_is_named_by_what_both_begin_with() -> None:
    from videotune.commands.sample import adapter_name

    files = (Path("mine_high_noise.safetensors"), Path("mine_low_noise.safetensors"))
    assert adapter_name(SampleOptions(("a",), base="x", loras=files)) == "mine-"
    assert (
        adapter_name(SampleOptions(("a",), base="x", loras=files[:1]))
        == "mine_high_noise-"
    )
    assert (
        adapter_name(SampleOptions(("a",), base="x", loras=files, strength=0.5))
        == "mine-strength-0.5-"
    )
    assert adapter_name(SampleOptions(("a",), base="x")) == "base-"


def test_a_sample_is_named_by_its_prompt_too() -> None:
    name = "step-000004-0123-seed42"
    assert (
        named_by(f"{name}.mp4", "A cat, in the rain/..\n日本!")
        == f"{name}-a-cat-in-the-rain.mp4"
    )
    assert named_by(f"{name}.mp4", "日本") == f"{name}.mp4"
    assert len(named_by("x.mp4", "a" * 1000)) < 60


def test_a_lora_of_another_base_is_reported(
    a_run: Path, tiny_bases: Bases, tmp_path: Path, capsys: Printed
) -> None:
    """By the fingerprints in its header; nothing is said over the base that it was
    trained on.
    """
    assert export(a_run, ["diffusers"], out=tmp_path) == DONE
    (file,) = tmp_path.glob("*.safetensors")
    other = find("wan").tiny(tmp_path / "other", seed=5)
    for base, warns in ((tiny_bases("wan"), False), (other, True)):
        capsys.readouterr()
        sample(
            SampleOptions(("a cat",), base=str(base), loras=(file,), sets=SIZE),
            tmp_path / "out",
        )
        assert ("was trained on" in capsys.readouterr().err) == warns


PROMPT = "a red circle moves left"
SMALL = (
    "sample.frames=5",
    "sample.resolution=32x32",
    "sample.steps=2",
    "sample.guidance=1",
)


@pytest.fixture(scope="module")
def compared(overrides: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints at steps 10 and 20; made in two processes, as far as its time is
    concerned.
    """
    folder = tmp_path_factory.mktemp("compared")
    settings = overrides(
        "steps=10",
        "save_every=10",
        "learning_rate=0.03",
        f"cache_dir={folder / 'cache'}",
        *SMALL,
    )
    begun = time.perf_counter()
    assert train(settings, folder / "run") == DONE
    assert resume(folder / "run", "steps=20") == DONE
    (folder / "wall").write_text(str(time.perf_counter() - begun))
    return folder / "run"


def test_a_comparison_shows_the_base_and_every_checkpoint_side_by_side(
    compared: Path, tmp_path: Path, capsys: Printed
) -> None:
    assert compare(compared, PROMPT, 3, None) == DONE
    printed = capsys.readouterr().out.split()
    assert printed[-1] == str(compared / "report.html")
    entry = read_json(compared / "compare" / "compare.json")[0]
    schema = Path(__file__).parents[2] / "docs" / "schemas" / "compare.schema.json"
    assert list(Draft202012Validator(read_json(schema)).iter_errors([entry])) == []
    assert (entry["prompt"], entry["seed"], entry["steps"]) == (PROMPT, 3, [0, 10, 20])
    assert [(compared / entry[name]).is_file() for name in ("video", "sheet")] == [
        True,
        True,
    ]
    frames, _ = read_video(compared / entry["video"], 512)
    assert (len(frames), frames[0].shape) == (5, (18 + 32, 3 * 32 + 2 * 4, 3))
    # the same as each alone, as sample draws it
    shown = []
    for place, step in enumerate((0, 20)):
        assert (
            sample(SampleOptions((PROMPT,), 3, compared, step), tmp_path / str(step))
            == DONE
        )
        path = next((compared / "compare").glob(f"*-step-{step:06d}.mp4"))
        assert (
            path.read_bytes() == next((tmp_path / str(step)).glob("*.mp4")).read_bytes()
        )
        kept = read_video(path, 512)[0][2].astype(int)
        left = 36 * (0, 2)[place]
        assert (
            np.abs(frames[2][18:, left : left + 32].astype(int) - kept).mean() < 8
        )  # encoded twice
        shown.append(kept)
    assert np.abs(shown[0] - shown[1]).mean() > 4
    page = (compared / "report.html").read_text(encoding="utf-8")
    assert "In rows, from the left: base, step 10, step 20." in re.sub(
        r"<[^>]+>", "", page
    )


def test_samples_that_exist_are_not_made_again(
    compared: Path, tmp_path: Path, capsys: Printed
) -> None:
    """But for one of a checkpoint that is newer."""
    assert compare(compared, PROMPT, 4, tmp_path) == DONE
    videos = sorted(tmp_path.glob("*-step-*.mp4"))
    before = [video.stat().st_mtime_ns for video in videos]
    assert len(videos) == 3
    videos[1].unlink()
    capsys.readouterr()
    assert compare(compared, PROMPT, 4, tmp_path) == DONE
    assert "2 of 3 are sampled already" in capsys.readouterr().err
    after = [video.stat().st_mtime_ns for video in videos]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert len(read_json(tmp_path / "compare.json")) == 1
    assert compare(compared, "another", 4, tmp_path) == DONE
    assert [line["prompt"] for line in read_json(tmp_path / "compare.json")] == [
        PROMPT,
        "another",
    ]
    checkpoint = complete_checkpoints(compared)[0]
    assert is_drawn(videos[1], checkpoint)
    os.utime(videos[1], (1, 1))
    assert not is_drawn(videos[1], checkpoint)


def test_what_cannot_be_compared_is_refused(compared: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "plan.json"):
        shutil.copy(compared / name, other)
    cases = (
        (compared, None, "no prompt given"),
        (tmp_path, PROMPT, "holds runs"),
        (other, PROMPT, "no checkpoint yet"),
    )
    for folder, prompt, named in cases:
        with pytest.raises(VideotuneError, match=named):
            compare(folder, prompt, None, None)


def test_the_phases_sum_to_the_wall_time_over_all_processes(compared: Path) -> None:
    """What is left over is the report, and the process's own end."""
    wall = float((compared.parent / "wall").read_text())
    seconds = read_json(compared / "heartbeat.json")["seconds"]
    assert seconds.keys() >= {
        "starting",
        "encoding",
        "loading",
        "training",
        "saving",
        "exporting",
    }
    assert "ended" not in seconds
    assert 0.8 * wall < sum(seconds.values()) <= wall + 0.01  # rounded to milliseconds
    end = read_journal(compared)[-1]
    assert end["kind"] == "end"
    assert sum(end["seconds"].values()) == pytest.approx(sum(seconds.values()), rel=0.2)
    steps = sum(sum(line["seconds"].values()) for line in of_kind(compared, "step"))
    assert steps <= end["seconds"]["training"]


def test_each_clip_has_a_picture_that_the_page_shows(
    compared: Path, small_clips: Path
) -> None:
    from PIL import Image

    rows = read_json(compared / "check.json")["clips"]
    pictures = [compared / "pictures" / f"{row['id'][:16]}.jpg" for row in rows]
    assert len(pictures) == 6
    for row, picture in zip(rows, pictures, strict=True):
        image = np.asarray(Image.open(picture).convert("RGB")).astype(int)
        assert image.shape == (32, 96, 3)
        colour = Path(row["path"]).stem.split("-")[0]
        strongest = {"red": 0, "green": 1, "blue": 2}.get(colour)
        # the shape is of that colour in each of the three frames
        if strongest is not None:
            for column in range(3):
                part = image[:, 32 * column : 32 * column + 32].reshape(-1, 3)
                vivid = part[np.ptp(part, axis=1).argmax()]
                assert vivid.argmax() == strongest, (picture, column)
    assert (compared / "report.html").read_text(encoding="utf-8").count(
        "data:image/jpeg"
    ) == 6


def test_of_many_clips_the_first_have_thumbnails(
    work: Work, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(contact_sheet, "MAX_PICTURES", 2)
    job = open_job(*resolve_config(work.overrides(f"cache_dir={work.tmp / 'cache'}")))
    contact_sheet.cache_pictures(job)
    made = {
        path: path.stat().st_mtime_ns
        for path in (work.tmp / "cache" / "pictures").iterdir()
    }
    assert len(made) == 2
    contact_sheet.cache_pictures(job)
    assert made == {path: path.stat().st_mtime_ns for path in made}


def test_a_video_of_other_settings_does_not_take_the_place_of_the_first(
    a_run: Path, tmp_path: Path
) -> None:
    """The same request again does; each setting, dtype and first frame is another."""
    one_step = "sample.steps=1"
    for sets in (
        (one_step,),
        (one_step,),
        ("sample.steps=2",),
        (one_step, "sample.guidance=2"),
        (one_step, "sample.frames=9"),
        (one_step, "sample.strength=0.5"),
        (one_step, "weight_dtype=FLOAT_8"),
    ):
        assert sample(SampleOptions(("a",), 3, run=a_run, sets=sets), tmp_path) == DONE
    assert len(list(tmp_path.glob("*.mp4"))) == 6


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("steps=10", "--set sample.steps=10"),
        ("seed=7", "--set sample.seed=7"),
        ("lora.rank=8", "Leave it out"),
        ("learning_rate=1", "Leave it out"),
        ("sample_metrics.steps=5", "--set sample.steps=5"),
    ],
)
def test_a_setting_of_the_training_is_refused_where_a_video_is_drawn(
    a_run: Path, setting: str, remedy: str, tmp_path: Path
) -> None:
    key = setting.partition("=")[0]
    for write in (
        lambda: sample(SampleOptions(("a",), run=a_run, sets=(setting,)), tmp_path),
        lambda: refuse_compare(a_run, "a", 1, None, (setting,)),
    ):
        with pytest.raises(VideotuneError, match=f"--set {key}:") as refused:
            write()
        assert remedy in str(refused.value)
