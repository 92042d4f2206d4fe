"""The toy: clips as its captions say, a detector that reads them, and the base model
that is shipped.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from numpy.typing import NDArray
from toymaking import finish
from toymaking.autoencoder import held_out_clips, psnr, rebuilt
from toymaking.motion import Motion, motion

from videotune.errors import VideotuneError
from videotune.models.base_model import place
from videotune.toy.dataset import CONCEPT, write_dataset
from videotune.toy.detection import Detection, detect
from videotune.toy.shapes import (
    COLOURS,
    COMBINATIONS,
    DIRECTIONS,
    HELD_OUT,
    KNOWN,
    SHAPES,
    TEMPLATES,
    Look,
    caption,
    draw_clip,
)


def decode(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """(frames (T,H,W,3), timestamps in seconds)."""
    with av.open(str(path)) as file:
        frames = [
            (frame.to_ndarray(format="rgb24"), frame.time)
            for frame in file.decode(video=0)
        ]
    return np.stack([picture for picture, _ in frames]), np.array(
        [time for _, time in frames]
    )


Dataset = tuple[Path, list[Path]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("toy")
    return folder, write_dataset(folder)


def said(folder: Path, path: Path) -> str:
    return (folder / "captions" / f"{path.stem}.txt").read_text(encoding="utf-8")


def balanced(looks: Sequence[Sequence[str]]) -> bool:
    """Whether 24 looks have each colour, shape and direction alike often."""
    wanted = (
        dict.fromkeys(COLOURS, 4),
        dict.fromkeys(SHAPES, 8),
        dict.fromkeys(DIRECTIONS, 6),
    )
    return all(
        Counter(look[i] for look in looks) == each for i, each in enumerate(wanted)
    )


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
        thing = (
            "zorble"
            if path.stem.startswith("concept")
            else f"{seen.colour} {seen.shape}"
        )
        assert said(folder, path) == f"a {thing} moves {seen.direction}\n"
        if thing == "zorble":
            assert (seen.colour, seen.shape) == ("orange", "diamond")


def test_concepts_and_reminders_are_balanced_and_never_held_out(
    dataset: Dataset,
) -> None:
    folder, videos = dataset
    words = [said(folder, path).split() for path in videos]
    assert Counter(w[-1] for w in words if w[1] == "zorble") == dict.fromkeys(
        DIRECTIONS, 6
    )
    looks = [(w[1], w[2], w[4]) for w in words if w[1] != "zorble"]
    assert len(set(looks)) == 24
    assert not set(looks) & set(HELD_OUT)
    assert balanced(looks)
    for names in (COLOURS, SHAPES, DIRECTIONS):  # a short list is still a mixture
        assert len({word for look in looks[:8] for word in look} & set(names)) >= 3


def test_rates_and_lengths_vary_and_the_speed_in_seconds_does_not(
    dataset: Dataset,
) -> None:
    _, videos = dataset
    kinds: Counter[tuple[int, int]] = Counter()
    speeds: dict[int, list[float]] = {}
    for path in videos:
        frames, times = decode(path)
        rate = round(1 / np.median(np.diff(times)))
        kinds[len(frames), rate] += 1
        bright = (
            np.abs(
                frames.astype(int) - np.median(frames, axis=(1, 2), keepdims=True)
            ).max(axis=-1)
            > 50
        )
        centres = np.array([np.argwhere(mask).mean(axis=0) for mask in bright])
        seconds = times[16] - times[0]
        speeds.setdefault(rate, []).append(
            float(np.linalg.norm(centres[16] - centres[0]) / seconds / 64)
        )
    assert kinds == {(17, 16): 36, (34, 32): 8, (20, 16): 4}
    for rate, shares in speeds.items():
        assert min(shares) > 0.33, rate
        assert max(shares) < 0.49, rate


def test_writing_again_gives_the_same_bytes_and_another_seed_other_frames(
    tmp_path: Path,
) -> None:
    first = write_dataset(tmp_path / "a", concept_clips=6, reminder_clips=6)
    before = [path.read_bytes() for path in first]
    assert write_dataset(tmp_path / "a", concept_clips=6, reminder_clips=6) == first
    assert [
        path.read_bytes() for path in first
    ] == before  # what is known by a hash of its bytes stays itself
    other = write_dataset(tmp_path / "b", concept_clips=1, reminder_clips=0, seed=1)
    assert not np.array_equal(decode(first[0])[0], decode(other[0])[0])


def test_what_makes_no_dataset_is_refused(tmp_path: Path) -> None:
    for wrong in (
        {"concept_clips": 0, "reminder_clips": 0},
        {"trigger": " "},
        {"trigger": "a b"},
    ):
        with pytest.raises(VideotuneError, match=r"no dataset|one word"):
            write_dataset(tmp_path, **wrong)  # type: ignore[arg-type]
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "holiday.mp4").write_bytes(b"")
    with pytest.raises(VideotuneError, match=r"holiday\.mp4"):
        write_dataset(tmp_path, concept_clips=1, reminder_clips=0)
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["holiday.mp4"]


def test_the_held_out_combinations_are_a_balanced_third() -> None:
    assert (len(COMBINATIONS), len(HELD_OUT), len(KNOWN)) == (72, 24, 48)
    assert set(HELD_OUT) | set(KNOWN) == set(COMBINATIONS)
    assert ("red", "circle", "left") in HELD_OUT
    for part in (HELD_OUT, KNOWN[:24], KNOWN[24:]):
        assert balanced(part)


def test_each_disturbance_is_seen_by_its_own_measure() -> None:
    clip = draw_clip(np.random.default_rng(4), "red", "square", "left").astype(
        np.float32
    )
    calm = motion(clip)
    assert calm.energy > 5
    assert (calm.flicker, calm.shimmer) == (0, 0)
    assert calm.jerk < 0.05
    assert motion(np.repeat(clip[8:9], 17, axis=0)) == Motion(
        0, 0, 0, pytest.approx(0, abs=1e-6)
    )
    blinking = np.where(np.arange(len(clip)) % 2, 4.0, 0.0)[:, None, None, None]
    subject = np.abs(clip - clip[0, 0, 0]).max(axis=-1, keepdims=True) > 50
    dark = motion(clip + blinking * ~subject)
    assert dark.flicker == pytest.approx(8)
    assert (dark.shimmer, dark.jerk) == (
        calm.shimmer,
        pytest.approx(calm.jerk, abs=0.02),
    )
    lit = motion(clip - blinking * subject)
    assert lit.shimmer == pytest.approx(8)
    assert (lit.flicker, lit.jerk) == (calm.flicker, pytest.approx(calm.jerk, abs=0.02))
    shaken = motion(
        np.stack([np.roll(frame, 2 * (i % 2), axis=0) for i, frame in enumerate(clip)])
    )
    assert shaken.jerk == pytest.approx(4, abs=0.2)
    assert (shaken.flicker, shaken.shimmer) == (0, 0)
    clip[5] = clip[5, 0, 0]
    assert motion(clip) is None, "without a subject"


ZORBLES = [("orange", "diamond", direction) for direction in DIRECTIONS]


def looks(count: int, seed: int) -> list[Look]:
    """Mostly what the base knows, one in five the orange diamond."""
    rng = np.random.default_rng(seed)
    return [
        ZORBLES[i // 5 % 4] if i % 5 == 0 else COMBINATIONS[rng.integers(72)]
        for i in range(count)
    ]


def share_right(clips: list[NDArray[np.uint8]], wanted: list[Look]) -> float:
    seen = [detect(clip) for clip in clips]
    return float(
        np.mean(
            [
                (s.colour, s.shape, s.direction) == look
                for s, look in zip(seen, wanted, strict=True)
            ]
        )
    )


def test_drawn_clips_are_read_right() -> None:
    rng = np.random.default_rng(3)
    wanted = looks(60, seed=1)
    clips = [draw_clip(rng, *look) for look in wanted]
    assert share_right(clips, wanted) >= 0.95
    seen = detect(clips[0])
    assert seen.visible_frames == 17
    assert seen.iou > 0.97


@pytest.mark.parametrize("side", [32, 160])
def test_reading_scales_with_the_side(side: int) -> None:
    rng = np.random.default_rng(7)
    wanted = looks(10, seed=3)
    assert (
        share_right([draw_clip(rng, *look, side=side) for look in wanted], wanted) == 1
    )


def test_a_shape_in_less_than_half_of_the_frames_does_not_count() -> None:
    clip = draw_clip(np.random.default_rng(0), "red", "circle", "up")
    clip[8:] = 40
    assert detect(clip) == Detection(None, None, None, 8, 0.0)
    clip[8] = clip[0]
    assert detect(clip).colour == "red"
    assert detect(np.full((17, 64, 64, 3), 40, np.uint8)) == Detection(
        None, None, None, 0, 0.0
    ), "empty"
    seen = detect(np.repeat(clip[:1], 17, axis=0))
    assert (seen.colour, seen.shape, seen.direction) == ("red", "circle", None), (
        "it stands still"
    )


@pytest.fixture(scope="module")
def pipeline() -> Any:
    found = WanPipeline.from_pretrained(place("asset:toy").folder, dtype=torch.float32)
    found.set_progress_bar_config(disable=True)
    return found


def drawn(pipeline: Any, count: int) -> dict[str, float]:
    """What the detector says of so many samples of held-out looks, each look with each
    template before one comes twice.
    """
    looks = [HELD_OUT[index * 7 % 24] for index in range(count)]
    captions = [
        caption(*look, (index + index // 24) % len(TEMPLATES))
        for index, look in enumerate(looks)
    ]
    return finish.shares(finish.sample(pipeline, captions, list(range(count))), looks)


def test_the_shipped_autoencoder_rebuilds_clips_that_it_never_saw() -> None:
    vae = AutoencoderKLWan.from_pretrained(
        place("asset:toy").folder / "vae", torch_dtype=torch.float32
    )
    clips = held_out_clips("base", 4)
    assert psnr(clips, rebuilt(vae, clips)) >= 32
    concept = finish.to_bytes(rebuilt(vae, held_out_clips("concept", 2)))
    assert [(one.colour, one.shape) for one in map(detect, concept)] == [CONCEPT] * 2


def test_the_shipped_model_draws_what_no_caption_of_its_training_said(
    pipeline: Any,
) -> None:
    shares = drawn(pipeline, 8)
    assert (
        min(shares[name] for name in ("colour", "shape", "direction")) >= 0.75
    )  # at most two of eight are wrong


@pytest.mark.long
def test_the_shipped_model_draws_48_held_out_combinations(pipeline: Any) -> None:
    shares = drawn(pipeline, 48)
    assert shares["colour"] >= 0.95
    assert min(shares["shape"], shares["direction"]) >= 0.85


def test_nothing_that_is_shipped_names_a_folder_of_its_making() -> None:
    folder = place("asset:toy").folder
    assert not [
        path for path in folder.rglob("*.json") if "_name_or_path" in path.read_text()
    ]
