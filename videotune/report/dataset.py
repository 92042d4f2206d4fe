"""The account of a dataset as a page: what becomes of every clip, with pictures of it as it is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from videotune.report.markup import (
    NOTHING,
    Html,
    badge,
    bullets,
    counted,
    details,
    element,
    join,
    paragraph,
    plain,
    section,
    table,
    text,
)
from videotune.report.style import CSS

PICTURES = """
main{max-width:1400px}
table.clips td:first-child{min-width:200px;max-width:330px;font-weight:400}
table.clips td:last-child{min-width:170px}
.shots{display:flex;gap:4px;min-width:320px}
.shots img{display:block;flex:0 1 auto;min-width:0;max-width:calc((100% - 8px)/3);max-height:110px;object-fit:contain;
align-self:flex-start;border-radius:4px;background:#000}
.caption{color:var(--soft)}
.caption summary{margin:0}
@media (max-width:640px){
table.clips td:first-child{max-width:none}
table.clips td:nth-child(2){padding-left:0}
table.clips td:nth-child(2)::before{content:none}
.shots{min-width:0}
}
"""

LONG = 120
"""Letters from which a caption's end opens on a click."""

LEGEND = (
    ("green", "good", "trained on"),
    ("orange", "care", "trained on, with warnings"),
    ("blue", "calm", "held out for validation"),
    ("red", "bad", "skipped, with the reason"),
)
"""What the colour of a clip's state says."""


def dataset_page(
    title: str,
    account: Mapping[str, Any],
    pictures: Mapping[str, Sequence[str]],
    roots: Sequence[Path] = (),
    notes: Sequence[str] = (),
) -> str:
    """The whole page of ``check``'s account.

    ``pictures`` are paths of images, relative to the page, by the clip's path; ``roots`` the datasets' folders, from which
    clips are named; ``notes`` what is to be said beside the account's own.
    """
    head = element(
        "head",
        element("meta", attributes={"charset": "utf-8"}),
        element("meta", attributes={"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("title", text(title)),
        element("style", Html(CSS + PICTURES)),
    )
    sums = " + ".join(
        f"{account[key]} {name}" for key, name in (("used", "used"), ("held_out", "held out"), ("skipped", "skipped"))
    )
    told = dict.fromkeys([*notes, *account["notes"]])
    main = element(
        "main",
        element("h1", text(title)),
        paragraph(text(f"{counted(account['found'], 'clip')} found = {sums}"), css="state"),
        bullets([text(note) for note in told]),
        section("buckets", "Buckets", _buckets(account)),
        section("clips", "Clips", _legend(), _clips(account, pictures, roots)),
    )
    return "<!doctype html>\n" + element("html", head, element("body", main), attributes={"lang": "en"}) + "\n"


def state_words(clip: Mapping[str, Any]) -> str:
    """What becomes of a clip of the account, in two or three words."""
    if clip["used"]:
        return "used (regularization)" if clip["kind"] == "regularization" else "used"
    return "held out" if clip["held_out"] else f"skipped: {clip['reason']}"


def shape_words(shape: str) -> str:
    """A shape as a person reads it: FRAMESxHEIGHTxWIDTH, as files have it, becomes "WIDTHxHEIGHT, N frames"."""
    parts = shape.split("x")
    if len(parts) != 3:  # of a damaged file
        return shape
    frames, height, width = parts
    return f"{width}x{height}" + (f", {frames} frames" if frames != "1" else "")


def short_path(path: str, roots: Sequence[Path]) -> str:
    """A clip's path from its dataset's folder; from that folder's name on where there are several datasets."""
    for root in roots:
        if Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root if len(roots) == 1 else root.parent))
    return path


def _buckets(account: Mapping[str, Any]) -> Html:
    if not account["buckets"]:
        return paragraph(text("No clip can be trained on."), css="missing")
    rows = [[text(shape_words(bucket["shape"])), text(plain(bucket["windows"]))] for bucket in account["buckets"]]
    return table(["width x height", "windows"], rows, "cards")


def _legend() -> Html:
    """What the colours of the states mean."""
    parts = [element("span", text(f"{colour}: {meaning}"), css=css) for colour, css, meaning in LEGEND]
    return element("div", *parts, css="legend")


def _clips(account: Mapping[str, Any], pictures: Mapping[str, Sequence[str]], roots: Sequence[Path]) -> Html:
    rows = [_row(clip, pictures.get(clip["path"], ()), roots) for clip in account["clips"]]
    return table(["clip", "first, middle, last frame", "state", "source", "trained as", "notes"], rows, "cards clips")


def _row(clip: Mapping[str, Any], pictures: Sequence[str], roots: Sequence[Path]) -> list[Html]:
    shots = [element("img", attributes={"src": path, "alt": "", "loading": "lazy"}) for path in pictures]
    source = []
    if clip["source_frames"]:
        frames = counted(clip["source_frames"], "frame")
        rate = "an image" if clip["source_fps"] is None else f"{frames} at {clip['source_fps']:.4g} fps"
        source = [rate, f"{clip['width']}x{clip['height']}"]
    used = []
    if clip["shape"]:
        used = [shape_words(clip["shape"]), counted(clip["windows"], "window")]
        used += [f"{counted(clip['views'], 'view')} by the end"] if clip["used"] else []
        used += [f"{clip['seconds_cut']:.2f} s cut"] if clip["seconds_cut"] > 0.005 else []
    notes = [*([clip["detail"]] if clip["detail"] else []), *clip["warnings"], *clip.get("notes", ())]
    name = element("b", text(short_path(clip["path"], roots)), attributes={"title": clip["path"]})
    return [
        join([name, _captions(clip["captions"])]),
        element("div", *shots, css="shots") if shots else NOTHING,
        _state(clip),
        _lines(source),
        _lines(used),
        bullets([text(note) for note in notes]),
    ]


def _captions(captions: Sequence[str]) -> Html:
    """The first caption; the others open on a click."""
    if not captions:
        return NOTHING
    first, others = captions[0], captions[1:]
    shown = text(first or "(empty caption)")
    if len(first) > LONG:
        shown = details(f"{first[:LONG].rsplit(' ', 1)[0]} …", text(first))
    more = details(f"+{len(others)} more", bullets([text(other) for other in others])) if others else NOTHING
    return element("div", shown, more, css="caption")


def _state(clip: Mapping[str, Any]) -> Html:
    if clip["used"]:
        return badge(state_words(clip), "care" if clip["warnings"] else "good")
    return badge(state_words(clip), "calm" if clip["held_out"] else "bad")


def _lines(lines: Sequence[str]) -> Html:
    return join([element("div", text(line)) for line in lines])
