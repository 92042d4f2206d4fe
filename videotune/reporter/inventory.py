"""The chapters that list clips, settings and files, and show how to use the files."""

import json
import re
from collections.abc import Sequence
from os.path import getsize, isdir, isfile, relpath
from pathlib import Path
from textwrap import shorten
from typing import Any

from videotune.files import size_text
from videotune.reporter.comfyui import comfyui_steps
from videotune.reporter.condition_code import condition_code
from videotune.reporter.conditions import (
    conditions,
    takes_last_image,
    with_first_frame,
)
from videotune.reporter.outcome import recommended_checkpoint
from videotune.reporter.previews import Media, link_in, picture_of, step_in
from videotune.reporter.privacy import shown_path
from videotune.reporter.read import (
    Fields,
    Record,
    Run,
    at,
    items,
    mapping,
    number,
)
from videotune.reporter.sound_code import sound_use
from videotune.reporter.times_seen import TimesSeen, times_seen
from videotune.sampling.picture_faults import remark_at
from videotune.text import (
    as_argument,
    counted,
    plain,
    shape_words,
    state_words,
    value_text,
)

ORIGINS = ("user", "preset", "family", "default")
"""Origins of a setting, in the order of the page."""

CAPTION_LENGTH = 160
"""Characters of a caption, at most."""

FEWEST_ALIKE = 4
"""Clips alike that are folded into one line."""


def clips(run: Run, media: Media) -> dict[str, Any]:
    """Return the chapter of all clips: skipped ones first, then held out, then used."""
    if run.check is None:
        return {"absent": run.absent("check.json, the account of the clips")}
    counts = {}
    for key in ("used", "held_out", "skipped"):
        counts[key] = number(run.check.get(key)) or 0
    num_found = number(run.check.get("found"))

    buckets = []
    for bucket in _buckets(run) or items(run.check.get("buckets")):
        fields = mapping(bucket)
        numbers = [value_text(fields[key]) for key in ("windows", "tokens")]
        shape = shape_words(value_text(fields["shape"]))
        if fields["sound"] is True:
            shape += ", with sound"
        buckets.append([shape, *numbers])

    seen = times_seen(run)
    seen_by_path = {clip.path: clip for clip in seen}
    rows = []
    alike: dict[str, list[tuple[Any, ...]]] = {}
    for clip in sorted(run.clips, key=_clip_order):
        row = _clip_row(clip, media, seen_by_path)
        if _is_usual(clip):
            alike.setdefault(_description(clip), []).append(row)
        else:
            rows.append(row)
    groups = []
    for description, group in alike.items():
        if len(group) < FEWEST_ALIKE:
            rows.extend(group)
        else:
            groups.append(
                (f"{counted(len(group), 'clip')} alike: {description}", group)
            )
    return {
        "absent": "",
        "counts": counts | {"found": num_found},
        "adds_up": num_found == sum(counts.values()),
        "notes": items(run.check.get("notes")),
        "buckets": buckets,
        "rows": rows,
        "groups": groups,
        "bands_differ": len({clip.band for clip in seen}) > 1,
    }


def _buckets(run: Run) -> list[Any]:
    return items(run.last("start").get("buckets"))


def _clip_order(clip: Fields) -> tuple[bool, bool, bool]:
    return bool(clip["used"]), bool(clip["held_out"]), not clip["warnings"]


def _is_usual(clip: Fields) -> bool:
    """Whether nothing about a clip needs a look: used or held out, without a remark."""
    remarkable = clip["warnings"] or clip["detail"] or number(clip["repeats_share"])
    is_real_speed = number(clip["speed"]) in (None, 1)
    return bool(clip["used"] or clip["held_out"]) and not remarkable and is_real_speed


def _description(clip: Fields) -> str:
    """Return what clips alike have in common."""
    parts = [
        state_words(clip),
        _source(clip),
        f"trained as {_used_as(clip)}" if clip["used"] else _used_as(clip),
    ]
    return "; ".join(part for part in parts if part)


