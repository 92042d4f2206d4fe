"""The verdict on a run: it learns, has reached a plateau, or copies its clips.

The verdict is a pure function of the validation losses so far. Readings are compared
clip by clip, so the difficulty of a clip cancels out; the scatter of the differences
over the clips says how reliable their mean is. docs/monitor.md has the formulas and the
evidence for the constants.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from videotune.runs.journal import readings_of, sound_of, with_mean_of_modalities
from videotune.text import counted
from videotune.validation.chance import rise

LEARNING = "LEARNING"
PLATEAU = "PLATEAU"
OVERFITTING = "OVERFITTING"

LAST_STEP = "nothing speaks against the last step"
"""Why the last step of a run is recommended, if no other had a lower error."""

MIN_RISE = 0.01
"""The least rise that counts as overfitting, as a share of the first reading.

The weights of two steps differ by as much even if nothing is copied.
"""

MIN_READINGS = 3
"""Readings, the first included, before a verdict is given."""

Reading = Mapping[str, Any]
"""A validation record of the journal."""


@dataclass(frozen=True)
class Verdict:
    """The verdict at one reading."""

    label: str | None
    """LEARNING, PLATEAU or OVERFITTING; None if there is no verdict yet."""

    reason: str
    """A sentence for the user."""

    step: int
    """The step of the reading."""

    best_step: int | None = None
    """The step of the lowest held-out reading so far."""

    best: float | None = None
    """The lowest held-out reading so far."""

    as_good: tuple[int, int] | None = None
    """First and last step around the best one that cannot be told from it."""

    turned: bool = False
    """Whether the last state is not the recommended checkpoint.

    True if the run overfits, or held-out clips are above their best by more than
    chance.
    """

    quantile: int | None = None
    """Noise level, 1 (least) to 9, at which held-out clips of an overfit run rose."""

    validation: str | None = None
    """The name of the validation set."""

    parts: Mapping[str, str | None] | None = None
    """The verdicts on video and sound, if both are learnt."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the journal line."""
        fields: dict[str, Any] = {"verdict": self.label}
        for key, value in vars(self).items():
            is_left_out = key == "label" or (key == "parts" and value is None)
            if not is_left_out:
                fields[key] = list(value) if isinstance(value, tuple) else value
        return fields


def judge(
    lines: Iterable[Mapping[str, Any]], to_come: Sequence[int] = ()
) -> Verdict | None:
    """Return the verdict on a run by its validations so far, or None without any.

    If video and sound are learnt, each has its own. The run copies if either copies;
    otherwise it learns if either learns. Its best step is that of the mean of both.

    Args:
        lines: events of the journal.
        to_come: the next steps at which a living run will validate.
    """
    readings = readings_of(lines)
    if not readings:
        return None
    video = _judge(readings, to_come)
    of_sound = sound_of(readings)
    if not of_sound:
        return video
    if any(reading["train"] is None for reading in of_sound):
        no_sound = "no training clip of the validation has sound"
        return _joined(video, Verdict(None, no_sound, video.step), readings)
    return _joined(video, _judge(of_sound, to_come), readings)


def ranking(readings: Sequence[Reading], verdict: Verdict) -> Sequence[Reading]:
    """Return the readings whose held-out clips decide which step is the best.

    They are those of the part that has a verdict, or the mean of both.
    """
    parts = verdict.parts or {}
    if parts.get("video") and parts.get("sound"):
        return with_mean_of_modalities(readings)
    return sound_of(readings) if parts.get("sound") else readings


