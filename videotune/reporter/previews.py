"""The chapters with videos: before and after, previews, and checkpoints.

``Media`` decides which of a run's videos and pictures are embedded in the page, so
that the page can be sent as one file.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import exists, getsize, isfile
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from videotune.files import path_from
from videotune.reporter.read import (
    SWITCHED_OFF,
    Fields,
    Record,
    Run,
    items,
    mapping,
    number,
)
from videotune.runs.start_state import StartState
from videotune.sampling.picture_faults import describe_faults, describe_sound
from videotune.text import plain, value_text

BUDGET = 5_000_000
"""Characters of the page for embedded videos and pictures; the rest is linked."""

MAX_WIDTH = 320
"""Width in pixels of each video of a side-by-side one, at most."""

MIN_CONTROLS_HEIGHT = 160
"""Height in pixels below which a video has no controls, which would cover it."""

MAX_ROWS = 16
"""Prompts shown before and after, at most."""

FIRST_CARDS = 6
"""Prompts before and after that are shown unfolded."""

KINDS = {
    ".mp4": ("video/mp4", 4, b"ftyp"),
    ".png": ("image/png", 1, b"PNG"),
    ".jpg": ("image/jpeg", 0, b"\xff\xd8"),
}
"""MIME type of a suffix, and the offset and bytes of the format's signature."""


