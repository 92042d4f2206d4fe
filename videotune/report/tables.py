"""The sections that are tables: clips, settings, files."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import Any

from videotune.report.dataset import shape_words
from videotune.report.exposure import ClipViews, band, clip_views
from videotune.report.markup import (
    NOTHING,
    Html,
    badge,
    bullets,
    counted,
    details,
    element,
    join,
    local_link,
    missing,
    paragraph,
    plain,
    section,
    table,
    text,
    value_text,
)
from videotune.report.media import Media, picture_of
from videotune.report.read import Record, Run, items, last_of_kind, mapping, number, of_kind

ORIGINS = ("user", "preset", "family", "default")
"""Who may have set a key, in the order in which the page lists them."""

SHOWN = 30
"""How many clips stand open on the page; the others open on a click."""


def clips_section(run: Run, media: Media) -> Html:
    """Every file that was found and what became of it: skipped ones first, then held out, then used."""
    if run.check is None:
        return section("clips", "Clips", missing("check.json, the account of the clips"))
    counts = {key: number(run.check.get(key)) for key in ("found", "used", "held_out", "skipped")}
    parts = [counts[key] or 0 for key in ("used", "held_out", "skipped")]
    names = ("used", "held out", "skipped")
    sums = " + ".join(f"{plain(n)} {name}" for n, name in zip(parts, names, strict=True))
    said = paragraph(text(f"{plain(counts['found'])} found = {sums}."))
    if counts["found"] != sum(parts):
        said = join([said, paragraph(text("These numbers do not add up: the account is damaged."), css="bad")])
    clips = [mapping(clip) for clip in items(run.check.get("clips"))]
    clips.sort(key=lambda clip: (bool(clip.get("used")), bool(clip.get("held_out")), not clip.get("warnings")))
    folder = common_folder([str(clip.get("path", "")) for clip in clips])
    views = {clip.name: clip for clip in clip_views(run)}
    rows = [clip_row(clip, folder, media, views.get(str(clip.get("path")))) for clip in clips]
    head = ["clip", "state", "source", "used as", "cut", "repeats", "views", "notes"]
    rest = rows[SHOWN:]
    return section(
        "clips",
        "Clips",
        said,
        bullets([text(note) for note in items(run.check.get("notes"))]),
        buckets(run),
        paragraph(text("In "), element("code", text(folder)), text(":")) if folder else NOTHING,
        table(head, rows[:SHOWN], css="cards"),
        details(f"{counted(len(rest), 'more clip')}", table(head, rest, css="cards")) if rest else NOTHING,
    )


def common_folder(paths: list[str]) -> str:
    """The folder, with its last slash, that all paths lie in; empty where there is none, or but one path."""
    parents = [path.replace("\\", "/").split("/")[:-1] for path in paths]
    shared = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*parents, strict=False))]
    return "/".join(shared) + "/" if any(shared) and len(paths) > 1 else ""


def clip_row(clip: Record, folder: str, media: Media, seen: ClipViews | None) -> list[Html]:
    """One file's cells; what is not known, or is as it should be, stays empty."""
    if clip.get("used"):
        kind = " (regularization)" if clip.get("kind") == "regularization" else ""
        became = badge(f"used{kind}", "good")
    elif clip.get("held_out"):
        became = badge("held out", "calm")
    else:
        became = join([badge("skipped", "care"), text(clip.get("reason") or "no reason given")])
    size = f"{value_text(clip['width'])}×{value_text(clip.get('height'))}" if clip.get("width") else ""
    frames = f"{value_text(clip['source_frames'])} frames" if clip.get("source_frames") else ""
    rate = f"{plain(number(clip.get('source_fps')))} fps" if clip.get("source_fps") else ""
    windows, speed = number(clip.get("windows")), number(clip.get("speed"))
    used_as = f"{counted(windows, 'window')}, {counted(number(clip.get('frames')), 'frame')}" if windows else ""
    shape = f", each {shape_words(clip['shape'])}" if windows and clip.get("shape") else ""
    cut, repeats = number(clip.get("seconds_cut")), number(clip.get("repeats_share"))
    notes = [clip["detail"]] if clip.get("detail") else []
    notes += [f"plays at {plain(speed)}× its speed"] if speed not in (None, 1) else []
    cells = (
        ", ".join(part for part in (size, frames, rate) if part),
        used_as + shape,
        f"{cut:.2f}\N{NO-BREAK SPACE}s" if cut else "",
        f"{repeats:.0%}" if repeats else "",
    )
    told = bullets([text(note) for note in [*notes, *items(clip.get("warnings")), *items(clip.get("notes"))]])
    name = [text(str(clip.get("path", ""))[len(folder) :])]
    if source := media.carried.get(picture_of(clip)):
        name.append(element("img", attributes={"src": source, "alt": "", "loading": "lazy"}))
    if captions := items(clip.get("captions")):
        name.append(element("div", text(shorten(str(captions[0]), 160, placeholder=" …")), css="soft"))
    return [join(name), became, *map(text, cells), views_cell(clip, seen), told]


