"""``compare`` draws one prompt at every checkpoint; what a run leaves for its page: pictures of clips, and its time."""

import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.commands.safety_kit import Make, of_kind, resume
from tests.shell import compare, sample, train
from videotune.commands.compare import cell_of
from videotune.commands.sample import SampleOptions
from videotune.data.video_writer import read_video
from videotune.errors import DONE, VideotuneError
from videotune.files import read_json
from videotune.reporter import thumbnails
from videotune.trainer.checkpoint import complete_checkpoints
from videotune.trainer.logging.journal import read_journal
from videotune.trainer.resolve_config import resolve_config
from videotune.trainer.run_spec import open_job

PROMPT = "a red circle moves left"
SIZE = ("sample.frames=5", "sample.resolution=32x32", "sample.steps=2", "sample.guidance=1")


@pytest.fixture(scope="module")
def a_run(overrides: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints at steps 10 and 20; made in two processes, as far as its time is concerned."""
    folder = tmp_path_factory.mktemp("compared")
    settings = overrides("steps=10", "save_every=10", "learning_rate=0.03", f"cache_dir={folder / 'cache'}", *SIZE)
    begun = time.perf_counter()
    assert train(settings, folder / "run") == DONE
    assert resume(folder / "run", "steps=20") == DONE
    (folder / "wall").write_text(str(time.perf_counter() - begun))
    return folder / "run"


def test_a_comparison_shows_the_base_and_every_checkpoint_side_by_side(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(a_run, PROMPT, 3, None) == DONE
    printed = capsys.readouterr().out.split()
    assert printed[-1] == str(a_run / "report.html")
    entry = read_json(a_run / "compare" / "compare.json")[0]
    schema = Path(__file__).parents[2] / "docs" / "schemas" / "compare.schema.json"
    assert list(Draft202012Validator(read_json(schema)).iter_errors([entry])) == []
    assert (entry["prompt"], entry["seed"], entry["steps"]) == (PROMPT, 3, [0, 10, 20])
    assert [(a_run / entry[name]).is_file() for name in ("video", "sheet")] == [True, True]
    frames, _ = read_video(a_run / entry["video"], 512)
    assert (len(frames), frames[0].shape) == (5, (18 + 32, 3 * 32 + 2 * 4, 3))
    # the same as each alone, as sample draws it
    shown = []
    for place, step in enumerate((0, 20)):
        assert sample(SampleOptions((PROMPT,), 3, a_run, step), tmp_path / str(step)) == DONE
        path = next((a_run / "compare").glob(f"*-step-{step:06d}.mp4"))
        assert path.read_bytes() == next((tmp_path / str(step)).glob("*.mp4")).read_bytes()
        kept = read_video(path, 512)[0][2].astype(int)
        left = 36 * (0, 2)[place]
        assert np.abs(frames[2][18:, left : left + 32].astype(int) - kept).mean() < 8  # encoded twice
        shown.append(kept)
    assert np.abs(shown[0] - shown[1]).mean() > 4
    page = (a_run / "report.html").read_text(encoding="utf-8")
    assert "In rows, from the left: base, step 10, step 20." in re.sub(r"<[^>]+>", "", page)


def test_samples_that_exist_are_not_made_again(a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But for one of a checkpoint that is newer."""
    assert compare(a_run, PROMPT, 4, tmp_path) == DONE
    videos = sorted(tmp_path.glob("*-step-*.mp4"))
    before = [video.stat().st_mtime_ns for video in videos]
    assert len(videos) == 3
    videos[1].unlink()
    capsys.readouterr()
    assert compare(a_run, PROMPT, 4, tmp_path) == DONE
    assert "2 of 3 are drawn already" in capsys.readouterr().err
    after = [video.stat().st_mtime_ns for video in videos]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert len(read_json(tmp_path / "compare.json")) == 1
    assert compare(a_run, "another", 4, tmp_path) == DONE
    assert [line["prompt"] for line in read_json(tmp_path / "compare.json")] == [PROMPT, "another"]
    checkpoint = complete_checkpoints(a_run)[0]
    assert cell_of(checkpoint, videos[1]).drawn
    os.utime(videos[1], (1, 1))
    assert not cell_of(checkpoint, videos[1]).drawn


def test_what_cannot_be_compared_is_refused(a_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "plan.json"):
        shutil.copy(a_run / name, other)
    for folder, prompt, named in (
        (a_run, None, "which prompt"),
        (tmp_path, PROMPT, "holds no run"),
        (other, PROMPT, "no checkpoint yet"),
    ):
        with pytest.raises(VideotuneError, match=named):
            compare(folder, prompt, None, None)


def test_the_phases_sum_to_the_wall_time_over_all_processes(a_run: Path) -> None:
    """What is left over is the report, and the process's own end."""
    wall = float((a_run.parent / "wall").read_text())
    seconds = read_json(a_run / "heartbeat.json")["seconds"]
    assert seconds.keys() >= {"starting", "encoding", "loading", "training", "saving", "exporting"}
    assert "ended" not in seconds
    assert 0.8 * wall < sum(seconds.values()) <= wall + 0.01  # rounded to milliseconds
    end = read_journal(a_run)[-1]
    assert end["kind"] == "end"
    assert sum(end["seconds"].values()) == pytest.approx(sum(seconds.values()), rel=0.2)
    steps = sum(sum(line["seconds"].values()) for line in of_kind(a_run, "step"))
    assert steps <= end["seconds"]["training"]


def test_each_clip_has_a_picture_that_the_page_shows(a_run: Path, small_clips: Path) -> None:
    from PIL import Image

    rows = read_json(a_run / "check.json")["clips"]
    pictures = [a_run / "pictures" / f"{row['id'][:16]}.jpg" for row in rows]
    assert len(pictures) == 6
    for row, picture in zip(rows, pictures, strict=True):
        image = np.asarray(Image.open(picture).convert("RGB")).astype(int)
        assert image.shape == (32, 96, 3)
        colour = Path(row["path"]).stem.split("-")[0]
        strongest = {"red": 0, "green": 1, "blue": 2}.get(colour)
        if strongest is not None:  # the shape is of that colour in each of the three frames
            for column in range(3):
                part = image[:, 32 * column : 32 * column + 32].reshape(-1, 3)
                vivid = part[np.ptp(part, axis=1).argmax()]
                assert vivid.argmax() == strongest, (picture, column)
    assert (a_run / "report.html").read_text(encoding="utf-8").count("data:image/jpeg") == 6


def test_of_many_clips_the_first_have_thumbnails(
    overrides: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thumbnails, "MOST", 2)
    job = open_job(*resolve_config(overrides(f"cache_dir={tmp_path / 'cache'}")))
    thumbnails.keep_pictures(job)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "pictures").iterdir()}
    assert len(made) == 2
    thumbnails.keep_pictures(job)
    assert made == {path: path.stat().st_mtime_ns for path in made}