def _source(clip: Fields) -> str:
    """Return size, frames and rate of a clip's file."""
    size = ""
    if clip["width"]:
        size = f"{value_text(clip['width'])}x{value_text(clip['height'])}"
    frames = ""
    num_frames = number(clip["source_frames"])
    if num_frames:
        frames = counted(num_frames, "frame")
    fps = ""
    if clip["source_fps"]:
        fps = f"{plain(number(clip['source_fps']))} fps"
    return ", ".join(part for part in (size, frames, fps) if part)


def _used_as(clip: Fields) -> str:
    """Return the windows of a clip and their shape."""
    windows = number(clip["windows"])
    if not windows:
        return ""
    shape = f" of {shape_words(str(clip['shape']))}" if clip["shape"] else ""
    return f"{counted(windows, 'window')}{shape}"


def _clip_row(
    clip: Fields, media: Media, seen_by_path: dict[str, TimesSeen]
) -> tuple[Any, ...]:
    """Return (clip, caption, picture, source, use, times seen, note on the speed)."""
    path = str(clip.get("path", ""))
    captions = items(clip["captions"])
    caption = ""
    if captions:
        caption = shorten(str(captions[0]), CAPTION_LENGTH, placeholder=" …")
    speed = number(clip["speed"])
    speed_note = ""
    if speed not in (None, 1):
        speed_note = f"plays at {plain(speed)}× its speed"
    picture = media.embedded.get(picture_of(clip))
    seen = seen_by_path.get(path)
    return clip, caption, picture, _source(clip), _used_as(clip), seen, speed_note


def settings(run: Run) -> dict[str, Any]:
    """Return the chapter of the settings: the user's first, defaults apart."""
    if run.config is None:
        return {"absent": run.absent("config.json, the resolved settings")}
    origins = mapping(run.config.get("origins"))
    lengths = _lengths_in_epochs(run)
    rows = []
    for key, value in flat_settings(run).items():
        epochs_key = "epochs" if key == "steps" else f"{key}_epochs"
        if key in lengths:
            rows.append((key, value_text(lengths[key]), _origin(key, origins)))
        elif epochs_key in lengths:
            rows.append((key, value_text(value), epochs_key))
        else:
            rows.append((key, value_text(value), _origin(key, origins)))
    rows.sort(
        key=lambda row: ORIGINS.index(row[2]) if row[2] in ORIGINS else len(ORIGINS)
    )
    return {
        "absent": "",
        "own": [row for row in rows if row[2] != "default"],
        "defaults": [row for row in rows if row[2] == "default"],
    }


def _lengths_in_epochs(run: Run) -> dict[str, float]:
    """Return the lengths that the user gave in passes over the data; a run's settings
    have them in steps.
    """
    from videotune.config.load import EPOCH_KEYS  # imports pydantic

    asked = mapping(mapping(run.config).get("asked"))
    lengths = {}
    for key in EPOCH_KEYS.values():
        value = number(asked[key])
        if value is not None:
            lengths[key] = value
    return lengths


def flat_settings(run: Run) -> dict[str, Any]:
    """Return the run's settings by dotted name."""
    from videotune.config.load import flatten  # imports pydantic

    return flatten(mapping(run.setting()))


def _origin(key: str, origins: Record) -> str:
    """Return the origin of a key, or of its section."""
    while key:
        if key in origins:
            return str(origins[key])
        key = key.rpartition(".")[0]
    return "not said"


def files(run: Run) -> dict[str, Any]:
    """Return the chapter of the exported files and the checkpoints."""
    checkpoints = []
    for save in run.of_kind("save"):
        step = number(save.get("step"))
        path = str(save.get("path", ""))
        remark = "" if step is None else remark_at(run.journal, step)
        link = link_in(run, path)
        checkpoints.append((plain(step), (shown_path(run, path), link), remark))

    absent = ""
    if run.exports is None:
        absent = run.absent("exports.json, the exported files")
    no_checkpoint = ""
    if not checkpoints:
        no_checkpoint = run.absent("checkpoints appear as the run saves them")
    return {
        "absent": absent,
        "exports": [_export_row(run, entry) for entry in run.exports or ()],
        "no_checkpoint": no_checkpoint,
        "checkpoints": checkpoints,
    }


