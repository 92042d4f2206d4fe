"""The sections with videos: before and after, all previews, and one prompt over all checkpoints."""

from __future__ import annotations

from videotune.report.markup import (
    NOTHING,
    Html,
    badge,
    counted,
    element,
    join,
    local_link,
    missing,
    paragraph,
    plain,
    section,
    switched_off,
    table,
    text,
    value_text,
)
from videotune.report.media import BUDGET, Compared, Media, exported_steps, sample_rows
from videotune.report.read import Record, Run, items, mapping, number, setting

PLAYS = "autoplay loop muted playsinline"
"""Attributes of a video that plays by itself."""


def before_section(run: Run, media: Media) -> Html:
    """Each prompt as the base draws it beside what was learnt, with the same seed, in one video and so in step."""
    title = "Before and after"
    if not media.compared and number(setting(run, "sample_after")) == 0:
        return section("before", title, demo_part(run), switched_off("sample_after"))
    if not media.compared:
        return section("before", title, demo_part(run), missing("a prompt appears as soon as it is drawn twice"))
    exported = exported_steps(run)
    cards = [_card(run, media, compared, exported) for compared in media.compared]
    told = "The same prompt and the same seed: only what was learnt differs."
    return section(
        "before", title, demo_part(run), paragraph(text(told), css="soft"), element("div", *cards, css="beside")
    )


def _card(run: Run, media: Media, compared: Compared, exported: set[float]) -> Html:
    """A prompt: its videos side by side, with the name of each below."""
    prompt, seed = compared.row
    kind, css = prompt_kind(run, prompt)
    words = element("p", element("b", text(prompt)), text(f" seed {seed} "), badge(kind, css) if kind else NOTHING)
    names = [step_name(step, step in exported) for step in compared.steps]
    labels = element(
        "div", *(element("span", text(name)) for name in names), css="names", attributes=_columns(len(names))
    )
    if compared.uri:
        controls = "" if compared.small else " controls"
        video = element("video", attributes={"src": compared.uri}, flags=f"{PLAYS}{controls}")
        return element("figure", words, video, labels)
    videos = [element("div", video_of(run, media, path)) for path in compared.paths]
    row = element("div", *videos, css="names", attributes=_columns(len(videos)))
    return element("figure", words, row, labels, paragraph(text(f"Not in step: {compared.why}."), css="soft"))


def _columns(count: int) -> dict[str, object]:
    return {"style": f"grid-template-columns:repeat({count},minmax(0,1fr))"}


def step_name(step: float, exported: bool = False) -> str:
    """What stands below a video."""
    return ("base" if step == 0 else f"step {plain(step)}") + (", exported" if exported and step else "")


def prompt_kind(run: Run, prompt: str) -> tuple[str, str]:
    """Whether a prompt is a caption that the run was shown, in words, and a colour; empty where the account has none."""
    clips = [mapping(clip) for clip in items(mapping(run.check).get("clips"))]
    shown = [clip for clip in clips if clip.get("used") and "captions" in clip]
    kinds = {clip.get("kind") for clip in shown if prompt in items(clip.get("captions"))}
    if not shown:
        return "", ""
    if kinds - {"regularization"}:
        return "caption of training clips", "care"  # what is drawn may be copied
    return ("caption of regularization clips", "calm") if kinds else ("caption of no clip", "good")


def video_of(run: Run, media: Media, path: str) -> Html:
    """A video, from within the page or from where it lies; where there is none, why not."""
    if not path:
        return element("p", text("not drawn"), css="missing")
    source = media.source(path)
    if source is None or local_link(path) is None:
        return element("p", text(f"outside the run folder: {path}"), css="missing")
    if path not in media.carried and not (run.folder / path).is_file():
        return element("p", text(f"no longer there: {path}"), css="missing")
    if path in media.carried:  # small ones play by themselves: controls would cover them
        return element("video", attributes={"src": source}, flags=PLAYS)
    return element("video", attributes={"src": source, "preload": "metadata"}, flags="controls loop muted playsinline")


def samples_section(run: Run, media: Media) -> Html:
    """Previews as a grid: a row a prompt and seed, a column a step, the base's first."""
    rows = sample_rows(run)
    if not rows and number(setting(run, "sample_after")) == 0:
        return section("samples", "Samples", switched_off("sample_after"))
    if not rows:
        return section("samples", "Samples", missing("previews appear as the run draws them"))
    above = {compared.row: {str(path) for path in compared.paths} for compared in media.compared}
    if all({str(cell.get("path")) for cell in cells.values()} <= above.get(row, set()) for row, cells in rows.items()):
        return section("samples", "Samples", paragraph(text("All previews so far stand above, side by side.")))
    steps = sorted({step for cells in rows.values() for step in cells})
    parts: list[Html] = []
    for (prompt, seed), cells in rows.items():
        words = element("span", element("b", text(prompt)), text(f" seed {seed}"))
        parts += [element("div", words, css="prompt"), *(sample(run, media, step, cells.get(step)) for step in steps)]
    grid = element("div", *parts, css="samples", attributes={"style": f"--columns:{len(steps)}"})
    left = f"{counted(media.left_out, 'picture or video')} more than the {BUDGET / 1e6:g} MB that this page carries: "
    note = paragraph(text(f"{left}to be seen with the run folder alone."), css="soft") if media.left_out else NOTHING
    return section("samples", "Samples", note, element("div", grid, css="grid-scroll"))


def sample(run: Run, media: Media, step: float, record: Record | None) -> Html:
    """One cell of the grid; where there is no video, why not."""
    caption = element("figcaption", text("base (step 0)" if step == 0 else f"step {plain(step)}"))
    return element("figure", video_of(run, media, str((record or {}).get("path") or "")), caption)


def compare_section(run: Run, media: Media) -> Html:
    """What ``compare`` drew: one prompt and seed over all checkpoints; nothing where it has not been asked."""
    if not run.compared:
        return NOTHING
    parts = []
    for entry in run.compared:
        steps = ", ".join(step_name(number(step) or 0) for step in items(entry.get("steps")))
        words = element(
            "p", element("b", text(entry.get("prompt", ""))), text(f" seed {value_text(entry.get('seed'))}")
        )
        video = video_of(run, media, str(entry.get("video") or ""))
        order = paragraph(text(f"In rows, from the left: {steps}."), css="soft")
        parts.append(element("figure", words, video, order, css="compared"))
    return section("compare", "One prompt over all checkpoints", *parts)


def demo_part(run: Run) -> Html:
    """What a detector saw in samples before and after, where the run is a demo."""
    if run.demo is None:
        return NOTHING
    rows = []
    for key, name in (
        ("concept", "samples that show the new concept"),
        ("control", "samples that show what the base knew"),
    ):
        part = mapping(run.demo.get(key))
        shares = [number(part.get(when)) for when in ("before", "after")]
        rows.append([text(name), *(text("–" if x is None else f"{x:.0%}") for x in shares), text(part.get("n", "–"))])
    return join([element("h3", text("What a detector saw")), table(["", "before", "after", "of"], rows)])
