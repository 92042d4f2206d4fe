"""What the keys about clips, frames and captions do to the frames that are encoded and
to the batches that are trained.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from tests.support.clips import noise, numbered, read_numbers, write_clip, write_dataset
from tests.support.run_parts import measure
from tests.support.run_results import of_kind
from tests.support.trainers import (
    Lab,
    in_cache,
    job_of,
    pixels,
    run_steps,
    source_of,
    text_of,
    trainer_of,
)
from videotune.data.remarks import codes_of
from videotune.errors import DoesNotFit, VideotuneError
from videotune.job.skips import refuse_skips
from videotune.latent_cache.batches import make_step_batch
from videotune.rng import generator_for
from videotune.validation.overhead import notes_on_validations

Counted = Callable[..., list[list[int]]]


@pytest.fixture
def counted(lab: Lab) -> Counted:
    """A function from a clip's length and rate, and knobs, to the numbers that were
    painted into each window's frames.
    """

    def read(length: int, fps: float = 16, **knobs: Any) -> list[list[int]]:
        folder = lab.tmp / f"{length}@{fps}"
        if not folder.exists():
            write_dataset(folder, {"clip.mp4": numbered(length, 48, 48)}, {}, fps)
        settings = {
            f"video_config.{name}": value
            for name, value in ({"frames": None} | knobs).items()
        }
        return [
            read_numbers(clip)
            for clip in pixels(
                job_of(lab, {"resolution": "48x48"} | settings, folder)
            ).values()
        ]

    return read


def coloured(folder: Path, channel: int) -> Path:
    """A folder of one clip that is red, green or blue."""
    frames = np.zeros((9, 32, 32, 3), np.uint8)
    frames[..., channel] = 200
    return write_dataset(folder, {"clip.mp4": frames}, {}, fps=16)


@pytest.mark.effect("datasets.path")
def test_the_clips_are_those_of_the_folders(lab: Lab) -> None:
    rows = [
        {"path": str(coloured(lab.tmp / f"folder {channel}", channel))}
        for channel in range(3)
    ]

    def channels(*chosen: int) -> list[int]:
        seen = pixels(job_of(lab, {"datasets": [rows[i] for i in chosen]}))
        return [int(frames.mean((0, 1, 2)).argmax()) for frames in seen.values()]

    assert channels(0) == [0]
    assert channels(2) == [2]
    assert channels(1, 2) == [1, 2]


@pytest.mark.effect("datasets.trigger")
def test_the_trigger_stands_before_captions_that_lack_it(lab: Lab) -> None:
    for name, caption in (("a", "a cat"), ("b", "the Zorble jumps")):
        write_clip(
            lab.tmp / "data" / f"{name}.mp4", noise(9, 32, 32, seed=ord(name)), 16
        )
        (lab.tmp / "data" / f"{name}.txt").write_text(caption, encoding="utf-8")

    def texts(trigger: str | None) -> torch.Tensor:
        row = {"path": str(lab.tmp / "data"), "trigger": trigger}
        knobs = {"datasets": [row], "batch_size": 2, "shuffle": False}
        return make_step_batch(source_of(lab, knobs), 1).batch.conditioning.text

    assert torch.equal(texts(None), text_of(lab, "a cat", "the Zorble jumps"))
    assert torch.equal(
        texts("zorble"), text_of(lab, "zorble, a cat", "the Zorble jumps")
    )


@pytest.mark.effect("cache_dir")
def test_encoded_clips_lie_in_the_cache_folder(lab: Lab) -> None:
    data = coloured(lab.tmp / "data", 0)

    def files(knob: str | None, folder: Path) -> int:
        source_of(replace(lab, cache=Path("unused")), {"cache_dir": knob}, data)
        return len(list(folder.rglob("latents/*/*.safetensors")))

    here, there = lab.tmp / "here", lab.tmp / "there"
    assert (files(str(here), here), there.exists()) == (1, False)
    assert files(str(there), there) == 1
    assert files(None, data / ".videotune-cache") == 1


@pytest.mark.effect("resolution")
@pytest.mark.parametrize(
    ("resolution", "size"),
    [
        ("32x48", (32, 48)),
        ("64x32", (64, 32)),
        (64, (48, 80)),
        (32, (32, 48)),
        (["32x32", "64x96", 128], (64, 96)),
    ],
)
def test_clips_are_encoded_at_the_resolution(
    lab: Lab, resolution: Any, size: tuple[int, int]
) -> None:
    """A 64 x 96 clip: a pair exactly; a number as an area at the clip's aspect; of a
    list the largest that it fills.
    """
    data = write_dataset(
        lab.tmp / "data", {"clip.mp4": numbered(9, 64, 96)}, {}, fps=16
    )
    knobs = {"resolution": resolution}
    (frames,) = pixels(job_of(lab, knobs, data)).values()
    assert frames.shape[1:3] == size
    batch = make_step_batch(source_of(in_cache(lab, "own"), knobs, data), 1).batch
    assert batch.x0.shape[-2:] == (size[0] // 8, size[1] // 8)


@pytest.mark.effect("width", "height")
def test_width_and_height_are_a_resolution_whose_sides_are_named(lab: Lab) -> None:
    data = write_dataset(
        lab.tmp / "data", {"clip.mp4": numbered(9, 64, 96)}, {}, fps=16
    )
    for width, height in ((96, 64), (64, 48)):
        (frames,) = pixels(
            job_of(lab, {"resolution": None, "width": width, "height": height}, data)
        ).values()
        assert frames.shape[1:3] == (height, width)


@pytest.mark.effect("allow_crop")
def test_a_crop_that_takes_most_of_every_clip_must_be_allowed(lab: Lab) -> None:
    """Height and width exchanged: of clips 96 wide and 64 high, frames 32 wide and 96
    high keep less than a quarter.
    """
    data = write_dataset(
        lab.tmp / "data", {"clip.mp4": numbered(9, 64, 96)}, {}, fps=16
    )
    for knobs, refused in (
        ({}, True),
        ({"allow_crop": True}, False),
        ({"resize": "pad"}, False),
    ):
        job = job_of(lab, {"resolution": "96x32", **knobs}, data)
        with (
            pytest.raises(DoesNotFit, match="width=96 and height=32")
            if refused
            else nullcontext()
        ):
            refuse_skips(job, "all")


def chunks(*starts: int, frames: int = 9) -> list[list[int]]:
    return [list(range(start, start + frames)) for start in starts]


WINDOWS: list[tuple[int, float, dict[str, Any], list[list[int]]]] = [
    # 4n + 1 frames, the nearest to what was asked, ties upward; ``frames`` wins over
    # ``max_frames``
    (17, 16, {"frames": 9}, chunks(0)),
    (17, 16, {"frames": 17}, chunks(0, frames=17)),
    (17, 16, {"max_frames": 8}, chunks(0)),
    (17, 16, {"max_frames": 16}, chunks(0, frames=17)),
    (17, 16, {"max_frames": 15}, chunks(0, frames=17)),
    (17, 16, {"max_frames": 14}, chunks(0, frames=13)),
    (17, 16, {"frames": 9, "max_frames": 17}, chunks(0)),
    (17, 16, {"frames": 17, "max_frames": 9}, chunks(0, frames=17)),
    (17, 16, {"frames": 8, "strict_frames": False}, chunks(0)),
    (17, 16, {"frames": 9, "strict_frames": True}, chunks(0)),
    # a clip of 7 frames gives a window of 5, unless it may hold its last frame
    (7, 16, {"frames": 9}, chunks(0, frames=5)),
    (7, 16, {"frames": 9, "min_frames": 5}, chunks(0, frames=5)),
    (3, 16, {"frames": 9, "min_frames": 1}, [[0]]),
    (7, 16, {"frames": 9, "pad_short": "freeze"}, [[0, 1, 2, 3, 4, 5, 6, 6, 6]]),
    (30, 16, {"frames": 9, "windows": "chunks"}, chunks(0, 9, 18)),
    (30, 16, {"frames": 9, "windows": "head"}, chunks(0)),
    (30, 16, {"frames": 9, "windows": "slide"}, chunks(0, 4, 8, 12, 16, 20)),
    (
        30,
        16,
        {"frames": 9, "windows": "slide", "window_stride": 7},
        chunks(0, 7, 14, 21),
    ),
    (30, 16, {"frames": 9, "windows": "chunks", "window_stride": 7}, chunks(0, 9, 18)),
    # from 32 frames a second: the model's own 16 show every second one, 8 every fourth,
    # 64 each of them twice
    (40, 32, {"frames": 5, "windows": "head"}, [[0, 2, 4, 6, 8]]),
    (40, 32, {"frames": 5, "windows": "head", "target_fps": 32}, [[0, 1, 2, 3, 4]]),
    (40, 32, {"frames": 5, "windows": "head", "target_fps": 8}, [[0, 4, 8, 12, 16]]),
    (40, 32, {"frames": 5, "windows": "head", "target_fps": 64}, [[0, 0, 1, 1, 2]]),
    # 2.5 s at 16 fps hold eight windows of 5; 1 s holds three; 0.5 s holds 8 frames, so
    # one
    (40, 16, {"frames": 5}, chunks(*range(0, 40, 5), frames=5)),
    (40, 16, {"frames": 5, "max_duration": 1}, chunks(0, 5, 10, frames=5)),
    (40, 16, {"frames": 9, "max_duration": 0.5}, chunks(0, frames=5)),
    (36, 16, {"frames": 9}, chunks(0, 9, 18, 27)),
    (36, 16, {"frames": 9, "stretch": True}, [list(range(0, 36, 4))]),
    # the VAE's own ratio is 4
    (17, 16, {"frames": 17, "temporal_compression_ratio": 4}, chunks(0, frames=17)),
    (17, 16, {"frames": 17, "temporal_compression_ratio": 8}, [list(range(0, 17, 2))]),
]
"""A clip's frames and rate, the keys of video_config, and the numbers of the frames of
each window.
"""


@pytest.mark.effect(
    "video_config.frames", "video_config.max_frames", "video_config.min_frames",
    "video_config.windows", "video_config.window_stride", "video_config.target_fps", "video_config.max_duration",
    "video_config.pad_short", "video_config.stretch", "video_config.temporal_compression_ratio",
)  # fmt: skip
@pytest.mark.parametrize(("length", "fps", "knobs", "wanted"), WINDOWS)
def test_the_frames_of_each_window(
    length: int,
    fps: float,
    knobs: dict[str, Any],
    wanted: list[list[int]],
    counted: Counted,
) -> None:
    assert counted(length, fps, **knobs) == wanted


@pytest.mark.effect("video_config.strict_frames")
def test_a_frame_count_that_the_model_cannot_take_is_snapped_or_refused(
    lab: Lab,
) -> None:
    knobs = {"video_config.frames": 8}
    for strict in ({}, {"video_config.strict_frames": False}):
        (shape,) = job_of(lab, knobs | strict).shapes
        assert shape.frames == 9
    with pytest.raises(VideotuneError, match=r"frames.*8.*9"):
        job_of(lab, knobs | {"video_config.strict_frames": True})


@pytest.mark.effect("video_config.frames")
@pytest.mark.parametrize(
    ("length", "frames", "counts"),
    [
        (24, [5, 17], [17, 5, 5, 5, 5]),  # 17 once, 5 four times
        (24, [17, 5, 17], [17, 5, 5, 5, 5]),
        (12, [5, 17], [5, 5]),  # too short for 17
        (24, [1, 21], [21] + [1] * 24),
        (7, [9, 17], [5]),  # too short for both: as a run of the smaller one samples it
    ],
)
def test_several_frame_counts_give_windows_of_each(
    length: int, frames: list[int], counts: list[int], counted: Counted
) -> None:
    found = counted(length, 16, frames=frames)
    assert [len(window) for window in found] == counts
    for count in set(counts):
        alone = counted(length, 16, frames=count) if count in frames else None
        assert (
            alone is None
            or [window for window in found if len(window) == count] == alone
        )


@pytest.mark.effect("datasets.caption_weights")
def test_captions_of_a_clip_are_drawn_as_often_as_their_weights_say(lab: Lab) -> None:
    data = write_dataset(
        lab.tmp / "data",
        {"a.mp4": noise(9, 32, 32, seed=1)},
        {"a.mp4": "long\nshort\nother"},
        fps=16,
    )

    def captions(weights: list[float] | None) -> list[str]:
        row = {"path": str(data)} | ({"caption_weights": weights} if weights else {})
        source = source_of(lab, {"datasets": [row], "caption_dropout": 0.0}, data=None)
        steps = range(1, 301)
        return [make_step_batch(source, step).captions[0] for step in steps]

    def expected(weights: list[float]) -> list[str]:
        """Look the draws up in the weights' cumulative distribution."""
        limits = np.cumsum(weights) / np.sum(weights)
        names = []
        for step in range(1, 301):
            generator = generator_for(0, "caption", step, 0)
            generator.random()  # whether the caption is dropped
            drawn = np.searchsorted(limits, generator.random(), side="right")
            names.append(("long", "short", "other")[drawn])
        return names

    for weights in ([3.0, 1.0], [1.0, 2.0, 5.0], [0.0, 0.0, 2.0]):
        assert captions(weights) == expected(weights)
    counts = Counter(captions(None))
    assert scipy.stats.chisquare(list(counts.values())).pvalue > 0.01
    assert len(counts) == 3


