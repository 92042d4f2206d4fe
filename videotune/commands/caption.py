"""``caption``: a vision-language model writes the captions that clips lack, each as soon as it comes."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Unpack

from videotune.captioning.answers import PURPOSES, CaptionError, clean, hints, prompt_for
from videotune.captioning.backends import open_captioner
from videotune.captioning.caption_files import JOURNAL, CaptionFile, caption_files, rewritten
from videotune.captioning.frames import frames_of
from videotune.commands.check import check, token_counts
from videotune.console import bar
from videotune.data.captions import with_trigger
from videotune.data.dataset import Library
from videotune.data.file_checks import ClipProblem
from videotune.errors import DONE, FAILED, SKIPPED, VideotuneError
from videotune.files import digest
from videotune.trainer.resolve_config import ConfigSource, Layers, overrides
from videotune.types import Window

GIVE_UP = 10
"""After so many failures without a caption the rest is not asked for."""


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
    """What ``caption --json`` prints, clips by path; ``planned`` are those that a dry run would caption."""

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


def caption(config: ConfigSource = None, *, options: CaptionOptions, **layers: Unpack[Layers]) -> CaptionResult:
    """Write captions where the layout of the folder ``data`` reads them; clips that have one keep it but for ``overwrite``.

    A run that was stopped continues when it is run again. VideotuneError where captions have no place in text files, and
    where no clip gets one.
    """
    if options.purpose not in PURPOSES:
        raise VideotuneError(f"--purpose takes {', '.join(PURPOSES)}, not {options.purpose!r}")
    words = overrides(config, layers)
    root = Path(words.data or "").expanduser()
    if not words.data or not root.is_dir():
        what = f"{words.data} is no folder" if words.data else "which clips? Give their folder"
        raise VideotuneError(f"{what}. Captions are text files beside clips: unpack or download a dataset first.")
    files = caption_files(root)
    checked = check(replace(words, sets=(*words.sets, "missing_caption=empty")))
    library, settings = checked.job.library, digest({**asdict(options), "workers": 0, "timeout": 0})
    done = rewritten(root, files, settings)
    usable, again = {clip.path for clip in library.clips}, options.overwrite
    todo = [one for one in files if one.clip in usable and (not one.texts or (again and one.file not in done))]
    skipped = [dict(zip(("clip", "reason", "detail"), row, strict=True)) for row in library.skipped]
    result = CaptionResult([one.clip for one in files if one.texts and one not in todo], skipped)
    if options.dry_run:
        result.planned = [one.clip for one in todo]
        return result
    if todo:
        _write_all(todo, library, options, settings, result)
    if again and not result.failed:
        (root / JOURNAL).unlink(missing_ok=True)
    texts = {one.clip: one.texts for one in files} | {row["clip"]: (row["caption"],) for row in result.written}
    tokens = {} if checked.assumed else token_counts(checked.job, [text for own in texts.values() for text in own])
    result.hints = hints(texts, tokens or {}, checked.job.spec.text_tokens)
    return result


def _write_all(
    todo: Sequence[CaptionFile], library: Library, options: CaptionOptions, settings: str, result: CaptionResult
) -> None:
    """Ask for every caption, and write each as soon as it comes. A pool's threads are daemons: Ctrl-C waits for none."""
    ids = {clip.path: clip.id for clip in library.clips}
    windows: dict[str, list[Window]] = {}
    for window in (*library.windows, *library.held_out_windows):
        windows.setdefault(window.clip_id, []).append(window)
    captioner = open_captioner(options.model, options.endpoint, options.key_env, options.timeout)

    def ask(one: CaptionFile) -> tuple[CaptionFile, str, str]:
        """The clip, and its caption or why it has none."""
        try:
            frames = frames_of(library.media[ids[one.clip]], windows[ids[one.clip]], options.frames)
            prompt = prompt_for(options.purpose, options.prompt, len(frames), options.max_words)
            text = clean(captioner.describe(frames, prompt), options.max_words)
            return one, with_trigger(text, options.trigger), ""
        except (CaptionError, ClipProblem) as problem:
            return one, "", str(problem)

    with ThreadPool(options.workers) if options.endpoint else nullcontext() as pool, bar("captioning") as progress:
        for done, (one, text, why) in enumerate(pool.imap_unordered(ask, todo) if pool else map(ask, todo), 1):
            if text:
                one.write(text, settings)
                result.written.append({"clip": one.clip, "file": str(one.file), "caption": text})
            else:
                result.failed.append({"clip": one.clip, "why": why})
            if len(result.failed) >= GIVE_UP and not result.written:
                raise VideotuneError(f"the first {GIVE_UP} clips got no caption: {why}")
            progress.update(done, len(todo), Path(one.clip).name)
