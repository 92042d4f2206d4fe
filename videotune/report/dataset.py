"""The account of a dataset as a page: what becomes of every clip, with pictures of it as it is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from videotune.report.markup import (
    NOTHING,
    Html,
    badge,
    bullets,
    counted,
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
table.clips td:first-child{min-width:150px}
.shots{display:flex;gap:4px;flex-wrap:wrap}
.shots img{display:block;height:84px;width:auto;border-radius:4px;background:#000}
"""


def dataset_page(title: str, account: Mapping[str, Any], pictures: Mapping[str, Sequence[str]]) -> str:
    """The whole page of ``check``'s account; ``pictures`` are paths of images, relative to the page, by the clip's path."""
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
    main = element(
        "main",
        element("h1", text(title)),
        paragraph(text(f"{counted(account['found'], 'clip')} found = {sums}"), css="state"),
        bullets([text(note) for note in account["notes"]]),
        section("buckets", "Buckets", _buckets(account)),
        section("clips", "Clips", _clips(account, pictures)),
    )
    return "<!doctype html>\n" + element("html", head, element("body", main), attributes={"lang": "en"}) + "\n"


def _buckets(account: Mapping[str, Any]) -> Html:
    if not account["buckets"]:
        return paragraph(text("No clip can be trained on."), css="missing")
    rows = [[text(bucket["shape"]), text(plain(bucket["windows"]))] for bucket in account["buckets"]]
    return table(["frames x height x width", "windows"], rows, "cards")


def _clips(account: Mapping[str, Any], pictures: Mapping[str, Sequence[str]]) -> Html:
    rows = [_row(clip, pictures.get(clip["path"], ())) for clip in account["clips"]]
    return table(["clip", "first, middle, last frame", "state", "source", "trained as", "notes"], rows, "cards clips")


def _row(clip: Mapping[str, Any], pictures: Sequence[str]) -> list[Html]:
    shots = [element("img", attributes={"src": path, "alt": "", "loading": "lazy"}) for path in pictures]
    source = []
    if clip["source_frames"]:
        rate = (
            "an image"
            if clip["source_fps"] is None
            else f"{clip['source_frames']} frames at {clip['source_fps']:.4g} fps"
        )
        source = [rate, f"{clip['width']}x{clip['height']}"]
    used = []
    if clip["shape"]:
        used = [clip["shape"], counted(clip["windows"], "window"), f"{plain(clip['views'])} views by the end"]
        used += [f"{clip['seconds_cut']:.2f} s cut"] if clip["seconds_cut"] > 0.005 else []
    notes = [*([clip["detail"]] if clip["detail"] else []), *clip["warnings"]]
    return [
        text(clip["path"]),
        element("div", *shots, css="shots") if shots else NOTHING,
        _state(clip),
        _lines(source),
        _lines(used),
        bullets([text(note) for note in notes]),
    ]


def _state(clip: Mapping[str, Any]) -> Html:
    if clip["used"]:
        return badge("used" if clip["kind"] == "train" else clip["kind"], "good" if not clip["warnings"] else "care")
    return badge("held out", "calm") if clip["held_out"] else badge(f"skipped: {clip['reason']}", "bad")


def _lines(lines: Sequence[str]) -> Html:
    return join([element("div", text(line)) for line in lines])
