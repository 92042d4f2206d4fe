"""Compare another trainer's handling of a folder of clips with videotune's."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from videotune.data.clip_sizes import visible_share
from videotune.interop.rules import SourceVideo
from videotune.interop.trainer_facts import TRAINER_FACTS, DatasetRules, TrainerRules
from videotune.model_spec import ModelSpec
from videotune.text import reason_words, shape_words, short_path

NOISE_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the noise levels that are shown."""

NOTABLE_DIFFERENCE = 0.05
"""Smallest difference of a speed, a picture share or a median noise level in a report.
"""

LARGER = 1.2
"""Smallest ratio of the pixels of two pictures in a report."""

Outcome = Mapping[str, Any]
"""The result of a clip in one of the trainer's datasets.

Either ``dropped`` is the reason why the clip is dropped, or it is None and ``samples``
counts the clip's samples of one ``shape``. ``speed``: how fast a sample plays for the
model, 1.0 being the clip's speed. ``stretch``: how much more the width grows than the
height. Shares: ``seen`` of the clip's frames that are within a sample; ``held`` of a
sample's frames that repeat the clip's last one; ``cut`` of the picture outside the
crop.
"""

_Row = Mapping[str, Any]
"""A clip with its outcomes ("theirs") and videotune's account of it ("ours")."""


def clip_outcomes(
    rules: DatasetRules, clip: Mapping[str, Any], model_fps: float | None
) -> Iterator[Outcome]:
    """Apply a dataset's rules to a clip; yield one outcome per frame count.

    Args:
        rules: the dataset's rules.
        clip: a row of ``videotune check --json``.
        model_fps: the frame rate that the model assumes; None: it gets the clip's own
            rate.
    """
    source = SourceVideo(
        frames=clip["source_frames"],
        fps=clip["source_fps"],
        width=clip["width"],
        height=clip["height"],
    )
    samples = rules.frames(source)
    if isinstance(samples, str):
        yield {"dataset": rules.name, "dropped": samples, "samples": 0}
        return

    covered_frames: set[int] = set()
    for sample in samples:
        covered_frames.update(range(sample[0], sample[-1] + 1))
    covered_share = len(covered_frames) / source.frames

    sample_counts = Counter(len(sample) for sample in samples)
    for frame_count, sample_count in sorted(sample_counts.items()):
        first_sample = next(sample for sample in samples if len(sample) == frame_count)
        moving_frames = _moving_frames(first_sample)
        speed = 1.0
        if frame_count > 1:
            step = 1.0
            if moving_frames > 1:
                last_moving_frame = first_sample[moving_frames - 1]
                step = (last_moving_frame - first_sample[0]) / (moving_frames - 1)
            speed = step / source.fps * (model_fps or source.fps)

        width, height = rules.size(source, frame_count)
        if rules.stretches:
            cut = 0.0
            stretch = (width / height) / (source.width / source.height)
        else:
            cut = 1 - visible_share(source.width, source.height, (height, width))
            stretch = 1.0
        yield {
            "dataset": rules.name,
            "dropped": None,
            "samples": sample_count,
            "shape": f"{frame_count}x{height}x{width}",
            "speed": speed,
            "seen": covered_share,
            "held": 1 - moving_frames / frame_count,
            "cut": cut,
            "stretch": stretch,
        }


def _moving_frames(sample: Sequence[int]) -> int:
    """Return how many frames a sample has without repetitions of the last one at its
    end.
    """
    count = len(sample)
    while count > 1 and sample[count - 1] == sample[count - 2]:
        count -= 1
    return count


def _used(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome["dropped"] is None]


