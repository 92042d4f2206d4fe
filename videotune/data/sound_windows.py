"""Which windows of a clip have its sound."""

from dataclasses import replace

from videotune.config.schema import Config
from videotune.data.file_checks import ClipProblem
from videotune.data.window_placement import WindowPlacement
from videotune.types import Window


def mark_sound(
    placement: WindowPlacement, config: Config, sound_problem: str
) -> WindowPlacement:
    """Mark the windows that have sound. If only sound is learnt, leave out the others.

    A window whose samples do not run as filmed has none: its sound would be that of
    other moments.

    Args:
        placement: the windows of a clip.
        config: the config of a run that reads sound.
        sound_problem: why the clip has no sound; "" if it has.

    Raises:
        ClipProblem: "sound_speed" if the config refuses windows that do not run as
            filmed; "no_sound" if only sound is learnt and no window has any.
    """
    changed = [window for window in placement.windows if not window.keeps_time]
    if changed and not sound_problem and config.sound.changed_speed == "refuse":
        raise ClipProblem(
            "sound_speed",
            f"{_cause(changed[0])}, so its sound does not belong to its frames "
            "(sound.changed_speed drop trains it without sound)",
        )

    window_ends = []
    for window, end in zip(placement.windows, placement.shown_until, strict=True):
        has_sound = not sound_problem and window.keeps_time
        shape = replace(window.shape, sound=has_sound)
        if has_sound or config.learns_video:
            window_ends.append((replace(window, shape=shape), end))
    if not window_ends:
        reason = sound_problem or f"{_cause(changed[0])}, so it has no sound"
        raise ClipProblem("no_sound", f"the run learns only sound, and {reason}")

    return replace(
        placement,
        windows=tuple(window for window, _ in window_ends),
        shown_until=tuple(end for _, end in window_ends),
    )


def _cause(window: Window) -> str:
    """Return why the samples of a window do not run as filmed."""
    if window.swaps:
        return "temporal_augmentation swaps its frames"
    return "stretch changes its speed"
