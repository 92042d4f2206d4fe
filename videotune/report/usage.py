"""The sections on the run as a thing: where its time went, and how its file is used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from videotune.report.markup import (
    NOTHING,
    Html,
    duration,
    element,
    join,
    missing,
    paragraph,
    section,
    table,
    text,
    value_text,
)
from videotune.report.read import Record, Run, items, last_of_kind, mapping, number, of_kind, setting

PHASES = {
    "starting": "starting, and reading the clips",
    "encoding": "encoding clips and captions",
    "loading": "loading the model, and what is trained of it",
    "training": "training",
    "measuring": "the ruler",
    "probing": "probes: small samples, measured",
    "sampling": "previews",
    "saving": "checkpoints",
    "paused": "waiting for room on the disk",
    "exporting": "exporting, and reading back",
    "reporting": "writing the report",
}
"""What a process does, as the heartbeat names it, and in words."""

STEPS = {
    "data": "waiting for clips",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "experts": "changing the expert",
}


def time_section(run: Run) -> Html:
    """The wall time by phase, over all processes of the run; the parts of a step are the journal's."""
    title = "Time"
    spent = _spent(run)
    steps = run.steps.seconds
    if not spent:
        return section("time", title, _steps_alone(steps))
    whole = sum(spent.values())
    rows = []
    for key in sorted(spent, key=lambda key: -spent[key]):
        rows.append(_row(PHASES.get(key, key), spent[key], whole))
        if key == "training":
            rows += [_row(STEPS.get(name, name), took, whole, inner=True) for name, took in steps.items()]
            rows += [_row(_between(run), max(0.0, spent[key] - sum(steps.values())), whole, inner=True)]
    rows.append([element("b", text("wall time")), element("b", text(duration(whole))), element("b", text("100%"))])
    return section("time", title, table(["phase", "time", "of all"], rows))


def _spent(run: Run) -> dict[str, float]:
    """Seconds by phase: the journal's end says them, of a run without one its last heartbeat; else empty."""
    end = last_of_kind(run, "end") if run.journal and run.journal[-1]["kind"] == "end" else {}
    told = mapping(end.get("seconds")) or mapping(mapping(run.life).get("seconds"))
    return {str(key): n for key, value in told.items() if (n := number(value)) is not None and n > 0}


def _between(run: Run) -> str:
    again = " and steps that were made again after a resume" if of_kind(run, "resume") else ""
    return f"between the steps{again}"


def _row(name: str, seconds: float, whole: float, inner: bool = False) -> list[Html]:
    label = element("span", text(name), css="inner") if inner else text(name)
    return [label, text(duration(seconds)), text(f"{seconds / whole:.1%}")]


def _steps_alone(steps: Mapping[str, float]) -> Html:
    """Of a run that did not count its phases: what its steps took."""
    whole = sum(steps.values())
    if not whole:
        return missing("the time of each phase appears with the first steps")
    rows = [_row(STEPS.get(name, name), took, whole) for name, took in steps.items()]
    note = paragraph(text("This run did not count its other phases: of its steps alone."), css="soft")
    return join([note, table(["phase", "time", "of the steps"], rows)])


def use_section(run: Run) -> Html:
    """How what was exported is used in diffusers and in ComfyUI."""
    title = "How to use the file"
    if run.exports is None:
        return section("use", title, missing("exports.json, the exported files"))
    entries = [entry for entry in run.exports if entry.get("path")]
    readable = [entry for entry in entries if entry.get("format") != "comfyui"] or entries
    comfy = [entry for entry in entries if entry.get("format") == "comfyui"]
    return section("use", title, _trigger(run), _in_python(run, readable), _in_comfyui(run, comfy))


def _trigger(run: Run) -> Html:
    datasets = [mapping(row) for row in items(setting(run, "datasets"))]
    words = list(dict.fromkeys(str(row["trigger"]) for row in datasets if row.get("trigger")))
    if not words:
        return NOTHING
    return paragraph(text("Write into the prompt: "), element("code", text(", ".join(words))))


def _in_python(run: Run, entries: Sequence[Record]) -> Html:
    """Code that opens the base model, loads the file and draws; of two experts' files both are loaded."""
    latest = [entry for entry in entries if entry.get("format") == entries[0].get("format")] if entries else []
    step = max((_step_in(entry) for entry in latest), default="")
    latest = [entry for entry in latest if _step_in(entry) == step]
    uses = [str(entry.get("use") or "") for entry in latest]
    if not any(uses):
        return paragraph(text("The exported file says in its own head how it is used."), css="soft")
    lines: list[str] = []
    for entry, use in zip(latest, uses, strict=True):
        place = repr(_path(run, entry))
        for line in use.replace("THIS_FILE", place).replace("THIS_FOLDER", place).split("; "):
            whole = re.sub(r"'(asset:\w+)'", r"place('\1').folder", line)
            lines += [] if whole in lines else [whole]
    return join([element("h3", text("In diffusers")), _code([*_imports(lines), "", *lines, *_drawing(run)])])


