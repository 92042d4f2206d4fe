"""What the keys of one dataset do to how often, when and how its clips are trained."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import (
    noise,
    numbered,
    read_numbers,
    write_clip,
    write_image,
)
from tests.support.object_stores import Store, bytes_in
from tests.support.trainers import Lab, job_of, pixels, run_steps, source_of, trainer_of
from videotune.data.dataset import to_json
from videotune.data.object_files import objects_folder
from videotune.errors import VideotuneError
from videotune.job.job import Job
from videotune.job.skips import refuse_skips
from videotune.latent_cache.batches import draws_of, make_step_batch
from videotune.latent_cache.sampler import sample_indices
from videotune.latent_cache.store import LatentCache
from videotune.planner.plan import buckets_of

Pair = Callable[..., Job]


def clips(folder: Path, count: int, seed: int) -> str:
    """A folder of so many clips of 9 frames, each with its name as its caption."""
    for number in range(count):
        path = folder / f"{folder.name}{number}.mp4"
        if not path.exists():
            write_clip(path, noise(9, 32, 32, seed=seed + number), 16)
            path.with_suffix(".txt").write_text(path.stem, encoding="utf-8")
    return str(folder)


@pytest.fixture
def pair_of(lab: Lab) -> Pair:
    """A function from the keys of the second of two datasets, of 4 and of 3 clips, to
    their job.
    """

    def make(knobs: dict[str, Any] | None = None, **keys: Any) -> Job:
        rows = [
            {"path": clips(lab.tmp / "a", 4, seed=0)},
            {"path": clips(lab.tmp / "b", 3, seed=50), **keys},
        ]
        return job_of(lab, {"datasets": rows, **(knobs or {})})

    return make


def shown(job: Job, steps: range) -> list[list[str]]:
    """The names of the clips that each step shows."""
    names = {clip.id: Path(clip.path).stem for clip in job.library.clips}
    lines = []
    for step in steps:
        bucket, indices = sample_indices(job.schedule, step)
        windows = [job.buckets[bucket][index] for index, _ in indices]
        lines.append([names[window.clip_id] for window in windows])
    return lines


def views(job: Job, steps: int) -> Counter[str]:
    """How often each clip is shown, counted step by step; the job's account agrees."""
    counts: Counter[str] = Counter()
    for line in shown(job, range(1, steps + 1)):
        counts.update(line)
    account = job.exposure(steps).clips
    for clip in job.library.clips:
        assert account[clip.id] == counts[Path(clip.path).stem]

    mean = sum(counts.values()) / len(job.library.windows)
    assert job.views_at(steps) == pytest.approx(mean, abs=2)
    return counts


@pytest.mark.effect("datasets.probability")
def test_a_dataset_is_shown_in_proportion_to_its_probability(pair_of: Pair) -> None:
    for probability, repeats, share in ((1.0, 1, 1.0), (0.5, 1, 0.5), (0.3, 5, 1.5)):
        job = pair_of(probability=probability, repeats=repeats)
        counts = views(job, 300)
        of_a = [counts[f"a{number}"] for number in range(4)]
        of_b = [counts[f"b{number}"] for number in range(3)]
        assert sum(of_b) / 3 == pytest.approx(share * sum(of_a) / 4, rel=0.05)
        assert max(of_a) - min(of_a) <= 1
        assert max(of_b) - min(of_b) <= repeats

    with pytest.raises(VideotuneError, match="probability"):
        pair_of(probability=0)


@pytest.mark.effect("datasets.from_step", "datasets.until_step")
def test_a_dataset_is_trained_from_a_step_to_a_step(pair_of: Pair) -> None:
    def steps_of_b(**keys: Any) -> list[int]:
        job = pair_of({"steps": 40}, **keys)
        views(job, 40)
        lines = shown(job, range(1, 41))
        return [step for step, line in enumerate(lines, 1) if line[0].startswith("b")]

    always = steps_of_b()
    assert always[0] < 10
    assert always[-1] > 30

    later = steps_of_b(from_step=20)
    assert 20 <= later[0] < 25
    assert later[-1] > 30
    between = steps_of_b(from_step=11, until_step=20)
    assert set(between) <= set(range(11, 21))
    assert len(between) == pytest.approx(10 * 3 / 7, abs=1.5)
    first = steps_of_b(until_step=8)
    assert set(first) <= set(range(1, 9))
    assert len(first) in (3, 4)


