"""The chapters that list things: clips, settings, files, and how an exported file is used."""

import re
from collections.abc import Sequence
from itertools import takewhile
from os.path import getsize, isfile
from pathlib import Path
from textwrap import shorten
from typing import Any

from videotune.reporter.curves import times_seen
from videotune.reporter.previews import Media, link_in, picture_of, step_in
from videotune.reporter.read import Record, Run, items, mapping, number
from videotune.text import plain, value_text

ORIGINS = ("user", "preset", "family", "default")
"""Who may have set a key, in the order in which the page lists them."""


def clips(run: Run, media: Media) -> dict[str, Any]:
    """Every file that was found and what became of it: skipped ones first, then held out, then used."""
    if run.check is None:
        return {"absent": run.absent("check.json, the account of the clips")}
    counts = {key: number(run.check.get(key)) or 0 for key in ("used", "held_out", "skipped")}
    found = number(run.check.get("found"))
    buckets = items(run.last("start").get("buckets")) or items(run.check.get("buckets"))
    folder = common_folder([str(clip.get("path", "")) for clip in run.clips])
    seen = {clip.path: clip for clip in times_seen(run)}
    rows = []
    for clip in sorted(
        run.clips,
        key=lambda clip: (bool(clip["used"]), bool(clip["held_out"]), not clip["warnings"]),
    ):
        path = str(clip.get("path", ""))
        captions = items(clip["captions"])
        speed = number(clip["speed"])
        caption = shorten(str(captions[0]), 160, placeholder=" …") if captions else ""
        plays = f"plays at {plain(speed)}× its speed" if speed not in (None, 1) else ""
        rows.append(
            (
                clip,
                path[len(folder) :],
                caption,
                media.embedded.get(picture_of(clip)),
                seen.get(path),
                plays,
            )
        )
    return {
        "absent": "",
        "counts": counts | {"found": found},
        "adds_up": found == sum(counts.values()),
        "notes": items(run.check.get("notes")),
        "buckets": [
            [value_text(mapping(row)[key]) for key in ("shape", "windows", "tokens")]
            for row in buckets
        ],
        "folder": folder,
        "rows": rows,
    }


def common_folder(paths: list[str]) -> str:
    """The folder, with its last slash, that all paths lie in; empty where there is none, or but one path."""
    parents = [path.replace("\\", "/").split("/")[:-1] for path in paths]
    shared = [
        names[0]
        for names in takewhile(lambda names: len(set(names)) == 1, zip(*parents, strict=False))
    ]
    return "/".join(shared) + "/" if any(shared) and len(paths) > 1 else ""


def settings(run: Run) -> dict[str, Any]:
    """Every key with its value and who set it: the user's first, defaults last."""
    if run.config is None:
        return {"absent": run.absent("config.json, the resolved settings")}
    origins = mapping(run.config.get("origins"))
    rows = [
        (key, value_text(value), _origin(key, origins))
        for key, value in flat_settings(run).items()
    ]
    rows.sort(key=lambda row: ORIGINS.index(row[2]) if row[2] in ORIGINS else len(ORIGINS))
    own, defaults = (
        [row for row in rows if (row[2] == "default") == default] for default in (False, True)
    )
    return {"absent": "", "own": own, "defaults": defaults}


def flat_settings(run: Run) -> dict[str, Any]:
    """The run's settings by dotted name."""
    from videotune.config.load import flatten  # imports pydantic

    return flatten(mapping(run.setting()))


def _origin(key: str, origins: Record) -> str:
    """Who set a key, or the section that it stands in."""
    while key:
        if key in origins:
            return str(origins[key])
        key = key.rpartition(".")[0]
    return "not said"


def files(run: Run) -> dict[str, Any]:
    """What was exported and how it was verified, and the checkpoints."""
    exports = []
    for entry in run.exports or ():
        path = str(entry.get("path", ""))
        there = next((file for file in (run.folder / path, Path(path)) if isfile(file)), None)
        size = f"{getsize(there) / 1e6:.2f} MB" if there else "not found"
        verified = mapping(entry.get("verified"))
        error = number(verified["max_error"])
        reader = verified["reader"]
        exports.append(
            (entry.get("format", ""), (path, link_in(run, path)), size, error, reader)
        )
    places = [
        (number(save.get("step")), str(save.get("path", ""))) for save in run.of_kind("save")
    ]
    saves = [(plain(step), (path, link_in(run, path))) for step, path in places]
    return {
        "absent": run.absent("exports.json, the exported files") if run.exports is None else "",
        "exports": exports,
        "no_checkpoint": "" if saves else run.absent("no checkpoint has been saved"),
        "checkpoints": saves,
    }


def use(run: Run) -> dict[str, Any]:
    """How what was exported is used in diffusers and in ComfyUI."""
    if run.exports is None:
        return {"absent": run.absent("exports.json, the exported files")}
    entries = [entry for entry in run.exports if entry.get("path")]
    comfyui = [entry for entry in entries if entry.get("format") == "comfyui"]
    triggers = [str(mapping(row)["trigger"] or "") for row in items(run.setting("datasets"))]
    lines = _loading(run, [entry for entry in entries if entry not in comfyui] or entries)
    return {
        "absent": "",
        "trigger": ", ".join(dict.fromkeys(filter(None, triggers))),
        "lines": lines,
        "pipelines": sorted(set(re.findall(r"\b[A-Z]\w*Pipeline\b", "\n".join(lines)))),
        "prompt": next((str(record.get("prompt")) for record in run.of_kind("sample")), "…"),
        "shape": _shape(run),
        "sample": mapping(run.setting("sample")),
        "fps": value_text(run.setting("video_config", "target_fps") or 16),
        "method": run.setting("training_method"),
        "comfyui": ", ".join(_path(run, entry) for entry in comfyui),
        "folder": run.folder,
    }


def _path(run: Run, entry: Record) -> str:
    return str(run.folder / str(entry.get("path", "")))


def _loading(run: Run, entries: Sequence[Record]) -> list[str]:
    """Code that opens the base model and loads the latest file; of two experts' files both are loaded."""
    alike = [entry for entry in entries if entry.get("format") == entries[0].get("format")]
    step = max((step_in(entry) or 0 for entry in alike), default=0)
    lines: list[str] = []
    for entry in alike:
        if (step_in(entry) or 0) == step and entry.get("use"):
            place = repr(_path(run, entry))
            code = str(entry["use"]).replace("THIS_FILE", place).replace("THIS_FOLDER", place)
            lines += re.sub(r"'(asset:\w+)'", r"place('\1').folder", code).split("; ")
    return list(dict.fromkeys(lines))


def _shape(run: Run) -> list[int] | None:
    """Frames, height and width of a preview."""
    buckets = [mapping(bucket) for bucket in items(run.last("start").get("buckets"))]
    most = max(
        buckets, key=lambda bucket: number(bucket["windows"]) or 0, default=mapping(None)
    )
    bucket = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9}x[0-9]{1,9})", str(most["shape"]))
    if bucket is None:
        return None
    sides = re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", str(run.setting("sample", "resolution")))
    height, width = (sides[0] if sides else bucket[2]).split("x")
    return [int(number(run.setting("sample", "frames")) or bucket[1]), int(height), int(width)]
