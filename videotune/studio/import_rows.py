"""What becomes of each key of another trainer's config in a project."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from videotune.interop.translated_key import short_key
from videotune.studio.imported_data import ImportedData, ImportedDataset
from videotune.studio.projects import MANAGED_KEYS

LEFT = "left"
"""The verdict on a key that has a counterpart which the project does not take."""

MANAGED = "managed"
"""The verdict on a key whose counterpart the studio sets itself."""

MANAGED_NOTE = "the studio decides: it keeps these files in the project"


@dataclass(frozen=True)
class ImportRow:
    """A key of the config, and what becomes of it in the project."""

    key: str
    """The key, without the sections and numbers that it shares with others."""

    full_key: str

    theirs: Any

    verdict: str
    """As of a translated key, or LEFT or MANAGED."""

    taken: tuple[tuple[str, Any], ...]
    """The project's keys and values."""

    notes: tuple[str, ...]


def import_rows(answer: Mapping[str, Any], imported: ImportedData) -> list[ImportRow]:
    """Return a row for each key that the config has.

    Args:
        answer: the translated config.
        imported: what the project takes of its datasets.
    """
    rows = answer.get("rows") or []
    indices_by_path = _indices_by_path(rows)
    result = []
    for row in rows:
        if not row["given"]:
            continue

        taken_values: dict[str, Any] = {}
        reasons: dict[str, None] = {}
        for name, value in row["ours"].items():
            outcomes = _outcomes(name, value, imported, indices_by_path)
            for our_key, our_value, reason in outcomes:
                if reason:
                    reasons[reason] = None
                else:
                    taken_values[our_key] = our_value

        verdict = row["verdict"]
        if reasons and not taken_values:
            verdict = MANAGED if list(reasons) == [MANAGED_NOTE] else LEFT
        notes = [row["note"], *reasons]
        result.append(
            ImportRow(
                key=short_key(row["key"]),
                full_key=row["key"],
                theirs=row["theirs"],
                verdict=verdict,
                taken=tuple(taken_values.items()),
                notes=tuple(note for note in notes if note),
            )
        )
    return result


def _indices_by_path(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the place of each dataset in the other trainer's config, by its path."""
    indices: dict[str, str] = {}
    for row in rows:
        for name, value in row["ours"].items():
            head, _, key = name.rpartition(".")
            if head.startswith("datasets.") and key == "path":
                indices.setdefault(str(value), head.removeprefix("datasets."))
    return indices


def _outcomes(
    name: str,
    value: Any,
    imported: ImportedData,
    indices_by_path: Mapping[str, str],
) -> Iterable[tuple[str, Any, str]]:
    """Yield the project's key and value for one of a row, and the reason why it is not
    taken, which is empty if it is; one for each dataset that it is of.
    """
    head, _, key = name.rpartition(".")
    if name.partition(".")[0] in MANAGED_KEYS:
        yield name, value, MANAGED_NOTE
    elif name.partition(".")[0] != "datasets":
        replaced = imported.run_keys.get(name, value) != value
        yield name, value, "its datasets have another value" if replaced else ""
    else:
        indices = head.removeprefix("datasets").removeprefix(".")
        for dataset in imported.datasets:
            if _belongs_to(dataset, indices, indices_by_path, key, value):
                reason = imported.reason_against(dataset, key)
                yield imported.place_of(dataset, key), value, reason


def _belongs_to(
    dataset: ImportedDataset,
    indices: str,
    indices_by_path: Mapping[str, str],
    key: str,
    value: Any,
) -> bool:
    """Return whether a key of datasets with these indices is the one of a dataset."""
    own_indices = indices_by_path.get(dataset.path, "")
    is_in_group = not indices or f"{own_indices}_".startswith(f"{indices}_")
    if key in ("path", "kind"):
        return is_in_group
    return is_in_group and dataset.settings.get(key) == value
