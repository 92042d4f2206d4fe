"""One page for a run: what was trained on what, how it went, what came out, and what is not there yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from videotune.files import write_text
from videotune.report.curves import loss_section, ruler_section
from videotune.report.exposure import exposure_section
from videotune.report.markup import (
    NOTHING,
    Html,
    badge,
    bullets,
    counted,
    element,
    join,
    missing,
    moment,
    paragraph,
    plain,
    section,
    text,
    value_text,
)
from videotune.report.media import gather
from videotune.report.probe import probe_section
from videotune.report.read import (
    Record,
    Run,
    items,
    last_of_kind,
    mapping,
    number,
    of_kind,
    read_run,
    regularization_clips,
)
from videotune.report.samples import before_section, compare_section, samples_section
from videotune.report.state import standing
from videotune.report.style import CSS
from videotune.report.tables import clips_section, files_section, settings_section
from videotune.report.usage import time_section, use_section
from videotune.report.verdict import verdict_section
from videotune.train.logging.step_sums import Steps

PARTS = {
    "verdict": "How it went",
    "before": "Before and after",
    "loss": "Loss",
    "ruler": "Ruler",
    "exposure": "Views",
    "samples": "Samples",
    "compare": "Checkpoints",
    "probe": "Measured",
    "clips": "Clips",
    "time": "Time",
    "use": "Use",
    "settings": "Settings",
    "files": "Files",
    "warnings": "Warnings",
}


def write_report(folder: Path, known: tuple[Sequence[Record], Steps] | None = None) -> Path:
    """Write ``report.html`` into a run folder and return its path. ``known`` as in ``read_run``.

    The page needs neither a network nor a script, and carries its videos and pictures as far as ``BUDGET`` goes; others are
    referred to where they lie. Raises VideotuneError where the folder is not a run's.
    """
    path = folder / "report.html"
    write_text(path, page(read_run(folder, known)))
    return path


def page(run: Run) -> str:
    """The whole page."""
    media = gather(run)
    place = run.folder.resolve()
    title = f"Run {place.name if place.name != 'run' else place.parent.name}"
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
    there = {anchor: name for anchor, name in PARTS.items() if anchor != "compare" or run.compared}
    links = (element("a", text(name), attributes={"href": f"#{anchor}"}) for anchor, name in there.items())
    main = element(
        "main",
        element("h1", text(title)),
        state(run),
        element("nav", *links),
        verdict_section(run),
        before_section(run, media),
        loss_section(run),
        ruler_section(run),
        exposure_section(run),
        samples_section(run, media),
        compare_section(run, media),
        probe_section(run),
        clips_section(run, media),
        time_section(run),
        use_section(run),
        settings_section(run),
        files_section(run),
        warnings_section(run),
    )
    return f"<!doctype html>\n{element('html', head, element('body', main), attributes={'lang': 'en'})}\n"


def state(run: Run) -> Html:
    """Which run on which base, how far it came and how it stands; then its figures."""
    start, config = last_of_kind(run, "start"), mapping(run.config)
    total = next(
        (n for part in (config, start, mapping(run.plan)) if (n := number(part.get("steps"))) is not None), None
    )
    done = run.steps.last
    settings = mapping(config.get("settings"))
    base = mapping(config.get("base")).get("name") or settings.get("base_model_name") or "a base that is not named"
    method = settings.get("training_method") or "run"
    far = f"{plain(done)} of {counted(total, 'step')}" if total is not None else counted(done, "step")
    word, css, told = standing(run, total is not None and done >= total)
    return join(
        [
            paragraph(badge(word, css), text(f"{method} on {base}: {far}, {told}."), css="state"),
            facts(run, start),
            bullets([text(note) for note in items(start.get("notes"))], css="soft"),
        ]
    )


def facts(run: Run, start: Record) -> Html:
    """Figures of the run, each under its name."""
    clips = mapping(start.get("clips")) or mapping(run.check)
    used, keeping = number(clips.get("used")) or 0, len(regularization_clips(run))
    named: dict[str, object] = {
        "started": moment(start["time"]) if "time" in start else None,
        "device": start.get("device"),
        "training clips": number(clips.get("used")) if keeping == 0 else f"{plain(used - keeping)} + {keeping} to keep",
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
    versions = ", ".join(f"{name} {version}" for name, version in mapping(start.get("versions")).items())
    told = paragraph(text(f"Versions: {versions}."), css="soft") if versions else NOTHING
    return join([element("div", *shown, css="facts"), told])


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
