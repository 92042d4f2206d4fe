"""``export``: write what a run has learnt in formats that other programs read.

Each file is read back.
"""

from collections.abc import Sequence
from pathlib import Path

from videotune.commands.export_options import check_export
from videotune.config import resolve, validators
from videotune.console import doing
from videotune.errors import VideotuneError
from videotune.exporter.formats import Exported
from videotune.job import overrides
from videotune.reporter.build import write_report
from videotune.runs import run_dir
from videotune.runs.checkpoint import pick
from videotune.runs.schemas import read_record, verified
from videotune.text import as_argument
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
        VideotuneError: as ``check_export`` does, and for a format that the model does
            not have.
    """
    run = Path(run)
    check_export(run, formats, step=step, merge=merge, dtype=dtype)
    resolved, spec, base = overrides.reopened(run_dir.run_settings(run))
    checkpoint = pick(run, step)
    family = build.open_models(spec, base, resolved.config)
    if dtype is not None:
        output_dtype = resolve.parse({"output_dtype": dtype}).output_dtype
        resolved = resolved.with_planned({"output_dtype": output_dtype})
        validators.refuse_what_does_not_apply(resolved.config, spec)

    doing("writing the files and reading them back")
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


def exported(run: Path, format: str) -> Path:
    """Return the run's file or folder in a format.

    Raises VideotuneError if there is none, or it was changed.
    """
    for entry in read_record(run / "exports.json"):
        if entry["format"] == format:
            return verified(run, entry)
    raise VideotuneError(
        f"{run / 'exports.json'} lists no export in the format {format}. Write it: videotune export {as_argument(run)}"
    )
