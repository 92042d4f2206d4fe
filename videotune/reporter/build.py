"""Build the report page of a run."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from videotune import text
from videotune.files import write_text
from videotune.model_spec import asset_title
from videotune.reporter import curves, inventory, kept, metrics, outcome, previews
from videotune.reporter.comfyui import expert_in
from videotune.reporter.previews import Media
from videotune.reporter.privacy import shareable, without_machine
from videotune.reporter.read import (
    SWITCHED_OFF,
    Record,
    Run,
    at,
    items,
    mapping,
    number,
    read_run,
)
from videotune.reporter.restarts import restarts_of
from videotune.runs.plan_facts import samples_per_step
from videotune.runs.step_sums import Steps, regularization
from videotune.validation import verdict_words

LONG_CAPTION = 120
"""Characters of a caption on the contact sheet before the rest is folded."""


def write_report(
    folder: Path, journal_contents: tuple[Sequence[Record], Steps] | None = None
) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    The page needs neither a network nor a script. It embeds videos and pictures up to
    ``previews.BUDGET``; others are linked.

    Args:
        folder: the run folder.
        journal_contents: see ``read_run``.

    Raises:
        VideotuneError: if the folder is not a run folder.
    """
    path = folder / "report.html"
    write_text(path, page(read_run(folder, journal_contents)))
    return path


def page(run: Run) -> str:
    """Return the report page of a run."""
    return render("report.html.j2", **collect(run))


def collect(run: Run) -> dict[str, Any]:
    """Return the contents of the report page as plain data."""
    run = shareable(run)
    media = Media(run)
    outcome_chapters = {
        "verdict": outcome.verdict(run),
        "before": previews.before(run, media),
        "use": inventory.use(run, is_shared=True),
    }
    details = {
        "warnings": notes_and_warnings(run),
        "validation": curves.validation(run) | {"grounds": outcome.grounds(run)},
        "forgetting": kept.forgetting(run),
        "parts": kept.parts(run),
        "loss": curves.loss(run),
        "samples": previews.samples(run, media),
        "compare": previews.compare(run, media),
        "metrics": metrics.metrics(run),
        "exposure": curves.exposure(run),
        "clips": inventory.clips(run, media),
        "time": curves.time_spent(run),
        "settings": inventory.settings(run),
        "files": inventory.files(run),
    }
    if not run.compared:
        del details["compare"]
    if details["samples"]["all_above"] and details["samples"]["rows"]:
        del details["samples"]
    for chapters in (outcome_chapters, details):
        for name in [name for name in chapters if _is_switched_off(chapters[name])]:
            del chapters[name]

    folder = run.folder.resolve()
    name = folder.parent.name if folder.name == "run" else folder.name
    return {
        "title": f"Run {name}",
        "chapters": outcome_chapters | details,
        "details": list(details),
        **summary(run),
    }


def _is_switched_off(chapter: Mapping[str, Any]) -> bool:
    """Whether a chapter would only say that a setting is 0."""
    has_kept_figure = bool(chapter.get("kept"))
    return str(chapter.get("absent")).startswith(SWITCHED_OFF) and not has_kept_figure


def summary(run: Run) -> dict[str, Any]:
    """Return the head of the page: state, figures, versions and notes."""
    start = run.last("start")
    done = run.steps.last
    total = _total_steps(run)
    is_complete = total is not None and done >= total
    state, css, sentence = outcome.describe_state(run, is_complete)

    base = (
        at(run.config, "base", "name")
        or at(run.config, "settings", "base_model_name")
        or "a base that is not named"
    )
    base = asset_title(str(base)) or base
    method = at(run.config, "settings", "training_method") or "run"
    progress = text.counted(done, "step")
    if total is not None:
        progress = f"{text.plain(done)} of {text.counted(total, 'step')}"

    figures = {}
    for name, value in _figures(run).items():
        if value is not None:
            is_number = isinstance(value, (int, float))
            figures[name] = text.plain(value) if is_number else value
    versions = mapping(start.get("versions")).items()
    return {
        "state": (state, css, f"{method} on {base}: {progress}, {sentence}."),
        "figures": figures,
        "versions": ", ".join(f"{name} {version}" for name, version in versions),
    }


def _total_steps(run: Run) -> float | None:
    for record in (run.config, run.last("start"), run.plan):
        steps = number(at(record, "steps"))
        if steps is not None:
            return steps
    return None


def _figures(run: Run) -> dict[str, Any]:
    """Return the key figures of a run; None for those that are not recorded."""
    start = run.last("start")
    clips = mapping(start.get("clips")) or mapping(run.check)
    training_clips = number(clips.get("used"))
    num_preserved = len(regularization(run.check))
    if num_preserved:
        training_clips = (training_clips or 0) - num_preserved

    resumes = [restart.text for restart in restarts_of(run)]
    samples = samples_per_step(mapping(run.plan) or start) or ()
    return {
        "started": text.moment(start["time"]) if "time" in start else None,
        "device": start.get("device"),
        "training clips": training_clips,
        "regularization clips (to keep what it knew)": num_preserved or None,
        "windows (parts of clips that are trained)": number(start.get("windows")),
        "samples a step": " to ".join(map(text.plain, sorted(set(samples)))) or None,
        "trained parameters": number(start.get("trainable_parameters")),
        "resumed from step": ", ".join(resumes) or None,
    }


