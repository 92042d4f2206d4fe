"""One page for a run: what was trained on what, how it went, what came out, and what is not there yet; one for several."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from videotune import text
from videotune.files import write_text
from videotune.reporter import charts, curves, inventory, outcome, previews
from videotune.reporter.previews import Media
from videotune.reporter.read import Record, Run, at, items, mapping, number, points, read_run
from videotune.runs.step_sums import Steps, regularization

LONG = 120
"""Letters from which a caption's end on the contact sheet opens on a click."""


def write_report(folder: Path, known: tuple[Sequence[Record], Steps] | None = None) -> Path:
    """Write ``report.html`` into a run directory and return its path. ``known`` as in ``read_run``.

    The page needs neither a network nor a script, and carries its videos and pictures as far as ``BUDGET`` goes; others are
    referred to where they lie. Raises VideotuneError where the folder is not a run's.
    """
    path = folder / "report.html"
    write_text(path, page(read_run(folder, known)))
    return path


def page(run: Run) -> str:
    """The whole page."""
    return render("report.html.j2", **collect(run))


def collect(run: Run) -> dict[str, Any]:
    """Everything that stands on the page, as plain data."""
    place = run.folder.resolve()
    media = Media(run)
    chapters = {
        "verdict": outcome.verdict(run),
        "before": previews.before(run, media),
        "loss": curves.loss(run),
        "validation": curves.validation(run),
        "exposure": curves.exposure(run),
        "samples": previews.samples(run, media),
        "compare": previews.compare(run, media),
        "metrics": previews.metrics(run),
        "clips": inventory.clips(run, media),
        "time": curves.time_spent(run),
        "use": inventory.use(run),
        "settings": inventory.settings(run),
        "files": inventory.files(run),
        "warnings": warnings(run),
    }
    if not run.compared:
        del chapters["compare"]
    title = f"Run {place.name if place.name != 'run' else place.parent.name}"
    return {"title": title, "chapters": chapters, **summary(run)}


def summary(run: Run) -> dict[str, Any]:
    """Which run on which base, how far it came and how it stands; then its figures."""
    start = run.last("start")
    done = run.steps.last
    total = next(
        (
            n
            for part in (run.config, start, run.plan)
            if (n := number(at(part, "steps"))) is not None
        ),
        None,
    )
    base = (
        at(run.config, "base", "name")
        or at(run.config, "settings", "base_model_name")
        or "a base that is not named"
    )
    method = at(run.config, "settings", "training_method") or "run"
    far = (
        f"{text.plain(done)} of {text.counted(total, 'step')}"
        if total is not None
        else text.counted(done, "step")
    )
    word, css, sentence = outcome.describe_state(run, total is not None and done >= total)
    clips = mapping(start.get("clips")) or mapping(run.check)
    used = number(clips.get("used"))
    kept = len(regularization(run.check))
    figures = {
        "started": text.moment(start["time"]) if "time" in start else None,
        "device": start.get("device"),
        "training clips": used
        if kept == 0
        else f"{text.plain((used or 0) - kept)} + {kept} to keep",
        "windows": number(start.get("windows")),
        "samples a step": number(start.get("effective_batch")),
        "trained parameters": number(start.get("trainable_parameters")),
        "resumed from step": ", ".join(
            text.value_text(r.get("from_step")) for r in run.of_kind("resume")
        )
        or None,
    }
    known = {
        name: text.plain(v) if isinstance(v, (int, float)) else v
        for name, v in figures.items()
        if v is not None
    }
    return {
        "state": (word, css, f"{method} on {base}: {far}, {sentence}."),
        "figures": known,
        "versions": ", ".join(
            f"{name} {version}" for name, version in mapping(start.get("versions")).items()
        ),
        "notes": items(start.get("notes")),
    }


def warnings(run: Run) -> dict[str, Any]:
    """Everything that the user should know, equal texts once."""
    steps_of: dict[str, list[str]] = {}
    for record in run.of_kind("warning"):
        step = number(record.get("step"))
        steps_of.setdefault(str(record.get("text", "")), []).extend(
            [] if step is None else [text.plain(step)]
        )
    lines = [
        f"{words} (step {text.some(steps)})" if steps else words
        for words, steps in steps_of.items()
    ]
    clips = sum(bool(clip.get("warnings")) for clip in run.clips)
    own = (
        [f"{text.counted(clips, 'clip')} with a note of its own, in the table of clips"]
        if clips
        else []
    )
    return {"lines": [*run.notes, *lines, *own]}


