"""Caption files of a dataset folder that no clip uses, and where they belong."""

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from videotune.data.clip_file import (
    CAPTION_SUFFIXES,
    UNSUPPORTED_SUFFIXES,
    ClipFile,
    text_files_by_name,
)
from videotune.data.remarks import Remark
from videotune.text import counted

LISTED = 3
"""Caption files that a note names."""

NO_CAPTIONS = {"readme", "license", "licence", "credits", "changelog"}
"""Names of text files that lie beside clips and are no captions."""

NEAR = 0.85
"""How alike two names are that differ by a slip, as ``difflib`` measures it."""

MAX_COMPARISONS = 100_000
"""Pairs of names that are compared; they take a second."""


@dataclass(frozen=True)
class UnusedCaptions:
    """Finds the text files that belong to no clip."""

    clips: Sequence[ClipFile]

    files: Mapping[str, bool]
    """Files of the folder; the values are not used."""

    prefix: str
    """Beginning of all paths, which notes leave out."""

    caption_suffix: str
    """Suffix of caption files."""

    def notes(self) -> list[str]:
        """Return a note on files that lie elsewhere or end otherwise than the layout
        expects, and one on those whose name no clip has.
        """
        return [
            *self._elsewhere_notes(),
            *self._other_suffix_notes(),
            *self._nameless_notes(),
        ]

    @cached_property
    def _expected_by_stem(self) -> dict[str, str]:
        """Where the caption of a clip that has none is expected, by the clip's name with
        and without its suffix. Names that two clips have are left out.
        """
        expected: dict[str, str] = {}
        repeated = set()
        for clip in self.clips:
            if clip.caption_file is not None or clip.metadata_texts is not None:
                continue
            for name in {clip.path.stem, clip.path.name}:
                if name in expected:
                    repeated.add(name)
                expected[name] = str(clip.expected_caption)
        for name in repeated:
            del expected[name]
        return expected

    @cached_property
    def _without_clip(self) -> dict[str, str]:
        """The real path of each text file that no clip uses, by its path with the suffix
        that the dataset sets.
        """
        caption_files = text_files_by_name(self.files, self.caption_suffix)
        without_clip = dict(caption_files)
        for clip in self.clips:
            without_clip.pop(_sibling_caption(clip, self.caption_suffix), None)
            without_clip.pop(str(clip.expected_caption), None)
        return without_clip

    @cached_property
    def _elsewhere(self) -> dict[str, str]:
        """Where each text file belongs that has the name of a clip without a caption."""
        places = {}
        for path in sorted(self._without_clip):
            expected = self._expected_by_stem.get(_stem(path, self.caption_suffix))
            if expected is not None:
                places[path] = expected
        return places

    def _elsewhere_notes(self) -> list[str]:
        if not self._elsewhere:
            return []

        path, expected = next(iter(self._elsewhere.items()))
        source = self._relative(self._without_clip[path])
        verb = "move"
        if os.path.dirname(path) == os.path.dirname(expected):
            verb = "rename"

        rest = ", and the others alike" if len(self._elsewhere) > 1 else ""
        count = len(self._elsewhere)
        files = "1 caption file is" if count == 1 else f"{count} caption files are"
        return [
            Remark(
                "captions_elsewhere",
                f"{files} not where the caption of the clip is looked for: {verb} {source} "
                f"to {self._relative(expected)}{rest}",
            )
        ]

    def _other_suffix_notes(self) -> list[str]:
        """Report caption files with a suffix that the dataset does not set.

        They are renamed where other clips have captions with the suffix that is set.
        """
        count_by_suffix: Counter[str] = Counter()
        for path in self.files if self._expected_by_stem else ():
            stem, suffix = os.path.splitext(path)
            is_caption = suffix.lower() in CAPTION_SUFFIXES
            is_other = suffix.lower() != self.caption_suffix.lower()
            if is_caption and is_other:
                name = os.path.basename(stem)
                count_by_suffix[suffix] += name in self._expected_by_stem

        if not count_by_suffix.total():
            return []
        suffix, count = count_by_suffix.most_common(1)[0]
        files = "1 caption file ends" if count == 1 else f"{count} caption files end"
        has_captions = any(clip.caption_file is not None for clip in self.clips)
        if has_captions:
            remedy = f"rename {'it' if count == 1 else 'them'}"
        else:
            remedy = f"--set datasets.caption_extension={suffix} reads them"
        text = (
            f"{files} with {suffix}, and captions are looked for in files that end with "
            f"{self.caption_suffix}: {remedy}"
        )
        return [Remark("captions_elsewhere", text)]

    def _nameless_notes(self) -> list[str]:
        """Report text files that may be captions, but have the name of no clip."""
        paths = [path for path in self._orphans() if path not in self._elsewhere]
        if not paths:
            return []
        names = []
        for path in paths:
            name = self._relative(self._without_clip[path])
            near_clip = self._near_clip(path)
            names.append(f"{name} (nearly {near_clip})" if near_clip else name)
        has = "has" if len(names) == 1 else "have"
        listing = ", ".join(names[:LISTED])
        if len(names) > LISTED:
            listing += f" and {len(names) - LISTED} more"
        text = f"{counted(len(names), 'text file')} {has} no clip of the same name: {listing}"
        return [Remark("captions_without_clip", text)]

    def _orphans(self) -> list[str]:
        """Return text files without a clip that may be captions.

        They lie beside clips, in folders called captions, or are nearly named as a clip
        that lacks one. Other text files are ignored, and those of a picture or video that
        is not read, which has a note of its own.
        """
        unread_media = {
            Path(path).stem
            for path in self.files
            if path.lower().endswith(UNSUPPORTED_SUFFIXES)
        }
        folders_of_clips = {os.path.dirname(str(clip.path)) for clip in self.clips}

        orphans = []
        for path in sorted(self._without_clip):
            folder = os.path.dirname(path)
            is_captions_folder = "captions" in Path(self._relative(folder)).parts
            is_near = self._near_clip(path) is not None
            name = _stem(path, self.caption_suffix)
            if name.casefold() in NO_CAPTIONS or name in unread_media:
                continue
            if folder in folders_of_clips or is_captions_folder or is_near:
                orphans.append(path)
        return orphans

    def _near_clip(self, path: str) -> str | None:
        """Return the name of the clip without a caption that a text file is nearly named
        as; None if there is none, or if there are too many names to compare.
        """
        if len(self._expected_by_stem) * len(self._without_clip) > MAX_COMPARISONS:
            return None
        return near_name(_stem(path, self.caption_suffix), self._expected_by_stem)

    def _relative(self, path: str) -> str:
        return path.removeprefix(self.prefix)


def near_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that another one differs from by a slip; None if there is none.

    A number tells clips apart, so it must be the same.
    """
    numbers = re.findall(r"\d+", name)
    comparable = [each for each in names if re.findall(r"\d+", each) == numbers]
    return next(iter(difflib.get_close_matches(name, comparable, 1, NEAR)), None)


def _sibling_caption(clip: ClipFile, suffix: str) -> str:
    """Return the path of a text file beside a clip."""
    return os.path.splitext(str(clip.path))[0] + suffix


def _stem(path: str, suffix: str) -> str:
    """Return the name of a text file without its suffix."""
    return os.path.basename(path).removesuffix(suffix)
