"""What a stranger should know first: how the run went, when to have stopped, which file to take, which clips are learnt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from videotune.report.exposure import window_views
from videotune.report.markup import (
    NOTHING,
    Html,
    badge,
    bullets,
    element,
    join,
    missing,
    paragraph,
    plain,
    section,
    switched_off,
    table,
    text,
)
from videotune.report.read import Record, Run, items, last_of_kind, mapping, number, of_kind, setting
from videotune.report.svg import Line, Point, line_chart
from videotune.train.logging.step_sums import clip_of

COLOURS = {"LEARNING": "good", "PLATEAU": "calm", "OVERFITTING": "bad"}

LEARNT, LITTLE = 0.9, 0.98
"""A clip is called learnt where its error is below the first share of what it was, and learnt a little below the second."""

LEVELS = 9


def verdict_section(run: Run) -> Html:
    """The verdict in words, what to do, when it changed, the curve that it rests on, and the clips one by one."""
    latest, title = last_of_kind(run, "verdict"), "How it went"
    readings = readings_of(run)
    if not latest:
        if not readings and number(setting(run, "validate_every")) == 0:
            return section("verdict", title, switched_off("validate_every"))
        told = missing("a verdict, which takes three readings of the ruler")
        return section("verdict", title, told, clips_part(run, readings))
    word = str(latest.get("verdict") or "no verdict")
    return section(
        "verdict",
        title,
        paragraph(badge(word, COLOURS.get(word, "quiet")), text(in_words(latest)), css="state"),
        bullets(advice(run, latest)),
        curve(readings, latest),
        history(run),
        clips_part(run, readings),
    )


def in_words(latest: Record) -> str:
    """The verdict as a sentence or two."""
    word, best = latest.get("verdict"), number(latest.get("best_step"))
    if word == "OVERFITTING":
        return _stopped(latest)
    if word == "PLATEAU":
        worse = f"It has got worse since step {plain(best)}." if best else "It is worse than the base model itself."
        return f"{worse if latest.get('turned') else 'It has come to rest.'} {_sentence(latest)}"
    if word == "LEARNING":
        but = f", but held-out clips were better at step {plain(best)}" if latest.get("turned") else ""
        return f"It was still learning at step {plain(number(latest.get('step')))}{but}. {_sentence(latest)}"
    return _sentence(latest)


def _stopped(latest: Record) -> str:
    """When a run that overfits should have stopped, why, and where it began."""
    best, place = number(latest.get("best_step")), number(latest.get("quantile"))
    when = f"It should have stopped at step {plain(best)}" if best else "No state was better than the base model itself"
    said = f"{when}{_span(latest)}. {_sentence(latest)}"
    if place is None:
        return said
    what = "fine detail" if place <= 3 else "layout and motion" if place >= 7 else "shapes"
    return f"{said} It began at noise level {plain(place)} of {LEVELS}, where the model decides {what}."


def _sentence(record: Record) -> str:
    reason = str(record.get("reason") or "It says no reason")
    return f"{reason[:1].upper()}{reason[1:]}."


def _span(latest: Record) -> str:
    """How sure the best step is."""
    first, *rest = [number(step) for step in items(latest.get("as_good"))] or [None]
    last = rest[0] if rest else None
    if first is None or last is None or first == last:
        return ""
    return f" (steps {plain(first)} to {plain(last)} cannot be told apart)"


def advice(run: Run, latest: Record) -> list[Html]:
    """What to do next: which file, and what would make another run better."""
    word, best = latest.get("verdict"), number(latest.get("best_step"))
    step, why = to_take(run, latest)
    said = [file_line(run, step), *([text(why)] if why else [])]
    if latest.get("turned") and not best:
        told = "On clips that it was not shown, no state of this run is better than the base model. The best of those saved:"
        return [text(told), *said, text("For a better model: more clips, other ones, or a lower learning_rate.")]
    if word == "OVERFITTING":
        said.append(text("For a better model: more clips, or other ones. More steps on these clips make it worse."))
        if step is not None:
            go_on = f"videotune train --out {run.folder.name} --resume --from {step}"
            said.append(join([text("To go on from there: "), element("code", text(go_on))]))
    if word == "LEARNING":
        said.append(text("More steps would probably help: --resume with a larger --set steps=…"))
    if word == "PLATEAU" and latest.get("turned"):
        said.append(text("A lower learning_rate, or fewer steps: what was learnt until then is being lost."))
    elif word == "PLATEAU":
        said.append(
            text(
                "More steps will change little in what it draws of new prompts. Another learning_rate, a larger lora.rank "
                "or more clips might."
            )
        )
    if word is None:
        said.append(text("Look at the samples, and at the exposure below: views are all that warns of copying here."))
    return said


def to_take(run: Run, latest: Record) -> tuple[int | None, str]:
    """The step whose state to take, and what is to be said of it: as the run said at its end; of one that goes on, of what
    is saved the best read, or the nearest to the best reading, or the last."""
    taken, best = mapping(last_of_kind(run, "end").get("take")), number(latest.get("best_step"))
    if (step := number(taken.get("step"))) is not None:
        why = str(taken.get("why") or "") if latest.get("turned") and step != best else ""
        return int(step), f"{why[:1].upper()}{why[1:]}." if why else ""
    saved = {int(step) for record in of_kind(run, "save") if (step := number(record.get("step"))) is not None}
    if not saved:
        return None, ""
    if not latest.get("turned") or best is None:
        return max(saved), ""
    held_out = dict(normalised_points(readings_of(run), "held_out"))
    if read := saved & set(held_out):
        found = min(read, key=lambda step: (held_out[step], step))
        lacks = f"It is the best of those saved: there is no checkpoint of step {plain(best)}."
        return found, "" if found == best else lacks
    near = f"It is the nearest to step {plain(best)}, where held-out clips were best: no state that was read is saved."
    return min(saved, key=lambda step: (abs(step - best), step)), near


def file_line(run: Run, step: int | None) -> Html:
    """The file to take, by its name where it was exported, else the command that writes it."""
    if step is None:
        return text("Nothing is saved yet.")
    paths = [str(line.get("path")) for line in run.exports or ()]
    exported = [path for path in paths if re.search(rf"-step-{step}(?!\d)", path)]
    if exported:
        return join(
            [text("Take "), element("code", text(exported[0])), text(f" (the state after step {plain(step)}).")]
        )
    command = f"videotune export {run.folder.name} --step {step}"
    told = text(f"Take the state after step {plain(step)}, which is not exported yet: ")
    return join([told, element("code", text(command))])


def readings_of(run: Run) -> list[Record]:
    """The readings of the ruler in use."""
    found = of_kind(run, "ruler")
    return [record for record in found if record.get("ruler") == found[-1].get("ruler")]


def curve(readings: list[Record], latest: Record) -> Html:
    """Held-out and training clips by step, each noise level counted alike, with the best step marked."""
    lines = []
    for key, name, css in (("held_out", "held-out clips", "one"), ("train", "training clips", "two")):
        points = normalised_points(readings, key)
        if points:
            lines.append(Line(name, points, css, dots=True))
    if not lines or len(readings) < 2:
        return NOTHING
    best = number(latest.get("best_step"))
    says = "error on the same clips, relative to the base model: below 1 is better"
    chart = line_chart(lines, says=says, x_label="step", marks=[] if best is None else [best])
    note = "" if best is None else " The red mark is the best step."
    return join([paragraph(text(f"{says[:1].upper()}{says[1:]}.{note}"), css="soft"), chart])


def normalised_points(readings: list[Record], key: str) -> list[Point]:
    """(step, normalised value) of a part of the readings."""
    pairs = ((number(r.get("step")), number(mapping(r.get(key)).get("normalised"))) for r in readings)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def history(run: Run) -> Html:
    """When the verdict changed, and why."""
    told, changes, word = of_kind(run, "verdict"), [], None
    for record in told:
        if record.get("verdict") != word:
            changes.append(record)
        word = record.get("verdict")
    rows = [
        [text(plain(number(r.get("step")))), text(r.get("verdict") or "no verdict"), text(_sentence(r))]
        for r in changes
    ]
    if not rows:
        return NOTHING
    return join([element("h3", text("When it changed")), table(["step", "verdict", "why"], rows, css="cards")])


def clips_part(run: Run, readings: list[Record]) -> Html:
    """Each clip that the ruler reads: what became of its error, and how often it was shown."""
    if len(readings) < 2:
        return NOTHING
    parts = [clip_rows(run, readings, key, name) for key, name in (("train", "training"), ("held_out", "held out"))]
    rows = [row for part in parts for row in part]
    if not rows:
        return NOTHING
    intro = "Error on each clip that the ruler reads, at the last reading, as a share of what it was at the first."
    head = ["clip", "is", "views so far", "error", ""]
    return join([
        element("h3", text("Which clips are learnt")),
        paragraph(text(intro), css="soft"),
        table(head, rows, css="cards"),
    ])  # fmt: skip


def clip_rows(run: Run, readings: list[Record], key: str, name: str) -> list[list[Html]]:
    """The rows of a part's clips, the least learnt first."""
    paths = {
        str(mapping(clip).get("id"))[:12]: str(mapping(clip).get("path"))
        for clip in items(mapping(run.check).get("clips"))
    }
    views: dict[str, int] = {}
    for window, count in window_views(run).items():
        views[clip_of(window)] = views.get(clip_of(window), 0) + count
    shares = clip_shares(readings, key)
    rows = []
    for clip, share in sorted(shares.items(), key=lambda pair: -pair[1]):
        word, css = learnt(share) if key == "train" else seen_anew(share)
        label = element("span", text(PurePath(paths.get(clip, clip)).name), attributes={"title": paths.get(clip, clip)})
        seen = text(plain(views.get(clip, 0)) if key == "train" else "–")
        rows.append([label, text(name), seen, text(f"{share:.0%}"), badge(word, css)])
    return rows


def clip_shares(readings: list[Record], key: str) -> Mapping[str, float]:
    """Each clip's value at the last reading over that at the first."""
    first, last = (mapping(mapping(readings[i].get(key)).get("clips")) for i in (0, -1))
    pairs = {str(clip): (number(first.get(clip)), number(value)) for clip, value in last.items()}
    return {clip: now / then for clip, (then, now) in pairs.items() if then and now is not None}


def seen_anew(share: float) -> tuple[str, str]:
    """What became of a clip that was never trained on, in a word, and its colour."""
    if share > 1.02:
        return "worse than the base", "bad"
    return ("better than the base", "good") if share < LITTLE else ("as the base", "quiet")


def learnt(share: float) -> tuple[str, str]:
    """What became of a clip, in a word, and its colour."""
    if share > 1.02:
        return "worse", "bad"
    if share < LEARNT:
        return "learnt", "good"
    return ("a little", "calm") if share < LITTLE else ("not learnt", "quiet")
