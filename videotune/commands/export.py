"""``export``: write what a run has learnt in formats that other programs read.

Each file is read back.
"""

from collections.abc import Sequence
from pathlib import Path

from videotune.config import resolve, schema, validators
from videotune.errors import VideotuneError
from videotune.exporter.formats import Exported
from videotune.job import overrides
from videotune.reporter.build import write_report
from videotune.runs import run_dir
from videotune.runs.checkpoint import pick
from videotune.runs.schemas import read_record, verified
from videotune.trainer import build
from videotune.trainer.export import export_run


def export(
    run: Path | str,
    formats: Sequence[str] = (),
    *,
    step: int | None = None,
    out: Path | None = None,
    merge: bool = False,
    dtype: str | None = None,
) -> list[Exported]:
    """Export a checkpoint of a run.

    Args:
        run: the run folder.
        formats: the formats. Empty: those that the run's config names.
        step: of the checkpoint. None: the newest.
        out: the folder to write to. None: as the run's config says.
        merge: write a model that needs no adapter.
        dtype: of the exported weights, in place of the config's ``output_dtype``.

    Raises:
        VideotuneError: if there is nothing to merge, or --merge is used with a format.
    """
    run = Path(run)
    resolved, spec, base = overrides.reopened(run_dir.run_settings(run))
    checkpoint = pick(run, step)
    family = build.open_models(spec, base, resolved.config)
    if dtype is not None:
        output_dtype = resolve.parse({"output_dtype": dtype}).output_dtype
        resolved = resolved.with_planned({"output_dtype": output_dtype})
        validators.refuse_what_does_not_apply(resolved.config, spec)
    if merge:
        refuse_merge(resolved.config, formats, dtype)

    exports = export_run(
        run,
        family,
        checkpoint.result(),
        checkpoint.step,
        resolved,
        formats,
        out,
        merge=merge,
    )
    write_report(run)
    return list(exports)


def refuse_merge(
    config: schema.Config, formats: Sequence[str], dtype: str | None
) -> None:
    """Raise VideotuneError if a run has no adapter, or --merge is used with a format or
    dtype.
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
    if formats:
        raise VideotuneError(
            "--merge: it writes a folder in diffusers layout. Leave --format out"
        )


def exported(run: Path, format: str) -> Path:
    """Return the run's file or folder in a format.

    Raises VideotuneError if there is none, or it was changed.
    """
    for entry in read_record(run / "exports.json"):
        if entry["format"] == format:
            return verified(run, entry)
    raise VideotuneError(
        f"{run / 'exports.json'} lists no export in the format {format}. Write it: videotune export {run}"
    )
