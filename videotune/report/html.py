"""One page for a run: what was trained on what, how it went, what came out, and what is not there yet."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from videotune.files import write_text
from videotune.report.curves import loss_section, ruler_section
from videotune.report.exposure import exposure_section
from videotune.report.markup import (
    Html,
    badge,
    bullets,
    counted,
    duration,
    element,
    join,
    local_link,
    missing,
    moment,
    paragraph,
    plain,
    section,
    switched_off,
    text,
    value_text,
)
from videotune.report.probe import probe_section
from videotune.report.read import Record, Run, items, last_of_kind, mapping, number, of_kind, read_run, setting
from videotune.report.state import standing
from videotune.report.style import CSS
from videotune.report.tables import clips_section, files_section, settings_section

PARTS = {
    "loss": "Loss",
    "ruler": "Ruler",
    "exposure": "Views",
    "samples": "Samples",
    "probe": "Measured",
    "clips": "Clips",
    "settings": "Settings",
    "files": "Files",
    "warnings": "Warnings",
}


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
        probe_section(run),
        clips_section(run),
        settings_section(run),
        files_section(run),
        warnings_section(run),
    )
    return f"<!doctype html>\n{element('html', head, element('body', main), attributes={'lang': 'en'})}\n"


def state(run: Run) -> Html:
    """Which run on which base, how far it came and how it stands; then its verdict and its figures."""
    start, config = last_of_kind(run, "start"), mapping(run.config)
    total = next(
        (n for part in (config, start, mapping(run.plan)) if (n := number(part.get("steps"))) is not None), None
    )
    done = max((number(record.get("step")) or 0 for record in of_kind(run, "step")), default=0)
    settings = mapping(config.get("settings"))
    base = mapping(config.get("base")).get("name") or settings.get("base_model_name") or "a base that is not named"
    method = settings.get("training_method") or "run"
    far = f"{plain(done)} of {counted(total, 'step')}" if total is not None else counted(done, "step")
    word, css, told = standing(run, total is not None and done >= total)
    return join(
        [
            paragraph(badge(word, css), text(f"{method} on {base}: {far}, {told}."), css="state"),
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
        "resumed from step": ", ".join(value_text(r.get("from_step")) for r in of_kind(run, "resume")) or None,
    }
    shown = [
        element("div", element("b", text(plain(v) if isinstance(v, (int, float)) else v)), element("span", text(name)))
        for name, v in named.items()
        if v is not None
    ]
    if not shown:
        return missing("the journal has no start")
    shares = ", ".join(f"{key} {value / spent:.0%}" for key, value in seconds.items() if spent)
    lines = [
        ("Time in steps: ", f"{duration(spent)} ({shares})" if spent else ""),
        ("Versions: ", ", ".join(f"{name} {version}" for name, version in mapping(start.get("versions")).items())),
    ]
    told = (paragraph(text(f"{name}{line}."), css="soft") for name, line in lines if line)
    return join([element("div", *shown, css="facts"), *told])


def samples_section(run: Run) -> Html:
    """Previews as a grid: a row a prompt and seed, a column a step, the base's first."""
    rows: dict[tuple[str, str], dict[float, Record]] = {}
    for record in of_kind(run, "sample"):
        key = (str(record.get("prompt", "")), value_text(record.get("seed")))
        rows.setdefault(key, {})[number(record.get("step")) or 0] = record
    if not rows and number(setting(run, "sample_after")) == 0:
        return section("samples", "Samples", switched_off("sample_after"))
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