def _joined(video: Verdict, sound: Verdict, readings: Sequence[Reading]) -> Verdict:
    """Return the verdict on a run that learns video and sound.

    Args:
        video: the verdict on the video.
        sound: the verdict on the sound.
        readings: of the video, with those of the sound.
    """
    parts = {"video": video.label, "sound": sound.label}
    if video.label is None or sound.label is None:
        judged = sound if video.label is None else video
        name = "sound" if video.label is None else "video"
        reason = judged.reason
        if judged.label is not None:
            reason = f"{name}: {reason}"
        return replace(judged, reason=reason, parts=parts)

    labels = (OVERFITTING, LEARNING, PLATEAU)
    label = min(video.label, sound.label, key=labels.index)
    decisive = video if video.label == label else sound
    means = with_mean_of_modalities(readings)
    best = lowest(means)
    return replace(
        decisive,
        label=label,
        reason=f"video ({video.label}): {video.reason}; sound ({sound.label}): {sound.reason}",
        best_step=int(means[best]["step"]),
        best=float(means[best]["held_out"]["normalised"]),
        as_good=None,  # it is known of each part alone
        turned=video.turned or sound.turned,
        parts=parts,
    )


def _judge(readings: Sequence[Reading], to_come: Sequence[int]) -> Verdict:
    """Return the verdict on the video, or on what is learnt alone."""
    latest = readings[-1]
    step = int(latest["step"])
    name = latest.get("validation")
    obstacle = _reason_for_no_verdict(readings)
    if obstacle:
        return Verdict(None, obstacle, step, validation=name)

    held_out = [clips_of(reading, "held_out") for reading in readings]
    best = lowest(readings)
    first, last = as_good(held_out, best)
    has_too_few = len(readings) < MIN_READINGS
    verdict = Verdict(
        label=None,
        reason=too_few_readings(len(readings), to_come) if has_too_few else "",
        step=step,
        best_step=int(readings[best]["step"]),
        best=float(readings[best]["held_out"]["normalised"]),
        as_good=(int(readings[first]["step"]), int(readings[last]["step"])),
        validation=name,
    )
    if has_too_few:
        return verdict

    risen = overfits(readings, best)
    if risen is not None:
        return replace(
            verdict,
            label=OVERFITTING,
            reason=_overfitting_reason(readings, best, risen),
            turned=True,
            quantile=turned_first(readings),
        )
    label, reason = _recent_trend(readings)
    is_worse = _is_above(held_out[best], held_out[-1])
    return replace(verdict, label=label, reason=reason, turned=is_worse)


def too_few_readings(num_readings: int, to_come: Sequence[int] = ()) -> str:
    """Return when the verdict comes, or what it lacks.

    Args:
        num_readings: validations of the run so far.
        to_come: the next steps at which it will validate.
    """
    lacking = MIN_READINGS - num_readings
    if len(to_come) >= lacking:
        return f"the verdict comes with the validation at step {to_come[lacking - 1]}"

    planned = num_readings + len(to_come)
    if to_come:
        return (
            f"a verdict needs {MIN_READINGS} validations, the run makes {planned}: "
            "set a smaller validate_every"
        )
    return (
        f"a verdict needs {MIN_READINGS} validations, the run has {planned}: "
        "a run with a smaller validate_every has more"
    )


def count_latest(lines: Iterable[Mapping[str, Any]], label: str) -> int:
    """Count the latest consecutive readings at which the verdict was ``label``."""
    readings = readings_of(lines)
    count = 0
    for end in range(len(readings), 0, -1):
        verdict = judge(readings[:end])
        if verdict is None or verdict.label != label:
            break
        count += 1
    return count


def _reason_for_no_verdict(readings: Sequence[Reading]) -> str:
    """Return why more readings will not give a verdict either, or an empty string."""
    if readings[-1].get("held_out") is None:
        return "no clip is kept aside for checking, so no loss shows copying"
    if any(None in _values(reading) for reading in readings):
        return "a validation loss is not finite"
    if any(len(clips_of(reading, "held_out")) < 2 for reading in readings):
        return "the scatter over clips needs at least two clips kept aside"
    return ""


def _values(reading: Reading) -> list[float | None]:
    values = []
    for part in (reading["held_out"], reading["train"]):
        values.append(part["normalised"])
        values.extend(part.get("clips", {}).values())
    return values


