"""What is wrong with a sample, as a run recorded it: pictures that are black, flat, frozen
or noise, and sound that is silent or clipped.

A run measures each sample when it writes it (``picture_measure``, ``sample_files``) and
keeps the result in the journal's line under ``picture`` and ``sound``. Reading it needs
neither the video nor numpy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from videotune.text import counted, some

FAULTS = {
    "black": "black",
    "flat": "nearly all of one flat colour",
    "noise": "noise",
    "frozen": "without motion",
    "silent": "silent",
    "clipped": "too loud (clipped)",
}
"""What is said of a sample with a fault, the gravest first."""

SILENCE = -60.0
"""Loudness in dBFS below which a sample's sound is silent, as in the scan of clips."""

SAMPLE_KINDS = {
    "sample": ("preview", "previews"),
    "sample_metrics": (
        "sample of the sample metrics",
        "samples of the sample metrics",
    ),
}
"""What samples are called, one and several, by the kind of the journal's line."""

MOST_CLIPPED = 0.001
"""The largest share of clipped numbers in a sound without a fault."""


def faults_of(record: Mapping[str, Any]) -> list[str]:
    """Return the faults in a sample's record, of its pictures and of its sound: keys of
    FAULTS.

    Empty if it has none, or was written by an earlier version that measured nothing.
    """
    faults = []
    picture = record.get("picture")
    fault = picture.get("fault") if isinstance(picture, Mapping) else None
    if isinstance(fault, str) and fault in FAULTS:
        faults.append(fault)

    loudness = _sound_figure(record, "loudness")
    clipped = _sound_figure(record, "clipped")
    if loudness is not None and loudness < SILENCE:
        faults.append("silent")
    if clipped is not None and clipped > MOST_CLIPPED:
        faults.append("clipped")
    return faults


def describe_faults(record: Mapping[str, Any]) -> str:
    """Return what is wrong with a sample in a word or two; empty if nothing is."""
    return ", ".join(FAULTS[fault] for fault in faults_of(record))


def describe_sound(record: Mapping[str, Any]) -> str:
    """Return how loud a sample's sound is, as "sound −21 dB"; empty without sound."""
    loudness = _sound_figure(record, "loudness")
    if loudness is None:
        return ""
    return f"sound {round(loudness)} dB".replace("-", "−")


def _sound_figure(record: Mapping[str, Any], key: str) -> float | None:
    sound = record.get("sound")
    value = sound.get(key) if isinstance(sound, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def samples_by_kind(
    records: Iterable[Mapping[str, Any]], step: float
) -> dict[str, list[Mapping[str, Any]]]:
    """Return the records of the samples of a step by the kind of the journal's line: a
    key of SAMPLE_KINDS.
    """
    samples: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in SAMPLE_KINDS}
    for record in records:
        if record.get("step") != step:
            continue
        if record.get("kind") == "sample":
            samples["sample"].append(record)
        measured = record.get("samples")
        if record.get("kind") == "sample_metrics" and isinstance(measured, list):
            of_metrics = (item for item in measured if isinstance(item, Mapping))
            samples["sample_metrics"].extend(of_metrics)
    return samples


def samples_at(
    records: Iterable[Mapping[str, Any]], step: float
) -> list[Mapping[str, Any]]:
    """Return the records of the samples of a step, of previews and sample metrics."""
    by_kind = samples_by_kind(records, step)
    return [*by_kind["sample"], *by_kind["sample_metrics"]]


def faulty_kinds(records: Iterable[Mapping[str, Any]], step: float) -> list[str]:
    """Return which kinds of samples of a step have a fault: keys of SAMPLE_KINDS."""
    by_kind = samples_by_kind(records, step)
    return [kind for kind, samples in by_kind.items() if any(map(faults_of, samples))]


def faulty_share(records: Iterable[Mapping[str, Any]], step: float) -> float:
    """Return the share of the samples of a step that have a fault; 0 without samples."""
    samples = samples_at(records, step)
    faulty = [sample for sample in samples if faults_of(sample)]
    return len(faulty) / max(1, len(samples))


def remark_at(records: Iterable[Mapping[str, Any]], step: float) -> str:
    """Return what is wrong with the samples of a step, in words; empty if nothing is.

    Previews and the samples of the sample metrics are counted apart, since pages show
    them in different places.

    Args:
        records: lines of the journal.
        step: the step, such as a checkpoint's.
    """
    by_kind = samples_by_kind(records, step)
    all_samples = [*by_kind["sample"], *by_kind["sample_metrics"]]
    if not any(map(faults_of, all_samples)):
        return ""

    remarks = []
    for kind, samples in by_kind.items():
        name, plural = SAMPLE_KINDS[kind]
        if samples:
            number_of = counted(len(samples), name, plural)
            remarks.append(f"of {number_of}, {_count_faults(samples)}")
    return "; ".join(remarks)


def _count_faults(samples: Iterable[Mapping[str, Any]]) -> str:
    """Return how many samples have which fault, in words."""
    count: Counter[str] = Counter()
    for sample in samples:
        count.update(faults_of(sample))

    remarks = []
    for fault, text in FAULTS.items():
        if not count[fault]:
            continue
        verb = "is" if count[fault] == 1 else "are"
        remarks.append(f"{count[fault]} {verb} {text}")
    return some(remarks) if remarks else "none has a fault"