def _export_row(run: Run, entry: Record) -> tuple[Any, ...]:
    """Return (format, (path, link), size, error, reader) of an exported file."""
    path = str(entry.get("path", ""))
    size = "not found"
    for file in (run.folder / path, Path(path)):
        if isfile(file):
            size = size_text(getsize(file))
            break

    verified = mapping(entry.get("verified"))
    error = number(verified["max_error"])
    link = link_in(run, path)
    shown = (shown_path(run, path), link)
    return entry.get("format", ""), shown, size, error, verified["reader"]


def use(run: Run, *, is_shared: bool = False) -> dict[str, Any]:
    """Return the chapter on using the files in diffusers and in ComfyUI.

    Args:
        run: the run.
        is_shared: paths are relative to the run folder, for a page that is sent to
            others.
    """
    if run.exports is None:
        return {"absent": run.absent("exports.json, the exported files")}
    entries = [entry for entry in run.exports if entry.get("path")]
    for_comfyui = [entry for entry in entries if _is_for_comfyui(entry)]
    others = [entry for entry in entries if entry not in for_comfyui]
    comfyui = _of_best_step(run, for_comfyui)
    lines = _loading_code(run, others or entries, is_shared)
    pipelines = _pipelines_in(lines)
    takes_image = any("ImageToVideo" in name for name in pipelines)
    preview_values = _preview_values(run)

    previews = run.of_kind("sample")
    folder = run.folder.resolve().name if is_shared else str(run.folder)
    sound = sound_use(run, pipelines, folder)
    chapter = {
        "absent": "",
        "trigger": ", ".join(_triggers(run)),
        "lines": lines,
        "pipelines": pipelines,
        "takes_image": takes_image,
        "takes_last_image": takes_last_image(run),
        "prompt": str(previews[0].get("prompt")) if previews else "…",
        "shape": _preview_shape(run),
        "sample": mapping(run.setting("sample")),
        "fps": value_text(run.setting("video_config", "target_fps") or 16),
        "arguments": _pipeline_arguments(run),
        "method": run.setting("training_method"),
        "is_toy": run.is_toy,
        "preview_values": preview_values,
        "comfyui": [_path(run, entry, is_shared) for entry in comfyui],
        "comfyui_steps": comfyui_steps(
            comfyui or _of_best_step(run, others),
            run.setting("training_method"),
            base_model=str(run.setting("base_model_name") or ""),
            takes_image=takes_image,
            preview_values=preview_values,
        ),
        "folder": as_argument(folder),
        "is_shared": is_shared,
        "conditions": conditions(run, folder),
        **sound,
        "install": _install_command(lines, has_sound=bool(sound["sound_rate"])),
        **_differences_of_call(pipelines),
        "given": None,
        "with_first_frame": None,
        "with_conditions": None,
    }
    if chapter["conditioning_modality"]:
        return chapter
    code = condition_code(run, pipelines, chapter["shape"])
    if code is not None:
        chapter["with_conditions"] = chapter | {"given": code, "takes_image": False}
        return chapter
    first_frame_lines = with_first_frame(run, lines)
    if first_frame_lines is not None:
        chapter["with_first_frame"] = chapter | {
            "lines": first_frame_lines,
            "pipelines": _pipelines_in(first_frame_lines),
            "takes_image": True,
        }
    return chapter


def _install_command(lines: Sequence[str], *, has_sound: bool) -> str:
    """Return the command that installs what the code of diffusers imports.

    Args:
        lines: the code that loads the files.
        has_sound: whether it writes a video with sound.
    """
    packages = ["torch", "diffusers", "transformers", "sentencepiece", "ftfy"]
    if any("load_lora" in line for line in lines):
        packages.append("peft")
    packages += ["av"] if has_sound else ["imageio", "imageio-ffmpeg"]
    return f"pip install {' '.join(packages)}"


def _triggers(run: Run) -> list[str]:
    """Return the trigger words of the run's datasets, each once."""
    triggers = []
    for dataset in items(run.setting("datasets")):
        trigger = str(mapping(dataset)["trigger"] or "")
        if trigger:
            triggers.append(trigger)
    return list(dict.fromkeys(triggers))


def _is_for_comfyui(entry: Record) -> bool:
    """Whether a file has ComfyUI's names and is not a merged model."""
    is_merged = "-merged-" in Path(str(entry["path"])).name
    return entry.get("format") == "comfyui" and not is_merged


