"""What is shown while a cache is filled, and what a run reads from it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.trainers import Lab, job_of
from videotune import console
from videotune.latent_cache.cache_items import CacheItems
from videotune.latent_cache.store import LatentCache
from videotune.trainer.build import open_models
from videotune.trainer.cache_filling import (
    _echo_masks_without_effect,
    _print_encoded,
    echo_truncated,
    fill_cache,
    items_text,
    reads_of,
    texts_of,
)
from videotune.types import DETERMINISTIC_VARIANT


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


def items_of(
    captions: int, samples: int, masks: int = 0, conditions: int = 0
) -> CacheItems:
    parts: Any = [(None,) * count for count in (captions, samples, masks, conditions)]
    return CacheItems(*parts)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        (items_of(1, 2), "1 caption and 2 windows"),
        (items_of(3, 1, masks=1), "3 captions, 1 window and 1 mask"),
        (items_of(0, 0, conditions=2), "0 captions, 0 windows and 2 conditions"),
        (
            items_of(2, 3, masks=4, conditions=1),
            "2 captions, 3 windows, 4 masks and 1 condition",
        ),
    ],
)
def test_what_is_encoded_is_counted_by_kind(items: CacheItems, text: str) -> None:
    assert items_text(items) == text


@pytest.mark.parametrize(
    ("seconds", "waited", "hint"),
    [(5.0, 5.0, None), (5.5, 1.1, None), (5.5, 1.65, "30%"), (100.0, 21.0, "21%")],
)
def test_long_waits_for_frames_are_told_with_their_remedy(
    seconds: float,
    waited: float,
    hint: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From five seconds, and a fifth of them, on."""
    store: Any = SimpleNamespace(folder="FOLDER")
    _print_encoded(store, items_of(1, 2), seconds=seconds, waited=waited)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("encoded 1 caption and 2 windows into FOLDER in ")
    assert ("dataloader_threads" in line) is (hint is not None)
    assert hint is None or f"; {hint} of it waiting" in line


def test_captions_that_are_cut_are_counted_and_the_first_is_shown(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(lab)
    echo_truncated(job, [])
    _echo_masks_without_effect(0)
    assert capsys.readouterr().err == ""
    echo_truncated(job, ["x" * 59 + "yz", "other"])
    warning, first = capsys.readouterr().err.splitlines()
    tokens = f"{job.spec.text_tokens} tokens that {job.spec.title} reads"
    assert warning.startswith("warning: 2 captions are cut: ")
    assert tokens in warning
    assert first == f"  the first begins '{'x' * 59}y'"
    _echo_masks_without_effect(1)
    assert "mask: 1 mask hide" in capsys.readouterr().err


def test_a_run_reads_its_captions_and_each_variant_of_what_varies(
    lab: Lab, small_clips: Path
) -> None:
    plain = job_of(lab, {"video_config.variants": 3})
    window = plain.library.windows[0]
    reads = reads_of(plain, ["a prompt", "a prompt"], [window])
    captions = list(dict.fromkeys(c for x in plain.library.clips for c in x.captions))
    assert (
        reads.captions == (*captions, "", "a prompt") == texts_of(plain, ["a prompt"])
    )
    samples = [(each, 0) for each in plain.library.windows]
    assert list(reads.samples) == [*samples, (window, DETERMINISTIC_VARIANT)]

    mirrored = [{"path": str(small_clips), "flip": "always"}]
    varied = job_of(lab, {"datasets": mirrored, "video_config.variants": 3})
    assert list(reads_of(varied).samples) == [
        (each, variant) for each in varied.library.windows for variant in range(3)
    ]