def steps_per_epoch(
    trainer_rules: TrainerRules, outcomes_by_clip: Mapping[str, Sequence[Outcome]]
) -> int:
    """Return the optimizer steps of one epoch.

    Datasets whose incomplete batches are dropped share their buckets.
    """
    rules_by_name = {rules.name: rules for rules in trainer_rules.datasets}
    counts = Counter[tuple[str, str]]()
    for outcomes in outcomes_by_clip.values():
        for outcome in _used(outcomes):
            rules = rules_by_name[outcome["dataset"]]
            bucket_owner = "" if rules.drops_rest else rules.name
            counts[bucket_owner, outcome["shape"]] += int(
                outcome["samples"] * rules.repeats
            )

    batches = 0
    for (bucket_owner, _), count in counts.items():
        rules = rules_by_name.get(bucket_owner, trainer_rules.datasets[0])
        if rules.drops_rest:
            batches += count // rules.batch
        else:
            batches += math.ceil(count / rules.batch)
    return math.ceil(batches / trainer_rules.accumulation)


def build_autopsy(
    trainer: str,
    trainer_rules: TrainerRules,
    spec: ModelSpec,
    account: Mapping[str, Any],
    ours: Mapping[str, Any],
    roots: Sequence[Path],
) -> dict[str, Any]:
    """Compare the trainer's account of the clips with videotune's.

    Args:
        trainer: the trainer's name.
        trainer_rules: its rules.
        spec: the base model.
        account: the account of ``videotune check``.
        ours: videotune's steps_per_epoch, noise (quantiles at ``NOISE_QUANTILES``) and
            scale.
        roots: the datasets' folders; paths of clips are shown relative to them.

    Returns:
        Both accounts and the differences, the most costly first.
    """
    facts = TRAINER_FACTS[trainer]
    model_fps = None if facts.get("tells_fps") else spec.rules.fps
    clips = [clip for clip in account["clips"] if (clip.get("source_frames") or 0) > 1]
    outcomes_by_clip: dict[str, list[Outcome]] = {}
    for clip in clips:
        outcomes: list[Outcome] = []
        for rules in trainer_rules.datasets:
            outcomes += clip_outcomes(rules, clip, model_fps)
        outcomes_by_clip[clip["path"]] = outcomes

    rows = [_clip_row(clip, outcomes_by_clip[clip["path"]], roots) for clip in clips]
    theirs = _their_account(trainer_rules, spec, outcomes_by_clip)
    our_account = {
        "used": account["used"] + account["held_out"],
        "dropped": account["skipped"],
        "buckets": {
            bucket["shape"]: bucket["windows"] for bucket in account["buckets"]
        },
        **ours,
    }
    findings = [
        *trainer_rules.findings,
        *list_findings(rows, theirs, our_account, model_fps),
    ]
    return {
        "trainer": trainer,
        "repository": facts["repository"],
        "commit": facts["commit"],
        "sources": facts["sources"],
        "clips": rows,
        "theirs": theirs,
        "ours": our_account,
        "findings": [{"kind": kind, "text": text} for kind, text in findings],
    }


def _clip_row(
    clip: Mapping[str, Any], outcomes: list[Outcome], roots: Sequence[Path]
) -> dict[str, Any]:
    our_keys = ("used", "reason", "windows", "shape", "speed")
    return {
        "path": short_path(clip["path"], roots),
        "theirs": outcomes,
        "source": {key: clip[f"source_{key}"] for key in ("frames", "fps", "seconds")},
        "ours": {key: clip[key] for key in our_keys},
    }


