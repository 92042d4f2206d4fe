"""Accounts: what became of each file of a dataset, and which warnings and notes it has.

A warning asks the user to do something; a note does not.
"""

from pathlib import Path
from typing import Any

from videotune.data.candidates import Candidate
from videotune.data.captions import fill_trigger, lint_caption
from videotune.data.clip_file import Role
from videotune.data.clip_sizes import upscale_factor, visible_share
from videotune.data.content_scan import ContentScan
from videotune.data.frame_counts import sample_fps
from videotune.data.remarks import Remark, codes_of
from videotune.data.sound_notes import sound_fields
from videotune.data.window_placement import WindowPlacement
from videotune.model_spec import VideoRules
from videotune.text import counted_are
from videotune.types import Clip

REPEATED_FRAMES_LIMIT = 0.2
"""Share of repeated frames above which a clip has a warning."""

JITTER_LIMIT = 0.1
"""Share of uneven frame intervals above which a clip counts as one of variable frame
rate.
"""

CROP_LIMIT = 0.5
"""Visible share of the picture below which a clip has a warning."""

CROP_NOTE = 0.65
"""Visible share of the picture below which a clip has a note."""

DISTORTION_LIMIT = 0.9
"""Share that a crop would show, below which stretching instead counts as distortion."""

UPSCALE_LIMIT = 1.25
"""Factor of enlargement above which a clip has a warning."""

CUT_LIMIT = 0.25
"""Share of a clip's time in no window above which it has a warning."""

INTERLACED_LIMIT = 0.05
"""Share of interlaced frames above which a clip has a warning."""

FROZEN_LIMIT = 0.5
"""Share of frozen or black time above which a clip has a warning."""


def account_of(
    candidate: Candidate, clip: Clip | None, rules: VideoRules
) -> dict[str, Any]:
    """Return what became of one file, as ``check --json`` prints it.

    Keys whose names do not say it all:

    - "id": the clip's id (``types.Clip.id``): the hash of the file's bytes, for HDR
      joined with the tone mapping's version. None if it is skipped.
    - "used": for training; "held_out": for validation. If neither, "reason" (a code)
      and "detail" give the cause.
    - "model_frames": the clip's frames at the rate of training, up to ``max_duration``.
    - "windows", "frames": windows of the clip, and the frames of all of them. Each
      window counts once, whatever the repeats are.
    - "shape": shape of the first window. With several frame counts others differ.
    - "frames_cut", "seconds_cut": part of the clip that is in no window, with what is
      beyond ``max_duration``.
    - "spans": start and end of each window in seconds.
    - "repeats_share": share of frames that show the same source frame as the one
      before.
    - "speed": how fast motion plays; 1.0 is as filmed.
    - "serious": the warnings on what the clip shows or how its file is made, such as
      frozen pictures and cuts. Look at the clip. They come first in "warnings".
    - "mask": path of the mask that weighs its loss, its own path if that is its alpha
      channel; None without one, or if masks are not used. "start_image" alike.
    - "sound": facts of its sound track; None without one.
    - "views_a_pass": views per epoch, with repeats. The caller sets "views", since it
      knows the number of steps.

    An image has no rate and no duration.

    Args:
        candidate: the file.
        clip: the clip that it became; None if it is skipped.
        rules: frames and sizes that the model accepts.
    """
    serious: list[str] = []
    warnings: list[str] = []
    notes: list[str] = []
    if clip is not None:
        _add_size_hints(candidate, warnings, notes)
        _add_time_hints(candidate, rules, warnings, notes)
        _add_content_hints(candidate, serious, notes)
        _add_caption_hints(candidate, warnings)
        _add_flip_hint(candidate, notes)
    elif candidate.lacks_only_caption:
        # A picture that is black or frozen is better removed than captioned.
        _add_content_hints(candidate, serious, notes)

    placement = candidate.placement
    if clip is None:
        seconds = candidate.info.seconds if candidate.info else 0.0
        placement = WindowPlacement(seconds_cut=seconds)
    return {
        "path": candidate.path,
        **_clip_fields(clip),
        **_problem_fields(candidate),
        **_media_fields(candidate),
        **_placement_fields(clip, placement),
        "views_a_pass": _views_per_epoch(clip, placement),
        "views": None,
        "captions": list(clip.captions) if clip is not None else [],
        **_companion_fields(candidate),
        "serious": serious,
        "warnings": [*serious, *warnings],
        "warning_codes": codes_of([*serious, *warnings]),
        "notes": notes,
        "note_codes": codes_of(notes),
    }


