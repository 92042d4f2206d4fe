"""The account of a dataset: what became of every clip, and why; found = used + held out + skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from videotune.types import Clip, VideoRules, Window

from .buckets import kept_share, suits, upscale_factor
from .captions import lint, lint_all
from .facts import Facts
from .look import Look
from .windows import WindowSettings, planned_frames

if TYPE_CHECKING:
    from .drafts import Draft
    from .library import Library

REPEATS_LIMIT = 0.2
"""Above this share of repeated frames a clip is warned about."""

JITTER_LIMIT = 0.1
"""Above this share of uneven frames a clip is said to have a variable rate."""

CROP_LIMIT, CROP_NOTE = 0.5, 0.65
"""Below this share of the picture that a crop keeps, a clip is warned about, and it is noted."""

UPSCALE_LIMIT = 1.25
"""Above this a clip that is enlarged is warned about."""

CUT_LIMIT = 0.25
"""Above this share of its time that no window shows, a clip is warned about."""

STILL_LIMIT = 0.5
"""Above this share of frozen or black frames a clip is warned about."""


@dataclass(frozen=True)
class ClipAccount:
    """What becomes of one file.

    ``id`` is the hash of its bytes, None where it is skipped. It is ``used`` for training, or ``held_out`` for validation,
    or neither and then ``reason`` (a code) and ``detail`` say why. ``model_frames`` are its frames at the rate of training
    (within max_duration); ``frames`` pixel frames a pass are shown in ``windows`` of ``shape``, ``frames_cut`` and
    ``seconds_cut`` of the clip no window shows; ``warnings`` ask for something to be done, ``notes`` do not;
    ``repeats_share`` of the frames repeat the one before; ``speed`` is how fast motion plays (1.0: as filmed);
    ``views_a_pass`` counts repeats; ``views`` is filled in by whoever knows the number of steps.
    """

    path: str
    id: str | None = None
    kind: str | None = None
    source: str | None = None
    used: bool = False
    held_out: bool = False
    reason: str | None = None
    detail: str | None = None
    source_fps: float | None = None
    source_frames: int | None = None
    source_seconds: float | None = None
    width: int | None = None
    height: int | None = None
    model_frames: int | None = None
    windows: int = 0
    frames: int = 0
    shape: str | None = None
    frames_cut: int = 0
    seconds_cut: float = 0.0
    repeats_share: float = 0.0
    speed: float = 1.0
    views_a_pass: int = 0
    views: float | None = None
    captions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _source_facts(facts: Facts) -> dict[str, Any]:
    """What the file is, for the account; an image has no rate and no length."""
    return {
        "source_fps": None if facts.still else facts.fps,
        "source_frames": len(facts.timestamps),
        "source_seconds": None if facts.still else facts.seconds,
        "width": facts.width,
        "height": facts.height,
    }


def skipped_account(path: str, reason: str, detail: str, facts: Facts | None) -> ClipAccount:
    """The account of a file that is left out, with what is known of it."""
    if facts is None:
        return ClipAccount(path, reason=reason, detail=detail)
    return ClipAccount(path, reason=reason, detail=detail, seconds_cut=facts.seconds, **_source_facts(facts))


def clip_account(draft: Draft, clip: Clip, windows: Sequence[Window], resize: str, twin: str | None) -> ClipAccount:
    """The account of a clip that has windows; ``twin`` is the path of another that shows nearly the same."""
    facts, laid = draft.facts, draft.plainly if clip.held_out else draft.laid
    high, wide = draft.size
    notes: list[str] = []
    warnings = [
        *_size_warnings(draft, resize, notes),
        *_time_warnings(draft, notes),
        *_picture_warnings(draft, twin, notes),
        *_hints(draft),
    ]
    return ClipAccount(
        clip.path,
        clip.id,
        kind=clip.kind,
        source=clip.source,
        used=not clip.held_out,
        held_out=clip.held_out,
        model_frames=laid.there,
        windows=len(windows),
        frames=sum(window.shape.frames for window in windows),
        shape=f"{windows[0].shape.frames}x{high}x{wide}",
        frames_cut=laid.frames_cut,
        seconds_cut=laid.seconds_cut,
        repeats_share=laid.repeats_share,
        speed=laid.speed,
        views_a_pass=0 if clip.held_out else len(windows) * clip.repeats,
        captions=clip.captions,
        warnings=tuple(warnings),
        notes=tuple(notes),
        **_source_facts(facts),
    )


def _size_warnings(draft: Draft, resize: str, notes: list[str]) -> list[str]:
    """Pictures that are enlarged, cropped away or distorted; a little of it goes to ``notes``."""
    facts, (high, wide) = draft.facts, draft.size
    factor = upscale_factor(facts.width, facts.height, draft.size, resize)
    warnings: list[str] = []
    if factor > 1.005:
        (warnings if factor > UPSCALE_LIMIT else notes).append(
            f"upscaled {factor:.2g}x: {facts.width}x{facts.height} pixels to {wide}x{high}"
        )
    kept = kept_share(facts.width, facts.height, draft.size)
    lost = warnings if kept < CROP_LIMIT else notes
    if resize in ("center", "random") and kept < CROP_NOTE:
        lost.append(f"the crop keeps {kept:.0%} of the picture: {facts.width}x{facts.height} becomes {wide}x{high}")
    if resize == "pad" and kept < CROP_NOTE:
        lost.append(f"black borders fill {1 - kept:.0%} of the frame: {facts.width}x{facts.height} in {wide}x{high}")
    if resize == "stretch" and kept < 0.9:
        warnings.append(f"distorted: {facts.width}x{facts.height} becomes {wide}x{high}")
    return warnings


def _time_warnings(draft: Draft, notes: list[str]) -> list[str]:
    """Frames that repeat, are left out, or are cut; motion that plays at another speed; to ``notes`` what is as asked."""
    facts, laid = draft.facts, draft.laid
    warnings = []
    if laid.repeats_share > REPEATS_LIMIT:
        slow = f"{facts.fps:.4g} fps is slower than the {laid.fps:.4g} fps of training"
        why = "the clip is shorter than a window" if laid.windows[0].sampling == "hold" else slow
        warnings.append(f"{laid.repeats_share:.0%} of the frames repeat the one before: {why}")
    if facts.fps > 3 * laid.fps and laid.windows[0].frames > 1:  # of pictures nothing plays too fast
        warnings.append(
            f"{facts.fps:.4g} fps is far above the {laid.fps:.4g} fps of training: most frames are left out"
        )
    if abs(laid.speed - 1) > 0.005:
        notes.append(f"stretch: motion plays {laid.speed:.2g}x as fast as filmed")
    most = draft.found.dataset.windows.max_duration
    beyond = max(0.0, facts.seconds - most)
    if beyond > 0:
        notes.append(f"{beyond:.2f} of {facts.seconds:.2f} s lie beyond max_duration {most:g}")
    cut = laid.seconds_cut - beyond
    if cut > CUT_LIMIT * (facts.seconds - beyond):
        warnings.append(
            f"{cut:.2f} of {facts.seconds:.2f} s are in no window; fewer video_config.frames or "
            "video_config.windows=slide show more of it"
        )
    elif cut * laid.fps > 1 + 1e-6:
        notes.append(f"{cut:.2f} of {facts.seconds:.2f} s are in no window")
    if facts.unusable:
        notes.append(f"{facts.unusable} frames before the first keyframe cannot be decoded and are left out")
    return warnings


def _picture_warnings(draft: Draft, twin: str | None, notes: list[str]) -> list[str]:
    """What a look at the pictures shows: nothing moves, nothing is seen, several scenes, the same as another clip."""
    look, warnings = draft.found.look, []
    if draft.facts.interlaced:
        warnings.append("interlaced: each frame holds two moments, seen as combs on what moves; deinterlace it first")
    if draft.facts.hdr is not None:
        notes.append(f"high dynamic range ({draft.facts.hdr}), tone-mapped to SDR (BT.709)")
    if draft.facts.transparent:
        warnings.append("the transparency is left out: what is hidden there will be seen")
    if twin is not None:
        warnings.append(f"shows nearly the same as {twin}")
    if not isinstance(look, Look) or draft.facts.still:
        return warnings
    if look.black > STILL_LIMIT:
        warnings.append(f"{look.black:.0%} of it is black or one flat colour")
    elif look.frozen > STILL_LIMIT:
        warnings.append(f"{look.frozen:.0%} of it is frozen: the picture does not change")
    inside = [cut for cut in look.cuts if any(w.start < cut < w.until for w in draft.laid.windows)]
    if inside:
        at = ", ".join(f"{cut:.2f}" for cut in inside[:4]) + (", …" if len(inside) > 4 else "")
        cuts = "1 cut" if len(inside) == 1 else f"{len(inside)} cuts"
        warnings.append(f"{cuts} inside the windows (at {at} s): `videotune dataset split` makes a clip of each scene")
    if look.jitter > JITTER_LIMIT:
        notes.append(
            f"variable frame rate: {look.jitter:.0%} of the frames stay longer or shorter; shown by their times"
        )
    if look.damaged_at is not None:
        warnings.append(f"the pictures are damaged from {look.damaged_at:.2f} s on; no window reaches there")
    return warnings


def _hints(draft: Draft) -> list[str]:
    name = Path(draft.path).stem
    return list(dict.fromkeys(hint for caption in draft.written for hint in lint(caption, name)))


def dataset_notes(drafts: Sequence[Draft], settings: WindowSettings, rules: VideoRules) -> list[str]:
    """What is to be said of the clips as a whole: repeats by folders' names, a number of frames that is not the one that was
    asked for, windows that none fills, frame rates, captions that do not differ."""
    folders = dict(sorted({draft.repeats for draft in drafts if draft.repeats[0]}))
    shown = ", ".join(f"{name} {count}" for name, count in list(folders.items())[:5]) + (
        ", …" if len(folders) > 5 else ""
    )
    notes = [f"repeats, as the names of folders say: {shown}; rename a folder to switch that off"] if folders else []
    planned, changed = planned_frames(settings, rules)
    asked = settings.frames is not None or settings.max_frames != WindowSettings.max_frames or settings.keep_every > 1
    if changed and asked and not all(draft.facts.still for draft in drafts):
        notes.append(changed)
    moving = [draft for draft in drafts if not draft.facts.still]
    longest = max((window.frames for draft in moving for window in draft.laid.windows), default=planned)
    if longest < planned:
        notes.append(
            f"no clip is long enough for {planned} frames: the longest window has {longest} "
            "(video_config.pad_short freeze holds the last frame instead)"
        )
    rates = Counter(round(draft.facts.fps, 2) for draft in moving)
    if len(rates) > 1:
        shown = ", ".join(f"{rate:g} fps ({count})" for rate, count in rates.most_common(5))
        more = f" and {len(rates) - 5} more" if len(rates) > 5 else ""
        shown += f"{more}; all are shown at {moving[0].laid.fps:g} fps, at their true speed"
        notes.append(f"{len(rates)} frame rates are mixed: {shown}")
    if rates and median(draft.facts.fps for draft in moving) < 0.8 * moving[0].laid.fps:
        notes.append(f"most clips are slower than the {moving[0].laid.fps:g} fps of training: frames are repeated")
    return notes + lint_all({draft.path: draft.written for draft in drafts})


def crops_too_much(library: Library, rules: VideoRules, asked: object) -> str | None:
    """A sentence where the crop takes more than half of every clip: mostly height and width were exchanged."""
    sizes = {window.clip_id: window for window in (*library.windows, *library.held_out_windows)}
    rows = [
        (library.facts[name].width, library.facts[name].height, (window.shape.height, window.shape.width))
        for name, window in sizes.items()
        if window.resize in ("center", "random")
    ]
    kept = max((kept_share(*row) for row in rows), default=1.0)
    if len(rows) < len(sizes) or kept >= 0.5:
        return None
    high, wide = rows[0][2]
    turned = min(kept_share(width, height, size[::-1]) for width, height, size in rows) > kept
    better = (
        f'width={high} and height={wide} (resolution "{wide}x{high}") keep more of them'
        if turned and suits((wide, high), rules)
        else 'resize="pad" keeps all of them'
    )
    return (
        f"resolution: {asked} makes frames {wide} wide and {high} high, and crops away {1 - kept:.0%} or more of every "
        f"clip; {better}. Set that, or allow_crop=true if it is meant."
    )


def totals(library: Library) -> dict[str, int]:
    """How many files were found, used, held out and skipped; the first is the sum of the others."""
    accounts = library.accounts
    counts = {
        "found": len(accounts),
        "used": sum(account.used for account in accounts),
        "held_out": sum(account.held_out for account in accounts),
        "skipped": sum(account.reason is not None for account in accounts),
    }
    assert counts["found"] == counts["used"] + counts["held_out"] + counts["skipped"], counts
    assert counts["skipped"] == len(library.skipped), counts
    assert counts["found"] == len(library.clips) + len(library.skipped), counts
    return counts


def to_json(library: Library) -> dict[str, Any]:
    """The account as ``check --json`` gives it: the totals, every clip, the buckets of training windows, and notes."""
    shapes = Counter(str(window.shape) for window in library.windows)
    areas = {
        str(window.shape): window.shape.frames * window.shape.height * window.shape.width for window in library.windows
    }
    ordered = sorted(shapes, key=lambda shape: (-areas[shape], shape))
    return {
        **totals(library),
        "clips": [
            asdict(account) | {name: list(getattr(account, name)) for name in ("captions", "warnings", "notes")}
            for account in library.accounts
        ],
        "buckets": [{"shape": shape, "windows": shapes[shape]} for shape in ordered],
        "notes": list(library.notes),
    }
