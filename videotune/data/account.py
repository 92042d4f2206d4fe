"""The account of a dataset: what became of every clip, and why; found = used + held out + skipped."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .buckets import Size, upscale_factor
from .captions import lint
from .facts import Facts
from .windows import LaidClip

if TYPE_CHECKING:
    from .library import Library

REPEATS_LIMIT = 0.2
"""Above this share of repeated frames a clip is warned about."""


@dataclass(frozen=True)
class ClipAccount:
    """What becomes of one file.

    ``id`` is the hash of its bytes, None where it is skipped. It is ``used`` for training, or ``held_out`` for validation,
    or neither and then ``reason`` (a code) and ``detail`` say why. ``frames`` pixel frames a pass are shown in ``windows``
    of ``shape``; ``seconds_cut`` no window shows; ``repeats_share`` of the frames repeat the one before; ``speed`` is how
    fast motion plays (1.0: as filmed); ``views`` is filled in by whoever knows the number of steps.
    """

    path: str
    id: str | None = None
    used: bool = False
    held_out: bool = False
    reason: str | None = None
    detail: str | None = None
    source_fps: float | None = None
    source_frames: int | None = None
    width: int | None = None
    height: int | None = None
    windows: int = 0
    frames: int = 0
    shape: str | None = None
    seconds_cut: float = 0.0
    repeats_share: float = 0.0
    speed: float = 1.0
    views: float | None = None
    warnings: tuple[str, ...] = ()


def skipped_account(path: str, reason: str, detail: str, facts: Facts | None) -> ClipAccount:
    """The account of a file that is left out, with what is known of it."""
    if facts is None:
        return ClipAccount(path, reason=reason, detail=detail)
    return ClipAccount(
        path,
        reason=reason,
        detail=detail,
        source_fps=facts.fps,
        source_frames=len(facts.timestamps),
        width=facts.width,
        height=facts.height,
        seconds_cut=facts.seconds,
    )


def clip_account(
    path: str, clip_id: str, held_out: bool, facts: Facts, laid: LaidClip, size: Size, captions: list[str]
) -> ClipAccount:
    """The account of a clip that has windows."""
    return ClipAccount(
        path,
        clip_id,
        used=not held_out,
        held_out=held_out,
        source_fps=facts.fps,
        source_frames=len(facts.timestamps),
        width=facts.width,
        height=facts.height,
        windows=len(laid.windows),
        frames=sum(window.frames for window in laid.windows),
        shape=f"{laid.windows[0].frames}x{size[0]}x{size[1]}",
        seconds_cut=laid.seconds_cut,
        repeats_share=laid.repeats_share,
        warnings=tuple(_warnings(facts, laid, size, captions)),
    )


def _warnings(facts: Facts, laid: LaidClip, size: Size, captions: list[str]) -> list[str]:
    """What would surprise the person about a clip that is used."""
    warnings = []
    factor = upscale_factor(facts.width, facts.height, size)
    if factor > 1.005:
        warnings.append(f"upscaled {factor:.2g}x: {facts.width}x{facts.height} pixels to cover {size[1]}x{size[0]}")
    if laid.repeats_share > REPEATS_LIMIT:
        warnings.append(
            f"{laid.repeats_share:.0%} of its frames repeat the one before: {facts.fps:.4g} fps is slower than "
            f"the {laid.fps:.4g} fps of training"
        )
    if facts.fps > 3 * laid.fps:
        warnings.append(
            f"{facts.fps:.4g} fps is far above the {laid.fps:.4g} fps of training: most frames are left out"
        )
    if laid.seconds_cut * laid.fps > 1 + 1e-6:
        warnings.append(f"{laid.seconds_cut:.2f} of its {facts.seconds:.2f} s are cut")
    if facts.unusable:
        warnings.append(f"{facts.unusable} frames before its first keyframe cannot be decoded and are left out")
    hints = dict.fromkeys(hint for caption in captions for hint in lint(caption))
    return warnings + list(hints)


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
        "clips": [asdict(account) | {"warnings": list(account.warnings)} for account in library.accounts],
        "buckets": [{"shape": shape, "windows": shapes[shape]} for shape in ordered],
        "notes": list(library.notes),
    }
