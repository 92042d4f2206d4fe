"""What the page Data says about clips: the name of each state, and the remedy of each
warning.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from videotune.studio.clips import ClipRow, state_of


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
        "for validation",
        "for validation",
        "calm",
        "It is never trained on. The validation loss is measured with it, which shows "
        "whether the model learns or copies.",
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

    pattern: re.Pattern[str]

    action: Action
    """The button that does it."""

    advice: str
    """What to do, and whether it is needed, where a warning concerns the whole set."""

    setting: str = ""
    """The setting of the page Setup that changes it."""


def _remedy(pattern: str, action: Action, advice: str, setting: str = "") -> Remedy:
    return Remedy(re.compile(pattern), action, advice, setting)


REMEDIES = (
    _remedy(
        r"^no clip is held out",
        "validation",
        "It trains without, too. “Use for validation” is in the menu of each clip.",
    ),
    _remedy(
        r"cuts? inside the windows",
        "cut",
        "Cut these clips into scenes, so that no trained part jumps.",
    ),
    _remedy(
        r"of it is (black|frozen)",
        "bin",
        "Remove them, unless the model is to learn just that.",
    ),
    _remedy(r"looks nearly the same as", "bin", "Keep one of them, remove the others."),
    _remedy(
        r"clips have (an empty|the same) caption",
        "captions",
        "Say in each caption what is special about its clip.",
    ),
    _remedy(
        r"captions? ha(s|ve) several lines",
        "captions",
        "Leave it, if the lines are other words for the same clip. If they are one "
        "text, join them in one line.",
    ),
    _remedy(
        r"interlaced|stereoscopic|spherical",
        "bin",
        "Convert the files in a video editor and add them again, or remove them.",
    ),
    _remedy(
        r"of the file follows|damaged|another shape from",
        "bin",
        "Export the files again, or remove them. What is whole is trained.",
    ),
    _remedy(
        r"^distorted|^black borders|crop keeps|upscaled",
        "setting",
        "Choose whether clips of another shape are cropped, padded or stretched.",
        "resize",
    ),
    _remedy(
        r"frame rates are mixed",
        "setting",
        "You need not do anything: motion keeps its speed. The rate itself can be set.",
        "video_config.target_fps",
    ),
    _remedy(
        r"frames repeat|slower than|far above",
        "setting",
        "Add clips with more frames a second, or train at the rate of these clips.",
        "video_config.target_fps",
    ),
    _remedy(
        r"in no window|frames becomes|^frames \d|no clip is long enough|no window has",
        "setting",
        "Add longer clips, or train fewer frames at a time.",
        "video_config.frames",
    ),
    _remedy(
        r"beyond max_duration",
        "setting",
        "Cut the clips, or use more seconds of each.",
        "video_config.max_duration",
    ),
    _remedy(
        r"windows of videos are single frames",
        "setting",
        "Take one frame of each clip, or train videos only.",
        "video_config.windows",
    ),
    _remedy(
        r"transparency is ignored",
        "bin",
        "Save the pictures on a plain ground and add them again, or remove them.",
    ),
    _remedy(
        r"numbered without a gap",
        "bin",
        "If they are one video, make a video file of them and remove the pictures.",
    ),
    _remedy(r"the caption|placeholder|caption ", "write", "Change these captions."),
)
"""What to do about each warning; the first pattern that a warning has counts."""

NO_REMEDY = "You need not do anything."
"""Said of a note that only tells what is done with the clips."""


def remedy_of(line: str) -> Remedy | None:
    """Return what a user can do about a warning or note; None if nothing is needed."""
    for remedy in REMEDIES:
        if remedy.pattern.search(line):
            return remedy
    return None


def clip_actions(row: ClipRow) -> list[str]:
    """Return the actions that would mend what a clip is warned of, each once."""
    actions = []
    for line in (*row["warned"], *row["hints"]):
        remedy = remedy_of(line)
        if remedy is not None and remedy.action != "setting":
            actions.append("write" if remedy.action == "captions" else remedy.action)
    if row["long"]:
        actions.append("cut")
    if row["reason"] == "undecodable_caption":
        actions.append("write")
    elif state_of(row) == "unusable":
        actions.append("bin")
    return list(dict.fromkeys(actions))


def clip_settings(row: ClipRow) -> list[str]:
    """Return the settings that would mend what a clip is warned of, each once."""
    remedies = [remedy_of(line) for line in row["warned"]]
    settings = [remedy.setting for remedy in remedies if remedy and remedy.setting]
    return list(dict.fromkeys(settings))


def state_words(row: ClipRow) -> StateWords:
    """Return how the state of a clip is named."""
    return STATES[state_of(row)]


def count_states(rows: Iterable[ClipRow]) -> dict[str, int]:
    """Return how many clips are in each state, in the order of the filter."""
    states = [state_of(row) for row in rows]
    return {name: states.count(name) for name in STATES if name in states}