def _placement_fields(clip: Clip | None, placement: WindowPlacement) -> dict[str, Any]:
    """Return where the windows are, and how much of the clip they show."""
    return {
        "model_frames": placement.frames if clip is not None else None,
        "windows": len(placement.windows),
        "spans": _spans(placement),
        "frames": sum(window.shape.frames for window in placement.windows),
        "shape": str(placement.windows[0].shape) if clip is not None else None,
        "frames_cut": placement.frames_cut,
        "seconds_cut": placement.seconds_cut,
        "repeats_share": placement.repeats_share,
        "speed": placement.speed,
    }


def _spans(placement: WindowPlacement) -> list[list[float]]:
    """Return start and end of each window in seconds."""
    return [
        [window.start, end]
        for window, end in zip(placement.windows, placement.shown_until, strict=True)
    ]


def _companion_fields(candidate: Candidate) -> dict[str, str | None]:
    """Return the paths of the files that belong to a clip."""

    def path_of(role: Role) -> str | None:
        companion = candidate.companions.get(role)
        return None if companion is None else str(companion.path)

    return {
        "mask": path_of("loss_mask"),
        "start_image": path_of("start_image"),
        "reference": path_of("reference"),
        "control": path_of("control"),
    }


def _clip_fields(clip: Clip | None) -> dict[str, Any]:
    return {
        "id": clip.id if clip is not None else None,
        "kind": clip.kind if clip is not None else None,
        "source": clip.source if clip is not None else None,
        "used": clip is not None and not clip.held_out,
        "held_out": clip is not None and clip.held_out,
    }


def _problem_fields(candidate: Candidate) -> dict[str, Any]:
    problem = candidate.problem
    return {
        "reason": problem.reason if problem is not None else None,
        "detail": problem.detail if problem is not None else None,
    }


def _media_fields(candidate: Candidate) -> dict[str, Any]:
    info = candidate.info
    video_info = info if info is not None and not info.still else None
    return {
        "source_fps": video_info.fps if video_info is not None else None,
        "source_frames": len(info.ticks) if info is not None else None,
        "source_seconds": video_info.seconds if video_info is not None else None,
        "width": info.width if info is not None else None,
        "height": info.height if info is not None else None,
        "sound": sound_fields(candidate),
    }


def _views_per_epoch(clip: Clip | None, placement: WindowPlacement) -> int:
    if clip is None or clip.held_out:
        return 0
    return len(placement.windows) * clip.repeats


def _add_size_hints(
    candidate: Candidate, warnings: list[str], notes: list[str]
) -> None:
    """Add hints on frames that are enlarged, cropped, padded or distorted."""
    resize = candidate.placement.windows[0].resize
    source_width = candidate.media.width
    source_height = candidate.media.height
    height, width = candidate.size

    factor = upscale_factor(source_width, source_height, candidate.size, resize)
    if factor > 1.005:
        hints = warnings if factor > UPSCALE_LIMIT else notes
        text = f"upscaled {factor:.2g}x: {source_width}x{source_height} pixels to {width}x{height}"
        hints.append(Remark("upscaled", text))

    share = visible_share(source_width, source_height, candidate.size)
    hints = warnings if share < CROP_LIMIT else notes
    if resize in ("center", "random") and share < CROP_NOTE:
        text = (
            f"the crop keeps {share:.0%} of the picture: {source_width}x{source_height}"
        )
        hints.append(Remark("cropped", f"{text} becomes {width}x{height}"))
    if resize == "pad" and share < CROP_NOTE:
        text = f"black borders fill {1 - share:.0%} of the frame: {source_width}x{source_height}"
        hints.append(Remark("borders", f"{text} in {width}x{height}"))
    if resize == "stretch" and share < DISTORTION_LIMIT:
        text = f"distorted: {source_width}x{source_height} becomes {width}x{height}"
        warnings.append(Remark("distorted", text))


