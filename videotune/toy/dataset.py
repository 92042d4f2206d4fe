"""Writes the toy's data set as a person's would lie on a disk: encoded clips with a caption file each."""

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from videotune.data.video_writer import write_video
from videotune.errors import VideotuneError
from videotune.files import write_text
from videotune.rng import generator_for
from videotune.toy.shapes import DIRECTIONS, FPS, KNOWN, draw_clip, phrase

CONCEPT = ("orange", "diamond")
"""What the trigger word stands for: a colour and a shape that the base model was never shown."""


def write_dataset(
    folder: Path,
    *,
    concept_clips: int = 24,
    reminder_clips: int = 24,
    trigger: str = "zorble",
    seed: int = 0,
) -> list[Path]:
    """Fill ``folder/videos`` and ``folder/captions`` (same stems) and return the videos' paths.

    Concept clips show an orange diamond that moves in the four directions in turn, captioned by the trigger word;
    reminders show what the base model knows, in its own captions, balanced over colours, shapes and directions: they
    keep it from forgetting. Half of the files are mp4, half webm; most hold 17 frames at 16 fps, one in six shows the
    same second at 32 fps, and some run three frames longer. The frames depend on the arguments alone, and with
    the same encoders so do the files.
    Raises VideotuneError for counts or a trigger that make no dataset, and where the folder holds other files.
    """
    if min(concept_clips, reminder_clips) < 0 or concept_clips + reminder_clips == 0:
        raise VideotuneError(
            f"{concept_clips} concept and {reminder_clips} reminder clips make no dataset"
        )
    if len(trigger.split()) != 1:
        raise VideotuneError(f"the trigger {trigger!r} must be one word")
    parts = {
        "concept": [(*CONCEPT, list(DIRECTIONS)[index % 4]) for index in range(concept_clips)],
        # strides of 7 keep any beginning of the list mixed
        "reminder": [
            KNOWN[24 * (index // 24 % 2) + index * 7 % 24] for index in range(reminder_clips)
        ],
    }
    items = [
        (part, index, look) for part, looks in parts.items() for index, look in enumerate(looks)
    ]
    names = [
        f"{part}-{i:03d}-{look[2] if part == 'concept' else '-'.join(look)}"
        for part, i, look in items
    ]
    # rates, lengths and file types vary so that no direction has its own
    suffixes = [".mp4" if (i + i // 4) % 2 == 0 else ".webm" for _, i, _ in items]
    videos = [
        folder / "videos" / f"{name}{suffix}"
        for name, suffix in zip(names, suffixes, strict=True)
    ]
    captions = [folder / "captions" / f"{name}.txt" for name in names]
    _refuse_others(folder, {*videos, *captions})
    for (part, i, look), name, video, caption in zip(
        items, names, videos, captions, strict=True
    ):
        frames, fps = (34, 2 * FPS) if i % 6 == 5 else (20, FPS) if i % 7 == 3 else (17, FPS)
        thing = trigger if part == "concept" else f"{look[0]} {look[1]}"
        encode_clip(
            video,
            draw_clip(generator_for(seed, "toy", name), *look, frames=frames, fps=fps),
            fps,
        )
        write_text(caption, phrase(thing, look[2]) + "\n", durable=False)
    return videos


def _refuse_others(folder: Path, ours: set[Path]) -> None:
    """A folder that holds other clips would become a mixture that nobody asked for."""
    there = (
        path for part in ("videos", "captions") for path in sorted((folder / part).glob("*"))
    )
    for path in (path for path in there if path not in ours and not path.name.startswith(".")):
        raise VideotuneError(
            f"{path} is not part of this dataset: name an empty folder, or remove it"
        )


def encode_clip(path: Path, clip: NDArray[Any], fps: float) -> None:
    """Write frames uint8 (T, H, W, 3) as H.264 (.mp4) or VP9 (.webm), near lossless.

    Raises VideotuneError for another suffix.
    """
    vp9 = {"codec": "libvpx-vp9", "options": {"b": "0", "cpu-used": "2"}}
    codecs: dict[str, dict[str, Any]] = {".mp4": {}, ".webm": vp9}
    if path.suffix not in codecs:
        raise VideotuneError(
            f"{path}: a toy clip is written as .mp4 or .webm, not {path.suffix!r}"
        )
    write_video(path, clip, fps, crf=10, **codecs[path.suffix])
