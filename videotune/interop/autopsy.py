"""What another trainer does with a folder of clips by its own config, beside what videotune does; nothing is trained."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from videotune.data.buckets import visible_share
from videotune.interop.rules import SourceVideo
from videotune.interop.trainer_rules import TRAINER_FACTS, DatasetRules, TrainerRules
from videotune.text import short_path
from videotune.types import ModelSpec

NOISE_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the noise levels that are shown."""

NOTABLE_DIFFERENCE = 0.05
"""The least difference of a speed, a share of the picture or a median noise level that is named."""

Outcome = Mapping[str, Any]
"""What becomes of a clip in a dataset of theirs: why it is ``dropped`` (None: it is not), or its ``samples`` of one shape.

``speed``: at which a sample plays for the model, 1.0 being that of the clip. Shares: ``seen`` of the clip's frames that lie
within a sample; ``held`` of a sample's frames that repeat the clip's last one; ``cut`` of the picture outside of the crop.
``stretch``: by how much the width grows more than the height.
"""


def clip_outcomes(
    rules: DatasetRules, clip: Mapping[str, Any], model_fps: float | None
) -> Iterator[Outcome]:
    """What a dataset's rules make of a clip (a row of ``videotune check --json``), one for each count of frames.

    ``model_fps`` None: the model is told the clip's own rate.
    """
    source = SourceVideo(
        *(clip[key] for key in ("source_frames", "source_fps", "width", "height"))
    )
    n, fps, wide, high = source
    found = rules.frames(source)
    if isinstance(found, str):
        yield {"dataset": rules.name, "dropped": found, "samples": 0}
        return
    seen = {i for sample in found for i in range(sample[0], sample[-1] + 1)}
    for count, samples in sorted(Counter(map(len, found)).items()):
        first = next(one for one in found if len(one) == count)
        (width, height) = rules.size(source, count)
        moving = next(
            i for i in range(count, 0, -1) if i == 1 or first[i - 1] != first[i - 2]
        )  # without a held end
        step = (first[moving - 1] - first[0]) / (moving - 1) if moving > 1 else 1.0
        yield {
            "dataset": rules.name, "dropped": None, "samples": samples, "shape": f"{count}x{height}x{width}",
            "speed": step / fps * (model_fps or fps) if count > 1 else 1.0, "seen": len(seen) / n,
            "held": 1 - moving / count,
            "cut": 0.0 if rules.stretches else 1 - visible_share(wide, high, (height, width)),
            "stretch": (width / height) / (wide / high) if rules.stretches else 1.0,
        }  # fmt: skip


def steps_per_epoch(applied: TrainerRules, found: Mapping[str, Sequence[Outcome]]) -> int:
    """Optimizer steps of one epoch, from each clip's outcomes. Where the rest is dropped, datasets share their buckets."""
    rules = {one.name: one for one in applied.datasets}
    counts = Counter[tuple[str, str]]()
    for one in (
        outcome
        for outcomes in found.values()
        for outcome in outcomes
        if outcome["dropped"] is None
    ):
        own = rules[one["dataset"]]
        counts["" if own.drops_rest else own.name, one["shape"]] += int(
            one["samples"] * own.repeats
        )
    batches = 0
    for (name, _), count in counts.items():
        own = rules.get(name, applied.datasets[0])
        batches += count // own.batch if own.drops_rest else math.ceil(count / own.batch)
    return math.ceil(batches / applied.accumulation)