class Media:
    """The videos and pictures that are embedded in the page.

    The order of preference is: prompts before and after, pictures of clips,
    comparisons, previews, the latest first.
    """

    def __init__(self, run: Run) -> None:
        self.folder = run.folder
        self.left_out = 0
        """Number of files that did not fit the budget."""
        self._budget_left = BUDGET
        self.cards: list[dict[str, Any]] = []
        """Prompts before and after."""
        self.embedded: dict[str, str] = {}
        """Data URIs by path in the run folder."""

        exported = exported_steps(run)
        for (prompt, seed), cells in list(sample_rows(run).items())[:MAX_ROWS]:
            steps = sorted({min(cells), max(cells)} | (exported & set(cells)))
            if len(steps) > 1:
                self._add_card(prompt, seed, {step: cells[step] for step in steps})
        for path in dict.fromkeys(_paths_by_preference(run)):
            self._embed(path)

    def _add_card(self, prompt: str, seed: str, cells: Mapping[float, Record]) -> None:
        """Add the videos of a prompt at several steps as one video."""
        paths = [str(record.get("path") or "") for record in cells.values()]
        card: dict[str, Any] = {
            "prompt": prompt,
            "seed": seed,
            "steps": list(cells),
            "paths": paths,
            "faults": [describe_faults(record) for record in cells.values()],
            "sounds": [describe_sound(record) for record in cells.values()],
        }
        if any(card["sounds"]):
            # Joined into one video, none of them could be heard by itself.
            for path in paths:
                self._embed(path, copies=2)
            self.cards.append(card | {"uri": "", "small": False, "why": ""})
            return
        card |= _side_by_side(self.folder, paths)
        if not self._reserve(len(card["uri"])):
            card |= {"uri": "", "why": "the page is full"}
        self.cards.append(card)

    def _embed(self, path: str, copies: int = 1) -> None:
        """Embed a file if it is valid and fits as often as the page shows it."""
        file = self.folder / path
        is_embedded = path in self.embedded
        if is_embedded or not local_link(path) or not _has_signature(file):
            return
        base64_size = 4 * -(-getsize(file) // 3)
        if self._reserve(copies * (base64_size + 40)):
            self.embedded[path] = _data_uri(file.read_bytes(), file.suffix)

    def _reserve(self, size: int) -> bool:
        """Reserve characters of the budget if they fit; return whether they do."""
        fits = size <= self._budget_left
        if fits:
            self._budget_left -= size
        else:
            self.left_out += 1
        return fits

    def video(self, path: str) -> tuple[str, str]:
        """Return (address, "") of a video, or ("", why there is none)."""
        link = local_link(path)
        if link is None:
            name = PurePath(path.replace("\\", "/")).name
            return "", f"outside the run folder: {name}" if path else "not generated"
        if path in self.embedded:
            return self.embedded[path], ""
        if isfile(self.folder / path):
            return link, ""
        return "", f"no longer there: {path}"


def local_link(path: str) -> str | None:
    """Return a path relative to the page as a URL; None if it leaves the folder."""
    parts = path.replace("\\", "/").split("/")
    if not path or parts[0] == "" or parts[0].endswith(":") or ".." in parts:
        return None
    return quote("/".join(parts).encode("utf-8", "replace"), safe="/")


def link_in(run: Run, path: str) -> str | None:
    """Return the address of a file of the run; None if it is missing or elsewhere."""
    target = run.folder / path
    if not path or not exists(target):
        return None
    return local_link(path_from(run.folder, target))


def sample_rows(run: Run) -> dict[tuple[str, str], dict[float, Record]]:
    """Return the previews by (prompt, seed) and step."""
    rows: dict[tuple[str, str], dict[float, Record]] = {}
    for record in run.of_kind("sample"):
        key = (str(record.get("prompt", "")), value_text(record.get("seed")))
        step = number(record.get("step")) or 0
        rows.setdefault(key, {})[step] = record
    return rows


def step_in(entry: Record) -> int | None:
    """Return the step in the name of an exported file, or None."""
    stem = PurePath(str(entry.get("path", ""))).stem
    match = re.search(r"-step-([0-9]{1,12})(?![0-9])", stem)
    return int(match[1]) if match else None


def existing_exports(run: Run) -> list[tuple[Path, int | None]]:
    """Return the files that a run has exported and that are still there, each with the
    step in its name.
    """
    exports = []
    for entry in run.exports or ():
        path = run.folder / str(entry.get("path"))
        if path.exists():
            exports.append((path, step_in(entry)))
    return exports


def exports_of_step(run: Run, step: int | None) -> list[Path]:
    """Return the exported files of a checkpoint, with those that name no step; all of them
    if ``step`` is None.
    """
    return [
        path
        for path, file_step in existing_exports(run)
        if step is None or file_step in (None, step)
    ]


def exported_steps(run: Run) -> set[float]:
    """Return the steps whose checkpoints were exported."""
    steps = [step_in(entry) for entry in run.exports or ()]
    return {step for step in steps if step is not None}


def picture_of(clip: Record) -> str:
    """Return the path of a clip's picture in the run folder; empty without an id."""
    return f"pictures/{str(clip['id'])[:16]}.jpg" if clip.get("id") else ""


def _side_by_side(folder: Path, paths: Sequence[str]) -> dict[str, Any]:
    """Join videos side by side.

    Returns:
        {"uri", "small", "why"}: the data URI (empty if that fails), whether controls
        would cover much of it, and why it failed.
    """
    failed = {"uri": "", "small": False}
    if any(local_link(path) is None for path in paths):
        return failed | {"why": "a video lies outside the run folder"}

    # PyAV is imported only if there are videos.
    from videotune.data.video_writer import read_video, side_by_side, video_bytes

    try:
        videos = [read_video(folder / path, MAX_WIDTH) for path in paths]
        frames = side_by_side([video_frames for video_frames, _ in videos])
        fps = videos[0][1]
        content = video_bytes(frames, fps, crf=22)
    except (OSError, ValueError) as error:
        # A file is missing, is not a video, or differs in size.
        why = str(error).replace(f"{folder}/", "")[:200]
        return failed | {"why": f"cannot be shown side by side: {why}"}
    return {
        "uri": _data_uri(content, ".mp4"),
        "small": frames[0].shape[0] < MIN_CONTROLS_HEIGHT,
        "why": "",
    }


def _data_uri(content: bytes, suffix: str) -> str:
    mime_type = KINDS[suffix][0]
    return f"data:{mime_type};base64,{base64.b64encode(content).decode()}"


def _paths_by_preference(run: Run) -> Iterator[str]:
    """Yield paths of the run folder, the most important first."""
    yield from map(picture_of, run.clips)
    for key in ("sheet", "video"):
        for entry in run.compared or ():
            yield str(entry.get(key, ""))

    previews = run.of_kind("sample")
    previews.sort(key=lambda record: -(number(record.get("step")) or 0))
    for record in previews:
        yield str(record.get("path") or "")


def _has_signature(file: Path) -> bool:
    """Whether a file exists and begins with the signature of its format."""
    if file.suffix not in KINDS or not isfile(file):
        return False
    _, offset, signature = KINDS[file.suffix]
    with file.open("rb") as stream:
        return stream.read(16)[offset : offset + len(signature)] == signature


def before(run: Run, media: Media) -> dict[str, Any]:
    """Return the chapter with each prompt before and after training, same seed."""
    exported = exported_steps(run)
    for card in media.cards:
        names = []
        for step in card["steps"]:
            is_exported = step > 0 and step in exported
            name = step_name(step, run.start)
            names.append(name + (", exported" if is_exported else ""))
        card["kind"] = _prompt_kind(run, card["prompt"])
        card["names"] = names
        card["videos"] = [media.video(path) for path in card["paths"]]

    absent = ""
    if not media.cards:
        event = "a prompt appears as soon as it is sampled twice"
        absent = reason_without_previews(run) or run.absent(event, "sample_after")
        if run.has_finished and run.of_kind("sample"):
            absent = "No prompt was sampled at two steps with the same seed."
    return {
        "absent": absent,
        "cards": media.cards[:FIRST_CARDS],
        "more_cards": media.cards[FIRST_CARDS:],
        "has_sound": any(any(card["sounds"]) for card in media.cards),
    }


def reason_without_previews(run: Run) -> str:
    """Return why a run makes no previews although ``sample_after`` asks for them; empty if
    it makes some, as far as its files say.
    """
    prompts = run.setting("samples")
    if run.of_kind("sample") or number(run.setting("sample_after")) == 0:
        return ""
    if run.config and prompts in (0, [], ""):
        return f"{SWITCHED_OFF}: samples names no prompt."

    used = [clip for clip in run.clips if clip["used"] and "captions" in clip]
    are_of_captions = number(prompts) is not None
    if used and are_of_captions and not any(_has_caption(clip) for clip in used):
        return (
            "No previews are made: their prompts are captions, and no training clip has one. "
            "Set samples to prompts for the next run."
        )
    return ""


def _has_caption(clip: Fields) -> bool:
    return any(items(clip["captions"]))


def _prompt_kind(run: Run, prompt: str) -> tuple[str, str] | None:
    """Return whether a prompt is a caption of the run, and a colour.

    None if the account of clips has no captions.
    """
    clips = [clip for clip in run.clips if clip.get("used") and "captions" in clip]
    if not clips:
        return None
    kinds = set()
    for clip in clips:
        if prompt in items(clip.get("captions")):
            kinds.add(clip.get("kind"))

    if not kinds:
        return "a new prompt", "good"
    if kinds == {"regularization"}:
        return "caption of regularization clips", "calm"
    # The sample may be a copy.
    return "caption of training clips", "quiet"


def step_name(step: float, start: StartState) -> str:
    """Return what stands beside a picture of a step."""
    return start.label if step == 0 else f"step {plain(step)}"


def _column_name(step: float, start: StartState) -> str:
    name = step_name(step, start)
    return f"{name} (step 0)" if step == 0 else name


def samples(run: Run, media: Media) -> dict[str, Any]:
    """Return the chapter of all previews: a row per prompt, a column per step."""
    all_cells = sample_rows(run)
    shown_above = set()
    for card in media.cards:
        for path in card["paths"]:
            shown_above.add((card["prompt"], card["seed"], path))

    all_steps: set[float] = set()
    previews = set()
    for (prompt, seed), cells in all_cells.items():
        all_steps.update(cells)
        for record in cells.values():
            previews.add((prompt, seed, str(record.get("path"))))

    steps = sorted(all_steps)
    rows = []
    for (prompt, seed), cells in all_cells.items():
        records = [mapping(cells.get(step)) for step in steps]
        videos = []
        for record in records:
            source = media.video(str(record["path"] or ""))
            videos.append((source, describe_faults(record), describe_sound(record)))
        rows.append((prompt, seed, videos))

    absent = ""
    if not rows:
        event = "previews appear as the run samples them"
        absent = reason_without_previews(run) or run.absent(event, "sample_after")
    return {
        "absent": absent,
        "all_above": previews <= shown_above,
        "left_out": media.left_out,
        "budget": f"{BUDGET / 1e6:g} MB",
        "steps": [_column_name(step, run.start) for step in steps],
        "rows": rows,
    }


def compare(run: Run, media: Media) -> dict[str, Any]:
    """Return the chapter of ``compare``: one prompt and seed over all checkpoints."""
    entries = []
    for entry in run.compared or ():
        # The command draws step 0 with the base model alone.
        steps = [number(step) or 0 for step in items(entry.get("steps"))]
        names = [step_name(step, StartState()) for step in steps]
        video = media.video(str(entry.get("video") or ""))
        entries.append((mapping(entry), video, ", ".join(names)))
    return {"entries": entries}
