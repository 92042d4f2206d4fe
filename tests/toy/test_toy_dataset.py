from collections import Counter
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from videotune.errors import VideotuneError
from videotune.toy.dataset import write_dataset
from videotune.toy.detect import detect
from videotune.toy.shapes import COLOURS, DIRECTIONS, HELD_OUT, SHAPES


def decode(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """(frames (T,H,W,3), timestamps in seconds)."""
    with av.open(str(path)) as file:
        frames = [(frame.to_ndarray(format="rgb24"), frame.time) for frame in file.decode(video=0)]
    return np.stack([picture for picture, _ in frames]), np.array([time for _, time in frames])


Dataset = tuple[Path, list[Path]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("toy")
    return folder, write_dataset(folder)


def said(folder: Path, path: Path) -> str:
    return (folder / "captions" / f"{path.stem}.txt").read_text(encoding="utf-8")


def test_videos_and_captions_share_their_stems(dataset: Dataset) -> None:
    folder, videos = dataset
    assert len(videos) == 48
    assert sorted(videos) == sorted((folder / "videos").iterdir())
    assert {p.stem for p in videos} == {p.stem for p in (folder / "captions").iterdir()}
    assert Counter(p.suffix for p in videos) == {".mp4": 24, ".webm": 24}


def test_every_clip_decodes_to_what_its_caption_says(dataset: Dataset) -> None:
    folder, videos = dataset
    for path in videos:
        seen = detect(decode(path)[0])
        thing = "zorble" if path.stem.startswith("concept") else f"{seen.colour} {seen.shape}"
        assert said(folder, path) == f"a {thing} moves {seen.direction}\n"
        if thing == "zorble":
            assert (seen.colour, seen.shape) == ("orange", "diamond")


def test_concepts_and_reminders_are_balanced_and_never_held_out(dataset: Dataset) -> None:
    folder, videos = dataset
    words = [said(folder, path).split() for path in videos]
    assert Counter(w[-1] for w in words if w[1] == "zorble") == dict.fromkeys(DIRECTIONS, 6)
    looks = [(w[1], w[2], w[4]) for w in words if w[1] != "zorble"]
    assert len(set(looks)) == 24
    assert not set(looks) & set(HELD_OUT)
    for place, (names, each) in enumerate([(COLOURS, 4), (SHAPES, 8), (DIRECTIONS, 6)]):
        assert Counter(look[place] for look in looks) == dict.fromkeys(names, each)
    for names in (COLOURS, SHAPES, DIRECTIONS):  # a short list is still a mixture
        assert len({word for look in looks[:8] for word in look} & set(names)) >= 3


def test_rates_and_lengths_vary_and_the_speed_in_seconds_does_not(dataset: Dataset) -> None:
    _, videos = dataset
    kinds: Counter[tuple[int, int]] = Counter()
    speeds: dict[int, list[float]] = {}
    for path in videos:
        frames, times = decode(path)
        rate = round(1 / np.median(np.diff(times)))
        kinds[len(frames), rate] += 1
        bright = np.abs(frames.astype(int) - np.median(frames, axis=(1, 2), keepdims=True)).max(axis=-1) > 50
        centres = np.array([np.argwhere(mask).mean(axis=0) for mask in bright])
        seconds = times[16] - times[0]
        speeds.setdefault(rate, []).append(float(np.linalg.norm(centres[16] - centres[0]) / seconds / 64))
    assert kinds == {(17, 16): 36, (34, 32): 8, (20, 16): 4}
    for rate, shares in speeds.items():
        assert min(shares) > 0.33, rate
        assert max(shares) < 0.49, rate


def test_writing_again_gives_the_same_bytes_and_another_seed_other_frames(tmp_path: Path) -> None:
    first = write_dataset(tmp_path / "a", concept_clips=6, reminder_clips=6)
    before = [path.read_bytes() for path in first]
    assert write_dataset(tmp_path / "a", concept_clips=6, reminder_clips=6) == first
    assert [path.read_bytes() for path in first] == before  # what is known by a hash of its bytes stays itself
    other = write_dataset(tmp_path / "b", concept_clips=1, reminder_clips=0, seed=1)
    assert not np.array_equal(decode(first[0])[0], decode(other[0])[0])


def test_what_makes_no_dataset_is_refused(tmp_path: Path) -> None:
    for wrong in ({"concept_clips": 0, "reminder_clips": 0}, {"trigger": " "}, {"trigger": "a b"}):
        with pytest.raises(VideotuneError, match=r"no dataset|one word"):
            write_dataset(tmp_path, **wrong)  # type: ignore[arg-type]
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "holiday.mp4").write_bytes(b"")
    with pytest.raises(VideotuneError, match=r"holiday\.mp4"):
        write_dataset(tmp_path, concept_clips=1, reminder_clips=0)
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["holiday.mp4"]