def build_autopsy(
    trainer: str, applied: TrainerRules, spec: ModelSpec, account: Mapping[str, Any], ours: Mapping[str, Any],
    roots: Sequence[Path],
) -> dict[str, Any]:  # fmt: skip
    """Their account of the clips beside ours, and the differences by what they cost.

    ``account``: of ``videotune check``; ``ours``: steps_per_epoch, noise (quantiles at ``NOISE_QUANTILES``), scale; ``roots``: the
    datasets' folders, from which clips are named.
    """
    clips = [clip for clip in account["clips"] if (clip.get("source_frames") or 0) > 1]
    rate = None if TRAINER_FACTS[trainer].get("tells_fps") else spec.rules.fps
    found = {
        clip["path"]: [
            found for one in applied.datasets for found in clip_outcomes(one, clip, rate)
        ]
        for clip in clips
    }
    shapes: Counter[str] = Counter()
    for outcome in (
        outcome for own in found.values() for outcome in own if outcome["dropped"] is None
    ):
        shapes[outcome["shape"]] += outcome["samples"]
    used = sum(any(outcome["dropped"] is None for outcome in own) for own in found.values())
    common = (
        shapes.most_common(1)[0][0]
        if shapes
        else "x".join(["1", *[str(spec.default_resolution)] * 2])
    )
    frames, height, width = map(int, common.split("x"))
    noise = applied.noise((frames, height, width))
    theirs = {
        "used": used, "dropped": len(found) - used, "buckets": dict(shapes.most_common()),
        "steps_per_epoch": steps_per_epoch(applied, found), "scale": applied.scale, "read_scale": applied.read_scale,
        "noise": noise if isinstance(noise, str) else noise.quantiles(*NOISE_QUANTILES),
    }  # fmt: skip
    rows = [
        {
            "path": short_path(clip["path"], roots), "theirs": found[clip["path"]],
            "source": {key: clip[f"source_{key}"] for key in ("frames", "fps", "seconds")},
            "ours": {key: clip[key] for key in ("used", "reason", "windows", "shape", "speed")},
        }
        for clip in clips
    ]  # fmt: skip
    buckets = {bucket["shape"]: bucket["windows"] for bucket in account["buckets"]}
    mine = {
        "used": account["used"] + account["held_out"],
        "dropped": account["skipped"],
        "buckets": buckets,
        **ours,
    }
    facts = {key: TRAINER_FACTS[trainer][key] for key in ("repository", "commit", "sources")}
    named = [
        {"kind": kind, "text": text} for kind, text in list_findings(rows, theirs, mine, rate)
    ]
    return {
        "trainer": trainer,
        **facts,
        "clips": rows,
        "theirs": theirs,
        "ours": mine,
        "findings": named,
    }


def list_findings(
    rows: Sequence[Mapping[str, Any]],
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    rate: float | None,
) -> Iterator[tuple[str, str]]:
    """The differences that change what is learnt, each a kind and a sentence; what costs most comes first."""
    kept = [
        (row, outcome)
        for row in rows
        for outcome in row["theirs"]
        if outcome["dropped"] is None
    ]
    if lost := [
        row
        for row in rows
        if row["theirs"] and all(outcome["dropped"] for outcome in row["theirs"])
    ]:
        used = sum(row["ours"]["used"] for row in lost)
        why = f"{lost[0]['path']}: {lost[0]['theirs'][0]['dropped']}"
        yield (
            "dropped",
            f"{len(lost)} of {len(rows)} clips dropped, as {why}. videotune uses {used} of them.",
        )
    if off := [
        (row, outcome)
        for row, outcome in kept
        if abs(outcome["speed"] - 1) > NOTABLE_DIFFERENCE
    ]:
        row, outcome = max(off, key=lambda pair: abs(math.log(max(pair[1]["speed"], 1e-6))))
        own = f"{row['source']['fps']:g} fps" + (f", the model's are {rate:g}" if rate else "")
        clips = f"{len({row['path'] for row, _ in off})} of {len(rows)} clips at another speed"
        yield (
            "speed",
            f"{clips}: {row['path']} plays at {outcome['speed']:.2f} x ({own}); in videotune at 1 x.",
        )
    for kind, what in (
        ("held", "a sample's frames repeat the clip's last one"),
        ("cut", "the picture is cut off"),
    ):
        if (
            share := max((outcome[kind] for _, outcome in kept), default=0.0)
        ) > NOTABLE_DIFFERENCE:
            yield kind, f"Up to {share:.0%} of {what}."
    if (
        stretch := max((abs(math.log(outcome["stretch"])) for _, outcome in kept), default=0.0)
    ) > NOTABLE_DIFFERENCE:
        yield (
            "stretch",
            f"Pictures are stretched by up to {math.exp(stretch):.2f} x; videotune crops.",
        )
    seen = {
        row["path"]: max(outcome["seen"] for own, outcome in kept if own is row)
        for row, _ in kept
    }
    if seen and (unseen := 1 - sum(seen.values()) / len(seen)) > NOTABLE_DIFFERENCE:
        yield "unseen", f"{unseen:.0%} of the used clips' frames are in no sample."
    scale = theirs["scale"]
    read = theirs["read_scale"]
    if abs(read / scale - 1) > NOTABLE_DIFFERENCE:
        told = (
            f"The LoRA trains at a scale of {scale:g}; programs read the saved file at {read:g}"
        )
        yield "scale", f"{told}, {read / scale:g} x as strong."
    if abs(scale / (ours["scale"] or scale) - 1) > NOTABLE_DIFFERENCE:
        yield "alpha", f"alpha / rank is {scale:g} there and {ours['scale']:g} here."
    if isinstance(theirs["noise"], str):
        yield "noise", f"Noise levels: {theirs['noise']}."
    elif abs(theirs["noise"][2] - ours["noise"][2]) > NOTABLE_DIFFERENCE:
        halves = theirs["noise"][2], ours["noise"][2]
        yield (
            "noise",
            "Half of the noise levels lie below {:.2f} there and below {:.2f} here.".format(
                *halves
            ),
        )
