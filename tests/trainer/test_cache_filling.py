"""What is shown while a cache is filled, and what a run reads from it."""

from pathlib import Path

import pytest

from tests.support.trainers import Lab, job_of
from videotune import console
from videotune.latent_cache.store import LatentCache
from videotune.trainer.build import open_models
from videotune.trainer.cache_filling import fill_cache, reads_of


@pytest.fixture
def lab(tmp_path: Path, small_clips: Path) -> Lab:
    return Lab(Path("asset:toy"), small_clips, tmp_path / "cache", tmp_path)


def test_progress_is_shown_with_its_title_and_given_to_who_asks(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    job = job_of(lab)
    family = open_models(job.spec, job.base, job.config)
    told: list[tuple[str, int, int]] = []
    fill_cache(
        job,
        family,
        LatentCache(job.cache),
        reads_of(job),
        on_progress=lambda *progress: told.append(progress),
    )
    shown = [line for line in capsys.readouterr().err.splitlines() if "/" in line]
    lines = [line for line in shown if line.startswith("encoding: ")]
    assert len(lines) == len(told) > 2
    for line, (subject, done, total) in zip(lines, told, strict=True):
        assert line.startswith(f"encoding: {done}/{total}  {subject}")
