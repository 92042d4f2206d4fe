"""How often the run has shown what, and will have shown by its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from videotune.report.markup import (
    NOTHING,
    Html,
    badge,
    counted,
    details,
    element,
    missing,
    paragraph,
    plain,
    section,
    text,
)
from videotune.report.read import Run, items, last_of_kind, mapping, number, regularization_clips
from videotune.train.logging.step_sums import clip_of

BANDS = (
    (10.0, "conservative", "calm"),
    (50.0, "moderate", "good"),
    (100.0, "high", "care"),
    (float("inf"), "risky", "bad"),
)
"""Views of a window below which each band ends, its name and its colour: half-open, from 0 up."""

SHOWN = 40
"""How many bars stand open on the page; the others open on a click."""

PLANNED = "The bars show the views of each clip by the end of the run, as planned."


@dataclass(frozen=True)
class ClipViews:
    """Views of a clip: summed over its ``windows``, so far (None where the journal cannot tell) and by the end."""

    name: str
    so_far: int | None
    planned: float | None
    windows: int

    @property
    def views(self) -> float:
        """What its bar shows: what has been, else what is planned."""
        return float(self.so_far if self.so_far is not None else self.planned or 0)


def band(views: float) -> tuple[str, str]:
    """Name and colour of the band of a number of views of one window."""
    return next((name, css) for end, name, css in BANDS if views < end)


def window_views(run: Run) -> Counter[str]:
    """How often each window has been drawn so far."""
    return run.steps.windows


def clip_views(run: Run) -> list[ClipViews]:
    """Every training clip with its views, the most seen first; those of regularization are not among them.

    The account of clips names them by path. Where it gives their ids too, views so far are the journal's; where it gives
    none, only the planned views can be told by path. Without an account clips go by the id in the journal's windows.
    """
    seen, keeping = window_views(run), regularization_clips(run)
    so_far: Counter[str] = Counter()
    windows: Counter[str] = Counter()
    for window, count in seen.items():
        so_far[clip_of(window)] += count
        windows[clip_of(window)] += 1
    used = [clip for clip in items(mapping(run.check).get("clips")) if mapping(clip).get("used")]
    if used:
        found = []
        for clip in used:
            if str(clip.get("id"))[:12] in keeping:
                continue
            key = str(clip["id"])[:12] if "id" in clip and seen else None
            views, num = number(clip.get("views")), number(clip.get("windows"))
            found.append(ClipViews(str(clip.get("path")), None if key is None else so_far[key], views, int(num or 1)))
    else:
        planned = {str(key)[:12]: number(value) for key, value in mapping(_plan_views(run).get("clips")).items()}
        keys = sorted(planned | so_far)
        found = [ClipViews(key, so_far[key] if seen else None, planned.get(key), windows[key] or 1) for key in keys]
    return sorted(found, key=lambda clip: (-clip.views, clip.name))


def exposure_section(run: Run) -> Html:
    """Views of every clip as a sorted list of bars, and which band they fall into."""
    title = "How often each clip is shown"
    clips = [clip for clip in clip_views(run) if clip.so_far is not None or clip.planned is not None]
    if not clips:
        return section(
            "exposure", title, _keeping(run) or missing("views of clips appear with the first step, or with the plan")
        )
    most = max(max(clip.views, clip.planned or 0) for clip in clips) or 1
    rest = clips[SHOWN:]
    return section(
        "exposure",
        title,
        *_sentences(run),
        _keeping(run),
        NOTHING if any(clip.so_far is not None for clip in clips) else paragraph(text(PLANNED), css="soft"),
        _bands(clips),
        _bars(clips[:SHOWN], most),
        details(f"{counted(len(rest), 'more clip')}, seen least", _bars(rest, most)) if rest else NOTHING,
    )


def _sentences(run: Run) -> list[Html]:
    """What was drawn so far, by the journal; what will have been, by the plan."""
    said = []
    keeping = regularization_clips(run)
    rows = [mapping(row) for row in items(mapping(run.check).get("clips"))]
    here = {str(row["id"])[:12] for row in rows if row.get("used") and row.get("id")}
    seen = {  # of clips that are trained on now, not of those that were taken out or are held out since
        window: count
        for window, count in window_views(run).items()
        if clip_of(window) not in keeping and (not here or clip_of(window) in here)
    }
    if seen:
        aside = sum(number(clip.get("windows")) or 0 for clip in keeping.values())
        whole = number(mapping(run.plan).get("windows")) or number(last_of_kind(run, "start").get("windows")) or 0
        windows = whole - aside
        windows = windows if windows > 0 else len(seen)
        least = min(seen.values()) if len(seen) >= windows else 0
        name, css = band(max(seen.values()))
        line = (
            f"{counted(sum(seen.values()), 'sample')} drawn so far from {counted(windows, 'window')}: "
            f"each shown {plain(least)} to {plain(max(seen.values()))} times. "
        )
        said.append(paragraph(badge(name, css), text(line)))
    views = _plan_views(run)
    window = mapping(views.get("per_window"))
    if number(window.get("max")) is not None:
        line = f"By the end each window will have been shown {plain(number(window.get('min')))} to "
        line += f"{plain(number(window.get('max')))} times"
        advice = views.get("advice") or f"band: {window.get('band')}"
        said.append(paragraph(text(f"{line} ({advice})."), css="soft"))
    return said


def _plan_views(run: Run) -> dict[str, object]:
    return dict(mapping(mapping(run.plan).get("views")))


def _keeping(run: Run) -> Html:
    """The regularization clips, which are in no band: they are shown to keep the model as it is, and often."""
    keeping = regularization_clips(run)
    if not keeping:
        return NOTHING
    seen = sum(count for window, count in window_views(run).items() if clip_of(window) in keeping)
    planned = sum(number(clip.get("views")) or 0 for clip in keeping.values())
    line = f"{counted(len(keeping), 'regularization clip')}, in no band: {counted(seen, 'sample')} drawn so far"
    return paragraph(text(f"{line}, {plain(planned)} by the end."), css="soft")


def _bands(clips: Sequence[ClipViews]) -> Html:
    """The four bands, with how many clips are in each."""
    counts = Counter(band(clip.views / clip.windows)[0] for clip in clips)
    starts = [0, *(int(end) for end, _, _ in BANDS[:-1])]
    parts = []
    for (end, name, css), start in zip(BANDS, starts, strict=True):
        scope = f"{start} and more" if end == float("inf") else f"{start} to {int(end) - 1}"
        parts.append(element("span", badge(name, css), text(f"{scope}: {counted(counts[name], 'clip')}")))
    note = element("span", text("views of a window of the clip"))
    return element("div", *parts, note, css="legend")


def _bars(clips: Sequence[ClipViews], most: float) -> Html:
    """A bar a clip: filled as far as it was shown, pale as far as it will be."""
    cells = []
    for clip in clips:
        whole = max(clip.views, clip.planned or 0)
        name, css = band(clip.views / clip.windows)
        filled = element("i", attributes={"style": f"width:{clip.views / (whole or 1):.1%}"})
        bar = element("div", filled, css=f"bar {css}", attributes={"style": f"width:{whole / most:.1%}", "title": name})
        amount = plain(clip.views)
        if clip.so_far is not None and clip.planned is not None and clip.planned != clip.so_far:
            amount += f" of {plain(clip.planned)}"
        if clip.windows > 1:
            amount += f" in {clip.windows} windows"
        label = element("span", element("bdi", text(PurePath(clip.name).name)), attributes={"title": clip.name})
        cells += [label, element("div", bar), element("span", text(amount))]
    return element("div", *cells, css="bars")
