"""What another trainer does with a folder of clips by its own config, beside what videotune does; nothing is trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videotune.data.buckets import kept_share
from videotune.interop.practices import PRACTICES, DatasetRules, Practice
from videotune.text import counted, short_path
from videotune.types import ModelSpec

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the noise levels that are shown."""

OFF = 0.05
"""The least difference of a speed, a share of the picture or a median noise level that is named."""


@dataclass(frozen=True)
class Fate:
    """What becomes of one clip in one dataset of theirs: why it is dropped, or its samples.

    ``speed``: at which a sample plays for the model, 1.0 being that of the clip. Shares: ``seen`` of the clip's frames that
    lie within a sample; ``held`` of a sample's frames that repeat the clip's last one; ``cut`` of the picture outside of the
    crop. ``stretch``: by how much the width grows more than the height.
    """

    dataset: str
    dropped: str | None = None
    samples: int = 0
    frames: int = 0
    size: tuple[int, int] = (0, 0)
    speed: float = 1.0
    seen: float = 0.0
    held: float = 0.0
    cut: float = 0.0
    stretch: float = 1.0

    @property
    def shape(self) -> str:
        """Frames x height x width."""
        return f"{self.frames}x{self.size[1]}x{self.size[0]}"

    def to_json(self) -> dict[str, Any]:
        """The fate as plain values."""
        own = {"dataset": self.dataset, "dropped": self.dropped, "samples": self.samples}
        return own if self.dropped else own | {
            "shape": self.shape, "speed": self.speed, "seen": self.seen, "held": self.held, "cut": self.cut,
            "stretch": self.stretch,
        }  # fmt: skip


def fates(rules: DatasetRules, clip: Mapping[str, Any], model_fps: float | None) -> Iterator[Fate]:
    """What a dataset's rules make of a clip (a row of ``videotune check --json``), one for each count of frames.

    ``model_fps`` None: the model is told the clip's own rate.
    """
    n, fps = int(clip["source_frames"]), float(clip["source_fps"])
    wide, high = int(clip["width"]), int(clip["height"])
    found = rules.frames(n, fps, wide / high)
    if isinstance(found, str):
        yield Fate(rules.name, dropped=found)
        return
    seen = bytearray(n)
    for sample in found:
        seen[sample[0] : sample[-1] + 1] = b"\1" * (sample[-1] + 1 - sample[0])
    for count in sorted({len(sample) for sample in found}):
        samples = [sample for sample in found if len(sample) == count]
        first, size = samples[0], rules.size(wide, high, count)
        moving = next(i for i in range(count, 0, -1) if i == 1 or first[i - 1] != first[i - 2])  # without a held end
        step = (first[moving - 1] - first[0]) / (moving - 1) if moving > 1 else 1.0
        yield Fate(
            rules.name, None, len(samples), count, size,
            speed=step / fps * (model_fps or fps) if count > 1 else 1.0, seen=sum(seen) / n, held=1 - moving / count,
            cut=0.0 if rules.stretches else 1 - kept_share(wide, high, size[::-1]),
            stretch=(size[0] / size[1]) / (wide / high) if rules.stretches else 1.0,
        )  # fmt: skip


def steps_of(practice: Practice, found: Mapping[str, Sequence[Fate]]) -> int:
    """Optimizer steps of one epoch, from each clip's fates. Where the rest is dropped, datasets share their buckets."""
    rules, counts = {one.name: one for one in practice.datasets}, Counter[tuple[str, str]]()
    for one in (fate for fates in found.values() for fate in fates):
        own = rules[one.dataset]
        counts["" if own.drops_rest else one.dataset, one.shape] += int(one.samples * own.repeats)
    batches = 0
    for (name, _), count in counts.items():
        own = rules[name] if name else practice.datasets[0]
        batches += count // own.batch if own.drops_rest else math.ceil(count / own.batch)
    return math.ceil(batches / practice.accumulation)


