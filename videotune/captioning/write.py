"""Captions beside clips: which files they go to, and a model that is asked for each, written as soon as it comes."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path

from videotune.captioning.backends import local_model, read_frames, server
from videotune.captioning.caption_cleanup import CaptionError, clean, prompt_for
from videotune.console import bar
from videotune.data.captions import split_variants, with_trigger
from videotune.data.dataset import Library
from videotune.data.file_checks import ClipProblem
from videotune.data.frame_sampling import sample_window
from videotune.data.layouts import read_folder
from videotune.errors import DONE, FAILED, SKIPPED, VideotuneError
from videotune.files import digest, write_text
from videotune.types import DETERMINISTIC_VARIANT


@dataclass(frozen=True)
class CaptionOptions:
    """Which model is asked, and for what. Without ``endpoint`` the model runs here, on one clip at a time.

    ``key_env``: the environment variable that holds the server's key; ``timeout``: seconds for a request; ``frames``: of a
    clip; ``prompt`` takes the place of the ``purpose``'s; ``trigger``: a word that each caption shall hold.
    """

    model: str
    endpoint: str | None = None
    key_env: str = "OPENAI_API_KEY"
    workers: int = 4
    timeout: float = 120.0
    frames: int = 8
    purpose: str = "general"
    prompt: str | None = None
    trigger: str | None = None
    max_words: int = 100
    overwrite: bool = False
    dry_run: bool = False


@dataclass
class CaptionResult:
    """What ``caption --json`` prints, clips by path; ``planned`` are those to be captioned, the others are ``kept``."""

    kept: list[str]
    skipped: list[dict[str, str]]
    planned: list[str] = field(default_factory=list)
    written: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    hints: list[dict[str, str]] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: no clip failed; 2: some did; 1: all did."""
        return DONE if not self.failed else SKIPPED if self.written else FAILED


def caption_files(root: Path, clips: set[str]) -> dict[Path, str]:
    """The text file that the layout reads for each of these clips, and the clip; two clips of one name share a file.

    VideotuneError where a metadata file holds captions, and where a link leads out of the dataset.
    """
    files: dict[Path, str] = {}
    for one in read_folder(root)[0]:
        file = one.caption or one.expected
        if one.listed:
            raise VideotuneError(
                f"{one.listed} holds captions, but these are text files. Move the table away first."
            )
        if not file.parent.resolve().is_relative_to(root.resolve()):
            raise VideotuneError(
                f"{file.parent} is a link out of {root}. Give the folder itself that it leads to."
            )
        if str(one.path) in clips:
            files.setdefault(file, str(one.path))
    return files


def texts_of(file: Path) -> tuple[str, ...]:
    """The captions of a text file; none where there is no such file."""
    return split_variants(file.read_text("utf-8-sig")) if file.is_file() else ()


def write_all(
    library: Library, todo: dict[Path, str], options: CaptionOptions, result: CaptionResult
) -> None:
    """Ask for every caption, and write each as soon as it comes."""
    model = options.model
    url = options.endpoint
    captioner = (
        server(url, model, options.key_env, options.timeout) if url else local_model(model)
    )
    ids = {clip.path: clip.id for clip in library.clips}
    windows = (*library.windows, *library.held_out_windows)

    def ask(row: tuple[Path, str]) -> tuple[Path, str, str, str]:
        """The file and its clip, with the caption, or why there is none."""
        name = ids[row[1]]
        times = {
            time
            for one in windows
            if one.clip_id == name
            for time in sample_window(one, DETERMINISTIC_VARIANT, 0).times
        }
        try:
            frames = read_frames(library.media[name], sorted(times), options.frames)
            prompt = prompt_for(options.purpose, options.prompt, len(frames), options.max_words)
            text = clean(captioner(frames, prompt), options.max_words)
            return *row, with_trigger(text, options.trigger), ""
        except (CaptionError, ClipProblem) as problem:
            return *row, "", str(problem)

    # a pool's threads are daemons: Ctrl-C waits for no request
    with (
        ThreadPool(options.workers) if url else nullcontext() as pool,
        bar("captioning") as progress,
    ):
        answers = pool.imap_unordered(ask, todo.items()) if pool else map(ask, todo.items())
        for done, (file, clip, text, why) in enumerate(answers, 1):
            if text:
                if old := texts_of(file):
                    file.rename(
                        file.with_name(f"{file.name}.{digest(old)[:8]}.bak")
                    )  # a name that no layout reads
                write_text(file, f"{text}\n")
                result.written.append({"clip": clip, "file": str(file), "caption": text})
            else:
                result.failed.append({"clip": clip, "why": why})
            progress.update(done, len(todo), Path(clip).name)
