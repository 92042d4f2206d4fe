"""Caption clips by a model, and write each caption to its file as soon as it is there."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.parse import urlsplit

from videotune.bounds import ANSWER_SECONDS, CAPTION_BYTES, read_limited
from videotune.captioning.backends import Captioner, local_model, read_frames, server
from videotune.captioning.caption_cleanup import CaptionError, clean, prompt_for
from videotune.captioning.overwrite import OverwriteState
from videotune.config.data_schema import Dataset
from videotune.console import bar, doing
from videotune.data.captions import split_variants, with_trigger
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_sampling import draw_frames
from videotune.data.layouts import read_folder
from videotune.data.library import Library
from videotune.data.metadata_files import Columns
from videotune.errors import DONE, FAILED, SKIPPED, VideotuneError
from videotune.files import digest, write_bytes, write_text
from videotune.types import DETERMINISTIC_VARIANT


@dataclass(frozen=True)
class CaptionOptions:
    """Options of ``caption``: which model, and what it is asked for."""

    model: str

    endpoint: str | None = None
    """Server of the model; without it the model runs here, on one clip at a time."""

    key_env: str = "OPENAI_API_KEY"
    """Environment variable of the server's key."""

    workers: int = 4
    """Requests at a time."""

    timeout: float = ANSWER_SECONDS
    """Seconds for an answer, from the request to the answer's last byte."""

    frames: int = 8
    """Frames of a clip that the model gets."""

    purpose: str = "general"
    """Key of the built-in prompt."""

    prompt: str | None = None
    """Replaces the built-in prompt."""

    trigger: str | None = None
    """Word that each caption must contain."""

    max_words: int = 100
    overwrite: bool = False
    dry_run: bool = False

    def check(self) -> None:
        """Raise VideotuneError if the server's address is none of HTTP, or a prompt of
        the user's own is empty.
        """
        if self.endpoint is not None:
            address = urlsplit(self.endpoint)
            if address.scheme not in ("http", "https") or not address.netloc:
                raise VideotuneError(
                    f"--endpoint: {self.endpoint[:80]!r} is not the address of a server. "
                    "Give one such as http://localhost:8000/v1"
                )
        if self.prompt is not None and not self.prompt.strip():
            raise VideotuneError(
                "--prompt: it is empty. Write what to ask the model, or leave it out"
            )