def clips_of(reading: Reading, part: str) -> dict[str, float]:
    """Return the value of each clip of "held_out" or "train"; empty without clips."""
    fields = reading.get(part) or {}
    return dict(fields.get("clips") or {})


def lowest(readings: Sequence[Reading]) -> int:
    """Return the index of the (first) reading with the lowest held-out mean."""
    means = [reading["held_out"]["normalised"] for reading in readings]
    return means.index(min(means))


def overfits(readings: Sequence[Reading], best: int) -> int | None:
    """Return the index of the latest reading that shows overfitting, or None.

    At this reading and the one before, held-out clips are above their best by more than
    chance while training clips are below theirs. The result stays until a reading is
    lower than the best.

    Args:
        readings: all readings of the set.
        best: index of the lowest one.
    """
    is_copying = [_is_copying(readings[best], reading) for reading in readings]
    for index in range(len(readings) - 1, best + 1, -1):
        if is_copying[index] and is_copying[index - 1]:
            return index
    return None


def _overfitting_reason(readings: Sequence[Reading], best: int, risen: int) -> str:
    first = readings[best]
    worst = readings[risen]
    latest = readings[-1]

    verb = "have risen"
    since_then = ""
    if worst is not latest:
        verb = "rose"
        now = latest["held_out"]["normalised"]
        since_then = f" at step {worst['step']} (now {now:.3f}, no new best)"
    num_clips = len(clips_of(latest, "held_out"))
    return (
        f"clips kept aside were best at step {first['step']} "
        f"({first['held_out']['normalised']:.3f} of their error at step "
        f"{readings[0]['step']}) and {verb} to "
        f"{worst['held_out']['normalised']:.3f}{since_then}, more than the scatter "
        f"over {num_clips} clips explains and twice in a row, while training clips "
        f"fell from {first['train']['normalised']:.3f} to "
        f"{worst['train']['normalised']:.3f}: "
        "the training clips are being learned by heart"
    )


def _is_copying(best: Reading, now: Reading) -> bool:
    """Whether held-out clips have risen while training clips have fallen."""
    has_risen = _is_above(clips_of(best, "held_out"), clips_of(now, "held_out"))
    change_in_training, _ = rise(clips_of(best, "train"), clips_of(now, "train"))
    return has_risen and change_in_training < 0