@pytest.mark.effect("video_config.frames", "video_config.max_frames")
def test_frames_win_over_the_preset(lab: Lab) -> None:
    """The toy preset says ``frames`` 17."""
    for knobs, length in (
        ({}, 17),
        ({"video_config.max_frames": 9}, 9),
        ({"video_config.frames": 5}, 5),
    ):
        (shape,) = job_of(lab, knobs, preset="toy").shapes
        assert shape.frames == length, knobs


@pytest.mark.effect("video_config.min_frames")
@pytest.mark.parametrize(("length", "knobs"), [(7, {"min_frames": 6}), (3, {})])
def test_shorter_clips_are_left_out(
    length: int, knobs: dict[str, int], counted: Counted
) -> None:
    with pytest.raises(DoesNotFit, match="too short"):
        counted(length, frames=9, **knobs)


@pytest.mark.effect("video_config.frame_sample_strategy", "video_config.variants")
def test_random_windows_begin_somewhere_else_in_each_variant(lab: Lab) -> None:
    data = write_dataset(
        lab.tmp / "data", {"clip.mp4": numbered(40, 48, 48)}, {}, fps=16
    )
    knobs = {
        "video_config.frames": 9,
        "video_config.windows": "head",
        "resolution": "48x48",
    }

    def starts(strategy: str) -> list[int]:
        job = job_of(
            lab, knobs | {"video_config.frame_sample_strategy": strategy}, data
        )
        shown = [read_numbers(*pixels(job, variant).values()) for variant in range(4)]
        assert all(
            b - a == 1 for frames in shown for a, b in itertools.pairwise(frames)
        )
        return [frames[0] for frames in shown]

    assert starts("uniform") == [0, 0, 0, 0]
    assert len(set(starts("random"))) > 2

    for variants, different in ((1, 1), (2, 2), (0, 4)):
        more = {
            "video_config.frame_sample_strategy": "random",
            "video_config.variants": variants,
        }
        source = source_of(in_cache(lab, f"own{variants}"), knobs | more, data)
        assert (
            len(
                {
                    make_step_batch(source, step).batch.x0.sum().item()
                    for step in range(1, 5)
                }
            )
            == different
        )


