"""What the page Data says about clips: the name of each state, and the remedy of each
warning.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from videotune.data.remarks import RemarkCode, code_of
from videotune.data.source_videos import (
    HELD_OUT_DEPENDABLE,
    HELD_OUT_NEEDED,
    LEAST_HELD_OUT,
)
from videotune.studio.clip_row import ClipRow, state_of


@dataclass(frozen=True)
class StateWords:
    """A state of clips as the filter, the cards, the player and the counts name it."""

    label: str
    """Of one clip: "needs a caption"."""

    plural: str
    """Of several: "3 need a caption"."""

    colour: str
    """The colour of its badge."""

    meaning: str


STATES: Mapping[str, StateWords] = {
    "used": StateWords("used", "used", "good", "It is trained on."),
    "held out": StateWords(
        "kept aside",
        "kept aside",
        "calm",
        "It is kept aside for checking and never trained on. What the model makes of it "
        "shows whether the model learns or copies (the validation loss).",
    ),
    "without": StateWords(
        "needs a caption",
        "need a caption",
        "care",
        "Write what it shows, then it is used.",
    ),
    "unusable": StateWords(
        "cannot be used",
        "cannot be used",
        "bad",
        "The card of the clip says why, and what you can do.",
    ),
    "new": StateWords("new", "new", "quiet", "It is not checked yet."),
}
"""The states by their names in the filter."""

Action = Literal["cut", "write", "bin", "captions", "setting", "validation"]


@dataclass(frozen=True)
class Remedy:
    """What a user can do about a warning."""

    codes: tuple[RemarkCode, ...]
    """What the warnings are about."""

    action: Action
    """The button that does it."""

    advice: str
    """What to do, and whether it is needed, where a warning concerns the whole set."""

    setting: str = ""
    """The setting of the page Setup that changes it."""


REMEDIES = (
    Remedy(
        ("none_held_out",),
        "validation",
        "It trains without, too. Keep all cuts of a video aside, or none of them.",
    ),
    Remedy(
        ("shared_sources",),
        "validation",
        "Put clips of one video, and clips that look alike, on one side.",
    ),
    Remedy(
        ("few_held_out",),
        "validation",
        "It trains without a verdict, too.",
    ),
    Remedy(
        ("few_dependable",),
        "validation",
        "It trains and is checked so, too.",
    ),
    Remedy(
        ("cuts",),
        "cut",
        "Cut these clips into scenes, so that no trained part jumps.",
    ),
    Remedy(
        (
            "black",
            "frozen",
        ),
        "bin",
        "Remove them, unless the model is to learn just that.",
    ),
    Remedy(("near_duplicate",), "bin", "Keep one of them, remove the others."),
    Remedy(
        ("captions_alike",),
        "captions",
        "Say in each caption what is special about its clip.",
    ),
    Remedy(
        ("caption_lines",),
        "captions",
        "Leave it, if the lines are other words for the same clip. If they are one "
        "text, join them in one line.",
    ),
    Remedy(
        (
            "interlaced",
            "stereoscopic",
            "spherical",
            "unconverted_colours",
        ),
        "bin",
        "Convert the files in a video editor and add them again, or remove them.",
    ),
    Remedy(
        (
            "damaged",
            "turned",
            "unread",
        ),
        "bin",
        "Export the files again, or remove them. What is whole is trained.",
    ),
    Remedy(
        (
            "borders",
            "cropped",
            "distorted",
        ),
        "setting",
        "Choose whether clips of another shape are cropped, padded or stretched.",
        "resize",
    ),
    Remedy(
        ("upscaled",),
        "bin",
        "Remove them, or add larger files of the same. Else they are trained as they are.",
    ),
    Remedy(
        ("mixed_rates",),
        "setting",
        "You need not do anything: motion keeps its speed. The rate itself can be set.",
        "video_config.target_fps",
    ),
    Remedy(
        (
            "fast_clip",
            "repeated_frames",
        ),
        "setting",
        "You need not do anything: motion keeps its speed and is a little less smooth. A lower rate of "
        "training shows each frame once, and the model then plays motion faster than filmed.",
        "video_config.target_fps",
    ),
    Remedy(
        ("slow_clips",),
        "setting",
        "You need not do anything.",
        "video_config.target_fps",
    ),
    Remedy(
        ("frame_count",),
        "setting",
        "You need not do anything. Type the second number, and this note goes.",
        "video_config.frames",
    ),
    Remedy(
        (
            "in_no_window",
            "some_in_no_window",
            "unfilled_count",
        ),
        "setting",
        "Add longer clips, or train fewer frames at a time.",
        "video_config.frames",
    ),
    Remedy(
        ("beyond_max_duration", "long_clips"),
        "setting",
        "Cut the clips, or use more seconds of each.",
        "video_config.max_duration",
    ),
    Remedy(
        ("single_frames",),
        "setting",
        "Take one frame of each clip, or train videos only.",
        "video_config.windows",
    ),
    Remedy(
        ("far_rate",),
        "setting",
        "Set the usual rate, unless you mean this one.",
        "learning_rate",
    ),
    Remedy(
        ("transparency",),
        "bin",
        "Save the pictures on a plain ground and add them again, or remove them.",
    ),
    Remedy(
        ("numbered_stills",),
        "bin",
        "If they are one video, make a video file of them and remove the pictures.",
    ),
    Remedy(
        ("caption_reading",),
        "setting",
        "For ComfyUI choose “authors”; for diffusers leave it.",
        "text_encoder.convention",
    ),
    Remedy(
        ("few_validations",),
        "setting",
        "It trains without a verdict, too. For one, train more steps, or validate more "
        "often.",
        "validate_every",
    ),
    Remedy(
        ("unused_masks",),
        "setting",
        "To train only what the masks show in white, set “Outside” of “Masks of the loss” "
        "to 0. To train the whole pictures, leave it empty.",
        "loss_mask.outside",
    ),
    Remedy(
        ("unused_references",),
        "setting",
        "To train on them, add reference or control to “Conditions”.",
        "conditions",
    ),
    Remedy(
        ("no_sound", "silent_sound"),
        "bin",
        "They are trained without sound. Add the files again with their sound, or remove "
        "them.",
    ),
    Remedy(
        ("clipped_sound", "short_sound"),
        "bin",
        "Listen to them: what is overdriven or missing is learnt, too.",
    ),
    Remedy(
        ("sound_dropped",),
        "setting",
        "Turn off “Stretch” to train these clips with their sound.",
        "video_config.stretch",
    ),
    Remedy(
        ("unused_sound",),
        "setting",
        "To train on it, choose video and sound.",
        "generate",
    ),
    Remedy(("caption",), "write", "Change these captions."),
    Remedy(
        ("captions_elsewhere",),
        "captions",
        "Rename or move the files in the project's folder, or write the captions here.",
    ),
    Remedy(
        ("unread_media",),
        "bin",
        "They are not trained. Save them in a format that is read and add them again.",
    ),
    Remedy(
        ("captions_without_clip",),
        "bin",
        "It is not trained. Add its clip, or remove it.",
    ),
)
"""What to do about each kind of warning."""

REMEDY_BY_CODE: dict[str, Remedy] = {}
for _remedy in REMEDIES:
    REMEDY_BY_CODE.update(dict.fromkeys(_remedy.codes, _remedy))


@dataclass(frozen=True)
class ReasonRemedy:
    """What a user can do about a clip that is skipped, beside removing it."""

    advice: str

    setting: str = ""
    """The setting of the page Setup that lets it be used."""


REMEDY_BY_REASON: Mapping[str, ReasonRemedy] = {
    "too_short": ReasonRemedy(
        "Add a longer clip in its place, or let short clips hold their last frame "
        "(“freeze”).",
        "video_config.pad_short",
    ),
    "one_frame": ReasonRemedy("Add it as a picture, or remove it."),
    "duplicate": ReasonRemedy("Remove it: the other one is used."),
}
"""By the code of the reason."""

WARNINGS_OF_NOTES: Mapping[str, tuple[str, ...]] = {"slow_clips": ("repeated_frames",)}
"""By the code of a note on the whole set, the warnings of its clips that say the same."""

NO_REMEDY = "You need not do anything."
"""Said of a note that only tells what is done with the clips."""


def remedy_of(line: str) -> Remedy | None:
    """Return what a user can do about a warning or note; None if nothing is needed."""
    return REMEDY_BY_CODE.get(code_of(line))


def without_repeats(notes: Iterable[str], warnings: Iterable[str]) -> list[str]:
    """Return the notes on the whole set that no warning above them has said already."""
    warned = {code_of(warning) for warning in warnings}
    return [
        note
        for note in notes
        if warned.isdisjoint(WARNINGS_OF_NOTES.get(code_of(note), ()))
    ]


def clip_actions(row: ClipRow) -> list[str]:
    """Return the actions that would mend what a clip is warned of, each once.

    Of a file that cannot be used nothing but its reason counts: its caption changes
    nothing.
    """
    if state_of(row) == "unusable" and row["reason"] != "undecodable_caption":
        return ["cut", "bin"] if row["long"] else ["bin"]

    actions = []
    for line in (*row["warned"], *row["hints"]):
        remedy = remedy_of(line)
        if remedy is not None and remedy.action != "setting":
            actions.append("write" if remedy.action == "captions" else remedy.action)
    if row["long"]:
        actions.append("cut")
    if row["reason"] == "undecodable_caption":
        actions.append("write")
    return list(dict.fromkeys(actions))


def reason_advice(row: ClipRow) -> str:
    """Return what to do about a clip that is skipped; empty if nothing but removing it."""
    remedy = REMEDY_BY_REASON.get(row["reason"] or "")
    return remedy.advice if remedy and state_of(row) == "unusable" else ""


def clip_settings(row: ClipRow) -> list[str]:
    """Return the settings that would mend what a clip is warned of or skipped for, each
    once.
    """
    if state_of(row) == "unusable":
        remedy = REMEDY_BY_REASON.get(row["reason"] or "")
        return [remedy.setting] if remedy and remedy.setting else []
    remedies = [remedy_of(line) for line in row["warned"]]
    settings = [remedy.setting for remedy in remedies if remedy and remedy.setting]
    return list(dict.fromkeys(settings))


def state_words(row: ClipRow) -> StateWords:
    """Return how the state of a clip is named."""
    return STATES[state_of(row)]


@dataclass(frozen=True)
class AsideHint:
    """What a user who chooses clips to keep aside still has to do."""

    text: str

    is_enough: bool
    """Whether enough clips are kept aside to check a training."""


def aside_hint(
    rows: Collection[ClipRow], shown_rows: Collection[ClipRow]
) -> AsideHint | None:
    """Return what to do to keep clips aside; None if no clip that is shown can be, nor
    one that the check has not seen yet.

    Args:
        rows: all clips.
        shown_rows: those that the filter shows.
    """
    kept_aside = count_states(rows).get("held out", 0)
    if kept_aside >= HELD_OUT_NEEDED:
        degree = "enough to check the training"
        if kept_aside < HELD_OUT_DEPENDABLE:
            degree = f"enough for a first check ({LEAST_HELD_OUT})"
        text = (
            f"{kept_aside} clips are kept aside: {degree}. Keep all "
            "clips aside that are cut out of the same video as one of them."
        )
        return AsideHint(text, is_enough=True)

    unchecked_rows = [row for row in rows if state_of(row) == "new"]
    if not any(can_be_kept_aside(row) for row in (*shown_rows, *unchecked_rows)):
        return None
    if kept_aside:
        text = "1 clip is kept aside. Press “Keep aside” below one more, at least"
    else:
        text = (
            "Press “Keep aside” below each clip that checks the training: "
            f"{HELD_OUT_NEEDED} or more ({LEAST_HELD_OUT})"
        )
    text += (
        ", and all clips that are cut out of the same video. They are never trained on."
    )
    return AsideHint(text, is_enough=False)


def can_be_kept_aside(row: ClipRow) -> bool:
    """Return whether the card of a clip has the button that keeps it aside."""
    is_movable = bool(row["part"]) and not row["fixed"]
    return is_movable and state_of(row) not in ("held out", "unusable")


def count_states(rows: Iterable[ClipRow]) -> dict[str, int]:
    """Return how many clips are in each state, in the order of the filter."""
    states = [state_of(row) for row in rows]
    return {name: states.count(name) for name in STATES if name in states}