def _imports(lines: Sequence[str]) -> list[str]:
    """What the code needs; a base model that comes with videotune is named by its folder."""
    code = "\n".join(lines)
    pipelines = sorted(set(re.findall(r"\b[A-Z]\w*Pipeline\b", code)))
    needed = ["import torch", f"from diffusers import {', '.join(pipelines)}"] if pipelines else ["import torch"]
    if "TextualInversionLoaderMixin" in code:
        needed.append("from diffusers.loaders import TextualInversionLoaderMixin")
    needed.append("from diffusers.utils import export_to_video")
    return [*needed, *(["from videotune.models.base_model import place"] if "place('asset:" in code else [])]


def _drawing(run: Run) -> list[str]:
    """The call that draws, as the run's own previews are drawn."""
    shape = _shape(run)
    sample = mapping(setting(run, "sample"))
    prompt = next((str(record.get("prompt")) for record in of_kind(run, "sample")), "…")
    words = [f"{prompt!r},"]
    words += [f"num_frames={shape[0]}, height={shape[1]}, width={shape[2]},"] if shape else []
    words += [f"guidance_scale={value_text(sample['guidance'])},"] if sample.get("guidance") is not None else []
    words += [f"num_inference_steps={value_text(sample['steps'])},"] if sample.get("steps") is not None else []
    fps = value_text(mapping(setting(run, "video_config")).get("target_fps") or 16)
    seed = value_text(sample.get("seed") if sample.get("seed") is not None else 42)
    return [
        "",
        "video = pipe(",
        *(f"    {word}" for word in (*words, f"generator=torch.Generator('cpu').manual_seed({seed}),")),
        ").frames[0]",
        f"export_to_video(video, 'video.mp4', fps={fps})",
    ]


def _shape(run: Run) -> list[int] | None:
    """Frames, height and width of a preview."""
    sample = mapping(setting(run, "sample"))
    buckets = [mapping(bucket) for bucket in items(last_of_kind(run, "start").get("buckets"))]
    most = max(buckets, key=lambda bucket: number(bucket.get("windows")) or 0, default={})
    parts = str(most.get("shape", "")).split("x")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return None
    frames, height, width = map(int, parts)
    sides = str(sample.get("resolution") or "").split("x")
    if len(sides) == 2 and all(side.isdigit() for side in sides):
        height, width = map(int, sides)
    return [int(number(sample.get("frames")) or frames), height, width]


def _in_comfyui(run: Run, entries: Sequence[Record]) -> Html:
    """The steps in ComfyUI, with its own file, or how that is made."""
    head, method = element("h3", text("In ComfyUI")), setting(run, "training_method")
    if method == "FINE_TUNE":
        told = "A fine-tuned model is a folder in diffusers' layout, which ComfyUI's own loaders do not read."
        return join([head, paragraph(text(told))])
    if not entries:
        command = f"videotune export {run.folder} --format comfyui"
        first = [text("Write the file with ComfyUI's names: "), element("code", text(command))]
    else:
        names = ", ".join(_path(run, entry) for entry in entries)
        first = [text("The file with ComfyUI's names: "), element("code", text(names))]
    if method == "EMBEDDING":
        folder = join([text("Copy it into "), element("code", text("ComfyUI/models/embeddings")), text(".")])
        words = join(
            [text("Write "), element("code", text("embedding:NAME")), text(" into the prompt, by the file's name.")]
        )
        return join([head, element("ol", *(element("li", step) for step in (join(first), folder, words)))])
    steps = (
        join(first),
        join([text("Copy it into "), element("code", text("ComfyUI/models/loras")), text(", and press R there.")]),
        join([
            text("Put a node "), element("code", text("LoraLoaderModelOnly")),
            text(" between the model's loader and the sampler; choose the file. Strength 1 is as trained."),
        ]),
        text("Prompt, size, frames and guidance as in the previews above."),
    )  # fmt: skip
    return join([head, element("ol", *(element("li", step) for step in steps))])


def _path(run: Run, entry: Record) -> str:
    path = str(entry.get("path", ""))
    return path if PurePath(path).is_absolute() else f"{run.folder}/{path}"


def _step_in(entry: Record) -> str:
    """The step in a file's name, as wide as any, so that text sorts as numbers do."""
    step = PurePath(str(entry.get("path", ""))).stem.partition("-step-")[2].partition("-")[0]
    return step.rjust(12, "0")


def _code(lines: Sequence[str]) -> Html:
    return element("pre", element("code", text("\n".join(lines))))