@pytest.mark.effect(
    "video_config.frame_sample_strategy", "video_config.keyframe_source"
)
def test_windows_begin_at_keyframes_or_at_scene_cuts(lab: Lab) -> None:
    """A keyframe every 12 frames; the picture changes for good at frame 20."""
    frames = np.concatenate(
        [noise(1, 48, 48, seed=1).repeat(20, 0), noise(1, 48, 48, seed=2).repeat(20, 0)]
    )
    often = {"g": "12", "keyint_min": "12", "sc_threshold": "0"}
    path = write_clip(lab.tmp / "data" / "a.mp4", frames, 16, options=often)
    path.with_suffix(".txt").write_text("two pictures", encoding="utf-8")
    knobs = {"video_config.frames": 9, "resolution": "48x48"}

    def starts(**more: str) -> list[int]:
        job = job_of(
            lab,
            knobs | {f"video_config.{name}": value for name, value in more.items()},
            path.parent,
        )
        return [round(window.start * 16) for window in job.library.windows]

    assert starts() == [0, 9, 18, 27]
    assert starts(frame_sample_strategy="keyframe") == [0, 12, 24]
    assert starts(frame_sample_strategy="keyframe", keyframe_source="scenes") == [
        0,
        9,
        20,
        29,
    ]


@pytest.mark.effect("video_config.spatial_compression_ratio")
def test_clips_are_shrunk_before_they_are_encoded(lab: Lab) -> None:
    """The VAE's own ratio is 8."""
    data = write_dataset(
        lab.tmp / "data", {"clip.mp4": numbered(9, 64, 96)}, {}, fps=16
    )

    def size(ratio: int | None) -> tuple[int, ...]:
        job = job_of(
            lab,
            {"resolution": "64x96", "video_config.spatial_compression_ratio": ratio},
            data,
        )
        (frames,) = pixels(job).values()
        assert read_numbers(frames) == list(range(9))
        return frames.shape[1:3]

    assert size(None) == size(8) == (64, 96)
    assert size(16) == (32, 48)


