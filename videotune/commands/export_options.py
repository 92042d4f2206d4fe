"""The options of ``export``, checked before a library of models is imported."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from videotune.config import resolve, schema
from videotune.config.suggestions import nearest_value
from videotune.errors import VideotuneError
from videotune.exporter.lora_target import FORM_KINDS
from videotune.runs import run_dir
from videotune.runs.checkpoint import pick


def check_export(
    run: Path,
    formats: Sequence[str],
    *,
    step: int | None,
    merge: bool,
    dtype: str | None,
) -> None:
    """Check the run and the options of an export.

    Raises VideotuneError if there is no such checkpoint, format or dtype, if there is
    nothing to merge, and if --merge is used with another format than diffusers or with
    a dtype.
    """
    config = resolve.parse(run_dir.run_settings(run))
    pick(run, step)
    for name in formats:
        refuse_unknown_format(name)
    if dtype is not None:
        resolve.parse({"output_dtype": dtype})
    if merge:
        refuse_merge(config, formats, dtype)


def refuse_unknown_format(name: str) -> None:
    """Raise VideotuneError for a format that no model has."""
    known = get_args(schema.ExportFormat)
    if name in known:
        return
    remedy = nearest_value(name, known)
    if name in FORM_KINDS:
        remedy = f"; `videotune lora convert FILE --to {name}` writes it of an export"
    raise VideotuneError(
        f"--format: {name[:40]!r} is not one of {', '.join(known)}{remedy}"
    )


def refuse_merge(
    config: schema.Config, formats: Sequence[str], dtype: str | None
) -> None:
    """Raise VideotuneError if a run has no adapter, or --merge is used with a dtype, or
    a format other than diffusers.
    """
    if config.training_method == "EMBEDDING":
        raise VideotuneError(
            "--merge: new tokens are not an adapter and cannot be merged"
        )
    if config.training_method == "FINE_TUNE":
        raise VideotuneError(
            "--merge: a fine-tuned model has no adapter; its export is complete already"
        )
    if dtype is not None:
        raise VideotuneError(
            "--merge: it keeps the dtypes of the base's files. Leave --dtype out"
        )
    if set(formats) - {"diffusers"}:
        raise VideotuneError(
            "--merge: it writes a folder in diffusers layout and a file for ComfyUI. Leave --format "
            "out, or give --format diffusers for the folder alone"
        )