def _is_above(best: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Whether clips have risen by more than chance and more than ``MIN_RISE``."""
    mean, chance = rise(best, now)
    return mean > max(chance, MIN_RISE)


def as_good(held_out: Sequence[Mapping[str, float]], best: int) -> tuple[int, int]:
    """Return the first and last reading around the best that are as good as it.

    Args:
        held_out: for each reading the values of the held-out clips.
        best: index of the lowest reading.
    """
    first = best
    while first > 0 and _is_within_chance(held_out[best], held_out[first - 1]):
        first -= 1
    last = best
    while last < len(held_out) - 1 and _is_within_chance(
        held_out[best], held_out[last + 1]
    ):
        last += 1
    return first, last


def _is_within_chance(best: Mapping[str, float], now: Mapping[str, float]) -> bool:
    mean, chance = rise(best, now)
    return mean <= chance


def recommend(
    held_out: Mapping[int, float], best: int, saved: Collection[int]
) -> tuple[int, str]:
    """Recommend a saved step of a run whose last state is not its best.

    Args:
        held_out: the validation loss by step.
        best: the step at which it was lowest.
        saved: the steps with a checkpoint.

    Returns:
        The saved step with the lowest loss, or if none was validated the nearest to
        ``best``; and why it is not ``best`` (empty if it is).
    """
    validated = [step for step in saved if step in held_out]
    if not validated:
        nearest = min(saved, key=lambda step: (abs(step - best), step))
        reason = (
            f"it is the nearest to step {best}, where clips kept aside were best: "
            "no saved step was validated"
        )
        return nearest, reason

    recommended = min(validated, key=lambda step: (held_out[step], step))
    if recommended == best:
        return recommended, ""
    reason = f"it is the best of those saved: there is no checkpoint of step {best}"
    if not best:
        reason += "; clips kept aside were best before training"
    return recommended, reason


def turned_first(readings: Sequence[Reading]) -> int:
    """Return the noise level, from 1, at which held-out clips rose first.

    Of the levels that have risen at least half as much as the one with the greatest
    rise, it is the one whose lowest reading is the earliest.
    """
    by_level = [reading["held_out"]["by_quantile"] for reading in readings]
    # At a level that no clip has, nothing rises.
    curves = [
        [0.0] * len(by_level) if None in curve else curve
        for curve in zip(*by_level, strict=True)
    ]
    rises = []
    for curve in curves:
        first = curve[0]
        rises.append((curve[-1] - min(curve)) / max(first, 1e-12))

    candidates = [level for level, value in enumerate(rises) if value >= max(rises) / 2]
    earliest = min(
        candidates,
        key=lambda level: (curves[level].index(min(curves[level])), -rises[level]),
    )
    return 1 + earliest


def recent_readings(readings: Sequence[Reading]) -> Sequence[Reading]:
    """Return the readings whose trend decides between LEARNING and PLATEAU.

    The first is left out: the fall from step 0 does not show whether the run still learns.
    """
    after_first = readings[1:]
    return after_first[-max(MIN_READINGS, ceil(len(readings) / 3)) :]


def _recent_trend(readings: Sequence[Reading]) -> tuple[str, str]:
    """Return LEARNING or PLATEAU, and why.

    The trend is measured over the last third of the readings, at least three, without the
    first.
    """
    recent = recent_readings(readings)
    first = recent[0]
    last = recent[-1]
    held_out = _direction(clips_of(first, "held_out"), clips_of(last, "held_out"))
    train = _direction(clips_of(first, "train"), clips_of(last, "train"))

    since = f"since step {first['step']}"
    changes = "; ".join(
        (
            _describe_change("clips kept aside", "held_out", held_out, first, last),
            _describe_change("training clips", "train", train, first, last),
        )
    )
    if held_out < 0:
        return LEARNING, f"{since} {changes}"
    if held_out > 0 and train > 0:
        cause = "both have got worse, a sign of too high a learning_rate"
        return PLATEAU, f"{since} {changes}: {cause}"
    if held_out > 0:
        return PLATEAU, f"{since} {changes}"
    if _has_fallen(first, last):
        clips = counted(len(clips_of(last, "held_out")), "clip")
        cause = (
            "the error on unseen clips may have fallen, but no more than chance explains "
            f"with the {clips} kept aside that it measures"
        )
        return PLATEAU, f"{since} {changes}: {cause}"
    if train < 0:
        cause = "the model now improves only on the training clips"
        return PLATEAU, f"{since} {changes}: {cause}"
    return PLATEAU, f"{since} neither has fallen by more than chance: {changes}"


def _has_fallen(first: Reading, last: Reading) -> bool:
    """Whether the held-out clips' mean has fallen, by chance or not."""
    mean, _ = rise(clips_of(first, "held_out"), clips_of(last, "held_out"))
    return mean < -MIN_RISE


def _describe_change(
    name: str, part: str, direction: int, first: Reading, last: Reading
) -> str:
    before = first[part]["normalised"]
    now = last[part]["normalised"]
    change = f"{name} went from {before:.3f} to {now:.3f}"
    return change if direction else f"{change} (which may be chance)"


def _direction(before: Mapping[str, float], now: Mapping[str, float]) -> int:
    """Return -1 if clips fell by more than chance, 1 if they rose, else 0.

    For one clip, the threshold is ``MIN_RISE``.
    """
    mean, chance = rise(before, now)
    threshold = chance if len(before) > 1 else MIN_RISE
    if mean > threshold:
        return 1
    if mean < -threshold:
        return -1
    return 0