@pytest.mark.effect("video_config.temporal_augmentation")
def test_windows_move_and_neighbouring_frames_swap(lab: Lab) -> None:
    data = write_dataset(
        lab.tmp / "data", {"clip.mp4": numbered(27, 48, 48)}, {}, fps=16
    )

    def shown(augment: bool) -> list[list[int]]:
        knobs = {
            "video_config.frames": 9,
            "video_config.temporal_augmentation": augment,
            "resolution": "48x48",
        }
        job = job_of(lab, knobs, data)
        return [
            read_numbers(list(pixels(job, variant).values())[1]) for variant in range(8)
        ]

    assert shown(False) == [list(range(9, 18))] * 8
    moved = shown(True)
    assert len({min(frames) for frames in moved}) > 3
    assert all(min(frames) >= 4 and max(frames) < 23 for frames in moved)
    assert any(frames != sorted(frames) for frames in moved)


@pytest.mark.effect("video_config.frame_dropout_probability")
def test_latent_frames_are_fed_as_noise_and_left_out_of_the_loss(lab: Lab) -> None:
    for probability in (0, 0.1, 0.3):
        source = source_of(
            lab,
            {"video_config.frame_dropout_probability": probability, "batch_size": 4},
        )
        batches = [make_step_batch(source, step).batch for step in range(1, 31)]
        masks = [batch.dropped_frames_mask for batch in batches]
        frames = masks[0].shape[2]
        expected = [
            generator_for(0, "frame dropout", step, index).random(frames) < probability
            for step in range(1, 31)
            for index in range(4)
        ]
        dropped = torch.cat(masks)[:, 0, :, 0, 0].numpy()
        assert not dropped[:, 0].any(), "never the first"
        assert (dropped[:, 1:] == np.array(expected)[:, 1:]).all()
        assert dropped[:, 1:].mean() == pytest.approx(probability, abs=0.05)
        assert all(
            torch.equal(batch.loss_mask == 0, batch.dropped_frames_mask)
            for batch in batches
        )