def dissect(
    trainer: str, practice: Practice, spec: ModelSpec, account: Mapping[str, Any], ours: Mapping[str, Any],
    roots: Sequence[Path],
) -> dict[str, Any]:  # fmt: skip
    """Their account of the clips beside ours, and the differences by what they cost.

    ``account``: of ``videotune check``; ``ours``: steps_per_epoch, noise (quantiles at ``SHARES``), scale; ``roots``: the
    datasets' folders, from which clips are named.
    """
    clips = [clip for clip in account["clips"] if clip.get("source_frames", 0) and clip["source_frames"] > 1]
    told = PRACTICES[trainer].get("tells_fps", False)
    rate = None if told else spec.rules.fps
    found = {clip["path"]: [fate for one in practice.datasets for fate in fates(one, clip, rate)] for clip in clips}
    shapes: Counter[str] = Counter()
    for one in (fate for own in found.values() for fate in own if fate.dropped is None):
        shapes[one.shape] += one.samples
    common = shapes.most_common(1)[0][0] if shapes else f"1x{spec.default_resolution}x{spec.default_resolution}"
    frames, height, width = map(int, common.split("x"))
    noise = practice.noise((frames, height, width))
    theirs = {
        "used": sum(any(fate.dropped is None for fate in own) for own in found.values()),
        "dropped": sum(all(fate.dropped is not None for fate in own) for own in found.values()),
        "buckets": dict(shapes.most_common()),
        "steps_per_epoch": steps_of(practice, found),
        "noise": noise if isinstance(noise, str) else noise.quantiles(*SHARES),
        "scale": practice.scale,
        "read_scale": practice.read_scale,
    }
    rows = [
        {"path": short_path(clip["path"], roots),
         "source": {key: clip[f"source_{key}"] for key in ("frames", "fps", "seconds")},
         "theirs": [fate.to_json() for fate in found[clip["path"]]],
         "ours": {key: clip[key] for key in ("used", "reason", "windows", "shape", "speed")}}
        for clip in clips
    ]  # fmt: skip
    facts = {key: PRACTICES[trainer][key] for key in ("repository", "commit", "sources")}
    mine = {"used": account["used"] + account["held_out"], "dropped": account["skipped"], "buckets": {
        bucket["shape"]: bucket["windows"] for bucket in account["buckets"]}} | dict(ours)  # fmt: skip
    result = {"trainer": trainer, **facts, "clips": rows, "theirs": theirs, "ours": mine}
    return result | {"findings": findings(rows, theirs, mine, rate)}


def findings(
    rows: Sequence[Mapping[str, Any]], theirs: Mapping[str, Any], ours: Mapping[str, Any], rate: float | None
) -> list[dict[str, str]]:
    """The differences that change what is learnt, each a kind and a sentence; what costs most comes first."""
    found: list[tuple[str, str]] = []
    kept = [(row, fate) for row in rows for fate in row["theirs"] if fate["dropped"] is None]
    lost = [row for row in rows if row["theirs"] and all(fate["dropped"] for fate in row["theirs"])]
    if lost:
        why = lost[0]["theirs"][0]["dropped"]
        used = sum(row["ours"]["used"] for row in lost)
        found.append(("dropped", f"{counted(len(lost), 'clip')} of {len(rows)} dropped, as {lost[0]['path']}: {why}. "
                                 f"videotune uses {used} of them."))  # fmt: skip
    off = [(row, fate) for row, fate in kept if abs(fate["speed"] - 1) > OFF]
    if off:
        row, fate = max(off, key=lambda pair: abs(math.log(max(pair[1]["speed"], 1e-6))))
        own = f"{row['source']['fps']:g} fps" + (f", the model's are {rate:g}" if rate else "")
        found.append(("speed", f"{counted(len({row['path'] for row, _ in off}), 'clip')} of {len(rows)} at another speed: "
                               f"{row['path']} plays at {fate['speed']:.2f} x ({own}). videotune keeps every clip at 1 x "
                               "unless its config says otherwise."))  # fmt: skip
    for kind, what in (
        ("held", "of a sample's frames repeat the clip's last one"),
        ("cut", "of the picture is cut off"),
    ):
        if (share := max((fate[kind] for _, fate in kept), default=0.0)) > OFF:
            found.append((kind, f"Up to {share:.0%} {what}."))
    if (stretch := max((abs(math.log(fate["stretch"])) for _, fate in kept), default=0.0)) > OFF:
        found.append(("stretch", f"Pictures are stretched by up to {math.exp(stretch):.2f} x; videotune crops."))
    shares = [max(seen) for row in rows if (seen := [fate["seen"] for fate in row["theirs"] if fate["dropped"] is None])]
    if shares and sum(shares) / len(shares) < 1 - OFF:
        found.append(("unseen", f"{1 - sum(shares) / len(shares):.0%} of the used clips' frames are in no sample."))
    if theirs["scale"] and abs(theirs["read_scale"] / theirs["scale"] - 1) > OFF:
        times = theirs["read_scale"] / theirs["scale"]
        found.append(("scale", f"The LoRA trains at a scale of {theirs['scale']:g}; programs read the saved file at "
                               f"{theirs['read_scale']:g}, {times:g} x as strong."))  # fmt: skip
    if abs(theirs["scale"] / (ours["scale"] or theirs["scale"]) - 1) > OFF:
        found.append(("alpha", f"alpha / rank is {theirs['scale']:g} there and {ours['scale']:g} here."))
    if isinstance(theirs["noise"], str):
        found.append(("noise", f"Noise levels: {theirs['noise']}."))
    elif ours["noise"] and abs(theirs["noise"][2] - ours["noise"][2]) > OFF:
        found.append(("noise", f"Half of the noise levels lie below {theirs['noise'][2]:.2f} there and below "
                               f"{ours['noise'][2]:.2f} here."))  # fmt: skip
    return [{"kind": kind, "text": text} for kind, text in found]