def test_steps_without_a_dataset_are_refused(lab: Lab) -> None:
    path = clips(lab.tmp / "a", 4, seed=0)
    for keys, key in (
        ({"from_step": 3}, "from_step"),
        ({"until_step": 5}, "until_step"),
        ({"from_step": 5, "until_step": 4}, "until_step"),
    ):
        with pytest.raises(VideotuneError, match=key):
            job_of(lab, {"datasets": [{"path": path, **keys}], "steps": 6})
    job = job_of(lab, {"datasets": [{"path": path, "until_step": 6}], "steps": 6})
    assert sum(views(job, 6).values()) == 6
    rows = [{"path": path}, {"path": clips(lab.tmp / "b", 3, 50), "from_step": 9}]
    with pytest.raises(VideotuneError, match="epochs"):
        job_of(lab, {"datasets": rows, "epochs": 2})


@pytest.mark.effect("datasets.batch_size")
def test_a_dataset_has_a_batch_size_of_its_own(lab: Lab, pair_of: Pair) -> None:
    def sizes(**keys: Any) -> dict[str, set[int]]:
        job = pair_of({"batch_size": 2, "gradient_accumulation_steps": 2}, **keys)
        views(job, 30)
        by_dataset: dict[str, set[int]] = {}
        for line in shown(job, range(1, 31)):
            datasets = "".join(sorted({name[0] for name in line}))
            by_dataset.setdefault(datasets, set()).add(len(line))
        return by_dataset

    assert sizes() == {"ab": {4}, "a": {4}}
    assert sizes(batch_size=1) == {"a": {4}, "b": {2}}

    rows = [
        {"path": clips(lab.tmp / "a", 4, seed=0)},
        {"path": clips(lab.tmp / "b", 3, seed=50), "batch_size": 3},
    ]
    trainer = trainer_of(lab, {"datasets": rows, "steps": 4})
    lines = run_steps(trainer)
    assert {len(line["window_ids"]) for line in lines} == {1, 3}
    passes = trainer.job.schedule.batch_sizes
    assert sorted(passes) == [1, 3]


@pytest.mark.effect("datasets.caption_dropout")
def test_a_dataset_drops_its_captions_by_a_share_of_its_own(lab: Lab) -> None:
    def share(of_b: float | None) -> dict[str, float]:
        rows = [
            {"path": clips(lab.tmp / "a", 4, seed=0)},
            {"path": clips(lab.tmp / "b", 3, seed=50), "caption_dropout": of_b},
        ]
        source = source_of(lab, {"datasets": rows, "caption_dropout": 0.5})
        names = {clip.id: Path(clip.path).stem for clip in source.clips.values()}
        empty: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for step in range(1, 301):
            draws = draws_of(source, step)
            for (window, _), caption in zip(draws.samples, draws.captions, strict=True):
                name = names[window.clip_id][0]
                assert caption in ("", names[window.clip_id])
                total[name] += 1
                empty[name] += not caption
        return {name: empty[name] / total[name] for name in total}

    both = share(None)
    assert both == pytest.approx({"a": 0.5, "b": 0.5}, abs=0.12)
    assert share(0.0) == {"a": both["a"], "b": 0}
    assert share(1.0) == {"a": both["a"], "b": 1}


@pytest.mark.effect("datasets.max_clips")
def test_at_most_so_many_clips_are_chosen_evenly(lab: Lab) -> None:
    path = clips(lab.tmp / "many", 10, seed=0)

    def used(most: int | None) -> list[str]:
        job = job_of(lab, {"datasets": [{"path": path, "max_clips": most}]})
        refuse_skips(job, None)
        account = to_json(job.library)
        assert account["skipped"] == 0
        left_out = 10 - account["found"]
        note = f"max_clips {most} leaves out {left_out} of 10 clips"
        assert any(note in line for line in job.notes) == (left_out > 0)
        return [Path(clip.path).stem for clip in job.library.clips]

    assert len(used(None)) == len(used(10)) == len(used(99)) == 10
    assert used(1) == ["many0"]
    assert used(4) == ["many0", "many2", "many5", "many7"]
    assert used(4) == used(4)


