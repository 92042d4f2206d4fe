"""``caption``: a vision-language model writes the captions that clips lack, each as soon as it comes."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from videotune.captioning.caption_cleanup import hints
from videotune.captioning.write import (
    CaptionOptions,
    CaptionResult,
    caption_files,
    texts_of,
    write_all,
)
from videotune.commands.check import check, token_counts
from videotune.errors import VideotuneError
from videotune.files import digest, write_text
from videotune.job.overrides import ConfigSource, to_overrides

STATE = ".videotune-captions"
"""In the dataset while an --overwrite is under way: its settings. Captions that are newer than this file are its own."""


def caption(
    config: ConfigSource = None, *, options: CaptionOptions, **overrides: Any
) -> CaptionResult:
    """Write captions where the layout of the folder ``data`` reads them; clips that have one keep it but for ``overwrite``.

    A run that was stopped continues when it is run again. VideotuneError where captions have no place in text files, and
    where no clip can get one.
    """
    words = to_overrides(config, overrides)
    root = Path(words.data or "").expanduser().absolute()
    again = options.overwrite
    if not words.data or not root.is_dir():
        raise VideotuneError(
            f"{words.data or 'data'} is no folder. Captions lie beside clips: unpack the dataset."
        )
    checked = check(replace(words, sets=(*words.sets, "missing_caption=empty")))
    files = caption_files(root, {clip.path for clip in checked.job.library.clips})
    texts = {clip: texts_of(file) for file, clip in files.items()}
    state = root / STATE
    settings = digest({**asdict(options), "workers": 0, "timeout": 0})
    if (
        again
        and not options.dry_run
        and not (state.is_file() and state.read_bytes() == settings.encode())
    ):
        write_text(state, settings)
    until = (state.stat().st_mtime_ns if state.is_file() else float("inf")) if again else 0
    todo = {
        file: clip
        for file, clip in files.items()
        if not texts[clip] or file.stat().st_mtime_ns <= until
    }
    skipped = [
        dict(zip(("clip", "reason", "detail"), row, strict=True))
        for row in checked.job.library.skipped
    ]
    result = CaptionResult(
        [clip for file, clip in files.items() if file not in todo], skipped, list(todo.values())
    )
    if todo and not options.dry_run:
        write_all(checked.job.library, todo, options, result)
    if again and not options.dry_run and not result.failed:
        state.unlink(missing_ok=True)
    texts |= {row["clip"]: (row["caption"],) for row in result.written}
    tokens = (
        None
        if checked.assumed
        else token_counts(checked.job, [text for own in texts.values() for text in own])
    )
    result.hints = hints(texts, tokens or {}, checked.job.spec.text_tokens)
    return result