@pytest.mark.effect("missing_caption", "missing_caption_text")
def test_a_clip_without_a_caption_stops_the_run_or_is_left_out_or_has_another_text(
    lab: Lab,
) -> None:
    clips = {f"{name}.mp4": noise(9, 32, 32, seed=ord(name)) for name in "ab"}
    data = write_dataset(
        lab.tmp / "data", clips, {"a.mp4": "a cat", "b.mp4": None}, fps=16
    )

    def texts(missing: str, **more: str) -> torch.Tensor:
        knobs = {"missing_caption": missing, "batch_size": 2, "shuffle": False, **more}
        return make_step_batch(source_of(lab, knobs, data), 1).batch.conditioning.text

    with pytest.raises(VideotuneError, match=r"b\.mp4.*b\.txt"):
        texts("error")
    assert torch.equal(texts("skip"), text_of(lab, "a cat", "a cat"))
    assert torch.equal(texts("empty"), text_of(lab, "a cat", ""))
    assert torch.equal(
        texts("text", missing_caption_text="a film"), text_of(lab, "a cat", "a film")
    )


@pytest.mark.effect("caption_lines")
def test_lines_of_a_caption_are_variants_or_one_text(lab: Lab) -> None:
    clips = {"a.mp4": noise(9, 32, 32)}
    data = write_dataset(lab.tmp / "data", clips, {"a.mp4": "a cat\na dog"}, fps=16)

    def texts(lines: str) -> list[torch.Tensor]:
        source = source_of(lab, {"caption_lines": lines}, data)
        return [
            make_step_batch(source, step).batch.conditioning.text
            for step in range(1, 13)
        ]

    for drawn in texts("join"):
        assert torch.equal(drawn, text_of(lab, "a cat a dog"))
    variants = [text_of(lab, "a cat"), text_of(lab, "a dog")]
    seen = set()
    for drawn in texts("variants"):
        seen |= {i for i, text in enumerate(variants) if torch.equal(drawn, text)}
    assert seen == {0, 1}


