"""One page for a run: what was trained on what, how it went, what came out, and what is not there yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videotune.files import write_text
from videotune.report.curves import loss_section, ruler_section
from videotune.report.exposure import exposure_section
from videotune.report.markup import (
    NOTHING,
    Html,
    badge,
    bullets,
    counted,
    details,
    duration,
    element,
    join,
    local_link,
    missing,
    moment,
    paragraph,
    plain,
    section,
    table,
    text,
)
from videotune.report.read import Record, Run, items, last_of_kind, mapping, number, of_kind, read_run
from videotune.report.style import CSS

PARTS = {
    "loss": "Loss",
    "ruler": "Ruler",
    "exposure": "Views",
    "samples": "Samples",
    "clips": "Clips",
    "settings": "Settings",
    "files": "Files",
    "warnings": "Warnings",
}
ORIGINS = ("user", "preset", "family", "default")


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    The page needs neither a network nor a script; videos are referred to where they lie. Raises VideotuneError where
    the folder is not a run's.
    """
    path = folder / "report.html"
    write_text(path, page(read_run(folder)))
    return path


def page(run: Run) -> str:
    """The whole page."""
    title = f"Run {run.folder.resolve().name}"
    policy = {
        "http-equiv": "Content-Security-Policy",
        "content": "script-src 'none'; object-src 'none'; base-uri 'none'",
    }
    head = element(
        "head",
        element("meta", attributes={"charset": "utf-8"}),
        element("meta", attributes={"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("meta", attributes=policy),
        element("title", text(title)),
        element("style", Html(CSS)),
    )
    links = (element("a", text(name), attributes={"href": f"#{anchor}"}) for anchor, name in PARTS.items())
    main = element(
        "main",
        element("h1", text(title)),
        state(run),
        element("nav", *links),
        loss_section(run),
        ruler_section(run),
        exposure_section(run),
        samples_section(run),
        clips_section(run),
        settings_section(run),
        files_section(run),
        warnings_section(run),
    )
    return f"<!doctype html>\n{element('html', head, element('body', main), attributes={'lang': 'en'})}\n"


def state(run: Run) -> Html:
    """Which run on which base, how far it came and how it ended; then its verdict and its figures."""
    start, end, config = last_of_kind(run, "start"), last_of_kind(run, "end"), mapping(run.config)
    total = next(
        (n for part in (start, config, mapping(run.plan)) if (n := number(part.get("steps"))) is not None), None
    )
    done = max((number(record.get("step")) or 0 for record in of_kind(run, "step")), default=0)
    settings = mapping(config.get("settings"))
    base = mapping(config.get("base")).get("name") or settings.get("base_model_name") or "a base that is not named"
    method = settings.get("training_method") or "run"
    far = f"{plain(done)} of {counted(total, 'step')}" if total is not None else counted(done, "step")
    if end:
        why = str(end.get("why"))
        label, css = badge(why, "good" if total is not None and done >= total else "care"), f"ended: {why}"
    else:
        when = f" {moment(run.written)}" if run.written is not None else ""
        label, css = badge("no end", "care"), f"the journal, last written{when}, has no end: still going, or killed"
    return join(
        [
            paragraph(label, text(f"{method} on {base}: {far}, {css}."), css="state"),
            *(verdict(record) for record in of_kind(run, "verdict")[-1:]),
            facts(run, start),
            bullets([text(note) for note in items(start.get("notes"))], css="soft"),
        ]
    )


def verdict(record: Record) -> Html:
    """The latest verdict: its word in a badge, and all else that it says."""
    word = str(next((record[key] for key in ("verdict", "state", "word") if key in record), "verdict"))
    colours = {"LEARNING": "good", "PLATEAU": "calm", "OVERFITTING": "bad"}
    said = {k: v for k, v in record.items() if k not in ("kind", "time", "verdict", "state", "word") and v is not None}
    parts = [f"{key.replace('_', ' ')}: {value_text(value)}" for key, value in said.items()]
    return paragraph(badge(word, colours.get(word.upper(), "calm")), text("; ".join(parts)))


def facts(run: Run, start: Record) -> Html:
    """Figures of the run, each under its name."""
    clips = mapping(start.get("clips")) or mapping(run.check)
    versions = mapping(start.get("versions"))
    seconds: Counter[str] = Counter()
    for record in of_kind(run, "step"):
        seconds.update({str(k): n for k, v in mapping(record.get("seconds")).items() if (n := number(v)) is not None})
    spent = sum(seconds.values())
    named: dict[str, object] = {
        "started": moment(start["time"]) if "time" in start else None,
        "device": start.get("device"),
        "training clips": clips.get("used"),
        "windows": number(start.get("windows")),
        "samples a step": number(start.get("effective_batch")),
        "trained parameters": number(start.get("trainable_parameters")),
        "time in steps": duration(spent) if spent else None,
        "of that": ", ".join(f"{key} {value / spent:.0%}" for key, value in seconds.items()) if spent else None,
        "resumed": ", ".join(f"from step {value_text(r.get('from_step'))}" for r in of_kind(run, "resume")) or None,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or None,
    }
    shown = [
        element("div", element("b", text(plain(v) if isinstance(v, (int, float)) else v)), element("span", text(name)))
        for name, v in named.items()
        if v is not None
    ]
    return element("div", *shown, css="facts") if shown else missing("the journal has no start")


def samples_section(run: Run) -> Html:
    """Previews as a grid: a row a prompt and seed, a column a step, the base's first."""
    rows: dict[tuple[str, str], dict[float, Record]] = {}
    for record in of_kind(run, "sample"):
        key = (str(record.get("prompt", "")), value_text(record.get("seed")))
        rows.setdefault(key, {})[number(record.get("step")) or 0] = record
    if not rows:
        return section("samples", "Samples", missing("previews appear as the run draws them"))
    steps = sorted({step for cells in rows.values() for step in cells})
    parts: list[Html] = []
    for (prompt, seed), cells in rows.items():
        words = element("span", element("b", text(prompt)), text(f" seed {seed}"))
        parts += [element("div", words, css="prompt"), *(sample(run, step, cells.get(step)) for step in steps)]
    grid = element("div", *parts, css="samples", attributes={"style": f"--columns:{len(steps)}"})
    return section("samples", "Samples", element("div", grid, css="grid-scroll"))


def sample(run: Run, step: float, record: Record | None) -> Html:
    """One cell of the grid; where there is no video, why not."""
    caption = element("figcaption", text("base (step 0)" if step == 0 else f"step {plain(step)}"))
    path = str((record or {}).get("path") or "")
    link = local_link(path)
    if record is None or not path:
        return element("figure", element("p", text("not drawn"), css="missing"), caption)
    if link is None:
        return element("figure", element("p", text(f"outside the run folder: {path}"), css="missing"), caption)
    if not (run.folder / path).is_file():
        return element("figure", element("p", text(f"no longer there: {path}"), css="missing"), caption)
    source = {"src": link, "preload": "metadata"}
    return element("figure", element("video", attributes=source, flags="controls loop muted playsinline"), caption)


def clips_section(run: Run) -> Html:
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
    clips.sort(key=lambda clip: (bool(clip.get("used")), bool(clip.get("held_out")), str(clip.get("path"))))
    head = ["clip", "state", "source", "used as", "cut", "repeats", "views", "notes"]
    whole = table(head, [clip_row(clip) for clip in clips], css="cards")
    many = len(clips) > 60
    return section(
        "clips",
        "Clips",
        said,
        bullets([text(note) for note in items(run.check.get("notes"))]),
        buckets(run),
        details(f"All {len(clips)} clips", whole) if many else whole,
    )


def clip_row(clip: Record) -> list[Html]:
    """One file's cells; what is not known, or is as it should be, stays empty."""
    if clip.get("used"):
        became = badge("used", "good")
    elif clip.get("held_out"):
        became = badge("held out", "calm")
    else:
        became = join([badge("skipped", "care"), text(clip.get("reason") or "no reason given")])
    size = f"{value_text(clip['width'])}×{value_text(clip.get('height'))}" if clip.get("width") else ""
    frames = f"{value_text(clip['source_frames'])} frames" if clip.get("source_frames") else ""
    rate = f"{plain(number(clip.get('source_fps')))} fps" if clip.get("source_fps") else ""
    windows, speed = number(clip.get("windows")), number(clip.get("speed"))
    used_as = f"{counted(windows, 'window')}, {counted(number(clip.get('frames')), 'frame')}" if windows else ""
    shape = f" of {clip['shape']}" if windows and clip.get("shape") else ""
    cut, repeats = number(clip.get("seconds_cut")), number(clip.get("repeats_share"))
    notes = [clip["detail"]] if clip.get("detail") else []
    notes += [f"plays at {plain(speed)}× its speed"] if speed not in (None, 1) else []
    views = clip.get("views")
    cells = (
        ", ".join(part for part in (size, frames, rate) if part),
        used_as + shape,
        f"{cut:.2f} s" if cut else "",
        f"{repeats:.0%}" if repeats else "",
        "" if views is None else value_text(views),
    )
    told = bullets([text(note) for note in [*notes, *items(clip.get("warnings"))]])
    return [text(clip.get("path", "")), became, *map(text, cells), told]


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
    chosen = sum(origin != "default" for _, _, origin in rows)
    head = ["key", "value", "set by"]
    rest = details(f"{counted(len(rows) - chosen, 'setting')} at the default", table(head, cells[chosen:]))
    ours = [row for row, (_, _, origin) in zip(cells, rows, strict=True) if origin != "default"]
    theirs = [row for row, (_, _, origin) in zip(cells, rows, strict=True) if origin == "default"]
    rest = details(f"{counted(len(theirs), 'setting')} at the default", table(head, theirs)) if theirs else NOTHING
    return section("settings", "Settings", table(head, ours) if ours else NOTHING, rest)


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
        exported = table(["format", "file", "size", "read back"], [export_row(run, entry) for entry in run.exports])
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
    told = "not verified"
    if error is not None:
        reader = f" by {verified['reader']}" if verified.get("reader") else ""
        told = f"yes{reader}: largest error {error:.1e}"
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


def warnings_section(run: Run) -> Html:
    """Everything that a person should know, equal texts once."""
    told: dict[str, list[str]] = {}
    for record in of_kind(run, "warning"):
        step = number(record.get("step"))
        told.setdefault(str(record.get("text", "")), []).extend([] if step is None else [plain(step)])
    lines = [
        f"{words} (step {', '.join(steps[:8])}{', …' if len(steps) > 8 else ''})" if steps else words
        for words, steps in told.items()
    ]
    clips = sum(bool(mapping(clip).get("warnings")) for clip in items(mapping(run.check).get("clips")))
    lines += [f"{counted(clips, 'clip')} with a note of its own, in the table of clips"] if clips else []
    entries = [text(line) for line in (*run.notes, *lines)]
    return section("warnings", "Warnings", bullets(entries) or paragraph(text("None."), css="soft"))


def value_text(value: Any) -> str:
    """A value of a setting or a record for reading."""
    if isinstance(value, str):
        return value
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:.12g}"
    if isinstance(value, list):
        return ", ".join(value_text(entry) for entry in value) or "none"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {value_text(entry)}" for key, entry in value.items()) + "}"
    return str(value)