def _add_time_hints(
    candidate: Candidate, rules: VideoRules, warnings: list[str], notes: list[str]
) -> None:
    """Add hints on frames that repeat or are left out, and on motion at another speed."""
    info = candidate.media
    placement = candidate.placement
    fps = sample_fps(candidate.video, rules)
    first_window = placement.windows[0]

    if placement.repeats_share > REPEATED_FRAMES_LIMIT:
        cause = f"{info.fps:.4g} fps is slower than the {fps:.4g} fps of training"
        if first_window.sampling == "hold":
            cause = "the clip is shorter than a window"
        share = f"{placement.repeats_share:.0%}"
        text = f"{share} of the frames repeat the one before: {cause}"
        warnings.append(Remark("repeated_frames", text))

    # In single frames nothing plays too fast.
    if info.fps > 3 * fps and first_window.shape.frames > 1:
        text = f"{info.fps:.4g} fps is far above the {fps:.4g} fps of training"
        warnings.append(Remark("fast_clip", f"{text}: most frames are left out"))
    if abs(placement.speed - 1) > 0.005:
        notes.append(f"stretch: motion plays {placement.speed:.2g}x as fast as filmed")

    max_duration = candidate.video.max_duration
    seconds_beyond = max(0.0, info.seconds - max_duration)
    if seconds_beyond > 0:
        text = f"{seconds_beyond:.2f} of {info.seconds:.2f} s are beyond max_duration"
        notes.append(Remark("beyond_max_duration", f"{text} {max_duration:g}"))

    seconds_cut = placement.seconds_cut - seconds_beyond
    if seconds_cut > CUT_LIMIT * (info.seconds - seconds_beyond):
        text = f"{seconds_cut:.2f} of {info.seconds:.2f} s are in no window"
        remedy = "fewer frames, or video_config.windows=slide, show more"
        warnings.append(Remark("in_no_window", f"{text}; {remedy}"))
    elif seconds_cut * fps > 1 + 1e-6:
        text = f"{seconds_cut:.2f} of {info.seconds:.2f} s are in no window"
        notes.append(Remark("some_in_no_window", text))

    if info.unusable:
        notes.append(
            f"{counted_are(info.unusable, 'frame')} left out: a frame that it refers to is "
            "missing"
        )
    if info.restarts:
        notes.append(
            f"it has {info.restarts + 1} parts joined byte by byte, each with a clock of "
            "its own: they are played one after the other"
        )


def _add_content_hints(
    candidate: Candidate, serious: list[str], notes: list[str]
) -> None:
    """Add hints on transparent, frozen, black, repeated or damaged pictures.

    Args:
        candidate: a usable candidate, or one that lacks only a caption.
        serious: receives its serious warnings (see ``account_of``).
        notes: receives its notes.
    """
    info = candidate.media
    scan = candidate.scan

    _add_stream_hints(candidate, serious, notes)
    if info.transparent and not candidate.alpha_is_mask:
        text = "transparency is ignored: hidden pixels become visible"
        serious.append(Remark("transparency", text))
    if candidate.looks_like is not None:
        text = f"looks nearly the same as {candidate.looks_like}"
        serious.append(Remark("near_duplicate", text))
    if scan is None or info.still:
        return

    if scan.blank > FROZEN_LIMIT:
        text = f"{scan.blank:.0%} of it is black or one flat colour"
        serious.append(Remark("black", text))
    elif scan.frozen > FROZEN_LIMIT:
        text = f"{scan.frozen:.0%} of it is frozen: the picture does not change"
        serious.append(Remark("frozen", text))

    cuts_inside = _cuts_inside_windows(scan, candidate.placement)
    if cuts_inside:
        seconds = ", ".join(f"{cut:.2f}" for cut in cuts_inside[:4])
        if len(cuts_inside) > 4:
            seconds += ", …"
        count = "1 cut" if len(cuts_inside) == 1 else f"{len(cuts_inside)} cuts"
        text = f"{count} inside the windows (at {seconds} s)"
        remedy = "`videotune dataset split` makes a clip of each scene"
        serious.append(Remark("cuts", f"{text}: {remedy}"))

    if scan.jitter > JITTER_LIMIT:
        notes.append(
            f"variable frame rate: {scan.jitter:.0%} of the frame intervals are uneven; "
            "frames are chosen by their timestamps"
        )
    if scan.damaged_at is not None:
        text = f"the frames are damaged from {scan.damaged_at:.2f} s on; no window reaches them"
        serious.append(Remark("damaged", text))