def _their_account(
    trainer_rules: TrainerRules,
    spec: ModelSpec,
    outcomes_by_clip: Mapping[str, Sequence[Outcome]],
) -> dict[str, Any]:
    """Sum up the outcomes of all clips; noise levels are those of the most common
    shape.
    """
    used_clips = 0
    shapes: Counter[str] = Counter()
    for outcomes in outcomes_by_clip.values():
        used_outcomes = _used(outcomes)
        used_clips += bool(used_outcomes)
        for outcome in used_outcomes:
            shapes[outcome["shape"]] += outcome["samples"]

    common_shape = f"1x{spec.default_resolution}x{spec.default_resolution}"
    if shapes:
        common_shape = shapes.most_common(1)[0][0]
    frames, height, width = map(int, common_shape.split("x"))
    noise = trainer_rules.noise((frames, height, width))
    return {
        "used": used_clips,
        "dropped": len(outcomes_by_clip) - used_clips,
        "buckets": dict(shapes.most_common()),
        "steps_per_epoch": steps_per_epoch(trainer_rules, outcomes_by_clip),
        "scale": trainer_rules.scale,
        "read_scale": trainer_rules.read_scale,
        "noise": noise if isinstance(noise, str) else noise.quantiles(*NOISE_QUANTILES),
    }


def list_findings(
    rows: Sequence[_Row],
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    model_fps: float | None,
) -> Iterator[tuple[str, str]]:
    """Yield kind and sentence of each difference in the training, most costly first."""
    used: list[tuple[_Row, Outcome]] = []
    for row in rows:
        used += [(row, outcome) for outcome in _used(row["theirs"])]

    yield from _dropped_clips(rows)
    yield from _speed_difference(rows, used, model_fps)
    yield from _size_difference(rows, used)
    yield from _picture_differences(used)
    yield from _unseen_frames(used)
    yield from _scale_differences(theirs, ours)

    if isinstance(theirs["noise"], str):
        yield "noise", f"Noise levels: {theirs['noise']}."
        return
    median_index = NOISE_QUANTILES.index(0.5)
    their_median = theirs["noise"][median_index]
    our_median = ours["noise"][median_index]
    if abs(their_median - our_median) > NOTABLE_DIFFERENCE:
        yield (
            "noise",
            f"Half of the noise levels are below {their_median:.2f} there and below"
            f" {our_median:.2f} here.",
        )


def _dropped_clips(rows: Sequence[_Row]) -> Iterator[tuple[str, str]]:
    """Yield what only one of the two trains on."""
    unused_here = [
        row for row in rows if _used(row["theirs"]) and row["ours"]["reason"]
    ]
    if unused_here:
        example = unused_here[0]
        yield (
            "dropped",
            f"{len(unused_here)} of {len(rows)} clips dropped by videotune alone, as"
            f" {example['path']}: {reason_words(example['ours']['reason'])}.",
        )

    dropped_rows = [row for row in rows if row["theirs"] and not _used(row["theirs"])]
    if not dropped_rows:
        return
    example = dropped_rows[0]
    used_here = sum(row["ours"]["used"] for row in dropped_rows)
    yield (
        "dropped",
        f"{len(dropped_rows)} of {len(rows)} clips dropped, as {example['path']}:"
        f" {example['theirs'][0]['dropped']}. videotune uses {used_here} of them.",
    )


def _speed_difference(
    rows: Sequence[_Row], used: Sequence[tuple[_Row, Outcome]], model_fps: float | None
) -> Iterator[tuple[str, str]]:

    def our_speed(row: _Row) -> float:
        return float(row["ours"]["speed"] or 1.0)

    def log_difference(pair: tuple[_Row, Outcome]) -> float:
        row, outcome = pair
        return abs(math.log(max(outcome["speed"], 1e-6) / our_speed(row)))

    least = math.log(1 + NOTABLE_DIFFERENCE)
    in_both = [pair for pair in used if not pair[0]["ours"]["reason"]]
    changed = [pair for pair in in_both if log_difference(pair) > least]
    if changed:
        row, outcome = max(changed, key=log_difference)
        clip_count = len({changed_row["path"] for changed_row, _ in changed})
        rates = f"{row['source']['fps']:g} fps"
        if model_fps:
            rates += f", the model's are {model_fps:g}"
        yield (
            "speed",
            f"{clip_count} of {len(rows)} clips at another speed: {row['path']} plays at"
            f" {outcome['speed']:.2f} x ({rates}); in videotune at {our_speed(row):.2f} x.",
        )

    squeezed = {row["path"]: our_speed(row) for row, _ in in_both}
    fast = {path: speed for path, speed in squeezed.items() if abs(speed - 1) > least}
    if fast:
        path, speed = max(fast.items(), key=lambda item: item[1])
        yield (
            "stretch",
            f"{len(fast)} of {len(rows)} clips do not play as filmed in videotune either,"
            f" since the config asks for it: {path} at {speed:.2f} x."
            " video_config.stretch=false plays them at 1 x.",
        )


