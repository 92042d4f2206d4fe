"""``export``: what a run has learnt in the formats that others read, each read back before it is called done."""

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
    """Export a checkpoint of a run (the newest, or the one of ``step``); ``merge``: as a model that needs no adapter.

    ``dtype``: in the place of the config's ``output_dtype``.

    Raises VideotuneError where there is nothing to merge, or a format is named for it.
    """
    run = Path(run)
    resolved, spec, base = overrides.reopened(run_dir.run_settings(run))
    checkpoint = pick(run, step)
    family = build.open_models(spec, base, resolved.config)
    if dtype is not None:
        resolved = resolved.with_planned(
            {"output_dtype": resolve.parse({"output_dtype": dtype}).output_dtype}
        )
        validators.refuse_what_does_not_apply(resolved.config, spec)
    if merge:
        refuse_merge(resolved.config, formats, dtype)
    done = export_run(
        run, family, checkpoint.result(), checkpoint.step, resolved, formats, out, merge=merge
    )
    write_report(run)
    return list(done)


def refuse_merge(config: schema.Config, formats: Sequence[str], dtype: str | None) -> None:
    """Raise VideotuneError where a run has no adapter, or --merge stands beside a format."""
    if config.training_method == "EMBEDDING":
        raise VideotuneError("--merge: new tokens are no adapter and cannot be merged")
    if config.training_method == "FINE_TUNE":
        raise VideotuneError(
            "--merge: a fine-tuned model has no adapter; its export is whole already"
        )
    if dtype is not None:
        raise VideotuneError(
            "--merge keeps the dtypes of the base's files: it goes without --dtype"
        )
    if formats:
        raise VideotuneError(
            "--merge writes a folder in diffusers layout: it goes without --format"
        )


def exported(run: Path, format: str) -> Path:
    """The run's file or folder in a format.

    Raises VideotuneError where there is none, or its bytes are not those that were written.
    """
    found = [line for line in read_record(run / "exports.json") if line["format"] == format]
    if not found:
        raise VideotuneError(
            f"{run / 'exports.json'} lists no export in the format {format}: videotune export {run}"
        )
    return verified(run, found[0])
