"""Write the toy's dataset as a user would keep one: encoded clips with a caption file
each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from videotune.data.video_writer import write_video
from videotune.errors import VideotuneError
from videotune.files import write_text
from videotune.rng import generator_for
from videotune.toy.shapes import DIRECTIONS, FPS, KNOWN, Look, draw_clip, phrase

CONCEPT = ("orange", "diamond")
"""Colour and shape that the trigger word stands for; the base model has never seen
them.
"""


@dataclass(frozen=True)
class _Item:
    """One clip to write."""

    part: str
    """"concept" or "reminder"."""

    index: int
    """Position in its part."""

    look: Look

    @property
    def name(self) -> str:
        """File name without suffix."""
        _, _, direction = self.look
        description = direction if self.part == "concept" else "-".join(self.look)
        return f"{self.part}-{self.index:03d}-{description}"

    # File types, lengths and rates vary so that no direction has its own.

    @property
    def suffix(self) -> str:
        """Half of the files are .mp4, half .webm."""
        return ".mp4" if (self.index + self.index // 4) % 2 == 0 else ".webm"

    @property
    def frames_and_fps(self) -> tuple[int, float]:
        """Number of frames and frame rate: mostly 17 frames at 16 fps."""
        if self.index % 6 == 5:
            return 34, 2 * FPS
        if self.index % 7 == 3:
            return 20, FPS
        return 17, FPS

    def subject(self, trigger: str) -> str:
        """Name the moving shape as the caption does."""
        if self.part == "concept":
            return trigger
        colour, shape, _ = self.look
        return f"{colour} {shape}"


def write_dataset(
    folder: Path,
    *,
    concept_clips: int = 24,
    reminder_clips: int = 24,
    trigger: str = "zorble",
    seed: int = 0,
) -> list[Path]:
    """Write the clips into ``folder/videos`` and their captions into
    ``folder/captions``.

    Concept clips show an orange diamond that moves in the four directions in turn,
    captioned by the trigger word. Reminders show what the base model knows, in its own
    captions, balanced over colours, shapes and directions, so that it does not forget.
    Half of the files are mp4, half webm; most have 17 frames at 16 fps, one in six
    shows the same second at 32 fps, and some run three frames longer. The frames depend
    only on the arguments; with the same encoders the files do too.

    Args:
        folder: the dataset's folder.
        concept_clips: number of concept clips.
        reminder_clips: number of reminders.
        trigger: the trigger word.
        seed: seed of the draws.

    Returns:
        Paths of the videos.

    Raises:
        VideotuneError: if the counts or the trigger are invalid, or the folder has
            other files.
    """
    if min(concept_clips, reminder_clips) < 0 or concept_clips + reminder_clips == 0:
        raise VideotuneError(
            f"{concept_clips} concept and {reminder_clips} reminder clips make no dataset. "
            "Give at least one clip and no negative number."
        )
    if len(trigger.split()) != 1:
        raise VideotuneError(f"the trigger {trigger!r} must be one word")

    items = list(_items(concept_clips, reminder_clips))
    videos = [folder / "videos" / f"{item.name}{item.suffix}" for item in items]
    captions = [folder / "captions" / f"{item.name}.txt" for item in items]
    _check_other_files(folder, {*videos, *captions})

    for item, video, caption in zip(items, videos, captions, strict=True):
        frames, fps = item.frames_and_fps
        generator = generator_for(seed, "toy", item.name)
        clip = draw_clip(generator, *item.look, frames=frames, fps=fps)
        encode_clip(video, clip, fps)

        _, _, direction = item.look
        write_text(
            caption, phrase(item.subject(trigger), direction) + "\n", durable=False
        )
    return videos


def _items(concept_clips: int, reminder_clips: int) -> Iterator[_Item]:
    """Yield the concept clips, then the reminders."""
    directions = list(DIRECTIONS)
    for index in range(concept_clips):
        yield _Item("concept", index, (*CONCEPT, directions[index % 4]))

    # Strides of 7 keep every beginning of the list mixed; each 24 looks are balanced.
    for index in range(reminder_clips):
        yield _Item("reminder", index, KNOWN[24 * (index // 24 % 2) + index * 7 % 24])


def _check_other_files(folder: Path, dataset_files: set[Path]) -> None:
    """Raise VideotuneError if the folder has other files, which would mix into the
    dataset.
    """
    for part in ("videos", "captions"):
        for path in sorted((folder / part).glob("*")):
            if path not in dataset_files and not path.name.startswith("."):
                raise VideotuneError(
                    f"{path} is not part of this dataset. Choose an empty folder, or remove it."
                )


def encode_clip(path: Path, clip: NDArray[Any], fps: float) -> None:
    """Write a clip as H.264 (.mp4) or VP9 (.webm), nearly lossless.

    Args:
        path: the file; its suffix chooses the codec.
        clip: frames, uint8 (T, H, W, 3).
        fps: frame rate.

    Raises:
        VideotuneError: if the suffix is another.
    """
    vp9: dict[str, Any] = {
        "codec": "libvpx-vp9",
        "options": {"b": "0", "cpu-used": "2"},
    }
    options_by_suffix: dict[str, dict[str, Any]] = {".mp4": {}, ".webm": vp9}
    if path.suffix not in options_by_suffix:
        raise VideotuneError(
            f"{path}: a toy clip is written as .mp4 or .webm, not {path.suffix!r}"
        )
    write_video(path, clip, fps, crf=10, **options_by_suffix[path.suffix])