def test_a_run_with_all_of_them_resumes_at_the_same_samples(
    lab: Lab, pair_of: Pair
) -> None:
    """The schedule is a pure function of the step, whatever ran before."""
    keys = {"probability": 0.5, "from_step": 5, "until_step": 30, "batch_size": 2}
    whole = shown(pair_of({"steps": 40}, **keys), range(1, 41))
    for first in (4, 5, 17, 31):
        job = pair_of({"steps": 40}, **keys)
        assert shown(job, range(first, 41)) == whole[first - 1 :]
    job = pair_of({"steps": 40}, **keys)
    views(job, 40)
    assert sum(job.shares) == pytest.approx(1)
    assert job.schedule.weights == (1, 1, Fraction(1, 2), 1)


def test_data_without_these_keys_has_the_hash_that_it_had(lab: Lab) -> None:
    """A run from before these keys resumes: its data has not changed."""
    path = clips(lab.tmp / "a", 1, seed=0)
    job = job_of(lab, {"datasets": [{"path": path}]})
    rows = [{"path": path, "from_step": 1, "probability": 1.0, "batch_size": None}]
    assert job_of(lab, {"datasets": rows}).data_digest() == job.data_digest()
    for keys in ({"batch_size": 1}, {"until_step": 9}, {"caption_dropout": 0.1}):
        changed = job_of(lab, {"datasets": [{"path": path, **keys}]})
        assert changed.data_digest() != job.data_digest()
    batch = make_step_batch(source_of(lab, {"datasets": [{"path": path}]}), 1)
    assert batch.captions == ("a0",)


@pytest.mark.effect("datasets.flip")
def test_every_second_view_is_mirrored_unless_the_caption_forbids_it(lab: Lab) -> None:
    folder = Path(clips(lab.tmp / "f", 3, seed=0))
    (folder / "f1.txt").write_text("a cat on the left", encoding="utf-8")
    (folder / "f2.txt").write_text('it says "open"', encoding="utf-8")

    def mirrored(flip: str, caption_note: str) -> dict[str, list[bool]]:
        row = {"path": str(folder), "flip": flip}
        knobs = {"datasets": [row]}
        job = job_of(lab, knobs)
        names = {clip.id: Path(clip.path).stem for clip in job.library.clips}
        account = {
            Path(clip["path"]).stem: clip for clip in to_json(job.library)["clips"]
        }
        plain = {names[w.clip_id]: f for w, f in pixels(job, -1).items()}
        flips: dict[str, list[bool]] = {}
        for variant in range(4):
            for window, frames in pixels(job, variant).items():
                name = names[window.clip_id]
                is_mirrored = np.array_equal(frames, plain[name][:, :, ::-1])
                assert is_mirrored or np.array_equal(frames, plain[name])
                flips.setdefault(name, []).append(is_mirrored)
                assert (
                    "every second view" in str(account[name]["notes"])
                ) == window.flip
        assert caption_note in str(account["f1"]["notes"])
        return flips

    never = [False] * 4
    assert mirrored("never", "[]") == {"f0": never, "f1": never, "f2": never}
    safe = mirrored("safe", 'its caption says "left"')
    assert sorted(safe["f0"]) == [False, False, True, True]
    assert safe["f1"] == safe["f2"] == never
    always = mirrored("always", "every second view")
    assert {name: sum(flips) for name, flips in always.items()} == dict.fromkeys(
        always, 2
    )


def test_mirrored_variants_are_cached_once_and_read_in_turn(lab: Lab) -> None:
    """Of four variants two differ; a window is shown as it is and mirrored in turn."""
    path = clips(lab.tmp / "g", 1, seed=0)
    cache = lab.tmp / "cache of g"
    knobs = {"datasets": [{"path": path, "flip": "safe"}], "cache_dir": str(cache)}
    source = source_of(lab, knobs)
    kinds = [entry.kind for entry in LatentCache(cache).entries()]
    assert kinds.count("latents") == 2

    first, second, third = (
        make_step_batch(source, step).batch.x0 for step in (1, 2, 3)
    )
    assert torch.equal(first, third)
    assert not torch.equal(first, second)

    job = job_of(lab, knobs)
    plain = job_of(lab, {"datasets": [{"path": path}]})
    assert job.data_digest() != plain.data_digest()
    with pytest.raises(VideotuneError, match="flip"):
        job_of(lab, knobs | {"video_config.variants": 1})


