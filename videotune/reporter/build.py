"""One page for a run: what was trained on what, how it went, what came out, and what is not there yet."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from videotune import text
from videotune.files import write_text
from videotune.reporter import curves, inventory, outcome, previews
from videotune.reporter.previews import Media
from videotune.reporter.read import Record, Run, at, items, mapping, number, read_run
from videotune.trainer.logging.step_sums import Steps, regularization

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
    start, done = run.last("start"), run.steps.last
    total = next((n for part in (run.config, start, run.plan) if (n := number(at(part, "steps"))) is not None), None)
    base = at(run.config, "base", "name") or at(run.config, "settings", "base_model_name") or "a base that is not named"
    method = at(run.config, "settings", "training_method") or "run"
    far = f"{text.plain(done)} of {text.counted(total, 'step')}" if total is not None else text.counted(done, "step")
    word, css, sentence = outcome.standing(run, total is not None and done >= total)
    clips = mapping(start.get("clips")) or mapping(run.check)
    used, kept = number(clips.get("used")), len(regularization(run.check))
    figures = {
        "started": text.moment(start["time"]) if "time" in start else None,
        "device": start.get("device"),
        "training clips": used if kept == 0 else f"{text.plain((used or 0) - kept)} + {kept} to keep",
        "windows": number(start.get("windows")),
        "samples a step": number(start.get("effective_batch")),
        "trained parameters": number(start.get("trainable_parameters")),
        "resumed from step": ", ".join(text.value_text(r.get("from_step")) for r in run.of_kind("resume")) or None,
    }
    known = {name: text.plain(v) if isinstance(v, (int, float)) else v for name, v in figures.items() if v is not None}
    return {
        "state": (word, css, f"{method} on {base}: {far}, {sentence}."),
        "figures": known,
        "versions": ", ".join(f"{name} {version}" for name, version in mapping(start.get("versions")).items()),
        "notes": items(start.get("notes")),
    }


def warnings(run: Run) -> dict[str, Any]:
    """Everything that the user should know, equal texts once."""
    steps_of: dict[str, list[str]] = {}
    for record in run.of_kind("warning"):
        step = number(record.get("step"))
        steps_of.setdefault(str(record.get("text", "")), []).extend([] if step is None else [text.plain(step)])
    lines = [f"{words} (step {text.some(steps)})" if steps else words for words, steps in steps_of.items()]
    clips = sum(bool(clip.get("warnings")) for clip in run.clips)
    own = [f"{text.counted(clips, 'clip')} with a note of its own, in the table of clips"] if clips else []
    return {"lines": [*run.notes, *lines, *own]}


def contact_sheet_page(
    title: str,
    account: Mapping[str, Any],
    pictures: Mapping[str, Sequence[str]],
    roots: Sequence[Path] = (),
    notes: Sequence[str] = (),
) -> str:
    """The whole page of ``check``'s account.

    ``pictures`` are paths of images, relative to the page, by the clip's path; ``roots`` the datasets' folders, from which
    clips are named; ``notes`` what is reported beside the account's own.
    """
    shown = list(dict.fromkeys([*notes, *account["notes"]]))
    given = {"account": account, "pictures": pictures, "roots": roots, "notes": shown, "long": LONG}
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
    made = Environment(autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    words = {name: word for name, word in vars(text).items() if getattr(word, "__module__", "") == text.__name__}
    made.filters |= words | {"number": number, "entries": items, "mapping": mapping, "repr": repr}
    return made
