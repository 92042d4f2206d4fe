"""Notes on a dataset as a whole are true, and are given where they help."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.clips import noise, write_clip, write_image
from tests.support.datasets import scanned
from videotune.data.remarks import code_of, shown_first


def frame_notes(folder: Path, **video: Any) -> list[str]:
    library = scanned(folder, video_config=video)
    return [note for note in library.notes if " frames: " in note]


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        ({"frames": [5, 33], "max_duration": 1.0}, "max_duration"),
        ({"frames": 33, "max_duration": 1.0}, "max_duration"),
        ({"frames": [5, 33]}, None),
        ({"frames": [5, 101]}, "long enough"),
        ({"frames": [5, 101], "max_duration": 1.0}, "long enough"),
        (
            {
                "frames": [5, 33],
                "frame_sample_strategy": "keyframe",
                "keyframe_source": "container",
                "windows": "head",
            },
            None,
        ),
    ],
)
def test_why_no_window_has_a_frame_count(
    tmp_path: Path, video: dict[str, Any], reason: str | None
) -> None:
    """A clip of 48 frames; what keeps it from a count is the clip or the setting."""
    write_clip(tmp_path / "a.mp4", noise(48), fps=16)
    notes = [
        note
        for note in frame_notes(tmp_path, **video)
        if "long enough" in note or "no window" in note
    ]
    assert len(notes) == (reason is not None)
    if reason:
        assert reason in notes[0]


def test_seconds_that_no_window_may_use_are_reported_with_what_uses_them(
    tmp_path: Path,
) -> None:
    """A clip of 3 s and one of 1 s; a tenth that is unused is too little to be told."""
    write_clip(tmp_path / "a.mp4", noise(48), fps=16)
    write_clip(tmp_path / "b.mp4", noise(16), fps=16)

    def notes_at(max_duration: float) -> list[str]:
        settings = {"frames": 17, "max_duration": max_duration}
        library = scanned(tmp_path, video_config=settings)
        return [note for note in library.notes if code_of(note) == "long_clips"]

    (note,) = notes_at(1.5)
    assert "1 clip is longer" in note
    assert "1.5 of the 4 s" in note
    assert note in shown_first(["one", "two", note]), "it is told without --verbose"
    advised = re.search(r"--set video_config\.max_duration=(\S+)", note)
    assert advised
    assert notes_at(float(advised[1])) == []
    assert notes_at(2.7) == []


def test_single_frames_that_outnumber_the_other_windows_are_reported(
    tmp_path: Path,
) -> None:
    write_clip(tmp_path / "a.mp4", noise(48), fps=16)
    library = scanned(tmp_path, video_config={"frames": [1, 33]})
    assert any("single frames" in note for note in library.notes)
    library = scanned(tmp_path, video_config={"frames": [17, 33]})
    assert not any("single frames" in note for note in library.notes)


@pytest.mark.parametrize(
    ("count", "gap", "odd", "is_series"),
    [
        (16, None, False, True),
        (15, None, False, False),
        (17, 8, False, False),
        (17, None, True, True),
    ],
)
def test_numbered_stills_may_be_a_video(
    tmp_path: Path, count: int, gap: int | None, odd: bool, is_series: bool
) -> None:
    """Sixteen of one size without a gap; one of another size ends the series."""
    for number in range(count):
        if number != gap:
            size = 32 if odd and number == count - 1 else 64
            picture = noise(1, size, 96, seed=number)[0]
            write_image(tmp_path / "walk" / f"frame_{number:04d}.png", picture)
    notes = [note for note in scanned(tmp_path).notes if "numbered" in note]
    assert len(notes) == is_series


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(64, 96), (160, 192)], "1 of 2 clips is enlarged, up to 1.5x"),
        ([(64, 96), (80, 112)], "2 of 2 clips are enlarged, up to 1.5x"),
        ([(96, 144)], None),
        ([(12, 20)], "1 of 1 clip is enlarged"),
    ],
)
def test_enlarged_clips_are_counted(
    tmp_path: Path, sizes: list[tuple[int, int]], expected: str | None
) -> None:
    """Frames of these (height, width) are trained at an area of 128 x 128."""
    write_sizes(tmp_path, sizes)
    notes = [
        note for note in scanned(tmp_path, resolution=128).notes if "enlarged" in note
    ]
    if expected is None:
        assert notes == []
        return
    (note,) = notes
    assert note.startswith(expected)


def write_sizes(folder: Path, sizes: list[tuple[int, int]]) -> None:
    """Clips of these (height, width)."""
    for number, (height, width) in enumerate(sizes):
        frames = noise(24, height, width, seed=number)
        write_clip(folder / f"{number}.mp4", frames, fps=16)


@pytest.mark.parametrize(
    ("sizes", "recommended"),
    [
        ([(96, 64), (160, 192), (160, 192)], None),
        ([(64, 96), (96, 64)], "64"),
        ([(64, 96), (64, 96)], "64x96"),
    ],
)
def test_no_resolution_is_recommended_that_spoils_other_clips(
    tmp_path: Path, sizes: list[tuple[int, int]], recommended: str | None
) -> None:
    """One number is an area in each clip's own shape."""
    write_sizes(tmp_path, sizes)
    notes = scanned(tmp_path, resolution=128).notes
    (note,) = [note for note in notes if "enlarged" in note]
    if recommended is None:
        assert "--set" not in note
        assert "leave them out" in note
    else:
        assert f"--set resolution={recommended} " in note


@pytest.mark.parametrize(
    ("height", "width", "recommended"),
    [(84, 116, "80x112"), (12, 40, None), (40, 12, None)],
)
def test_the_size_that_is_recommended_can_be_trained(
    tmp_path: Path, height: int, width: int, recommended: str | None
) -> None:
    """Sides are multiples of the model's 16, and none is 0."""
    write_clip(tmp_path / "a.mp4", noise(24, height, width), fps=16)
    (note,) = [n for n in scanned(tmp_path, resolution=160).notes if "enlarged" in n]
    assert f"resolution={recommended} " in note if recommended else "set" not in note