@dataclass
class CaptionResult:
    """The result that ``caption --json`` prints; clips are paths."""

    kept: list[str]
    """Clips that have a caption already."""

    skipped: list[dict[str, str]]
    """Files that cannot be used."""

    planned: list[str] = field(default_factory=list)
    """Clips to be captioned."""

    written: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    hints: list[dict[str, str]] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if no clip failed, 2 if some did, 1 if all did."""
        if not self.failed:
            return DONE
        return SKIPPED if self.written else FAILED


def caption_files(root: Path, clips: set[str], dataset: Dataset) -> dict[Path, str]:
    """Return the text file in which the layout expects each clip's caption.

    Args:
        root: the dataset's folder.
        clips: paths of the clips.
        dataset: its settings: the ending of captions, folders of frames, and columns.

    Returns:
        Clips by text file. Of two clips of one name, which share a file, the first.

    Raises:
        VideotuneError: if a metadata file has captions, or a link leads out of the
            dataset.
    """
    files: dict[Path, str] = {}
    clip_files, _ = read_folder(
        root,
        caption_suffix=dataset.caption_extension,
        frame_folders=dataset.frame_folder_fps is not None,
        columns=Columns(dataset.file_column, dataset.caption_column),
    )
    for clip in clip_files:
        if clip.metadata_texts is not None:
            raise VideotuneError(
                f"{clip.metadata_row} has captions, but these would be text files. "
                "Move the metadata file away first."
            )

        file = clip.caption_file or clip.expected_caption
        if not file.parent.resolve().is_relative_to(root.resolve()):
            raise VideotuneError(
                f"{file.parent} is a link out of {root}. Give the folder that it leads to."
            )
        if str(clip.path) in clips:
            files.setdefault(file, str(clip.path))
    return files


def texts_of(file: Path) -> tuple[str, ...]:
    """Read the captions of a text file; none if it does not exist."""
    if not file.is_file():
        return ()
    content = read_limited(file, CAPTION_BYTES, "a file of captions")
    return split_variants(content.decode("utf-8-sig"))


@dataclass(frozen=True)
class _Answer:
    """The caption of one clip, or why it has none."""

    file: Path
    clip: str
    caption: str = ""
    problem: str = ""


class _ClipCaptioner:
    """Captions the clips of a library."""

    def __init__(self, library: Library, options: CaptionOptions) -> None:
        self._library = library
        self._options = options
        self._ids = {clip.path: clip.id for clip in library.clips}
        self._windows = (*library.windows, *library.held_out_windows)
        self._captioner: Captioner
        if options.endpoint:
            self._captioner = server(
                options.endpoint, options.model, options.key_env, options.timeout
            )
        else:
            self._captioner = local_model(options.model)

    def __call__(self, item: tuple[Path, str]) -> _Answer:
        """Caption a clip, given as its text file and its path."""
        file, clip = item
        options = self._options
        clip_id = self._ids[clip]
        try:
            frames = read_frames(
                self._library.media[clip_id], self._times(clip_id), options.frames
            )
            prompt = prompt_for(
                options.purpose, options.prompt, len(frames), options.max_words
            )
            text = clean(self._captioner(frames, prompt), options.max_words)
        except (CaptionError, ClipProblem) as problem:
            return _Answer(file, clip, problem=str(problem))
        return _Answer(file, clip, caption=with_trigger(text, options.trigger))

    def _times(self, clip_id: str) -> list[float]:
        """Return the seconds that the windows of a clip show, ascending."""
        times: set[float] = set()
        for window in self._windows:
            if window.clip_id == clip_id:
                times.update(draw_frames(window, DETERMINISTIC_VARIANT, 0).times)
        return sorted(times)


def write_all(
    library: Library,
    todo: dict[Path, str],
    options: CaptionOptions,
    result: CaptionResult,
    state: OverwriteState | None = None,
) -> None:
    """Caption clips, and write each caption as soon as it is there.

    Args:
        library: the dataset.
        todo: clips by text file.
        options: the model and the prompt.
        result: receives the captions and the failures.
        state: receives what is finished of an overwrite.
    """
    if state is not None:
        state.begin()
    if not options.endpoint:
        doing(f"looking for {options.model} and loading it")
    caption_clip = _ClipCaptioner(library, options)

    # The threads of a pool are daemons, so Ctrl-C does not wait for requests.
    with (
        ThreadPool(options.workers) if options.endpoint else nullcontext() as pool,
        bar("captioning") as progress,
    ):
        items = todo.items()
        answers = (
            pool.imap_unordered(caption_clip, items)
            if pool
            else map(caption_clip, items)
        )
        for done, answer in enumerate(answers, start=1):
            if answer.caption:
                if state is not None:
                    state.record(answer.file, split_variants(answer.caption))
                _write_caption(answer.file, answer.caption)
                result.written.append(
                    {
                        "clip": answer.clip,
                        "file": str(answer.file),
                        "caption": answer.caption,
                    }
                )
            else:
                result.failed.append({"clip": answer.clip, "why": answer.problem})
            progress.update(done, len(todo), Path(answer.clip).name)


def _write_caption(file: Path, caption: str) -> None:
    """Write a caption; keep an earlier one under a name that no layout reads.

    At no moment is there no caption.
    """
    old_captions = texts_of(file)
    if old_captions:
        backup = file.with_name(f"{file.name}.{digest(old_captions)[:8]}.bak")
        write_bytes(backup, file.read_bytes())
    write_text(file, f"{caption}\n")