@pytest.mark.effect("caption_dropout")
def test_captions_are_dropped_for_the_empty_one(lab: Lab) -> None:
    empty = text_of(lab, "")[0]

    def share(dropout: float) -> float:
        source = source_of(
            lab, {"caption_dropout": dropout, "batch_size": 4, "shuffle": False}
        )
        dropped = [
            torch.equal(text, empty)
            for step in range(1, 26)
            for text in make_step_batch(source, step).batch.conditioning.text
        ]
        return sum(dropped) / len(dropped)

    assert share(0) == 0
    assert share(1) == 1
    drawn = [
        generator_for(0, "caption", step, index).random() < 0.3
        for step in range(1, 26)
        for index in range(4)
    ]
    assert share(0.3) == sum(drawn) / len(drawn)
    assert abs(share(0.3) - 0.3) < 0.1
    captions = [
        (lab.clips / "captions" / f"{name}.txt").read_text(encoding="utf-8")
        for name in "abcd"
    ]
    kept = make_step_batch(source_of(lab, {"batch_size": 4, "shuffle": False}), 1).batch
    assert torch.equal(kept.conditioning.text, text_of(lab, *captions))


@pytest.mark.parametrize(("steps", "is_too_short"), [(2, True), (4, False)])
def test_a_plan_says_that_a_run_is_too_short_for_a_verdict(
    lab: Lab, twenty: Path, steps: int, is_too_short: bool
) -> None:
    """A verdict takes three validations; the first is that of the base model."""
    knobs = {
        "validation_fraction": 0.1,
        "validate_every": 2,
        "steps": steps,
        "video_config.frames": 5,
    }
    notes = notes_on_validations(job_of(lab, knobs, twenty))
    assert codes_of(notes) == ["few_validations"] * is_too_short
    assert not notes_on_validations(job_of(lab, knobs | {"validate_every": 0}, twenty))
    without = knobs | {"validation_fraction": 0}
    assert not notes_on_validations(job_of(lab, without, twenty))


@pytest.mark.effect("validation_fraction", "validation_windows")
@pytest.mark.parametrize(
    ("fraction", "windows", "held_out", "measured"),
    [
        (0, 24, 0, [0, 8]),
        (0.1, 24, 2, [2, 8]),
        (0.3, 24, 6, [6, 8]),
        (0.3, 6, 6, [4, 2]),
    ],
)
def test_a_share_of_the_videos_is_measured_and_never_trained(
    lab: Lab,
    twenty: Path,
    fraction: float,
    windows: int,
    held_out: int,
    measured: list[int],
) -> None:
    """A third of the windows that are measured are of training clips."""
    knobs = {
        "validation_fraction": fraction,
        "validation_windows": windows,
        "epochs": 1,
        "video_config.frames": 5,
    }
    trainer = trainer_of(lab, knobs, twenty)
    trained = [name for line in run_steps(trainer) for name in line["window_ids"]]
    kept = {window.id for window in trainer.job.library.held_out_windows}
    assert (len(kept), len(trained), len(set(trained))) == (
        held_out,
        20 - held_out,
        20 - held_out,
    )
    assert not kept & set(trained)
    measure(trainer, 0)
    (line,) = of_kind(trainer.run, "validation")
    assert [
        (line[part] or {"windows": 0})["windows"] for part in ("held_out", "train")
    ] == measured


@pytest.mark.effect("shuffle")
def test_clips_come_in_path_order_or_in_a_new_order_each_pass(
    lab: Lab, twenty: Path
) -> None:
    def passes(shuffle: bool) -> list[list[str]]:
        knobs = {"shuffle": shuffle, "video_config.frames": 5, "validation_fraction": 0}
        source = source_of(lab, knobs, twenty)
        names = {clip.id: Path(clip.path).stem for clip in source.clips.values()}
        by_window = {window.id: names[window.clip_id] for window in source.buckets[0]}
        order = [
            by_window[make_step_batch(source, step).batch.window_ids[0]]
            for step in range(1, 41)
        ]
        return [order[:20], order[20:]]

    in_order = sorted(path.stem for path in (twenty / "videos").iterdir())
    assert passes(False) == [in_order, in_order]
    first, second = passes(True)
    assert sorted(first) == sorted(second) == in_order
    assert len({tuple(first), tuple(second), tuple(in_order)}) == 3
