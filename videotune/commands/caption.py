"""``caption``: let a vision-language model write missing captions, each as soon as it
is there.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from videotune.captioning.caption_cleanup import hints
from videotune.captioning.overwrite import OverwriteState
from videotune.captioning.write import (
    CaptionOptions,
    CaptionResult,
    caption_files,
    texts_of,
    write_all,
)
from videotune.commands.check import CheckResult, check, token_counts
from videotune.config.data_schema import Dataset
from videotune.config.schema import Config
from videotune.data.object_files import refuse_object_store
from videotune.errors import VideotuneError
from videotune.job.overrides import ConfigSource, to_overrides


def caption(
    config: ConfigSource = None, *, options: CaptionOptions, **overrides: Any
) -> CaptionResult:
    """Write captions where the layout of the folder ``data`` reads them.

    Clips with a caption keep it, but for ``overwrite``.

    A run that was stopped continues when it is started again. Raises VideotuneError if
    captions cannot be text files, or if no clip can get one.
    """
    options.check()
    all_overrides = to_overrides(config, overrides)
    if all_overrides.data:
        refuse_object_store(
            all_overrides.data, "captions are files beside the clips, and"
        )
    root = Path(all_overrides.data or "").expanduser().absolute()
    if not all_overrides.data or not root.is_dir():
        raise VideotuneError(
            f"{all_overrides.data or 'data'} is not a folder. Captions are files beside the clips: unpack the dataset."
        )
    allow_empty = replace(
        all_overrides, sets=(*all_overrides.sets, "missing_caption=empty")
    )
    checked = check(allow_empty)
    clips = {clip.path for clip in checked.job.library.clips}
    files = caption_files(root, clips, _dataset_at(root, checked.job.config))
    texts = {clip: texts_of(file) for file, clip in files.items()}

    state = None
    if options.overwrite:
        settings = {**asdict(options), "workers": 0, "timeout": 0}
        state = OverwriteState(root, settings)
    todo = {}
    for file, clip in files.items():
        is_finished = state is None or state.is_finished(file, texts[clip])
        if not texts[clip] or not is_finished:
            todo[file] = clip

    result = CaptionResult(
        [clip for file, clip in files.items() if file not in todo],
        [_skipped_row(row) for row in checked.job.library.skipped],
        list(todo.values()),
    )
    if todo and not options.dry_run:
        write_all(checked.job.library, todo, options, result, state)
    if state is not None and not options.dry_run and not result.failed:
        state.end()

    texts |= {row["clip"]: (row["caption"],) for row in result.written}
    result.hints = _hints(checked, texts)
    return result


def _dataset_at(root: Path, config: Config) -> Dataset:
    """Return the settings of the dataset in this folder."""
    for dataset in config.datasets:
        if Path(dataset.path) == root:
            return dataset
    return Dataset(path=str(root))


def _skipped_row(row: tuple[str, str, str]) -> dict[str, str]:
    clip, reason, detail = row
    return {"clip": clip, "reason": reason, "detail": detail}


def _hints(
    checked: CheckResult, texts: Mapping[str, tuple[str, ...]]
) -> list[dict[str, str]]:
    """Return hints on the captions. Without a model nothing is counted in tokens."""
    tokens = None
    if not checked.assumed:
        captions: list[str] = []
        for clip_captions in texts.values():
            captions += clip_captions
        tokens = token_counts(checked.job, captions)
    return hints(texts, tokens or {}, checked.job.spec.text_tokens)