def _pipeline_arguments(run: Run) -> str:
    """Return the arguments of the pipeline's call that the model needs, as code; only
    numbers, and lists of them.
    """
    arguments = []
    for name, value in mapping(at(run.plan, "pipeline_arguments")).items():
        values = value if isinstance(value, list) else [value]
        is_plain = all(isinstance(each, bool | int | float) for each in values)
        if is_plain and re.fullmatch(r"[a-z_]{1,40}", name):
            arguments.append(f"{name}={value!r}")
    return ", ".join(arguments)


def _differences_of_call(pipelines: Sequence[str]) -> dict[str, bool]:
    """Return how the call of a pipeline differs from that of most: whether guidance is
    its guider's, and whether it takes its size from the image.
    """
    path = Path(__file__).with_name("pipeline_calls.json")
    known_calls = json.loads(path.read_text(encoding="utf-8"))
    differences = {"has_guider": False, "has_own_size": False}
    for name in pipelines:
        differences |= known_calls.get(name, {})
    return differences


def _pipelines_in(lines: Sequence[str]) -> list[str]:
    """Return the names of the pipelines that code uses."""
    return sorted(set(re.findall(r"\b[A-Z]\w*Pipeline\b", "\n".join(lines))))


def _of_best_step(run: Run, entries: Sequence[Record]) -> list[Record]:
    """Return the entries of the recommended step, or else of the latest."""
    steps = [step_in(entry) or 0 for entry in entries]
    recommended, _ = recommended_checkpoint(run, run.last("verdict"))
    step = recommended if recommended in steps else max(steps, default=0)
    return [entry for entry in entries if (step_in(entry) or 0) == step]


def _path(run: Run, entry: Record, is_shared: bool) -> str:
    path = str(entry.get("path", ""))
    return shown_path(run, path) if is_shared else str(run.folder / path)


def _loading_code(run: Run, entries: Sequence[Record], is_shared: bool) -> list[str]:
    """Return code that loads the base model and a file of each expert.

    The files are those of the recommended step, or else the latest.
    """
    same_format = [
        entry for entry in entries if entry.get("format") == entries[0].get("format")
    ]
    lines: list[str] = []
    for entry in _of_best_step(run, same_format):
        if not entry.get("use"):
            continue
        path = repr(_path(run, entry, is_shared))
        code = str(entry["use"])
        code = code.replace("THIS_FILE", path).replace("THIS_FOLDER", path)
        code = re.sub(r"'(asset:\w+)'", r"place('\1').folder", code)
        if is_shared:
            code = _with_base_beside(run, code)
        lines.extend(code.split("; "))
    return list(dict.fromkeys(lines))


def _with_base_beside(run: Run, code: str) -> str:
    """Return code with the path of a base model relative to the run's folder, as all
    paths of the page are; it is given relative to the folder of the training.
    """
    base = str(run.setting("base_model_name"))
    if Path(base).is_absolute() or not isdir(base):
        return code
    return code.replace(repr(base), repr(relpath(base, run.folder)))


def _preview_values(run: Run) -> str:
    """Return what the previews are drawn with, in words; empty if it is not known."""
    shape = _preview_shape(run)
    if shape is None:
        return ""
    frames, height, width = shape
    values = [counted(frames, "frame"), f"{width}x{height}"]
    guidance = number(run.setting("sample", "guidance"))
    if guidance is not None:
        values.append(f"guidance {plain(guidance)}")
    return ", ".join(values)


def _preview_shape(run: Run) -> list[int] | None:
    """Return frames, height and width of a preview, or None if unknown."""
    largest = mapping(None)
    if buckets := [mapping(bucket) for bucket in _buckets(run)]:
        largest = max(buckets, key=lambda bucket: number(bucket["windows"]) or 0)
    bucket_shape = re.fullmatch(
        r"([0-9]{1,9})x([0-9]{1,9}x[0-9]{1,9})", str(largest["shape"])
    )
    if bucket_shape is None:
        return None

    frames = number(run.setting("sample", "frames")) or bucket_shape[1]
    resolution = str(run.setting("sample", "resolution"))
    if not re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", resolution):
        resolution = bucket_shape[2]
    height, width = resolution.split("x")
    return [int(frames), int(height), int(width)]