def notes_and_warnings(run: Run) -> dict[str, Any]:
    """Return the chapter of the notes at the start, of what a resume changed, and of the
    warnings.
    """
    notes = [str(note) for note in items(run.last("start")["notes"])]
    for record in run.of_kind("resume"):
        step = number(record.get("from_step")) or 0
        notes += [
            f"changed when it was resumed from step {text.plain(step)}: {change}"
            for change in items(record.get("changes"))
        ]
    return {"lines": notes + warnings(run)["lines"]}


def warnings(run: Run) -> dict[str, Any]:
    """Return the chapter of warnings; equal texts are listed once with their steps."""
    steps_by_text: dict[str, list[str]] = {}
    for record in run.of_kind("warning"):
        steps = steps_by_text.setdefault(str(record.get("text", "")), [])
        step = number(record.get("step"))
        if step is not None:
            steps.append(text.plain(step))

    lines = list(run.notes)
    for warning, steps in steps_by_text.items():
        lines.append(f"{warning} (step {text.some(steps)})" if steps else warning)
    warned_clips = [clip for clip in run.clips if items(clip.get("warnings"))]
    if warned_clips:
        name = Path(str(warned_clips[0].get("path", ""))).name
        first_warning = str(items(warned_clips[0]["warnings"])[0])
        if len(warned_clips) == 1:
            lines.append(f"{name}: {first_warning}")
        else:
            count = text.plain(len(warned_clips))
            lines.append(
                f"{count} clips have warnings of their own. That of {name}: {first_warning}"
            )
    return {"lines": lines}


def contact_sheet_page(
    title: str,
    account: Mapping[str, Any],
    pictures: dict[str, list[str]],
    roots: Sequence[Path],
    notes: Sequence[str],
    companions: Mapping[str, list[tuple[str, list[str]]]] | None = None,
) -> str:
    """Return the contact sheet of ``check`` as a page.

    Args:
        title: title of the page.
        account: the account of clips.
        pictures: paths of images relative to the page, by the clip's path.
        roots: folders of the datasets; clips are named relative to them.
        notes: notes in addition to those of the account.
        companions: label and paths of images of each file that belongs to a clip, by the
            clip's path.
    """
    account = without_machine(account, roots)
    notes = without_machine(list(notes), roots)
    names = without_machine({"paths": list(pictures)}, roots)["paths"]
    return render(
        "contact_sheet.html.j2",
        title=title,
        account=account,
        pictures=dict(zip(names, pictures.values(), strict=True)),
        companions=_labelled_without_machine(companions or {}, roots),
        notes=list(dict.fromkeys([*notes, *account["notes"]])),
        long=LONG_CAPTION,
    )


def _labelled_without_machine(
    companions: Mapping[str, list[tuple[str, list[str]]]], roots: Sequence[Path]
) -> dict[str, list[tuple[str, list[str]]]]:
    """Return labels and pictures of companions without names of folders elsewhere."""
    labelled = {}
    for clip, rows in companions.items():
        name = without_machine({"path": clip}, roots)["path"]
        labels = without_machine([label for label, _ in rows], roots)
        pictures = [row_pictures for _, row_pictures in rows]
        labelled[name] = list(zip(labels, pictures, strict=True))
    return labelled


def render(template: str, /, **data: Any) -> str:
    """Fill a template of the report."""
    return fill(environment("videotune.reporter"), template, data)


def fill(templates: Environment, name: str, data: Mapping[str, Any]) -> str:
    """Fill a template. Characters that UTF-8 cannot encode become question marks."""
    page_text = templates.get_template(name).render(data)
    return page_text.encode("utf-8", "replace").decode("utf-8")


@cache
def environment(*packages: str) -> Environment:
    """Return the templates of packages, the first ones with precedence.

    The functions of ``videotune.text`` are filters. Text is escaped.
    """
    templates = Environment(
        autoescape=True,
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    for name, value in vars(text).items():
        if getattr(value, "__module__", "") == text.__name__:
            templates.filters[name] = value
    templates.filters |= {
        "number": number,
        "entries": items,
        "mapping": mapping,
        "repr": repr,
        "with_code": with_code,
        "expert_in": expert_in,
        "is_undecided": verdict_words.is_undecided,
        "is_unknown": verdict_words.is_unknown,
        "is_unproven": verdict_words.is_unproven,
        "shown_word": verdict_words.shown_word,
    }
    return templates


def with_code(line: str) -> Markup:
    """Return a line as HTML, with what is between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(line))))
