"""What is wrong with a sample's pictures, as a run recorded it: black, flat, frozen, noise.

A run measures each sample when it writes it (``picture_measure``) and keeps the result in
the journal's line under ``picture``. Reading it needs neither the video nor numpy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from videotune.text import counted, some

FAULTS = {
    "black": "black",
    "flat": "of one flat colour",
    "noise": "noise",
    "frozen": "without motion",
}
"""What is said of a sample with a fault, the gravest first."""


def fault_of(record: Mapping[str, Any]) -> str | None:
    """Return the fault in a sample's record: a key of FAULTS.

    None if it has none, or was written by an earlier version that measured nothing.
    """
    picture = record.get("picture")
    fault = picture.get("fault") if isinstance(picture, Mapping) else None
    return fault if isinstance(fault, str) and fault in FAULTS else None


def samples_at(
    records: Iterable[Mapping[str, Any]], step: float
) -> list[Mapping[str, Any]]:
    """Return the records of the samples of a step, of previews and sample metrics."""
    samples: list[Mapping[str, Any]] = []
    for record in records:
        if record.get("step") != step:
            continue
        if record.get("kind") == "sample":
            samples.append(record)
        measured = record.get("samples")
        if record.get("kind") == "sample_metrics" and isinstance(measured, list):
            samples.extend(item for item in measured if isinstance(item, Mapping))
    return samples


def remark_at(records: Iterable[Mapping[str, Any]], step: float) -> str:
    """Return what is wrong with the samples of a step, in words; empty if nothing is.

    Args:
        records: lines of the journal.
        step: the step, such as a checkpoint's.
    """
    samples = samples_at(records, step)
    count = Counter(fault_of(sample) for sample in samples)
    remarks = []
    for fault, text in FAULTS.items():
        if not count[fault]:
            continue
        verb = "is" if count[fault] == 1 else "are"
        remarks.append(f"{count[fault]} {verb} {text}")
    if not remarks:
        return ""
    return f"of {counted(len(samples), 'sample')}, {some(remarks)}"