def contact_sheet_page(
    title: str,
    account: Mapping[str, Any],
    pictures: dict[str, list[str]],
    roots: Sequence[Path],
    notes: Sequence[str],
) -> str:
    """The whole page of ``check``'s account.

    ``pictures`` are paths of images, relative to the page, by the clip's path; ``roots`` the datasets' folders, from which
    clips are named; ``notes`` what is reported beside the account's own.
    """
    shown = list(dict.fromkeys([*notes, *account["notes"]]))
    given = {
        "account": account,
        "pictures": pictures,
        "roots": roots,
        "notes": shown,
        "long": LONG,
    }
    return render("contact_sheet.html.j2", title=title, **given)


def render(template: str, /, **data: Any) -> str:
    """A template of the report filled in."""
    return fill(environment("videotune.reporter"), template, data)


def fill(templates: Environment, name: str, data: Mapping[str, Any]) -> str:
    """A template filled in. Text cannot become markup; what UTF-8 cannot carry becomes a question mark."""
    return templates.get_template(name).render(data).encode("utf-8", "replace").decode("utf-8")


@cache
def environment(*packages: str) -> Environment:
    """The templates of packages, the first ones first, with the words of ``videotune.text`` as filters."""
    loader = ChoiceLoader([PackageLoader(package) for package in packages])
    made = Environment(
        autoescape=True,
        loader=loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    words = {
        name: word
        for name, word in vars(text).items()
        if getattr(word, "__module__", "") == text.__name__
    }
    made.filters |= words | {
        "number": number,
        "entries": items,
        "mapping": mapping,
        "repr": repr,
    }
    return made


STROKES = ("one", "two", "three", "four")
OWN = ("output_model_destination", "cache_dir")
"""Settings that say where a run lies, not what it is."""


def write_comparison(folders: Sequence[Path], page: Path) -> Path:
    """Write the page of these runs, best first, with links to their reports; returns ``page``.

    Folders where no run lies yet are listed as waiting.
    """
    runs = [read_run(folder) for folder in folders if (folder / "config.json").is_file()]
    differing = differing_settings(runs)
    rows = sorted(
        (_row(run, differing, page.parent) for run in runs), key=lambda row: row["rank"]
    )
    waiting = [folder.name for folder in folders if not (folder / "config.json").is_file()]
    chart = _chart([run for run in runs if run.validations], [row["name"] for row in rows])
    facts = {"rows": rows, "keys": differing, "chart": chart, "waiting": waiting}
    write_text(page, render("runs.html.j2", title="Runs", **facts))
    return page


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """The dotted names of the settings that differ between runs."""
    flat = [inventory.flat_settings(run) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one if name not in OWN)
    return [name for name in names if any(one.get(name) != flat[0].get(name) for one in flat)]


def _row(run: Run, differing: Sequence[str], home: Path) -> dict[str, Any]:
    """A run's cells; ``rank`` puts the lowest validation loss first, and runs without one last."""
    verdict = outcome.verdict(run)
    best = min(
        (loss for _, loss in points(run.validations, "held_out", "normalised")), default=None
    )
    settings = inventory.flat_settings(run)
    seconds = (run.last("end")["seconds"] or {}).values()
    report = run.folder / "report.html"
    return {
        "name": run.folder.name,
        "link": Path(os.path.relpath(report, home)).as_posix() if report.is_file() else None,
        "values": [text.value_text(settings.get(key)) for key in differing],
        "state": summary(run)["state"],
        "steps": run.steps.last,
        "verdict": (verdict["latest"] or {}).get("verdict") or "none",
        "recommended": verdict["step"],
        "held_out": None if best is None else text.plain(best),
        "minutes": text.plain(sum(number(one) or 0 for one in seconds) / 60, 2)
        if seconds
        else None,
        "rank": (best is None, best or 0.0, run.folder.name),
    }


def _chart(runs: Sequence[Run], order: Sequence[str]) -> dict[str, Any] | None:
    """The validation losses of the runs over their steps, in the order of the table; beyond four, pale lines."""
    lines = []
    for place, run in enumerate(sorted(runs, key=lambda one: order.index(one.folder.name))):
        css = STROKES[place % len(STROKES)] + (" pale" if place >= len(STROKES) else "")
        lines.append(
            charts.Line(
                run.folder.name,
                points(run.validations, "held_out", "normalised"),
                css,
                dots=True,
            )
        )
    shown = [line for line in lines if line.points]
    says = "error on held-out clips, relative to the base model: below 1 is better"
    return charts.line_chart(shown, says=says, x_label="step") if shown else None