def views_cell(clip: Record, seen: ClipViews | None) -> Html:
    """How often a clip has been shown, will have been by the end, and the band of its windows; of other kinds the plan."""
    if seen is None:
        return text("" if clip.get("views") is None else value_text(clip["views"]))
    name, css = band(seen.views / seen.windows)
    amount = plain(seen.views)
    if seen.so_far is not None and seen.planned is not None and seen.planned != seen.so_far:
        amount += f" of {plain(seen.planned)}"
    return join([text(f"{amount} "), badge(name, css)])


def buckets(run: Run) -> Html:
    """Sizes that the windows were sorted into."""
    found = items(last_of_kind(run, "start").get("buckets")) or items(mapping(run.check).get("buckets"))
    keys = ("shape", "windows", "tokens")
    rows = [[text(value_text(mapping(bucket).get(key, "–"))) for key in keys] for bucket in found]
    return table(["bucket (frames×height×width)", "windows", "tokens"], rows) if rows else NOTHING


def settings_section(run: Run) -> Html:
    """Every key with its value and who set it: the person's first, defaults last."""
    if run.config is None:
        return section("settings", "Settings", missing("config.json, the resolved settings"))
    origins = mapping(run.config.get("origins"))
    rows = [(key, value, origin_of(key, origins)) for key, value in flat(mapping(run.config.get("settings")))]
    rows.sort(key=lambda row: ORIGINS.index(row[2]) if row[2] in ORIGINS else len(ORIGINS))
    css = {"user": "good", "preset": "calm", "family": "calm"}
    cells = [
        [element("code", text(key)), element("code", text(value_text(value))), badge(origin, css.get(origin, "quiet"))]
        for key, value, origin in rows
    ]
    head = ["key", "value", "set by"]
    ours = [row for row, (_, _, origin) in zip(cells, rows, strict=True) if origin != "default"]
    theirs = [row for row, (_, _, origin) in zip(cells, rows, strict=True) if origin == "default"]
    rest = (
        details(f"{counted(len(theirs), 'setting')} at the default", table(head, theirs, css="cards"))
        if theirs
        else NOTHING
    )
    return section(
        "settings", "Settings", table(head, ours, css="cards") if ours else NOTHING, rest if theirs else NOTHING
    )


def flat(settings: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Nested settings as dotted keys."""
    rows: list[tuple[str, Any]] = []
    for key, value in settings.items():
        rows += flat(value, f"{before}{key}.") if isinstance(value, Mapping) and value else [(f"{before}{key}", value)]
    return rows


def origin_of(key: str, origins: Record) -> str:
    """Who set a key, or the section that it stands in."""
    while key:
        if key in origins:
            return str(origins[key])
        key = key.rpartition(".")[0]
    return "not said"


def files_section(run: Run) -> Html:
    """What was exported and how it was verified, and the checkpoints."""
    if run.exports is None:
        exported = missing("exports.json, the exported files")
    else:
        exported = table(
            ["format", "file", "size", "read back"], [export_row(run, entry) for entry in run.exports], css="cards"
        )
    saves = [
        [text(plain(number(save.get("step")))), file_cell(run, str(save.get("path", "")))]
        for save in of_kind(run, "save")
    ]
    kept = table(["step", "checkpoint"], saves) if saves else missing("no checkpoint has been saved")
    return section("files", "Files", exported, element("h3", text("Checkpoints")), kept)


def export_row(run: Run, entry: Record) -> list[Html]:
    """An exported file, its size and what reading it back showed."""
    path, verified = str(entry.get("path", "")), mapping(entry.get("verified"))
    error = number(verified.get("max_error"))
    where = next((p for p in (run.folder / path, Path(path)) if p.is_file()), None)
    size = f"{where.stat().st_size / 1e6:.2f} MB" if where else "not found"
    told = "not read back"
    if error is not None:
        reader = f" by {verified['reader']}" if verified.get("reader") else ""
        told = f"largest error {error:.1e}{reader}"
    colour = badge("verified", "good") if error is not None else badge("unverified", "care")
    return [text(entry.get("format", "")), file_cell(run, path), text(size), join([colour, text(told)])]


def file_cell(run: Run, path: str) -> Html:
    """A path, with a link where it lies in the run folder."""
    inside = Path(path)
    if inside.is_absolute() and inside.is_relative_to(run.folder.resolve()):
        inside = inside.relative_to(run.folder.resolve())
    link = local_link(inside.as_posix())
    if link is None or not (run.folder / inside).exists():
        return element("code", text(path))
    return element("a", text(path), attributes={"href": link})