def _add_stream_hints(
    candidate: Candidate, serious: list[str], notes: list[str]
) -> None:
    """Add hints on what the file declares and a player obeys."""
    info = candidate.media
    scan = candidate.scan

    if info.interlaced or (scan is not None and scan.interlaced > INTERLACED_LIMIT):
        text = (
            "interlaced: each frame shows two moments, and moving edges look like combs; "
            "deinterlace it first"
        )
        serious.append(Remark("interlaced", text))
    if info.stereo:
        text = (
            "stereoscopic: each frame has a picture for each eye, and both are trained; "
            "crop it to one first"
        )
        serious.append(Remark("stereoscopic", text))
    if info.spherical:
        text = (
            "spherical (360°): the whole projection is trained, not a view of it; "
            "reproject it first"
        )
        serious.append(Remark("spherical", text))
    if info.unconverted:
        text = (
            f"its colours are declared as {info.unconverted}, which players convert and "
            "videotune does not: convert the clip to BT.709 first"
        )
        serious.append(Remark("unconverted_colours", text))
    if info.unread:
        text = (
            f"{info.unread:.0%} of the file follows the end of its video and is not used: "
            "if files were joined byte by byte, join them with ffmpeg"
        )
        serious.append(Remark("unread", text))
    if info.form_changes_at is not None:
        text = (
            "its pictures have another shape or other colours (HDR) from "
            f"{info.form_changes_at:.2f} s on, where the clip is ended"
        )
        serious.append(Remark("turned", text))

    if info.hdr is not None:
        notes.append(f"high dynamic range ({info.hdr}), tone-mapped to SDR (BT.709)")
    if info.gamut is not None:
        notes.append(f"wide gamut ({info.gamut}), converted to BT.709")
    if any(info.crop):
        left, right, top, bottom = info.crop
        notes.append(
            f"the container hides {left + right} columns and {top + bottom} rows, "
            "which are left out"
        )
    if info.video_streams > 1:
        notes.append(
            f"{info.video_streams} video streams: the one of {info.width}x{info.height} "
            "is used (the default one, else the largest)"
        )
    if scan is not None and scan.sizes > 1:
        notes.append(
            f"its pictures have {scan.sizes} sizes of one shape; each is resized from its own"
        )


def _cuts_inside_windows(scan: ContentScan, placement: WindowPlacement) -> list[float]:
    """Return the seconds of the cuts that at least one window crosses."""
    spans = list(zip(placement.windows, placement.shown_until, strict=True))
    cuts = []
    for cut in scan.cuts:
        if any(window.start < cut < end for window, end in spans):
            cuts.append(cut)
    return cuts


def _add_caption_hints(candidate: Candidate, warnings: list[str]) -> None:
    name = Path(candidate.path).stem
    hints: list[str] = []
    for caption in candidate.captions:
        hints += lint_caption(fill_trigger(caption, candidate.dataset.trigger), name)
    warnings += dict.fromkeys(hints)


def _add_flip_hint(candidate: Candidate, notes: list[str]) -> None:
    if candidate.word_against_flip:
        notes.append(
            f'never mirrored: its caption says "{candidate.word_against_flip}"'
        )
    elif candidate.placement.windows[0].flip:
        notes.append("every second view is mirrored")