def _pixels(shape: str) -> int:
    _, height, width = map(int, shape.split("x"))
    return height * width


def _size_difference(
    rows: Sequence[_Row], used: Sequence[tuple[_Row, Outcome]]
) -> Iterator[tuple[str, str]]:
    """Yield the clip whose pictures have another number of pixels in videotune."""
    ratios = []
    for row, outcome in used:
        if row["ours"]["shape"]:
            ratio = _pixels(row["ours"]["shape"]) / _pixels(outcome["shape"])
            ratios.append((ratio, row, outcome))
    changed = [entry for entry in ratios if abs(math.log(entry[0])) > math.log(LARGER)]
    if not changed:
        return

    ratio, row, outcome = max(changed, key=lambda entry: abs(math.log(entry[0])))
    clip_count = len({changed_row["path"] for _, changed_row, _ in changed})
    their_size = shape_words(outcome["shape"]).partition(",")[0]
    our_size = shape_words(row["ours"]["shape"]).partition(",")[0]
    yield (
        "size",
        f"{clip_count} of {len(rows)} clips at another size: {row['path']} is"
        f" {their_size} there and {our_size} here, {ratio:.1f} x the pixels.",
    )


def _picture_differences(
    used: Sequence[tuple[_Row, Outcome]],
) -> Iterator[tuple[str, str]]:
    repeated = max((outcome["held"] for _, outcome in used), default=0.0)
    if repeated > NOTABLE_DIFFERENCE:
        yield (
            "held",
            f"Up to {repeated:.0%} of a sample's frames repeat the clip's last one.",
        )

    cut = max((outcome["cut"] for _, outcome in used), default=0.0)
    if cut > NOTABLE_DIFFERENCE:
        yield "cut", f"Up to {cut:.0%} of the picture is cut off."

    log_stretches = (abs(math.log(outcome["stretch"])) for _, outcome in used)
    log_stretch = max(log_stretches, default=0.0)
    if log_stretch > NOTABLE_DIFFERENCE:
        yield (
            "stretch",
            f"Pictures are stretched by up to {math.exp(log_stretch):.2f} x; videotune crops.",
        )


def _unseen_frames(used: Sequence[tuple[_Row, Outcome]]) -> Iterator[tuple[str, str]]:
    # A clip may be in several datasets; the largest share counts.
    seen_by_clip: dict[str, float] = {}
    for row, outcome in used:
        path = row["path"]
        seen_by_clip[path] = max(outcome["seen"], seen_by_clip.get(path, 0.0))
    if not seen_by_clip:
        return

    unseen = 1 - sum(seen_by_clip.values()) / len(seen_by_clip)
    if unseen > NOTABLE_DIFFERENCE:
        yield "unseen", f"{unseen:.0%} of the used clips' frames are in no sample."


def _scale_differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    scale = theirs["scale"]
    read_scale = theirs["read_scale"]
    if abs(read_scale / scale - 1) > NOTABLE_DIFFERENCE:
        yield (
            "scale",
            f"The LoRA trains at a scale of {scale:g}; programs read the saved file at"
            f" {read_scale:g}, {read_scale / scale:g} x as strong.",
        )
    if abs(scale / (ours["scale"] or scale) - 1) > NOTABLE_DIFFERENCE:
        yield "alpha", f"alpha / rank is {scale:g} there and {ours['scale']:g} here."