def test_the_borders_of_mirrored_clips_stay_out_of_the_loss(lab: Lab) -> None:
    """A border of 5 pixels on the left and of 6 on the right: both cells that have some
    of the picture in one of the views count.
    """
    folder = lab.tmp / "narrow"
    write_clip(folder / "c.mp4", noise(9, 32, 10, seed=3), 16)
    (folder / "c.txt").write_text("a cat", encoding="utf-8")

    def columns(flip: str) -> list[float]:
        row = {"path": str(folder), "flip": flip}
        source = source_of(lab, {"datasets": [row], "resize": "pad"})
        mask = make_step_batch(source, 1).batch.loss_mask
        return [float(value) for value in mask[0, 0, 0, 0]]

    assert columns("never") == columns("always") == [0, 1, 1, 0]


@pytest.mark.effect("datasets.frame_folder_fps")
def test_a_folder_of_frames_is_a_clip_at_its_frame_rate(lab: Lab) -> None:
    """Nine frames at 16 fps are trained as they are, at 8 fps each twice; without the
    key each image is a clip.
    """
    folder = lab.tmp / "frames"
    for number, picture in enumerate(numbered(9, 48, 48)):
        write_image(folder / "clip" / f"{number}.png", picture)
        (folder / "clip" / f"{number}.txt").write_text("a still", encoding="utf-8")
    (folder / "clip.txt").write_text("a clip", encoding="utf-8")

    def windows(fps: float | None) -> list[list[int]]:
        row = {"path": str(folder), "frame_folder_fps": fps}
        job = job_of(lab, {"datasets": [row], "resolution": "48x48"})
        assert {clip.captions for clip in job.library.clips} == {
            ("a still",) if fps is None else ("a clip",)
        }
        return [read_numbers(frames) for frames in pixels(job).values()]

    assert windows(16) == [list(range(9))]
    assert windows(8) == [
        [0, 0, 1, 1, 2, 2, 3, 3, 4],
        [4, 5, 5, 6, 6, 7, 7, 8, 8],
    ]
    assert sorted(windows(None)) == [[number] for number in range(9)]


@pytest.mark.effect("datasets.file_column", "datasets.caption_column")
def test_rows_name_clips_and_captions_by_the_columns(lab: Lab) -> None:
    folder = Path(clips(lab.tmp / "h", 2, seed=0))
    table = folder / "rows.csv"
    table.write_text("path,file,text,long\nh0.mp4,h1.mp4,short,longer\n")

    def read(**keys: str) -> list[tuple[str, tuple[str, ...]]]:
        job = job_of(lab, {"datasets": [{"path": str(table), **keys}]})
        return [(Path(clip.path).stem, clip.captions) for clip in job.library.clips]

    assert read(file_column="path") == [("h0", ("short",))]
    assert read(file_column="file") == [("h1", ("short",))]
    both = read(file_column="file", caption_column="long")
    assert both == [("h1", ("longer",))]
    with pytest.raises(VideotuneError, match="file_column"):
        read()


def test_the_plan_joins_the_buckets_of_all_phases(lab: Lab, pair_of: Pair) -> None:
    """Rows by shape and batch, whose shares are of all steps."""
    keys = {"from_step": 11, "until_step": 30, "batch_size": 2}
    job = pair_of({"steps": 40}, **keys)
    assert len(job.buckets) == 4
    rows = buckets_of(job)
    assert [(row["shape"], row["batch"], row["windows"]) for row in rows] == [
        ("9x32x32", 1, 4),
        ("9x32x32", 2, 3),
    ]
    lines = shown(job, range(1, 41))
    of_b = sum(line[0].startswith("b") for line in lines) / 40
    assert [row["share"] for row in rows] == pytest.approx([1 - of_b, of_b])


@pytest.mark.effect("object_cache_gb")
def test_the_bound_on_objects_says_how_many_stay_on_this_disk(
    lab: Lab, objects: Store
) -> None:
    address = objects.put_folder(lab.clips, objects.bucket(), "shapes")
    sizes = [path.stat().st_size for path in lab.clips.rglob("*.mp4")]

    def kept_with(gigabytes: float) -> int:
        knobs = {
            "datasets": [{"path": address}],
            "cache_dir": str(lab.tmp / f"cache {gigabytes}"),
            "object_cache_gb": gigabytes,
        }
        assert len(job_of(lab, knobs).library.clips) == 4
        return bytes_in(objects_folder() / "blobs")

    small = 1.5 * max(sizes)
    assert 0 < kept_with(small / 1e9) <= small
    assert kept_with(1.0) == sum(sizes)
